"""Recipes: what is shipped loads, what is inherited merges, and every mistake is answered in one
line.

Over 400 lines: every mistake that a recipe can hold is in one list.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import softfocus
import softfocus.hf
from softfocus import catalog
from softfocus.lab import model as models
from softfocus.lab.errors import LabError, UsageError
from softfocus.lab.recipes.data import parts_of
from softfocus.lab.recipes.loading import load, shipped
from softfocus.lab.recipes.recipe import Recipe
from softfocus.lab.train.run import train

SAYS = [
    (["train.step=3"], "no key 'train.step'", "did you mean 'train.steps'?"),
    (["trian.steps=3"], "no key 'trian'", "did you mean 'train'?"),
    (["train.steps=0"], "train.steps = 0", "greater than or equal to 1"),
    (["train.steps=99999999999999999999"], "train.steps = 99999999999999999999", "less than or equal to 2147483648"),
    (["data.mqar.keys=99999999999"], "data.mqar.keys = 99999999999", "less than or equal to 1048576"),
    (['name=".."'], "name = '..'", "should match pattern"),  # runs/.. is no run's folder
    (["train.steps=many"], "train.steps = 'many'", "valid integer"),
    (["train.steps=true"], "train.steps = True", "valid integer"),
    (["train.learning_rate=-0.1"], "train.learning_rate = -0.1", "greater than 0"),
    (["train.betas=[0.9]"], "train.betas", "at least 2"),
    (["train.decay=lnear"], "train.decay = 'lnear'", "'linear' or 'cosine'"),
    (["train.warmup=700", "train.warmdown=700"], "warmup=700 + warmdown=700", "more than steps=1100"),
    (["train.accumulate=5"], "batch=16", "not a multiple of accumulate=5"),
    (["model.mechanism=lsar"], "model.mechanism: mechanism 'lsar' is not known", "did you mean 'lssar'"),
    (["model.mechanism=sharpened(lssa, 300)"], "model.mechanism", "outside [1, 100]"),
    (["data.validation_fraction=1"], "data.validation_fraction = 1", "less than 1"),
    (
        ["evaluate.lengths=1x,999999x"],
        "evaluate.lengths: '999999x' is too long",
        "let evaluate.lengths be at most 16,777,216 tokens",
    ),
    (["evaluate.lengths=1x,long"], "evaluate.lengths: 'long' is not a length", "like 1k,2k,16k or 1x,2x,16x"),
    (["data.mqar.pairs=8"], "data: source and mqar exclude one another", "give one of source, mqar, passkey"),
    (["train.steps"], "'train.steps' is not KEY=VALUE", "--set train.steps=100"),
    (["#x=3"], "has no key '#x'", "the keys here are name"),
    (["lr=3"], "has no key 'lr'", "evaluate; a key of a table has a dot, as train.learning_rate"),
    (["steps=3"], "has no key 'steps'", "did you mean 'train.steps'?"),
    (["learning-rate=3"], "has no key 'learning-rate'", "did you mean 'train.learning_rate'?"),
    (["train.steps=9\nx=3"], "sets more than one key", "give --set once for each key"),
    (['model.mechanism={ ph = "exp" }'], "model.mechanism: Mechanism has no field 'ph'", "did you mean 'phi'"),
    (["model.mechanism=3"], "model.mechanism: got 3, expected a name of `softfocus mechanisms`", "correct it in"),
    (
        ["model.config.problem_type=2020-01-01"],
        "model.config: problem_type: got 2020-01-01 (a date), expected a string, bool, number, list or table",
        "correct it in",
    ),
    (["model.config.a={ b = [10:00:00] }"], "model.config: a: got 10:00:00 (a time), expected a string", "correct it"),
    (["model.mechanism={}"], "model.mechanism: mechanism: got no fields", "write 'softmax'"),
    (
        ['model.layout={ "0::2" = { widow = 8 } }'],
        "layout: '0::2': a group of heads has no entry",
        "did you mean 'window'",
    ),
    (['model.layout={ "0::2" = { window = 129 } }'], "a window of 129 is longer than train.length=128", "leave it out"),
    (['model.layout={ "*" = { mechanism = "lsar" } }'], "layout: '*': mechanism 'lsar'", "did you mean 'lssar'"),
    (["train.power={ share = 1.5 }"], "train.power.share = 1.5", "less than or equal to 1"),
    (["train.power={ share = 0.6 }"], "train.power: no head re-weights", "leave train.power out"),
    (
        ["model.mechanism=lssar", "train.power={ end = 31, share = 0.6 }"],
        "end: got 31, but the heads end with 15",
        "leave it",
    ),
    (
        ["model.mechanism=lssar", "model.parameters={ power = 9.0 }", "train.power={ share = 0.6 }"],
        "train.power: no head re-weights with a power that is not learned",
        "leave",
    ),
    (["train.steps.more=1"], "'steps' is a value, not a table", "--set"),
]


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_load_and_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load(name)
    assert recipe.name == name
    written = tmp_path / "other-name.toml"
    written.write_text(recipe.to_toml())
    assert load(written) == recipe


@pytest.mark.parametrize(
    ("overrides", "what", "remedy"),
    [
        (["data.mqar.pair=4"], "no key 'data.mqar.pair'", "did you mean 'data.mqar.pairs'?"),
        (["data.mqar.keys=4"], "pairs=8 is more than keys=4", "raise keys"),
        (["data.mqar.values=0"], "data.mqar.values = 0", "greater than or equal to 1"),
    ],
    ids=str,
)
def test_mistakes_in_a_task_are_said_in_one_line(overrides: list[str], what: str, remedy: str) -> None:
    with pytest.raises(LabError) as caught:
        load("mqar", overrides)
    assert what in str(caught.value)
    assert remedy in str(caught.value)


def test_demo_recipes_differ_in_the_mechanism_alone() -> None:
    found = {name: load(f"demo-{name}") for name in ("softmax", "lssa", "lssar", "laser")}
    for name, recipe in found.items():
        assert recipe.model.mechanism == name
        same = recipe.model_copy(
            update={"name": "demo-softmax", "model": recipe.model.model_copy(update={"mechanism": "softmax"})}
        )
        assert same == found["softmax"]


def test_the_demo_as_t6_has_the_demos_data_and_training() -> None:
    demo = load("demo-slow-start")
    for name, mechanism in (("demo-t6", "softmax"), ("demo-t6-lssar", "lssar")):
        recipe = load(name)
        assert (recipe.data, recipe.train, recipe.evaluate) == (demo.data, demo.train, demo.evaluate)
        assert (recipe.model.architecture, recipe.model.mechanism) == ("t6", mechanism)


def test_paper_recipe_is_the_papers() -> None:
    recipe = load("gpt2-124m-lssar")
    assert recipe.train.batch * recipe.train.length == 524_288
    assert recipe.train.steps == 18_865
    assert (recipe.model.mechanism, recipe.train.length, recipe.train.precision) == ("lssar", 1024, "bf16")


@pytest.mark.parametrize(("overrides", "what", "remedy"), SAYS, ids=[str(row[0]) for row in SAYS])
def test_mistakes_are_said_in_one_line(overrides: list[str], what: str, remedy: str) -> None:
    with pytest.raises(LabError) as caught:
        load("demo", overrides)
    message = str(caught.value)
    assert what in message
    assert remedy in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "override", "says"),
    [
        ("vit-toy", "data.max_documents=2", "max_documents: documents are counted in texts"),
        ("vit-toy", "data.validation_source=images", "validation_source: what is generated has its own held-out part"),
        ("mqar-lssar", "data.max_documents=2", "max_documents: documents are counted in texts"),
        ("mqar-lssar", 'evaluate.mechanisms=["lssa"]', "evaluate.mechanisms: a generated task is measured as trained"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(name: str, override: str, says: str) -> None:
    with pytest.raises(LabError) as caught:
        load(name, [override])
    assert says in str(caught.value)


def test_overrides_are_toml_values_or_plain_strings() -> None:
    recipe = load(
        "demo",
        [
            "train.learning_rate=1e-4",
            "train.betas=[0.5, 0.6]",
            "data.source=/some/where",
            "model.mechanism='lssa'",
            "model.config.rope_parameters.rope_theta=5.0",
            "model.config.attention_bias=false",
        ],
    )
    assert recipe.train.learning_rate == 1e-4
    assert recipe.train.betas == [0.5, 0.6]
    assert recipe.data.source == "/some/where"
    assert recipe.model.mechanism == "lssa"
    assert recipe.model.config["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 5.0,
        "partial_rotary_factor": 1.0,
    }
    assert recipe.model.config["attention_bias"] is False


def test_a_file_inherits_from_shipped_recipes_and_from_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "demo"\ntrain.steps = 700\ntrain.seed = 3\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\ntrain.seed = 4\n')
    recipe = load(tmp_path / "b.toml")
    assert (recipe.name, recipe.train.steps, recipe.train.seed, recipe.train.batch) == (
        "b",
        700,
        4,
        load("demo").train.batch,
    )


def test_a_layer_of_a_layout_and_a_mechanism_replace_those_of_the_base(tmp_path: Path) -> None:
    """With the window alone, layer 0 would keep the mechanism of the base in silence."""
    (tmp_path / "a.toml").write_text(
        'base = "demo"\n[model.mechanism]\nphi = "relu"\nnormaliser = "l1"\n'
        '[model.layout]\n0 = { mechanism = "lssa", window = 8 }\n1 = { window = 16 }\n'
    )
    (tmp_path / "b.toml").write_text(
        'base = "a.toml"\n[model]\nmechanism = { phi = "softplus" }\nlayout.0.window = 4\n'
    )
    model = load(tmp_path / "b.toml").model
    assert model.mechanism == {"phi": "softplus"}
    assert model.layout == {"0": {"window": 4}, "1": {"window": 16}}
    for key in ("model.layout.0.window", 'model.layout."0".window'):
        assert load(tmp_path / "a.toml", [f"{key}=4"]).model.layout["0"] == {"mechanism": "lssa", "window": 4}
    assert load("demo-hybrid", ["model.layout.0::2.window=32"]).model.layout["0::2"]["window"] == 32
    assert load("demo", ["model.layout.*.window=32"]).model.layout == {"*": {"window": 32}}
    with pytest.raises(UsageError, match=r"model.layout has no '1', but '0', '2', '\*'; choose one of these"):
        load("demo-global-heads", ["model.layout.1.window=4"])
    with pytest.raises(UsageError, match=r"model.layout.0 is a list of groups of heads; set all that these layers"):
        load("demo-global-heads", ["model.layout.0.window=4"])


def test_a_circle_of_bases_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('base = "b.toml"\n')
    (tmp_path / "b.toml").write_text('base = "a.toml"\n')
    with pytest.raises(LabError, match="inherits from itself"):
        load(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("demo-lsar", "did you mean 'demo-lssar'"),
        ("nowhere.toml", "no recipe file nowhere.toml"),
        ("x", "`softfocus recipes` lists those that are shipped"),
    ],
)
def test_a_recipe_that_is_not_there(name: str, says: str) -> None:
    with pytest.raises(LabError, match=says):
        load(name)


def test_files_that_are_not_recipes(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[model\n")
    with pytest.raises(LabError, match="not TOML"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(LabError, match="UTF-8"):
        load(path)
    path.write_text("[model]\narchitecture='llama'\nmechanism='lssa'\n")
    with pytest.raises(LabError, match="lacks 'data'"):
        load(path)


def test_lengths_may_be_a_list():
    recipe = load("demo-lssar", ['evaluate.lengths=["1x", "256", "4x"]'])
    assert recipe.evaluate.lengths == "1x,256,4x"


LAYOUT = (
    'model.layout={ "0::2" = { mechanism = "softmax", window = 64 }, "*" = [{ heads = 1, rope = 0.0 }, { heads = 1 }] }'
)


def test_what_a_layout_leaves_out_is_the_models() -> None:
    recipe = load("demo", ["model.mechanism=ssmax", "model.parameters={ head_scale = 2.0 }", LAYOUT])
    local, rest = recipe.model.groups
    assert (str(local[0]), local[0].learned) == ("softmax[64]", {})
    assert [(str(group), group.learned) for group in rest] == [
        ("ssmax nope", {"head_scale": 2.0}),
        ("ssmax", {"head_scale": 2.0}),
    ]
    assert recipe.model.label == "softmax[64] / 1x ssmax nope + 1x ssmax"


def test_a_layout_round_trips(tmp_path: Path) -> None:
    changes = ["model.mechanism=lssar", LAYOUT, "train.power={ start = 2, end = 15, share = 0.5 }", "name=written"]
    recipe = load("demo", changes)
    (tmp_path / "written.toml").write_text(recipe.to_toml())
    assert load(tmp_path / "written.toml") == recipe


def test_global_layers_may_have_a_larger_base_of_rope(tmp_path: Path) -> None:
    layout = 'model.layout={ "0::2" = { window = 64 }, "*" = { rope_base = 500000 } }'
    recipe = load("demo", ["model.mechanism=lssar", layout, "name=written"])
    assert recipe.model.label == "lssar[64] / lssar base 500000"
    (tmp_path / "written.toml").write_text(recipe.to_toml())
    assert load(tmp_path / "written.toml") == recipe
    rotary = models.build(recipe, 257).gpt_neox.rotary_emb
    assert (rotary.config.rope_parameters["rope_theta"], [other.base for other in rotary._softfocus_bases]) == (
        1e4,
        [5e5],
    )


def test_a_mechanism_may_be_a_table() -> None:
    assert (
        load("demo", ['model.mechanism={ phi = "sigmoid", score_bias = "-log(N)", power = 3 }']).model.label
        == "sigmoid_log_n_l1_p3"
    )
    assert load("demo", ["model.mechanism=sharpened(lssa, 7)"]).model.label == "sharpened(lssa, 7)"  # as it is written


@pytest.mark.parametrize(("shape", "half"), [("linear", 8.0), ("cosine", 8.0), ("geometric", 15**0.5)])
def test_the_power_grows_from_start_to_end(shape: str, half: float) -> None:
    power = load(
        "demo", ["model.mechanism=lssar", f'train.power={{ start = 1, share = 0.6, shape = "{shape}" }}']
    ).train.power
    assert power is not None
    assert power.at(15.0, 0.0) == pytest.approx(1.0)
    assert power.at(15.0, 0.3) == pytest.approx(half)
    assert power.at(15.0, 0.6) == power.at(15.0, 1.0) == pytest.approx(15.0)
    path = [power.at(15.0, step / 100) for step in range(101)]
    assert path == sorted(path)


def test_a_registered_name_is_a_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog._CATALOG, "_entries", catalog._CATALOG._entries)
    with pytest.raises(LabError, match="mechanism 'mine' is not known"):
        load("demo", ["model.mechanism=mine"])
    mine = softfocus.Mechanism(phi="sigmoid", power=3)
    softfocus.register("mine", mine)
    recipe = load("demo", ["model.mechanism=laser(mine)"])
    assert recipe.model.groups[0][0].mechanism == softfocus.laser(mine)


@pytest.mark.parametrize("name", ["toy", "small", "gpt2-124m"])
def test_a_llama_is_trained_as_its_model_is(name: str) -> None:
    """They stand in files of their own, because an architecture's keys cannot be taken back."""
    one, other = load(name), load(f"{name}-llama")
    assert (one.data, one.train, one.evaluate) == (other.data, other.train, other.evaluate)


COHERE2 = """
[model]
architecture = "cohere2"
mechanism = "lssar"
[model.config]
hidden_size = 32
num_hidden_layers = 4
num_attention_heads = 2
num_key_value_heads = 1
intermediate_size = 64
[data]
source = "stdlib"
[train]
length = 32
batch = 2
steps = 2
learning_rate = 1e-3
warmup = 1
"""  # three layers with a window, then one without


@pytest.fixture
def cohere2(tmp_path: Path) -> Callable[..., Recipe]:
    (tmp_path / "cohere2.toml").write_text(COHERE2)
    return lambda *changes: load(tmp_path / "cohere2.toml", list(changes))


BY_TYPE = 'model.layout={ sliding_attention = { mechanism = "softmax" }, full_attention = { rope = 0.5 } }'


@pytest.mark.parametrize(
    ("layout", "label", "kinds"),
    [
        (BY_TYPE, "softmax / lssar rope 0.5", [0, 0, 0, 1]),
        ('model.layout={ "0:3" = { mechanism = "softmax" } }', "softmax / lssar", [0, 0, 0, 1]),
        ('model.layout={ "0:2" = { window = 8 }, "2:" = { mechanism = "lssa" } }', "lssar[8] / lssa", [0, 0, 1, 1]),
    ],
)
def test_a_layout_may_name_every_layer(
    layout: str, label: str, kinds: list[int], cohere2: Callable[..., Recipe]
) -> None:
    """The recipe's own mechanism is for the layers that no key names, if there are any."""
    recipe = cohere2(layout)
    model = models.build(recipe, 257)
    assert softfocus.hf.layout_of(model.config).layers == tuple(kinds)
    assert models.label(recipe, model.config) == label


OWN = '"0:3" = { mechanism = "softmax" }, 3 = { mechanism = "ssmax" }'
SHARE = "train.power={ share = 0.5 }"
APART = "model.config.num_key_value_heads=2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            [f"model.layout={{ {OWN} }}", SHARE],
            "train.power applies to no head: [model.layout] leaves no layer to 'lssar', and no group of heads "
            "re-weights with a power that is not learned; leave train.power out, or correct the layout",
        ),
        (
            [f"model.layout={{ {OWN} }}", "model.parameters={ power = 3.0 }"],
            "model.parameters apply to no head: every group of heads in [model.layout] has its own; write them in the "
            "group that is to learn them, or leave them out",
        ),
        (
            [
                'model.layout={ "*" = [{ heads = 1, parameters = { power = 2 } }, "lssa"] }',
                "model.parameters={ power = 3 }",
                APART,
            ],
            "model.parameters apply to no head",
        ),
        (['model.layout={ ":" = { parameters = { power = 2 } } }', SHARE], "train.power applies to no head"),
    ],
)
def test_what_would_apply_to_no_head_is_refused(changes: list[str], words: str, cohere2: Callable[..., Recipe]) -> None:
    recipe = cohere2(*changes)
    for refuse in (lambda: models.check(recipe), lambda: models.build(recipe, 257)):
        with pytest.raises(LabError) as caught:
            refuse()
        assert "\n" not in str(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        ["model.layout={ 0 = { window = 8 }, '1:' = { mechanism = 'softmax' } }", "model.parameters={ power = 3.0 }"],
        ["model.layout={ 0 = { mechanism = 'softmax' } }", "model.parameters={ power = 3.0 }"],
        [
            "model.layout={ '*' = [{ heads = 1 }, { mechanism = 'softmax' }] }",
            "model.parameters={ power = 3.0 }",
            APART,
        ],
        ["model.layout={ 0 = { mechanism = 'lssar' }, '1:' = { mechanism = 'softmax' } }", SHARE],
        ["model.layout={ 0 = { mechanism = 'softmax' } }", SHARE],
    ],
)
def test_what_applies_to_some_head_is_not_refused(changes: list[str], cohere2: Callable[..., Recipe]) -> None:
    models.check(cohere2(*changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('model.layout={ sliding_atention = { mechanism = "softmax" } }', "did you mean 'sliding_attention'"),
        ('model.layout={ 7 = { mechanism = "softmax" } }', "there is no layer 7"),
        ('model.layout={ "*" = [{ heads = 3 }, {}] }', "the groups have 3 heads, the layer has 2"),
        ("model.config.num_key_value_heads=3", "num_key_value_heads=3 does not divide num_attention_heads=2"),
        ("model.config.hiden_size=3", "no key 'model.config.hiden_size'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_corpus_is_read(
    change: str, words: str, cohere2: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("softfocus.lab.data.of_recipe.load", lambda *_: pytest.fail("the corpus was read"))
    with pytest.raises(LabError, match=re.escape(words)):
        train(cohere2(change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_keys_of_the_architecture_that_a_recipe_was_written_for_are_told_from_typing_errors() -> None:
    with pytest.raises(LabError) as caught:
        models.check(load("demo", ["model.architecture=gemma2"]))
    assert caught.value.what == (
        "architecture 'gemma2' has no key 'model.config.use_parallel_residual'; it is one of 'gpt_neox'"
    )
    assert "of a recipe for another architecture, write one without `base`" in caught.value.remedy
    with pytest.raises(LabError, match=r"it is one of 'gpt_neox'; leave it out \(see LlamaConfig"):
        models.check(load("toy-llama", ["model.config.hidden_dropout=0.1"]))
    with pytest.raises(LabError, match=r"no key 'model\.config\.nothing'; see GPTNeoXConfig"):
        models.check(load("demo", ["model.config.nothing=1"]))


def test_a_run_beside_it_does_not_make_a_misspelt_recipe_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text("{}")
    with pytest.raises(LabError, match=r"there is no recipe 'runs/demo-lssar'; `softfocus recipes` lists those"):
        load("runs/demo-lssar")
    with pytest.raises(LabError, match=r"there is no recipe 'dmo-lssar'; did you mean 'demo-lssar'"):
        load("dmo-lssar")


def test_what_windows_are_counted_in() -> None:
    """From the recipe, and from its text in results."""
    found = {name: load(name) for name in ("demo", "mqar", "bert-toy", "vit-toy", "conformer-toy")}
    parts = {name: recipe.data.parts for name, recipe in found.items()}
    tokens = dict.fromkeys(("demo", "mqar", "bert-toy"), "tokens")
    assert parts == tokens | {"vit-toy": "patches", "conformer-toy": "frames"}
    assert {name: parts_of(recipe.to_toml()) for name, recipe in found.items()} == parts
    assert parts_of("") == parts_of("= ") == "tokens"
