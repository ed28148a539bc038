"""The code blocks of pages run: of the guide and of the page about precision from the first to the
last.
"""

import re
from pathlib import Path

import softfocus
import softfocus.hf

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "transformers.md", DOCS / "precision.md")


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    blocks = [
        (page, block)
        for page in PAGES
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) == 14
    monkeypatch.chdir(tmp_path)
    names = {}
    for page, block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert names["text"].shape == (2, 10)
    assert softfocus.hf.layout_of(names["model"]).mechanism == softfocus.catalog.named("ssmax")
    assert len(names["names"]) == 4  # a head_scale and a power in each of two layers
    printed = capsys.readouterr().out
    for part in (
        "0 range(0, ",
        "layer 1: lssar",
        "0.43",
        "softplus(log(d) * log(N) * cos(q,k))",
        "attn_implementation='sdpa' would run softmax",
        "torch.Size([2, 1, 6, 48])",
    ):
        assert part in printed


def test_the_layout_with_global_heads_fits_grouped_queries(tokens):
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "global-heads.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict = {}
    exec(code, names)
    kinds = "4x softmax[2] + 4x laser_lssa[256] / 4x cosine_log_n nope + 4x laser_lssa[256] / laser_lssa[256]"
    assert str(softfocus.hf.layout_of(names["model"])) == kinds
    assert names["model"](tokens(1, 9)).logits.isfinite().all()
