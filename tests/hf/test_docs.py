"""The code blocks of the guide and of the page about precision run, from the first to the last."""

import re
from pathlib import Path

import softfocus

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "transformers.md", DOCS / "precision.md")


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    blocks = [
        (page, block)
        for page in PAGES
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) == 13
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
