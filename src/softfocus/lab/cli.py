"""The command `softfocus`: errors as one line, exit code 1 for what failed and 2 for wrong use."""

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the words after `softfocus`; by default those of the command line.

    Raises:
        SystemExit: always: 0, 1 (failed or interrupted, said in one line on stderr) or 2 (wrong use).
    """
    try:
        from softfocus.lab.commands import app
        from softfocus.lab.errors import LabError

        try:
            app(args=arguments, prog_name="softfocus")
        except LabError as error:
            print(f"softfocus: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("softfocus"):
            raise
        remedy = "pip install 'softfocus[lab]', or in a checkout pip install -e '.[lab]'"
        sys.exit(f"softfocus: {error.name} is not installed; {remedy}")
