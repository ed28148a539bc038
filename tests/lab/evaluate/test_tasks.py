"""Zero-shot tasks: what the harness is told of a run's model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from softfocus.lab import model as models
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate.forward import token_losses
from softfocus.lab.evaluate.tasks import answer


@pytest.mark.long
def test_answers_are_scored_in_the_precision_of_the_training(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    run = Path(shutil.copytree(trained, tmp_path / "run"))
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace('precision = "float32"', 'precision = "bf16"'))
    scores: list[float] = []

    def scored(model: Any, **_: Any) -> None:
        ((score, _greedy),) = model.loglikelihood([Instance("loglikelihood", {}, ("line 1:", " aa is 1"), 0)])
        scores.append(score)
        raise OSError("this is enough")

    monkeypatch.setattr(lm_eval, "simple_evaluate", scored)
    with pytest.raises(LabError, match="this is enough"):
        answer(run)
    windows = torch.tensor([list(b"line 1: aa is 1")])
    exact, rounded = (-float(token_losses(models.load(run), windows, bf16=bf16)[0, 6:].sum()) for bf16 in (False, True))
    assert scores == [pytest.approx(rounded, rel=1e-6)]
    assert rounded != pytest.approx(exact, rel=1e-5)
