"""Runs made up for the tests of reports, where no number was ever measured; and a tiny recipe with
a real run of it.
"""

import json
import math
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from softfocus.lab.report.results import Entry
from softfocus.lab.run_folder.results import AS_TRAINED, Bucket, Evaluation, Machine, Row, RunInfo, Setting

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def make_row(
    length: int,
    loss: float,
    setting: Setting = AS_TRAINED,
    *,
    train_length: int = 128,
    spread: float = 0.01,
    gain: float = 0.0,
    by_document: bool = True,
) -> Row:
    """A row over two documents of equal size, one as much above the loss as the other is below: its
    standard error.

    Beyond the training length the loss is lower than within it by the gain.
    """
    windows = max(2, 4096 // length)
    share = min(1.0, train_length / length)  # of the positions that are within the training length
    parts = [(0, min(train_length, length), loss + gain * (1 - share))]
    parts += [(train_length, length, loss - gain * share)] if length > train_length else []
    side = 0.0 if math.isnan(spread) else spread
    return Row(
        length=length,
        setting=setting,
        loss=loss,
        standard_error=spread,
        tokens=windows * length,
        windows=windows,
        documents=[3, 8] if by_document else [],
        windows_by_document=[windows // 2] * 2 if by_document else [],
        buckets=[
            Bucket(
                start=start,
                end=end,
                loss=mean,
                standard_error=spread,
                tokens=windows * (end - start),
                sums=[(mean + sign * side) * windows / 2 * (end - start) for sign in (-1, 1)] if by_document else [],
            )
            for start, end, mean in parts
        ],
    )


def make_entry(
    mechanism: str,
    plain: Sequence[float],
    ntk: Sequence[float] | None = None,
    window: Sequence[float] = (),
    *,
    train_length: int = 128,
    seed: int = 1,
    name: str | None = None,
    standard_error: float = 0.01,
    gain: float = 0.0,
    by_document: bool = True,
    commit: str = "0123456789abcdef0123456789abcdef01234567",
    vocabulary: int = 256,
    train_loss: Sequence[tuple[int, float]] = ((10, 5.5), (20, 2.25)),
    evaluated: dict[str, Any] | None = None,
    recipe: str | None = None,
) -> Entry:
    """A finished run whose losses at 1x, 2x, 4x ... are given: as trained, with NTK (from 1x or
    from 2x on), with a window.

    With NTK they are the same unless they are given; () for a run that was not measured with it.
    """
    ntk = plain if ntk is None else ntk
    name = name or f"demo-{mechanism}"
    first = 0 if len(ntk) == len(plain) else 1
    points = [(AS_TRAINED, power, loss) for power, loss in enumerate(plain)]
    points += [(Setting(rope="ntk"), power, loss) for power, loss in enumerate(ntk, start=first)]
    points += [(Setting(window=train_length), power, loss) for power, loss in enumerate(window)]
    rows = [
        make_row(
            train_length << power,
            loss,
            setting,
            train_length=train_length,
            spread=standard_error,
            gain=gain,
            by_document=by_document,
        )
        for setting, power, loss in points
    ]
    common: dict[str, Any] = {"mechanism": mechanism, "seed": seed, "train_length": train_length}
    return Entry(
        info=RunInfo(
            name=name,
            recipe=f"demo-{mechanism}",
            status="complete",
            parameters=812_345,
            commit=commit,
            versions={"torch": "2.13.0", "softfocus": "0.1.0"},
            machine=Machine(cpu="A processor", cores=2, device="cpu"),
            started=START,
            finished=START + timedelta(minutes=3, seconds=30),
            vocabulary=vocabulary,
            steps=20,
            steps_done=20,
            tokens_per_step=4096,
            train_loss=list(train_loss),
            tokens_per_second=15_321.5,
            corpus_key="c0ffee",
            **common,
        ),
        evaluation=Evaluation(
            **{
                "run": name,
                "vocabulary": vocabulary,
                "tokens": 4096,
                "rows": rows,
                "corpus_key": "c0ffee",
                "longest": 2048,
                "documents": 2,
                **common,
                **(evaluated or {}),
            }
        ),
        recipe=f'name = "{name}"\n\n[model]\nmechanism = "{mechanism}"\n\n[train]\nseed = {seed}\n'
        if recipe is None
        else recipe,
    )


@pytest.fixture
def fabricate() -> Any:
    """`make_entry`: a finished run with losses that the test chooses."""
    return make_entry


@pytest.fixture(scope="session")
def four() -> list[Entry]:
    """The four runs of the demo, in the shape that the papers claim."""
    return [
        make_entry(
            "softmax", [1.40, 1.5, 1.8, 2.2, 2.80], [1.40, 1.45, 1.6, 2.0, 2.38], [1.40, 1.39, 1.38, 1.37, 1.36]
        ),
        make_entry("lssa", [1.42, 2.0, 2.7, 3.1, 3.40], [1.42, 1.6, 2.2, 2.6, 3.00]),
        make_entry("lssar", [1.50, 1.5, 1.5, 1.55, 1.56], [1.50, 1.5, 1.6, 1.65, 1.68]),
        make_entry("laser", [1.41, 1.6, 1.9, 2.3, 2.75], [1.41, 1.5, 1.7, 2.0, 2.45]),
    ]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A recipe that trains in a second, on a corpus of its own; the token cache is the tests' own
    too.
    """
    folder = tmp_path_factory.mktemp("tiny")
    words = [
        f"line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} is {i * i % 97} and not {i * 7 % 89}.\n" for i in range(4000)
    ]
    for number in range(10):  # documents, so that there is something to hold out and to cluster by
        (folder / f"{number}.txt").write_text("".join(words[400 * number : 400 * number + 400]))
    recipe = folder / "tiny.toml"
    recipe.write_text(
        f"""
        [model]
        architecture = "gpt_neox"
        mechanism = "lssar"
        [model.config]
        hidden_size = 32
        num_hidden_layers = 1
        num_attention_heads = 2
        intermediate_size = 64
        tie_word_embeddings = true
        [data]
        source = "{folder}/*.txt"
        validation_fraction = 0.3
        [train]
        length = 32
        batch = 8
        steps = 10
        learning_rate = 1e-2
        warmup = 2
        log_every = 1
        checkpoint_every = 4
        [evaluate]
        lengths = "1x,2x,4x"
        tokens = 2048
        """
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTFOCUS_CACHE", str(folder / "cache"))
        yield recipe


@pytest.fixture(scope="session")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny recipe. Shared: copy it before changing anything in it."""
    from softfocus.lab.recipes.loading import load
    from softfocus.lab.train.run import train

    folder = tmp_path_factory.mktemp("runs") / "trained"
    train(load(tiny), folder)
    return folder


@pytest.fixture
def stopped_at() -> Callable[..., int]:
    """Stops a fine-tuning at a step (0: never), and returns the first step that it made."""
    from softfocus.lab.progress import Event

    def stop(step: int, tuned: Callable[[Callable[[Event], None]], object]) -> int:
        steps: list[int] = []

        def listen(event: Event) -> None:
            if event.kind == "step":
                steps.append(event.done)
                if event.done == step:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) if step else nullcontext():
            tuned(listen)
        return steps[0]

    return stop


@pytest.fixture
def reseal() -> Callable[[Path], None]:
    """Writes the checksums of a run's model again, after a test has changed it."""
    from softfocus.lab.run_folder.files import MODEL, load_run
    from softfocus.lab.run_folder.manifest import MANIFEST, seal

    def written(run: Path) -> None:
        (run / MODEL / MANIFEST).unlink(missing_ok=True)
        seal(run / MODEL, load_run(run, complete=False).token)

    return written


@pytest.fixture
def early() -> Callable[[Path], None]:
    """Makes a run one of an early version, which has no token and no checksums."""
    from softfocus.lab.run_folder.files import MODEL, RECIPE, RUN
    from softfocus.lab.run_folder.manifest import MANIFEST

    def made(run: Path) -> None:
        info = json.loads((run / RUN).read_text())
        del info["token"]
        (run / RUN).write_text(json.dumps(info))
        (run / RECIPE).write_text((run / RECIPE).read_text().partition("\n")[2])
        (run / MODEL / MANIFEST).unlink()

    return made


@pytest.fixture
def workers_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The workers of a study run in this process, each to its end before the next. A process of its
    own takes five seconds of a core to start; test_demo.py has them. Returns the recipes' paths,
    filled as they run.
    """
    from softfocus.lab.studies import pool, worker

    ran: list[str] = []

    class Worker:
        def __init__(self, command: Sequence[str], **_: Any) -> None:
            module = "softfocus.lab.studies.worker"
            assert command[1:3] == ["-m", module], "of several processes"
            lines = tmp_path / f"lines-{len(ran)}"
            ran.append(command[3])
            with monkeypatch.context() as patch, lines.open("w") as out:
                patch.setattr(worker, "_own_stdout", lambda: out)
                self.code = worker.main(list(command[3:]))
            self.stdout = lines.open()

        def wait(self, timeout: float | None = None) -> int:
            return self.code

    names = ("PIPE", "DEVNULL", "TimeoutExpired")
    like = SimpleNamespace(Popen=Worker, **{name: getattr(subprocess, name) for name in names})
    monkeypatch.setattr(pool, "subprocess", like)
    return ran


def write_shard(path: Path, tokens: int, seed: int, end: int = 0) -> None:
    """Made-up tokens as FineWeb's shards hold them: documents that start with the end of one."""
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    ids = np.random.default_rng(seed).integers(97, 123, tokens).astype("<u2")
    ids[::700] = end
    path.write_bytes(header.tobytes() + ids.tobytes())


@pytest.fixture(scope="session")
def shard() -> Any:
    """`write_shard`: a file of tokens, as FineWeb's."""
    return write_shard


def asked(path: str) -> Any:
    """Four questions in the columns that the data set of this name has on the hub; None where no
    task asks for it.
    """
    from datasets import Dataset, DatasetDict

    answers = ["a cat", "a dog", "an owl", "a cow"]
    known: dict[str, dict[str, list[Any]]] = {
        "allenai/ai2_arc": {
            "question": [f"which is number {n}?" for n in range(4)],
            "choices": [{"text": answers, "label": ["A", "B", "C", "D"]}] * 4,
            "answerKey": ["A", "B", "C", "D"],
        },
        "Rowan/hellaswag": {
            "activity_label": ["Animals"] * 4,
            "ctx_a": [f"This is number {n}" for n in range(4)],
            "ctx_b": ["it is"] * 4,
            "endings": [answers] * 4,
            "label": ["0", "1", "2", "3"],
        },
        "baber/piqa": {"goal": answers, "sol1": ["yes"] * 4, "sol2": ["no"] * 4, "label": [0, 1, 0, 1]},
        "allenai/sciq": {
            "question": answers,
            "support": ["", "It is one.", "", "It is."],
            **{name: [f"{name} {n}" for n in range(4)] for name in ("distractor1", "distractor2", "distractor3")},
            "correct_answer": ["yes"] * 4,
        },
    }
    if path not in known:
        return None
    return DatasetDict(dict.fromkeys(("train", "validation", "test"), Dataset.from_dict(known[path])))


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks' questions on the hub are made up; other data sets are what they are."""
    import datasets

    own = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda path, *a, **k: asked(path) or own(path, *a, **k))
