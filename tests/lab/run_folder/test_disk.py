"""Sizes of folders, and as people read them."""

import os
from pathlib import Path
from typing import Any

import pytest

from softfocus.lab.run_folder.disk import folder_bytes, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (999_600, "1.0 MB"),
        (99_960, "100 KB"),
        (12_340, "12.3 KB"),
        (836_400_000, "836 MB"),
        (49_000_000, "49.0 MB"),
        (1_500_000_000, "1.5 GB"),
        (1_234_567_000_000, "1,235 GB"),
    ],
)
def test_no_size_is_rounded_to_nothing(size: int, text: str) -> None:
    assert size_text(size) == text


def test_files_that_vanish_are_left_out_of_a_folders_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As checkpoints do while a training runs: before they are looked at, or after."""
    (tmp_path / "checkpoint").mkdir()
    for name, size in (("stays", 3), ("before", 5), ("after", 7)):
        (tmp_path / "checkpoint" / name).write_bytes(b"x" * size)
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if Path(path).name == "before":
            os.unlink(path)
        found = real(path, **options)
        if Path(path).name == "after":
            os.unlink(path)
        return found

    monkeypatch.setattr(os, "stat", stat)
    assert folder_bytes(tmp_path) == 10
    assert folder_bytes(tmp_path) == 3
    assert folder_bytes(tmp_path / "nowhere") == 0
