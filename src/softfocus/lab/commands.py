"""What each command takes, and the room that it calls. A room is imported when its command runs: --help stays fast."""

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from softfocus._version import __version__
from softfocus.lab.bench.command import bench
from softfocus.lab.errors import Interrupted
from softfocus.lab.inspect.command import inspect
from softfocus.lab.options import SEEDS, Json, beside, write_json


class _Commands(TyperGroup):
    """The commands; Ctrl-C in one that does not answer it in its own way is an error like the others."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
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

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `softfocus train` makes it.")]


class Axis(StrEnum):
    """What lengths are counted in."""

    multiple = "multiple"
    tokens = "tokens"


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"softfocus {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Where runs and report go.",
            show_default="runs/demo, or runs/demo-N with --seed N",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", metavar="NAME", help="Train these instead: mechanisms or recipes; may be repeated."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=SEEDS - 1, help="Of the training.", show_default="the recipe's: 0")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="A minute, to see that everything works; the numbers mean nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what is there.")] = False,
    json: Json = None,
) -> None:
    """Train Softmax, LSSA, LSSAR, LASER and a layout of local and global layers side by side.

    Shows what each costs at the training length and who is best at 16x.

    At most 15 minutes on two CPU cores. Writes results.json, figure1.png and report.html. What is finished is kept:
    started again after a failure or Ctrl-C, it goes on.

    Several seeds: run it with --seed 0, 1, 2, 3, and then `softfocus compare runs/demo-?/demo-*`

    Example: `softfocus demo --model softmax --model "sharpened(lssa, 7)" --out runs/two`
    """
    from softfocus.lab.demo import FOLDER, run_demo

    folder = out or (FOLDER if seed is None else FOLDER.with_name(f"{FOLDER.name}-{seed}"))
    write_json(json, run_demo(folder, models=model, seed=seed, fast=fast, overwrite=overwrite, console=beside(json)))


@app.command()
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

    Shipped recipes, each alone or with one of the endings in brackets: demo(-softmax, -lssa, -lssar, -laser,
    -hybrid, -larger); small; gpt2-124m(-softmax, -lssa, -lssar, -laser); repeats; mqar(-softmax, -ssmax,
    -cosine-log-n, -lssa, -lssar-3, -lssar-7, -lssar, -laser, -window, -nope, -nope-lssar); passkey(-softmax,
    -ssmax, -cosine-log-n, -lssa, -lssar-3, -lssar-7, -lssar, -laser, -window, -nope, -nope-lssar). Ctrl-C keeps a
    checkpoint; --resume goes on exactly there.

    Example: `softfocus train demo-lssar --out runs/p7 --set "model.mechanism=sharpened(lssa, 7)"`

    On several devices: `torchrun --nproc-per-node 8 -m softfocus.lab train gpt2-124m-lssar`
    """
    if resume and overwrite:
        raise typer.BadParameter("choose one of --resume and --overwrite")
    from softfocus.lab.progress import Display
    from softfocus.lab.recipe import load
    from softfocus.lab.results import RUN

    chosen = load(recipe, set_)  # before Transformers is imported: a typo is answered soon
    from softfocus.lab.train import train

    folder = out or Path("runs") / chosen.name
    begins = resume and not (folder / RUN).exists()
    # torchrun and accelerate number their processes; only the first one speaks
    with Display("steps", quiet=quiet or os.environ.get("RANK", "0") != "0") as display:
        if begins:
            display.console.print(f"{folder} holds no run to resume: training begins at step 0", highlight=False)
        info = train(chosen, folder, resume=resume, overwrite=overwrite, progress=display)
    if _is_main_process():
        measure = "recall" if chosen.data.source is None else "evaluate"
        pace = f", {info.tokens_per_second:,.0f} tokens/s" if info.tokens_per_second else ""
        display.console.print(
            f"{folder}: {info.mechanism}, {info.parameters / 1e6:.2f} M parameters, {info.steps_done} steps, "
            f"training loss {info.final_loss:.3f}{pace}\nNow: softfocus {measure} {folder}",
            highlight=False,
        )
        write_json(json, info)


@app.command()
def evaluate(
    run: Run,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="1k,2k,16k, or 1x,2x,16x the training length; the recipe's if left out."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Validation tokens a length; the recipe's if left out.")
    ] = None,
    rope: Annotated[
        str, typer.Option(metavar="LIST", help="Scalings of RoPE: trained, ntk (dynamic) and yarn; or none.")
    ] = "trained,ntk",
    window: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEYS",
            help="Attention windows, with RoPE as trained: 128, 1x the training length, or none; may be repeated.",
            show_default="1x",
        ),
    ] = None,
    sinks: Annotated[
        int, typer.Option(min=0, help="Keys of each window that stay the first of the text (StreamingLLM).")
    ] = 0,
    buckets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Edges of position buckets, in tokens or as 1x.", show_default="powers of two"
        ),
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a forward pass: lower it if memory is short.")
    ] = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Loss of a run over length, with standard errors: as trained, with dynamic NTK scaling, and with a window.

    Every length reads the same validation tokens. The result is kept in the run folder as evaluation.json; losses at
    other lengths and settings that it held stay there, unless a new longest length or --tokens mean other text; that is
    then said.

    Example: `softfocus evaluate runs/demo-lssar --lengths 1x,4x,16x --rope trained,yarn --window 1x --sinks 4`
    """
    from softfocus.lab.lengths import parse, settings_of
    from softfocus.lab.progress import Display
    from softfocus.lab.recipe import load
    from softfocus.lab.results import RECIPE, load_run

    info = load_run(run)
    wanted = parse(lengths or load(run / RECIPE).evaluate.lengths, info.train_length)
    settings = settings_of(rope, window or ["1x"], sinks, info.train_length)
    edges = parse(buckets, info.train_length, "--buckets") if buckets else None
    from softfocus.lab.evaluate import evaluate
    from softfocus.lab.points import singles
    from softfocus.lab.table import loss_table

    with Display("tokens", quiet=quiet) as display:
        found = evaluate(
            run,
            wanted,
            settings=settings,
            tokens=tokens,
            buckets=edges,
            batch_tokens=batch_tokens,
            progress=display,
        )
    if not write_json(json, found):
        _print(loss_table(singles([found])))


def _lengths_and_windows(run: Path, lengths: str, window: str | None) -> tuple[list[int], Sequence[int | None]]:
    """What --lengths and --window mean for a run, in tokens; a window of None is none."""
    from softfocus.lab.lengths import parse
    from softfocus.lab.results import load_run

    trained = load_run(run).train_length
    return parse(lengths, trained), [None] if window is None else parse(window, trained, "--window")


@app.command()
def recall(
    run: Run,
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="1k,2k,16k, or 1x,2x,16x the training length.")
    ] = "1x,4x,16x,64x",
    window: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Let every attention see only so many of the last keys: 64, or 1x,2x."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences a length.")] = 64,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a forward pass: lower it if memory is short.")
    ] = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Share of right answers over length, of a run that was trained on a generated task (`mqar-*`, `passkey-*`).

    Beyond the training length every answer lies at least half the sequence back. Rows are kept in the run folder as
    recall.json, with a figure; what is there is not measured again, so a run that was stopped goes on.

    Example: `softfocus recall runs/mqar-lssar --lengths 1x,4x,16x,64x`
    """
    from softfocus.lab.progress import Display

    wanted, windows = _lengths_and_windows(run, lengths, window)
    from softfocus.lab.recall import recall
    from softfocus.lab.recall_report import recall_tables, save_recall_figure

    with Display("tokens", quiet=quiet) as display:
        for keys in windows:
            found = recall(run, wanted, window=keys, sequences=sequences, batch_tokens=batch_tokens, progress=display)
    save_recall_figure(found, run)
    if not write_json(json, found):
        _print(recall_tables(found))


@app.command()
def induction(
    run: Run,
    lengths: Annotated[
        str, typer.Option(metavar="LIST", help="1k,2k,16k, or 1x,2x,16x the training length.")
    ] = "1x,16x",
    ngram: Annotated[int, typer.Option(min=2, help="Tokens that have to repeat, the predicted one included.")] = 4,
    window: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Let every attention see only so many of the last keys: 64, or 1x,2x."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Validation tokens a length; the recipe's if left out.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a forward pass: lower it if memory is short.")
    ] = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Loss of a run on tokens that repeat something, by how far back it stood: does the model use far context?

    Every length predicts the same tokens. Rows are kept in the run folder as induction.json, with a figure; what is there
    is not measured again.

    Example: `softfocus induction runs/repeats --lengths 1x,16x --ngram 4`
    """
    from softfocus.lab.progress import Display

    wanted, windows = _lengths_and_windows(run, lengths, window)
    from softfocus.lab.induction import induction
    from softfocus.lab.induction_report import induction_table, save_induction_figure

    with Display("tokens", quiet=quiet) as display:
        for keys in windows:
            found = induction(
                run, wanted, ngram=ngram, window=keys, tokens=tokens, batch_tokens=batch_tokens, progress=display
            )
    save_induction_figure(found, run)
    if not write_json(json, found):
        _print(induction_table(found))


@app.command()
def heads(
    run: Run,
    length: Annotated[str, typer.Option(metavar="LENGTH", help="2k, or 16x the training length.")] = "16x",
    window: Annotated[
        str, typer.Option(metavar="KEYS", help="What a narrowed head sees: 64, or 1x the training length.")
    ] = "1x",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Validation tokens a row; the recipe's if left out.")
    ] = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a forward pass: lower it if memory is short.")
    ] = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Which heads do far keys disturb? The loss in long windows when one head alone sees only the last keys.

    A head that gains from a window can be given one in a layout. Rows are kept in the run folder as heads.json, with a
    figure; what is there is not measured again.

    Example: `softfocus heads runs/demo-lssar --length 16x`
    """
    from softfocus.lab.errors import UsageError
    from softfocus.lab.lengths import parse
    from softfocus.lab.progress import Display
    from softfocus.lab.results import load_run

    trained = load_run(run).train_length
    tokens_a_window, keys = parse(length, trained, "--length"), parse(window, trained, "--window")
    if len(tokens_a_window) != 1 or len(keys) != 1 or keys[0] >= tokens_a_window[0]:
        raise UsageError(f"--length {length} with --window {window}", "give one length, and one shorter window")
    from softfocus.lab.heads import heads
    from softfocus.lab.heads_report import heads_table, save_heads_figure, sentence

    with Display("tokens", quiet=quiet) as display:
        found = heads(
            run, tokens_a_window[0], window=keys[0], tokens=tokens, batch_tokens=batch_tokens, progress=display
        )
    save_heads_figure(found, run)
    if not write_json(json, found):
        _print(heads_table(found))
        _print(sentence(found))


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Evaluated run folders, or results.json of earlier comparisons."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where the report goes.")] = Path(
        "runs/compare"
    ),
    axis: Annotated[Axis, typer.Option(help="Count lengths in multiples of the training length, or in tokens.")] = (
        Axis.multiple
    ),
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The report's heading.", show_default="Loss over length")
    ] = None,
    json: Json = None,
) -> None:
    """Who is better where, by how much, and whether that is more than noise: one table, one figure, one report.

    Runs whose recipes differ by seed alone are grouped, and shown as mean and spread.

    Example: `softfocus compare runs/demo-softmax runs/demo-lssar --out runs/two`
    """
    from softfocus.lab.compare import compare

    write_json(json, compare(runs, out, axis=axis.value, title=title, console=beside(json)))


@app.command()
def study(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A shipped study's name, or a .toml file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Where runs go.", show_default="runs/STUDY")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="LIST", help="0,1,2: train each row with these; the study's if left out.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="as many as there are cores")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say what it will take, and stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Train again what is there.")] = False,
    json: Json = None,
) -> None:
    """Train and measure a table of runs, several seeds each, and compare them.

    A study is a TOML file: title, base (a recipe), seeds, and a table [rows.NAME] of changed keys for each row. What is
    finished is kept: started again after a failure or Ctrl-C, it goes on.

    Example: `softfocus study layouts --seeds 0,1,2 --jobs 2`
    """
    from softfocus.lab.study import run_study, seeds_of

    wanted = None if seeds is None else seeds_of(seeds)
    folder = out or Path("runs") / Path(study).stem
    made = run_study(
        study,
        folder,
        seeds=wanted,
        jobs=jobs,
        overwrite=overwrite,
        estimate_only=estimate,
        console=beside(json),
    )
    if made is not None:
        write_json(json, made)


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="At most so many new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0001, max=1, help="Sample from this much of the probability.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS - 1, help="The same seed gives the same text.")] = 0,
    json: Json = None,
) -> None:
    """Text from a run, token by token with a KV cache, and what the cache takes.

    Example: `softfocus generate runs/demo-lssar --prompt "class " --tokens 400`
    """
    from softfocus.lab.results import load_run

    load_run(run)  # before torch is imported: a wrong folder is answered soon
    from softfocus.lab.generate import generate

    aside = json is not None and str(json) == "-"
    typer.echo(prompt, nl=False, err=aside)
    made = generate(
        run,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        write=lambda text: typer.echo(text, nl=False, err=aside),
    )
    typer.echo(err=aside)
    typer.echo(made.note, err=True)
    write_json(json, made)


@app.command()
def mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="A name, or a combination such as 'laser(sharpened(lssa, 3))'.")
    ] = None,
    json: Json = None,
) -> None:
    """The catalogue: every mechanism's name, equation and source; with a NAME, all there is to know about it.

    Example: `softfocus mechanisms lssar`
    """
    from softfocus.lab.catalogue import details, everything, table

    found = everything() if name is None else [details(name)]
    if not write_json(json, found if name is None else found[0]):
        _print(table(found, detailed=name is not None))


@app.command()
def doctor(json: Json = None) -> None:
    """What is installed, which backends run here and why others do not, and what to do about it.

    Example: `softfocus doctor`
    """
    from rich.console import Console

    from softfocus.lab.doctor import examine, table

    with Console(stderr=True).status("looking; on a GPU the kernels are compiled first, which takes a minute"):
        found = examine()
    if not write_json(json, found):
        _print(table(found))
    if any(check.status == "fail" for check in found.checks):
        raise typer.Exit(1)


@app.command()
def build(
    force: Annotated[bool, typer.Option("--force", help="Compile again what is there.")] = False,
    json: Json = None,
) -> None:
    """Compile the CPU kernels for this machine, ahead of the first call that would.

    They are kept in $SOFTFOCUS_KERNEL_CACHE or ~/.cache/softfocus/kernels. $CXX names the compiler, $SOFTFOCUS_CXXFLAGS
    adds flags; what is compiled with either is found where they are set alike. SOFTFOCUS_KERNELS=off does without the
    kernels: attention then runs on the slower tiled backend.

    Example: `softfocus build --force`
    """
    from softfocus.lab.kernels import make

    made = make(force)
    if not write_json(json, made):
        typer.echo(made.sentence)


app.command()(inspect)
app.command()(bench)


def _is_main_process() -> bool:
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def _print(renderable: Any) -> None:
    beside(None).print(renderable)
