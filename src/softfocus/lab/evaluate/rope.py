"""Scalings of rotary embeddings for longer windows, through Transformers' own implementations."""

from typing import Any

from softfocus.lab.errors import LabError
from softfocus.lab.run_folder.results import Rope


def scale_rope(config: Any, rope: Rope, train_length: int, length: int) -> Any:
    """Scale a configuration's rotary embedding for windows of one length.

    Up to the training length L0 nothing changes. For L tokens beyond it and a rotary dimension d:

    * dynamic NTK (`rope_type="dynamic"`, factor 1): the base becomes base * (L / L0)^(d / (d - 2));
    * YaRN (arXiv 2309.00071; `rope_type="yarn"`, factor L / L0): frequencies that turn less than
      once in L0 tokens are divided by the factor, those that turn more than 32 times stay, those
      between are blended; and the cosines and sines are multiplied by 0.1 ln(L / L0) + 1.

    Args:
        config: of a model with rotary embeddings; changed in place.
        rope: how to scale; "trained" changes nothing.
        train_length: tokens of a training window.
        length: tokens of a window to evaluate.

    Raises:
        LabError: no rotary embedding, or one that is scaled in another way already.
    """
    if rope == "trained":
        return config
    remedy = "evaluate it as trained: --rope trained"
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise LabError(f"a {config.model_type} model has no rotary embedding that {rope} could scale", remedy)
    # Some architectures hold one table for each kind of layer, and none for layers without a rotary
    # embedding
    tables = [parameters] if "rope_type" in parameters else [table for table in parameters.values() if table]
    for table in tables:
        if table["rope_type"] not in ("default", "dynamic"):
            raise LabError(f"the rotary embedding is already scaled, by {table['rope_type']!r}", remedy)
        if rope == "ntk":
            heads = getattr(config, "num_attention_heads", 1)
            width = getattr(config, "head_dim", None) or config.hidden_size // heads
            if int(width * table.get("partial_rotary_factor", 1.0)) <= 2:
                raise LabError("heads with two rotary dimensions have one frequency, which NTK cannot scale", remedy)
            table.update(rope_type="dynamic", factor=1.0)
        else:
            factor = max(1.0, length / train_length)
            table.update(rope_type="yarn", factor=factor, original_max_position_embeddings=train_length)
    config.max_position_embeddings = train_length
    return config
