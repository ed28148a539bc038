"""The documents hold together: links lead somewhere, prose wraps, numbers are those of the
committed results.
"""

import json
import re
import statistics
import subprocess
from pathlib import Path

import pytest

from softfocus.lab.bench.results import CellResult, load_benchmark
from softfocus.lab.claims.results import read as read_claim
from softfocus.lab.report.points import Cell, cell
from softfocus.lab.report.results import read

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ROOT / "docs" / "results"
NAMES = {"lssar": "LSSAR", "lssa": "LSSA", "laser": "LASER, on softmax"}
DIRECTIONS = {"forward": "forward", "backward": "forward + backward", "decode": "decode, one query"}
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def without_code(text: str) -> str:
    """The text without fenced blocks, blocks that are indented, and spans of code."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?<=\n\n)(?:    .*\n|\n)+", "\n", text)
    return re.sub(r"`[^`]*`", "", text)


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


def broken_links(path: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            broken.append(target)
    return broken


@page
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


REBASED = {"239b23e"}
"""Commits that a result names and that were rebased before they were published. The page says what
became of them.
"""


def test_the_commits_that_documents_and_results_name_exist():
    words = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip() != "false":
        pytest.skip("not a whole checkout of git")
    texts = [path.read_text() for path in PAGES] + [path.read_text() for path in RESULTS.rglob("*.md")]
    named = {one for text in texts for one in re.findall(r"(?:commit )?\b([0-9a-f]{7,40})\b", text)}
    named |= {
        one for path in RESULTS.rglob("*.json") for one in re.findall(r'"commit": "([0-9a-f]+)', path.read_text())
    }
    named = {one for one in named if re.search("[a-f]", one) and re.search("[0-9]", one)} - REBASED
    asked = subprocess.run(
        ["git", "cat-file", "--batch-check"], input="\n".join(sorted(named)), cwd=ROOT, capture_output=True, text=True
    )
    assert len(named) > 20
    assert [line for line in asked.stdout.splitlines() if not line.split()[1].startswith("commit")] == []


def test_a_broken_link_would_be_noticed(tmp_path):
    there = tmp_path / "there.md"
    there.write_text("# A heading, with `code`\n")
    here = tmp_path / "here.md"
    here.write_text("[a](there.md#a-heading-with-code) [b](there.md#other) [c](gone.md) `[d](gone.md)`\n")
    assert broken_links(here) == ["there.md#other", "gone.md"]


def wide_lines(text: str) -> list[str]:
    """Lines of prose beyond 100 columns; tables, pictures and what a program wrote may be wider."""
    text = re.sub(r"<!-- \w+:begin -->.*?<!-- \w+:end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [line for line in text.splitlines() if len(line) > 100 and not line.startswith(("|", "![", "    "))]


@page
def test_prose_wraps_at_100_columns(path):
    assert wide_lines(path.read_text()) == []


def test_a_wide_line_would_be_noticed():
    assert wide_lines(f"{'a' * 100}\n| {'b' * 100} |\n{'c' * 101}") == ["c" * 101]


def test_the_design_stays_short():
    assert len((ROOT / "DESIGN.md").read_text().splitlines()) <= 200


def test_a_long_file_says_why_at_its_top():
    long = [
        path
        for folder in ("src", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp") and len(path.read_text().splitlines()) > 400
    ]
    silent = [str(path.relative_to(ROOT)) for path in long if "Over 400 lines:" not in path.read_text()[:1500]]
    assert not silent, f"more than 400 lines without a reason: {silent}"


def test_the_pages_name_files_that_exist():
    """Where the kernels' pages end, each file of their folders stands once."""
    for name, folder, kind in (
        ("kernels-cpu", "backends/cpu/csrc", "*.[hc]*"),
        ("kernels-gpu", "backends/triton/kernels", "*.py"),
    ):
        table = (ROOT / f"docs/{name}.md").read_text().split("## Where to look")[1]
        named = re.findall(r"`([\w.]+)`", table)
        there = {path.name for path in (ROOT / "src/softfocus" / folder).glob(kind)} - {"__init__.py"}
        assert sorted(named) == sorted(there)


def bench_table() -> str:
    """Time and memory of the CPU kernels and of what they are measured beside, as shares of
    SDPA's.
    """
    lines = [
        "| | keys | time | memory | tiled, time | the formula by hand, time | FlexAttention, time |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in ("bench-cpu", "bench-cpu-lssa-laser", "bench-cpu-bfloat16"):
        benchmark = load_benchmark(RESULTS / folder)
        for one in sorted(benchmark.cells, key=lambda one: (one.mechanism != "lssa", list(DIRECTIONS).index(one.what))):
            ours = one.subject("softfocus")
            assert one.parity == ours.parity == "passed"
            others = " | ".join(time_of(one, name) for name in ("tiled", "eager", "flex"))
            half = "" if benchmark.dtype == "float32" else f", {benchmark.dtype}"
            lines.append(
                f"| {NAMES[one.mechanism]}, {DIRECTIONS[one.what]}{half} | {one.length // 1024}K "
                f"| {ours.ratio.median:.2f} ({ours.ratio.lower_quartile:.2f} to {ours.ratio.upper_quartile:.2f}) "
                f"| {ours.memory_ratio:.2f} | {others} |"
            )
    return "\n".join(lines)


def time_of(one: CellResult, name: str) -> str:
    subject = one.subject(name)
    return f"{subject.ratio.median:.1f}" if subject.ratio else "refused"


PERFORMANCE = (ROOT / "docs" / "performance.md").read_text()


def test_the_table_of_performance_is_the_committed_one():
    shown = re.search(r"<!-- bench:begin -->\n(.*?)\n?<!-- bench:end -->", PERFORMANCE, re.DOTALL)
    assert shown[1] == bench_table(), f"docs/performance.md should show:\n{bench_table()}"


def test_the_speed_of_training_is_the_committed_one():
    speeds = {
        entry.evaluation.mechanism: entry.info.tokens_per_second
        for entry in read(RESULTS / "demo-slow-start/results.json").runs
    }
    shares = [speeds[name] / speeds["softmax"] for name in ("lssar", "lssa", "laser")]
    said = "LSSAR trains at {:.2f} of Softmax's tokens per second, LSSA at {:.2f}, LASER at {:.2f}".format(*shares)
    assert said in " ".join(PERFORMANCE.split())


def test_the_time_on_the_host_is_the_committed_one():
    """Medians of the newer of the two commits."""
    runs = json.loads((RESULTS / "triton-host/results.json").read_text())
    runs = [run["us"] for run in runs if run["commit"] == runs[-1]["commit"]]
    ours, softmax = (
        [sorted(run[f"{what} {name}"] for run in runs)[len(runs) // 2] for what in ("forward", "decode", "both")]
        for name in ("lssar", "softmax")
    )
    said = "LSSAR takes {} microseconds forward, {} decoding, {} with gradients; softmax {}, {} and {}"
    assert said.format(*(int(us + 0.5) for us in (*ours, *softmax))) in " ".join(PERFORMANCE.split())


def spread(values: list[float], digits: int, scale: float = 1.0) -> str:
    """Mean and standard error of seeds."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{scale * statistics.mean(values):z.{digits}f} ± {scale * error:.{digits}f}"


def precision_tables() -> list[list[list[str]]]:
    """Cells of the tables of docs/precision.md without their labels, from the committed results."""
    results = json.loads((RESULTS / "precision/results.json").read_text())
    lines = {(x["place"], x["mechanism"], x["scores"]): x for x in results["places"] if x["length"] == 1024}
    mechanisms = list(dict.fromkeys(mechanism for _, mechanism, _ in lines))
    errors = {key: f"{100 * line['query.grad'][0]:.2f}" for key, line in lines.items()}
    places = [
        [
            " / ".join(
                errors[place, name, scores] for scores in ("random", "peaked") if (place, name, scores) in errors
            )
            for name in mechanisms
        ]
        for place in (
            "query and key",
            "unit query and key",
            "scores",
            "weights",
            "value",
            "gradient of the output",
            "parameters",
        )
    ]
    models = [
        [
            spread([x["errors"][precision]["all"] for x in results["models"] if x["mechanism"] == name], 2, 100)
            for name in mechanisms
        ]
        for precision in (
            "autocast",
            "autocast, their projection in float32",
            "autocast, attention modules in float32",
            "parameters in bfloat16",
            "parameters rounded, float64",
        )
    ]
    loss = {(x["mechanism"], x["precision"], x["seed"]): x["loss"] for x in results["trainings"]}
    seeds = sorted({seed for _, _, seed in loss})
    trainings = [
        [
            spread([loss[name, precision, seed] - loss[name, "float32", seed] for seed in seeds], 3)
            for name in ("softmax", "lssar, p = 15")
        ]
        for precision in ("autocast", "autocast, attention modules in float32", "parameters in bfloat16")
    ]
    return [places, models, trainings]


def test_the_tables_of_precision_are_the_committed_ones():
    page = (ROOT / "docs" / "precision.md").read_text().replace("| 0 ", "| 0.00 / 0.00 ").replace(", inconclusive", "")
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    shown = [[[cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines()] for table in tables]
    assert shown == precision_tables()


def test_every_name_of_the_glossary_is_in_the_code():
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    known, names = set(re.findall(r"[A-Za-z_]\w*", text)), []
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)  # of | symbol | term | our name | meaning |
        if len(cells) > 4:
            names += re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", cells[3])))
    assert len(names) > 80
    assert not set(names) - known


def test_old_and_new_kernels_take_the_measured_time():
    cells = json.loads((RESULTS / "before-and-after/results.json").read_text())["cells"]
    level = {
        way: sum(0.97 <= cell[way]["median"] <= 1.03 for cell in cells) for way in ("new_over_old", "new_over_new")
    }
    new = [cell["new_over_old"] for cell in cells]
    within = sum(one["lower_quartile"] <= 1.0 <= one["upper_quartile"] for one in new)
    text = " ".join((ROOT / "docs/performance.md").read_text().split())
    count = len(cells)
    assert f"In {level['new_over_old']} of {count} cells the median of new over old is within 0.97 and 1.03" in text
    assert f"In {within} of {count} the quartiles include 1." in text
    assert f"New over new is within 0.97 and 1.03 in {level['new_over_new']} of {count}" in text
    outside = {
        (cell["what"], cell["length"], cell["mechanism"]): f"{cell['new_over_old']['median']:.3f}"
        for cell in cells
        if not 0.97 <= cell["new_over_old"]["median"] <= 1.03
    }
    part = text[text.index("Of the five cells outside") : text.index("An earlier comparison")]
    assert all(f" {ratio}" in part or f"({ratio}" in part for ratio in outside.values())
    assert {cell for cell, ratio in outside.items() if float(ratio) > 1} == {
        ("forward", 1024, "lssar"), ("decode", 16384, "softmax")
    }  # fmt: skip


def test_the_files_that_run_first_exist(request):
    plugin = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert [name for name in plugin.LONGEST if not any((ROOT / "tests").rglob(name))] == []


def toy_rates() -> str:
    swept = {group.evaluations[0].run.rpartition("-s")[0]: group for group in read(
        RESULTS / "toy-learning-rates" / "results.json"
    ).groups}  # fmt: skip
    claim = read_claim(RESULTS / "claims" / "softplus-table-4" / "toy" / "results.json")
    lines = ["| row | 2e-3 | 4e-3 | 8e-3 |", "|---|---|---|---|"]
    for row in ("softmax", "lssa", "lssar", "sigmoid_log_n_l1"):
        groups = swept[f"{row}-half"], claim.group(row), swept[f"{row}-twice"]
        cells = [cell(group, 1.0, "as trained") for group in groups if group]
        assert [len(one.rows) for one in cells] == [3, 3, 3]
        lines.append(f"| `{row}` | {' | '.join(f'{one.loss:.3f} ± {one.spread:.3f}' for one in cells)} |")
    return "\n".join(lines)


def test_what_other_rates_cost_at_the_scale_toy_is_the_measured_one():
    rows = {row[1]: [float(loss) for loss in row.groups()[1:]] for row in re.finditer(
        r"\| `(\w+)` \| (\S+) ± \S+ \| (\S+) ± \S+ \| (\S+) ±", toy_rates()
    )}  # fmt: skip
    assert [row for row, (half, same, twice) in rows.items() if same > min(half, twice)] == ["lssar"]
    said = (
        f"LSSAR, which would gain {rows['lssar'][1] - rows['lssar'][2]:.3f} at twice the rate, less than its seeds "
        f"differ. There Softmax loses {rows['softmax'][2] - rows['softmax'][1]:.3f}, LSSA "
        f"{rows['lssa'][2] - rows['lssa'][1]:.3f}."
    )
    assert said in " ".join((ROOT / "docs/claims.md").read_text().split())


def encoder_rates(model: str) -> dict[str, list[Cell]]:
    """Softmax's and LASER's error rate at half the claim's learning rate, at that rate and at twice
    that rate.
    """
    swept = {group.evaluations[0].run.rpartition("-s")[0]: group for group in read(
        RESULTS / f"{model}-learning-rates" / "results.json"
    ).groups}  # fmt: skip
    claim = read_claim(RESULTS / "claims" / f"laser-{model}" / "toy" / "results.json")
    found = {}
    for row in ("softmax", "laser"):
        groups = swept[f"{row}-half"], claim.group(f"{model}_{row}"), swept[f"{row}-twice"]
        found[row] = [cell(group, 1.0, "error rate") for group in groups if group]
    return found


def encoder_table() -> str:
    lines = ["| error rate | 1e-3 | 2e-3 | 4e-3 |", "|---|---|---|---|"]
    for model, name in (("vit", "ViT"), ("bert", "BERT")):
        for row, cells in encoder_rates(model).items():
            shown = [f"{one.loss:.1%} ± {one.spread:.1%}".replace("%", " %") for one in cells]
            lines.append(f"| {name}, {'LASER' if row == 'laser' else 'softmax'} | {' | '.join(shown)} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("mark", "table"), [("toy_rates", toy_rates), ("encoder_rates", encoder_table)])
def test_the_learning_rates_of_the_claims_are_the_committed_ones(mark, table):
    page_text = (ROOT / "docs" / "claims.md").read_text()
    shown = page_text.split(f"<!-- {mark}:begin -->\n")[1].split(f"\n<!-- {mark}:end -->")[0]
    assert shown == table()


def test_what_laser_gains_at_the_best_of_three_rates_is_the_measured_one():
    page_text = " ".join((ROOT / "docs" / "claims.md").read_text().split())
    for model, name in (("vit", "ViT"), ("bert", "BERT")):
        softmax, laser = (min(cells, key=lambda one: one.loss) for cells in encoder_rates(model).values())
        found = laser.minus(softmax)
        said = f"{100 * found.value:+.1f} ± {100 * found.standard_error:.1f} percentage points"
        said += "." if found.sure else ", inconclusive."
        assert f"the {name}'s error rate with LASER less that with softmax is {said}" in page_text
        rates = encoder_rates(model)
        leads = [plain.loss - ours.loss for plain, ours in zip(rates["softmax"], rates["laser"], strict=True)]
        assert 0 < leads[0] < leads[1] < leads[2], "the lead grows with the rate"
        assert (softmax, laser) == (rates["softmax"][1], rates["laser"][2])


UNCLEAN = {"layouts-larger/results.json"}
"""Results of trees with changes that no commit holds. Train them again to take them off."""


def test_committed_results_are_of_clean_commits() -> None:
    unclean = set()
    for path in RESULTS.rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        if re.search(r'"commit": "[^"]*\+dirty"|"dirty": true', text):
            unclean.add(path.relative_to(RESULTS).as_posix())
    assert unclean == UNCLEAN
