"""docs/global-heads.md: what it says of 42 M parameters."""

import tomllib
from statistics import fmean

from softfocus.lab.report.points import Group, cell

from .committed import FAR, HERE, RESULTS, ROOT, WINDOWED, beside, by_label, minus, of_pages, report
from .tables import COLUMNS, said, shown, shown_losses, table
from .test_global_heads_small import at_rates

TEXT = " ".join((ROOT / "docs/global-heads.md").read_text().split())
NAMES = {"Softmax": "Softmax in every layer", "global-heads": "**global heads without RoPE, the others local**"}
PAIRS = (HERE, HERE), (FAR, WINDOWED)


def medium_groups() -> dict[str, Group]:
    return by_label("medium-gpu")


def medium() -> str:
    """Losses, and their differences from Softmax's, of the same seeds."""
    by, rows = medium_groups(), []
    for label, name in NAMES.items():
        leads = [said(beside(by, label, "Softmax", *pair)) for pair in PAIRS] if label != "Softmax" else ["", ""]
        rows.append([name, str(len(by[label].evaluations)), *shown_losses(by[label]), *leads])
    against = "1x, minus Softmax", "16x, as trained, minus Softmax with the window"
    return table(["42 M parameters", "seeds", *COLUMNS, *against], rows)


def by_position(label: str, at: tuple[float, str]) -> dict[str, float]:
    """Losses at 16 times the length by position, means over seeds."""
    buckets = zip(*(row.buckets for row in cell(medium_groups()[label], *at).rows), strict=True)
    return {f"{some[0].start:,} to {some[0].end - 1:,}": fmean(one.loss for one in some) for some in buckets}


def medium_positions() -> str:
    rows, across = [], []
    for name, label, at in (
        ("Softmax, window", "Softmax", WINDOWED),
        ("global heads, window", "global-heads", WINDOWED),
        ("global heads, as trained", "global-heads", FAR),
    ):
        found = by_position(label, at)
        across = list(found)
        rows.append([name, *(f"{loss:.3f}" for loss in found.values())])
    return table(["by position of the token", *across], rows)


MEDIUM = {"medium": medium, "medium_positions": medium_positions}


def test_the_lead_holds_for_every_seed():
    by = medium_groups()
    near, far = (beside(by, "global-heads", "Softmax", *pair) for pair in PAIRS)
    assert near.sure
    assert far.sure
    assert f"too: {shown(near)} (1x) and {shown(far)} (16x), in all three seeds. One learning rate was tried" in TEXT
    for at, its_at in PAIRS:
        ours, its = cell(by["global-heads"], *at).values, cell(by["Softmax"], *its_at).values
        assert len(ours) == 3
        assert all(mine < other for mine, other in zip(ours, its, strict=True))


def test_far_keys_lower_the_loss_of_every_seed():
    own = minus(medium_groups(), "global-heads", "global-heads", FAR, WINDOWED)
    assert own.sure
    assert f"As trained minus with the window, at 16x: {shown(own)}. The gain grows" in TEXT
    assert f"it is {shown(own)}." in of_pages("docs/evidence.md")[0]
    far, windowed = (cell(medium_groups()["global-heads"], *at).values for at in (FAR, WINDOWED))
    assert all(mine < other for mine, other in zip(far, windowed, strict=True))
    gains = [
        windowed - far
        for windowed, far in zip(
            by_position("global-heads", WINDOWED).values(), by_position("global-heads", FAR).values(), strict=True
        )
    ]
    assert gains[3:] == sorted(gains[3:])
    assert f"from {gains[3]:.3f} (512 to 1,023) to {gains[-1]:.3f} (from 4,096 on; means over seeds)" in TEXT
    assert max(map(abs, gains[:3])) < 0.01
    assert min(gains[3:]) > 0.04


def test_how_the_models_were_trained_is_what_was_run():
    for run in report("medium-gpu").runs:
        recipe = tomllib.loads(run.recipe)
        train, config = recipe["train"], recipe["model"]["config"]
        assert (train["learning_rate"], train["steps"], train["batch"], train["length"]) == (1e-3, 2000, 32, 512)
        assert (config["num_hidden_layers"], config["num_attention_heads"]) == (8, 10)
        assert f"{config['hidden_size'] ** -0.5:.2f}" == f"{config['initializer_range']:.2f}"
        assert round(run.info.parameters / 1e6) == 42
    read = 2000 * 32 * 512 / 1e6
    assert f"{read:.0f} M BPE tokens in 2,000 steps with batches of 16K tokens" in TEXT
    assert f"{read:.0f} M tokens are {read / 42:.1f} per parameter." in TEXT
    assert f"read {4500 * 16 * 512 / 1e6:.0f} M, {4500 * 16 * 512 / 1e6 / 10.4:.1f} per parameter." in TEXT
    packages = (RESULTS / "medium-gpu/packages.txt").read_text().splitlines()
    assert f"over the sources of {len(packages) - 1} installed packages" in TEXT
    largest, whole = (int(packages[at].split()[0]) for at in (0, -1))
    assert packages[0].split()[2] == "transformers"
    assert f"{100 * largest / whole:.0f} % of the text is Transformers" in TEXT


def test_what_is_said_of_speed_is_measured():
    speeds = {run.info.name: run.info.tokens_per_second for run in report("medium-gpu").runs}
    ours, its = ([speed for name, speed in speeds.items() if name.startswith(row)] for row in ("global", "softmax"))
    least, most = min(ours) / max(its), max(ours) / min(its)
    assert f"Global heads trained at {least:.2f} to {most:.2f} of Softmax's tokens per second" in TEXT
    assert f"With 42 M it was {least:.2f} to {most:.2f}, six at a time." in of_pages("docs/evidence.md")[0]


def test_the_rates_with_ten_million_parameters_are_as_said():
    softmax, ours = (at_rates("small-gpu/longer", row) for row in ("Softmax", "global-heads"))
    assert {*softmax} == {*ours} == {"1e-3", "2e-3"}
    assert "1e-3 favours Softmax on BPE tokens: of two rates it is the better one for Softmax, and the worse" in TEXT
    assert softmax["1e-3"].row(512).loss < softmax["2e-3"].row(512).loss
    assert ours["1e-3"].row(512).loss > ours["2e-3"].row(512).loss
