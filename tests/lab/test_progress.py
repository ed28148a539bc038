"""The display off a terminal: plain lines, not too many. (The demo's tests cover a terminal's.)"""

import io

import pytest
from rich.console import Console

from softfocus.lab import progress
from softfocus.lab.progress import Display, Event, preparing, telling, told_of
from softfocus.lab.run_folder.results import Row, Setting


def test_a_log_gets_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Display("steps") as display:
        display(Event(kind="prepare", run="a", message="tokenising [stdlib]", done=7, total=100))
        for step in range(25):
            now += 1
            display(Event(kind="step", run="a", done=step, total=2400, loss=2.5, tokens_per_second=1234.0))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "tokenising [stdlib]: 7 of 100 %",
        "a: 9 of 2,400 steps  loss 2.500 1,234 tokens/s",
        "a: 19 of 2,400 steps  loss 2.500 1,234 tokens/s",
    ]


def test_the_speed_is_in_what_windows_are_counted_in(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("steps", parts="frames") as display:
        display(Event(kind="step", run="a", done=9, total=24, tokens_per_second=1234.0))
    assert capsys.readouterr().err == "a: 9 of 24 steps  1,234 frames/s\n"


def test_every_loss_of_an_evaluation_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(length=2048, setting=Setting(rope="ntk"), loss=1.25, standard_error=0.5, tokens=9, windows=2)
    with Display("tokens") as display:
        for _ in range(3):
            display(Event(kind="row", run="a", row=row))
    assert capsys.readouterr().err.splitlines() == ["a: length   2,048 dynamic NTK  loss 1.250 ± 0.500"] * 3


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("steps", quiet=True) as display:
        display(Event(kind="step", run="a", done=1, total=2))
    assert capsys.readouterr() == ("", "")


def test_steps_of_some_work_are_lines_off_a_terminal_and_one_line_on_it() -> None:
    """Names in brackets are no markup."""
    for terminal in (False, True):
        screen = Console(file=io.StringIO(), width=60, force_terminal=terminal, color_system=None)
        with telling(screen, "Study") as tell:
            tell("timing [a]")
            tell("timing [b]")
        shown = screen.file.getvalue()
        assert (shown == "Study: timing [a]\nStudy: timing [b]\n") is not terminal
        assert ("Study: timing [b]" in shown) is True


def test_a_preparation_is_told_after_two_seconds_and_then_every_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    heard: list[str] = []
    listen = told_of(heard.append)
    for second in range(25):
        now = 100.0 + second
        listen(preparing("a", "tokenising", second / 100 if second < 20 else None))
    assert heard == ["tokenising, 2 %", "tokenising, 12 %", "tokenising"]
