"""T6's attention to the factors is its attention to keys and values."""

import math

import pytest
import torch
import torch._dynamo.testing
from transformers import DynamicCache

import softfocus.hf
from softfocus import Mechanism, named
from softfocus.hf.t6 import factored
from softfocus.hf.t6.factored import Factored, combine, of_unit_keys, suits

LENGTH = 10
USUAL = 1 << 60


@pytest.fixture
def calls(monkeypatch):
    """The mechanisms of the calls that attended to factors. All that may do so do."""
    monkeypatch.setattr(factored, "MIN_NUMBERS", 1)
    seen, attend = [], Factored.__call__

    def count(self, *args, mechanism, **kwargs):
        seen.append(mechanism)
        return attend(self, *args, mechanism=mechanism, **kwargs)

    monkeypatch.setattr(Factored, "__call__", count)
    return seen


def decoded(model, ids, cache=None, **kwargs):
    """Logits [B, L, V], token by token."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        parts = [model(token, past_key_values=cache, **kwargs).logits for token in ids.split(1, dim=1)]
    return torch.cat(parts, dim=1)


LAYOUTS = {
    "softmax": "softmax",
    "lssar": "lssar",
    "lssa": "lssa",
    "laser": "laser",
    "laser_lssa": "laser(lssa)",
    "sigmoid": Mechanism(phi="sigmoid", normaliser="none", score_bias="-log(N)"),
    "ssmax": "ssmax",
    "qknorm": "qknorm",
    "recentred": Mechanism(similarity="cosine", post="recentre+l1"),
    "groups": {"*": [{"mechanism": "lssar", "heads": 1, "window": 3}, {"mechanism": "laser", "heads": 1}, "softmax"]},
    "sharpened": Mechanism(phi="softplus", power=3.0),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_decoding_is_that_of_the_whole_text(build, tokens, in_double, agree, calls, name):
    model, ids = build("t6", LAYOUTS[name]), tokens(2, LENGTH)
    double = in_double(model)
    with torch.no_grad():
        want, single = double(ids).logits, model(ids).logits
    assert not calls
    agree(decoded(double, ids), want, single)
    groups = 3 if name == "groups" else 1
    assert len(calls) == (LENGTH - 1) * model.config.num_hidden_layers * groups  # all but the first token


def test_learned_powers_and_scales(build, tokens, in_double, agree, calls):
    model = build("t6", "lssar", parameters={"power": 15.0, "head_scale": 1.0})
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        for at, parameter in enumerate(p for n, p in model.named_parameters() if "softfocus_" in n):
            parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)) + at / 10)
        double = in_double(model)
        want, single = double(ids).logits, model(ids).logits
    agree(decoded(double, ids), want, single)
    assert calls


@pytest.mark.parametrize("mechanism", ["lssar", "softmax"])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generation_with_padding(build, tokens, in_double, calls, monkeypatch, mechanism, implementation):
    model, ids = in_double(build("t6", mechanism)), tokens(2, 6)
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    how = {
        "attention_mask": mask,
        "max_new_tokens": 5,
        "do_sample": False,
        "cache_implementation": implementation,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    ours = model.generate(ids, **how)
    assert calls
    calls.clear()
    monkeypatch.setattr(factored, "MIN_NUMBERS", USUAL)
    usual = model.generate(ids, **how)
    assert not calls
    assert torch.equal(ours.sequences, usual.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(usual.logits), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("hidden", [True, False])
def test_nan_in_a_cached_token(build, tokens, calls, monkeypatch, where, hidden):
    """Hidden it reaches nothing, seen it is in the logits, as usual."""
    model, ids = build("t6", "lssar").double(), tokens(2, LENGTH)
    mask = torch.ones(2, LENGTH + 1, dtype=torch.long)
    mask[0, 2] = 0 if hidden else 1
    logits = {}
    for least in (1, USUAL):
        monkeypatch.setattr(factored, "MIN_NUMBERS", least)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, attention_mask=mask[:, :-1], past_key_values=cache)
            getattr(cache.layers[0], where)[0, 0, 2] = math.nan
            logits[least] = model(ids[:, :1], attention_mask=mask, past_key_values=cache).logits
    assert bool(calls) == (where == "keys" or hidden)
    assert logits[1][0].isnan().any() != hidden
    torch.testing.assert_close(logits[1], logits[USUAL], rtol=1e-10, atol=1e-10, equal_nan=True)


def test_who_computes_keys(build, tokens, calls):
    model, ids = build("t6", "lssar"), tokens(1, LENGTH)

    def step():
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
        return len(calls)

    assert step() == 0, "gradients are wanted"
    with torch.no_grad():
        with softfocus.hf.watch(lambda call: call.key):
            assert step() == 0, "somebody watches the keys"
        with torch.autocast("cpu"):
            assert step() == 0, "autocast would round the products"
        model.train()
        assert step() == 0, "dropout"
        model.eval()
        assert step() == 2


def called(mechanism, seed, dtype, heads=8, length=128, rank=2, size=32):
    """What a call of Factored returns, the reference of the same dtype, and that of float64."""
    torch.manual_seed(seed)
    query = torch.randn(1, heads, 1, size, dtype=dtype)
    (a, b), (v_a, v_b) = (
        (torch.randn(1, length, rank, heads, dtype=dtype), torch.randn(1, length, rank, size, dtype=dtype))
        for _ in range(2)
    )
    rows = (x.permute(0, 3, 1, 2) for x in (a, v_a))
    ours = Factored(b, v_b)(query, *rows, mechanism=mechanism, scale=None, dropout_p=0.0)
    eager, exact = (
        softfocus.attention(
            query.to(kind),
            combine(a.to(kind), b.to(kind)),
            combine(v_a.to(kind), v_b.to(kind)),
            mechanism=mechanism,
            backend="reference",
        )
        for kind in (dtype, torch.float64)
    )
    return ours, eager, exact


@pytest.mark.long
@pytest.mark.parametrize(("heads", "length", "size"), [(8, 128, 32), (34, 2048, 64)], ids=["small", "chosen"])
@pytest.mark.parametrize("name", ["softmax", "lssa", "lssar", "ssmax", "qknorm"])
def test_single_precision_is_as_exact_as_the_formula_on_keys(name, heads, length, size):
    """The project's tolerance: twice the eager formula's error over some draws, plus 4 units in
    the last place.
    """
    worst, eager_worst, largest = 0.0, 0.0, 0.0
    for seed in range(16 if length < 1024 else 4):
        ours, eager, exact = called(named(name), seed, torch.float32, heads, length, size=size)
        worst = max(worst, (ours - exact).abs().max().item())
        eager_worst = max(eager_worst, (eager - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    assert worst <= 2 * eager_worst + 4 * torch.finfo(torch.float32).eps * largest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "lssar"])
def test_half_precision_is_no_worse_than_usual(name, dtype):
    """The factors are read as they are cached, and everything else is in float32."""
    ours, eager, exact = called(named(name), 0, dtype, heads=4, length=64, size=16)
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= (eager - exact).abs().max()


def test_what_was_not_measured_to_be_faster_computes_keys(monkeypatch):
    def chosen(heads=34, length=2048, rank=2, size=64, batch=1):
        query = torch.empty(batch, heads, 1, size)
        k_a, v_a = torch.zeros(batch, length, rank, heads), torch.zeros(batch, length, 2, heads)
        with torch.no_grad():
            return suits(query, k_a, v_a, torch.zeros(batch, length, 2, size))

    assert chosen()
    assert not chosen(length=1024)
    assert chosen(length=1024, batch=2)
    assert not chosen(rank=4)
    assert not chosen(heads=2, length=1 << 15)
    monkeypatch.setattr(factored, "MIN_NUMBERS", 1)
    assert not chosen(length=1)


def test_compiled_code_has_no_guard_at_the_smallest_number(monkeypatch):
    """It never takes the path, so it need not know on which side of it a length lies."""
    monkeypatch.setattr(factored, "MIN_NUMBERS", 8 * 12 * 4)
    counter = torch._dynamo.testing.CompileCounter()

    @torch.compile(backend=counter, dynamic=True)
    def run(query, k_a, v_a, v_b):
        return query + suits(query, k_a, v_a, v_b)

    with torch.no_grad():
        for length in (7, 9, 11, 13, 17):
            run(torch.zeros(1, 8, 1, 4), *(torch.zeros(1, length, 2, size) for size in (8, 8, 4)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("size", [1.0, 1e-25, 1e25], ids=["one", "tiny", "huge"])
@pytest.mark.parametrize("apart", [1.0, 1e-3], ids=["any", "cancelling"])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_direction_of_a_key_is_as_exact_as_that_of_the_key_itself(rank, apart, size):
    """Also where its products cancel to a thousandth."""
    torch.manual_seed(0)
    a = torch.randn(1, 50, rank, 3)
    b = torch.randn(1, 50, 1, 8) + apart * torch.randn(1, 50, rank, 8)
    if apart < 1:
        a = a - a.mean(2, keepdim=True) if rank > 1 else a
    b = b * size
    unit = torch.nn.functional.normalize
    exact = unit(combine(a.double(), b.double()), dim=-1)
    usual = combine(a, b)
    usual = unit(usual / usual.abs().amax(-1, keepdim=True), dim=-1)
    rows, b = of_unit_keys(a.permute(0, 3, 1, 2), b)
    ours = combine(rows.double().permute(0, 2, 3, 1), b.double())
    assert (ours - exact).abs().max() <= 4 * (usual - exact).abs().max()


def test_a_key_of_zeros_has_no_direction():
    rows, b = of_unit_keys(torch.zeros(1, 2, 3, 2), torch.randn(1, 3, 2, 4))
    assert not rows.any()
    assert b.isfinite().all()
    rows, b = of_unit_keys(torch.randn(1, 2, 3, 2), torch.zeros(1, 3, 2, 4))
    assert not (rows[..., None] * b[:, None]).any()
