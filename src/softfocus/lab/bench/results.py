"""What a benchmark found: the one schema, which run.py writes and the table and the figure read."""

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from softfocus.lab.run_folder.disk import write_atomically
from softfocus.lab.run_folder.results import Machine, Record

RESULTS = "results.json"
FIGURE = "figure.png"

Parity = Literal["passed", "failed", "not checked"]


class Spread(Record):
    """Numbers of several rounds: seconds, or ratios."""

    median: float
    lower_quartile: float
    upper_quartile: float
    minimum: float
    rounds: int


class Memory(Record):
    """Peak memory of one call in a process of its own, above what the process held before the
    inputs were made.
    """

    bytes: int
    method: Literal["VmHWM", "ru_maxrss", "cuda"] = Field(
        description="how it was read: Linux's resettable peak, the peak since the process began (a lower bound), or "
        "torch's count on the device"
    )


class SubjectResult(Record):
    """One subject in one cell."""

    name: str
    computes: str
    backend: str = Field(default="", description="which of softfocus's backends ran, or of torch's kernels")
    refused: str | None = Field(default=None, description="why it was not measured")
    parity: Parity = "not checked"
    parity_message: str = ""
    seconds: Spread | None = Field(default=None, description="of one call")
    tflops: float | None = Field(
        default=None, description="operations of attention's products, 1e12 a second, at the median"
    )
    ratio: Spread | None = Field(default=None, description="its time over sdpa's time in the same round")
    memory: Memory | None = None
    memory_ratio: float | None = Field(default=None, description="its peak memory over sdpa's")
    memory_message: str = Field(default="", description="why its memory could not be measured")


class CellResult(Record):
    """One mechanism x what x length: everything in it was measured in turn, in one process."""

    mechanism: str
    what: Literal["forward", "backward", "decode"]
    length: int
    parity: Parity = Field(description="failed where any subject's check failed: nothing was then timed")
    subjects: list[SubjectResult]

    @property
    def failures(self) -> list[str]:
        """What the parity checks that failed say."""
        return [f"{one.name}: {one.parity_message}" for one in self.subjects if one.parity == "failed"]

    @property
    def noise(self) -> float:
        """How much the time of the same call varied: sdpa's upper quartile over its lower one; 1
        where it was not timed.
        """
        sdpa = self.subject("sdpa")
        return sdpa.seconds.upper_quartile / sdpa.seconds.lower_quartile if sdpa and sdpa.seconds else 1.0

    def subject(self, name: str) -> SubjectResult | None:
        """A subject's result, or None if it was not there."""
        return next((one for one in self.subjects if one.name == name), None)


class Benchmark(Record):
    """A whole run, with what it takes to believe it."""

    commit: str = Field(description="of the source tree, '+dirty' when it was changed; or the package's version")
    dirty: bool = Field(description="whether the source tree was changed")
    versions: dict[str, str]
    machine: Machine
    device: str
    threads: int = Field(description="that torch computes with on the CPU")
    dtype: str
    batch: int
    tokens: int | None = Field(
        default=None, description="batch times length of every cell that is not decoding, if given"
    )
    heads: int
    head_dim: int
    lengths: list[int]
    mechanisms: list[str]
    what: list[Literal["forward", "backward", "decode"]]
    seed: int = Field(description="of the inputs and of the order in each round")
    seconds: float = Field(description="the budget of a cell")
    started: datetime
    finished: datetime | None = Field(default=None, description="None where the run was stopped")
    cells: list[CellResult] = Field(default=[])

    @property
    def failed(self) -> list[CellResult]:
        """The cells whose parity check failed."""
        return [cell for cell in self.cells if cell.parity == "failed"]


def save_benchmark(folder: Path, benchmark: Benchmark) -> None:
    """Write results.json, whole or not at all."""
    write_atomically(folder / RESULTS, benchmark.model_dump_json(indent=2) + "\n")
