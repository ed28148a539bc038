"""Every argument error of attention(): its type, and that the message names the argument, what came
and what is expected.

Over 400 lines: a table of every refusal, and what is taken beside it.
"""

import math
import re
import warnings

import numpy as np
import pytest
import torch

from softfocus import attention, explain, functional, validation

B, H, LQ, LK, D, DV = 2, 4, 3, 5, 8, 6


def tensors(**changes):
    given = {
        "query": torch.randn(B, H, LQ, D),
        "key": torch.randn(B, H, LK, D),
        "value": torch.randn(B, H, LK, DV),
    }
    return given | changes


def meta(x):
    return x.to("meta")


# name -> (arguments, error, what the message must contain, in order)
REFUSED = {
    "query is no tensor": ({"query": [[1.0]]}, TypeError, ["query", "list", "torch.Tensor"]),
    "key is no tensor": ({"key": None}, TypeError, ["key", "NoneType", "torch.Tensor"]),
    "value is no tensor": ({"value": 1.0}, TypeError, ["value", "float", "torch.Tensor"]),
    "return_statistics is a word": (
        {"return_statistics": "no"}, TypeError, ["return_statistics", "str", "True or False"],
    ),
    "is_causal of numpy": ({"is_causal": np.bool_(True)}, TypeError, ["is_causal", "numpy.bool", "True or False"]),
    "is_causal is a word": ({"is_causal": "no"}, TypeError, ["is_causal", "str", "True or False"]),
    "enable_gqa is a number": ({"enable_gqa": 1}, TypeError, ["enable_gqa", "int", "True or False"]),
    "query of three dimensions": (
        {"query": torch.randn(H, LQ, D)}, ValueError, ["query", "[4, 3, 8]", "[batch, heads, length, head_dim]"],
    ),
    "key of five dimensions": (
        {"key": torch.randn(1, B, H, LK, D)}, ValueError, ["key", "[1, 2, 4, 5, 8]", "four dimensions"],
    ),
    "value of two dimensions": ({"value": torch.randn(LK, DV)}, ValueError, ["value", "[5, 6]", "four dimensions"]),
    "integer query": (
        {"query": torch.ones(B, H, LQ, D, dtype=torch.int64)}, TypeError, ["query", "torch.int64", "torch.float32"],
    ),
    "complex value": (
        {"value": torch.ones(B, H, LK, DV, dtype=torch.complex64)}, TypeError, ["value", "complex64", "torch.bfloat16"],
    ),
    "dtypes that differ": (
        {"key": torch.randn(B, H, LK, D).half()}, TypeError, ["key", "torch.float16", "query's torch.float32"],
    ),
    "value's dtype differs": (
        {"value": torch.randn(B, H, LK, DV).double()}, TypeError, ["value", "torch.float64", "query's torch.float32"],
    ),
    "devices that differ": ({"key": meta(torch.randn(B, H, LK, D))}, ValueError, ["key", "meta", "device cpu"]),
    "batches that differ": ({"key": torch.randn(3, H, LK, D)}, ValueError, ["key", "batch 3", "query's 2"]),
    "head dims that differ": ({"key": torch.randn(B, H, LK, 7)}, ValueError, ["key", "head_dim 7", "query's 8"]),
    "head dim zero": (
        {"query": torch.randn(B, H, LQ, 0), "key": torch.randn(B, H, LK, 0)}, ValueError, ["head_dim 0", "at least 1"],
    ),
    "value longer than key": (
        {"value": torch.randn(B, H, 6, DV)}, ValueError, ["value", "[2, 4, 6, 6]", "length of key [2, 4, 5, 8]"],
    ),
    "value without a dimension": (
        {"value": torch.randn(B, H, LK, 0)}, ValueError, ["value", "head_dim 0", "at least 1"],
    ),
    "value with other heads": (
        {"value": torch.randn(B, 2, LK, DV)}, ValueError, ["value", "[2, 2, 5, 6]", "heads and length of key"],
    ),
    "grouped heads unasked": (
        {"key": torch.randn(B, 2, LK, D), "value": torch.randn(B, 2, LK, DV)},
        ValueError, ["key", "2 heads", "4", "enable_gqa=True"],
    ),
    "heads that do not divide": (
        {"key": torch.randn(B, 3, LK, D), "value": torch.randn(B, 3, LK, DV), "enable_gqa": True},
        ValueError, ["query", "4 heads", "multiple of the key's 3"],
    ),
    "no key heads": (
        {"key": torch.randn(B, 0, LK, D), "value": torch.randn(B, 0, LK, DV), "enable_gqa": True},
        ValueError, ["query", "4 heads", "multiple of the key's 0"],
    ),
    "attn_mask is no tensor": ({"attn_mask": [[True]]}, TypeError, ["attn_mask", "list", "torch.Tensor"]),
    "attn_mask is True": ({"attn_mask": True}, TypeError, ["attn_mask", "bool", "torch.Tensor"]),
    "attn_mask of one dimension": (
        {"attn_mask": torch.ones(LK, dtype=torch.bool)}, ValueError,
        ["attn_mask", "[5]", "broadcasts to", "[2, 4, 3, 5]"],
    ),
    "attn_mask of five dimensions": (
        {"attn_mask": torch.ones(1, 1, 1, LQ, LK)}, ValueError, ["attn_mask", "[1, 1, 1, 3, 5]", "[2, 4, 3, 5]"],
    ),
    "attn_mask transposed": (
        {"attn_mask": torch.ones(LK, LQ, dtype=torch.bool)}, ValueError, ["attn_mask", "[5, 3]", "[2, 4, 3, 5]"],
    ),
    "attn_mask of padding": (
        {"attn_mask": torch.ones(B, LK, dtype=torch.bool)}, ValueError,
        ["attn_mask", "[2, 5]", "[2, 4, 3, 5]", "a mask of padding [batch, key length] is key_mask"],
    ),
    "attn_mask of float8": (
        {"attn_mask": torch.ones(LQ, LK).to(torch.float8_e4m3fn)}, TypeError,
        ["attn_mask", "torch.float8_e4m3fn", "floating point of 16 bits or more"],
    ),
    "bias of float8": (
        {"bias": torch.ones(LQ, LK).to(torch.float8_e4m3fn)}, TypeError,
        ["bias", "torch.float8_e4m3fn", "floating point of 16 bits or more"],
    ),
    "attn_mask of integers": (
        {"attn_mask": torch.ones(LQ, LK, dtype=torch.int32)},
        TypeError, ["attn_mask", "torch.int32", "torch.bool or floating point"],
    ),
    "attn_mask elsewhere": (
        {"attn_mask": meta(torch.ones(LQ, LK))}, ValueError, ["attn_mask", "meta", "device cpu"],
    ),
    "bias is no tensor": ({"bias": 1.0}, TypeError, ["bias", "float", "torch.Tensor"]),
    "bias of a wrong shape": ({"bias": torch.ones(LQ, 4)}, ValueError, ["bias", "[3, 4]", "[2, 4, 3, 5]"]),
    "bias is bool": (
        {"bias": torch.ones(LQ, LK, dtype=torch.bool)}, TypeError,
        ["bias", "torch.bool", "floating point", "attn_mask"],
    ),
    "bias elsewhere": ({"bias": meta(torch.ones(LQ, LK))}, ValueError, ["bias", "meta", "device cpu"]),
    "key_mask is no tensor": ({"key_mask": [True] * LK}, TypeError, ["key_mask", "list", "torch.Tensor"]),
    "key_mask of a wrong shape": (
        {"key_mask": torch.ones(B, LQ, dtype=torch.bool)}, ValueError,
        ["key_mask", "[2, 3]", "[batch, key length] = [2, 5]"],
    ),
    "key_mask of integers": (
        {"key_mask": torch.ones(B, LK, dtype=torch.int64)}, TypeError, ["key_mask", "torch.int64", "torch.bool"],
    ),
    "key_mask elsewhere": (
        {"key_mask": meta(torch.ones(B, LK, dtype=torch.bool))}, ValueError, ["key_mask", "meta", "device cpu"],
    ),
    "document_ids is no tensor": ({"document_ids": [0] * LK}, TypeError, ["document_ids", "list", "torch.Tensor"]),
    "document_ids of a wrong shape": (
        {"document_ids": torch.zeros(1, LK, dtype=torch.int64)}, ValueError, ["document_ids", "[1, 5]", "[2, 5]"],
    ),
    "document_ids of complex numbers": (
        {"document_ids": torch.zeros(B, LK, dtype=torch.complex64)}, TypeError, ["document_ids", "complex", "integers"],
    ),
    "document_ids of floats": (
        {"document_ids": torch.zeros(B, LK)}, TypeError, ["document_ids", "float32", "integers"],
    ),
    "document_ids of bools": (
        {"document_ids": torch.zeros(B, LK, dtype=torch.bool)}, TypeError, ["document_ids", "bool", "integers"],
    ),
    "more queries than keys in documents": (
        {"query": torch.randn(B, H, 7, D), "document_ids": torch.zeros(B, LK, dtype=torch.int64)},
        ValueError, ["document_ids", "7 queries", "5 keys"],
    ),
    "head_scale is a number": ({"head_scale": 2.0}, TypeError, ["head_scale", "floating-point tensor [heads]"]),
    "head_scale of integers": (
        {"head_scale": torch.ones(H, dtype=torch.int64)}, TypeError, ["head_scale", "floating-point tensor [heads]"],
    ),
    "head_scale of a wrong shape": ({"head_scale": torch.ones(3)}, ValueError, ["head_scale", "[3]", "[heads] = [4]"]),
    "head_scale elsewhere": ({"head_scale": meta(torch.ones(H))}, ValueError, ["head_scale", "meta", "device cpu"]),
    "power is a number": ({"power": 3.0}, TypeError, ["power", "floating-point tensor [heads]", "mechanism"]),
    "power of a wrong shape": ({"power": torch.ones(H, 1)}, ValueError, ["power", "[4, 1]", "[heads] = [4]"]),
    "power without re-weighting": (
        {"power": torch.ones(H), "mechanism": "lssa"}, ValueError, ["power", "does not re-weight", "sharpened()"],
    ),
    "window is a number": ({"window_size": 3}, ValueError, ["window_size", "3", "(left, right)"]),
    "window of three": ({"window_size": (1, 2, 3)}, ValueError, ["window_size", "(1, 2, 3)", "(left, right)"]),
    "window below -1": ({"window_size": (-2, 0)}, ValueError, ["window_size", "(-2, 0)", "-1 for all"]),
    "window of floats": ({"window_size": (1.0, 0)}, ValueError, ["window_size", "(1.0, 0)", "(left, right)"]),
    "dropout above 1": ({"dropout_p": 1.5}, ValueError, ["dropout_p", "1.5", "[0, 1]"]),
    "dropout below 0": ({"dropout_p": -0.1}, ValueError, ["dropout_p", "-0.1", "[0, 1]"]),
    "dropout nan": ({"dropout_p": math.nan}, ValueError, ["dropout_p", "nan", "[0, 1]"]),
    "dropout is no number": ({"dropout_p": "half"}, TypeError, ["dropout_p", "str", "[0, 1]"]),
    "dropout is None": ({"dropout_p": None}, TypeError, ["dropout_p", "NoneType", "[0, 1]"]),
    "dropout with LASER": (
        {"dropout_p": 0.1, "mechanism": "laser"}, ValueError, ["dropout_p", "0.1", "LASER", "log 0", "output instead"],
    ),
    "dropout with LASER over LSSAR": (
        {"dropout_p": 0.1, "mechanism": "laser(lssar)"}, ValueError, ["dropout_p", "0.1", "LASER"],
    ),
    "scale is no number": ({"scale": "big"}, TypeError, ["scale", "str", "number"]),
    "scale of two numbers": ({"scale": torch.ones(2)}, TypeError, ["scale", "Tensor", "number"]),
    "scale nan": ({"scale": math.nan}, ValueError, ["scale", "nan", "finite"]),
    "scale infinite": ({"scale": math.inf}, ValueError, ["scale", "inf", "finite"]),
    "no heads": (
        {name: torch.zeros(B, 0, LK, D) for name in ("query", "key", "value")}, ValueError, ["query", "0 heads", "1"],
    ),
    "no query heads": ({"query": torch.zeros(B, 0, LQ, D), "enable_gqa": True}, ValueError, ["query", "0 heads", "1"]),
    "mechanism is no name": ({"mechanism": 3}, TypeError, ["mechanism", "int", "'lssar'", "Mechanism"]),
    "mechanism is None": ({"mechanism": None}, TypeError, ["mechanism", "NoneType", "'lssar'"]),
    "mechanism misspelt": ({"mechanism": "lsar"}, ValueError, ["mechanism", "'lsar'", "did you mean 'lssar'"]),
    "backend unknown": (
        {"backend": "tilde"}, ValueError, ["backend", "'tilde'", "'auto'", "'cpu'", "'tiled'", "'reference'"],
    ),
    "backend is no name": ({"backend": ["tiled"]}, TypeError, ["backend", "list", "'auto'"]),
    "backend is an array": ({"backend": torch.ones(2, 2).numpy()}, TypeError, ["backend", "ndarray", "'auto'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_in_the_callers_words(case):
    changes, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        attention(**tensors(**changes))
    message = str(caught.value)
    assert "\n" not in message
    at = 0
    for word in words:
        found = message.find(word, at)
        assert found >= 0, f"{word!r} is not in {message[at:]!r}"
        at = found + len(word)


class Other(torch.Tensor):
    """Somebody's subclass, whose memory may mean anything."""


SUBCLASSED = {
    "query": torch.randn(B, H, LQ, D), "key": torch.randn(B, H, LK, D), "value": torch.randn(B, H, LK, DV),
    "attn_mask": torch.zeros(LQ, LK), "bias": torch.zeros(LQ, LK), "key_mask": torch.ones(B, LK, dtype=torch.bool),
    "document_ids": torch.zeros(B, LK, dtype=torch.int64), "head_scale": torch.ones(H), "power": torch.ones(H),
}  # fmt: skip


@pytest.mark.parametrize("name", SUBCLASSED)
def test_a_subclass_of_tensor_is_refused_by_name(name):
    other = SUBCLASSED[name].as_subclass(Other)
    with pytest.raises(TypeError, match=rf"^{name}: got a .*\.Other, expected a plain torch.Tensor; pass .as_subclass"):
        attention(**tensors(**{name: other}))
    assert attention(**tensors(**{name: other.as_subclass(torch.Tensor)})).shape == (B, H, LQ, DV)
    if name in ("query", "key", "value", "bias", "head_scale", "power"):
        assert attention(**tensors(**{name: torch.nn.Parameter(SUBCLASSED[name])})).shape == (B, H, LQ, DV)


@pytest.mark.parametrize("name", ["query", "key", "attn_mask", "key_mask", "bias", "head_scale"])
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_sparse_tensors_are_refused(name, backend):
    with pytest.raises(
        TypeError, match=f"^{name}: got layout torch.sparse_coo, expected torch.strided; call .to_dense"
    ):
        attention(**tensors(**{name: SUBCLASSED[name].to_sparse()}), backend=backend)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_one_block_of_memory_are_refused_with_what_to_do(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.nn.attention.bias import causal_upper_left

    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(4, LQ, D), torch.randn(4, LQ, D)], layout=layout)
        with pytest.raises(TypeError, match=r"^query: got .*[nN]ested.*; pad it and pass key_mask"):
            attention(**tensors(query=nested))
    init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(tensors()["key"], init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"^key: got a torch\.distributed.*DTensor, .*\.to_local\(\)"):
            attention(**tensors(key=sharded))
        assert attention(**tensors(key=sharded.to_local())).shape == (B, H, LQ, DV)
    finally:
        destroy_process_group()
    with pytest.raises(
        TypeError, match=r"^bias: got a torch\.nn\.attention\.bias\.CausalBias, .*; only the attn_mask of softfocus"
    ):
        attention(**tensors(bias=causal_upper_left(LQ, LK)))
    with pytest.raises(ValueError, match=r"^attn_mask: got a CausalBias of \[5, 3\], expected .* = \[3, 5\]"):
        attention(**tensors(attn_mask=causal_upper_left(LK, LQ)))


@pytest.mark.parametrize(("mechanism", "own"), [("lssar", "log(d)"), ("qknorm", "1")])
def test_softmaxs_scale_in_place_of_another_is_said_once(mechanism, own, monkeypatch):
    monkeypatch.setattr(validation, "_warned_of_scale", False)
    same = tensors()
    for harmless in ({"mechanism": "softmax", "scale": D**-0.5}, {"scale": 0.3}, {"scale": math.log(D)}, {}):
        attention(**same, **harmless)
    says = rf"scale is 1/sqrt\(d\), softmax's factor, and takes the place of {re.escape(own)}, "
    with pytest.warns(UserWarning, match=says) as warned:
        attention(**same, scale=1 / math.sqrt(D), mechanism=mechanism)
    attention(**same, scale=D**-0.5, mechanism=mechanism)  # a second warning would be an error
    assert [entry.filename for entry in warned] == [__file__]


def test_the_same_arguments_unchanged_are_taken():
    """So that each refusal above is due to its one change."""
    assert attention(**tensors()).shape == (B, H, LQ, DV)
    everything = tensors(
        attn_mask=torch.ones(LQ, LK, dtype=torch.bool),
        bias=torch.zeros(LQ, LK),
        key_mask=torch.ones(B, LK, dtype=torch.bool),
        document_ids=torch.zeros(B, LK, dtype=torch.int64),
        head_scale=torch.ones(H),
        power=torch.full((H,), 3.0),
        window_size=(2, 1),
        dropout_p=0.5,
        scale=1.0,
        backend="tiled",
    )
    assert attention(**everything).shape == (B, H, LQ, DV)


@pytest.mark.parametrize(
    "shape", [(LQ, LK), (1, LK), (LQ, 1), (1, LQ, LK), (H, 1, LK), (B, 1, 1, LK), (B, H, LQ, LK), (1, 1)]
)
@pytest.mark.parametrize("name", ["attn_mask", "bias"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "cpu"])
def test_every_shape_that_broadcasts_is_taken_as_torch_broadcasts_it(backend, name, shape):
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(shape, generator=generator)
    given = given > -0.7 if name == "attn_mask" else given
    same = tensors()
    full = given.expand(B, H, LQ, LK).contiguous()
    one = attention(**same, **{name: given}, mechanism="softmax", backend=backend)
    other = attention(**same, **{name: full}, mechanism="softmax", backend=backend)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_an_expanded_mask_is_computed_once(name):
    """With grad it keeps its shape, which its gradient has."""
    x = torch.randn(LQ, LK).expand(B, H, LQ, LK)
    call = functional.validated_call(**tensors(), **{name: x}, mechanism="softmax")
    assert call.bias.shape == (1, 1, LQ, LK)
    leaf = x.detach().requires_grad_()
    call = functional.validated_call(**tensors(), **{name: leaf}, mechanism="softmax")
    assert call.bias.shape == (B, H, LQ, LK)
    same = tensors()
    got, want = (
        torch.autograd.grad(attention(**same, **{name: own}, mechanism="softmax").square().sum(), own)[0]
        for own in (leaf, x.contiguous().requires_grad_())
    )
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_transforms_of_an_expanded_bias_are_those_of_a_full_one(name):
    """Their tensors do not say that one inside them requires grad."""
    same, x = tensors(), torch.randn(LQ, LK)

    def mapped(biases):
        def call(bias):
            return attention(**same, **{name: bias}, mechanism="softmax", backend="reference").square().sum()

        return torch.autograd.grad(torch.vmap(call)(biases).sum(), biases)[0]

    def nested(bias):
        def inner(query, given):
            return attention(**{**same, "query": query, name: given}, mechanism="softmax", backend="reference")

        def outer(given):
            return torch.func.grad(lambda query: inner(query, given).square().sum())(same["query"]).sum()

        return torch.func.grad(outer)(bias)

    several = x.expand(3, B, H, LQ, LK)
    for transform, given in ((mapped, several), (nested, several[0])):
        got = transform(given.detach().requires_grad_())
        torch.testing.assert_close(got, transform(given.contiguous().requires_grad_()))


def test_a_graph_recorded_with_an_expanded_mask_takes_another():
    class Masked(torch.nn.Module):
        def forward(self, query, key, value, mask):
            return attention(query, key, value, mask, mechanism="softmax")

    same = tuple(tensors().values())
    expanded = (torch.rand(1, 1, LQ, LK) > 0.3).expand(B, H, LQ, LK)
    other = torch.rand(B, H, LQ, LK) > 0.3
    exported = torch.export.export(Masked(), (*same, expanded)).module()
    torch.testing.assert_close(exported(*same, other), Masked()(*same, other))


def test_a_floating_mask_of_0_and_1_gives_a_warning():
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    seen = torch.ones(3, 5).tril()
    with pytest.warns(UserWarning, match=r"attn_mask: got only 0 and 1 .* pass attn_mask == 1 to softfocus\.att"):
        attention(query, key, key, seen)
    for mask in (seen.bool(), torch.zeros(3, 5), seen.masked_fill(seen == 0, -1e4), 0.5 * seen):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attention(query, key, key, mask)


def test_a_floating_mask_that_only_hides_adds_nothing():
    hidden = torch.rand(LQ, LK, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = torch.zeros(LQ, LK).masked_fill(hidden, -torch.inf)
    call = functional.validated_call(**tensors(), attn_mask=mask)
    assert call.bias is None
    assert torch.equal(call.visibility.mask, ~hidden[None, None])
    for other in (mask.where(mask < 0, 0.5), mask.where(mask < 0, torch.nan), mask.clone().requires_grad_()):
        assert functional.validated_call(**tensors(), attn_mask=other).bias is not None


@pytest.mark.parametrize(
    "case", ["query is no tensor", "head dims that differ", "grouped heads unasked", "mechanism misspelt"]
)
def test_explain_refuses_the_same(case):
    changes, error, words = REFUSED[case]
    with pytest.raises(error, match=words[0]):
        explain(**tensors(**changes))


def test_explain_accounts_for_every_backend():
    answer = explain(**tensors(mechanism="gelu_l1"))  # which the kernels leave to the tiled backend
    assert answer.backend == "tiled"
    assert list(answer.reasons) == ["cpu", "triton", "tiled", "reference"]
    assert all(answer.reasons.values())
    assert "   cpu: phi='gelu' is not among" in str(answer)
    assert "-> tiled: " in str(answer)
    assert "   reference: " in str(answer)
    named = explain(**tensors(), backend="reference")
    assert named.backend == "reference"
    assert named.reasons["reference"] == "asked for by name"
    with pytest.raises(ValueError, match="backend: got 'cuda'"):
        explain(**tensors(), backend="cuda")


@pytest.mark.kernels
def test_auto_takes_the_kernels_where_they_run():
    answer = explain(**tensors())
    assert answer.backend == "cpu"
    assert "slower than 'cpu'" in answer.reasons["tiled"]


def test_auto_takes_the_tiled_backend_where_the_kernels_are_switched_off(monkeypatch):
    monkeypatch.setenv("SOFTFOCUS_KERNELS", "off")
    answer = explain(**tensors())
    assert answer.backend == "tiled"
    assert "SOFTFOCUS_KERNELS=off switches the CPU kernels off" in answer.reasons["cpu"]


def test_a_list_is_a_window_too():
    same = tensors()
    assert torch.equal(attention(**same, window_size=[1, 0]), attention(**same, window_size=(1, 0)))


def test_causality_narrows_a_window():
    same = tensors()
    both = attention(**same, window_size=(1, 2), is_causal=True)
    assert torch.equal(both, attention(**same, window_size=(1, 0)))
