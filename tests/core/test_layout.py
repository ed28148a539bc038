"""Layouts: what a user writes, what comes of it, what is refused and in which words."""

import json
import pickle
from types import SimpleNamespace

import pytest

from softfocus.catalog import learned_parameters, mechanisms, name_of, named
from softfocus.layout import Heads, Layout, resolve


def config(layers=4, heads=8, **others):
    return SimpleNamespace(num_hidden_layers=layers, num_attention_heads=heads, model_type="tiny", **others)


LOCAL = {"mechanism": "softmax", "window": 16}
TYPES = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ({"0::2": LOCAL, "1::2": "lssar"}, (0, 1, 0, 1)),
        ({"0::2": LOCAL, "*": "lssar"}, (0, 1, 0, 1)),
        ({"*": LOCAL, -1: "lssar"}, (0, 0, 0, 1)),
        ({"*": LOCAL, "-1": "lssar"}, (0, 0, 0, 1)),
        ({"2": "lssar", "*": LOCAL}, (0, 0, 1, 0)),
        ({"sliding_attention": LOCAL, "full_attention": "lssar"}, (0, 0, 1, 0)),
        ({"3": "lssar", ":2": LOCAL, 2: LOCAL}, (0, 0, 0, 1)),  # equal kinds are one kind
    ],
)
def test_layers_are_chosen(spec, layers):
    found = resolve(spec, config(layer_types=TYPES))
    assert found.layers == layers
    kinds = [found.layer(number)[0] for number in range(4)]
    assert [kind.window for kind in kinds] == [None if kind.mechanism == named("lssar") else 16 for kind in kinds]
    assert found.mechanism is None


def test_kinds_stand_in_the_order_of_the_layers():
    assert str(resolve({"1::2": "lssar", "*": LOCAL}, config())) == "softmax[16] / lssar"
    assert str(resolve({"*": "lssar"}, config())) == "lssar"
    assert resolve({"*": "lssar"}, config()).mechanism == named("lssar")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "the layout is empty"),
        ({"0": "lssar"}, "no key chooses layers 1, 2, 3 of 4; add '*'"),
        ({"0::2": "lssar", "2": LOCAL, "*": "lssar"}, "'2' chooses layer 2, and so does '0::2'; leave it to one"),
        ({"4": "lssar", "*": "lssar"}, "there is no layer 4; the model has 4, from 0 to 3"),
        ({"7::2": "lssar", "*": "lssar"}, "chooses none of the 4 layers"),
        (
            {"full": "lssar", "*": "lssar"},
            r"'full' chooses no layers; expected its layer types \(sliding_attention, full_att",
        ),
        ({"full_atention": "lssar", "*": "lssar"}, "or '\\*'; did you mean 'full_attention'"),
        ({"1:2:3:4": "lssar", "*": "lssar"}, "chooses no layers"),
        (
            {":": "lssar", "*": "softmax"},
            "other keys choose all 4 layers, so 'softmax', for the rest of them, runs nowhere",
        ),
        ({"*": "lsar"}, r"'\*': .*did you mean 'lssar'"),
        ({"*": []}, "an empty list names no mechanism"),
        ({"*": {"window": 4}}, "needs a mechanism"),
        ({"*": {"mechanism": "lssar", "widow": 4}}, "no entry 'widow'; did you mean 'window'"),
        ({"*": {"mechanism": "lssar", "window": 0}}, "window: got 0, expected a whole number from 1 to"),
        ({"*": {"mechanism": "lssar", "window": 2**63}}, "expected a whole number from 1 to 2147483647, or None"),
        ({"*": {"mechanism": "lssar", "window": 2.0}}, "window: got 2.0"),
        ({"*": {"mechanism": "lssar", "sinks": -1}}, "sinks: got -1"),
        ({"*": {"mechanism": "lssar", "sinks": 4}}, "sinks: got 4 with window=None"),
        ({"*": {"mechanism": "lssar", "sinks": 4, "window": 4}}, "longer than they are"),
        ({"*": {"mechanism": "lssar", "rope": 1.5}}, "rope: got 1.5, expected a share"),
        ({"*": {"mechanism": "lssar", "rope_base": 1}}, "rope_base: got 1, expected a number above 1, or None"),
        ({"*": {"mechanism": "lssar", "rope_base": "1e6"}}, "rope_base: got '1e6'"),
        ({"*": {"mechanism": "lssar", "rope_base": 1e6, "rope": 0}}, "rope_base: got 1000000.0 with rope=0"),
        ({"*": {"mechanism": "lssar", "parameters": {"powr": 3.0}}}, "did you mean 'power'"),
        ({"*": {"mechanism": "lssar", "parameters": {"power": 300.0}}}, r"outside \[1, 100\]"),
        ({"*": {"mechanism": "softmax", "parameters": {"power": 3.0}}}, "does not re-weight"),
        ({"*": {"mechanism": "lssar", "parameters": 3}}, "expected initial values by name"),
        (
            {"*": [{**LOCAL, "heads": 5}, {"mechanism": "lssar", "heads": 4}]},
            "the groups have 9 heads, the layer has 8",
        ),
        (
            {"*": [{**LOCAL, "heads": 5}, {"mechanism": "lssar", "heads": 2}]},
            "the groups have 7 heads, the layer has 8",
        ),
        ({"*": [{**LOCAL, "heads": 8}, "lssar"]}, "the groups have 8 heads, the layer has 8"),
        ({"*": [LOCAL, "lssar"]}, "more than one group of heads leaves out"),
        ({"*": {**LOCAL, "heads": 4}}, "the groups have 4 heads, the layer has 8"),
    ],
)
def test_what_is_refused(spec, message):
    with pytest.raises((ValueError, TypeError), match=message):
        resolve(spec, config(layer_types=TYPES))


def test_groups_of_heads():
    found = resolve({"*": [{**LOCAL, "heads": 6}, "lssar"]}, config())
    assert [group.heads for group in found.layer(0)] == [6, 2]
    assert str(found) == "6x softmax[16] + 2x lssar"
    assert resolve({"*": {"mechanism": "lssar", "heads": 8}}, config()) == resolve({"*": "lssar"}, config())
    shared = config(num_key_value_heads=2)
    assert [group.heads for group in resolve({"*": [{**LOCAL, "heads": 4}, "lssar"]}, shared).layer(0)] == [4, 4]
    with pytest.raises(ValueError, match="heads: got 6, expected a multiple of 4"):
        resolve({"*": [{**LOCAL, "heads": 6}, "lssar"]}, shared)


def test_models_of_several_stacks_are_refused():
    with pytest.raises(ValueError, match="several stacks of layers"):
        resolve({"*": "lssar"}, config(sub_configs={"text_config": object}, text_config=object()))
    with pytest.raises(ValueError, match="no single stack"):
        resolve({"*": "lssar"}, config(is_encoder_decoder=True))


@pytest.mark.parametrize(
    "layout",
    [
        Layout.alike(Heads(mechanism="lssar")),
        Layout.alike(Heads(mechanism="ssmax", window=8, sinks=2, rope=0.25)),
        Layout.alike(Heads(mechanism="lssar", rope_base=500_000)),
        resolve({"0::2": LOCAL, "*": [{"mechanism": "ssmax", "heads": 2, "rope": 0}, "laser(lssar)"]}, config()),
        resolve({"*": {"mechanism": "lssar", "parameters": {"power": 7, "head_scale": 1}}}, config()),
    ],
)
def test_round_trips(layout):
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(Layout.from_dict(layout.to_dict())) == hash(layout)


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [((), None), (((Heads(mechanism="lssar"),),), (0, 1)), (((Heads(mechanism="lssar"),),) * 2, None)],
)
def test_a_layout_that_does_not_add_up_is_refused(kinds, layers):
    with pytest.raises(ValueError, match="every kind to be used"):
        Layout(kinds, layers)


def test_layers_beyond_the_layout_are_refused():
    with pytest.raises(ValueError, match="layer 4: the layout describes the layers 0 to 3"):
        resolve({"*": "lssar"}, config()).layer(4)
    assert Layout.alike(Heads(mechanism="lssar")).layer(None) == (Heads(mechanism="lssar"),)


def test_what_a_mechanism_learns_comes_with_it():
    assert Heads(mechanism="ssmax").learned == learned_parameters("ssmax")
    assert Heads(mechanism="ssmax", parameters={"head_scale": 2}).learned == {"head_scale": 2.0}


def test_table():
    found = resolve({"0::2": {**LOCAL, "sinks": 1}, "*": {"mechanism": "lssar", "rope": 0}}, config())
    assert found.table() == "layers 0, 2: softmax[16+1]\nlayers 1, 3: lssar nope"
    assert Layout.alike(Heads(mechanism="lssar", rope=0.25)).table() == "every layer: lssar rope 0.25"
    based = resolve({"3": {"mechanism": "lssar", "rope": 0.5, "rope_base": 5e5}, "*": "lssar"}, config())
    assert based.table() == "layers 0, 1, 2: lssar\nlayer 3: lssar rope 0.5 base 500000"
    assert based.rope_bases == (5e5,)
    learning = Layout.alike(Heads(mechanism="lssar", parameters=(("power", 5),)))
    assert (str(learning), learning.table()) == ("lssar", "every layer: lssar (learned power from 5)")


@pytest.mark.parametrize("name", list(mechanisms()))
@pytest.mark.parametrize("combination", ["{}", "laser({})", "sharpened({}, 7.125)", "laser(sharpened({}, 2))"])
def test_names_read_back(name, combination):
    try:
        mechanism = named(combination.format(name))
    except ValueError:
        return  # no such combination
    assert named(name_of(mechanism)) == mechanism


def test_names_are_those_of_the_papers():
    texts = ["softmax", "lssar", "sharpened(lssa, 7)", "laser(sharpened(lssa, 7))", "laser", "sharpened(softmax, 31)"]
    assert [name_of(named(text)) for text in texts] == texts
    assert name_of(named("sharpened(lssa, 15)")) == "lssar"
