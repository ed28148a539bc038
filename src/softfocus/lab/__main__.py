"""`python -m softfocus.lab`: the same as `softfocus`, for `torchrun` and `accelerate launch`, which
start modules.
"""

from softfocus.lab.cli import main

main()
