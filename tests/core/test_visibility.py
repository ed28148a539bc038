"""What each row may see, against loops that ask one pair (query, key) at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softfocus import attention
from softfocus import visibility as module
from softfocus.functional import validated_call
from softfocus.visibility import Visibility, document_ids_from_lengths

CPU = torch.device("cpu")
FEW = settings(max_examples=120, deadline=None, derandomize=True)


@st.composite
def visibilities(draw, least_queries=0, least_keys=0):
    """Any combination of window, mask, padding and documents; the heads and batch that it is meant
    for.
    """
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    keys = draw(st.integers(least_keys, 9))
    with_documents = draw(st.booleans())
    queries = draw(st.integers(least_queries, max(least_queries, keys) if with_documents else 9))
    with_documents = with_documents and queries <= keys
    left = draw(st.sampled_from([-1, -1, 0, 1, 2, 5, 20]))
    right = draw(st.sampled_from([-1, -1, 0, 0, 1, 3, 20]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def bits(*shape):
        return torch.rand(shape, generator=generator) < 0.6

    mask = None
    if draw(st.booleans()):
        mask = bits(*(size if draw(st.booleans()) else 1 for size in (batch, heads, queries, keys)))
    key_mask = bits(batch, keys) if draw(st.booleans()) else None
    documents = None
    if with_documents:
        documents = torch.randint(0, 3, (batch, keys), generator=generator)
        if draw(st.booleans()):
            documents = documents.sort(-1).values
    return batch, heads, Visibility(queries, keys, left, right, mask, key_mask, documents)


def one_by_one(batch, heads, v: Visibility) -> torch.Tensor:
    """The definition, pair by pair: bool [B, H, Lq, Lk]."""
    seen = torch.zeros(batch, heads, v.query_length, v.key_length, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(v.query_length):
                position = i + (v.key_length - v.query_length)  # the last query stands at the last key
                for j in range(v.key_length):
                    ok = True
                    if v.left != -1 and j < position - v.left:
                        ok = False
                    if v.right != -1 and j > position + v.right:
                        ok = False
                    if v.key_mask is not None and not v.key_mask[b, j]:
                        ok = False
                    if v.document_ids is not None and v.document_ids[b, position] != v.document_ids[b, j]:
                        ok = False
                    if v.mask is not None:
                        at = [index if size > 1 else 0 for index, size in zip((b, h, i, j), v.mask.shape, strict=True)]
                        ok = ok and bool(v.mask[tuple(at)])
                    seen[b, h, i, j] = ok
    return seen


@FEW
@given(visibilities())
def test_count_is_the_number_of_keys_seen(drawn):
    batch, heads, v = drawn
    count = v.count(CPU)
    assert count.dtype == torch.int64
    assert torch.equal(count.expand(batch, heads, v.query_length), one_by_one(*drawn).sum(-1))


@FEW
@given(visibilities(), st.integers(1, 12))
def test_count_does_not_depend_on_how_much_is_held_at_once(drawn, elements):
    batch, heads, v = drawn
    before = module._COUNT_ELEMENTS
    module._COUNT_ELEMENTS = elements
    try:
        count = v.count(CPU)
    finally:
        module._COUNT_ELEMENTS = before
    assert torch.equal(count.expand(batch, heads, v.query_length), one_by_one(*drawn).sum(-1))


@FEW
@given(visibilities(), st.data())
def test_blocks_put_together_are_the_whole(drawn, data):
    batch, heads, v = drawn
    expected = one_by_one(*drawn)
    rebuilt = torch.full_like(expected, fill_value=False)
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    for start in range(0, v.query_length, rows):
        stop = min(start + rows, v.query_length)
        for low in range(0, v.key_length, columns):
            high = min(low + columns, v.key_length)
            tile = v.block(start, stop, low, high, CPU)
            shape = (batch, heads, stop - start, high - low)
            if tile is None:
                tile = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            assert tile.dtype == torch.bool
            assert tile.dim() == 4
            rebuilt[:, :, start:stop, low:high] = tile.expand(shape)
    assert torch.equal(rebuilt, expected)


@FEW
@given(visibilities(least_queries=1), st.data())
def test_span_never_cuts_off_a_visible_key(drawn, data):
    _batch, _heads, v = drawn
    start = data.draw(st.integers(0, v.query_length - 1))
    stop = data.draw(st.integers(start + 1, v.query_length))
    low, high = v.span(start, stop)
    assert 0 <= low <= high <= v.key_length
    seen = one_by_one(*drawn)[:, :, start:stop]
    assert not seen[..., :low].any()
    assert not seen[..., high:].any()


@FEW
@given(visibilities(least_queries=1, least_keys=1), st.data())
def test_span_is_tight_for_windows(drawn, data):
    """A window alone: the first and the last key of the span are each seen by some query, or it is
    empty.
    """
    _batch, _heads, drawn_v = drawn
    v = Visibility(drawn_v.query_length, drawn_v.key_length, drawn_v.left, drawn_v.right)
    start = data.draw(st.integers(0, v.query_length - 1))
    stop = data.draw(st.integers(start + 1, v.query_length))
    low, high = v.span(start, stop)
    seen = one_by_one(1, 1, v)[0, 0, start:stop].any(0)
    if seen.any():
        assert seen[low]
        assert seen[high - 1]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("tiled", torch.float64), ("cpu", torch.float32)]
)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(visibilities(least_queries=1, least_keys=1))
def test_attention_counts_and_weighs_what_is_seen(backend, dtype, drawn):
    """The number that reaches the maths: attention()'s own statistics, and uniform weights read
    through V = identity.
    """
    batch, heads, v = drawn
    expected = one_by_one(*drawn)
    query = torch.zeros(batch, heads, v.query_length, 2, dtype=dtype)
    key = torch.zeros(batch, heads, v.key_length, 2, dtype=dtype)
    value = torch.eye(v.key_length, dtype=dtype).expand(batch, heads, -1, -1)
    out, statistics = attention(
        query, key, value, v.mask, mechanism="softmax", window_size=(v.left, v.right), key_mask=v.key_mask,
        document_ids=v.document_ids, return_statistics=True, backend=backend,
    )  # fmt: skip
    count = expected.sum(-1)
    assert torch.equal(statistics.count, count.to(dtype))
    uniform = expected.to(dtype) / count.clamp(min=1)[..., None]
    # 1/N and e^0 / sum of N ones, and 1 * (1/N): one rounding apart at most
    assert (out - uniform).abs().max() <= torch.finfo(dtype).eps


def test_causal_is_aligned_bottom_right():
    """The last query sees every key, with fewer queries than keys and with more."""
    assert one_by_one(1, 1, Visibility(2, 5, right=0))[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert Visibility(2, 5, right=0).count(CPU).flatten().tolist() == [4, 5]
    assert Visibility(5, 2, right=0).count(CPU).flatten().tolist() == [0, 0, 0, 1, 2]
    assert Visibility(3, 3, right=0).count(CPU).flatten().tolist() == [1, 2, 3]
    assert Visibility(4, 4, left=1, right=0).count(CPU).flatten().tolist() == [1, 2, 2, 2]
    assert Visibility(4, 4, left=0, right=1).count(CPU).flatten().tolist() == [2, 2, 2, 1]


def test_nothing_given_means_everything_seen():
    v = Visibility(3, 5)
    assert v.block(0, 3, 0, 5, CPU) is None
    assert v.count(CPU).expand(1, 1, 3).flatten().tolist() == [5, 5, 5]
    assert v.span(0, 3) == (0, 5)


def test_a_tile_far_inside_the_window_needs_no_mask():
    v = Visibility(100, 100, right=0)
    assert v.block(50, 60, 0, 50, CPU) is None
    assert v.block(50, 60, 0, 51, CPU) is None  # row 50 sees key 50
    assert v.block(50, 60, 0, 52, CPU) is not None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_document_ids(dtype):
    """torch compares uint8; backends get the others as int64."""
    ids, x = torch.tensor([[0, 0, 0, 1, 1, 255]]), torch.randn(1, 2, 6, 8)
    given = validated_call(x, x, x, document_ids=ids.to(dtype)).visibility.document_ids
    assert given.dtype == (torch.uint8 if dtype == torch.uint8 else torch.int64)
    assert given.tolist() == ids.tolist()
    want, got = (attention(x, x, x, mechanism="lssa", document_ids=one) for one in (ids, ids.to(dtype)))
    assert torch.equal(got, want)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), max_size=6))
def test_document_ids_from_lengths(lengths):
    ids = document_ids_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[number for number, length in enumerate(lengths) for _ in range(length)]]


@pytest.mark.parametrize(("total", "says"), [(4, "at least 5"), (-1, "at least 5"), (5.5, "5.5"), (True, "True")])
def test_a_total_that_does_not_fit_is_refused(total, says):
    with pytest.raises(ValueError, match=f"total: got .*{says}"):
        document_ids_from_lengths([3, 2], total=total)


def test_lengths_stay_on_their_device():
    lengths = torch.tensor([2, 3])
    with torch.device("meta"):  # torch's default device
        ids = document_ids_from_lengths(lengths, 5)
    assert ids.device == CPU
    assert ids.tolist() == [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32])
def test_lengths_are_integers_of_any_kind(dtype):
    assert document_ids_from_lengths(torch.tensor([2, 3], dtype=dtype)).tolist() == [[0, 0, 1, 1, 1]]


def test_document_ids_from_cumulative_lengths():
    cu_seqlens = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert document_ids_from_lengths(cu_seqlens.diff()).tolist() == [[0, 0, 2, 2, 2]]


@pytest.mark.parametrize("offset", [0, 3])
def test_a_window_of_transformers(offset):
    """sliding_window = W is (W - 1, 0): W keys, the own one included."""
    v = Visibility(6, 6 + offset, left=2, right=0)
    assert v.count(CPU).flatten().tolist()[3:] == [3, 3, 3]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([3, -1, 2], "got -1"), ([1.5, 2.0], "float"), ([True], "bool"), (3, "shape"), ("ab", "'ab'"), (None, "None")],
)
def test_lengths_that_are_none(lengths, message):
    with pytest.raises(ValueError, match=f"^lengths: .*{message}"):
        document_ids_from_lengths(lengths)


def test_no_documents_have_no_tokens():
    assert document_ids_from_lengths([]).tolist() == [[]]
