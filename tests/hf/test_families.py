"""Families of models whose own attention needs care: what a user would see of it."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    BeamConfig,
    BeamForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    JetMoeConfig,
    JetMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import softfocus.hf

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LOCAL = {"mechanism": "softmax", "window": 4}


@pytest.mark.parametrize(
    "layout", [{"0": LOCAL, "*": "softmax"}, {"0": "softmax", "1": {**LOCAL, "mechanism": "lssar"}}]
)
def test_a_padded_doge_writes_what_it_writes_alone(layout: Any) -> None:
    """Its attention takes the first columns of a mask, so its cache must keep every key."""
    torch.manual_seed(0)
    model = softfocus.hf.use(DogeForCausalLM(DogeConfig(**SIZES)).double().eval(), layout)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A"):  # zero, so that Doge's own mask would do nothing
                parameter.normal_()
    long, short = torch.randint(1, 61, (1, 8)), torch.randint(1, 61, (1, 3))
    both = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)])
    how: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    padded = model.generate(both, attention_mask=(both != 0).long(), **how)
    for row, one in enumerate((long, short)):
        alone = model.generate(one, use_cache=False, **how)
        assert torch.equal(padded.sequences[row, -8:], alone.sequences[0, -8:])
        torch.testing.assert_close(
            torch.stack(padded.logits)[:, row], torch.stack(alone.logits)[:, 0], rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize(
    "layout",
    [
        {"0": {"mechanism": "softmax", "rope_base": 500.0}, "*": "softmax"},
        {"*": {"mechanism": "softmax", "rope": 0}},
        {"0": {"mechanism": "softmax", "rope": 0.5}, "*": "softmax"},
    ],
)
def test_layers_of_beam_without_rope_are_left_alone(layout: Any) -> None:
    """They are handed no tables."""
    torch.manual_seed(0)
    config = BeamConfig(**{**SIZES, "layer_types": ["sliding_attention", "full_attention"]})
    plain = BeamForCausalLM(config).eval()
    ids = torch.randint(1, 61, (2, 9))
    with torch.no_grad():
        before = plain(ids).logits
        after = softfocus.hf.use(plain, layout)(ids).logits
        assert after.isfinite().all()
        assert not torch.allclose(after, before)  # layer 0 has RoPE


def test_a_share_of_rope_in_a_layer_without_it_is_refused() -> None:
    config = BeamConfig(**{**SIZES, "layer_types": ["sliding_attention", "full_attention"]})
    model = softfocus.hf.use(
        BeamForCausalLM(config).eval(), {"1": {"mechanism": "softmax", "rope": 0.5}, "*": "softmax"}
    )
    with pytest.raises(ValueError, match="got no position_embeddings"):
        model(torch.randint(1, 61, (2, 9)))


def test_a_share_of_proportional_rope_is_one_of_the_pairs_that_turn() -> None:
    """Gemma 4 turns a quarter of the pairs of its global layers; its tables hold all of them."""
    torch.manual_seed(0)
    types = ["sliding_attention", "full_attention"]
    sizes = {"head_dim": 32, "global_head_dim": 32, "layer_types": types, "hidden_size_per_layer_input": 0}
    config = Gemma4TextConfig(**{**SIZES, **sizes})
    assert config.rope_parameters["full_attention"]["partial_rotary_factor"] == 0.25
    ids = torch.randint(1, 61, (1, 9))
    plain = Gemma4ForCausalLM(config).eval()

    def turned(rope: float) -> tuple[torch.Tensor, list[bool]]:
        model = softfocus.hf.use(copy.deepcopy(plain), {"1": {"mechanism": "softmax", "rope": rope}, "*": "softmax"})
        queries: list[torch.Tensor] = []
        with softfocus.hf.watch(lambda call: queries.append(call.query)), torch.no_grad():
            logits = model(ids, use_cache=False).logits
        return logits, queries[1]

    (_, none), (whole, every), (half, some) = turned(0), turned(1), turned(0.5)
    pairs = [((query - none).abs().amax((0, 1, 2)) > 1e-6).view(2, 16).any(0).tolist() for query in (every, some)]
    assert pairs == [[True] * 4 + [False] * 12, [True] * 2 + [False] * 14]
    assert not torch.allclose(half, whole)


@pytest.mark.parametrize("group", [{"rope": 0}, {"rope_base": 100.0}])
def test_rope_by_head_is_refused_where_heads_of_a_key_are_far_apart(group: Any) -> None:
    """JetMoe's query head i has key head i modulo 2."""
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "pad_token_id")}
    heads = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 2, "kv_channels": 8}
    config = JetMoeConfig(**sizes, **heads, num_hidden_layers=1, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match="JetMoeAttention has query heads of one key far apart"):
        softfocus.hf.use(JetMoeForCausalLM(config), {"*": [{"mechanism": "softmax", "heads": 2, **group}, "softmax"]})
    alike = softfocus.hf.use(JetMoeForCausalLM(config), {"*": {"mechanism": "softmax", **group}})
    assert alike(torch.randint(3, 61, (1, 9))).logits.isfinite().all()


def test_explain_says_that_laser_refuses_dropout() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "eos_token_id"}
    with pytest.warns(UserWarning, match="will refuse to train"):
        model = softfocus.hf.use(LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=0.1)), "laser")
    assert "backend none (dropout_p: got 0.1 with a LASER mechanism" in softfocus.hf.explain(model)
    assert "backend none" not in softfocus.hf.explain(model.eval())


@pytest.mark.long
def test_sinks_run_in_compiled_layers_and_say_so_in_a_compiled_model() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "eos_token_id"}
    model = softfocus.hf.use(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), "softmax")
    softfocus.hf.window(model, 4, sinks=1)
    ids = torch.randint(1, 61, (2, 9))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with pytest.raises(ValueError, match="compile the layers one by one"):
            torch.compile(model, backend="eager")(ids, use_cache=False)
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(backend="eager")
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
