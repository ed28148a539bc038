"""What a backend declares: it supports that, it refuses everything else by name, and asking costs
nothing.

Over 400 lines: every backend runs through the same declarations.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from softfocus import Mechanism, attention, attention_with_cache, dispatch, explain, ops, weights
from softfocus.backends import cpu, tiled, triton
from softfocus.backends.cpu import build
from softfocus.backends.cpu import call as cpu_call
from softfocus.contract import GRADIENTS, LEAVES, Call, Dropout, Supported, pack, unpack
from softfocus.functional import validated_call
from softfocus.mechanism import CHOICES
from softfocus.pointwise import FUSED
from softfocus.testing import Case, check
from softfocus.visibility import Cache, Visibility

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "src" / "softfocus" / "backends" / "cpu" / "csrc"
NAMES = [
    pytest.param("cpu", marks=pytest.mark.kernels),
    pytest.param("triton", marks=pytest.mark.skipif(not triton.TRITON_FOUND, reason="Triton is not installed")),
    "tiled",
    "reference",
]
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
DECLARED = [field for field in CHOICES if field != "scale"]  # of the scale a backend gets the number
SMALL = Case("small", batch=1, heads=2, key_heads=1, query_length=7, key_length=9, head_dim=4, value_dim=3)


def question(name="cpu", **fields):
    query = torch.ones(1, 1, 4, 8, device=DEVICE.get(name, "cpu"))
    return (query, query, query), {"mechanism": Mechanism(**fields)} if fields else {}


# A call, packed and unpacked


def test_a_call_comes_back_from_its_leaves():
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    mask, ids = torch.ones(1, 1, 4, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.int64)
    visibility = Visibility(4, 8, 2, 0, mask, mask[0, 0, :1], ids)  # two pages of four
    learned = torch.randn(1, 1, 4, 4), torch.ones(2), torch.ones(2)
    cache = Cache(torch.tensor([3]), torch.tensor([[1, 0]]))
    full = Call(
        query, key, value, visibility, Mechanism(phi="softplus"), 0.3, *learned, Dropout(0.5, torch.tensor(3)), cache
    )
    for call in (full, Call(query, key, value, Visibility(4, 4), Mechanism(), 1.0)):
        second = unpack(pack(call))
        assert second.mechanism == call.mechanism
        assert (second.cache is None) == (call.cache is None)
        assert len(pack(second)) == len(pack(call)) == len(LEAVES) - (0 if call.cache else 2)
        both = vars(second.visibility), vars(call.visibility)
        assert both[0].keys() == both[1].keys()
        assert all(x is y or x == y for x, y in zip(*(each.values() for each in both), strict=True))
        assert all(x is y or x == y for x, y in zip(pack(second), pack(call), strict=True))
    assert None not in pack(full)


def test_the_operators_follow_from_the_call():
    """Every tensor of a call that is no part of another thing has a gradient, in this order."""
    schema = ops.attend_backward._schema
    given = [argument.name for argument in schema.arguments]
    leaves = [name for name in LEAVES if name not in ("lengths", "page_table")]
    assert given == ["grad", *leaves, "backend", "bias_grad", "out", "rows"]
    assert [argument.name for argument in ops.attend_cache._schema.arguments] == [*LEAVES, "backend"]
    assert GRADIENTS == ("query", "key", "value", "bias", "head_scale", "power")
    assert len(schema.returns) == len(GRADIENTS)


# What is declared is the algebra, and what is supported


def test_a_declaration_speaks_of_every_field_of_the_algebra():
    assert set(DECLARED) | {"reweighting", "laser"} <= {field.name for field in fields(Supported)}
    for name, backend in dispatch.BACKENDS.items():
        for field in DECLARED:
            assert set(getattr(backend.SUPPORTED, field)) <= set(CHOICES[field]), (name, field)
    for field in DECLARED:
        assert set(getattr(tiled.SUPPORTED, field)) == set(CHOICES[field]), field


def covering(supported):
    """Mechanisms that have every value of every field that is supported, power and LASER once
    each.
    """
    lists = {field: getattr(supported, field) for field in DECLARED} | {"scale": CHOICES["scale"]}
    for i in range(max(map(len, lists.values()))):
        yield Mechanism(**{field: values[i % len(values)] for field, values in lists.items()})
    yield Mechanism(phi="softplus", power=3.0)
    yield Mechanism(laser=True)


@pytest.mark.parametrize("name", NAMES[:3])
def test_what_is_declared_is_computed(name):
    """Parity over every value of every field."""
    numpy = pytest.importorskip("numpy")
    with numpy.errstate(all="ignore"):  # Triton's interpreter speaks of every infinity
        for mechanism in covering(dispatch.BACKENDS[name].SUPPORTED):
            run = partial(attention, backend=name)
            check(run, SMALL, mechanism, torch.float32, device=DEVICE.get(name, "cpu"), draws=8)


IN_C = {
    "FLOAT32": torch.float32, "BFLOAT16": torch.bfloat16, "FLOAT16": torch.float16,
    "CONSTANT": "1", "LOG_N": "log(N)", "LOG512_N": "log512(N)",
    "NO_BIAS": "0", "MINUS_LOG_N": "-log(N)", "MINUS_LOG_L": "-log(L)",
    "L1": "l1", "NONE": "none", "ONE_OVER_N": "1/N", "ONE_OVER_L": "1/L", "ONE_OVER_SQRT_HALF_N": "1/sqrt(N/2)",
}  # fmt: skip


def test_numbers_in_c_are_places_in_the_declaration():
    text = (CSRC / "pointwise.h").read_text()
    cases = re.findall(r"case (\d+):\s+return f\((\w+)\{\}\);", text)
    assert [(int(number), phi.lower()) for number, phi in cases] == list(enumerate(FUSED))
    text = (CSRC / "params.h").read_text()
    for enum, values in (
        ("Dtype", cpu.SUPPORTED.dtypes),
        ("LengthScale", cpu.SUPPORTED.length_scale),
        ("ScoreBias", cpu.SUPPORTED.score_bias),
        ("Normaliser", cpu.SUPPORTED.normaliser),
    ):
        (names,) = re.findall(rf"enum {enum} : int64_t {{([^}}]*)}};", text)
        assert [IN_C[name.strip()] for name in names.split(",")] == list(values), enum


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("keys", [0, 1, 3, 4, 9])
def test_a_case_pads_a_quarter(keys, padding):
    real = Case("padded", padding=padding, key_length=keys).arguments(Mechanism(), torch.float32)["key_mask"]
    quarter = keys // 4
    padded = [True] * (keys - quarter) if padding == "right" else [False] * quarter + [True] * (keys - quarter)
    assert real.tolist() == [[True] * keys, (padded + [False] * quarter)[:keys]]


def test_the_cpu_backend_numbers_what_it_declares():
    for field, numbers in cpu_call._ENUM_VALUES.items():
        values = getattr(cpu.SUPPORTED, field)
        assert numbers == {value: number for number, value in enumerate(values)}, field
    assert set(cpu_call._ENUM_VALUES) == set(DECLARED)


@pytest.mark.skipif(not triton.TRITON_FOUND, reason="Triton is not installed")
def test_the_tables_of_the_triton_backend_have_what_it_declares():
    from softfocus.backends.triton import inputs
    from softfocus.backends.triton.kernels import pointwise

    assert tuple(pointwise.PHI) == triton.SUPPORTED.phi
    assert tuple(inputs.COSINE) == triton.SUPPORTED.similarity
    assert tuple(inputs.COSINE.values()) == tuple(name == "cosine" for name in triton.SUPPORTED.similarity)
    assert set(inputs.TERMS) == set(triton.SUPPORTED.dtypes)
    # Each number of terms has a polynomial, and each polynomial is used
    branches = re.findall(r"if TERMS == (\w+):", Path(pointwise.__file__).read_text())
    numbers = {pointwise.MAX_TERMS.value if name == "MAX_TERMS" else int(name) for name in branches}
    assert set(inputs.TERMS.values()) == numbers
    assert inputs.TERMS[torch.float32] == max(numbers) == pointwise.MAX_TERMS.value


# What is not declared is refused

BRANCHES = ("length_scale", "score_bias", "normaliser")  # Triton kernels branch on these


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("name", [*NAMES, "auto"])
def test_a_value_that_nobody_declares_is_refused_by_name(name, field, monkeypatch):
    monkeypatch.setitem(CHOICES, field, (*CHOICES[field], "fake"))
    tensors, mechanism = question(name, **{field: "fake"})
    with pytest.raises(ValueError, match=f"{field}='fake' is not among|{field}='fake' is not supported"):
        attention(*tensors, **mechanism, backend=name)
    with pytest.raises(ValueError, match=f"{field}='fake' is not"):
        weights(*tensors[:2], **mechanism)


@pytest.mark.skipif(not triton.TRITON_FOUND, reason="Triton is not installed")
@pytest.mark.parametrize("field", DECLARED)
def test_a_triton_kernel_has_no_default(field, monkeypatch):
    """Even past the declaration: no branch of a kernel stands for all other values."""
    monkeypatch.setitem(CHOICES, field, (*CHOICES[field], "fake"))
    tensors, mechanism = question("triton", **{field: "fake"})
    raised = {"match": r"(?i)assert"} if field in BRANCHES else {}
    with pytest.raises(Exception if field in BRANCHES else (KeyError, AssertionError), **raised):
        triton.forward(validated_call(*tensors, **mechanism))


@pytest.mark.kernels
@pytest.mark.parametrize("field", DECLARED)
def test_a_cpu_kernel_has_no_default(field, monkeypatch):
    monkeypatch.setitem(CHOICES, field, (*CHOICES[field], "fake"))
    tensors, mechanism = question("cpu", **{field: "fake"})
    with pytest.raises(KeyError, match="fake"):
        cpu.forward(validated_call(*tensors, **mechanism))


@pytest.mark.kernels
@pytest.mark.parametrize("what", ["phi", "dtypes"])
def test_a_number_without_a_case_in_cpp_is_an_error(what, monkeypatch):
    """FUSED lists a phi that ``with_phi`` in ``csrc/pointwise.h`` lacks, or SUPPORTED a dtype that
    ``count_dtypes`` in ``csrc/tensor.h`` lacks.
    """
    if what == "phi":
        monkeypatch.setattr(cpu, "FUSED", (*FUSED, "fake"))
        message = f"have {len(FUSED)} phi and pointwise.FUSED has {len(FUSED) + 1}"
    else:
        monkeypatch.setattr(cpu, "SUPPORTED", replace(cpu.SUPPORTED, dtypes=(*cpu.SUPPORTED.dtypes, torch.float64)))
        message = "have 3 dtypes and SUPPORTED has 4"
    for name in ("softfocus_forward", "softfocus_backward"):
        monkeypatch.setattr(getattr(build.library(), name), "argtypes", None)
    query = torch.ones(1, 1, 4, 8)
    call = validated_call(query, query, query)
    for run in (
        lambda: cpu.forward(call),
        lambda: cpu.runner(call),
        lambda: cpu.backward(call, query, False),
    ):
        with pytest.raises(RuntimeError, match=message):
            run()


@pytest.mark.parametrize("field", CHOICES)
@pytest.mark.parametrize("name", ["tiled", "reference"])
def test_a_formula_has_no_default(name, field, monkeypatch):
    """Even where a backend declares a value that it does not implement: no branch stands for all
    other values.
    """
    monkeypatch.setitem(CHOICES, field, (*CHOICES[field], "fake"))
    backend = dispatch.BACKENDS[name]
    if field in DECLARED:
        values = (*getattr(backend.SUPPORTED, field), "fake")
        monkeypatch.setattr(backend, "SUPPORTED", replace(backend.SUPPORTED, **{field: values}))
    tensors, mechanism = question(name, **{field: "fake"})
    with pytest.raises((KeyError, ValueError), match="fake"):
        attention(*tensors, **mechanism, backend=name)


GROWN = """
from dataclasses import replace
import torch
from softfocus import Mechanism, dispatch, ops
from softfocus.backends import tiled
from softfocus.contract import GRADIENTS, LEAVES, Call, optional_arguments, pack, unpack
from softfocus.visibility import Visibility

x = torch.arange(64.0).cos().view(1, 2, 4, 8)
gain = torch.tensor([2.0, 3.0], requires_grad=True)
for changes, name in (
    ({"softcap": 2.0}, "softcap"),
    ({"gain": gain}, "gain"),
    ({"visibility": Visibility(4, 4, sink_length=3)}, "sink_length"),
):
    call = Call(x, x, x, **{"visibility": Visibility(4, 4), "mechanism": Mechanism(), "scale": 1.0, **changes})
    unpacked = unpack(pack(call))
    assert (unpacked.softcap, unpacked.visibility.sink_length) == (call.softcap, call.visibility.sink_length)
    assert unpacked.gain is call.gain
    assert optional_arguments(pack(call)) == {name}, optional_arguments(pack(call))
    for backend in dispatch.BACKENDS:
        assert dispatch.why_unsupported(backend, call) == f"{name} is not supported", backend

assert GRADIENTS[-1] == "gain" and LEAVES["gain"] == "Tensor?"
forward, backward = tiled.forward, tiled.backward


def forward_with_gain(call):
    out, rows = forward(call)
    return out * call.gain[:, None, None], rows


def backward_with_gain(call, grad, bias_grad):
    grads = backward(call, grad * call.gain[:, None, None], bias_grad)
    return {**grads, "gain": (grad * forward(call)[0]).sum((0, 2, 3))}


tiled.SUPPORTED = replace(tiled.SUPPORTED, features=(*tiled.SUPPORTED.features, "gain"))
tiled.forward, tiled.backward = forward_with_gain, backward_with_gain
leaf = x.clone().requires_grad_()
call = Call(leaf, x, x, Visibility(4, 4), Mechanism(), 1.0, gain=gain)
assert dispatch.why_unsupported("tiled", call) is None
out, _ = ops.run(call, "tiled")
plain = forward(call._replace(gain=None))[0]
assert torch.equal(out, plain * torch.tensor([2.0, 3.0])[:, None, None])
grad = torch.arange(64.0).sin().view(1, 2, 4, 8)
grad_query, grad_gain = torch.autograd.grad(out, (leaf, gain), grad)
assert torch.equal(grad_gain, (grad * plain).sum((0, 2, 3)))
assert torch.equal(grad_query, backward(call, grad * gain.detach()[:, None, None], False)["query"])

tiled.backward = backward  # which knows nothing of it
out, _ = ops.run(call, "tiled")
try:
    out.sum().backward()
except RuntimeError as error:
    assert "'tiled' returned no gradient of gain" in str(error), error
else:
    raise AssertionError(f"a gradient that no kernel computes is {gain.grad}")
"""


@pytest.mark.long
def test_a_new_argument_is_refused_until_a_backend_names_it(tmp_path):
    """In a copy of the sources: a number and a tensor with a gradient of the call, and a number of
    its visibility.
    """
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "lab", "hf"))
    for module, before, field in (
        (
            "contract.py",
            "    cache: Cache | None = None\n\n    def of_sequence",
            "    softcap: float = 0.0\n    gain: Tensor | None = None\n",
        ),
        ("visibility.py", "\n    @property\n    def offset", "    sink_length: int = 0\n"),
    ):
        path = tmp_path / "src" / "softfocus" / module
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, field + before))
    ran = subprocess.run(
        [sys.executable, "-c", GROWN],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("left_out", GRADIENTS[3:])
def test_a_gradient_that_a_backend_forgets_is_said(left_out, monkeypatch):
    """Of one head, an empty tensor would pass for its gradient."""

    def forgetful(*arguments):
        return {name: grad for name, grad in whole(*arguments).items() if name != left_out}

    whole = tiled.backward
    monkeypatch.setattr(tiled, "backward", forgetful)
    given = {"bias": torch.zeros(4, 4), "head_scale": torch.ones(1), "power": torch.full((1,), 3.0)}
    given = {name: x.requires_grad_() for name, x in given.items()}
    out = attention(*question()[0], mechanism="lssar", backend="tiled", **given)
    with pytest.raises(RuntimeError, match=f"'tiled' returned no gradient of {left_out}"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"features": ()}, {"bias": torch.zeros(4, 4)}, "bias is not supported"),
        ({"features": ("bias",)}, {"key_mask": torch.ones(1, 4, dtype=torch.bool)}, "key_mask is not supported"),
        ({"features": ("bias",)}, {"attn_mask": torch.full((4, 4), 0.5)}, "mask is not supported"),
        ({"features": ("mask",)}, {"dropout_p": 0.5}, "dropout is not supported"),
        ({"laser": False}, {"mechanism": "laser"}, "laser=True is not supported"),
        ({"reweighting": False}, {"mechanism": "lssar"}, "power=15 is not supported"),
        ({"dtypes": (torch.float64, torch.float16)}, {}, "torch.float32 is not among float64 and float16"),
        ({"devices": ("cuda", "xpu")}, {}, "the tensors are on 'cpu', not on 'cuda' or 'xpu'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_shorter_declaration_refuses_more(changes, arguments, words, monkeypatch):
    monkeypatch.setattr(tiled, "SUPPORTED", replace(tiled.SUPPORTED, **changes))
    given = {"mechanism": "lssa", **arguments}
    assert words in explain(*question()[0], **given).reasons["tiled"]
    with pytest.raises(ValueError, match=words):
        attention(*question()[0], **given, backend="tiled")


# What a question costs


def test_a_question_compiles_nothing_and_touches_no_disk(monkeypatch):
    """A call then finds out, and the answer changes."""
    asked = []

    def no_compiler():
        asked.append(True)
        build._outcome = build.Unavailable("there is no compiler", "install one")
        raise build._outcome

    monkeypatch.setattr(build, "_outcome", None)
    monkeypatch.setattr(build, "_warned", False)
    monkeypatch.setattr(build, "_obtain", no_compiler)
    query = torch.randn(1, 1, 5, 7)  # as no other test has: nothing is ready for it
    assert explain(query, query, query).backend == "cpu"
    assert dispatch.why_unsupported("cpu", validated_call(query, query, query)) is None
    assert not asked
    with pytest.warns(RuntimeWarning, match="takes the slower tiled backend: there is no compiler"):
        out = attention(query, query, query)
    assert torch.equal(out, attention(query, query, query, backend="tiled"))
    assert explain(query, query, query).reasons["cpu"] == "there is no compiler; install one"
    with pytest.raises(ValueError, match="there is no compiler; install one"):
        attention(query, query, query, backend="cpu")
    assert len(asked) == 1


QUESTIONS = """
import sys
import torch
from softfocus import explain, mechanisms, named
opened = []
tensors = {dtype: torch.ones(1, 2, 4, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
names = list(mechanisms())
sys.addaudithook(lambda event, _: opened.append(event) if event in ("open", "subprocess.Popen") else None)
for query in tensors.values():
    for name in names:
        asked = explain(query, query, query, mechanism=name, is_causal=True)
assert not opened, opened
assert "triton.language" not in sys.modules
print(asked.reasons["triton"])
"""


@pytest.mark.long
@pytest.mark.skipif(not triton.TRITON_FOUND, reason="Triton is not installed")
def test_a_question_opens_no_file_and_imports_no_triton():
    """Not even where Triton is a candidate: its kernels are declared in a module without it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "SOFTFOCUS_TRITON": "on", "SOFTFOCUS_KERNELS": "off"}
    ran = subprocess.run([sys.executable, "-c", QUESTIONS], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "the first call is compared with" in ran.stdout


@pytest.mark.kernels
def test_one_cached_call_after_another_is_computed_anew():
    """What is kept of a sequence's layout must not serve a call that differs in one argument."""
    query, key, value = (torch.randn(2, 4, n, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 40, 41))
    value, lengths = value[:, :, :40], torch.tensor([40, 33])
    plain = {"mechanism": "lssar", "scale": None, "window_size": None, "head_scale": None, "power": None}
    changes = [
        {}, {"scale": 0.5}, {"scale": 3.0}, {"window_size": (3, 0)}, {"window_size": (9, 0)}, {"mechanism": "softmax"},
        {"mechanism": "laser"}, {"head_scale": torch.tensor([1.0, 2.0, 0.5, 3.0])}, {"power": torch.full((4,), 2.0)},
    ]  # fmt: skip
    for change in [*changes, *changes]:
        for backend in ("cpu", "tiled"):
            arguments = {**plain, **change}
            got = attention_with_cache(query, key, value, lengths, **arguments, backend=backend)
            want = attention_with_cache(query.double(), key.double(), value.double(), lengths, **arguments)
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_cache_is_one_call(backend, monkeypatch):
    """Its sequences are not checked and dispatched one by one."""
    chosen = []
    monkeypatch.setattr(dispatch, "choose", lambda call, name: chosen.append(name) or name)
    query, key = torch.randn(3, 2, 1, 8), torch.randn(3, 2, 20, 8)
    attention_with_cache(query, key, key, torch.tensor([3, 20, 0]), backend=backend)
    assert chosen == [backend]


# The guide

FOLLOW = """
import sys
from dataclasses import replace
from functools import partial
import torch
from softfocus import attention, dispatch, explain
from softfocus.testing import Case, check
small = Case("small", batch=1, query_length=11, key_length=13, head_dim=8, value_dim=8)
for backend in sys.argv[1:]:
    for mechanism in ("relu3_l1", "sharpened(relu3_l1, 3)", "laser(relu3_l1)"):
        for case in (small, replace(small, name="large scores", magnitude=6.0)):
            check(partial(attention, backend=backend), case, mechanism, torch.float32)
query = torch.ones(1, 1, 4, 8)
print(explain(query, query, query, mechanism="relu3_l1").backend)
"""


def follow(tmp_path, *backends):
    """Do what docs/adding-a-phi.md says to a copy of the sources, and compare some backends
    with the reference there.
    """
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "adding-a-phi.md").read_text(), re.DOTALL)
    touched = set(re.findall(r"^\+\+\+ b/src/softfocus/(\S+)", diff, re.MULTILINE))
    assert {Path(path).name for path in touched} == {"mechanism.py", "catalog.py", "pointwise.py", "pointwise.h"}
    assert len(touched) == 5
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "lab"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=tmp_path)
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path / "src"), "TRITON_INTERPRET": "1", "SOFTFOCUS_CXXFLAGS": "-O1",
        "SOFTFOCUS_KERNEL_CACHE": str(tmp_path / "kernels"),
    }  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FOLLOW, *backends], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "cpu\n"
    return environment


@pytest.mark.long
@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diff")
def test_the_guide_to_a_new_phi(tmp_path):
    environment = follow(tmp_path, "tiled", *(["triton"] if triton.TRITON_FOUND else []))
    if clang_format := shutil.which("clang-format", path=str(Path(sys.executable).parent)):
        header = tmp_path / "src/softfocus/backends/cpu/csrc/pointwise.h"
        style = f"--style=file:{ROOT / '.clang-format'}"
        subprocess.run([clang_format, style, "--dry-run", "-Werror", header], check=True)
    changed = [f"tests/core/test_{name}.py" for name in ("catalog", "reference", "pointwise")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *changed,
         "-k", "test_catalog or relu3 or table or every"],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow  # compiles the kernels
@pytest.mark.kernels
@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diff")
def test_the_guide_to_a_new_phi_in_cpp(tmp_path):
    follow(tmp_path, "cpu")
