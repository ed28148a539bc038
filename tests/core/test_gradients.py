"""Hand-written derivatives against finite differences, without the reference in between."""

import pytest
import torch

import softfocus
from softfocus.testing import Case

# Each number is moved by itself, so that the time grows with the square of the size
SMALL = Case("small", batch=1, heads=2, key_heads=1, query_length=4, key_length=6, head_dim=3, value_dim=2)


@pytest.mark.parametrize("mechanism", [*softfocus.mechanisms(), "laser(sigmoid_l1)", "sharpened(lssa, 2.5)"])
def test_tiled_gradients_by_finite_differences(mechanism):
    algebra = softfocus.named(mechanism)
    case = Case(**{**SMALL.__dict__, "bias": "1hqk", "head_scale": True, "power": True})
    arguments = case.arguments(algebra, torch.float64, seed=3)
    names = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.requires_grad]

    def f(*leaves):
        return softfocus.attention(**{**arguments, **dict(zip(names, leaves, strict=True))}, backend="tiled")

    assert torch.autograd.gradcheck(f, [arguments[name] for name in names], eps=1e-6, atol=1e-6, rtol=1e-4)
