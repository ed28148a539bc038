"""The command `softfocus`: errors as one line, exit code 1 for what failed and 2 for wrong use."""

import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """Run a command.

    Args:
        arguments: the words after `softfocus`; by default those of the command line.

    Raises:
        SystemExit: always: 0, 1 (failed or interrupted, said in one line on stderr) or 2 (wrong
            use).
    """
    try:
        _widen_output()
        from softfocus.lab.errors import LabError

        try:
            _run(sys.argv[1:] if arguments is None else arguments)
        except LabError as error:
            print(f"softfocus: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("softfocus"):
            raise
        remedy = "in your checkout of softfocus run pip install -e '.[lab]'"
        sys.exit(f"softfocus: {error.name} is not installed; {remedy}")
    except KeyboardInterrupt:  # while modules are imported; a command answers Ctrl-C itself
        sys.exit("softfocus: interrupted; run the command again")


_INTERRUPTED = 130
"""Typer's exit code for Ctrl-C while it reads the arguments."""


def _run(arguments: list[str]) -> None:
    from softfocus.lab.cli.app import app
    from softfocus.lab.errors import LabError, UsageError

    locale = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
    utf8 = sys.getfilesystemencoding() == "utf-8"
    for word in arguments:
        if any("\udc80" <= letter <= "\udcff" for letter in word):  # so Python keeps bytes that it cannot decode
            what = "is not UTF-8" if utf8 else "has letters that this locale does not know"
            raise UsageError(f"{word!a} {what}", "rename the file or folder" if utf8 else locale)
    try:
        app(args=arguments, prog_name="softfocus")
    except SystemExit as end:
        if end.code == _INTERRUPTED:
            raise KeyboardInterrupt from None
        raise
    except UnicodeEncodeError as error:
        if utf8:
            raise
        raise LabError(f"{error.object!a} has letters that this locale does not know", locale) from error
    except OSError as error:
        if not _stdout_is_lost():
            raise
        raise LabError(f"cannot write to stdout: {error.strerror}", "let it go where there is room") from error


def _widen_output() -> None:
    """Let output hold letters that the locale cannot spell: as UTF-8 where the locale is ASCII,
    else as question marks.
    """
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if encoding == "ascii":
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # type: ignore[union-attr]
        elif encoding != "utf-8":
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _stdout_is_lost() -> bool:
    """Whether nothing can be written to stdout. What is buffered is then dropped: Python would try
    to write it when it exits.
    """
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
