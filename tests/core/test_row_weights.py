"""The weights of chosen rows: what attention does to an identity for a value, row by row."""

import math

import pytest
import torch

import softfocus
from softfocus import Mechanism, attention, mechanisms, row_weights, weights
from softfocus.testing import CASES

ALGEBRAS = sorted({entry.mechanism: name for name, entry in reversed(list(mechanisms().items()))}.values())


def by_identity(arguments):
    """The weights as attention shows them: the output on an identity for a value, LASER's A under a
    plain mean.
    """
    key, mechanism = arguments["key"], arguments["mechanism"]
    eye = torch.eye(key.size(2), dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    plain = mechanism.replace(laser=False)
    return attention(**{**arguments, "value": eye, "mechanism": plain, "backend": "reference"})


def given(case, name, dtype=torch.float64):
    arguments = case.arguments(mechanisms()[name].mechanism, dtype)
    return arguments, {argument: x for argument, x in arguments.items() if argument != "value"}


@pytest.mark.parametrize("name", ALGEBRAS)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("all masks", "learned", "bias")], ids=lambda c: c.name)
def test_every_mechanism_weighs_as_it_attends(case, name):
    arguments, without_value = given(case, name)
    expected = by_identity(arguments)
    torch.testing.assert_close(weights(**without_value), expected, rtol=0, atol=0)
    rows = torch.randperm(case.query_length)[:9] - case.query_length // 2  # in any order, some from the end
    torch.testing.assert_close(weights(**without_value, rows=rows), expected[:, :, rows], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["lssar", "softmax", "laser_lssar", "softmax_recentred_l1", "sigmoid_log_l"])
@pytest.mark.parametrize("case", [case for case in CASES if not case.dropout_p], ids=lambda c: c.name)
def test_every_mask_is_kept_when_rows_are_chosen(case, name):
    arguments, without_value = given(case, name)
    rows = list(range(0, case.query_length, 3))[::-1]
    expected = by_identity(arguments)[:, :, rows]
    torch.testing.assert_close(weights(**without_value, rows=rows), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["lssar", "softmax_recentred", "relu_wortsman"])
def test_blocks_change_nothing(name, monkeypatch):
    case = next(c for c in CASES if c.name == "all masks")
    _, without_value = given(case, name)
    whole = weights(**without_value)
    monkeypatch.setattr(row_weights, "BLOCK_ELEMENTS", 3 * case.batch * case.heads * case.key_length)
    blocks = list(row_weights.blocks(**without_value))
    assert [len(block.rows) for block in blocks] == [3] * 12 + [1]
    assert max(block.weights.numel() for block in blocks) <= row_weights.BLOCK_ELEMENTS
    torch.testing.assert_close(weights(**without_value), whole, rtol=1e-12, atol=1e-15)
    for block in blocks:
        assert not block.weights[~block.visible].any()


def test_the_caller_keeps_its_autocast_between_blocks(monkeypatch):
    monkeypatch.setattr(row_weights, "BLOCK_ELEMENTS", 1)
    query = torch.randn(1, 1, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for block in row_weights.blocks(query, query):
            assert block.weights.dtype == torch.float32
            assert (query[0, 0] @ query[0, 0].T).dtype == torch.bfloat16


def test_gradients_are_those_of_attention():
    case = next(c for c in CASES if c.name == "learned")
    arguments, without_value = given(case, "lssar")
    leaves = [arguments[name] for name in ("query", "key", "head_scale", "power")]
    above = torch.randn(case.batch, case.heads, 4, case.key_length, dtype=torch.float64)
    rows = [3, 8, 20, 36]
    mine = torch.autograd.grad((weights(**without_value, rows=rows) * above).sum(), leaves)
    expected = torch.autograd.grad((by_identity(arguments)[:, :, rows] * above).sum(), leaves)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_halves_are_weighed_in_float32(dtype):
    query, key = torch.randn(2, 1, 2, 30, 16).to(dtype)
    found = weights(query, key, is_causal=True, mechanism="softmax")
    scores = (query.float() @ key.float().mT / 4).masked_fill(torch.ones(30, 30).triu(1).bool(), -math.inf)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, scores.softmax(-1))


def test_a_broken_key_is_seen_only_by_those_who_see_it():
    query, key = torch.randn(2, 1, 1, 6, 4)
    key[0, 0, 4] = math.nan
    found = weights(query, key, is_causal=True)
    assert found[..., :4, :].isfinite().all()
    assert found[..., 4, :5].isnan().all()
    assert not found[..., 4, 5].any()


def test_no_rows_and_no_keys():
    query, key = torch.randn(2, 1, 2, 5, 4)
    assert weights(query, key, rows=[]).shape == (1, 2, 0, 5)
    assert weights(query[:, :, :0], key).shape == (1, 2, 0, 5)
    assert weights(query, key[:, :, :0]).shape == (1, 2, 5, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int8, torch.int32])
def test_rows_of_any_integers(dtype):
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    rows = torch.tensor([3, 1], dtype=dtype)
    assert torch.equal(weights(query, key, rows=rows), weights(query, key, rows=[3, 1]))


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([5], ValueError, "rows: got 5 to 5, expected numbers from -5 to 4"),
        ([0, -6], ValueError, "rows: got -6 to 0"),
        ([0.5], TypeError, "rows: got dtype torch.float32"),
        (torch.ones(5, dtype=torch.bool), TypeError, "rows: got dtype torch.bool"),
        ([[0]], TypeError, r"shape \[1, 1\]"),
        (3, TypeError, "rows: got int"),
        ([2**70], TypeError, "rows: got "),
        (["a"], TypeError, "rows: got "),
        (torch.ones(2, dtype=torch.complex64), TypeError, "rows: got dtype torch.complex64"),
    ],
)
def test_rows_that_are_not_there(rows, error, words):
    query, key = torch.randn(2, 1, 2, 5, 4)
    with pytest.raises(error, match=words):
        weights(query, key, rows=rows)


def test_arguments_are_checked_as_attentions():
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        weights(query, key)
    with pytest.raises(ValueError, match="did you mean 'lssar'"):
        weights(key, key, mechanism="lsar")
    with pytest.raises(TypeError, match="dropout_p"):
        weights(key, key, dropout_p=0.1)


def test_a_mechanism_is_taken_as_it_is():
    query, key = torch.randn(2, 1, 1, 5, 4, dtype=torch.float64)
    found = softfocus.weights(query, key, mechanism=Mechanism(phi="identity", normaliser="none"))
    torch.testing.assert_close(found, query @ key.mT / 2)


@pytest.mark.long
def test_chosen_rows_compile():
    torch.compiler.reset()
    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    key = torch.randn(1, 2, 9, 8)
    for length, rows in ((9, [-1, 0]), (7, torch.tensor([3, -2])), (8, torch.tensor([5]))):
        query = torch.randn(1, 2, length, 8)
        assert torch.equal(compiled(query, key, rows=rows), weights(query, key, rows=rows))
    with pytest.raises(RuntimeError, match="rows: got a number that no query has"):
        compiled(query, key, rows=torch.tensor([8]))
