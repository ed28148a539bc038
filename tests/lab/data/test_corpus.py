"""Corpora: sources, formats, what is left out, and what is refused.

Over 400 lines: every format and every fault shares the small corpora.
"""

import errno
import glob
import gzip
import json
import lzma
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from softfocus.lab.data import corpus as room
from softfocus.lab.data.corpus import Corpus
from softfocus.lab.errors import LabError


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


def read(source: Path | str, **options) -> list[str]:
    return list(Corpus(str(source), **options))


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refused(source: Path | str, **options) -> str:
    with pytest.raises(LabError) as caught:
        read(source, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_error_is_one_line():
    assert str(LabError("no\nsuch  file", "look\nagain")) == "no such file; look again"


def test_standard_library():
    corpus = Corpus("stdlib")
    assert sum(path.stat().st_size for path in corpus.files) > 5_000_000
    assert all(path.stat().st_size > 16 * 1024 for path in corpus.files)
    folder = sysconfig.get_path("stdlib")
    parts = {part for path in corpus.files for part in path.relative_to(folder).parts}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test"})
    assert "argparse.py" in parts
    assert corpus.files == Corpus("stdlib").files != sorted(corpus.files)
    assert corpus.files != Corpus("stdlib", seed=1).files
    assert sorted(corpus.files) == sorted(Corpus("stdlib", seed=1).files)
    first = next(iter(corpus))
    assert first == corpus.files[0].read_bytes().decode()


def test_a_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    assert "0 files over 16 KB" in refused("stdlib")


def test_a_text_file_is_one_document_unchanged(tmp_path):
    path = tmp_path / "a.weird"
    path.write_bytes("one\r\ntwo\rthree\n\u2028été\n".encode())
    assert read(path) == ["one\r\ntwo\rthree\n\u2028été\n"]


def test_a_long_text_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_PIECE", 100)
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    documents = read(tmp_path)
    assert "".join(documents) == text
    assert all(document.endswith("\n") and len(document) < 120 for document in documents)
    assert len(documents) == 8
    (tmp_path / "a.txt").write_text("x" * 1000)  # no line end to be found
    assert read(tmp_path) == ["x" * 200] * 5


def test_a_folder_is_sorted_and_mixed(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("markdown")
    (tmp_path / "b.jsonl").write_bytes(lines({"text": "one"}, {"text": "two", "other": 1}))
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "data.json").write_text("{}")
    pq.write_table(pa.table({"text": ["row", None, "", "last"]}), tmp_path / "c.parquet")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    assert read(tmp_path) == ["text", "one", "two", "row", "last", "{}", "markdown"]
    corpus = Corpus(str(tmp_path))
    for _ in range(2):  # a second reading finds nothing twice
        assert len(list(corpus)) == 7
    where, empty = tmp_path / "c.parquet", f"empty files: 1 (the first: {tmp_path / 'empty.txt'})"
    assert corpus.left_out.text == f"documents without text: 2 (the first: {where}); {empty}"
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert len(list(second := Corpus(str(tmp_path)))) == 7
    assert f"files that are not UTF-8 text: 2 (the first: {tmp_path / 'latin.txt'})" in second.left_out.text


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """Simulated, since root may read any folder; os.walk and glob.glob pass over such a folder."""
    (tmp_path / "sub" / "closed").mkdir(parents=True)
    (tmp_path / "sub" / "closed" / "a.txt").write_text("closed")
    (tmp_path / "sub" / "b.txt").write_text("open")
    scandir = os.scandir

    def closed(path="."):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    assert len(read(tmp_path)) == 2, "it can be read yet"
    monkeypatch.setattr(os, "scandir", closed)
    for source in (tmp_path, tmp_path / "**" / "*.txt", tmp_path / "*" / "*" / "*.txt", tmp_path / "**"):
        message = refused(source)
        assert message.startswith(f"cannot look for {source}: Permission denied ({tmp_path / 'sub' / 'closed'})")
    assert "cannot look for" in refused(tmp_path / "sub" / "closed")
    assert read(tmp_path / "sub" / "*.txt") == ["open"], "nobody has to look into it for that"


def test_links_are_not_followed_in_circles_and_no_file_is_read_twice(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    for name in ("one", "two"):  # two loops: glob.glob would follow 2 ** 40 ways
        (tmp_path / "sub" / name).symlink_to(tmp_path)
    (tmp_path / "b.txt").symlink_to(tmp_path / "sub" / "a.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    for source in (tmp_path, tmp_path / "**", tmp_path / "**" / "*.txt"):
        corpus = Corpus(str(source))
        assert list(corpus) == ["a"]
        assert corpus.left_out.text == (
            f"links to folders: 2 (the first: {tmp_path / 'sub' / 'one'}); "
            f"broken links and special files: 1 (the first: {tmp_path / 'gone.txt'}); "
            f"second names of files: 1 (the first: {tmp_path / 'sub' / 'a.txt'})"
        )


def test_folders_that_a_pattern_matches_are_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    corpus = Corpus(str(tmp_path / "*"))
    assert list(corpus) == ["b"]
    assert f"folders that match (end the pattern with ** for their files): 1 (the first: {tmp_path / 'sub'})" in (
        corpus.left_out.text
    )
    whole = Corpus(str(tmp_path / "**" / "*"))
    assert list(whole) == ["b", "a"]
    assert not whole.left_out.text


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "*.txt",
        "**",
        "**/*.txt",
        "s*/**/*.txt",
        "*/*",
        "s?b/[ab].txt",
        "**/.*",
        ".*/*",
        "sub/**",
        "none/*",
        "b.txt/*",
    ],
)
def test_a_pattern_matches_what_glob_has_it_match(tmp_path, pattern, monkeypatch):
    for name in ("b.txt", ".c.txt", "sub/a.txt", "sub/b.md", "sub/deep/er/b.txt", ".hid/a.txt", "sub/.hid/z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = sorted(Path(file) for file in glob.glob(str(tmp_path / pattern), recursive=True) if Path(file).is_file())
    monkeypatch.chdir(tmp_path)
    if expected:
        assert Corpus(str(tmp_path / pattern)).files == expected
        assert [path.resolve() for path in Corpus(pattern).files] == expected
    else:
        assert "there is no file" in refused(tmp_path / pattern)


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, when):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*({"text": f"{number}" * 5000} for number in range(100))))
    corpus = Corpus(str(path))
    documents = iter(corpus)
    if when == "within":
        next(documents)
    with path.open("ab") as file:
        file.write(lines({"text": "more"}))
    with pytest.raises(LabError, match=f"{path} changed while the corpus was read"):
        list(documents)


@pytest.mark.parametrize("source", ["", " ", "hub:", "hub: "])
def test_a_source_that_names_nothing_is_refused(source, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("in the current folder")
    monkeypatch.chdir(tmp_path)
    assert f"the source of a corpus is '{source}', which names nothing; let data.source" in refused(source)
    assert read(".") == ["in the current folder"]


def test_a_glob(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert "there is no file" in refused(tmp_path / "*.rst")


@pytest.mark.parametrize("suffix", PACK)
def test_packed_files(tmp_path, suffix):
    rows = [{"text": f"document {number} " + "x" * 100} for number in range(50)]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(PACK[suffix](lines(*rows)))
    (tmp_path / f"b.txt{suffix}").write_bytes(PACK[suffix]("täxt\r\n".encode()))
    assert read(tmp_path) == [row["text"] for row in rows] + ["täxt\r\n"]


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_several_packed_parts_make_one_file(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](lines({"text": "one"})) + PACK[suffix](lines({"text": "two"})))
    assert read(path) == ["one", "two"]


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_damaged_packed_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    whole = PACK[suffix](os.urandom(100_000).hex().encode())
    path.write_bytes(whole[: len(whole) // 2])
    assert str(path) in refused(path)
    path.write_bytes(b"junk" * 10)
    assert str(path) in refused(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines({"text": "good"}) + b"{'text'}\n", "line 2 is not JSON"),
        (lines({"text": "good"}) + b"\n\n[1]\n", "line 4 is not a JSON object"),
        (
            lines({"txt": "x", "id": 3}),
            "line 1 has no field 'text'; name the right one with text_field; there are 'txt', 'id'",
        ),
        (
            lines({"text": "good"}, {"text": 3, "n": 1}),
            "line 2: the field 'text' is 3, and must be text; correct the line (null is left out), or name another "
            "field with text_field; with text: none",
        ),
        (
            b'{"text": NaN, "body": "x"}\n',
            "line 1: the field 'text' is NaN, and must be text; correct the line (null is left out), or name another "
            "field with text_field; with text: 'body'",
        ),
        (lines({"text": ["x" * 99]}), f"line 1: the field 'text' is [\"{'x' * 38}..., and must be text; "),
        (b'{"text": "\xff"}\n', "line 1 is not JSON"),
        (b"\0\1\2\3", "line 1 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
    ],
)  # fmt: skip
def test_bad_json_lines_are_refused_with_their_number(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert refused(path).startswith(f"{path}, {message}")


def test_json_lines_without_text_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + lines({"text": None}, {"text": ""}, {"text": "x"}) + b"  \n" + b'{"text": "no line end"}')
    assert read(path) == ["x", "no line end"]
    path.write_bytes(lines({"body": "x"}))
    assert read(path, text_field="body") == ["x"]


def test_a_json_file_that_is_named_holds_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(lines({"text": "x"}))
    assert read(path) == ["x"]
    path.write_bytes(b'[{"text": "x"}]')
    assert "line 1 is not a JSON object" in refused(path)


def test_a_json_file_in_a_folder_is_another_corpus_than_the_file_that_is_named(tmp_path):
    """In a folder it is read as text. Tokens of one must not stand for those of the other."""
    path = tmp_path / "a.json"
    path.write_bytes(lines({"text": "x"}) + b"\n" + lines({"text": "y"}))
    assert len(read(tmp_path)) == 1
    assert read(path) == ["x", "y"]
    assert Corpus(str(tmp_path)).identity != Corpus(str(path)).identity


def test_half_a_surrogate_pair_becomes_encodable(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(rb'{"text": "a\ud800b \ud83d\ude00"}')
    assert read(path) == ["a?b \N{GRINNING FACE}"]


def test_bad_parquet_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), path)
    assert read(path, text_field="body") == ["x"]
    assert "has no column 'text'; name the right one with text_field; there are 'body', 'id'" in refused(path)
    what = f"the column 'id' of {path} holds no text but int64; name the right one with text_field; there are 'body'"
    assert refused(path, text_field="id") == what
    path.write_bytes(b"PAR1 but then no parquet at all")
    assert f"cannot read {path}" in refused(path)


@pytest.mark.parametrize("kind", [pa.dictionary(pa.int32(), pa.string()), pa.large_string(), pa.string_view()], ids=str)
def test_parquet_text_in_other_encodings(kind, tmp_path):
    try:
        table = pa.table({"text": pa.array(["a", None, "b", "a"]).cast(kind)})
        pq.write_table(table, tmp_path / "a.parquet")
    except pa.ArrowNotImplementedError:
        pytest.skip(f"pyarrow {pa.__version__} writes no {kind}")
    assert read(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_parquet_that_is_not_utf8_is_refused(tmp_path):
    places, letters = pa.py_buffer(np.array([0, 1, 3], "<i4").tobytes()), pa.py_buffer(b"a\xff\xfe")
    text = pa.Array.from_buffers(pa.string(), 2, [None, places, letters])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    assert f"row 2 of {tmp_path / 'a.parquet'} is not UTF-8 text: invalid start byte; get" in refused(
        tmp_path / "a.parquet"
    )


def test_sources_that_are_not_there(tmp_path):
    assert "there is no file or folder" in refused(tmp_path / "missing.txt")
    assert "holds no file" in refused(tmp_path)
    assert "at least one document" in refused("stdlib", max_documents=0)
    assert "cannot look for xxx" in refused("x" * 10_000)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"text\0text", "é".encode("latin-1")])
def test_a_named_file_has_to_be_text(tmp_path, content):
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    assert "no other format with the extension '.png' is known" in refused(path)


def test_text_that_stops_being_utf8_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 300_000 + b"\xff")
    assert f"{path} is not UTF-8 text" in refused(path)


def test_max_documents_and_share(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 1000)
    assert read(tmp_path, max_documents=2) == ["a" * 1000, "b" * 1000]
    corpus = Corpus(str(tmp_path))
    assert [corpus.share for _ in corpus] == [0.25, 0.5, 0.75, 1.0]
    assert [corpus.share for _ in corpus] == [0.25, 0.5, 0.75, 1.0], "a second reading starts anew"
    few = Corpus(str(tmp_path), max_documents=2)
    assert [few.share for _ in few] == [0.5, 1.0]


def test_identity_changes_with_what_is_read(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    before = Corpus(str(path)).identity
    assert Corpus(str(path)).identity == before
    assert json.loads(json.dumps(before)) == before
    assert Corpus(str(path), max_documents=1).identity != before
    assert Corpus(str(path), text_field="body").identity != before
    os.utime(path, ns=(1, 1))
    assert Corpus(str(path)).identity != before
    path.write_text("xy")
    os.utime(path, ns=(1, 1))
    assert Corpus(str(path)).identity != before
    assert Corpus("stdlib").identity != Corpus("stdlib", seed=1).identity


def test_hub_streams_a_real_dataset(tmp_path, monkeypatch):
    # `datasets` reads a local folder as it reads a repository of the hub
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.jsonl").write_bytes(lines(*({"text": f"train {number}"} for number in range(5))))
    (tmp_path / "test.jsonl").write_bytes(lines({"text": "test"}))
    source = f"hub:{tmp_path}"
    assert read(source) == [f"train {number}" for number in range(5)]
    assert read(source, max_documents=2) == ["train 0", "train 1"]
    assert read(f"{source}#test") == ["test"]
    assert Corpus(source).share is None
    assert "has no text column 'body'; name the right one with text_field; there are 'text'" in refused(
        source, text_field="body"
    )
    assert f"cannot load the dataset {source}#other" in refused(f"{source}#other")
    assert f"cannot load the dataset {source}x" in refused(f"{source}x")


@pytest.mark.parametrize(
    ("source", "name", "config", "split"),
    [
        ("hub:HuggingFaceFW/fineweb:sample-10BT#validation", "HuggingFaceFW/fineweb", "sample-10BT", "validation"),
        ("hub:HuggingFaceFW/fineweb:sample-10BT", "HuggingFaceFW/fineweb", "sample-10BT", "train"),
        ("hub:wikitext", "wikitext", None, "train"),
    ],
)
def test_hub_names(monkeypatch, source, name, config, split):
    import datasets

    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return [{"text": "x"}, {"text": None}, {"text": "y"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(source) == ["x", "y"]
    assert asked == [((name, config), {"split": split, "streaming": True})]


def test_the_command_line_stays_fast():
    rooms = "softfocus.lab.data.corpus, softfocus.lab.errors, softfocus.lab.data.tokenizer, softfocus.lab.data.tokens"

    def loads(*names: str) -> bool:
        code = f"import sys, {rooms}; sys.exit(not set({names!r}).isdisjoint(sys.modules))"
        return subprocess.run([sys.executable, "-c", code], check=False).returncode == 1

    assert not loads("torch", "datasets", "transformers", "pyarrow")
    assert loads("numpy"), "the test can fail"
