"""T6 in the lab: its recipes train, and whatever measures a run of another architecture measures
one of T6.
"""

from pathlib import Path

import pytest

from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.heads import heads
from softfocus.lab.evaluate.loss import evaluate
from softfocus.lab.generate import generate
from softfocus.lab.inspect.run import inspect
from softfocus.lab.model import build, build_config
from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.results import AS_TRAINED, Setting
from softfocus.lab.train.run import train


def short(name: str, tiny: Path, *overrides: str) -> Recipe:
    """Two steps of a shipped recipe on the tests' corpus."""
    fast = ["train.steps=2", "train.warmup=1", "train.length=32", "train.batch=4"]
    return load(name, [*fast, f"data.source={tiny.parent}/*.txt", "data.validation_fraction=0.3", *overrides])


@pytest.mark.parametrize("name", ["demo-t6", "demo-t6-lssar"])
def test_recipes_train(name: str, tiny: Path, tmp_path: Path) -> None:
    info = train(short(name, tiny), tmp_path / "run")
    assert (info.status, info.steps_done) == ("complete", 2)


def test_a_run_is_measured_like_any_other(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(short("demo-t6-lssar", tiny, "train.learning_rate=2e-2", "model.config.num_hidden_layers=1"), folder)
    ntk, window = Setting(rope="ntk"), Setting(window=32)
    settings = [AS_TRAINED, ntk, window, Setting(rope="yarn"), Setting(window=32, sinks=2)]
    rows = {
        (row.setting, row.length): row.loss for row in evaluate(folder, [32, 64], settings=settings, tokens=512).rows
    }
    assert len({rows[setting, 64] for setting in settings}) == 5
    assert rows[ntk, 32] == rows[window, 32] == rows[AS_TRAINED, 32]
    assert {row.head for row in heads(folder, 64, tokens=512).rows} >= {0, 1, 2, 3}
    assert inspect(folder, [32], tokens=512)[0].rows
    made = generate(folder, "x" * 20, tokens=30)
    assert made.cache_bytes == made.tokens * (2 + 2) * (4 + 32) * 4  # ranks, heads and their size, bytes


def test_parameters_are_those_of_the_demo() -> None:
    ours, demo = (sum(p.numel() for p in build(load(name), 257).parameters()) for name in ("demo-t6", "demo"))
    assert abs(ours / demo - 1) < 0.03


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.config.k_rank=0", "k_rank: got 0, expected 1 or more; correct it"),
        ("model.config.head_dim=7", "head_dim: got 7, expected an even number, as RoPE turns pairs; correct it"),
        ("model.config.qrank=6", "has no key 'model.config.qrank'; did you mean 'model.config.q_rank'?"),
    ],
)
def test_mistakes_are_said_in_one_line(override: str, says: str) -> None:
    with pytest.raises(LabError) as caught:
        build_config(load("demo-t6", [override]), 257)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rope_head_by_head_is_refused_in_one_line() -> None:
    layout = 'model.layout={ "*" = [{ heads = 2, rope = 0.5 }, { heads = 2 }] }'
    with pytest.raises(LabError, match=r"all heads of a layer need the same share and base; .*model.layout"):
        build(load("demo-t6", [layout]), 257)
