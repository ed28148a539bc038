"""Commands about softfocus itself and this machine: mechanisms, doctor, build."""

from typing import Annotated

import typer

from softfocus.lab.cli.options import Json, print_table, write_json
from softfocus.lab.errors import LabError


def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="A name, or a combination such as 'laser(sharpened(lssa, 3))'.")
    ] = None,
    json: Json = None,
) -> None:
    """The catalogue: every mechanism's name, equation and source; with a NAME, all there is to know
    about it.

    Example: `softfocus mechanisms lssar`
    """
    from softfocus.lab.catalogue import details, everything, table

    found = everything() if name is None else [details(name)]
    if not write_json(json, found if name is None else found[0]):
        print_table(table(found, detailed=name is not None))


def doctor(json: Json = None) -> None:
    """What is installed, which backends run here and why others do not, and what to do about it.

    Example: `softfocus doctor`
    """
    from rich.console import Console

    from softfocus.lab.doctor import examine, table

    with Console(stderr=True).status("looking; on a GPU the kernels are compiled first, which takes a minute"):
        found = examine()
    if not write_json(json, found):
        print_table(table(found))
    if any(check.status == "fail" for check in found.checks):
        raise typer.Exit(1)


def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again what is there.")] = False,
    json: Json = None,
) -> None:
    """Compile the CPU kernels for this machine, ahead of the first call that would.

    They are kept in $SOFTFOCUS_KERNEL_CACHE or ~/.cache/softfocus/kernels. $CXX names the compiler,
    $SOFTFOCUS_CXXFLAGS adds flags; what is compiled with either is found where they are set alike.
    SOFTFOCUS_KERNELS=off does without the kernels: attention then runs on the slower tiled backend.

    Example: `softfocus build --force`
    """
    from softfocus.backends.cpu import build as kernels

    try:
        result = kernels.build(force)
    except kernels.Unavailable as error:
        raise LabError(error.what, error.remedy) from error
    if not write_json(json, result):
        when = f"compiled in {result.seconds:.0f} s" if result.fresh else "compiled before; --force does it again"
        typer.echo(f"{result.library}: {when}\n{result.version}\n{result.compiler} {result.flags}")
