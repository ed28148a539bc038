"""A warning that points at whoever called softfocus."""

import sys
import warnings


def warn(line: str, category: type[Warning]) -> None:
    """``warnings.warn`` as from the first frame outside softfocus."""
    frame, levels = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("softfocus."):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(line, category, stacklevel=levels)


# As torch.compiler.assume_constant_result does, without importing the whole compiler: torch.compile
# cannot trace this, and warns while it compiles.
warn._dynamo_marked_constant = True  # type: ignore[attr-defined]
