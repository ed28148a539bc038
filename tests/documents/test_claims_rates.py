"""docs/claims.md on learning rates: which rows had which, those of powers, of depths, of QK-norm by
LayerNorm and of a fine-tuning. It shows the committed results.
"""

import json
import re
from itertools import product

import pytest

from softfocus.lab.claims.claim import load as load_claim
from softfocus.lab.claims.results import Results
from softfocus.lab.claims.results import read as read_claim
from softfocus.lab.claims.verdict import Judged, judge
from softfocus.lab.evaluate.means import Estimate
from softfocus.lab.report.points import Cell, Group, cell

from .committed import HERE, RESULTS, ROOT, by_row, claim, encoder_rates, lost_runs, minus, of_pages, of_seeds
from .tables import said, shown, shown_loss, table, tables_of

PAGE = (ROOT / "docs/claims.md").read_text()
TEXT = " ".join(PAGE.split())
RATES = ("2e-3", "4e-3", "8e-3")
SWEPT = ("table-learning-rates", "toy-learning-rates", "depth-learning-rates")
POWERS = (1, 2, 3, 5, 7, 15, 31, 50, 100)


def given(found: Estimate, *where: str) -> str:
    """A difference, and in brackets where it was measured and whether it is inconclusive."""
    told = [*where, *([] if found.sure else ["inconclusive"])]
    return shown(found, "+") + (f" ({', '.join(told)})" if told else "")


def rates_of(swept: dict[str, Group], own: Group | None, row: str, at: tuple[float, str] = HERE) -> list[Cell | None]:
    """A row with seed 0 at half the claim's rate, at it and at twice that; None: diverged."""
    assert own is not None
    known = of_seeds(swept | {"own": own}, {0})
    names = (f"{row}-half", "own", f"{row}-twice")
    assert all(name in known or f"{name}-s0" in lost_runs(*SWEPT) for name in names), "a missing run diverged"
    return [cell(known[name], *at) if name in known else None for name in names]


def powers(at: tuple[float, str] = HERE) -> dict[int, list[list[Cell | None]]]:
    """Of figure 2: (softmax, LSSA), a row a power."""
    swept = by_row("table-learning-rates") | by_row("toy-learning-rates")
    softmax, lssa = claim("softplus-figure-2-softmax"), claim("softplus-figure-2-lssa")
    ours = {power: "lssar" if power == 15 else f"lssar_p{power}" for power in POWERS}
    return {
        power: [
            rates_of(swept, softmax.group(f"softmax_p{power}"), f"softmax_p{power}", at),
            rates_of(swept, lssa.group(ours[power]), ours[power], at),
        ]
        for power in POWERS
    }


def depths() -> dict[int, list[list[Cell | None]]]:
    """Of laser-depths: (softmax, LASER), a row a depth. Two layers are the scale's own."""
    deep, own = by_row("depth-learning-rates"), claim("laser-depths")
    shallow = by_row("toy-learning-rates")
    for row in ("softmax", "laser"):
        deep |= {f"{row}_2_layers-{rate}": shallow[f"{row}-{rate}"] for rate in ("half", "twice")}
    return {
        layers: [
            rates_of(deep, own.group(name), name) for name in (f"softmax_{layers}_layers", f"laser_{layers}_layers")
        ]
        for layers in (1, 2, 3, 4, 6)
    }


def two_by_rates(first: str, names: tuple[str, str], rows: dict[int, list[list[Cell | None]]]) -> str:
    header = [first, *(f"{name}, {rate}" for name in names for rate in RATES)]
    return table(header, ([str(row), *map(loss_or_diverged, both[0] + both[1])] for row, both in rows.items()))


def loss_or_diverged(one: Cell | None) -> str:
    return "diverged" if one is None else f"{one.loss:.3f}"


LAYER_NORM = {
    "softmax": "softmax", "laser": "LASER", "qk_norm": "softmax with QK-norm", "qk_norm_laser": "LASER with QK-norm",
}  # fmt: skip


def at_rates(name: str, folder: str) -> dict[str, Results]:
    """A claim's results by learning rate: its own at 4e-3, the others with that rate set."""
    own = {rate: RESULTS / folder / rate / "results.json" for rate in ("2e-3", "8e-3")}
    read = {rate: claim(name) if rate == "4e-3" else read_claim(own[rate]) for rate in RATES}
    assert [one.overrides for one in read.values()] == [
        [f"train.learning_rate={x}"] if x else [] for x in (0.002, 0, 0.008)
    ]
    assert all([run.info.seed for run in one.of(row)] == [0, 1, 2] for one in read.values() for row in one.rows)
    return read


def layer_norm() -> dict[str, dict[str, Group]]:
    """Of laser-qk-layer-norm: rows by learning rate, three seeds."""
    read = at_rates("laser-qk-layer-norm", "qk-layer-norm-learning-rates")
    return {rate: {row: one.group(f"stablelm_{row}") for row in LAYER_NORM} for rate, one in read.items()}


NTK = "dynamic NTK"


def t6_table() -> str:
    """T6 with softmax and with LSSAR, and their difference beyond 1x with NTK."""
    rows = []
    for rate, one in at_rates("softplus-t6", "t6-learning-rates").items():
        by = {row: one.group(f"t6_{row}") for row in ("softmax", "lssar")}
        losses = [shown_loss(cell(group, *HERE)) for group in by.values()]
        rows.append([rate, *losses, *(said(minus(by, "lssar", "softmax", (float(n), NTK))) for n in (2, 4, 8, 16))])
    across = (f"LSSAR minus softmax, {n}x with NTK" for n in (2, 4, 8, 16))
    return table(["rate", "softmax, 1x", "LSSAR, 1x", *across], rows)


def post_hoc_table() -> str:
    """The statements about re-weighting without training: difference of losses, and verdict."""
    rows = []
    for judged in post_hoc():
        apart = (re.search(r": ([+-]\d\S+ ± [\d.]+)", one.shown.text)[1] for one in judged)
        cells = (f"{difference}, {one.verdict}" for difference, one in zip(apart, judged, strict=True))
        rows.append([judged[0].statement.says, *cells])
    return table(["first loss minus second", *RATES], rows)


def post_hoc() -> list[tuple[Judged, ...]]:
    """The statements that were judged at each rate. At 4e-3 alone the claim has rows that were
    trained with a power of 3.
    """
    read = at_rates("softplus-post-hoc", "post-hoc-learning-rates")
    assert list(read) == list(RATES)
    of_statements = zip(*(judge(load_claim("softplus-post-hoc"), one) for one in read.values()), strict=True)
    return [one for one in of_statements if not any(judged.verdict == "not run" for judged in one)]


def layer_norm_table() -> str:
    by = layer_norm()
    return table(
        ["QK-norm by LayerNorm", *RATES],
        ([name, *(shown_loss(cell(by[rate][row], *HERE)) for rate in RATES)] for row, name in LAYER_NORM.items()),
    )


def toy_rates() -> dict[str, list]:
    """Rows of table 4, and LASER: at half the claim's learning rate, at it, and at twice that."""
    swept, own = by_row("toy-learning-rates"), claim("softplus-table-4")
    same = {row: own.group(row) for row in ("softmax", "lssa", "lssar", "sigmoid_log_n_l1")}
    same["laser"] = claim("laser-classification").group("laser")
    groups = {row: (swept[f"{row}-half"], one, swept[f"{row}-twice"]) for row, one in same.items()}
    return {row: [cell(group, *HERE) for group in three] for row, three in groups.items()}


def laser_rates() -> dict[str, list[Cell]]:
    """Rows of claims about LASER with QK-norm, with seed 0, and with temperatures and Differential
    attention: at half the claims' learning rate, at it, and at twice that.
    """
    found = {}
    for study, names in RATES_OF_LASER.items():
        swept = by_row(study)
        for name in names:
            for row in claim(name).rows:
                own = claim(name).group(row)
                if own is None or f"{row}-half" not in swept or row in found or row == "laser":
                    continue
                if study == "toy-learning-rates":
                    found[row] = rates_of(swept, own, row)
                else:
                    found[row] = [cell(group, *HERE) for group in (swept[f"{row}-half"], own, swept[f"{row}-twice"])]
    return found


RATES_OF_LASER = {
    "toy-learning-rates": ("laser-qk-norm",),
    "llama-learning-rates": ("laser-temperature", "laser-query-scale", "laser-differential"),
}


TABLES = {
    "t6_rates": t6_table,
    "post_hoc_rates": post_hoc_table,
    "layer_norm_rates": layer_norm_table,
    "power_rates": lambda: two_by_rates("p", ("softmax", "LSSA"), powers()),
    "depth_rates": lambda: two_by_rates("layers", ("softmax", "LASER"), depths()),
}


@pytest.mark.parametrize("mark", TABLES)
def test_the_tables_are_the_committed_ones(mark):
    assert tables_of(PAGE)[mark] == TABLES[mark](), f"docs/claims.md should show:\n{TABLES[mark]()}"


def test_re_weighting_without_training_fails_at_each_rate():
    of_statements = [[judged.verdict for judged in one] for one in post_hoc()]
    failed = [set(one) == {"fails"} for one in of_statements]
    assert failed == [one[1] == "fails" for one in of_statements]
    count = ["two", "three", "four"][sum(failed) - 2]
    assert f"the {count} statements of the table that fail at 4e-3 fail at 2e-3 and" in TEXT
    assert set(of_statements[1]) == {"holds"}


def test_what_is_said_of_powers():
    rates = powers()
    losses = {power: [[round(one.loss, 3) for one in cells] for cells in both] for power, both in rates.items()}
    assert len(losses) == 9, "none diverged"
    assert all(plain > ours for both in losses.values() for plain, ours in zip(*both, strict=True))
    best = {power: softmax.index(min(softmax)) for power, (softmax, _) in losses.items()}
    assert [power for power, at in best.items() if at == 0] == [power for power in POWERS if power >= 3]
    assert all(lssa.index(max(lssa)) == 0 for _, lssa in losses.values())
    far = powers((8.0, "dynamic NTK"))
    lowest = [min(POWERS, key=lambda power, n=n: far[power][1][n].loss) for n in range(3)]
    assert lowest == [15, 15, 50]
    assert f"At 8e-3 it is lower with p = 50, by {far[15][1][2].loss - far[50][1][2].loss:.3f}." in TEXT


def test_what_is_said_of_depths():
    rates = {layers: [[round(one.loss, 3) for one in cells] for cells in both] for layers, both in depths().items()}
    leads = {layers: [a - b for a, b in zip(*both, strict=True)] for layers, both in rates.items()}
    assert all(lead[2] == max(lead) for lead in leads.values())
    assert min(min(lead) for lead in leads.values()) > 0
    assert f"With six layers it is {leads[6][0]:.3f} at 2e-3 and {leads[6][1]:.3f} at 4e-3." in TEXT
    best = {(layers, n): cells.index(min(cells)) for layers, both in rates.items() for n, cells in enumerate(both)}
    assert [row for row, at in best.items() if at != 1] == [(1, 1)]


@pytest.mark.parametrize("rate", RATES)
def test_the_rates_of_the_fine_tuning_are_the_committed_ones(rate):
    again = RESULTS / "classification-learning-rates" / rate / "results.json"
    found = claim("laser-classification") if rate == "4e-3" else read_claim(again)
    assert found.overrides == ([] if rate == "4e-3" else [f"train.learning_rate={float(rate)}"])
    assert {(run.row, run.info.seed) for run in found.runs} == set(product(("softmax", "laser"), range(3)))
    (judged,) = judge(load_claim("laser-classification"), found)
    said = re.fullmatch(r"laser (.*)%, softmax (.*)% right: (.*)% ± (.*)%", judged.shown.text)
    laser, softmax, apart, error = said.groups()
    row = f"| {rate} | {softmax} % | {laser} % | {apart} % ± {error} %, {judged.verdict} |"
    assert row in PAGE, row


def test_what_is_said_of_t6_at_other_rates():
    read = at_rates("softplus-t6", "t6-learning-rates")
    verdicts = [judge(load_claim("softplus-t6"), one)[0].verdict for one in read.values()]
    assert verdicts == ["inconclusive", "inconclusive", "holds"]
    by = {rate: {row: one.group(f"t6_{row}") for row in ("softmax", "lssar")} for rate, one in read.items()}
    losses = {row: [round(cell(by[rate][row], *HERE).loss, 3) for rate in RATES] for row in ("softmax", "lssar")}
    exact = [cell(by[rate]["softmax"], *HERE).loss for rate in RATES]
    assert exact[1] < min(exact[0], exact[2])
    assert min(losses["lssar"]) == losses["lssar"][0] == losses["lssar"][1], "a tie"
    text = "is the best of three{} for softmax. LSSAR has the same loss at 2e-3."
    assert f"4e-3, the claim's rate, {text.format('')}" in TEXT
    (page,) = of_pages("docs/results/claims/softplus-t6.md")
    assert f"4e-3 {text.format(' rates')}" in page
    assert losses["softmax"][2] - losses["softmax"][1] > 0.5, "much higher"
    first, _, third = losses["lssar"]
    assert f"it is {first:.3f} at 2e-3 and 4e-3, and {third:.3f} at 8e-3." in TEXT
    for rate in ("2e-3", "4e-3"):
        apart = [minus(by[rate], "lssar", "softmax", (float(n), NTK)) for n in (1, 2, 4, 8, 16)]
        assert [found.sure for found in apart] == [True, False, True, True, True]
        assert apart[0].value > 0 > max(found.value for found in apart[2:])


def test_what_is_said_of_layer_norm_at_other_rates():
    by = layer_norm()
    assert all(len(group.evaluations) == 3 for rows in by.values() for group in rows.values())
    leads = [minus(by[rate], "qk_norm_laser", "qk_norm") for rate in RATES]
    lowered = [minus(by[rate], "qk_norm_laser", "laser") for rate in RATES]
    assert not any(one.sure for one in leads), "all inconclusive"
    assert all(one.sure for one in lowered)
    for found, text, end in (
        (leads, "LASER minus softmax, both with QK-norm", ", all inconclusive."),
        (lowered, "LASER with QK-norm minus LASER", "."),
    ):
        first, second, third = (f"{shown(one, '+')} ({rate})" for one, rate in zip(found, RATES, strict=True))
        assert f"**{text}**: {first}, {second} and {third}{end}" in TEXT
    assert "At each rate QK-norm lowers LASER's loss." in TEXT


def test_laser_leads_in_decoders_at_every_rate_and_of_encoders_only_the_vit():
    """Means at the training length; of one seed, where the rate has one."""
    three, others = toy_rates(), laser_rates()
    pairs = [(three["laser"], three["softmax"]), *((laser, softmax) for softmax, laser in depths().values())]
    rivals = {"qk_norm_laser": "qk_norm", "qwen3_laser": "qwen3_softmax", "differential_laser": "differential"}
    rivals |= {"llama_laser": "llama_softmax", "llama_scaled_laser": "llama_scaled_softmax"}
    pairs += [(others[ours], others[rival]) for ours, rival in rivals.items()]
    normed = {row: [cell(groups[row], *HERE) for groups in layer_norm().values()] for row in LAYER_NORM}
    pairs += [(normed["laser"], normed["softmax"]), (normed["qk_norm_laser"], normed["qk_norm"])]
    swept, own = by_row("lamb-learning-rates"), claim("laser-lamb")
    lamb = {
        row: [swept[f"{row}-half"], own.group(f"{row}_lamb"), swept[f"{row}-twice"]] for row in ("laser", "softmax")
    }
    pairs += [tuple([cell(group, *HERE) for group in groups] for groups in lamb.values())]
    assert all(ours.loss < rival.loss for pair in pairs for ours, rival in zip(*pair, strict=True))
    assert "In the claims' decoders LASER has a lower mean loss than softmax at every rate tried with both." in TEXT
    gains = {}
    for model in ("vit", "bert", "conformer"):
        softmax, laser = (min(cells, key=lambda one: one.loss) for cells in encoder_rates(model).values())
        gains[model] = laser.minus(softmax)
    assert gains["vit"].value < 0
    assert [model for model, gain in gains.items() if gain.sure] == ["vit"]
    assert "Of three encoders, each at its best rate, only the ViT gains significantly from LASER." in TEXT


PREFIXES = {"vit": "vit_", "bert": "bert_", "conformer": "conformer_"}


def test_every_row_was_trained_at_other_rates():
    tried = set()
    for folder in RESULTS.glob("*-learning-rates"):
        kind = folder.name.removesuffix("-learning-rates")
        if (folder / "results.json").exists():
            rows = {name.rpartition("-")[0] for name in by_row(folder.name)}
            ending = "_lamb" if kind == "lamb" else ""
            tried |= {f"{PREFIXES.get(kind, '')}{row}{ending}" for row in rows}
        else:
            runs = [one for path in folder.glob("*/results.json") for one in json.loads(path.read_text())["runs"]]
            tried |= {one["row"] for one in runs if "row" in one}
    found = json.loads((RESULTS / "toy-learning-rates/results.json").read_text())["runs"]
    assert not any(run["info"]["validation_loss"] or run["info"]["projection_norms"] for run in found), "losses alone"
    evaluations = [one for group in by_row("toy-learning-rates").values() for one in group.evaluations]
    assert {row.setting.mechanism for one in evaluations for row in one.rows} == {None}, "none is run with a power"
    tried |= {f"{row}_{same}" for row in ("softmax", "laser") for same in ("recorded", "2_layers")}
    rows = {row for path in (RESULTS / "claims").glob("*/toy/results.json") for row in claim(path.parents[1].name).rows}
    assert not rows - tried
