"""The one error that the lab shows to people."""

from __future__ import annotations


class LabError(Exception):
    """Something that the reader of the command line can put right: a missing file, a misspelt field, a full disk.

    `str(error)` is one line, "what; remedy": what is wrong with which thing, then what to do about it. The command line
    prints that line and leaves with exit code 1; anything that is not a LabError is a bug and keeps its traceback.

    Args:
        what: what is wrong, naming the thing ("corpus.jsonl, line 3: no field 'text'").
        remedy: what to do about it ("name the field with text_field").
    """

    def __init__(self, what: str, remedy: str) -> None:
        # Both go to Exception, so that the error survives pickling between processes
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return " ".join(f"{self.what}; {self.remedy}".split())
