"""What tasks.json holds: zero-shot accuracy in tasks of lm-evaluation-harness."""

from pydantic import Field

from softfocus.lab.run_folder.results import Record


class TaskRow(Record):
    """One task."""

    task: str
    accuracy: float = Field(description="`acc` of the harness, not normalised by length")
    standard_error: float = Field(description="of the questions")
    normalised: float | None = Field(
        default=None, description="`acc_norm` of the harness, normalised by length; None where it has none"
    )

    right: list[int] = Field(description="by question, in the harness's order: 1 where `acc` has it right, else 0")


class Tasks(Record):
    """Zero-shot accuracy of one run's model."""

    run: str = Field(description="the run's name")
    token: str = Field(default="", description="the run's")
    harness: str = Field(description="version of lm_eval")
    rows: list[TaskRow]
