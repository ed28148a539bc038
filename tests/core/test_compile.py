"""The custom operators: schema, fakes, autograd registration, torch.compile on the first call,
autocast, checkpointing.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import softfocus
from softfocus import ops, validation
from softfocus.contract import Call, Dropout, pack, unpack
from softfocus.testing import CASES
from softfocus.visibility import Visibility

BY_NAME = {case.name: case for case in CASES}


def _op_arguments(mechanism="lssar", dropout_p=0.0, requires_grad=True, backend="tiled"):
    query = torch.randn(2, 4, 20, 8, requires_grad=requires_grad)
    key, value = (torch.randn(2, 2, 30, 8, requires_grad=requires_grad) for _ in range(2))
    bias = torch.randn(1, 4, 1, 30, requires_grad=requires_grad)
    head_scale = torch.rand(4, requires_grad=requires_grad)
    key_mask = torch.rand(2, 30) > 0.2
    seed = torch.tensor(3) if dropout_p else None
    algebra = softfocus.named(mechanism)
    power = torch.full((4,), 3.0, requires_grad=requires_grad) if algebra.power else None
    visibility = Visibility(20, 30, -1, 0, key_mask=key_mask)
    call = Call(query, key, value, visibility, algebra, 0.3, bias, head_scale, power, Dropout(dropout_p, seed))
    return *pack(call), backend


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "laser"])
def test_opcheck_forward(mechanism, backend):
    torch.library.opcheck(ops.attend, _op_arguments(mechanism, backend=backend))


def test_opcheck_forward_with_dropout():
    torch.library.opcheck(ops.attend, _op_arguments("lssa", dropout_p=0.3))


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_opcheck_backward(backend):
    *leaves, _ = _op_arguments(requires_grad=False)
    out, rows = ops.attend(*leaves, backend)
    kept = (out, rows) if ops.saved_vectors_of(unpack(leaves), backend) else (None, None)
    arguments = (torch.randn_like(out), *leaves, backend, True, *kept)
    torch.library.opcheck(ops.attend_backward, arguments)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("case", ["causal", "grouped", "left padding", "learned", "documents", "mask", "decode"])
def test_compiled_fullgraph_equals_eager(case, backend):
    arguments = {**BY_NAME[case].arguments(softfocus.named("lssar"), torch.float32), "backend": backend}
    torch.compiler.reset()
    compiled = torch.compile(softfocus.attention, fullgraph=True, backend="aot_eager")
    leaves = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    plain = softfocus.attention(**arguments)
    above = torch.randn_like(plain)
    fused = compiled(**arguments)
    assert torch.equal(plain, fused)
    for a, b in zip(torch.autograd.grad(plain, leaves, above), torch.autograd.grad(fused, leaves, above), strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "compiler"),
    [
        ("auto", "inductor"),  # compiles C++
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("cpu", "tiled")),
    ],
)
def test_the_very_first_call_may_be_compiled(backend, compiler):
    code = f"""
import torch, softfocus
arguments = {{"is_causal": True, "mechanism": "laser(lssar)", "backend": {backend!r}}}
@torch.compile(fullgraph=True, backend={compiler!r})
def f(q, k, v):
    return softfocus.attention(q.sin(), k, v, **arguments) * 2
q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
f(q, k, v).sum().backward()
want = softfocus.attention(q.sin(), k, v, **arguments) * 2
torch.testing.assert_close(f(q, k, v), want)
print("fine", bool(q.grad.isfinite().all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "fine True", done.stderr[-2000:]


@pytest.mark.parametrize("mechanism", ["lssar", "sigmoid_log_l"])  # which has the length itself in its scores
@pytest.mark.parametrize("backend", ["cpu", "tiled", pytest.param("reference", marks=pytest.mark.long)])
def test_lengths_can_be_dynamic(backend, mechanism):
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(softfocus.attention, fullgraph=True, dynamic=True, backend=graphs)
    arguments = {"is_causal": True, "mechanism": mechanism, "backend": backend}
    counts = set()
    for length in (5, 9, 70):
        inputs = [torch.randn(1, 2, length, 8) for _ in range(3)]
        assert torch.equal(compiled(*inputs, **arguments), softfocus.attention(*inputs, **arguments))
        counts.add(graphs.frame_count)
    assert len(counts) == 1, "no length is compiled anew"


LENGTH = torch.export.Dim("length", min=2, max=512)


class Weights(torch.nn.Module):
    def forward(self, x):
        return softfocus.weights(x, x, is_causal=True, mechanism="lssar")


class HalfWindow(torch.nn.Module):
    def forward(self, x):
        return softfocus.attention(x, x, x, window_size=(x.size(2) // 2, 0), mechanism="softmax")


class WithWeights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = softfocus.nn.MultiheadAttention(8, 2, batch_first=True, mechanism="softmax")

    def forward(self, x):
        return torch.cat(self.attention(x[0], x[0], x[0]), -1)


@pytest.mark.long
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("made", [Weights, HalfWindow, WithWeights])
def test_what_is_exported_takes_other_lengths(made, strict):
    module = made().eval()
    exported = torch.export.export(
        module, (torch.randn(1, 2, 6, 8),), dynamic_shapes={"x": {2: LENGTH}}, strict=strict
    ).module()
    for length in (3, 70):
        x = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(exported(x), module(x))


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_a_mask_may_come_after_the_lengths_became_dynamic(name):
    """Its own sizes are then numbers, those of the query symbols."""
    torch.compiler.reset()
    compiled = torch.compile(softfocus.attention, fullgraph=True, backend="aot_eager")
    for length in (5, 6, 7):
        inputs = [torch.randn(1, 2, length, 8) for _ in range(3)]
        x = torch.rand(length, length)
        arguments = {name: x < 0.7 if name == "attn_mask" else x} if length == 7 else {}
        assert torch.equal(compiled(*inputs, **arguments), softfocus.attention(*inputs, **arguments))


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_scale_may_vary(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(softfocus.attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    query = torch.randn(1, 2, 9, 8)
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(
            compiled(query, query, query, scale=scale), softfocus.attention(query, query, query, scale=scale)
        )


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_scale_of_softmax_compiles_with_its_warning(dynamic, monkeypatch):
    monkeypatch.setattr(validation, "_warned_of_scale", False)
    torch.compiler.reset()
    compiled = torch.compile(softfocus.attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    query = torch.randn(1, 2, 9, 8)
    compiled(query, query, query, scale=0.1)
    with pytest.warns(UserWarning, match="takes the place of log"):
        compiled(query, query, query, scale=8**-0.5)
    for scale in (0.3, 8**-0.5):
        same = {"scale": scale}
        assert torch.equal(compiled(query, query, query, **same), softfocus.attention(query, query, query, **same))


def test_the_tensors_that_torch_traces_with_are_taken():
    """They are subclasses, too: FakeTensor here, FunctionalTensor in export and functionalize,
    vmap's and autograd's own.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head_scale = torch.nn.Parameter(torch.ones(2))

        def forward(self, q, k, v):
            return softfocus.attention(q, k, v, head_scale=self.head_scale, backend="tiled")

    given, module = tuple(torch.randn(1, 2, 5, 8) for _ in range(3)), Module()
    want = module(*given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(*map(mode.from_tensor, given)).shape == want.shape
    for strict in (True, False):
        assert torch.equal(torch.export.export(module, given, strict=strict).module()(*given), want)
    assert torch.equal(make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)(*given), want)
    assert torch.equal(torch.func.functionalize(module)(*given), want)

    def dense(q, k, v):
        return softfocus.attention(q, k, v, backend="reference").sum()

    torch.testing.assert_close(torch.vmap(dense)(*(x[None] for x in given)), dense(*given)[None])
    assert torch.func.grad(dense)(*given).shape == given[0].shape


@pytest.mark.long
@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_vmap_runs_and_functional_gradients_are_refused_by_name(backend):
    given = [torch.randn(3, 1, 2, 5, 8) for _ in range(3)]

    def call(*tensors):
        return softfocus.attention(*tensors, backend=backend)

    want = torch.stack([call(*one) for one in zip(*given, strict=True)])
    torch.testing.assert_close(torch.vmap(call)(*given), want)
    one = [x[0] for x in given]
    for refused in (
        lambda: torch.func.grad(lambda *x: call(*x).sum())(*one),
        lambda: torch.func.jacrev(call)(*one),
        lambda: torch.func.grad(lambda *x: torch.vmap(call)(*x).sum())(*given),
        lambda: torch.compile(torch.func.grad(lambda *x: call(*x).sum()), backend="eager")(*one),
    ):
        with pytest.raises(NotImplementedError, match=r"only backend='reference' works under torch\.func\.grad"):
            refused()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("cached", [False, True])
def test_a_trace_keeps_no_length_in_its_window(cached):
    """Traced on few keys, run on many."""

    def call(query, key, lengths):
        if cached:
            return softfocus.attention_with_cache(query, key, key, lengths, window_size=(30, 0), backend="tiled")
        return softfocus.attention(query, key, key, window_size=(30, 0), is_causal=True, backend="tiled")

    def given(length):
        query = torch.randn(1, 2, 9, 8)
        return query if cached else torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8), torch.tensor([length])

    few, many = given(9), given(64)
    traced = torch.jit.trace(call, few, check_trace=False)
    torch.testing.assert_close(traced(*many), call(*many))


def test_a_causal_bias_compiles():
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    torch.compiler.reset()
    compiled = torch.compile(softfocus.attention, fullgraph=True, backend="aot_eager")
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
    for mask in (causal_upper_left(4, 9), causal_lower_right(4, 9)):
        same = query, key, key, mask
        assert torch.equal(compiled(*same, backend="tiled"), softfocus.attention(*same, backend="tiled"))


def test_documents_from_lengths_compile():
    torch.compiler.reset()
    compiled = torch.compile(softfocus.document_ids_from_lengths, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([2, 3, 1]), total=6).tolist() == [[0, 0, 1, 1, 1, 2]]
    assert softfocus.document_ids_from_lengths(torch.tensor([2, 0, 1])).tolist() == [[0, 0, 2]]


def test_shapes_on_the_meta_device():
    query, key, value = torch.empty(2, 4, 9, 8, device="meta"), *torch.empty(2, 2, 2, 11, 8, device="meta").unbind()
    for backend in ("tiled", "reference"):
        assert softfocus.attention(query, key, value, enable_gqa=True, backend=backend).shape == (2, 4, 9, 8)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_inputs(backend):
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = softfocus.attention(query, key, value, mechanism="lssa", backend=backend)
    low = softfocus.attention(*(x.bfloat16() for x in (query, key, value)), mechanism="lssa", backend=backend)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, low)
    out.sum().backward()
    assert query.grad.dtype == torch.float32
    assert query.grad.abs().sum() > 0


def test_compiled_calls_on_a_gpu_need_no_question_that_cannot_be_traced(monkeypatch):
    """torch 2.11 cannot trace it: a compiled call on a GPU broke its graph there."""
    monkeypatch.delattr(torch.amp, "is_autocast_available")
    assert not ops.autocasts("cuda")
    assert not ops.autocasts("cpu")


def test_autocast_leaves_float64_alone():
    query = torch.randn(1, 1, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert softfocus.attention(query, query, query).dtype == torch.float64


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("length", [1, 4, 70])
def test_inference_mode_and_no_grad(length, backend):
    query = torch.randn(1, 1, length, 8, requires_grad=True)
    watched = softfocus.attention(query, query, query, backend=backend)
    assert watched.requires_grad
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = softfocus.attention(query, query, query, backend=backend)
        assert not out.requires_grad
        assert torch.equal(out, watched)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_checkpointing_computes_again(backend):
    from torch.utils.checkpoint import checkpoint

    leaves = [torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3)]

    def f(q, k, v):
        return softfocus.attention(q.sin(), k, v, is_causal=True, mechanism="lssar", backend=backend)

    plain = torch.autograd.grad(f(*leaves).square().sum(), leaves)
    second = torch.autograd.grad(checkpoint(f, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, second, strict=True))


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_only_what_needs_a_gradient_gets_one(backend):
    query, key, value = (torch.randn(1, 2, 9, 8) for _ in range(3))
    value.requires_grad_()
    softfocus.attention(query, key, value, backend=backend).sum().backward()
    assert value.grad is not None
    assert query.grad is None


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_a_second_derivative_is_refused_not_wrong(backend):
    query, key, value = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(3))
    out = softfocus.attention(query, key, value, mechanism="lssa", backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("folder", ["", "backends", "backends/cpu", "backends/triton"])
def test_no_comprehension_assigns(folder):
    """torch 2.11 traces none whose ``:=`` sets a variable of the function around it ("Read
    uninitialized cell"). Which torch runs the tests is one of three, so this looks at the text.
    """
    comprehensions = ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp
    for path in (Path(softfocus.__file__).parent / folder).glob("*.py"):
        if path.name == "plan.py":  # of the compiler: no call comes through
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, comprehensions):
                assert not any(isinstance(x, ast.NamedExpr) for x in ast.walk(node)), f"{path.name}:{node.lineno}"


def test_an_exported_graph_refuses_what_its_backend_does_not_take():
    """It has the name of the backend that was chosen for what it was exported from."""

    class Once(torch.nn.Module):
        def forward(self, x):
            return softfocus.attention(x, x, x, is_causal=True, mechanism="lssar", backend="cpu")

    x = torch.randn(1, 2, 6, 8)
    graph = torch.export.export(Once(), (x,)).module()
    torch.testing.assert_close(graph(x), Once()(x))
    with pytest.raises(
        ValueError, match=r"backend 'cpu' was chosen when the graph was made, and torch\.float64 is not"
    ):
        graph(x.double())
