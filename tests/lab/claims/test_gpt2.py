"""Every claim at the scale gpt2, which takes several GPUs: planned at its real size, and run from
end to end with tiny models, on stand-ins for FineWeb, ImageNet and LibriSpeech in their formats.

The slow tests are those of the ends: `pytest -m slow tests/lab/claims/test_gpt2.py`.
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from softfocus.lab.claims import claim as claims
from softfocus.lab.claims.claim import Claim
from softfocus.lab.claims.page import standing
from softfocus.lab.claims.reproduce import PUBLISHED, reproduce
from softfocus.lab.claims.results import FIGURE, RESULTS, Run
from softfocus.lab.claims.results import read as read_results
from softfocus.lab.claims.verdict import judge
from softfocus.lab.cli import main
from softfocus.lab.data import tasks
from softfocus.lab.data import tokenizer as tokenizers
from softfocus.lab.data.listing import FETCH_FINEWEB, FINEWEB
from softfocus.lab.errors import LabError
from softfocus.lab.evaluate import classify
from softfocus.lab.recipes import loading
from softfocus.lab.recipes.lengths import parse
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.run_folder.files import load_measured, load_run
from softfocus.lab.run_folder.results import Evaluation
from softfocus.lab.studies import study
from softfocus.lab.train.memory import least_memory

DOCS = Path(__file__).resolve().parents[3] / "docs" / "claims.md"
NAMES = [name for name in claims.shipped() if "gpt2" in claims.load(name).scales]
BASES = {claims.load(name).base("gpt2"): name for name in reversed(NAMES)}
"""The recipes that their rows change, each with the first of the claims."""
SPEECH = "conformer-librispeech"
STEPS = 4
SMALL: dict[str, Any] = {
    "train.batch": 4,
    "train.accumulate": 2,
    "train.steps": STEPS,
    "train.warmup": 1,
    "train.log_every": 1,
    "evaluate.tokens": 4096,
}
"""What is not the recipes' own. Architectures, mechanisms, optimisers, precision, data are."""
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 512,
}
"""Of these a recipe's model has what the recipe itself sets."""
KINDS: dict[str, dict[str, Any]] = {
    "text": {"train.length": 128, "data.tokenizer": "tokenizer"},
    "masked": {"train.length": 128, "data.tokenizer": "tokenizer"},
    "images": {"train.length": 4, "data.images.size": 32},
    "speech": {
        "train.length": 49,
        "data.speech.seconds": 1.0,
        "model.config.conv_dim": [8] * 7,
        "model.config.num_conv_pos_embeddings": 4,
        "model.config.num_conv_pos_embedding_groups": 4,
    },
}
GPU = 80e9
"""Bytes that each of the several GPUs has."""


def small(claim: Claim) -> list[str]:
    """What `--set` changes in all rows of a claim at the scale gpt2. Lengths stay the multiples of
    the training length that the recipe measures at; what rows set stays theirs.
    """
    recipe = loading.load(claim.base("gpt2"))
    kind = recipe.data.kind
    changes = SMALL | KINDS[kind]
    known = [set(loading.load(base).model.config) for base in claim.bases_at("gpt2")]
    shared = set.intersection(*known)
    changes |= {f"model.config.{key}": value for key, value in CONFIG.items() if key in shared}
    if "num_key_value_heads" in set.union(*known) - shared:  # the recipe's 12 do not divide two heads
        changes |= {"model.config.num_attention_heads": 12, "model.config.hidden_size": 48}
    if recipe.train.warmdown:
        changes["train.warmdown"] = 1
    if kind == "text":
        own = recipe.train.length
        changes["evaluate.lengths"] = ",".join(f"{length / own:g}x" for length in parse(recipe.evaluate.lengths, own))
    held = {key for row in claim.rows.values() for key in loading.flat(row)}
    return [f"{key}={value}" for key, value in changes.items() if key not in held]


def recipes_of(name: str) -> list[Recipe]:
    return claims.recipes(claims.load(name), "gpt2", [0])


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory, shard: Any) -> Path:
    """A folder with what the recipes read, under the names by which they read it."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / FINEWEB).mkdir()
    shard(folder / FINEWEB / "fineweb_val_000000.bin", 20_000, 0)
    for number in (1, 2):
        shard(folder / FINEWEB / f"fineweb_train_00000{number}.bin", 10_000, number)
    prompt = "".join((tasks._OPENING, tasks._FILLER, tasks._BEFORE, tasks._BETWEEN, tasks._AFTER, tasks._QUESTION))
    tokenizers.save(tokenizers.load_tokenizer("bpe:512", [prompt] * 8), folder / "tokenizer")
    images(folder / "imagenet")
    speech(folder / "LibriSpeech")
    return folder


def images(folder: Path) -> None:
    """In ImageFolder's layout with ImageNet's names. As there, some are gray, some CMYK, and one is
    a PNG in spite of its name.
    """
    random = np.random.default_rng(0)
    for split, names in (("train", "{label}_{number}"), ("val", "ILSVRC2012_val_{number:08}")):
        for label in ("n01440764", "n01443537", "n02105855"):
            (folder / split / label).mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(256, size=(40 + 10 * number, 60, 3), dtype=np.uint8)
                image = Image.fromarray(pixels).convert(("RGB", "L", "CMYK", "RGB")[number])
                path = folder / split / label / f"{names.format(label=label, number=number)}.JPEG"
                image.save(path, format="PNG" if number == 3 else "JPEG")


def speech(folder: Path) -> None:
    """As LibriSpeech is unpacked."""
    soundfile = pytest.importorskip("soundfile")
    random = np.random.default_rng(0)
    parts = ("train-clean-100/19", "train-clean-360/14", "train-other-500/20", "dev-clean/84")
    for part in parts:
        chapter = folder / part / "198"
        chapter.mkdir(parents=True)
        lines = []
        for number, text in enumerate(("HELLO THERE", "IT'S ME", "GOOD DAY TO YOU")):
            name = f"{chapter.parent.name}-198-{number:04}"
            soundfile.write(chapter / f"{name}.flac", random.normal(0, 0.1, 12_000 + 1_000 * number), 16_000)
            lines.append(f"{name} {text}\n")
        (chapter / f"{chapter.parent.name}-198.trans.txt").write_text("".join(lines))


@pytest.fixture
def here(stand_ins: Path, monkeypatch: pytest.MonkeyPatch, questions: None) -> Path:
    """The working directory, from which the recipes read."""
    monkeypatch.chdir(stand_ins)
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(stand_ins / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", stand_ins / "images")
    for size in ("TRAINING", "TEST"):
        monkeypatch.setattr(classify, size, 256)
    return stand_ins


# At their real size


def test_claims_at_the_scale_gpt2_are_found() -> None:
    assert {"softplus-table-4", "softplus-zero-shot", "laser-vit", "laser-conformer", "laser-sizes"} <= set(NAMES)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_claim_is_planned(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its models and their activations fit into eight GPUs; what it reads is what the guide says
    how to get; and `--estimate` says what it takes, of models that this machine can time.
    """
    text = " ".join(DOCS.read_text().split())
    plan = recipes_of(name)
    different = {recipe.model.model_copy(update={"mechanism": "softmax"}).model_dump_json(): recipe for recipe in plan}
    for recipe in different.values():
        least = least_memory(recipe, processes=8)
        assert least.with_activations
        assert 1e9 < least.size < GPU
    for recipe in plan:
        source, held = recipe.data.source, recipe.data.validation_source
        if recipe.data.kind in ("text", "masked"):
            assert f"{FETCH_FINEWEB} --local-dir {source} " in text
            assert recipe.data.tokenizer.removeprefix("hub:") in text
        else:
            assert f"`{source}`" in text
            assert f"`{held}`" in text
        assert all(any(here.glob(folder)) for folder in (source, held) if folder is not None)
    sets = [word for change in small(claims.load(name)) for word in ("--set", change)]
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", name, "--scale", "gpt2", "--estimate", "--out", "estimated", *sets])
    assert not ended.value.code
    assert re.search(rf"{3 * len(plan)} runs, {3 * len(plan)} of them left: about \S+ ", capsys.readouterr().out)
    assert not (here / "estimated").exists()


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("softplus-vision", "there is no folder imagenet/train; name a folder, not a pattern, that holds"),
        (
            "laser-conformer",
            "no folder fits the pattern LibriSpeech/train-*; name a folder in LibriSpeech's layout",
        ),
        ("laser-query-scale", "there is no file or folder fineweb10B; fetch its 20 GB with `hf download"),
    ],
)
def test_data_that_is_missing_is_said_before_memory_is_looked_at(
    name: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "check_memory", lambda *_: pytest.fail("memory was looked at"))
    with pytest.raises(LabError, match=re.escape(missing)):
        reproduce(name, tmp_path / "out", scale="gpt2", estimate_only=True, console=Console(file=io.StringIO()))


# From end to end in small


def measured(run: Run) -> set[str]:
    """What of `evaluate.also` a run has."""
    found = {
        "attention": run.attention,
        "classification": run.classification,
        "induction": run.induction,
        "passkeys": run.passkeys,
        "tasks": run.tasks,
    }
    return {name for name, there in found.items() if there}


TOKENS: dict[tuple[Path, str], str] = {}
"""Of each run in the module's folder, which is another one where it is trained again."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_claim_runs_to_its_page(name: str, here: Path, workers_here: list[str]) -> None:
    """In one folder, as users run them: claims share the runs of rows that they share. One that
    changes two recipes has models of another size here, and a folder of its own. A verdict takes
    three seeds.
    """
    claim, screen = claims.load(name), Console(file=io.StringIO(), width=250)
    out = Path("runs" if len(claim.bases_at("gpt2")) == 1 else f"runs-{name}")
    made = reproduce(name, out, scale="gpt2", jobs=1, overrides=small(claim), console=screen)
    assert made is not None
    assert sorted(made.rows) == sorted(claim.rows)
    assert made.missing == []
    plan = claims.recipes(claim, "gpt2", range(3), small(claim))
    assert len(made.runs) == len(plan)
    for run, recipe in zip(made.runs, plan, strict=True):
        assert run.info.name == recipe.name
        assert (run.info.status, run.info.steps_done) == ("complete", STEPS)
        assert TOKENS.setdefault((out, run.info.name), run.info.token) == run.info.token, "it was trained twice"
        assert measured(run) >= set(recipe.evaluate.also)
        assert run.evaluation is not None
        lengths = parse(recipe.evaluate.lengths, recipe.train.length)
        settings = {row.setting for row in run.evaluation.rows}
        assert {row.length for row in run.evaluation.rows} == set(lengths)
        assert {setting.mechanism for setting in settings} >= set(recipe.evaluate.mechanisms)
        assert all(np.isfinite(row.loss) for row in run.evaluation.rows)
        assert len(run.info.validation_loss) == min(STEPS, recipe.train.validations)
        assert bool(run.info.projection_norms) == recipe.train.projection_norms
    place = out / PUBLISHED / name / "gpt2"
    assert read_results(place / RESULTS) == made
    page = (out / PUBLISHED / f"{name}.md").read_text()
    assert all(f"| {row} | 3 seeds |" in page for row in claim.rows)
    drawn = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert f"{name}/gpt2/{FIGURE}" in drawn
    assert all((out / PUBLISHED / one).stat().st_size > 5_000 for one in drawn)
    for judged in judge(claim, made):
        parts = [f"{part.verdict}: {part.text}" for part in judged.parts]
        assert judged.verdict in ("holds", "fails", "inconclusive"), parts
        assert f"| {judged.verdict} | {judged.statement.says} |" in page
    assert isinstance(screen.file, io.StringIO)
    assert f"{name} at the scale gpt2: {standing(claim, 'gpt2', made)}" in screen.file.getvalue()


@pytest.mark.parametrize(
    "base", [pytest.param(base, marks=pytest.mark.long if base == SPEECH else pytest.mark.slow) for base in BASES]
)
def test_every_recipe_runs_under_torchrun(base: str, here: Path, tmp_path: Path) -> None:
    """In two processes, as `reproduce --processes 2` starts them. The first of them measures.
    Speech is in CI: its models drop layers at random, each process others.
    """
    claim = claims.load(BASES[base])
    recipe = claims.recipes(claim, "gpt2", [0], small(claim))[-1]
    # Questions are made up in this process alone
    recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"also": []})})
    (file := tmp_path / "recipe.toml").write_text(recipe.to_toml())
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "softfocus.lab.studies.worker", str(file), str(tmp_path / "run")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # processes that wait for one another
    )
    assert done.returncode == 0, done.stderr
    info = load_run(tmp_path / "run")
    assert (info.status, info.steps_done) == ("complete", STEPS)
    assert info.tokens_per_step == recipe.train.batch * recipe.train.length
    assert all(np.isfinite(row.loss) for row in load_measured(tmp_path / "run", Evaluation).rows)
