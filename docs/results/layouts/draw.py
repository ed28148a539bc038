"""README's figure: the rows of its table, as trained and each under its best setting.

Draws readme.png from the results.json beside it: `python docs/results/layouts/draw.py`, from the
root of the repository.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from softfocus.lab.report.figure import BEST, figure1, save_png
from softfocus.lab.report.results import Report, read_as
from softfocus.lab.run_folder.results import AS_TRAINED

RESULTS = Path(__file__).with_name("results.json")
ROWS = {
    "Softmax": "Softmax",
    "softmax-pair-head": "Softmax, a head of two tokens",
    "cosine-nope": "global heads",
    "laser-lssa-local": "LASER over LSSA, every other layer local",
    "lssa-local": "local LSSA layers, global LSSA",
    "lssa-hybrid": "demo-hybrid",
    "softplus_l1": "softplus in place of the exponential",
    "LASER": "LASER in every layer",
    "LSSAR": "LSSAR, p = 15, in every layer",
    "local-nope": "global softmax without RoPE",
}


def source() -> str:
    """What the figure shows."""
    shown = RESULTS.read_bytes() + Path(__file__).read_bytes()
    return f"results.json and draw.py, SHA-256 {hashlib.sha256(shown).hexdigest()}"


def main() -> None:
    """Draw it."""
    by = {group.label: group for group in read_as(Report, RESULTS).groups}
    groups = [replace(by[row], label=name) for row, name in ROWS.items()]
    counts = sorted({len(group.evaluations) for group in groups})
    seeds = " or ".join(map(str, counts))
    title = f"Loss over length: models of 0.8 M parameters, trained on 128 bytes, {seeds} seeds"
    drawn = figure1(groups, title=title, names=[AS_TRAINED.name(), BEST])
    save_png(drawn, RESULTS.with_name("readme.png"), dpi=110, source=source())


if __name__ == "__main__":
    main()
