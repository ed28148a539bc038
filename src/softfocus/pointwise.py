"""phi, its derivative and its logarithm, for every phi of the algebra (eq. 3 and table 3 of arXiv
2501.13428).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_SERIES_BELOW = -20.0
"""Below this score log softplus is computed from two terms of its series in e^s."""
RATIO_IS_ONE_BELOW = -36.0
"""Below this score softplus' / softplus is 1 to the last digit of float64."""


@dataclass(frozen=True)
class Pointwise:
    """One non-linearity, applied element by element in the dtype of its argument.

    Attributes:
        value: phi(s); differentiable twice by autograd.
        derivative: phi'(s); 0 at the kinks of ReLU and ReLU6, as torch has it.
        log: log phi(s) without underflow, -inf where phi(s) is 0; None for the phi that may be
            negative.
        log_derivative: phi'(s) / phi(s) where phi(s) is not 0, without underflow; None as for
            ``log``.
        positive: whether phi(s) > 0 for every s. Far below zero all of these approach e^s, so log
            phi(s) is s there.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    log: Callable[[Tensor], Tensor] | None = None
    log_derivative: Callable[[Tensor], Tensor] | None = None
    positive: bool = False


def softplus(s: Tensor) -> Tensor:
    """log(1 + e^s), to the last digit of its dtype. torch's default is linear above 20, which is
    2e-9 off in float64.
    """
    return F.softplus(s, threshold=700.0 if s.dtype == torch.float64 else 20.0)


def _log_softplus(s: Tensor) -> Tensor:
    # Below LOG_SERIES_BELOW: log(log1p(x)) with x = e^s is s - x/2, up to x^2 < 2e-17. Both
    # branches get harmless arguments, so that autograd's 0 * inf never arises
    far = s < LOG_SERIES_BELOW
    return torch.where(far, s - 0.5 * s.clamp(max=0.0).exp(), softplus(torch.where(far, 0.0, s)).log())


def _softplus_log_derivative(s: Tensor) -> Tensor:
    far = s < RATIO_IS_ONE_BELOW
    return torch.where(far, 1.0, torch.sigmoid(s) / softplus(torch.where(far, 0.0, s)))


def _log_relu(s: Tensor) -> Tensor:
    is_zero = s <= 0.0
    return torch.where(is_zero, -math.inf, torch.where(is_zero, 1.0, s).log())  # autograd gets no infinite derivative


def _normal_cdf(s: Tensor) -> Tensor:
    return 0.5 * torch.erfc(s * -math.sqrt(0.5))  # 1 + erf would cancel below zero


# GELU and Mish are cut off where phi is about to become subnormal: s / (row sum) would overflow in
# the gradient


def _gelu_is_zero(s: Tensor) -> Tensor:
    return s < (-37.0 if s.dtype == torch.float64 else -12.5)


def _mish_is_zero(s: Tensor) -> Tensor:
    return s < (-700.0 if s.dtype == torch.float64 else -88.0)


def _gelu(s: Tensor) -> Tensor:
    return torch.where(_gelu_is_zero(s), 0.0, s * _normal_cdf(s))


def _mish(s: Tensor) -> Tensor:
    return torch.where(_mish_is_zero(s), 0.0, s * torch.tanh(softplus(s)))


def _gelu_derivative(s: Tensor) -> Tensor:
    density = torch.exp(-0.5 * s * s) / math.sqrt(2.0 * math.pi)
    return torch.where(_gelu_is_zero(s), 0.0, _normal_cdf(s) + s * density)


def _mish_derivative(s: Tensor) -> Tensor:
    t = torch.tanh(softplus(s))
    return torch.where(_mish_is_zero(s), 0.0, t + s * (1.0 - t * t) * torch.sigmoid(s))


def _sigmoid_derivative(s: Tensor) -> Tensor:
    return torch.sigmoid(s) * torch.sigmoid(-s)  # 1 - sigmoid(s) would cancel for large s


POINTWISE: dict[str, Pointwise] = {
    "exp": Pointwise(torch.exp, torch.exp, lambda s: s, torch.ones_like, positive=True),
    "softplus": Pointwise(softplus, torch.sigmoid, _log_softplus, _softplus_log_derivative, positive=True),
    "sigmoid": Pointwise(torch.sigmoid, _sigmoid_derivative, F.logsigmoid, lambda s: torch.sigmoid(-s), positive=True),
    "relu": Pointwise(torch.relu, lambda s: (s > 0).to(s.dtype), _log_relu, torch.reciprocal),
    "relu2": Pointwise(
        lambda s: torch.relu(s).square(), lambda s: 2.0 * torch.relu(s), lambda s: 2.0 * _log_relu(s), lambda s: 2.0 / s
    ),
    "relu6": Pointwise(
        F.relu6,
        lambda s: ((s > 0) & (s < 6)).to(s.dtype),
        lambda s: _log_relu(s.clamp(max=6.0)),
        lambda s: (s < 6).to(s.dtype) / s,
    ),
    "gelu": Pointwise(_gelu, _gelu_derivative),
    "mish": Pointwise(_mish, _mish_derivative),
    "identity": Pointwise(torch.clone, torch.ones_like),
}
FUSED = ("exp", "softplus", "sigmoid", "relu", "relu2", "relu6")
"""The phi that the C++ and the Triton kernels implement, in the order of their numbers in C++."""
