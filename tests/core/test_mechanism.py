"""The algebra: a frozen record that hashes, prints and round-trips, and refuses what makes no
sense, in the caller's words.
"""

import dataclasses
import json
import math
import pickle

import pytest
import torch

from softfocus import Mechanism, attention, laser, mechanisms, named, sharpened

NAMES = sorted(mechanisms())


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Mechanism().phi = "relu"  # type: ignore[misc]


def test_takes_keywords_only():
    with pytest.raises(TypeError):
        Mechanism("cosine")  # type: ignore[misc]


def test_equal_fields_are_one_mechanism():
    a, b = Mechanism(phi="relu", power=3), Mechanism(phi="relu", power=3.0)
    assert a == b
    assert hash(a) == hash(b)
    assert {a: "found"}[b] == "found"
    assert a != a.replace(power=4)
    assert a != a.replace(phi="softplus")
    assert len({named(name) for name in NAMES}) == len({named(name).to_json() for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_round_trips(name):
    mechanism = named(name)
    for wrapped in (mechanism, *_wrappable(mechanism)):
        text = wrapped.to_json()
        assert Mechanism.from_json(text) == wrapped
        assert hash(Mechanism.from_json(text)) == hash(wrapped)
        assert "\n" not in text
        # config.json goes through another dump: what comes back are plain JSON types
        assert Mechanism.from_dict(json.loads(json.dumps(wrapped.to_dict()))) == wrapped
        assert set(wrapped.to_dict()) == {field.name for field in dataclasses.fields(Mechanism) if field.init}
        assert all(isinstance(value, str | float | bool | None) for value in wrapped.to_dict().values())
        assert pickle.loads(pickle.dumps(wrapped)) == wrapped


def _wrappable(mechanism: Mechanism) -> list[Mechanism]:
    found = []
    plain = mechanism.replace(power=None, laser=False)  # no combinator goes on twice
    for wrap in (lambda m: sharpened(m, 7.5), laser, lambda m: laser(sharpened(m, 1))):
        try:
            found.append(wrap(plain))
        except ValueError:
            assert (
                mechanism.normaliser != "l1"
                or mechanism.phi in ("gelu", "mish", "identity")
                or mechanism.post != "none"
            )
    return found


@pytest.mark.parametrize("left_out", [*Mechanism().to_dict(), "all"])
def test_a_description_without_a_field_is_refused(left_out):
    """With defaults in their place it would be another mechanism: softmax, where all are left
    out.
    """
    whole = named("lssar").to_dict()
    part = {} if left_out == "all" else {name: value for name, value in whole.items() if name != left_out}
    lacks = ", ".join(whole) if left_out == "all" else left_out
    for read in (Mechanism.from_dict, lambda values: Mechanism.from_json(json.dumps(values))):
        with pytest.raises(ValueError, match=f"lacks {lacks}; expected every field"):
            read(part)


def test_the_text_is_stable():
    assert json.loads(Mechanism().to_json()) == {
        "similarity": "dot",
        "scale": "1/sqrt(d)",
        "length_scale": "1",
        "score_bias": "0",
        "phi": "exp",
        "normaliser": "l1",
        "power": None,
        "post": "none",
        "laser": False,
    }


def test_replace_changes_one_field_and_leaves_the_original():
    lssar = named("lssar")
    changed = lssar.replace(power=3)
    assert changed.power == 3.0
    assert lssar.power == 15.0
    assert changed.replace(power=15) == lssar
    assert lssar.replace() == lssar
    assert lssar.replace(power=None) == named("lssa")


def test_replace_checks_what_comes_out():
    with pytest.raises(ValueError, match="power=2 re-weights rows"):
        named("relu_wortsman").replace(power=2)


def test_combinators():
    lssa = named("lssa")
    assert sharpened(lssa, 15) == named("lssar")
    assert laser(Mechanism()) == Mechanism(laser=True) == named("laser")
    assert laser(sharpened(lssa, 2)) == sharpened(laser(lssa), 2)


def test_a_combinator_twice_is_refused():
    """The algebra has one power and one logarithm: the second would take the first one's place in
    silence.
    """
    with pytest.raises(
        ValueError, match=r"re-weighted already, with power 15, .* \(lssa, not lssar\), .*replace\(power="
    ):
        sharpened(named("lssar"), 3)
    with pytest.raises(ValueError, match=r"re-weighted already, with power 2\.5"):
        sharpened(laser(sharpened(named("lssa"), 2.5)), 2.5)
    with pytest.raises(ValueError, match="LASER already"):
        laser(sharpened(laser(named("lssa")), 3))
    with pytest.raises(ValueError, match="got power None"):
        sharpened(named("lssa"), None)


@pytest.mark.parametrize("power", [1, 1.0, 2.5, 15, 99.5, 100, 100.0])
def test_powers_from_1_to_100_integer_or_not(power):
    mechanism = sharpened(Mechanism(), power)
    assert mechanism.power == float(power)
    assert type(mechanism.power) is float


@pytest.mark.parametrize(
    "power", [0, 0.999, math.nextafter(1, 0), -1, math.nextafter(100, 101), 101, math.inf, -math.inf, math.nan]
)
def test_other_powers_are_refused(power):
    with pytest.raises(ValueError, match=r"power=.* is outside \[1, 100\]; None leaves"):
        sharpened(Mechanism(), power)


@pytest.mark.parametrize("power", ["3", True, [3], 3j])
def test_a_power_is_a_number(power):
    with pytest.raises(ValueError, match=r"power=.* is not a number; expected 1 <= power <= 100, or None"):
        Mechanism(power=power)


@pytest.mark.parametrize(
    ("field", "wrong", "guess"),
    [
        ("similarity", "cosin", "cosine"),
        ("scale", "1/sqrt(D)", "1/sqrt(d)"),
        ("length_scale", "log(n)", "log(N)"),
        ("score_bias", "log(N)", "-log(N)"),
        ("phi", "softmax", "exp"),
        ("phi", "softplu", "softplus"),
        ("normaliser", "L1", "1/L"),
        ("post", "recenter", "recentre"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(field, wrong, guess):
    with pytest.raises(ValueError) as caught:
        Mechanism(**{field: wrong})
    message = str(caught.value)
    assert f"{field}={wrong!r} is not one of" in message
    if field != "normaliser":  # "L1" is as near to "1/L" as to "l1"
        assert f"did you mean {guess!r}?" in message


def test_what_is_near_nothing_gets_the_whole_list():
    with pytest.raises(ValueError, match="phi='zzzzzz' is not one of 'exp', 'softplus', 'relu'") as caught:
        Mechanism(phi="zzzzzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("wrong", [None, 1, ["dot"], b"dot"])
def test_a_name_is_a_string(wrong):
    with pytest.raises(ValueError, match="similarity="):
        Mechanism(similarity=wrong)


@pytest.mark.parametrize("wrong", ["null", "1", "[]", '"lssar"'])
def test_a_description_has_fields(wrong):
    for read, given in ((Mechanism.from_json, wrong), (Mechanism.from_dict, json.loads(wrong))):
        with pytest.raises(ValueError, match="expected its fields by name"):
            read(given)


def test_a_name_that_is_no_text():
    with pytest.raises(TypeError, match="named: got int, expected a name"):
        named(3)


def test_a_power_beyond_every_float_is_outside():
    with pytest.raises(ValueError, match=r"is outside \[1, 100\]"):
        Mechanism(power=10**400)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mechanism().replace(pwoer=3),
        lambda: Mechanism.from_dict({"pwoer": 3}),
        lambda: Mechanism.from_json('{"pwoer": 3}'),
    ],
)
def test_an_unknown_field_is_answered_with_the_nearest(make):
    with pytest.raises(ValueError, match="no field 'pwoer'; did you mean 'power'"):
        make()


def test_an_unknown_field_near_nothing_gets_the_list():
    with pytest.raises(ValueError, match=r"no field 'zzz'; its fields are similarity, scale, .*laser"):
        Mechanism.from_dict({"zzz": 1})


@pytest.mark.parametrize(
    "fields", [{"normaliser": "none"}, {"normaliser": "1/N"}, {"phi": "gelu"}, {"phi": "mish"}, {"phi": "identity"}]
)
def test_the_power_needs_rows_that_sum_to_one(fields):
    with pytest.raises(ValueError, match=r"power=3 re-weights rows that sum to one.*got normaliser=.*phi="):
        Mechanism(power=3, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"normaliser": "none"},
        {"normaliser": "1/L"},
        {"phi": "gelu"},
        {"phi": "mish"},
        {"phi": "identity"},
        {"post": "negate"},
        {"post": "recentre"},
        {"post": "recentre+l1"},
    ],
)
def test_laser_needs_non_negative_rows_that_sum_to_one(fields):
    with pytest.raises(ValueError, match=r"laser takes the log of a weighted mean.*got normaliser=.*phi=.*post="):
        laser(Mechanism(**fields))


@pytest.mark.parametrize("wrong", [1, 0, "yes", None])
def test_laser_is_true_or_false(wrong):
    with pytest.raises(ValueError, match=r"laser=.* is not True or False"):
        Mechanism(laser=wrong)


def test_prints_as_the_equation():
    assert str(Mechanism()) == "A = l1(exp(1/sqrt(d) * q.k));  out = A V"
    assert str(named("lssa")) == "A = l1(softplus(log(d) * log(N) * cos(q,k)));  out = A V"
    lssar = str(named("lssar"))
    assert lssar == "A = l1(relu(l1(softplus(log(d) * log(N) * cos(q,k))) * N - 1)^15);  out = A V"
    assert "^7.5" in str(sharpened(Mechanism(), 7.5))
    assert str(named("laser")).endswith("out = log(A exp(V))")
    assert str(named("sigmoid_log_l")) == "A = sigmoid(1/sqrt(d) * q.k - log(L));  out = A V"
    biased = Mechanism(phi="identity", score_bias="-log(N)", normaliser="1/N")
    assert str(biased) == "A = (1/sqrt(d) * q.k - log(N)) * 1/N;  out = A V"
    negated = biased.replace(normaliser="none", post="negate")
    assert str(negated) == "A = -(1/sqrt(d) * q.k - log(N));  out = A V"
    assert str(named("relu_shen")) == "A = relu(1/sqrt(d) * q.k) * 1/sqrt(N/2);  out = A V"
    assert str(named("scenario_i")) == "A = 1/sqrt(d) * q.k;  out = A V"
    assert str(named("softmax_negated")).startswith("A = -l1(exp(")
    assert str(named("softmax_recentred")).startswith("A = (l1(exp(")
    assert str(named("softmax_recentred_l1")).startswith("A = l1(l1(exp(")


def test_different_mechanisms_print_differently():
    different = {named(name) for name in NAMES}
    assert len({str(mechanism) for mechanism in different}) == len(different)


def test_repr_evaluates_to_the_same():
    assert eval(repr(named("lssar"))) == named("lssar")


@pytest.mark.parametrize("name", [name for name in NAMES if named(name).phi != "identity"])
def test_counts_keys(name):
    """A key without weight changes the others' where it is counted, and only there."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8, generator=generator, dtype=torch.float64) for n in (3, 9, 9))
    seen = torch.arange(9) < 6
    hidden = attention(q, k, v, seen[None], mechanism=name)
    counted = attention(q, k, v, bias=torch.where(seen, 0.0, -800.0)[None].double(), mechanism=name)
    assert torch.allclose(hidden, counted) != named(name).counts_keys
