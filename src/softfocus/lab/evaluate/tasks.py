"""Zero-shot tasks by lm-evaluation-harness, which is in the extra [tasks]."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from softfocus.lab import model as models
from softfocus.lab.errors import LabError, first_line
from softfocus.lab.progress import Event, Listener, silent
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import RECIPE, load_run, measures, save_measured
from softfocus.lab.run_folder.results import TaskRow, Tasks

TASKS = ("arc_easy", "hellaswag", "piqa", "sciq")
"""Those of the softplus paper's published version."""
BATCH = 16


def require() -> None:
    """Refuse to start what ends with tasks where they cannot be measured.

    Raises:
        LabError: lm_eval is not installed.
    """
    if find_spec("lm_eval") is None:
        what = "evaluate.also = ['tasks'] takes lm_eval, which is not installed"
        raise LabError(what, "in your checkout of softfocus run pip install -e '.[tasks]'")


@measures
def answer(folder: Path, *, progress: Listener = silent) -> Tasks:
    """Measure the accuracy of a run's model in :data:`TASKS`, zero-shot, in the precision of its
    training. The harness fetches its questions from the hub.

    Args:
        folder: a finished run of a recipe with text.
        progress: called with "step" events.

    Returns:
        What tasks.json holds.

    Raises:
        LabError: lm_eval is not installed, or cannot get or measure a task.
    """
    require()
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM

    info, recipe = load_run(folder), load(folder / RECIPE)
    progress(Event(kind="step", run=info.name, done=0, total=len(TASKS)))
    wrapped = HFLM(
        pretrained=models.load(folder),
        tokenizer=models.load_tokenizer(folder),
        batch_size=BATCH,
        max_length=info.train_length,
        mixed_precision_dtype=torch.bfloat16 if recipe.train.bf16 else None,
        softmax_dtype=torch.float32,
    )
    try:
        measured = lm_eval.simple_evaluate(model=wrapped, tasks=list(TASKS), num_fewshot=0, log_samples=True)
    except Exception as error:  # the harness, the hub's client and the network each raise their own
        what = f"lm_eval cannot measure {', '.join(TASKS)}: {first_line(error)}"
        raise LabError(what, "check the network, or update lm_eval") from error
    rows = [_row(task, measured["results"][task], measured["samples"][task]) for task in TASKS]
    found = Tasks(run=info.name, token=info.token, harness=version("lm_eval"), rows=rows)
    save_measured(folder, found)
    progress(Event(kind="step", run=info.name, done=len(TASKS), total=len(TASKS)))
    return found


def _row(task: str, metrics: dict[str, Any], samples: list[dict[str, Any]]) -> TaskRow:
    return TaskRow(
        task=task,
        accuracy=metrics["acc,none"],
        standard_error=metrics["acc_stderr,none"],
        normalised=metrics.get("acc_norm,none"),
        right=[round(sample["acc"]) for sample in sorted(samples, key=lambda sample: sample["doc_id"])],
    )
