"""Launches the kernels of a call, each with its tile shape, and stores the compiled kernels."""

from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from softfocus.backends.triton import tuning
from softfocus.backends.triton.arguments import Inputs, Masks, Outputs, Tiling
from softfocus.backends.triton.assembler import right_assembler
from softfocus.backends.triton.inputs import (
    END,
    algebra_of,
    array,
    ceil_div,
    document_bounds,
    inputs_of,
    masks_of,
    row_array,
    tile_lists,
    tiling_of,
)
from softfocus.backends.triton.kernels import (
    backward_rows,
    bias_gradients,
    decode,
    forward,
    key_gradients,
    laser,
    loading,
    masking,
    norms,
    query_gradients,
)
from softfocus.backends.triton.tuning import next_power_of_two
from softfocus.backends.triton.variants import (
    FEW_ROWS,
    SAVED_VECTORS,
    bounded,
    exponential_dtype,
    out_extra_dtype,
    saved_vector_count,
    spans_too_much,
    takes_unit_vectors,
)
from softfocus.contract import LEAVES, Call, pack

TILES_PER_SPLIT = 4  # unmeasured
"""At most one split for so many tiles of the key length. A split may have fewer tiles, or none: a
window, and a sequence that is shorter than its cache, leave fewer tiles to divide.
"""
ELEMENTS_AT_ONCE = 4096  # unmeasured
"""Elements whose norms or exponentials one program computes."""
ALIGNED = 16
"""Bytes. Triton compiles one kernel for addresses that are multiples of it, and one for others."""
NOT_TUNED = ("decode", "bias_gradients")  # they take the first of their tile shapes
FP_FUSION = {"enable_fp_fusion": True}
"""Lets the compiler fuse a product and a sum into one instruction. Triton 3.9 warns that the
default of this option will change: here it is set, so that neither results nor speed change.
"""


class LaunchPlan(NamedTuple):
    """A call divided into tiles of one shape: their ``Tiling``, the masks with the lists of tiles
    to visit that the kernel reads, Triton's options, and the grids of programs.

    ``row_grid`` has a program per block of queries and query head, ``key_grid`` one per block of
    keys and key head.
    """

    tiling: Tiling
    masks: Masks
    options: dict[str, Any]
    row_grid: tuple[int, int]
    key_grid: tuple[int, int]


class Launcher:
    """Builds a call's kernel arguments and launches them. Calls with a cache have no backward."""

    def __init__(self, call: Call) -> None:
        self.call = call
        mechanism = call.mechanism
        self._compiled = _compiled_for(_layout(call))
        self.inputs = inputs_of(call)
        if mechanism.similarity == "cosine":
            query_rnorm = array(self._reciprocal_norms("query", call.query))
            self.inputs = self.inputs._replace(query_rnorm=query_rnorm)
        self.algebra = algebra_of(mechanism, self.inputs.power is not None, bounded(call), call.query.dtype)
        self._surveys: dict[tuning.TileShape, tuple[Masks, Tensor | None]] = {}
        self._launch_plans: dict[tuple[tuning.TileShape, str], LaunchPlan] = {}

    def _launch(self, kernel: Any, variant_key: Hashable, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Does what ``kernel[grid](*args, **options)`` does, but looks up the compiled kernel only
        once per layout of calls. ``variant_key``: what else decides which compiled kernel this is.
        """
        key = kernel, variant_key
        if compiled := self._compiled.get(key):
            compiled[(*grid, 1, 1)[:3]](*args)
        else:
            with right_assembler():
                self._compiled[key] = kernel[grid](*args, **options)  # None in the interpreter

    def forward(self, split: bool = True) -> tuple[Tensor, Tensor]:
        """out [B, H, Lq, Dv] and the saved vectors [n, B, H, Lq], n = ``saved_vector_count(call)``.
        ``split``: whether the keys of a head may be split among programs.
        """
        query, value = self.call.query, self.call.value
        out = query.new_empty(*query.shape[:3], value.size(-1))
        saved = query.new_empty(saved_vector_count(self.call), *query.shape[:3], dtype=torch.float32)
        exact_heads = query.new_zeros(query.shape[:2], dtype=torch.int32) if self.call.mechanism.laser else None
        outputs = self._outputs(out, saved, exact_heads)
        if not query.shape[:3].numel():
            return out, saved
        inputs, splits = self.inputs, splits_of(self.call) if split else 1
        if splits > 1:
            tile = self._with_shape("decode", lambda tile: self._decode(outputs, tile, splits))
        else:
            inputs = self._precomputed_inputs(backward=False)

            def run(tile: tuning.TileShape) -> None:
                plan = self._launch_plan(tile, "key_tiles")
                self._launch(
                    forward.forward, tile, plan.row_grid,
                    inputs, self.algebra, plan.masks, outputs, plan.tiling, **plan.options,
                )  # fmt: skip

            tile = self._with_shape("forward", run)
        if self.call.mechanism.laser:

            def marked_rows(tile: tuning.TileShape) -> None:
                plan = self._launch_plan(tile, "key_tiles")
                # Another kernel after decoding: inputs then has no key norms, unit vectors or e^V
                self._launch(
                    laser.exact_forward, (tile, splits > 1), plan.row_grid,
                    inputs, self.algebra, plan.masks, outputs, plan.tiling, **plan.options,
                )  # fmt: skip

            tuning.where_it_fits(tile, marked_rows)
        return out, saved

    def backward(self, grad: Tensor, bias_grad: bool, out: Tensor, saved: Tensor) -> dict[str, Tensor]:
        """The gradients by name, from what :meth:`forward` returned."""
        if self.algebra.reweighted and splits_of(self.call) > 1:
            # Decoding sums products in another order and drops the least weights
            # (``decode._negligible``). The last bits of its scores differ, and large powers
            # multiply the difference. Forward and backward must compute equal weights
            out, saved = self.forward(split=False)
        exact_heads = (saved[loading.MARK.value] != 0.0).any(-1).int() if self.call.mechanism.laser else None
        outputs = self._outputs(out, saved, exact_heads)
        call = self.call
        query, key, value, bias = call.query, call.key, call.value, call.bias
        vectors = backward_rows.ROW_VECTORS[call.mechanism.laser]
        row_vectors = query.new_empty(vectors, *query.shape[:3], dtype=torch.float32)
        grads = {name: x.new_empty(x.shape) for name, x in (("query", query), ("key", key), ("value", value))}
        grads_by_row = {  # [B, H, Lq]: each row's share of the gradient; summed at the end
            name: query.new_empty(query.shape[:3], dtype=torch.float32)
            for name in ("head_scale", "power")
            if getattr(call, name) is not None
        }
        inputs = self._precomputed_inputs(backward=True)
        if spans_too_much(grad):  # ``refuses`` checks the tensors of the forward only
            grad = grad.contiguous()
        layouts = tuple((x.stride(), x.dtype, x.data_ptr() % ALIGNED) for x in (grad, out, saved))
        grad_out = array(grad)
        grad_exp_out = None  # LASER's dL/d(A e^V): query_gradients computes it from grad_out for the other kernels
        if call.mechanism.laser:
            grad_exp_out = array(torch.empty_like(out, dtype=exponential_dtype(value.dtype)))

        def launch(
            kernel: Any, grid: tuple[int, ...], tile: tuning.TileShape, plan: LaunchPlan, *arguments: Any
        ) -> None:
            # A measurement runs this function many times. That is safe, because each time the first
            # variant overwrites what EXACT then adds to
            for exact in (False, True) if call.mechanism.laser else (False,):
                of_exp_out = grad_exp_out is not None and not exact and kernel is not query_gradients.query_gradients
                incoming_grad = grad_exp_out if of_exp_out else grad_out
                shared = inputs, self.algebra, plan.masks, incoming_grad, outputs, row_array(row_vectors)
                variant_key = tile, exact, layouts
                self._launch(kernel, variant_key, grid, *shared, *arguments, exact, plan.tiling, **plan.options)

        def launch_query_gradients(tile: tuning.TileShape) -> None:
            arrays = array(grads["query"]), grad_exp_out, grads_by_row.get("head_scale"), grads_by_row.get("power")
            plan = self._launch_plan(tile, "key_tiles")
            launch(query_gradients.query_gradients, plan.row_grid, tile, plan, *arrays)

        def launch_key_gradients(tile: tuning.TileShape) -> None:
            arrays = array(grads["key"]), array(grads["value"])
            plan = self._launch_plan(tile, "query_tiles")
            launch(key_gradients.key_gradients, plan.key_grid, tile, plan, *arrays)

        if query.numel():
            self._with_shape("query_gradients", launch_query_gradients)
        if key.numel():
            self._with_shape("key_gradients", launch_key_gradients)
        if bias is not None and bias_grad:
            grads["bias"] = grad_bias = bias.new_empty(bias.shape, dtype=torch.float32)
            broadcast = [size == 1 for size in bias.shape]

            def launch_bias_gradients(tile: tuning.TileShape) -> None:
                plan = self._launch_plan(tile)
                row_blocks = 1 if broadcast[2] else plan.row_grid[0]
                key_blocks = 1 if broadcast[3] else plan.key_grid[0]
                grid = row_blocks * key_blocks, grad_bias.size(0) * grad_bias.size(1)
                arguments = array(grad_bias), grad_bias.size(1), *broadcast
                launch(bias_gradients.bias_gradients, grid, tile, plan, *arguments)

            if grad_bias.numel():
                self._with_shape("bias_gradients", launch_bias_gradients)
        grads |= {name: x.sum((0, 2)) for name, x in grads_by_row.items()}
        return {name: x.to(getattr(call, name).dtype) for name, x in grads.items()}

    def _with_shape(self, kernel: str, run: Callable[[tuning.TileShape], None]) -> tuning.TileShape:
        """Run with the fastest tile shape, or a smaller one that fits. Return the shape taken."""
        return tuning.where_it_fits(self._fastest(kernel, run), run)

    def _fastest(self, kernel: str, run: Callable[[tuning.TileShape], None]) -> tuning.TileShape:
        if (
            kernel in NOT_TUNED
            or knobs.runtime.interpret
            or self.call.cache
            or not (self.call.query.numel() and self.call.key.numel())
        ):
            return tuning.first_shape(kernel, self.call)
        key, candidates = tuning.measurement_key(kernel, self.call), tuning.candidates(kernel, self.call)
        return tuning.fastest(key, self.call.query.device, candidates, run)

    def _launch_plan(self, tile: tuning.TileShape, lists_field: str = "") -> LaunchPlan:
        """``lists_field``: the field of ``Masks`` with the lists of tiles that the kernel reads,
        "key_tiles" or "query_tiles"; "" for a kernel that reads none.
        """
        key = tile, lists_field
        if key not in self._launch_plans:
            query, value = self.call.query, self.call.value
            tiling = tiling_of(query.size(-1), value.size(-1), query.dtype, tile)
            batch, heads, query_length = self.call.query.shape[:3]
            if tile not in self._surveys:
                self._surveys[tile] = self._survey(tile, tiling)
            masks, states = self._surveys[tile]
            if lists_field and states is not None:
                made: Any = {lists_field: tile_lists(states if lists_field == "key_tiles" else states.mT)}
                masks = masks._replace(**made)
            self._launch_plans[key] = LaunchPlan(
                tiling,
                masks,
                {**tile.options, **FP_FUSION},
                (ceil_div(query_length, tile.rows), batch * heads),
                (ceil_div(self.call.visibility.key_length, tile.keys), batch * self.call.key.size(1)),
            )
        return self._launch_plans[key]

    def _precomputed_inputs(self, backward: bool) -> Inputs:
        """The inputs with the keys' norms and LASER's e^V, for kernels that read a key more than
        once.

        With a cache, and in decoding, the kernels compute both from the tile that they read.
        """
        inputs = self.inputs
        if self.call.cache:
            return inputs
        if self.algebra.cosine:
            query, key = self.call.query, self.call.key
            # ``_reciprocal_norms`` fills the keys' unit vectors, query_gradients the queries'
            key_fp16, key_bf16 = self._empty_unit_vectors(key, backward)
            key_rnorm = array(self._reciprocal_norms("key", key, key_fp16, key_bf16))
            inputs = inputs._replace(key_rnorm=key_rnorm, unit_key_fp16=array(key_fp16), unit_key_bf16=array(key_bf16))
            if backward and key_fp16 is not None:
                query_fp16, query_bf16 = self._empty_unit_vectors(query, backward)
                inputs = inputs._replace(unit_query_fp16=array(query_fp16), unit_query_bf16=array(query_bf16))
            elif backward:
                inputs = inputs._replace(scaled_query=array(query.new_empty(query.shape)))
        if self.call.mechanism.laser:
            exp_values, flags = self._exponentials(self.call.value, backward)
            inputs = inputs._replace(value_operand=array(exp_values), value_flags=array(flags))
        return inputs

    def _outputs(self, out: Tensor, saved: Tensor, exact_heads: Tensor | None) -> Outputs:
        dtype, out_extra = out_extra_dtype(self.call.mechanism, out.dtype), None
        if dtype is not None:
            out_extra = saved[SAVED_VECTORS:].flatten().view(dtype)[: out.numel()].view(out.shape)
        return Outputs(array(out), array(out_extra), row_array(saved), exact_heads, END)

    def _empty_unit_vectors(self, x: Tensor, backward: bool) -> tuple[Tensor | None, Tensor | None]:
        """Empty tensors for the unit vectors of x: one in float16, and for the backward one in the
        dtype of x. None where scores are not products of unit vectors.
        """
        if not takes_unit_vectors(self.call):
            return None, None
        return x.new_empty(x.shape, dtype=torch.float16), x.new_empty(x.shape) if backward else None

    def _reciprocal_norms(self, name: str, x: Tensor, fp16: Tensor | None = None, bf16: Tensor | None = None) -> Tensor:
        """1 / |x|, float32 [B, H, L, 1]. ``fp16`` and ``bf16``, if given, get the unit vectors.

        ``name``: "query" or "key", part of variant_key, since the two have different strides.
        """
        rnorm = x.new_empty(*x.shape[:3], 1, dtype=torch.float32)
        outputs = array(rnorm), array(fp16), array(bf16)
        self._launch_by_rows(norms.reciprocal_norms, (name, bf16 is not None), x, outputs)
        return rnorm

    def _exponentials(self, value: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
        """LASER's e^V, shaped as V, and its flags [B, Hk, Lk, 1], which are 0 in the backward."""
        exp_values = value.new_empty(value.shape, dtype=exponential_dtype(value.dtype))
        flags = (value.new_zeros if backward else value.new_empty)(*value.shape[:3], 1, dtype=torch.float32)
        self._launch_by_rows(laser.exponentials, backward, value, (array(exp_values), array(flags)), backward)
        return exp_values, flags

    def _launch_by_rows(
        self, kernel: Any, variant_key: Hashable, x: Tensor, outputs: tuple[Any, ...], *constants: bool
    ) -> None:
        """Launches a kernel whose programs have some rows of x [B, H, L, D] each."""
        batch, heads, length, width = x.shape
        columns = next_power_of_two(width)
        block_rows = max(1, ELEMENTS_AT_ONCE // columns)
        if x.shape[:3].numel():
            grid = ceil_div(length, block_rows), batch * heads
            sizes = heads, length, width, *constants, block_rows, columns
            self._launch(kernel, variant_key, grid, array(x), *outputs, *sizes, **FP_FUSION)

    def _survey(self, tile: tuning.TileShape, tiling: Tiling) -> tuple[Masks, Tensor | None]:
        """The masks without lists of tiles, and the states of all tiles (see ``masking.survey``);
        None where the window alone masks.
        """
        visibility, inputs = self.call.visibility, self.inputs
        masks, mask, documents = masks_of(visibility), visibility.mask, visibility.document_ids
        parts = [part for part in (mask, visibility.key_mask, documents) if part is not None]
        if not parts:
            return masks, None
        batch, heads = max(part.size(0) for part in parts), 1 if mask is None else mask.size(1)
        row_blocks = ceil_div(inputs.query_length, tiling.BLOCK_Q.value)
        key_blocks = ceil_div(inputs.key_length, tiling.BLOCK_K.value)
        counts = parts[0].new_empty(batch, heads, inputs.query_length, 1, dtype=torch.int32)
        states = parts[0].new_zeros(batch, heads, row_blocks, key_blocks, dtype=torch.int8)
        if counts.numel():
            bounds = (None, None) if documents is None else document_bounds(documents, tiling.BLOCK_K.value)
            self._launch(
                masking.survey, tile, (row_blocks, batch, heads),
                inputs, masks, *bounds, array(counts), array(states), tiling, **FP_FUSION,
            )  # fmt: skip
        return masks._replace(counts=array(counts)), states

    def _decode(self, outputs: Outputs, tile: tuning.TileShape, splits: int) -> None:
        query, plan = self.call.query, self._launch_plan(tile)
        all_key_heads, row_count = self.inputs.batch * self.call.key.size(1), self.inputs.group * query.size(2)
        rows_stored = next_power_of_two(row_count)
        rows_constant, stages = tl.constexpr(rows_stored), tl.constexpr(tile.stages)
        assert decode.SCORES_AT_ONCE.value >= 32 * tile.warps, "each thread must have a score of its own"
        # Tensor cores take at least 16 rows. One row goes without them in float32, and in
        # ``decode.weights``, which reads few values
        padded = plan.tiling._replace(BLOCK_Q=tl.constexpr(max(16, rows_stored)))
        tiling_of_weights = padded if rows_stored > 1 else padded._replace(BLOCK_Q=rows_constant)
        tiling_of_statistics = tiling_of_weights if query.dtype == torch.float32 else padded
        split_stats = query.new_empty(all_key_heads, splits, decode.STATS.value, rows_stored, dtype=torch.float32)
        split_accs = query.new_empty(all_key_heads, splits, rows_stored, padded.BLOCK_DV.value, dtype=torch.float32)
        scores = query.new_empty(all_key_heads, row_count, self.inputs.key_length, dtype=torch.float32)
        shared = self.inputs, self.algebra, plan.masks, split_stats, split_accs
        grid, variant_key, options = (splits, all_key_heads), (tile, splits), plan.options
        score_arguments = *shared, scores, rows_constant, stages
        self._launch(decode.statistics, variant_key, grid, *score_arguments, tiling_of_statistics, **options)
        if self.algebra.reweighted:
            self._launch(decode.weights, variant_key, grid, *score_arguments, tiling_of_weights, **options)
        sums = *shared, splits, outputs, rows_constant, tiling_of_statistics  # combine uses only its BLOCK_DV
        self._launch(decode.combine, variant_key, (1, all_key_heads), *sums, **options)


def splits_of(call: Call) -> int:
    """The number of splits of the keys; 0 or 1 means that the keys are not split."""
    query, key = call.query, call.key
    if not key.numel() or query.size(1) // key.size(1) * query.size(2) > FEW_ROWS or call.dropout.p:
        return 1  # the decoding kernels do not support dropout, which is for training
    if (programs := _programs(query.device) // (query.size(0) * key.size(1))) < 2:
        return 1
    tiles = ceil_div(call.visibility.key_length, tuning.first_shape("decode", call).keys)
    return min(programs, tiles // TILES_PER_SPLIT)


def _layout(call: Call) -> Hashable:
    """What the choice of the compiled kernels depends on: all but the seed and tensors' numbers."""
    return call.query.device, *(
        (x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNED) if isinstance(x, Tensor) else x
        for name, x in zip(LEAVES, pack(call), strict=False)
        if name != "seed"
    )


@lru_cache(maxsize=1024)
def _compiled_for(layout: Hashable) -> dict[Hashable, Any]:
    """The compiled kernels that calls of a layout have launched."""
    return {}


@cache
def _programs(device: torch.device) -> int:
    """How many programs keep a device busy: two per multiprocessor, as measured on an H100."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
