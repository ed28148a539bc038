"""Every shipped recipe trains, with its own model and mechanisms, on little data.

../evaluate/test_recall.py trains those of generated tasks. `gpt2-124m` and the recipes of the same
size need data that a user fetches: test_gpt2_recipe.py and the dry runs of the claims have them.
"""

from pathlib import Path

import pytest

from softfocus.lab.recipes.loading import load, shipped
from softfocus.lab.train.run import train

FETCHED = ("fineweb10B", "imagenet/train", "LibriSpeech/train-*")
"""Sources that no installation brings."""
TRAINABLE = [
    name
    for name in shipped()
    if not name.startswith(("mqar", "passkey", "repeats")) and load(name).data.source not in FETCHED
]


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINABLE)
def test_it_trains(name: str, tiny: Path, tmp_path: Path) -> None:
    few = ["train.steps=2", "train.batch=2", "train.warmup=0", "train.warmdown=0", "train.log_every=1"]
    data = load(name).data
    if data.source is not None:
        few += [f"data.source={tiny.parent}/*.txt", "data.tokenizer=bytes", "data.validation_fraction=0.3"]
    info = train(load(name, few), tmp_path / "run")
    assert info.status == "complete"
    assert len(info.train_loss) == 2
