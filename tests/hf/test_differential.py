"""Differential attention with a mechanism: what Transformers' DiffLlama makes of it, compared
with the formula.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM
from transformers.models.diffllama.modeling_diffllama import apply_rotary_pos_emb

import softfocus.hf

PAIRS, HEAD, LENGTH = 2, 8, 11


@pytest.mark.parametrize("mechanism", ["softmax", "laser"])
def test_the_difference_is_taken_of_two_whole_attentions(mechanism: str) -> None:
    """LASER(A1, V) - lambda LASER(A2, V), in float64: the logarithm of the difference itself need
    not exist.
    """
    model = made(mechanism).double()
    seen: dict[str, Any] = {}
    module = model.model.layers[0].self_attn

    def note(_: Any, arguments: Any, options: dict[str, Any], output: Any) -> None:
        seen.update(options, output=output[0])

    module.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.randint(30, (3, LENGTH)), use_cache=False)
        expected = by_hand(module, seen["hidden_states"], seen["position_embeddings"], laser=mechanism == "laser")
    torch.testing.assert_close(seen["output"], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mechanism", ["ssmax", "lssar"])
def test_it_comes_back_with_what_the_mechanism_learned(mechanism: str, tmp_path: Path) -> None:
    """Its lambdas are on the CPU while from_pretrained builds all else on the meta device."""
    model = made(mechanism)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "softfocus_" in name:
                parameter.add_(torch.rand_like(parameter))
    ids = torch.randint(30, (3, LENGTH))
    model.save_pretrained(tmp_path)
    loaded = DiffLlamaForCausalLM.from_pretrained(tmp_path)
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model.named_parameters()}
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def made(mechanism: str) -> DiffLlamaForCausalLM:
    torch.manual_seed(0)
    config = DiffLlamaConfig(
        vocab_size=30,
        hidden_size=2 * PAIRS * HEAD,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2 * PAIRS,
        num_key_value_heads=2 * PAIRS,
        initializer_range=0.3,
    )
    return softfocus.hf.use(DiffLlamaForCausalLM(config), mechanism)


def by_hand(module: Any, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], *, laser: bool) -> torch.Tensor:
    query, key, value = (
        projection(x).unflatten(-1, (2 * PAIRS, HEAD)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) / HEAD**0.5).masked_fill(hidden, -torch.inf)
    first, second = scores.softmax(-1).chunk(2, dim=1)  # [B, pairs, L, L]
    wide = torch.cat(value.chunk(2, dim=1), dim=-1)  # [B, pairs, L, 2 head]
    outs = [(a @ wide.exp()).log() if laser else a @ wide for a in (first, second)]
    products = [getattr(module, f"lambda_q{n}") * getattr(module, f"lambda_k{n}") for n in (1, 2)]
    lambdas = [product.sum(dtype=torch.float32).exp().to(x) for product in products]  # float32 in DiffLlama, too
    out = outs[0] - (lambdas[0] - lambdas[1] + module.lambda_init) * outs[1]
    out = (1 - module.lambda_init) * module.groupnorm(out.transpose(1, 2))
    return module.o_proj(out.flatten(2))
