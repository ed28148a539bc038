"""docs/transformers.md, and docs/limitations.md of T6: they show the committed results."""

import json

from .committed import RESULTS, ROOT, loss

GUIDE = " ".join((ROOT / "docs/transformers.md").read_text().split())


def test_the_size_of_t6s_cache_is_the_measured_one():
    t6, softmax = (
        json.loads((RESULTS / name).read_text()) for name in ("t6-cache/t6.json", "layout-cache/softmax.json")
    )
    sizes = [f"{one['cache_bytes'] / one['tokens']:,.0f}" for one in (t6, softmax)]
    assert f"takes {sizes[0]} bytes a token ([results](results/t6-cache))" in GUIDE
    assert f"demo's Softmax (2 heads of 64) takes {sizes[1]}." in GUIDE


def test_what_folding_lengths_into_factors_saves_is_the_measured():
    lines = json.loads((RESULTS / "t6-fold/results.json").read_text())["lines"]
    attention, step = (sorted(line[what][1] for line in lines) for what in ("attention", "step"))
    assert f"Attention itself then takes {attention[0]:.2f} to {attention[-1]:.2f} of its time" in GUIDE
    assert f"takes {step[0]:.2f} to {step[-1]:.2f} of its time" in GUIDE


def test_the_losses_of_t6_are_the_measured_ones():
    t6, lssar, full_rank, gpt_neox = (loss("t6", run) for run in ("demo-t6", "demo-t6-lssar", "t6k4", "lssar4"))
    assert (
        f"`demo-t6` {t6:.3f}, `demo-t6-lssar` {lssar:.3f}, and {full_rank:.3f} with `q_rank=4` and `k_rank=4`" in GUIDE
    )
    assert f"and as many heads of that size has {gpt_neox:.3f} (" in GUIDE


def test_the_cost_of_t6_is_the_measured_one():
    costs = loss("t6", "demo-t6-lssar") - loss("t6", "demo-t6")
    assert f"T6 costs {costs:.2f} at" in " ".join((ROOT / "docs/limitations.md").read_text().split())
