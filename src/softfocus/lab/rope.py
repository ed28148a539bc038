"""Dynamic NTK scaling of rotary embeddings, through Transformers' own implementation, one length at a time."""

from typing import Any

from softfocus.lab.errors import LabError


def with_dynamic_ntk(config: Any, train_length: int) -> Any:
    """A configuration's rotary embedding made dynamic, with factor 1.

    For a sequence of L tokens and a rotary dimension d, the base becomes base * (L / train_length)^(d / (d - 2)) where L
    exceeds the training length, and stays where it does not.

    Args:
        config: of a model with rotary embeddings; changed in place.
        train_length: tokens of a training window.

    Raises:
        LabError: no rotary embedding, or one that is scaled in another way already.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise LabError(f"a {config.model_type} model has no rotary embedding that NTK could scale", "add --no-ntk")
    # Some architectures hold one table for each kind of layer
    tables = [parameters] if "rope_type" in parameters else [table for table in parameters.values() if table]
    for table in tables:
        if table["rope_type"] not in ("default", "dynamic"):
            raise LabError(f"the rotary embedding is already scaled, by {table['rope_type']!r}", "add --no-ntk")
        table.update(rope_type="dynamic", factor=1.0)
    config.max_position_embeddings = train_length
    return config
