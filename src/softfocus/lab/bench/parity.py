"""The gate: before a cell is timed, what softfocus computes there is compared with the float64
reference.

The tolerance is computed, as in softfocus.testing: twice what the dense formula loses in the cell's
own dtype, and a rounding band. Where the dense float64 formula is too large for all rows, the
subject runs at the full length and some of its rows are compared (gradients: with an upstream
gradient on those rows), and all rows at a shorter length.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from softfocus import functional
from softfocus.lab.bench.cells import Cell, Function, Inputs
from softfocus.lab.errors import LabError, first_line
from softfocus.testing.oracle import REPETITIONS, Outcome, compare

DENSE = 2**23
"""Elements of the dense formula's largest tensor, in float64: 64 MiB, of which several are alive at
once.
"""
ASSERTIONS = __debug__
"""False under python -O, where a comparison that fails would say nothing."""
LEAST, MOST = 8, 64
"""So many rows are compared where not all can be: the dense LASER's take a gigabyte at 16K."""

Order = tuple[Tensor, Tensor]
"""A permutation of the head dimension and one of the keys."""


def check(function: Function, cell: Cell, inputs: Inputs) -> str | None:
    """None where a function computes the cell's mechanism; else what is wrong, in one line.

    Args:
        function: of (query, key, value).
        cell: says the mechanism, the dtype, and whether gradients are checked too.
        inputs: the very tensors that will be timed.
    """
    if not ASSERTIONS:
        raise LabError("python -O takes out the parity checks, which are assertions", "run the benchmark without -O")
    query, key, value = (x.detach() for x in inputs[:3])
    try:
        rows = _rows(cell)
        _hold(function, cell, query, key, value, rows)
        if cell.causal and len(rows) < cell.length:
            short = _short(cell)
            query, key, value = (x[:, :, :short].contiguous() for x in (query, key, value))
            _hold(function, cell, query, key, value, torch.arange(short))
    except AssertionError as error:
        return " ".join(str(error).split())
    except Exception as error:  # a kernel that raises is as wrong as one that returns something else
        return f"{cell.label}: raised {type(error).__name__}: {first_line(error)}"
    return None


def _row(cell: Cell) -> int:
    """Elements of the dense formula's largest tensor in one row of all heads: LASER's has the
    columns of V as well.
    """
    return cell.batch * cell.heads * (cell.head_dim if cell.algebra.laser else 1)


def _short(cell: Cell) -> int:
    """The longest length, in powers of two, whose dense formula fits."""
    length = 16
    while _row(cell) * (2 * length) ** 2 <= DENSE and 2 * length < cell.length:
        length *= 2
    return length


def _rows(cell: Cell) -> Tensor:
    """The rows that are compared: all where they fit, and in decoding, which has a single one; else
    some spread over the length, and the last ones.
    """
    if not cell.causal or cell.queries * cell.length * _row(cell) <= DENSE:
        return torch.arange(cell.queries)
    many = max(LEAST, min(MOST, DENSE // (_row(cell) * cell.length)))
    apart = torch.linspace(0, cell.length - 1, many - many // 2).long()  # at odd places: no multiples of a tile
    return torch.cat([apart, torch.arange(cell.length - many // 2, cell.length)]).unique()


def _hold(function: Function, cell: Cell, query: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> None:
    """Compare some rows, and the gradients that come from them."""
    length, rows = key.size(2), rows.to(key.device)
    visible = None
    if cell.causal:
        visible = torch.arange(length, device=key.device)[None, :] <= rows[:, None]  # [R, L]
    generator = torch.Generator().manual_seed(cell.seed + 1)
    shape = (cell.batch, cell.heads, len(rows), cell.head_dim)
    grad_out = torch.randn(shape, generator=generator, dtype=torch.float64).to(key.device)

    def actually(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if cell.what != "backward":
            function(query, key, value)  # a second call takes another way than the first: it is the one that is timed
        return function(query, key, value)[:, :, rows]

    def formula(order: Order, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dims, keys = order
        return functional.attention(
            query[:, :, rows][..., dims],
            key[:, :, keys][..., dims],
            value[:, :, keys],
            None if visible is None else visible[:, keys],
            mechanism=cell.algebra,
            backend="reference",
        )

    def order(seed: int) -> Order:
        generator = torch.Generator().manual_seed(seed)
        dims, keys = (
            torch.randperm(n, generator=generator) if seed else torch.arange(n) for n in (cell.head_dim, length)
        )
        return dims.to(key.device), keys.to(key.device)

    inputs = (query, key, value)
    backward = cell.what == "backward"
    actual = _outcome(actually, inputs, grad_out, backward)
    doubles = tuple(x.double() for x in inputs)
    expected = _outcome(partial(formula, order(0)), doubles, grad_out, backward)
    sizes = {name: float(x.abs().max()) for name, x in expected.tensors.items()}
    yardstick = dict.fromkeys(sizes, 0.0)
    label = f"{cell.mechanism} {cell.what} at {length:,}, {cell.dtype}"
    for seed in range(REPETITIONS):  # the tolerance only grows: once it suffices, no further inputs are drawn
        eager = _outcome(partial(formula, order(seed)), inputs, grad_out, backward).tensors
        for name, want in expected.tensors.items():
            yardstick[name] = max(yardstick[name], float((eager[name].double() - want).abs().max()))
        try:
            compare(actual, expected, yardstick, sizes, label)
        except AssertionError:
            if seed == REPETITIONS - 1:
                raise
        else:
            return


def _outcome(
    function: Callable[[Tensor, Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, ...],
    grad_out: Tensor,
    backward: bool,
) -> Outcome:
    """What a function returns, and in a backward cell its three gradients."""
    query, key, value = (x.detach().requires_grad_(backward) for x in inputs)
    if not backward:
        with torch.no_grad():
            return Outcome({"out": function(query, key, value)})
    out = function(query, key, value)
    grads = torch.autograd.grad(out, (query, key, value), grad_out.to(out))
    names = ("query.grad", "key.grad", "value.grad")
    return Outcome({"out": out.detach(), **dict(zip(names, grads, strict=True))})
