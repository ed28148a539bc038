"""docs/transformers.md, and docs/limitations.md of T6: they show the committed results; and the
callback of the former anneals.
"""

import json
import re

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainerCallback, TrainingArguments

import softfocus
import softfocus.hf
from softfocus.hf.t6 import factored
from softfocus.lab.report.points import Group, cell

from .committed import FAR, HERE, RESULTS, ROOT, WINDOWED, by_label, by_row, claim, loss, minus
from .tables import COLUMNS, said, shown, shown_losses, table, tables_of

PAGE = (ROOT / "docs/transformers.md").read_text()
GUIDE, SHOWN = " ".join(PAGE.split()), tables_of(PAGE)


def test_the_size_of_t6s_cache_is_the_measured_one():
    t6, softmax = (
        json.loads((RESULTS / name).read_text()) for name in ("t6-cache/t6.json", "layout-cache/softmax.json")
    )
    sizes = [f"{one['cache_bytes'] / one['tokens']:,.0f}" for one in (t6, softmax)]
    assert f"takes {sizes[0]} bytes a token ([results](results/t6-cache))" in GUIDE
    assert f"demo's Softmax (2 heads of 64) takes {sizes[1]}." in GUIDE


def test_what_decoding_from_factors_takes_is_the_measured():
    lines = json.loads((RESULTS / "t6-decode/results.json").read_text())["lines"]
    chosen = [line for line in lines if line["chosen"]]
    assert {line["tokens"] for line in chosen} == {2048, 4096, 8192}
    lssar, softmax = (
        [share for line in chosen if line["mechanism"] == name for share in line["shares"]]
        for name in ("lssar", "softmax")
    )
    assert len(lssar) == len(softmax) == 9
    assert f"takes {min(lssar):.2f} to {max(lssar):.2f} of the time with LSSAR" in GUIDE
    assert f"{min(softmax):.2f} to {max(softmax):.2f} with softmax" in GUIDE
    assert f"ranks of at most {factored.MAX_RANK} and keys of 2^22 numbers" in GUIDE
    assert factored.MIN_NUMBERS == 1 << 22
    assert f"{-(-factored.MIN_NUMBERS // (34 * 64)):,} tokens for the 34 heads of 64" in GUIDE


T6_ROWS = {
    "softmax": "Softmax",
    "laser-lssa-local": "LASER over LSSA, every other layer local",
    "lssar-annealed": "LSSAR in every layer, p annealed from 1 to 15",
    "lssar": "LSSAR in every layer, p = 15 throughout",
}


def t6_table() -> str:
    by, rows = by_row("t6-mechanisms"), []
    assert by.keys() == T6_ROWS.keys()
    for row, name in T6_ROWS.items():
        assert len(by[row].evaluations) == 3
        costs = (
            ["", ""] if row == "softmax" else [said(minus(by, row, "softmax", *at)) for at in ((HERE,), (WINDOWED,))]
        )
        rows.append([name, *shown_losses(by[row]), *costs])
    return table(["T6, three seeds", *COLUMNS, "1x, minus Softmax", "16x, window, minus Softmax with it"], rows)


TABLES = {"t6": t6_table}


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_are_the_committed_results(mark):
    assert SHOWN[mark] == TABLES[mark](), f"docs/transformers.md should show:\n{TABLES[mark]()}"


def test_every_table_is_tested():
    assert SHOWN.keys() == TABLES.keys()


def test_the_losses_of_t6_are_the_measured_ones():
    by = by_row("t6-mechanisms")
    cost, annealed = (minus(by, row, "softmax") for row in ("lssar", "lssar-annealed"))
    assert cost.sure
    assert annealed.sure
    assert f"costs {cost.value:.2f} at the training length, {annealed.value:.2f} with the power annealed" in GUIDE
    t6, lssar, full_rank, gpt_neox = (loss("t6", run) for run in ("demo-t6", "demo-t6-lssar", "t6k4", "lssar4"))
    assert minus(by, "laser-lssa-local", "softmax").sure is False, "inconclusive"
    losses = {row: [cell(group, *at).loss for at in (FAR, WINDOWED)] for row, group in by.items()}
    assert all(far > windowed for far, windowed in losses.values()), "lower with a window"
    assert f"had {t6:.3f} with softmax and {lssar:.3f} with LSSAR, and {full_rank:.3f} with `q_rank=4`" in GUIDE
    assert f"A GPT-NeoX with LSSAR and T6's heads has {gpt_neox:.3f};" in GUIDE
    slow = loss("demo-slow-start", "demo-lssar") - loss("demo-slow-start", "demo-softmax")
    assert f"costs {slow:.2f} from the same initial weights of 0.02" in GUIDE
    assert f"and {minus(by_label('layouts'), 'LSSAR', 'Softmax').value:.3f} with init std 0.09." in GUIDE


def rises_of(group: Group) -> list[float]:
    """From 1x to 16x, as trained, by seed."""
    return [far - near for near, far in zip(*(cell(group, *at).values for at in (HERE, FAR)), strict=True)]


def test_the_cost_of_t6_is_the_measured_one():
    by = by_row("t6-mechanisms")
    costs = [f"{minus(by, row, 'softmax').value:.2f}" for row in ("lssar", "lssar-annealed")]
    said = "T6 costs {} at the training length**, {} with the power annealed"
    limits = " ".join((ROOT / "docs/limitations.md").read_text().split())
    assert said.format(*costs) in limits
    rises = sorted(rises_of(by["lssar"]))

    annealed = sorted(rises_of(by["lssar-annealed"]))

    text = f"it rose by {rises[0]:.2f} to {rises[-1]:.2f} in three of three seeds, and with p annealed by"
    assert f"{text} {annealed[0]:.2f} to {annealed[-1]:.2f}." in limits
    single = {
        "t6": ("demo-t6-lssar", "t6k4", "lssar4"),
        "learning-rates-slow-start": ("lssar-half-s0",),
        "learning-rates": ("lssar-four-times-s0",),
    }
    pairs = {run: (loss(study, run), loss(study, run, 2048)) for study, some in single.items() for run in some}
    others = {run: far - near for run, (near, far) in pairs.items()}
    assert f"it rose by {others['demo-t6-lssar']:.3f} and {others['t6k4']:.3f}." in limits
    for run, says in (
        ("lssar-half-s0", "it rose by {:.3f} ({:.3f} to {:.3f})"),
        ("lssar4", "by {:.3f} ({:.3f} to {:.3f}"),
    ):
        assert says.format(others[run], *pairs[run]) in limits
    assert f"it rose by {others['lssar-four-times-s0']:.3f} (one seed)" in limits
    (slow,) = by_label("lssar-annealed").values()
    assert f"by {min(rises_of(slow)):.3f} to {max(rises_of(slow)):.3f} in three of three." in limits

    figure = claim("softplus-figure-1").group("lssar")
    rise = cell(figure, 16.0, "dynamic NTK").minus(cell(figure, *HERE))
    assert f"by {shown(rise)} with init std 0.09 (eight seeds, dynamic NTK)" in limits
    assert len(figure.evaluations) == 8


def test_the_callback_anneals_the_power(tmp_path):
    """That of re-weighted heads alone: 1 at the first of ten steps, 15 from the seventh on."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Annealing" in block)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=64, max_position_embeddings=64))
    softfocus.hf.use(model, {"0": "softmax", "*": "lssar"})
    scope = {"softfocus": softfocus, "model": model}
    exec(code, scope)
    powers = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            first, second = (layer[0].mechanism.power for layer in map(softfocus.hf.layout_of(model).layer, (0, 1)))
            assert first is None
            powers.append(second)

    ids = torch.arange(16)
    arguments = TrainingArguments(str(tmp_path), max_steps=10, report_to=[], save_strategy="no", use_cpu=True)
    rows = [{"input_ids": ids, "labels": ids}] * 16
    Trainer(model, arguments, train_dataset=rows, callbacks=[scope["callback"], Watch()]).train()
    assert powers == pytest.approx([1 + 14 * min(1, step / 6) for step in range(10)])


def test_the_best_weights_run_under_their_own_power(tmp_path):
    """Trainer's load_best_model_at_end restores weights, and the power is in the config."""
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class Annealing" in block)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=64, max_position_embeddings=64))
    softfocus.hf.use(model, "lssar")
    scope = {"softfocus": softfocus, "model": model}
    exec(code, scope)
    ids = torch.arange(16)
    often = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, report_to=[], use_cpu=True, learning_rate=3.0, load_best_model_at_end=True, **often
    )
    rows = [{"input_ids": ids, "labels": ids.flip(0)}] * 4
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[scope["callback"]])
    trainer.train()
    best = GPTNeoXForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert softfocus.hf.layout_of(model) == softfocus.hf.layout_of(best)
    assert softfocus.hf.layout_of(best).layer(0)[0].mechanism.power < 15, "not that of the last step"
