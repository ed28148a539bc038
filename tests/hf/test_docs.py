"""The guide's code blocks run, from the first to the last."""

import re
from pathlib import Path

import softfocus

GUIDE = Path(__file__).parents[2] / "docs" / "transformers.md"


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 13
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
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
