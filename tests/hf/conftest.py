"""Tiny random models, and what it means for two runs of one model to agree."""

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import softfocus.hf
from softfocus.hf.t6 import T6Config, T6ForCausalLM

WINDOW = 4
# Weights of 0.02, the models' own choice, would leave attention all but uniform: no test of it
# could fail.
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
COMMON = {**SIZES, "max_position_embeddings": 64, "initializer_range": 0.4}
TOKENS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def _gpt_neox():
    return GPTNeoXForCausalLM, GPTNeoXConfig(
        **COMMON, **TOKENS, use_parallel_residual=False, rotary_pct=1.0, tie_word_embeddings=True
    )


def _llama():
    return LlamaForCausalLM, LlamaConfig(**COMMON, **TOKENS, num_key_value_heads=2)


def _mistral():
    return MistralForCausalLM, MistralConfig(**COMMON, **TOKENS, num_key_value_heads=2, sliding_window=WINDOW)


def _bert():
    return BertForMaskedLM, BertConfig(
        **COMMON, pad_token_id=0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def _cohere():
    return CohereForCausalLM, CohereConfig(**COMMON, **TOKENS, num_key_value_heads=2)


def _glm():
    return GlmForCausalLM, GlmConfig(**COMMON, **TOKENS, num_key_value_heads=2, head_dim=8)


def _t6():
    return T6ForCausalLM, T6Config(**COMMON, **TOKENS, head_dim=8, q_rank=3, k_rank=2, v_rank=1)


FAMILIES = {
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "bert": _bert,
    "cohere": _cohere,
    "glm": _glm,
    "t6": _t6,
}


@pytest.fixture(scope="session")
def build():
    """``build("llama", "lssar", **config)``: a model in eval mode, the same weights at every call;
    None leaves it alone.
    """

    def build(family, mechanism=None, parameters=None, **changes):
        kind, config = FAMILIES[family]()
        for name, value in changes.items():
            setattr(config, name, value)
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():  # T6 starts with projections of zeros, which no attention would pass
            if parameter.dim() == 2 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.4)
        return model if mechanism is None else softfocus.hf.use(model, mechanism, **(parameters or {}))

    return build


@pytest.fixture(scope="session")
def tokens():
    """``tokens(batch, length)``: random token ids, never the padding token."""

    def tokens(batch, length, seed=1):
        return torch.randint(1, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))

    return tokens


@pytest.fixture(scope="session")
def in_double():
    """``in_double(model)``: a copy of the model in float64."""
    return lambda model: copy.deepcopy(model).double()


@pytest.fixture(scope="session")
def agree():
    """``agree(actual, expected, single)``: two float64 runs are the same mathematics.

    They may differ by a thousandth of what float32 makes of the expected run (``single``). Runs
    that differ by rounding alone come out a million times closer than that, and no slip in a mask
    or a scale comes close.
    """

    def agree(actual, expected, single):
        assert (actual.dtype, expected.dtype, single.dtype) == (torch.float64, torch.float64, torch.float32)
        error, allowed = (actual - expected).abs().max(), (single - expected).abs().max() / 1000
        assert error <= allowed, f"differs by {error:.3g}, allowed {allowed:.3g}"

    return agree
