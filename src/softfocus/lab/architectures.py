"""Architectures that claims of the LASER paper need and Transformers lacks.

``vit_qk_layer_norm`` is ViT whose heads normalise queries and keys by LayerNorm.
``llama_query_scale`` is Llama with a learned scale for each dimension of the queries, as AlgoPerf's
Conformer has it. Both add modules to the projections, so that the forward passes stay those of
Transformers.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from softfocus.hf.learned import attention_modules


class HeadNorm(nn.LayerNorm):
    """LayerNorm of each head's part of a projection; the heads of a layer share weight and bias."""

    def forward(self, projected: Tensor) -> Tensor:
        """[..., H * D] -> [..., H * D]."""
        heads = projected.unflatten(-1, (-1, self.normalized_shape[0]))
        return super().forward(heads).flatten(-2)


class QueryScale(nn.Module):
    """Multiplies dimension c of each query by softplus(s_c) / ln 2; s is learned and starts at 0,
    where the factor is 1. The heads of a layer share s.
    """

    def __init__(self, head_dim: int):
        super().__init__()
        self.s = nn.Parameter(torch.zeros(head_dim))

    def forward(self, projected: Tensor) -> Tensor:
        """[..., H * D] -> [..., H * D]."""
        factors = nn.functional.softplus(self.s) / math.log(2)
        return (projected.unflatten(-1, (-1, self.s.numel())) * factors).flatten(-2)


class ViTQKLayerNormConfig(ViTConfig):
    """ViT's configuration."""

    model_type = "vit_qk_layer_norm"


class ViTQKLayerNormForImageClassification(ViTForImageClassification):
    """ViT's classifier, whose heads normalise queries and keys by LayerNorm."""

    config_class = ViTQKLayerNormConfig

    def __init__(self, config: ViTQKLayerNormConfig):
        super().__init__(config)
        for module in attention_modules(self):
            for name in ("q_proj", "k_proj"):
                norm = HeadNorm(module.head_dim, eps=config.layer_norm_eps)
                setattr(module, name, nn.Sequential(getattr(module, name), norm))


class LlamaQueryScaleConfig(LlamaConfig):
    """Llama's configuration."""

    model_type = "llama_query_scale"


class LlamaQueryScaleForCausalLM(LlamaForCausalLM):
    """Llama with a learned scale for each dimension of the queries, before RoPE."""

    config_class = LlamaQueryScaleConfig

    def __init__(self, config: LlamaQueryScaleConfig):
        super().__init__(config)
        module: Any
        for module in attention_modules(self):
            module.q_proj = nn.Sequential(module.q_proj, QueryScale(module.head_dim))


def register() -> None:
    """Make both known to Transformers' Auto classes."""
    AutoConfig.register(ViTQKLayerNormConfig.model_type, ViTQKLayerNormConfig, exist_ok=True)
    AutoModelForImageClassification.register(ViTQKLayerNormConfig, ViTQKLayerNormForImageClassification, exist_ok=True)
    AutoConfig.register(LlamaQueryScaleConfig.model_type, LlamaQueryScaleConfig, exist_ok=True)
    AutoModelForCausalLM.register(LlamaQueryScaleConfig, LlamaQueryScaleForCausalLM, exist_ok=True)
