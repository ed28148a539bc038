"""The command `softfocus train`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from softfocus.lab.cli.options import Json, Quiet, write_json


def train(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a .toml file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="The run folder.", show_default="runs/RECIPE")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change a key; may be repeated.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run that is there.")] = False,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Train a recipe into a run folder.

    Shipped recipes, each alone or with one of the endings in brackets: demo(-softmax, -lssa,
    -lssa-local, -lssar, -laser, -laser-lssa-local, -hybrid, -global-heads, -larger, -slow-start,
    -one-start, -t6, -t6-lssar); toy(-llama, -stablelm, -t6); small(-global-heads, -llama,
    -stablelm, -t6); gpt2-124m(-softmax, -lssa, -lssar, -laser, -llama, -stablelm, -t6); repeats;
    mqar(-softmax, -ssmax, -cosine-log-n, -lssa, -lssar-3, -lssar-7, -lssar, -laser, -window, -nope,
    -nope-lssar, -short-rope-lssar, -hybrid, -global-heads, -one-start); passkey(-softmax, -ssmax,
    -cosine-log-n, -lssa, -lssar-3, -lssar-7, -lssar, -laser, -window, -nope, -nope-lssar,
    -hybrid, -global-heads); vit-toy; vit-small; vit-s16; bert-toy; bert-small; bert-base;
    conformer-toy; conformer-small; conformer-librispeech. Ctrl-C keeps a checkpoint; --resume goes
    on exactly there.

    Example: `softfocus train demo-lssar --out runs/p7 --set "model.mechanism=sharpened(lssa, 7)"`

    On several devices: `torchrun --nproc-per-node 8 -m softfocus.lab train gpt2-124m-lssar`
    """
    if resume and overwrite:
        raise typer.BadParameter("choose one of --resume and --overwrite")
    from softfocus.lab.progress import Display, say
    from softfocus.lab.recipes.loading import load
    from softfocus.lab.run_folder.files import RUN

    chosen = load(recipe, set_)  # before Transformers is imported: a typo is answered soon
    from accelerate import PartialState

    from softfocus.lab.train.run import train

    folder = out or Path("runs") / chosen.name
    begins = resume and not (folder / RUN).exists()
    # torchrun and accelerate number their processes; only the first one speaks
    quietly, parts = quiet or os.environ.get("RANK", "0") != "0", chosen.data.parts
    with Display("steps", quiet=quietly, parts=parts) as display:
        if chosen.model.layout and not quiet:  # which may be another one than its writer thinks
            say(display.console, f"{chosen.name}: {chosen.model.label}")
        if begins:
            say(display.console, f"{folder} holds no run to resume: training begins at step 0")
        info = train(chosen, folder, resume=resume, overwrite=overwrite, progress=display)
    if PartialState().is_main_process:
        measure = "recall" if chosen.data.kind == "task" else "evaluate"
        pace = f", {info.tokens_per_second:,.0f} {parts}/s" if info.tokens_per_second else ""
        say(
            display.console,
            f"{folder}: {info.mechanism}, {info.parameters / 1e6:.2f} M parameters, {info.steps_done} steps, "
            f"training loss {info.final_loss:.3f}{pace}\nNow: softfocus {measure} {folder}",
        )
        write_json(json, info)
