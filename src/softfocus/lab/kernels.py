"""`softfocus build`: the CPU kernels compiled ahead of their first use."""

from pathlib import Path

from pydantic import BaseModel

from softfocus.backends.cpu.build import Unavailable, build
from softfocus.lab.errors import LabError


class Kernels(BaseModel):
    """The compiled kernels: where they lie, and how they were made."""

    library: Path
    compiler: str
    version: str
    flags: str
    seconds: float
    fresh: bool

    @property
    def sentence(self) -> str:
        """For people."""
        when = f"compiled in {self.seconds:.0f} s" if self.fresh else "compiled before; --force does it again"
        return f"{self.library}: {when}\n{self.version}\n{self.compiler} {self.flags}"


def make(force: bool) -> Kernels:
    """Compile them, unless they are there."""
    try:
        built = build(force)
    except Unavailable as error:
        raise LabError(error.what, error.remedy) from error
    return Kernels.model_validate(built, from_attributes=True)
