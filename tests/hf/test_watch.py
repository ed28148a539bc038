"""What a listener is shown is what the model computes: weights times values make the module's
output.
"""

import pytest
import torch

import softfocus
import softfocus.hf
from softfocus.hf import adapter

LAYOUTS = {
    "softmax": "softmax",
    "lssar": "lssar",
    "learned": "sharpened(ssmax, 3)",
    "layers": {"0": {"mechanism": "softmax", "window": 3}, "1": "lssar"},
    "heads": {"*": [{"mechanism": "softmax", "window": 3, "heads": 2}, {"mechanism": "lssar", "rope": 0}]},
    "sinks": {"*": {"mechanism": "softmax", "window": 4, "sinks": 1}},
}


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_call_has_the_weights_that_the_model_uses(build, tokens, monkeypatch, family, layout, padded):
    if layout == "sinks" and padded:
        pytest.skip("sinks are refused with padding")
    model, ids = build(family, LAYOUTS[layout]).double(), tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0 if padded else 1
    calls, outs, values = [], [], []

    def attention(query, key, value, **arguments):
        values.append(value)
        outs.append(softfocus.attention(query, key, value, **arguments))
        return outs[-1]

    monkeypatch.setattr(adapter, "attention", attention)
    with torch.no_grad(), softfocus.hf.watch(calls.append):
        model(ids, attention_mask=mask, use_cache=False)
        model(ids[:, :5], use_cache=False)
    assert len(calls) == len(outs) == 2 * sum(len(groups) for groups in map(_groups, _modules(model)))
    for call, value, out in zip(calls, values, outs, strict=True):
        weights = softfocus.weights(call.query, call.key, **call.arguments)
        shared = call.query.shape[1] // call.key.shape[1]
        torch.testing.assert_close(weights @ value.repeat_interleave(shared, 1), out, rtol=1e-9, atol=1e-12)
    first = [call for call in calls if call.module is calls[0].module][: len(_groups(calls[0].module))]
    assert [head for call in first for head in call.heads] == list(range(4))


def _modules(model):
    return list(softfocus.hf._learned.attention_modules(model))


def _groups(module):
    return softfocus.hf.layout_of(module.config).layer(module.layer_idx)


def test_nobody_listens_afterwards(build, tokens):
    model, calls = build("llama", "lssar"), []
    with pytest.raises(RuntimeError, match="stop"), softfocus.hf.watch(calls.append):
        raise RuntimeError("stop")
    with torch.no_grad():
        expected = model(tokens(1, 5)).logits
    assert not calls
    with torch.no_grad(), softfocus.hf.watch(calls.append), softfocus.hf.watch(lambda call: None):
        assert torch.equal(model(tokens(1, 5)).logits, expected)
    assert len(calls) == 2


def test_a_listener_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(TypeError, match=r"^listener: got None, expected a function"), softfocus.hf.watch(None):
        pass
