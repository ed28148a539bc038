"""docs/performance.md: it shows the committed results."""

import json
from itertools import combinations
from statistics import median

from softfocus.lab.bench.results import CellResult

from .committed import RESULTS, ROOT, load_benchmark, loss, report
from .tables import table, tables_of

PAGE = (ROOT / "docs/performance.md").read_text()
TEXT = " ".join(PAGE.split())
NAMES = {"lssar": "LSSAR", "lssa": "LSSA", "laser": "LASER, on softmax", "laser(lssa)": "LASER over LSSA"}
HALVES = {"bench-cpu-bfloat16": "bfloat16, AMX", "bench-cpu-bfloat16-ice-lake": "bfloat16, without AMX"}
DIRECTIONS = {"forward": "forward", "backward": "forward + backward", "decode": "decode, one query"}


def bench_table() -> str:
    """Time and memory of the CPU kernels and of what they are measured beside, as shares of
    SDPA's.
    """
    rows = []
    for folder in ("bench-cpu", "bench-cpu-lssa-laser", *HALVES):
        benchmark = load_benchmark(RESULTS / folder)
        half = f", {HALVES[folder]}" if folder in HALVES else ""
        order = list(NAMES), list(DIRECTIONS)
        for one in sorted(benchmark.cells, key=lambda one: (order[0].index(one.mechanism), order[1].index(one.what))):
            ours = one.subject("softfocus")
            assert one.parity == ours.parity == "passed"
            name, ratio = f"{NAMES[one.mechanism]}, {DIRECTIONS[one.what]}{half}", ours.ratio
            time = f"{ratio.median:.2f} ({ratio.lower_quartile:.2f} to {ratio.upper_quartile:.2f})"
            others = (time_of(one, name) for name in ("tiled", "eager", "flex"))
            rows.append([name, f"{one.length // 1024}K", time, f"{ours.memory_ratio:.2f}", *others])
    header = "", "keys", "time", "memory", "tiled, time", "the formula by hand, time", "FlexAttention, time"
    return table(header, rows)


def time_of(one: CellResult, name: str) -> str:
    subject = one.subject(name)
    return f"{subject.ratio.median:.1f}" if subject.ratio else "refused"


def test_the_table_of_performance_is_the_committed_one():
    assert tables_of(PAGE) == {"bench": bench_table()}, f"docs/performance.md should show:\n{bench_table()}"


def test_the_time_of_a_short_cache_is_the_committed_one():
    cells = load_benchmark(RESULTS / "bench-cpu").cells
    (one,) = (one for one in cells if (one.mechanism, one.what, one.length) == ("lssar", "decode", 1024))
    limits = " ".join((ROOT / "docs/limitations.md").read_text().split())
    said = f"**LSSAR's decoding of 1K keys takes {one.subject('softfocus').ratio.median:.2f} of SDPA's time on a CPU**"
    assert said in limits


def test_the_lost_line_is_the_machines():
    """One commit on two machines, and two commits on one."""
    found = {}
    for study, run in (
        ("lssar-seeds", "demo-lssar"), ("lssar-seeds-second-machine", "old0"), ("demo-second-machine", "demo-lssar")
    ):  # fmt: skip
        (one,) = (one for one in report(study).runs if one.info.name == run)
        losses = tuple(loss(study, run, length) for length in (128, 2048))
        found[study] = one.info.commit[:7], losses
    intel, amd, again = found.values()
    assert (intel[0], amd[0], again[0]) == ("59f75fc", "59f75fc", "c0a79c2")
    assert amd[1] == again[1] != intel[1]
    for maker, (_, (near, far)) in (("Intel", intel), ("AMD", amd)):
        assert f"| 0 | {maker} | cpu | {near:.3f} | {far:.3f} |" in PAGE


def test_the_speed_of_training_is_the_committed_one():
    speeds = {one.evaluation.mechanism: one.info.tokens_per_second for one in report("demo-slow-start").runs}
    shares = [speeds[name] / speeds["softmax"] for name in ("lssar", "lssa", "laser")]
    said = "LSSAR trains at {:.2f} of Softmax's tokens per second, LSSA at {:.2f}, LASER at {:.2f}".format(*shares)
    assert said in TEXT


def test_the_time_on_the_host_is_the_committed_one():
    """Medians of the newer of the two commits."""
    runs = json.loads((RESULTS / "triton-host/results.json").read_text())
    runs = [run["us"] for run in runs if run["commit"] == runs[-1]["commit"]]
    ours, softmax = (
        [sorted(run[f"{what} {name}"] for run in runs)[len(runs) // 2] for what in ("forward", "decode", "both")]
        for name in ("lssar", "softmax")
    )
    said = "LSSAR takes {} microseconds forward, {} decoding, {} with gradients; softmax {}, {} and {}"
    assert said.format(*(int(us + 0.5) for us in (*ours, *softmax))) in TEXT


def test_old_and_new_kernels_take_the_measured_time():
    cells = json.loads((RESULTS / "before-and-after/results.json").read_text())["cells"]
    level = {
        way: sum(0.97 <= cell[way]["median"] <= 1.03 for cell in cells) for way in ("new_over_old", "new_over_new")
    }
    new = [cell["new_over_old"] for cell in cells]
    within = sum(one["lower_quartile"] <= 1.0 <= one["upper_quartile"] for one in new)
    count = len(cells)
    assert f"In {level['new_over_old']} of {count} cells the median of new over old is within 0.97 and 1.03" in TEXT
    assert f"In {within} of {count} the quartiles include 1." in TEXT
    assert f"New over new is within 0.97 and 1.03 in {level['new_over_new']} of {count}" in TEXT
    outside = {
        (cell["what"], cell["length"], cell["mechanism"]): f"{cell['new_over_old']['median']:.3f}"
        for cell in cells
        if not 0.97 <= cell["new_over_old"]["median"] <= 1.03
    }
    part = TEXT[TEXT.index("Of the five cells outside") : TEXT.index("An earlier comparison")]
    assert all(f" {ratio}" in part or f"({ratio}" in part for ratio in outside.values())
    assert {cell for cell, ratio in outside.items() if float(ratio) > 1} == {
        ("forward", 1024, "lssar"), ("decode", 16384, "softmax")
    }  # fmt: skip


def chance(old, new):
    """p of a difference of medians at least as large, over all ways to part the measurements."""
    every, places = [*old, *new], range(len(old) + len(new))
    apart = []
    for chosen in combinations(places, len(new)):
        ours = set(chosen)
        apart.append(abs(median([every[i] for i in chosen]) - median([every[i] for i in places if i not in ours])))
    measured = abs(median(new) - median(old)) - 1e-9
    return sum(one >= measured for one in apart) / len(apart)


def test_the_later_comparison_with_the_old_kernels_is_the_committed_one():
    cells = json.loads((RESULTS / "before-and-after/later.json").read_text())["cells"]
    ratios = {
        (one["what"], one["length"], one["mechanism"]): one["new_over_old"]["median"]
        for one in cells
        if one["dtype"] == "float32"
    }
    inside, noise = (
        sum(0.97 <= one[name]["median"] <= 1.03 for one in cells) for name in ("new_over_old", "new_over_new")
    )
    assert f"{inside} of {len(cells)} cells are within 0.97 and 1.03, of new over new {noise}." in TEXT
    assert f"LASER in decoding ({ratios['decode', 4096, 'laser']}, {ratios['decode', 16384, 'laser']})" in TEXT
    assert f"the forward of LSSAR at 4K ({ratios['forward', 4096, 'lssar']})" in TEXT
    slower = ratios["decode", 4096, "lssar"], ratios["decode", 4096, "lssa"]
    assert "decoding of LSSAR ({}) and LSSA ({}) at 4K.".format(*slower) in TEXT
    again, since = (
        [
            [one["new_over_old"]["median"] for one in json.loads(path.read_text())["cells"]]
            for path in sorted((RESULTS / "before-and-after").glob(name))
        ]
        for name in ("again-*.json", "since-*.json")
    )
    text = "the forward has {:.3f} and {:.3f}, decoding of LSSAR {:.3f} and {:.3f}, of LSSA {:.3f} and {:.3f}."
    assert text.format(*(ratio for cell in zip(*again, strict=True) for ratio in cell)) in TEXT
    every = [ratio for one in since for ratio in one]
    assert f"Against the kernels of the day before they have {min(every):.3f} to {max(every):.3f}" in TEXT
    cells = json.loads((RESULTS / "before-and-after/latest.json").read_text())["cells"]
    outside = [one for one in cells if not 0.97 <= one["new_over_old"]["median"] <= 1.03]
    assert f"{len(cells) - len(outside)} of {len(cells)} cells are within 0.97 and 1.03. The two outside" in TEXT
    found = {(one["what"], one["length"], one["mechanism"]): one["new_over_old"]["median"] for one in outside}
    assert found.keys() == {("decode", 4096, "softmax"), ("decode", 1024, "lssar")}
    text = "faster, in decoding: softmax at 4K ({}) and LSSAR at 1K ({})."
    assert text.format(found["decode", 4096, "softmax"], found["decode", 1024, "lssar"]) in TEXT
    with_amx = json.loads((RESULTS / "before-and-after/amx.json").read_text())
    assert with_amx["old"] == "4a7534ae"
    assert {one["dtype"] for one in with_amx["cells"]} == {"bfloat16"}
    within = sum(0.97 <= one["new_over_old"]["median"] <= 1.03 for one in with_amx["cells"])
    assert within == len(with_amx["cells"]) == 6
    assert "with the kernels of 4a7534ae, forward, backward and in decoding at 1K and 4K" in TEXT
    assert "all six cells are within 0.97 and 1.03" in TEXT
    split = json.loads((RESULTS / "before-and-after/legible.json").read_text())
    assert (split["old"], split["new"], len(split["cells"])) == ("4a7534ae", "14fa9348", 8)
    assert all(0.97 <= one["new_over_old"]["median"] <= 1.03 for one in split["cells"])
    assert "The kernels of 14fa9348, in which long functions are split, were" in TEXT
    assert "in eight cells in float32 ([results]" in TEXT
    cells = json.loads((RESULTS / "before-and-after/decode-cpu-time.json").read_text())["cells"]
    for one in cells:
        new, old = (median(one[side]) for side in ("new", "old"))
        assert one["new_over_old"] == round(new / old, 3)
    ratios = {one["mechanism"]: one["new_over_old"] for one in cells}
    chances = {one["mechanism"]: chance(one["old"], one["new"]) for one in cells}
    least = min(chances, key=chances.__getitem__)
    assert chances[least] * len(chances) > 0.05
    assert f"(least p: {chances[least]:.3f} for {least})" in TEXT
    text = "is {lssar} times that of the old kernels for LSSAR, {lssa} for LSSA and {softmax} for softmax"
    assert text.format(**ratios) in TEXT
