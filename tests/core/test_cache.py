"""``attention_with_cache()``: each sequence as ``attention()`` takes it alone, whatever else the
cache holds.
"""

import math
import os

import pytest
import torch

from softfocus import attention, attention_with_cache, mechanisms, named, ops
from softfocus.contract import Call, pack
from softfocus.testing import Outcome, compare
from softfocus.visibility import Cache, Visibility

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BACKENDS = ["reference", "tiled", "cpu"]
LENGTHS = (90, 5, 0, 33)
PAGE = 16


def problem(lengths=LENGTHS, heads=4, key_heads=2, queries=1, head_dim=16, value_dim=8, dtype=torch.float32):
    """query, key and value, the latter [B, Hk, most, D] and NaN beyond the lengths, and the
    lengths.
    """
    generator = torch.Generator().manual_seed(3)
    most = max(lengths)
    query, key, value = (
        torch.randn(len(lengths), *shape, generator=generator).to(dtype)
        for shape in ((heads, queries, head_dim), (key_heads, most, head_dim), (key_heads, most, value_dim))
    )
    for b, length in enumerate(lengths):
        key[b, :, length:] = math.nan
        value[b, :, length:] = math.inf
    return query, key, value, torch.tensor(lengths)


def in_pages(key, value, size=PAGE):
    """The same in pages that lie in any order, among others that nobody points to; a table for more
    than there is.
    """
    batch, _, most, _ = key.shape
    each = -(-most // size) + 2
    table = torch.randperm(batch * each + 3, generator=torch.Generator().manual_seed(4))[: batch * each].view(
        batch, each
    )
    pages = []
    for x in (key, value):
        pool = x.new_full((batch * each + 3, x.size(1), size, x.size(3)), math.nan)
        full = torch.nn.functional.pad(x, (0, 0, 0, each * size - most), value=math.nan)
        pool[table.flatten()] = full.unflatten(2, (each, size)).transpose(1, 2).flatten(0, 1)
        pages.append(pool)
    for b in range(batch):
        used = -(-int((~key[b, 0, :, 0].isnan()).sum()) // size)
        table[b, used:] = -1
    return *pages, table


def single(query, key, value, lengths, mechanism, dtype, window=-1, **learned):
    """By the definition: the dense formula for every sequence on its own keys, in another dtype."""
    rows = [
        attention(
            query[b : b + 1].to(dtype), key[b : b + 1, :, :n].to(dtype), value[b : b + 1, :, :n].to(dtype),
            is_causal=True, enable_gqa=True, mechanism=mechanism, window_size=(window, 0), backend="reference",
            **learned,
        )
        for b, n in enumerate(lengths.tolist())
    ]  # fmt: skip
    return torch.cat(rows)


def hold(got, query, key, value, lengths, mechanism, **given):
    """The tolerance is that of ``softfocus.testing.check``: twice the error of the dense formula in
    the same dtype, plus four units in the last place.
    """
    expected = single(query, key, value, lengths, mechanism, torch.float64, **given)
    eager = single(query, key, value, lengths, mechanism, query.dtype, **given)
    error = float((eager - expected).abs().max())
    size = float(expected.abs().max())
    compare(Outcome({"out": got}), Outcome({"out": expected}), {"out": error}, {"out": size}, str(mechanism))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("name", ["lssar", "softmax", "laser", "sigmoid_log_l"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_sequence_as_if_alone(backend, name, paged):
    query, key, value, lengths = problem(queries=3)
    cache = in_pages(key, value) if paged else (key, value, None)
    got = attention_with_cache(query, *cache[:2], lengths, cache[2], enable_gqa=True, mechanism=name, backend=backend)
    hold(got, query, key, value, lengths, name)
    assert not got[2].any()  # it has no token


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_and_learned_tensors(backend):
    query, key, value, lengths = problem(queries=20)
    learned = {"head_scale": torch.linspace(0.2, 1.1, 4), "power": torch.linspace(1.5, 9.0, 4)}
    got = attention_with_cache(
        query, *in_pages(key, value)[:2], lengths.int(), in_pages(key, value)[2].int(), enable_gqa=True,
        window_size=(20, 7), backend=backend, **learned,
    )  # fmt: skip
    hold(got, query, key, value, lengths, "lssar", window=20, **learned)


def test_a_growing_cache_gives_what_the_whole_sequence_gives():
    """Token by token, each written into its page first."""
    length, size = 40, 8
    query, key, value, _ = problem((length, length), key_heads=4, queries=length, value_dim=16)
    whole = attention(query, key, value, is_causal=True)
    pages = [torch.full((10, 4, size, 16), math.nan) for _ in range(2)]
    table = torch.tensor([[9, 1, 3, 5, 7], [0, 2, 4, 6, 8]])
    for n in range(length):
        for pool, x in zip(pages, (key, value), strict=True):
            pool[table[:, n // size], :, n % size] = x[:, :, n]
        step = attention_with_cache(query[:, :, n : n + 1], *pages, torch.full((2,), n + 1), table)
        torch.testing.assert_close(step, whole[:, :, n : n + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_strides(dtype):
    query, key, value, lengths = problem((70, 12), dtype=dtype)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
    got = attention_with_cache(query, *strided, lengths, enable_gqa=True)
    assert got.dtype == dtype
    if dtype == torch.float64:  # there is no formula more exact than itself to compare it with
        torch.testing.assert_close(got, single(query, key, value, lengths, "lssar", dtype), rtol=1e-12, atol=1e-12)
    else:
        hold(got, query, key, value, lengths, "lssar")


def test_nothing_at_all():
    query, key, value, lengths = problem((4, 4), key_heads=4)
    empty = attention_with_cache(query[:0], key[:0], value[:0], lengths[:0])
    assert empty.shape == (0, 4, 1, 8)
    none = attention_with_cache(query, key[:, :, :0], value[:, :, :0], torch.zeros(2, dtype=torch.int64))
    assert not none.any()
    assert none.shape == (2, 4, 1, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([91, 5, 0, 33])}, r"lengths\[0\]: got 91, expected 0 to 90"),
        ({"lengths": torch.tensor([-1, 5, 0, 33])}, r"lengths\[0\]: got -1, expected 0 to 90"),
        ({"lengths": torch.tensor([1, 2])}, r"lengths: got shape \[2\], expected \[batch\] with batch 4"),
        ({"lengths": torch.ones(4)}, "lengths: got dtype torch.float32, expected torch.int32 or torch.int64"),
        ({"lengths": None}, "lengths: got NoneType, expected a torch.Tensor"),
        ({"lengths": [1, 2, 3, 4]}, "lengths: got list, expected a torch.Tensor"),
        ({"page_table": torch.zeros(4, dtype=torch.int32)}, r"page_table: got shape \[4\]"),
        ({"page_table": torch.full((4, 1), 9)}, r"page_table\[0, 0\]: got page 9, expected one of the 4 of key_cache"),
        ({"value_cache": torch.zeros(4, 2, 80, 8)}, r"value_cache: got \[4, 2, 80, 8\]"),
        ({"key_cache": torch.zeros(4, 3, 90, 16)}, "query: got 4 heads, expected a multiple of the key_cache's 3"),
        ({"key_cache": torch.zeros(4, 2, 90, 16).bfloat16()}, "key_cache: got dtype torch.bfloat16"),
        ({"mechanism": "lssa", "power": torch.ones(4)}, "power: given, but the mechanism does not re-weight"),
        ({"lengths": torch.ones(4, dtype=torch.int64), "key_cache": torch.zeros(9, 2, 90, 16)}, "pass page_table"),
        (
            {"page_table": torch.zeros(4, 1, dtype=torch.int64), "key_cache": torch.zeros(9, 90, 3, 16)},
            "other libraries keep",
        ),
        ({"backend": "flash"}, "backend: got 'flash'"),
    ],
)
def test_errors_name_the_argument(change, message):
    query, key, value, lengths = problem()
    if "key_cache" in change:
        value = torch.zeros(*change["key_cache"].shape[:3], 8)
    arguments = {"query": query, "key_cache": key, "value_cache": value, "lengths": lengths, "enable_gqa": True}
    with pytest.raises((ValueError, TypeError), match=message):
        attention_with_cache(**(arguments | change))


def test_a_gradient_is_refused():
    query, key, value, lengths = problem(key_heads=4)
    query.requires_grad_()
    with pytest.raises(RuntimeError, match=r"query: requires grad, .* under torch\.no_grad"):
        attention_with_cache(query, key, value, lengths)
    with torch.no_grad():
        assert attention_with_cache(query, key, value, lengths).shape == (4, 4, 1, 8)


def test_a_tangent_is_refused():
    query, key, value, lengths = problem(key_heads=4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match="tangent"):
            attention_with_cache(dual, key, value, lengths)


def test_compiled_for_any_size():
    compiled = torch.compile(attention_with_cache, fullgraph=True, backend="aot_eager", dynamic=True)
    for sizes in ((20, 7), (33, 0, 5)):
        query, key, value, lengths = problem(sizes, key_heads=4)
        assert torch.equal(compiled(query, key, value, lengths), attention_with_cache(query, key, value, lengths))
    with pytest.raises(ValueError, match=r"lengths\[1\]: got -3"):
        compiled(query, key, value, torch.tensor([9, -3, 5]))


def test_compiled_whole():
    query, key, value, lengths = problem(key_heads=4)
    pages = in_pages(key, value)
    plain = attention_with_cache(query, *pages[:2], lengths, pages[2])
    compiled = torch.compile(attention_with_cache, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, *pages[:2], lengths, pages[2]), plain)
    visibility = Visibility(query.size(2), pages[0].size(2) * pages[2].size(1), -1, 0)
    call = Call(query, *pages[:2], visibility, named("lssar"), 1.0, cache=Cache(lengths, pages[2]))
    torch.library.opcheck(ops.attend_cache, (*pack(call), "tiled"))


# The Triton kernels, which read lengths and pages themselves


def on_a_gpu(test):
    """Marked so where there is one; elsewhere it runs under Triton's interpreter."""
    return pytest.mark.gpu(test) if torch.cuda.is_available() else test


@pytest.fixture
def split(monkeypatch):
    """``split(n)``: so many programs share the keys of a head."""
    call = pytest.importorskip("softfocus.backends.triton.call", reason="Triton is not installed")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or Triton's interpreter")
    import numpy

    monkeypatch.setattr(call, "TILES_PER_SPLIT", 1)
    with numpy.errstate(all="ignore"):
        yield lambda n: monkeypatch.setattr(call, "_programs", lambda device: n)


@pytest.mark.long
@on_a_gpu
@pytest.mark.parametrize(
    ("name", "paged", "queries", "splits"),
    [
        ("lssar", True, 1, 64), ("lssar", False, 3, 64), ("laser", True, 1, 64), ("laser_lssar", True, 2, 64),
        ("sigmoid_log_l", True, 1, 64), ("relu_wortsman", False, 1, 64), ("softmax", True, 1, 1), ("laser", True, 2, 1),
        ("lssar", True, 40, 1),
    ],
)  # fmt: skip
def test_triton(split, name, paged, queries, splits):
    split(splits)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value, lengths = problem(queries=queries)
    cache = in_pages(key, value) if paged else (key, value, None)
    query, key, value, lengths, *cache = (
        None if x is None else x.to(device) for x in (query, key, value, lengths, *cache)
    )
    got = attention_with_cache(
        query, *cache[:2], lengths, cache[2], enable_gqa=True, mechanism=name, window_size=(50, 0), backend="triton"
    )
    hold(got, query, key, value, lengths, name, window=50)


def test_every_mechanism_has_a_cache():
    query, key, value, lengths = problem((9, 3), key_heads=4)
    for name in mechanisms():
        hold(attention_with_cache(query, key, value, lengths, mechanism=name), query, key, value, lengths, name)
