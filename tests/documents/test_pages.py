"""What holds for every page: links lead somewhere, prose wraps, what it names is in the code."""

import re
from pathlib import Path

import pytest

from .committed import ROOT
from .tables import tables_of

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


def without_code_blocks(text: str) -> str:
    """The text without fenced blocks, and without indented ones, which follow a blank line."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<=\n\n)(?:    .*\n|\n)+", "\n", text)


def without_code(text: str) -> str:
    """The text without blocks and spans of code."""
    return re.sub(r"`[^`]*`", "", without_code_blocks(text))


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


def broken_links(path: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            broken.append(target)
    return broken


@page
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


def test_a_broken_link_would_be_noticed(tmp_path):
    there = tmp_path / "there.md"
    there.write_text("# A heading, with `code`\n")
    here = tmp_path / "here.md"
    here.write_text("[a](there.md#a-heading-with-code) [b](there.md#other) [c](gone.md) `[d](gone.md)`\n")
    assert broken_links(here) == ["there.md#other", "gone.md"]


def torn_rows(text: str) -> list[str]:
    """The rows of a page's tables that go on in another line, which Markdown does not allow."""
    rows = [line for line in without_code(text).splitlines() if line.startswith("|")]
    return [row for row in rows if not re.search(r"(?<!\\)\|$", row)]


@page
def test_rows_of_tables_are_one_line_each(path):
    assert torn_rows(path.read_text()) == []


def test_a_torn_row_would_be_noticed():
    assert torn_rows("| a | b |\n|---|---|\n| c | d\ne |\n| f | g |") == ["| c | d"]


def torn_bold(text: str) -> list[str]:
    """The paragraphs, items and rows of a page in which bold text begins or ends alone."""
    parts = re.split(r"\n\n|\n(?=[*-] )|\n(?=\|)|\n(?=\d+\. )", without_code(text))
    return [part for part in parts if part.count("**") % 2]


@page
def test_bold_text_begins_and_ends(path):
    assert torn_bold(path.read_text()) == []


def test_torn_bold_text_would_be_noticed():
    assert torn_bold("* **A.** B `c**`\n* D.** E\n\n**F**") == ["* D.** E"]


def lost_items(text: str) -> list[str]:
    """Where an item of a list runs on in the item before: a bullet after the end of a sentence."""
    text = re.sub(r"\n+ *[*-] ", "\n\n", re.sub(r"`[^`]*`", "`", without_code_blocks(text)))
    return re.findall(r"[^\n]*[.:;)*]\s[*-]\s(?=[A-Z`*])[^\n]*", text)


@page
def test_lists_have_one_item_a_bullet(path):
    assert lost_items(path.read_text()) == []


def test_a_lost_item_would_be_noticed():
    text = "**A**\n- One.\n- Two. - Three\n\n* Four; * Five, 6 - 7"
    assert lost_items(text) == ["Two. - Three", "Four; * Five, 6 - 7"]
    assert lost_items("\n- One. -\n`two` is next\n- `a. - B`") == ["One. -\n` is next"]


def test_every_picture_is_on_a_page():
    """One that nobody sees is not missed when it no longer shows the results."""
    shown = {
        (path.parent / name).resolve()
        for path in [*PAGES, *(ROOT / "docs/results").rglob("*.md")]
        for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", path.read_text())
        if "://" not in name
    }
    assert shown == {path.resolve() for path in (ROOT / "docs").rglob("*.png")}


def wide_lines(text: str) -> list[str]:
    """Lines of prose beyond 100 columns; tables, pictures and code blocks may be wider."""
    text = re.sub(r"<!-- \w+:begin -->.*?<!-- \w+:end -->", "", text, flags=re.DOTALL)
    lines = without_code_blocks(text).splitlines()
    return [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))]


@page
def test_prose_wraps_at_100_columns(path):
    assert wide_lines(path.read_text()) == []


def test_a_wide_line_would_be_noticed():
    assert wide_lines(f"{'a' * 100}\n| {'b' * 100} |\n{'c' * 101}") == ["c" * 101]
    item = f"    {'d' * 97}"
    assert wide_lines(f"* d\n{item}\n\n    {'code' * 25}\n") == [item]


def test_the_pages_with_tables_of_results_are_tested():
    """Each of them has a test that knows all its tables: most here, that of GPUs in
    tests/core/test_gpu_stages.py.
    """
    assert {path.stem for path in PAGES if tables_of(path.read_text())} == {
        "README", "api", "claims", "evidence", "global-heads", "layouts", "performance", "performance-gpu",
        "recall", "slow-start", "transformers",
    }  # fmt: skip


def test_the_pages_name_files_that_exist():
    """Where the kernels' pages end, each file of their folders stands once."""
    for name, folder, kind in (
        ("kernels-cpu", "backends/cpu/csrc", "*.[hc]*"),
        ("kernels-gpu", "backends/triton/kernels", "*.py"),
    ):
        table = (ROOT / f"docs/{name}.md").read_text().split("## Where to look")[1]
        named = re.findall(r"`([\w.]+)`", table)
        there = {path.name for path in (ROOT / "src/softfocus" / folder).glob(kind)} - {"__init__.py"}
        assert sorted(named) == sorted(there)


def test_every_name_of_the_glossary_is_in_the_code():
    text = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp", ".h"))
    known, names = set(re.findall(r"[A-Za-z_]\w*", text)), []
    for line in (ROOT / "docs" / "glossary.md").read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)  # of | symbol | term | our name | meaning |
        if len(cells) > 4:
            names += re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", cells[3])))
    assert len(names) > 80
    assert not set(names) - known


def test_every_row_vector_of_the_kernels_is_in_the_glossary():
    """C++: members [BLOCK_Q] of a class. Triton: fields of a NamedTuple beside the kernels."""
    backends = ROOT / "src" / "softfocus" / "backends"
    vectors: set[str] = set()
    for path in (backends / "cpu" / "csrc").glob("*.h"):
        members = re.findall(r"^  (?:float|double|bool|int64_t) ([^;(]*\[BLOCK_Q\][^;(]*);", path.read_text(), re.M)
        vectors.update(re.findall(r"(\w+)\[BLOCK_Q\]", " ".join(members)))
    for path in (backends / "triton" / "kernels").glob("*.py"):
        vectors.update(re.findall(r"^    (\w+): tl\.tensor$", path.read_text(), re.M))
    assert len(vectors) > 30
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    named = set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`([^`]+)`", glossary))))
    assert not vectors - named
