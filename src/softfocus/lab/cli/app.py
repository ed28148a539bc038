"""The commands and what they have in common. What a command needs is imported when it runs, so that
--help stays fast.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from softfocus._version import __version__
from softfocus.lab.allocator import keep_freed_memory
from softfocus.lab.cli.about import build, doctor, mechanisms
from softfocus.lab.cli.bench import bench
from softfocus.lab.cli.claims import recipes, report, reproduce
from softfocus.lab.cli.compare import compare, demo, study
from softfocus.lab.cli.inspect import inspect
from softfocus.lab.cli.measure import classify, evaluate, generate, heads, induction, recall
from softfocus.lab.cli.train import train
from softfocus.lab.errors import Interrupted, LabError


class _Commands(TyperGroup):
    """The commands. Ctrl-C is a LabError, unless a command handles it itself."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            # torchrun stops the processes that are left; what had failed before says more than that
            if isinstance(stop.__context__, LabError):
                raise stop.__context__ from None
            raise Interrupted("interrupted", "run the command again") from None


app = typer.Typer(
    name="softfocus",
    cls=_Commands,
    help="Softplus attention that stays in focus: train small language models with any attention mechanism, "
    "and see whose loss stays flat beyond the training length.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"softfocus {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "bench":  # it times what the allocator does by default
        keep_freed_memory()


_COMMANDS = (
    demo,
    train,
    evaluate,
    recall,
    induction,
    heads,
    classify,
    compare,
    study,
    recipes,
    reproduce,
    report,
    generate,
    mechanisms,
    doctor,
    build,
    inspect,
    bench,
)
for _command in _COMMANDS:
    app.command()(_command)
