"""The stages of the first half hour on a GPU: what is in the plan, and that nothing of it is lost
to one bad item.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "gpu" / "stages.py"
spec = importlib.util.spec_from_file_location("gpu_stages", PATH)
stages = importlib.util.module_from_spec(spec)
sys.modules["gpu_stages"] = stages  # dataclasses look their module up
spec.loader.exec_module(stages)


def test_every_cell_of_the_goals_is_measured():
    missing = [
        (goal.mechanism, goal.what, length, head_dim, goal.to)
        for goal in stages.GOALS
        for length, head_dim, there in stages.covered(goal)
        if not there
    ]
    assert missing == []


def test_a_cell_that_is_not_in_the_plan_is_noticed():
    goal = stages.GOALS[0]._replace(lengths=(4096, 12345))
    assert [there for _length, _dim, there in stages.covered(goal)] == [True, True, False, False]


def test_a_stage_takes_less_than_nine_minutes():
    assert stages.SECONDS + stages.DYING < 9 * 60


def test_what_the_items_name_is_there():
    names = [item.name for items in stages.STAGES.values() for item in items]
    for items in stages.STAGES.values():
        assert len({item.name for item in items}) == len(items)
        for item in items:
            for word in (*item.words, *item.dry):
                if word.endswith(".py"):
                    assert (stages.ROOT / word).is_file(), word
    assert len(names) > 15


def item(name, code, limit=20.0):
    return stages.Item(name, ("-c", code), ("-c", code), limit)


WRITES = "import pathlib; pathlib.Path(r'{folder}', 'some.jsonl').write_text('{\"n\": 1}\\n{\"n\": ');"
HANGS = WRITES + "import subprocess, time; subprocess.Popen(['sleep', '77.25']); time.sleep(60)"


provenance = functools.cache(stages.provenance)  # a process that imports torch takes seconds


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Runs a stage of some items and gives its results by name."""

    def run(*items, seconds=60.0):
        monkeypatch.setattr(stages, "provenance", provenance)
        monkeypatch.setattr(stages, "STAGES", {1: items})
        stages.main(1, tmp_path, seconds=seconds)
        return {one["item"]: one for one in json.loads((tmp_path / "stage1.json").read_text())["items"]}

    return run


@pytest.mark.long
def test_an_item_that_hangs_costs_its_limit_and_keeps_what_it_wrote(plan, tmp_path):
    began = time.monotonic()
    found = plan(item("some", HANGS, limit=2.0), item("next", "print('fine')"), item("bad", "raise ValueError('no')"))
    assert time.monotonic() - began < 40
    assert found["some"]["exit"] == "stopped at its limit"
    assert found["some"]["results"] == [{"n": 1}]  # not the line that was cut
    assert found["next"]["exit"] == 0
    assert found["next"]["tail"] == "fine\n"
    assert found["bad"]["exit"] == 1
    assert "ValueError: no" in found["bad"]["tail"]
    assert "fine" in (tmp_path / "stage1.log").read_text()
    running = subprocess.run(["pgrep", "-f", "sleep 77.25"], capture_output=True, check=False)
    assert running.returncode == 1  # what an item started is gone with it


@pytest.mark.long
def test_what_does_not_fit_the_time_is_said(plan):
    found = plan(item("first", "pass"), item("late", "pass", limit=100.0), seconds=15.0)
    assert "left out" in found["late"]["exit"] or found["late"]["exit"] == 0
    found = plan(item("late", "pass", limit=100.0), seconds=1.0)
    assert found["late"]["exit"] == "left out: no time"


def test_results_are_there_before_the_next_item_begins(plan, tmp_path):
    look = f"print(len(__import__('json').load(open(r'{tmp_path / 'stage1.json'}'))['items']))"
    assert plan(item("first", "pass"), item("second", look))["second"]["tail"] == "1\n"


@pytest.mark.long
def test_outcomes_of_tests_are_counted(plan, tmp_path):
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path / "test_some.py"))
    found = plan(stages.Item("tests", words, words, 60.0))["tests"]
    assert found["tests"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 0}
    assert any("test_bad" in line for line in found["bad"])


def test_every_goal_has_a_prediction():
    rows = json.loads(predicted("import json, predicted; print(json.dumps([predicted.ROWS, list(predicted.COUNTED)]))"))
    assert {(goal.mechanism, goal.what, goal.to) for goal in stages.GOALS} <= {tuple(row) for row in rows[0]}
    assert {head_dim for goal in stages.GOALS for head_dim in goal.head_dims} == set(rows[1])


def predicted(code):
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=PATH.parent).stdout


@pytest.mark.long
def test_a_stage_that_is_killed_leaves_what_it_has(tmp_path):
    """SIGKILL, as where a command runs past its limit: nothing can be tidied up."""
    code = """
import pathlib, stages, sys
words = lambda code: ("-c", code)
first = words("print('first')")
second = words("import time; print('a line of the second', flush=True); time.sleep(20)")
stages.STAGES = {1: (stages.Item("first", first, first, 60.0), stages.Item("second", second, second, 60.0))}
stages.main(1, pathlib.Path(sys.argv[1]))
"""
    results, log = tmp_path / "stage1.json", tmp_path / "stage1.log"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=PATH.parent, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while "a line of the second\n" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    found = json.loads(results.read_text())
    assert [(one["item"], one["exit"], one["tail"]) for one in found["items"]] == [("first", 0, "first\n")]


def test_a_process_that_dies_costs_no_other_its_result(tmp_path):
    code = """
import os, sys

def some(n):
    if n == 1:
        os._exit(7)
    return {"n": n, "said": ""}

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    from lines import each_alone
    print(sorted((line.get("n", -1), line["said"]) for line in each_alone(some, [(n,) for n in range(3)])))
"""
    path = tmp_path / "some.py"
    path.write_text(code)
    ran = subprocess.run([sys.executable, path, PATH.parent], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[(-1, 'its process died'), (0, ''), (2, '')]", ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stage", sorted(stages.STAGES))
def test_each_stage_runs_to_its_end_without_a_gpu(stage, tmp_path):
    words = [sys.executable, str(PATH), str(stage), "--dry-run", "--out", str(tmp_path)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout
    found = json.loads((tmp_path / f"stage{stage}.json").read_text())
    assert [one["exit"] for one in found["items"]] == [0] * len(stages.STAGES[stage])
    assert all(one["tests"]["passed"] for one in found["items"] if "tests" in one)  # skipped tests rehearse nothing


@pytest.mark.long
def test_old_and_new_kernels_are_timed_in_turn(tmp_path):
    """Without a GPU, by Triton's interpreter, with this tree on both sides."""
    source, out = PATH.parents[2] / "src", tmp_path / "found.jsonl"
    command = [sys.executable, str(PATH.parent / "before_and_after.py"), "--dry-run", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--old", str(source), "--new", str(source)], check=True, env=environment, timeout=400)
    about, *cells = map(json.loads, out.read_text().splitlines())
    assert about["sources"]["old"] == about["sources"]["new"]
    assert [(cell["what"], cell["said"]) for cell in cells] == [("backward", "")]
    assert cells[0]["new_over_old"]["median"] > 0


def test_a_folder_without_the_package_is_no_old_tree(tmp_path):
    """The installed package would be imported in its place, and compared with itself."""
    command = [sys.executable, str(PATH.parent / "before_and_after.py"), "--dry-run", "--out", str(tmp_path / "x")]
    done = subprocess.run(
        [*command, "--old", str(tmp_path), "--new", str(PATH.parents[2] / "src")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "has no package softfocus" in done.stderr
