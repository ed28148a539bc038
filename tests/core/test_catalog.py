"""The catalogue holds every row of the paper's tables, and its small grammar reads what people
write.
"""

import copy
import pickle

import pytest

from softfocus import Mechanism, laser, mechanisms, named, sharpened
from softfocus.catalog import Catalog, Entry, learned_parameters

# Every row of tables 1 to 4 of arXiv 2501.13428, and the rivals that the issue lists, written out
# by hand: field values that differ from softmax, and a word of the row's name as the paper prints
# it.
LSSA = {"similarity": "cosine", "scale": "log(d)", "length_scale": "log(N)", "phi": "softplus"}
ROWS = {
    "softmax": ({}, "tables 1-4"),
    "softmax_negated": ({"post": "negate"}, "table 1, Inverse"),
    "softmax_recentred": ({"post": "recentre"}, "table 1, Re-centered"),
    "softmax_recentred_l1": ({"post": "recentre+l1"}, "table 1, Re-centered & l1-norm"),
    "scenario_i": ({"phi": "identity", "normaliser": "none"}, "table 2, scenario I"),
    "scenario_ii": ({"normaliser": "none"}, "table 2, scenario II"),
    "scenario_iii": ({"phi": "identity"}, "table 2, scenario III"),
    "scenario_iv": ({}, "table 2, scenario IV"),
    "relu_l1": ({"phi": "relu"}, "table 3, ReLU"),
    "relu2_l1": ({"phi": "relu2"}, "table 3, ReLU^2"),
    "relu6_l1": ({"phi": "relu6"}, "table 3, ReLU6"),
    "gelu_l1": ({"phi": "gelu"}, "table 3, GeLU"),
    "sigmoid_l1": ({"phi": "sigmoid"}, "table 3, Sigmoid"),
    "softplus_l1": ({"phi": "softplus"}, "table 3, Softplus"),
    "mish_l1": ({"phi": "mish"}, "table 3, Mish"),
    "exp_l1": ({}, "table 3, e^x"),
    "sigmoid_log_l": ({"phi": "sigmoid", "score_bias": "-log(L)", "normaliser": "none"}, "table 4, Sigmoid (Ramapuram"),
    "sigmoid_log_n": (
        {"phi": "sigmoid", "score_bias": "-log(N)", "normaliser": "none"}, "table 4, Sigmoid (b = -log N)",
    ),
    "sigmoid_log_n_l1": ({"phi": "sigmoid", "score_bias": "-log(N)"}, "table 4, Sigmoid (b = -log N, l1-norm)"),
    "relu_wortsman": ({"phi": "relu", "normaliser": "1/L"}, "table 4, ReLU (Wortsman"),
    "relu_li": ({"phi": "relu"}, "table 4, ReLU (Li"),
    "relu_shen": ({"phi": "relu", "normaliser": "1/sqrt(N/2)"}, "table 4, ReLU (Shen"),
    "lssa": (LSSA, "eq. 4, table 4, LSSA"),
    "softmax_p3": ({"power": 3.0}, "eq. 5, table 4, Softmax p = 3"),
    "softmax_p15": ({"power": 15.0}, "eq. 5, table 4, Softmax p = 15"),
    "sigmoid_log_n_l1_p3": ({"phi": "sigmoid", "score_bias": "-log(N)", "power": 3.0}, "eq. 5, table 4, Sigmoid"),
    "sigmoid_log_n_l1_p15": ({"phi": "sigmoid", "score_bias": "-log(N)", "power": 15.0}, "eq. 5, table 4, Sigmoid"),
    "lssar_p3": (LSSA | {"power": 3.0}, "eq. 5, table 4, LSSAR p = 3"),
    "lssar": (LSSA | {"power": 15.0}, "eq. 5, table 4, LSSAR p = 15"),
    "laser": ({"laser": True}, "2411.03493"),
    "laser_lssa": (LSSA | {"laser": True}, "2411.03493"),
    "laser_lssar": (LSSA | {"power": 15.0, "laser": True}, "2411.03493"),
    "ssmax": ({"length_scale": "log(N)"}, "2501.19399"),
    "log512_softmax": ({"length_scale": "log512(N)"}, "kexue.fm/archives/8823"),
    "qknorm": ({"similarity": "cosine", "scale": "1"}, "2010.04245"),
    "cosine_log_n": ({"similarity": "cosine", "scale": "log(d)", "length_scale": "log(N)"}, ""),
}  # fmt: skip
DEFAULTS = {
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


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_tables_is_there_as_the_paper_defines_it(name):
    fields, source = ROWS[name]
    entry = mechanisms()[name]
    assert entry.name == name
    assert entry.mechanism.to_dict() == DEFAULTS | fields
    assert source in entry.source
    assert named(name) == entry.mechanism
    assert entry.equation == str(entry.mechanism)


def test_the_catalogue_has_nothing_that_this_file_does_not_know():
    assert set(mechanisms()) == set(ROWS)


def test_every_entry_names_its_source():
    for entry in mechanisms().values():
        assert entry.source.strip()
        if entry.source != "softfocus":
            assert any(mark in entry.source for mark in ("arXiv 2", "kexue.fm"))


def test_says_where_the_source_was_not_at_hand():
    for name in ("scenario_i", "scenario_ii", "scenario_iii", "relu_shen", "laser", "ssmax", "qknorm"):
        assert any(
            words in mechanisms()[name].note
            for words in ("not at hand", "not legible", "Only a summary", "could not be", "Read from")
        ), name


def test_is_a_read_only_mapping():
    catalogue = mechanisms()
    assert len(catalogue) == len(list(catalogue)) == len(ROWS)
    assert "lssar" in catalogue
    assert "lsar" not in catalogue
    with pytest.raises(KeyError):
        catalogue["lsar"]
    with pytest.raises(TypeError):
        catalogue["mine"] = catalogue["lssar"]  # type: ignore[index]


def test_copies_and_pickles_are_the_process_own():
    known = mechanisms()
    assert copy.deepcopy(known) is known
    assert pickle.loads(pickle.dumps(known)) is known


def test_prints_as_a_table():
    lines = repr(mechanisms()).splitlines()
    assert len(lines) == len(ROWS)
    for name, line in zip(mechanisms(), lines, strict=True):
        assert line.split()[0] == name
        assert str(named(name)) in line
        assert mechanisms()[name].source in line


def test_two_entries_cannot_have_the_same_name():
    entry = Entry("softmax", Mechanism(), "here")
    with pytest.raises(AssertionError, match="the same name"):
        Catalog((entry, entry))


LSSA_MECHANISM = Mechanism(**LSSA)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lssar", LSSA_MECHANISM.replace(power=15)),
        ("  lssar\n", LSSA_MECHANISM.replace(power=15)),
        ("sharpened(lssa, 3)", LSSA_MECHANISM.replace(power=3)),
        ("sharpened(lssa,3)", LSSA_MECHANISM.replace(power=3)),
        ("sharpened( lssa , 3 )", LSSA_MECHANISM.replace(power=3)),
        ("sharpened (lssa, p=3)", LSSA_MECHANISM.replace(power=3)),
        ("sharpened(lssa, p = 7.5)", LSSA_MECHANISM.replace(power=7.5)),
        ("sharpened(softmax, 1e1)", Mechanism(power=10)),
        ("laser(lssar)", LSSA_MECHANISM.replace(power=15, laser=True)),
        ("laser(sharpened(lssa, 7.5))", LSSA_MECHANISM.replace(power=7.5, laser=True)),
        (" laser ( sharpened ( lssa , 7.5 ) ) ", LSSA_MECHANISM.replace(power=7.5, laser=True)),
        ("sharpened(laser(lssa), 2)", LSSA_MECHANISM.replace(power=2, laser=True)),
        ("laser(softmax)", Mechanism(laser=True)),
    ],
)
def test_combinations_parse(text, expected):
    assert named(text) == expected


@pytest.mark.parametrize("text", ["sharpened(lssar, 3)", "sharpened(laser(softmax_p3), 3)", "laser(laser_lssa)"])
def test_a_combination_that_is_there_already_is_refused(text):
    with pytest.raises(ValueError, match="already"):
        named(text)


def test_combinations_equal_the_combinators():
    assert named("laser(sharpened(softmax, 2.5))") == laser(sharpened(named("softmax"), 2.5))


@pytest.mark.parametrize(
    ("typo", "guess"),
    [
        ("lsar", "lssar"),
        ("sofmax", "softmax"),
        ("softmax_recentered", "softmax_recentred"),
        ("lssar_p5", "lssar_p3"),
        ("laser(lsssar)", "lssar"),
        ("sharpened(sofmax, 3)", "softmax"),
        ("laser(lssa))", "lssa"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(typo, guess):
    with pytest.raises(ValueError, match="is not known") as caught:
        named(typo)
    assert f"did you mean {guess!r}" in str(caught.value)
    assert "'sharpened(NAME, POWER)', 'laser(NAME)'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"), [("LSSAR", "lssar"), ("LASER", "laser"), ("Softmax", "softmax"), ("LASER(LSSA)", "laser_lssa")]
)
def test_the_papers_own_capitals_are_understood(text, name):
    assert named(text) == named(name)


@pytest.mark.parametrize("text", ["", "zzz", "lssa, 3", "blunted(lssa)"])
def test_other_words_are_not_known(text):
    with pytest.raises(ValueError, match="is not known"):
        named(text)


@pytest.mark.parametrize("text", ["laser()", "laser(lssar", "sharpened(lssa)", "sharpened()", "sharpened"])
def test_half_a_combination_is_told_how_it_is_written(text):
    with pytest.raises(ValueError, match=r"does not parse; write 'laser\(NAME\)' or 'sharpened\(NAME, POWER\)'"):
        named(text)


def test_a_name_that_is_also_a_combinator_stays_a_name():
    assert named("laser") == Mechanism(laser=True)


def test_a_missing_entry_of_the_catalogue_suggests_the_nearest():
    with pytest.raises(KeyError, match="did you mean 'lssar'"):
        mechanisms()["lsar"]


@pytest.mark.parametrize("combine", [laser, lambda name: sharpened(name, 3)])
def test_combinators_say_that_they_take_mechanisms(combine):
    with pytest.raises(TypeError, match=r"got 'lssa', expected a softfocus.Mechanism: look the name up"):
        combine("lssa")


def test_what_is_near_nothing_gets_the_list_of_names():
    with pytest.raises(ValueError, match=r"mechanism 'zzz' is not known; the names are softmax, .*lssar"):
        named("zzz")


def test_the_power_of_a_combination_is_checked():
    with pytest.raises(ValueError, match="power 'three' is not a number"):
        named("sharpened(lssa, three)")
    with pytest.raises(ValueError, match=r"outside \[1, 100\]"):
        named("sharpened(lssa, 500)")
    with pytest.raises(ValueError, match="re-weights rows that sum to one"):
        named("sharpened(relu_wortsman, 3)")


def test_learned_parameters():
    assert learned_parameters("ssmax") == {"head_scale": 0.43}
    assert learned_parameters("relu_shen") == {"head_scale": 1.0}
    assert learned_parameters("qknorm") == {"head_scale": 20.0}
    for name in set(ROWS) - {"ssmax", "relu_shen", "qknorm"}:
        assert learned_parameters(name) == {}, name


def test_learned_parameters_of_a_combination_are_those_of_its_base():
    assert learned_parameters("laser(ssmax)") == {"head_scale": 0.43}
    assert learned_parameters("laser(sharpened(qknorm, 4))") == {"head_scale": 20.0}
    assert learned_parameters(Mechanism(length_scale="log(N)")) == {"head_scale": 0.43}
    assert learned_parameters(Mechanism(length_scale="log(N)", power=3)) == {"head_scale": 0.43}
    assert learned_parameters(Mechanism(phi="relu", length_scale="log(N)")) == {}


def test_learned_parameters_are_arguments_of_attention():
    import inspect

    from softfocus import attention

    for entry in mechanisms().values():
        for name, _initial in entry.learned:
            assert name in inspect.signature(attention).parameters
