"""What keys beyond the training length change, on tokens that repeat something far back and on all
others: a table of docs/global-heads.md.
"""

from collections.abc import Sequence

import numpy as np

from softfocus.lab.evaluate.means import Estimate, Mean, difference, estimate
from softfocus.lab.run_folder.files import read_json
from softfocus.lab.run_folder.results import Induction

from .committed import RESULTS, ROOT, of_pages
from .tables import said, shown, table

ROWS = {
    "cosine-nope": "`demo-global-heads`",
    "all-softmax-nope": "all-softmax layout",
    "lssa-hybrid": "`demo-hybrid`",
    "lssar": "LSSAR, p = 15, in every layer",
    "softmax": "Softmax",
}
FAR_REPEATS, OTHERS, ALL = slice(3, None), slice(0, 3), slice(0, None)
"""Buckets of distances: from the training length on, nearer and never, all."""


def mean(row: str, seed: int, window: int | None, buckets: slice) -> Mean:
    """The loss of a run at 16 times the training length, on tokens of these buckets."""
    found = read_json(RESULTS / f"induction-layouts/{row}-s{seed}.json", Induction, "cannot read it", "")
    assert (found.seed, found.train_length) == (seed, 128)
    (there,) = (one for one in found.rows if (one.length, one.window) == (2048, window))
    some = there.by_distance[buckets]
    assert buckets != FAR_REPEATS or some[0].start == 128
    sums, counts = (np.sum([getattr(one, name) for one in some], axis=0) for name in ("sums", "counts"))
    held = counts > 0
    return Mean.of(sums[held], counts[held], tuple(counts.tolist()))


def losses(row: str, window: int | None, buckets: slice) -> Sequence[tuple[int, Mean]]:
    return [(seed, mean(row, seed, window, buckets)) for seed in range(3)]


def change(row: str, buckets: slice) -> Estimate:
    """The loss as trained less that with the window: below 0 where far keys help."""
    return difference(losses(row, None, buckets), losses(row, 128, buckets))


def far_use() -> str:
    rows = []
    for row, name in ROWS.items():
        windowed, trained = (estimate(losses(row, window, FAR_REPEATS)).value for window in (128, None))
        changes = (said(change(row, buckets)) for buckets in (FAR_REPEATS, OTHERS, ALL))
        rows.append([name, f"{windowed:.3f}", f"{trained:.3f}", *changes])
    header = ["at 16x", "far repeats, window", "far repeats, as trained"]
    return table([*header, "difference", "difference on other tokens", "difference on all tokens"], rows)


TABLES = {"far_use": far_use}

PAGE = (ROOT / "docs/global-heads.md").read_text()
TEXT = " ".join(PAGE.split())


def by_seed(row: str, buckets: slice) -> list[float]:
    pairs = zip(losses(row, None, buckets), losses(row, 128, buckets), strict=True)
    return [trained.value - windowed.value for (_, trained), (_, windowed) in pairs]


def test_what_is_said_of_far_repeats_holds_for_every_seed():
    far = {row: by_seed(row, FAR_REPEATS) for row in ROWS}
    assert {row for row, seeds in far.items() if max(seeds) < 0} == {"cosine-nope", "all-softmax-nope"}
    softmax = far["all-softmax-nope"]
    assert f"layout**: by {-max(softmax):.2f} to {-min(softmax):.2f}, in every seed, also inconclusive." in TEXT
    assert not change("all-softmax-nope", FAR_REPEATS).sure
    assert min(far, key=lambda row: sum(far[row])) == "cosine-nope"
    (readme,) = of_pages("README.md")
    assert f"with a window its own loss is lower by {shown(change('lssar', ALL))} (0.8 M parameters" in readme
    lower, higher = (
        f"{min(map(abs, far[row])):.2f} to {max(map(abs, far[row])):.2f}" for row in ("cosine-nope", "lssar")
    )
    assert f"far keys lower its loss on far repeats by {lower}. With three seeds that is inconclusive." in TEXT
    assert not change("cosine-nope", FAR_REPEATS).sure
    assert change("cosine-nope", OTHERS).sure
    assert min(far["lssar"]) > 0
    assert f"far keys raise its loss on far repeats by {higher}. On all tokens its loss is significantly lower" in TEXT
    assert change("lssar", ALL).sure
    assert change("lssar", ALL).value > 0
    first, most, second = sorted(far["lssa-hybrid"])[0], max(far["lssa-hybrid"]), sorted(far["lssa-hybrid"])[1]
    assert 0 < first < second < 0.01 < most


def test_the_tokens_of_the_far_repeats_are_counted():
    found = read_json(RESULTS / "induction-layouts/softmax-s0.json", Induction, "cannot read it", "")
    buckets = found.rows[0].by_distance
    far, every = (sum(one.tokens for one in some) for some in (buckets[FAR_REPEATS], buckets))
    documents = len(buckets[0].counts)
    assert f"rest on {documents} documents, of which {far:,} of {every:,} tokens are far repeats." in TEXT
