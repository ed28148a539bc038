"""Commands that ask a finished run: evaluate, recall, induction, heads, classify, generate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from softfocus.lab.cli.options import (
    SEEDS,
    BatchTokens,
    Json,
    Quiet,
    Run,
    console_beside,
    print_table,
    takes_stdout,
    write_json,
)
from softfocus.lab.errors import UsageError
from softfocus.lab.run_folder.results import NGRAM, SEQUENCES

Lengths = Annotated[str, typer.Option(metavar="LIST", help="1k,2k,16k, or 1x,2x,16x the training length.")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Validation tokens a length; the recipe's if left out.")]
Windows = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Let every attention see only so many of the last keys: 64, or 1x,2x."),
]

_ROPE = "trained,ntk"
_RECALL = "1x,4x,16x,64x"


def evaluate(
    run: Run,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="1k,2k,16k, or 1x,2x,16x the training length; the recipe's if left out."),
    ] = None,
    tokens: Tokens = None,
    rope: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Scalings of RoPE: trained, ntk (dynamic) and yarn; or none.",
            show_default=_ROPE,
        ),
    ] = None,
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
    mechanism: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run this in place of what was trained, too; may be repeated."),
    ] = None,
    buckets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Edges of position buckets, in tokens or as 1x.", show_default="powers of two"
        ),
    ] = None,
    batch_tokens: BatchTokens = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Loss of a run over length, with standard errors: as trained, with dynamic NTK scaling, and
    with a window.

    Every length reads the same validation tokens. The result is kept in the run folder as
    evaluation.json; losses at other lengths and settings that it held stay there, unless a new
    longest length or --tokens mean other text; that is then said.

    Example: `softfocus evaluate runs/demo-lssar --lengths 1x,4x,16x --rope trained,yarn --window 1x
    --sinks 4`
    """
    from softfocus.lab.progress import Display
    from softfocus.lab.recipes.lengths import parse, settings_of
    from softfocus.lab.recipes.loading import load
    from softfocus.lab.run_folder.files import RECIPE, load_run

    info, recipe = load_run(run), load(run / RECIPE)
    if recipe.data.kind in ("masked", "images", "speech"):
        given = {"lengths": lengths, "rope": rope, "window": window, "sinks": sinks}
        given |= {"mechanism": mechanism, "buckets": buckets}
        if recipe.data.kind != "masked":
            given["tokens"] = tokens
        _samples(run, recipe.data.parts, given, tokens, batch_tokens, quiet, json)
        return
    wanted = parse(lengths or recipe.evaluate.lengths, info.train_length)
    scalings = _ROPE if rope is None else rope
    # The recipe's mechanisms run under each scaling, and are left out where there is none
    own = [] if scalings.strip() == "none" else recipe.evaluate.mechanisms
    settings = settings_of(scalings, window or ["1x"], sinks, info.train_length, mechanism or own)
    if window:
        _refuse_wide([setting.window for setting in settings], wanted[-1])
    edges = parse(buckets, info.train_length, "--buckets") if buckets else None
    from softfocus.lab.evaluate.loss import evaluate
    from softfocus.lab.report.points import singles
    from softfocus.lab.report.table import loss_table

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
        print_table(loss_table(singles([found])))


def _samples(
    run: Path,
    parts: str,
    options: dict[str, Any],
    tokens: int | None,
    batch_tokens: int,
    quiet: bool,
    json: Path | None,
) -> None:
    """Loss and error rate of what is not read from left to right: lengths, RoPE and windows have no
    meaning there.
    """
    if given := [name for name, value in options.items() if value]:
        raise UsageError(f"--{given[0]} is for runs that go on with a text, and {run} is none", "leave it out")
    from softfocus.lab.evaluate.samples import evaluate_samples
    from softfocus.lab.progress import Display
    from softfocus.lab.report.points import singles
    from softfocus.lab.report.table import loss_table

    with Display(parts, quiet=quiet, parts=parts) as display:
        found = evaluate_samples(run, tokens=tokens, batch_tokens=batch_tokens, progress=display)
    if not write_json(json, found):
        print_table(loss_table(singles([found])))


def recall(
    run: Run,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="1k,2k,16k, or 1x,2x,16x the training length.",
            show_default=f"{_RECALL}, those that hold a sequence of the task",
        ),
    ] = None,
    window: Windows = None,
    sequences: Annotated[int, typer.Option(min=1, max=2**20, help="Sequences a length.")] = SEQUENCES,
    batch_tokens: BatchTokens = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Share of right answers over length, of a run that was trained on a generated task (`mqar-*`,
    `passkey-*`). A run that was trained on text is asked for passkeys.

    Beyond the training length every answer lies at least half the sequence back. Rows are kept in
    the run folder as recall.json, with a figure; what is there is not measured again, so a run that
    was stopped goes on.

    Example: `softfocus recall runs/mqar-lssar --lengths 1x,4x,16x,64x`
    """
    from softfocus.lab.progress import Display, say

    wanted, windows = _lengths_and_windows(run, lengths or _RECALL, window)
    from softfocus.lab.evaluate.recall import least_length, recall
    from softfocus.lab.report.recall import FIGURE, recall_tables, save_recall_figure
    from softfocus.lab.run_folder.files import RECALL

    if lengths is None:
        least = least_length(run)
        if short := [f"{length:,}" for length in wanted if length < least]:
            wanted = [length for length in wanted if length >= least] or [least]
            what = f"{', '.join(short)} tokens cannot hold a sequence of this task, which takes {least:,}"
            say(console_beside(json), f"Note: {what}; measured are {', '.join(f'{length:,}' for length in wanted)}")
    with Display("tokens", quiet=quiet) as display:
        for keys in windows:
            found = recall(run, wanted, window=keys, sequences=sequences, batch_tokens=batch_tokens, progress=display)
    save_recall_figure(found, run)
    if not write_json(json, found):
        print_table(recall_tables(found), run / RECALL, run / FIGURE)


def induction(
    run: Run,
    lengths: Lengths = "1x,16x",
    ngram: Annotated[int, typer.Option(min=2, help="Tokens that have to repeat, the predicted one included.")] = NGRAM,
    window: Windows = None,
    tokens: Tokens = None,
    batch_tokens: BatchTokens = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Loss of a run on tokens that repeat something, by how far back it stood: does the model use
    far context?

    Every length predicts the same tokens. Rows are kept in the run folder as induction.json, with a
    figure; what is there is not measured again.

    Example: `softfocus induction runs/repeats --lengths 1x,16x --ngram 4`
    """
    from softfocus.lab.progress import Display

    wanted, windows = _lengths_and_windows(run, lengths, window)
    from softfocus.lab.evaluate.induction import induction
    from softfocus.lab.report.induction import FIGURE, induction_table, save_induction_figure
    from softfocus.lab.run_folder.files import INDUCTION

    with Display("tokens", quiet=quiet) as display:
        for keys in windows:
            found = induction(
                run, wanted, ngram=ngram, window=keys, tokens=tokens, batch_tokens=batch_tokens, progress=display
            )
    save_induction_figure(found, run)
    if not write_json(json, found):
        print_table(induction_table(found), run / INDUCTION, run / FIGURE)


def heads(
    run: Run,
    length: Annotated[str, typer.Option(metavar="LENGTH", help="2k, or 16x the training length.")] = "16x",
    window: Annotated[
        str, typer.Option(metavar="KEYS", help="What a narrowed head sees: 64, or 1x the training length.")
    ] = "1x",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Validation tokens a row; the recipe's if left out.")
    ] = None,
    batch_tokens: BatchTokens = 4096,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Which heads do far keys disturb? The loss in long windows when one head alone sees only the
    last keys.

    A head that gains from a window can be given one in a layout. Rows are kept in the run folder as
    heads.json, with a figure; what is there is not measured again.

    Example: `softfocus heads runs/demo-lssar --length 16x`
    """
    from softfocus.lab.progress import Display
    from softfocus.lab.recipes.lengths import parse
    from softfocus.lab.run_folder.files import load_run

    trained = load_run(run).train_length
    tokens_a_window, keys = parse(length, trained, "--length"), parse(window, trained, "--window")
    if len(tokens_a_window) != 1 or len(keys) != 1 or keys[0] >= tokens_a_window[0]:
        raise UsageError(f"--length {length} with --window {window}", "give one length, and one shorter window")
    from softfocus.lab.evaluate.heads import heads
    from softfocus.lab.report.heads import FIGURE, heads_table, save_heads_figure, sentence
    from softfocus.lab.run_folder.files import HEADS

    with Display("tokens", quiet=quiet) as display:
        found = heads(
            run, tokens_a_window[0], window=keys[0], tokens=tokens, batch_tokens=batch_tokens, progress=display
        )
    save_heads_figure(found, run)
    if not write_json(json, found):
        print_table(heads_table(found))
        print_table(sentence(found), run / HEADS, run / FIGURE)


def classify(
    run: Run,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Labelled examples: train.jsonl and val.jsonl, as SuperGLUE has them."),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Of --data: passage,question, the last kept whole; all that hold text if left out."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of --data: passes over train.jsonl; 3 if left out.")
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
) -> None:
    """Fine-tune a copy of a run's model on text classification: of labelled examples, or does one
    piece of text go on where another one ends?

    Without --data the pieces are of the run's corpus: one after the other, or of two documents.
    Accuracy is that on held-out documents; guessing has a half. The result is kept in the run
    folder as classification.json, that of --data as labelled.json; the model stays as it is.
    Started again after it was stopped, it goes on from its last checkpoint.

    Example: `softfocus classify runs/demo-laser`

    Example: `softfocus classify runs/demo-laser --data RTE --fields premise,hypothesis`
    """
    from softfocus.lab.evaluate.classify import classify, classify_labelled
    from softfocus.lab.progress import Display, say

    for name, value in (("--fields", fields), ("--epochs", epochs)):
        if data is None and value is not None:
            raise UsageError(f"{name} is of labelled examples, and there is no --data", "name their folder with --data")
    if data is not None:
        chosen = [field.strip() for field in (fields or "").split(",") if field.strip()]
        with Display("steps", quiet=quiet) as display:
            row = classify_labelled(run, data, fields=chosen, epochs=epochs, progress=display)
        if not write_json(json, row):
            error = f"± {row.standard_error:.1%}" if row.held_out > 1 else "(its error is unknown)"
            right = f"{row.accuracy:.1%} {error}"
            said = f"{row.data}: {right} of {row.held_out:,} held-out examples are right after fine-tuning; "
            said += f"the commonest label of the training is right in {row.commonest:.1%}"
            if row.cut:
                said += f". {row.cut:,} examples were longer than the training length: their last tokens were read"
            say(console_beside(None), said, wrap=True)
        return
    with Display("steps", quiet=quiet) as display:
        found = classify(run, progress=display)
    if not write_json(json, found):
        right = f"{found.accuracy:.1%} ± {found.standard_error:.1%}"
        said = f"{found.run}: {right} of {sum(found.counts):,} held-out examples are right after fine-tuning"
        say(console_beside(None), said, wrap=True)


def _lengths_and_windows(run: Path, lengths: str, window: str | None) -> tuple[list[int], Sequence[int | None]]:
    """What --lengths and --window mean for a run, in tokens; a window of None is none."""
    from softfocus.lab.recipes.lengths import parse
    from softfocus.lab.run_folder.files import load_run

    trained = load_run(run).train_length
    wanted, windows = parse(lengths, trained), [None] if window is None else parse(window, trained, "--window")
    _refuse_wide(windows, wanted[-1])
    return wanted, windows


def _refuse_wide(windows: Sequence[int | None], longest: int) -> None:
    """A window that is longer than every text is none, and would be reported as one."""
    if wide := [keys for keys in windows if keys and keys > longest]:
        raise UsageError(
            f"--window: one of {wide[0]} keys hides nothing at the longest length, {longest} tokens",
            "name a smaller window, or a longer one of --lengths",
        )


def generate(
    run: Run,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with.")] = "def ",
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, max=2**24, help="At most so many new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0001, max=1, help="Sample from this much of the probability.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS - 1, help="The same seed gives the same text.")] = 0,
    json: Json = None,
) -> None:
    """Text from a run, token by token with a KV cache, and what the cache takes.

    Example: `softfocus generate runs/demo-lssar --prompt "class " --tokens 400`
    """
    from softfocus.lab.run_folder.files import load_run

    load_run(run)  # before torch is imported: a wrong folder is answered soon
    from softfocus.lab.generate import generate

    aside = takes_stdout(json)
    result = generate(
        run,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        write=lambda text: typer.echo(text, nl=False, err=aside),
    )
    typer.echo(err=aside)
    typer.echo(result.note, err=True)
    write_json(json, result)
