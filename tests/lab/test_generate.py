"""Generation: with a cache as without, repeatable, streamed, and refused where there is no
model.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as models_of_text
from transformers import PreTrainedTokenizerFast

from softfocus.lab import model as models
from softfocus.lab.data.tokenizer import word_tokenizer
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.generate import generate
from softfocus.lab.recipes.loading import load
from softfocus.lab.run_folder.files import RUN
from softfocus.lab.train.run import train


def test_greedy_text_is_the_argmax_of_full_forwards(trained: Path) -> None:
    model = models.load(trained)
    ids = list(b"line 7: ")
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    expected = bytes(byte for byte in ids[8:] if byte < 256).decode(errors="replace")
    assert generate(trained, "line 7: ", tokens=12, temperature=0).text == expected


def test_seeds_repeat_and_differ(trained: Path) -> None:
    texts = [generate(trained, "line", tokens=30, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_coldest_text_is_the_greedy_one(trained: Path) -> None:
    greedy = generate(trained, "line", tokens=8, temperature=0).text
    assert [generate(trained, "line", tokens=8, temperature=cold).text for cold in (1e-300, 1e-7)] == [greedy] * 2


def test_streamed_pieces_make_the_text(trained: Path) -> None:
    pieces: list[str] = []
    text = generate(trained, "ä line ", tokens=40, temperature=1.5, write=pieces.append).text
    assert "".join(pieces) == "ä line " + text
    assert len(pieces) > 2


def test_a_model_runs_past_its_training_length(trained: Path) -> None:
    model = models.load(trained)
    ids = list(b"x" * 50)
    with torch.inference_mode():
        for _ in range(5):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    expected = bytes(byte for byte in ids[50:] if byte < 256).decode(errors="replace")
    assert generate(trained, "x" * 50, tokens=5, temperature=0).text == expected


def test_local_layers_keep_the_keys_of_their_window(tiny: Path, trained: Path, tmp_path: Path) -> None:
    layers = [
        "model.config.num_hidden_layers=2",
        'model.layout={ "0" = { window = 8 } }',
        "train.steps=1",
        "train.warmup=0",
    ]
    train(load(tiny, layers), tmp_path / "local")
    a_token = 2 * 32 * 4  # a key and a value of 32 numbers in float32, in each layer
    made = generate(tmp_path / "local", "x" * 20, tokens=30)
    whole = generate(trained, "x" * 20, tokens=30)
    assert made.tokens == whole.tokens == 49
    assert whole.cache_bytes == 49 * a_token
    assert made.cache_bytes == (49 + 7) * a_token
    assert "49 tokens, 14,336 bytes of keys and values: 293 a token" in made.note


def test_what_cannot_be_generated(trained: Path, tmp_path: Path, reseal: Callable[[Path], None]) -> None:
    with pytest.raises(LabError, match="prompt is empty"):
        generate(trained, "")
    with pytest.raises(UsageError, match="--temperature nan is not a temperature"):
        generate(trained, "x", temperature=float("nan"))
    with pytest.raises(LabError, match="there is no run"):
        generate(tmp_path / "nowhere", "x")
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / RUN).write_text((run / RUN).read_text().replace('"complete"', '"running"'))
    with pytest.raises(LabError, match="not finished"):
        generate(run, "x")
    shutil.copy(trained / RUN, run / RUN)
    config = run / "model" / "config.json"
    config.write_text(config.read_text().replace('"softfocus": {', '"other": {'))
    reseal(run)
    with pytest.raises(LabError, match=r"config.json has no entry 'softfocus', the mechanism; train it again"):
        generate(run, "x")
    shutil.rmtree(run / "model")
    with pytest.raises(LabError, match="has no model"):
        generate(run, "x")


def test_a_tokenizer_that_is_damaged_or_another_models_is_refused(
    trained: Path, tmp_path: Path, reseal: Callable[[Path], None]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "model" / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    reseal(run)
    with pytest.raises(LabError, match="cannot load the tokenizer") as caught:
        generate(run, "x")
    assert "train it again with" in str(caught.value)
    shutil.rmtree(run / "model")
    shutil.copytree(trained / "model", run / "model")
    word_tokenizer([f"w{number}" for number in range(300)]).save_pretrained(run / "model")
    reseal(run)
    with pytest.raises(LabError, match="has 301 ids, its model knows 257: it is another one's"):
        generate(run, "w290")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models_of_text.WordLevel({"a": 0, "<end>": 1}, unk_token="?"), "of the prompt, the tokenizer cannot encode"),
        (models_of_text.WordLevel({"a": 0, "<end>": 1, "?": 2}, unk_token="?"), "tokens that are only '\\?': 1"),
        (models_of_text.BPE({"a": 0, "<end>": 1}, []), r"characters \(or bytes\) .* and drops: 1; leave them out"),
    ],
)
def test_a_prompt_that_the_tokenizer_does_not_know_is_refused(
    trained: Path, tmp_path: Path, reseal: Callable[[Path], None], model, message
) -> None:
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("tokenizer*"))
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(run / "model")
    reseal(run)
    assert generate(run, "a <end> a", tokens=1, temperature=0).tokens == 3
    with pytest.raises(LabError, match=message):
        generate(run, "a b", tokens=1)
