"""Run another program's module with ``softfocus.hf`` imported, so that it loads models with a
mechanism.

python -m softfocus.hf lm_eval --model hf --model_args pretrained=checkpoint --tasks lambada_openai
"""

import runpy
import sys
from importlib.util import find_spec

import softfocus.hf  # noqa: F401  what this module is for


def main() -> None:
    """Take the module's name and its arguments from the command line."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m softfocus.hf MODULE [ARGUMENTS], such as: python -m softfocus.hf lm_eval --help")
    if find_spec(sys.argv[1].partition(".")[0]) is None:
        sys.exit(f"softfocus.hf: there is no module {sys.argv[1]!r} in this environment; install it, or check its name")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
