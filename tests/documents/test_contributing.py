"""CONTRIBUTING.md, DESIGN.md, the Makefile and the workflows: what they name is there, and files
stay short.
"""

import os
import re
import subprocess
from pathlib import Path

from .committed import ROOT


def test_make_runs_this_tree_and_keeps_other_paths():
    makefile = (ROOT / "Makefile").read_text()
    shown = "include Makefile\nshown:\n\t@echo $$PYTHONPATH\n"
    environment = {**os.environ, "PYTHONPATH": "/one:/two"}
    words = ["make", "--no-print-directory", "-f", "-", "shown"]
    ran = subprocess.run(words, input=shown, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"{ROOT / 'src'}:/one:/two"
    assert all("$$PYTHONPATH" in line for line in makefile.splitlines() if re.search(r"\sPYTHONPATH=", line))


def test_what_contributors_and_workflows_are_told_to_run_is_there():
    files = [ROOT / "CONTRIBUTING.md", ROOT / ".github/workflows/ci.yml"]
    told = {target for file in files for target in re.findall(r"(?:^|run: )make ([a-z-]+)", file.read_text(), re.M)}
    there = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"setup", "lint", "test", "wheel", "docs"} <= told <= there


def test_the_design_stays_short():
    assert len((ROOT / "DESIGN.md").read_text().splitlines()) <= 200


def test_a_long_file_says_why_at_its_top():
    long = [
        path
        for folder in ("src", "tests", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp") and len(path.read_text().splitlines()) > 400
    ]
    silent = [str(path.relative_to(ROOT)) for path in long if "Over 400 lines:" not in path.read_text()[:1500]]
    assert not silent, f"more than 400 lines without a reason: {silent}"


def wide_comments(path: Path) -> list[str]:
    """Comments beyond 100 columns, of which ruff sees only Python's: lines of their own in C++, any
    in TOML.
    """
    comment = re.compile(r"(?:^|  )# " if path.suffix == ".toml" else r"^ *//")
    return [line for line in path.read_text().splitlines() if len(line) > 100 and comment.search(line)]


def test_comments_wrap_at_100_columns():
    paths = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*")]
    paths = [path for path in paths if path.suffix in (".h", ".cpp", ".toml")]
    assert len(paths) > 50
    assert [(str(path.relative_to(ROOT)), line) for path in paths for line in wide_comments(path)] == []


def test_a_wide_comment_would_be_noticed(tmp_path):
    cpp, toml = tmp_path / "a.cpp", tmp_path / "a.toml"
    cpp.write_text(f"  // {'a' * 96}\nf({'1' * 100});  // b\n")
    toml.write_text(f'# {"c" * 98}\nd = 1  # {"d" * 92}\ne = "{"e" * 100}"\n')
    assert wide_comments(cpp) == [f"  // {'a' * 96}"]
    assert wide_comments(toml) == [f"d = 1  # {'d' * 92}"]


def test_the_files_that_run_first_exist(request):
    plugin = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert [name for name in plugin.LONGEST if not any((ROOT / "tests").rglob(name))] == []
