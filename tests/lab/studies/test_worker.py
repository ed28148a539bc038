"""What a worker of a study does with a run that an earlier call has trained."""

import io
from pathlib import Path

import pytest

from softfocus.lab.recipes.loading import load
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import RUN, load_measured, load_run
from softfocus.lab.run_folder.results import Evaluation
from softfocus.lab.studies import crew, worker


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_is_measured_again_on_other_text(tiny: Path, tmp_path: Path, masked: bool) -> None:
    """evaluate.tokens of the study's file decides, not of the run that is there."""
    changes = ["name=a"]
    if masked:
        changes += ["model.architecture=modernbert", "data.masked=0.2", "evaluate.lengths=1x"]

    def call(tokens: int) -> Recipe:
        recipe = load(tiny, [*changes, f"evaluate.tokens={tokens}"])
        (tmp_path / "a.toml").write_text(recipe.to_toml())
        worker._work(str(tmp_path / "a.toml"), tmp_path / "a", False, io.StringIO())
        assert load_measured(tmp_path / "a", Evaluation).tokens == tokens
        (job,) = crew.plan(tmp_path, [recipe], ["a"])
        assert job.status == "finished"
        return recipe

    first = call(1024)
    before = (tmp_path / "a" / RUN).read_bytes()
    call(2048)
    assert (tmp_path / "a" / RUN).read_bytes() == before, "it is not trained again"
    assert load_run(tmp_path / "a").status == "complete", "all its files have its token"
    (job,) = crew.plan(tmp_path, [first], ["a"])
    assert job.status == "waiting"
