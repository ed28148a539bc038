"""Cases, an oracle and tolerances. softfocus tests its own backends with them; others can test
their kernels.

    from softfocus.testing import CASES, check
    check(my_attention, CASES[0], "lssar", torch.bfloat16)

``my_attention`` takes the arguments of :func:`softfocus.attention` that the case uses.
"""

from softfocus.testing.cases import CASES, Case
from softfocus.testing.oracle import Outcome, check, compare, run

__all__ = ["CASES", "Case", "Outcome", "check", "compare", "run"]
