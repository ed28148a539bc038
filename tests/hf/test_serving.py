"""What others meet who load or serve a saved model: the card beside it, and programs run with the
import.
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import softfocus.hf
from softfocus.hf.__main__ import main
from softfocus.hf.files import write_whole


def test_the_card_says_what_runs_and_how_to_load(build, tmp_path):
    model = build("llama", {"0": {"mechanism": "softmax", "window": 8}, "*": "lssar"})
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    for part in (
        "layer 0: softmax[8]\nlayer 1: lssar",
        "import softfocus.hf\n",
        'LlamaForCausalLM.from_pretrained("path/to/this/folder")',
        "vLLM, TGI, llama.cpp",
        "python -m softfocus.hf lm_eval",
    ):
        assert part in card
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_card_names_the_part_of_a_composite_model_that_was_changed(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config=LlamaConfig(**sizes, vocab_size=61),
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4),
    )
    model = LlavaForConditionalGeneration(config)
    softfocus.hf.use(model.model.language_model, "lssar")
    model.save_pretrained(tmp_path)
    assert "```\ntext_config:\nevery layer: lssar\n```" in (tmp_path / "README.md").read_text()


def test_the_card_follows_the_model(build, tmp_path):
    model = build("llama", "lssar")
    model.save_pretrained(tmp_path)
    softfocus.hf.use(model, "ssmax").save_pretrained(tmp_path)
    assert "every layer: ssmax" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "edit", [lambda card: "# My model\n", lambda card: card + "Mine.\n", lambda card: "Mine.\n" + card]
)
def test_a_card_of_ones_own_is_left_alone(build, tmp_path, edit):
    path = tmp_path / "README.md"
    build("llama", "ssmax").save_pretrained(tmp_path)
    own = edit(path.read_text())
    path.write_text(own)
    build("llama", "lssar").save_pretrained(tmp_path)
    assert path.read_text() == own


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "new" * 10_000 + "\ud800")
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("README.md", "old")]
    write_whole(path, "new")
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("README.md", "new")]


class Hub:
    """Holds the files of one repository, in place of huggingface.co."""

    def __init__(self, monkeypatch):
        self.files, hub = {}, self
        monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: hub)
        monkeypatch.setattr(transformers.modeling_utils, "hf_api", lambda: hub)
        monkeypatch.setattr(ModelCard, "load", lambda repo_id, token=None: hub.load())

    def load(self):
        if "README.md" not in self.files:
            raise EntryNotFoundError("no card")
        return ModelCard(self.files["README.md"])

    def create_repo(self, repo_id, **kwargs):
        return SimpleNamespace(repo_id=repo_id)

    def create_commit(self, operations, **kwargs):
        for one in operations:
            path = Path(one.path_or_fileobj)
            self.files[one.path_in_repo] = path.read_bytes().decode() if path.suffix == ".md" else None


def push(model, tmp_path):
    model.push_to_hub("me/model", tags=["one: two"])


def save_and_push(model, tmp_path):
    model.add_model_tags("one: two")
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/model")


@pytest.mark.parametrize("upload", [push, save_and_push])
def test_the_card_is_pushed_with_the_model(build, tmp_path, monkeypatch, upload):
    """Transformers writes the hub's card, or a blank one, over ours before it uploads."""
    hub = Hub(monkeypatch)
    for mechanism in ("lssar", "ssmax"):  # the second time the hub has ours
        upload(build("llama", mechanism), tmp_path)
        card = hub.files["README.md"]
        assert f"every layer: {mechanism}" in card
        assert "vLLM, TGI, llama.cpp" in card
        assert 'LlamaForCausalLM.from_pretrained("me/model")' in card
        assert ModelCard(card).data.tags == ["softfocus", "one: two"]
        assert "model.safetensors" in hub.files
    hub.files["README.md"] += "Mine.\n"
    own = hub.files["README.md"]
    upload(build("llama", "lssar"), tmp_path)
    assert hub.files["README.md"] == own


def test_a_pushed_card_that_is_not_blank_is_left_alone(build, tmp_path, monkeypatch):
    hub = Hub(monkeypatch)
    push(build("llama"), tmp_path)  # another model: Transformers' card
    assert "automatically generated" in hub.files["README.md"]
    hub.files["README.md"] = own = hub.files["README.md"].replace("[More Information Needed]", "Mine.", 1)
    push(build("llama", "lssar"), tmp_path)
    assert hub.files["README.md"] == own


def test_other_models_get_no_card(build, tmp_path):
    build("llama").save_pretrained(tmp_path / "plain")
    build("llama", "lssar").config.save_pretrained(tmp_path / "config")  # a config alone: no model lies beside it
    assert not [*tmp_path.glob("*/README.md")]


PROGRAM = """
import sys
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained(sys.argv[1]).config._attn_implementation)
"""


@pytest.mark.long
def test_a_program_runs_with_the_import(build, tmp_path):
    build("llama", "lssar").save_pretrained(tmp_path / "model")
    (tmp_path / "harness.py").write_text(PROGRAM)

    def run(*command):
        return subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)

    single = run("-m", "harness", "model")
    assert single.returncode == 1
    assert "import softfocus.hf before loading this model" in single.stderr
    done = run("-m", "softfocus.hf", "harness", "model")
    assert (done.returncode, done.stdout) == (0, "softfocus\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m softfocus.hf MODULE"),
        (["--model"], "usage: python -m softfocus.hf MODULE"),
        (["harnes"], "softfocus.hf: there is no module 'harnes'"),
    ],
)
def test_what_is_no_program_is_one_line(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["softfocus.hf", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()
