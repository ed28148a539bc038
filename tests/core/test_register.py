"""Names of one's own: usable wherever names are, never given away twice, and not needed to read
what was saved.
"""

import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from softfocus import Mechanism, attention, catalog, laser, mechanisms, named, register, sharpened
from softfocus.catalog import learned_parameters

MINE = Mechanism(phi="sigmoid", length_scale="log(N)")


@pytest.fixture(autouse=True)
def catalogue_as_it_was(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(catalog._CATALOG, "_entries", catalog._CATALOG._entries)


def test_a_name_stands_wherever_names_do():
    entry = register("mine", MINE, note="Mine.")
    assert mechanisms()["mine"] is entry
    assert entry.note == "Mine."
    assert list(mechanisms())[-1] == "mine"
    assert re.search(r"^mine +registered +A = ", repr(mechanisms()), re.MULTILINE)
    assert named("mine") == named("Mine ") == MINE
    assert named("laser(sharpened(mine, 3))") == laser(sharpened(MINE, 3))
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    by_name = attention(q, k, v, mechanism="mine", is_causal=True)
    assert torch.equal(by_name, attention(q, k, v, mechanism=MINE, is_causal=True))
    with pytest.raises(ValueError, match="did you mean 'mine'"):
        named("minee")


def test_a_name_is_given_once():
    entry = register("mine", MINE)
    assert register("mine", MINE) == entry  # a cell run again
    assert len(mechanisms()) == len({*mechanisms()})
    for mechanism, note in ((MINE.replace(phi="relu"), ""), (MINE, "another note")):
        with pytest.raises(ValueError, match=r"'mine' is taken .*choose another name"):
            register("mine", mechanism, note=note)
    with pytest.raises(ValueError, match="'softmax' is taken"):
        register("softmax", MINE)
    assert named("softmax") == Mechanism()
    assert named("mine") == MINE


@pytest.mark.parametrize(
    "name", ["", "Mine", "my name", "my-name", "2mine", "laser(x)", "sharpened", "laser", "ü", 3, None]
)
def test_what_is_not_a_name(name):
    with pytest.raises(ValueError, match=r"name: got .* expected a lower-case letter"):
        register(name, MINE)


@pytest.mark.parametrize("mechanism", ["lssar", None, {"phi": "relu"}, Mechanism])
def test_what_is_not_a_mechanism(mechanism):
    with pytest.raises(TypeError, match=r"mechanism: got .*expected a softfocus\.Mechanism"):
        register("mine", mechanism)
    assert "mine" not in mechanisms()


def test_what_a_name_learns_belongs_to_the_algebra():
    register("mine", MINE, learned={"head_scale": 2})
    assert learned_parameters("mine") == learned_parameters(MINE) == {"head_scale": 2.0}
    assert learned_parameters("laser(sharpened(mine, 3))") == {"head_scale": 2.0}
    register("mine_too", MINE)
    assert mechanisms()["mine_too"].learned == (("head_scale", 2.0),)
    register("mine_p7", sharpened(MINE, 7), learned={"power": 5.0})
    assert learned_parameters("mine_p7") == {"head_scale": 2.0, "power": 5.0}
    assert learned_parameters("laser(mine_p7)") == {"head_scale": 2.0, "power": 5.0}
    assert learned_parameters("sharpened(mine, 3)") == {"head_scale": 2.0}
    register("mine_laser", laser(Mechanism(phi="relu2")), learned={"head_scale": 4})
    assert learned_parameters("sharpened(mine_laser, 3)") == {"head_scale": 4.0}
    with pytest.raises(ValueError, match=r"learned: .*'mine' is the same mechanism, .* and learns"):
        register("mine_other", MINE, learned={"head_scale": 3})
    with pytest.raises(ValueError, match=r"'softmax' is the same mechanism, .* and learns nothing"):
        register("soft", Mechanism(), learned={"head_scale": 3})
    assert learned_parameters("softmax") == {}


def test_a_registration_changes_no_older_name():
    base = Mechanism(phi="softplus", scale="1")
    register("older", sharpened(base, 3))
    with pytest.raises(ValueError, match="'older' is the same mechanism, or builds on it, and learns nothing"):
        register("newer", base, learned={"head_scale": 0.5})
    assert learned_parameters("older") == {}
    register("mine", MINE, learned={"head_scale": 2})
    with pytest.raises(ValueError, match=r"'laser\(mine\)' is the same mechanism"):
        register("laser_of_mine", laser(MINE), learned={"head_scale": 9})
    assert learned_parameters("laser(mine)") == {"head_scale": 2.0}


@pytest.mark.parametrize(
    ("learned", "error", "words"),
    [
        ({"headscale": 1.0}, TypeError, "did you mean 'head_scale'"),
        ({"head_scale": "1"}, ValueError, "expected a finite number"),
        ({"head_scale": float("inf")}, ValueError, "expected a finite number"),
        ({"head_scale": True}, ValueError, "expected a finite number"),
        ({"power": 3.0}, ValueError, "does not re-weight"),
    ],
)
def test_what_cannot_be_learned(learned, error, words):
    with pytest.raises(error, match=words):
        register("mine", MINE, learned=learned)
    assert "mine" not in mechanisms()


def test_a_power_outside_its_range_cannot_be_learned():
    with pytest.raises(ValueError, match="power"):
        register("mine", sharpened(MINE, 3), learned={"power": 0.5})


def test_pickles_hold_the_algebra():
    register("mine", MINE)
    data = pickle.dumps(named("mine"))
    program = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).to_json())"
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, check=True)
    assert Mechanism.from_json(done.stdout.decode()) == MINE


@pytest.fixture
def impatient_threads():
    """They take turns after microseconds, not milliseconds: a few calls meet as often as many."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.long
def test_many_threads_register_while_others_read(impatient_threads):
    def work(number):
        register(f"mine_{number % 50}", MINE.replace(power=1.0 + number % 50))
        return [entry.name for entry in mechanisms().values()]

    before = len(mechanisms())
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(work, range(100)))
    assert len(mechanisms()) == before + 50
    assert all(len(names) == len(set(names)) for names in seen)
    assert all(named(f"mine_{n}").power == 1.0 + n for n in range(50))
