"""CONTRIBUTING.md, DESIGN.md, the Makefile and the workflows: what they name is there, and files
stay short.
"""

import os
import re
import subprocess

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


def test_the_files_that_run_first_exist(request):
    plugin = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert [name for name in plugin.LONGEST if not any((ROOT / "tests").rglob(name))] == []
