"""The token store: what it holds, when it is made again, and faults of its files.

Over 400 lines: every fault of the token store shares the small store.
"""

import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from softfocus.lab.data import tokenise, tokens
from softfocus.lab.data.tokens import TokenStore, plan_of, prepare
from softfocus.lab.errors import LabError
from softfocus.lab.recipes.data import DataTable

END = 256


def silent(what: str, share: float | None) -> None:
    pass


@pytest.fixture
def make(tmp_path):
    """prepare(), into a cache of the test's own, from documents d0, d1 ... or from any other
    source.
    """

    def make(source="corpus", tokenizer="bytes", **options):
        where = {"cache_folder": tmp_path / "cache", "progress": silent, "seed": 0}
        where |= {name: options.pop(name) for name in where if name in options}
        return prepare(DataTable(source=str(tmp_path / source), tokenizer=tokenizer, **options), **where)

    write(tmp_path / "corpus", 40)
    return make


def write(folder: Path, count: int, name: str = "d") -> None:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(f"{name}{number}" + "é" * number)


def texts(array: np.ndarray, starts: np.ndarray) -> list[str]:
    """The documents, each of which has to end with END and hold no other."""
    documents = np.split(array, starts[1:])
    assert all(document[-1] == END and END not in document[:-1] for document in documents)
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


def stores(tmp_path: Path) -> list[str]:
    """What a cache shows: complete stores, and what is left of others."""
    return [path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def refused(function, *arguments, **options) -> str:
    with pytest.raises(LabError) as caught:
        function(*arguments, **options)
    return str(caught.value)


# What is stored


def test_documents_go_to_one_split_or_the_other(make):
    store = make()
    train = texts(store.train, store.train_documents)
    validation = texts(store.validation, store.validation_documents)
    assert sorted([*train, *validation]) == sorted(f"d{number}" + "é" * number for number in range(40))
    assert len(validation) == 2, "one in twenty"
    assert store.vocab_size == 257
    assert isinstance(store.train, np.memmap)
    assert store.train.dtype == np.uint16
    assert not store.train.flags.writeable
    assert store.train_documents.dtype == store.validation_documents.dtype == np.int64
    assert AutoTokenizer.from_pretrained(store.tokenizer).decode(store.train[:2]) == train[0][:2]


@pytest.mark.parametrize(("fraction", "count"), [(0.05, 2), (0.25, 10), (0.5, 20), (0.9, 36)])
def test_how_much_is_held_out(make, fraction, count):
    counts = {len(make(validation_fraction=fraction, seed=seed).validation_documents) for seed in range(4)}
    assert counts <= {count, count - 1}, "the first document always trains"


def test_the_key_is_known_before_anything_is_made(make, tmp_path):
    key = plan_of(DataTable(source=str(tmp_path / "corpus"), validation_fraction=0.25), 3).key
    assert not (tmp_path / "cache").exists()
    assert make(seed=3, validation_fraction=0.25).folder.name == key
    assert make().folder.name != key


def test_the_seed_decides_what_is_held_out(make, tmp_path):
    held_out = []
    for seed, cache in ((0, "one"), (0, "two"), (3, "three")):
        store = make(seed=seed, cache_folder=tmp_path / cache)
        held_out.append(texts(store.validation, store.validation_documents))
    assert held_out[0] == held_out[1] != held_out[2]


def test_a_single_document_is_cut(make, tmp_path):
    (tmp_path / "one.txt").write_text("x" * 99)
    store = make("one.txt", validation_fraction=0.1)
    assert (len(store.train), len(store.validation)) == (89, 11)
    assert store.validation.tolist() == [ord("x")] * 10 + [END]
    assert store.train_documents.tolist() == store.validation_documents.tolist() == [0]


def test_too_few_documents_to_hold_one_out(make, tmp_path):
    (tmp_path / "few").mkdir()
    for number, size in enumerate([899, 39, 39, 19]):  # a thousand tokens
        (tmp_path / "few" / f"{number}.txt").write_text(str(number) * size)
    store = make("few", validation_fraction=0.07, seed=1)
    assert texts(store.train, store.train_documents) == ["0" * 899, "1" * 39]
    assert texts(store.validation, store.validation_documents) == ["2" * 39, "3" * 19]
    assert store.validation_documents.tolist() == [0, 40]


def test_a_validation_source(make, tmp_path):
    write(tmp_path / "other", 3, "v")
    store = make(validation_source=str(tmp_path / "other"))
    assert len(texts(store.train, store.train_documents)) == 40
    assert texts(store.validation, store.validation_documents) == ["v0", "v1é", "v2éé"]
    message = refused(make, validation_source=str(tmp_path / "corpus" / "003.txt"))
    assert "003.txt is in the source and in the validation source" in message


def test_sources_that_share_something_however_it_is_spelt(make, tmp_path, monkeypatch):
    (tmp_path / "link.txt").symlink_to(tmp_path / "corpus" / "003.txt")
    assert "003.txt is in the source and in the" in refused(make, validation_source=str(tmp_path / "link.txt"))
    monkeypatch.chdir(tmp_path)
    assert "is in the source and in the" in refused(make, validation_source="corpus/../corpus")
    hub = refused(prepare, DataTable(source="hub:a/b", validation_source="hub:a/b#train"), cache_folder=tmp_path)
    assert hub.startswith("hub:a/b#train is in the source and in the validation source")


def test_special_tokens_in_a_text_are_text(make, tmp_path):
    (tmp_path / "one.txt").write_text("x<|endoftext|>y" * 10)
    store = make("one.txt")
    assert np.count_nonzero(np.concatenate([store.train, store.validation]) == END) == 1


def test_a_bpe_knows_nothing_of_the_held_out_documents(make, tmp_path):
    before = make()
    held_out = texts(before.validation, before.validation_documents)[0]
    (tmp_path / "corpus" / f"{int(held_out.strip('dé')):03}.txt").write_text("zqzqzqzq " * 1000)
    store = make(tokenizer="bpe:280")
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer)
    assert "zqzqzqzq " * 1000 in tokenizer.decode(store.validation), "or this test would show nothing"
    assert not any("zq" in token for token in tokenizer.get_vocab())
    assert store.vocab_size == len(tokenizer)


@pytest.mark.parametrize("documents", [["abcd " * 200, "zqzq " * 60], ["abcd " * 195 + "zqzq " * 65]])
def test_a_bpe_knows_nothing_of_what_is_cut_off(make, tmp_path, documents):
    """Too few documents to hold one out: the last of them, or the end of the only one, is."""
    (tmp_path / "few").mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "few" / f"{number}.txt").write_text(text)
    store = make("few", "bpe:280", validation_fraction=0.25)
    tokenizer = AutoTokenizer.from_pretrained(store.tokenizer)
    assert not any("zq" in token for token in tokenizer.get_vocab())
    train, validation = (tokenizer.decode(part, skip_special_tokens=True) for part in (store.train, store.validation))
    assert train + validation == "".join(documents)
    assert set(validation) == set("zq ")
    assert validation.startswith("zq"), "cut between words"
    assert np.count_nonzero(store.validation == 0) == 1


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_wide_vocabularies_take_wide_tokens(make, tmp_path, size, dtype):
    backend = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "last": size - 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="?").save_pretrained(
        tmp_path / "wide"
    )
    (tmp_path / "one.txt").write_text("a last a last")
    store = make("one.txt", str(tmp_path / "wide"), validation_fraction=0.2)
    assert store.vocab_size == size
    assert store.train.dtype == store.validation.dtype == dtype
    assert [*store.train, *store.validation] == [0, size - 1, 0, size - 1, 1]


def test_many_batches_give_what_one_gives(make, tmp_path, monkeypatch):
    whole = make()
    monkeypatch.setattr(tokenise, "_BATCH", 50)
    shares = []
    parts = make(cache_folder=tmp_path / "other", progress=lambda what, share: shares.append((what, share)))
    assert np.array_equal(whole.train, parts.train)
    assert np.array_equal(whole.validation_documents, parts.validation_documents)
    assert len(shares) > 10
    assert shares[-1] == (f"tokenising {tmp_path / 'corpus'}", 1.0)
    assert [share for _, share in shares] == sorted(share for _, share in shares)


# The cache


def test_the_second_time_nothing_is_tokenised(make, monkeypatch):
    first = make()

    def fill(*arguments):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(tokens, "fill", fill)
    second = make()
    assert second.folder == first.folder
    assert np.array_equal(second.train, first.train)
    with pytest.raises(AssertionError):
        make(seed=1)  # the test can fail


def test_whatever_changes_the_tokens_makes_another_store(make, tmp_path):
    write(tmp_path / "other", 2)
    folders = [make().folder]
    for options in (
        {"tokenizer": "bpe:300"},
        {"validation_fraction": 0.1},
        {"seed": 1},
        {"max_documents": 5},
        {"text_field": "body"},
        {"validation_source": str(tmp_path / "other")},
        {"source": "other"},
    ):
        folders.append(make(**options).folder)
    (tmp_path / "corpus" / "000.txt").write_text("changed")
    changed = make()
    assert "changed" in texts(changed.train, changed.train_documents)
    (tmp_path / "corpus" / "new.txt").write_text("new")
    folders += [changed.folder, make().folder]
    assert len(set(folders)) == len(folders)


def test_a_tokenizer_folder_that_changed(make, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(make().tokenizer, tokenizer)
    first = make(tokenizer=str(tokenizer))
    assert make(tokenizer=str(tokenizer)).folder == first.folder
    os.utime(tokenizer / "tokenizer.json", ns=(1, 1))
    assert make(tokenizer=str(tokenizer)).folder != first.folder


def test_the_cache_is_where_the_environment_says(make, tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTFOCUS_CACHE", str(tmp_path / "there"))
    assert make(cache_folder=None).folder.parent == tmp_path / "there"
    monkeypatch.delenv("SOFTFOCUS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert make(cache_folder=None).folder.parent == tmp_path / "home" / ".cache" / "softfocus" / "tokens"


def test_an_error_leaves_nothing(make, tmp_path):
    def stop(what, share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(progress=stop)
    assert stores(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "message"),
    [(errno.ENOSPC, "no space is left for the tokens in"), (errno.EROFS, "cannot write the tokens to")],
)
def test_a_disk_that_takes_no_more(make, tmp_path, monkeypatch, error, message):
    def append(*arguments):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(tokenise._Writer, "append", append)
    found = refused(make)
    assert message in found
    assert "SOFTFOCUS_CACHE" in found
    assert stores(tmp_path) == []


def test_a_cache_that_cannot_be_made(make, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write the tokens to" in refused(make, cache_folder=tmp_path / "file" / "cache")


PROCESS = """
import os, signal, sys, time
from pathlib import Path
from softfocus.lab.data import tokenise
from softfocus.lab.data.tokens import prepare
from softfocus.lab.recipes.data import DataTable

def progress(what, share):
    print("tokenising", flush=True)
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)

tokenise._BATCH = 100
store = prepare(DataTable(source=sys.argv[1]), cache_folder=Path(sys.argv[2]), progress=progress)
print(store.folder.name)
"""


def process(tmp_path: Path, what: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "corpus"), str(tmp_path / "cache"), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_killed_in_the_middle_then_two_at_once(make, tmp_path):
    killed = process(tmp_path, "killed")
    out, _ = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert out == "tokenising\n"
    (left,) = stores(tmp_path)
    assert left.endswith(".partial"), "nothing that looks complete"

    both = [process(tmp_path, "") for _ in range(2)]
    outputs = [worker.communicate(timeout=60) for worker in both]
    assert [worker.returncode for worker in both] == [0, 0], outputs
    lines = [out.split() for out, _ in outputs]
    (name,) = stores(tmp_path)
    assert [found[-1] for found in lines] == [name, name]
    assert sorted(len(found) == 1 for found in lines) == [False, True], "one of them did the work"
    assert make().folder.name == name
    fresh = make(cache_folder=tmp_path / "fresh")
    assert np.array_equal(TokenStore.open(tmp_path / "cache" / name).train, fresh.train)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "an id": lambda folder: flip(folder / "train.tokens", 40),
    "an id beyond the vocabulary": lambda folder: flip(folder / "train.tokens", 41),
    "the start of a document": lambda folder: flip(folder / "validation.documents", 8),
    "a tokenizer": lambda folder: flip(folder / "tokenizer" / "tokenizer.json", 500),
    "no tokenizer": lambda folder: shutil.rmtree(folder / "tokenizer"),
    "a file more": lambda folder: (folder / "tokenizer" / "added_tokens.json").write_text('{"x": 999}'),
    "the vocabulary": lambda folder: (folder / "store.json").write_text(
        (folder / "store.json").read_text().replace("257", "256")
    ),
    "store.json": lambda folder: (folder / "store.json").write_text("[]"),
    "checksums": lambda folder: (folder / "checksums.json").write_text("{"),
    "cut off": lambda folder: os.truncate(folder / "train.tokens", 100),
    "empty": lambda folder: os.truncate(folder / "validation.documents", 0),
    "no documents": lambda folder: (folder / "train.documents").unlink(),
}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_store_is_made_anew_and_that_is_said(make, tmp_path, damage, caplog):
    folder = make().folder
    before = content(folder)
    DAMAGE[damage](folder)
    assert content(folder) != before
    assert not caplog.records
    assert make().folder == folder
    assert content(folder) == before
    (record,) = caplog.records
    assert f"the tokens in {folder} are damaged (" in record.getMessage()
    assert "): they are made anew" in record.getMessage()
    make()
    assert len(caplog.records) == 1, "whole again"
    assert stores(tmp_path) == [folder.name]


def test_a_store_without_checksums_is_not_called_damaged(make, caplog):
    folder = make().folder
    before = content(folder)
    (folder / "checksums.json").unlink()
    make()
    said = f"the tokens in {folder} have no checksums (early versions wrote none): they are made anew"
    assert caplog.messages == [said]
    assert content(folder) == before


def test_a_whole_store_is_read_once_and_in_blocks(make, monkeypatch):
    size = sum(len(file) for name, file in content(make().folder).items() if name != "checksums.json")
    shares = []
    make(progress=lambda what, share: shares.append(share))
    assert not shares, "nothing is said about what takes no time"
    monkeypatch.setattr(tokens, "_BLOCK", 100)
    monkeypatch.setattr(tokens, "_LONG", 1000)
    seen = []
    monkeypatch.setattr(tokens.zlib, "crc32", lambda block, value: seen.append(len(block)) or value)
    monkeypatch.setattr(tokens, "_build", lambda *_: None)  # these are no checksums
    make(progress=lambda what, share: shares.append((what, share)))
    assert max(seen) == 100
    assert sum(seen) == 2 * size, "once to find the damage, once more under the lock"
    assert shares[-1] == ("checking the tokens", 1.0)


def test_a_damaged_store_that_cannot_be_made_anew_stays(make, monkeypatch, tmp_path):
    folder = make().folder
    DAMAGE["an id"](folder)
    before = content(folder)

    def fill(*arguments):
        raise LabError("the hub is gone", "wait")

    monkeypatch.setattr(tokens, "fill", fill)
    assert "the hub is gone" in refused(make)
    assert content(folder) == before
    assert stores(tmp_path) == [folder.name]


def test_a_store_of_another_length_cannot_be_opened(make):
    """What a worker of a data loader does, which does not read all of it."""
    folder = make().folder
    os.truncate(folder / "train.tokens", 100)
    assert f"the tokens in {folder} are damaged: a file is not as long as it was" in refused(TokenStore.open, folder)


def test_what_is_left_out_is_said_every_time(make, tmp_path, caplog):
    (tmp_path / "corpus" / "photo.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    said = [
        f"left out of {tmp_path / 'corpus'}: files that are not UTF-8 text: 1 "
        f"(the first: {tmp_path / 'corpus' / 'photo.png'})",
        f"left out of {tmp_path / 'other'}: documents without text: 1 (the first: {tmp_path / 'other' / 'a.jsonl'})",
    ]
    make(validation_source=str(tmp_path / "other"))
    assert caplog.messages == said
    make(validation_source=str(tmp_path / "other"))
    assert caplog.messages == 2 * said, "it was tokenised before"
    caplog.clear()
    (tmp_path / "corpus" / "photo.png").unlink()
    make()
    assert not caplog.messages


def test_text_that_a_tokenizer_does_not_know_is_counted(make, tmp_path, caplog):
    backend = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "few"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="?").save_pretrained(folder)
    (tmp_path / "one.txt").write_text("a b a c d a")
    make("one.txt", str(folder), validation_fraction=0.2)
    assert caplog.messages == [
        f"left out of {tmp_path / 'one.txt'}: tokens that are only '?': 3 (the first: in 'a b a c ')"
    ]


def test_text_that_a_bpe_drops_is_counted(make, tmp_path, caplog):
    backend = Tokenizer(models.BPE(vocab={"a": 0, "<end>": 1}, merges=[]))
    folder = tmp_path / "few"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    (tmp_path / "one.txt").write_text("aba aca")
    store = make("one.txt", str(folder), validation_fraction=0.5)
    (said,) = caplog.messages
    assert said.startswith(
        f"left out of {tmp_path / 'one.txt'}: characters (or bytes) that the tokenizer has no token for"
    )
    assert said.endswith(" and drops: 3 (the first: in 'aba ')")
    assert len(store.train) + len(store.validation) == len("aaaa") + 1


def test_a_store_pickles_as_its_folder(make, tmp_path):
    (tmp_path / "one.txt").write_text("x" * 100_000)
    store = make("one.txt")
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    repeated = pickle.loads(pickled)
    assert isinstance(repeated.train, np.memmap)
    assert np.array_equal(repeated.train, store.train)


def test_the_store_says_what_it_was_made_from(make, tmp_path):
    about = json.loads((make().folder / "store.json").read_text())
    assert about["sources"] == [str(tmp_path / "corpus"), None]
    assert about["tokenizer"] == "bytes"


def test_nothing_to_tokenise(make, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    assert "there is no text in" in refused(make, "empty.txt")
    assert "there is no text in" in refused(make, "empty.jsonl")
    assert f"there is no text in {tmp_path / 'empty.txt'}" in refused(
        make, validation_source=str(tmp_path / "empty.txt")
    )
    assert "there is no file or folder" in refused(make, "missing")
    assert "there is no tokenizer 'words'" in refused(make, tokenizer="words")
    assert "there is no tokenizer ''" in refused(make, tokenizer=""), "not the current directory"
    assert stores(tmp_path) == []


# Shards


def shard(path: Path, ids: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> list[int]:
    path.parent.mkdir(exist_ok=True)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())
    return ids


def test_shards_are_taken_as_they_are(make, tmp_path, caplog):
    first = shard(tmp_path / "s" / "train_1.bin", [1, 2, END, 3, 4])
    second = shard(tmp_path / "s" / "train_2.bin", [5, END, END, 6])
    held_out = shard(tmp_path / "s" / "val_0.bin", [END, 7, 8, END, 9])
    (tmp_path / "s" / "README.md").write_text("about the shards")
    store = make("s")
    beside = f"files beside shards of tokens: 1 (the first: {tmp_path / 's' / 'README.md'})"
    assert caplog.messages == [f"left out of {tmp_path / 's'}: {beside}"]
    assert store.train.tolist() == first + second
    assert store.train_documents.tolist() == [0, 2, 6, 7], "a document may go on in the next shard"
    assert store.validation.tolist() == held_out
    assert store.validation_documents.tolist() == [0, 3]
    assert store.vocab_size == 257


def test_without_a_val_the_first_shard_validates(make, tmp_path, monkeypatch, caplog):
    for number in range(3):
        shard(tmp_path / "s" / f"{number}.bin", [END] + [number] * 9)
    monkeypatch.setattr(tokenise, "VALIDATION_TOKENS", 4)
    store = make("s")
    assert store.validation.tolist() == [END, 0, 0, 0], "its first tokens"
    kind = "tokens of the shards that validate, after the first 4"
    assert caplog.messages == [f"left out of {tmp_path / 's'}: {kind}: 6 (the first: {tmp_path / 's' / '0.bin'})"]
    assert store.train.tolist() == [END] + [1] * 9 + [END] + [2] * 9
    glob = make("s/[12].bin")
    assert glob.validation.tolist() == [END, 1, 1, 1]
    other = make("s/[12].bin", validation_source=str(tmp_path / "s" / "0.bin"))
    assert other.validation.tolist() == [END, 0, 0, 0]
    assert other.train.tolist() == store.train.tolist()


def test_where_all_are_val_the_first_validates(make, tmp_path):
    for number in range(2):
        shard(tmp_path / "s" / f"val_{number}.bin", [END] + [number] * 9)
    store = make("s")
    assert (store.validation[1], store.train[1]) == (0, 1)


def test_a_single_shard_is_cut_between_documents(make, tmp_path):
    shard(tmp_path / "a.bin", [END, 1, 1, 1, 1, 1, 1, END, 2, 2])
    store = make("a.bin", validation_fraction=0.5)
    assert store.train.tolist() == [END, 1, 1, 1, 1, 1, 1]
    assert store.validation.tolist() == [END, 2, 2]


def test_a_large_shard_is_copied_in_parts(make, tmp_path, monkeypatch):
    ids = np.random.default_rng(0).integers(250, 257, 1000).tolist()
    shard(tmp_path / "a.bin", ids)
    monkeypatch.setattr(tokenise, "_CHUNK", 64)
    shares = []
    store = make("a.bin", progress=lambda what, share: shares.append(share))
    joined = [*store.train, *store.validation]
    starts = [*store.train_documents, *(store.validation_documents + len(store.train))]
    assert joined == ids
    assert starts == sorted({0, *np.flatnonzero(np.array(ids) == END)})
    assert shares == sorted(shares)
    assert (len(shares), shares[-1]) == (16, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": 20240521}, "is not a shard of tokens: it starts with 20240521, not 20240520"),
        ({"version": 2}, "is a shard of version 2, not 1"),
        ({"count": 7}, "holds 3 tokens, its header says 7"),
        ({"count": 2}, "holds 3 tokens, its header says 2"),
        ({"count": -1}, "holds 3 tokens, its header says -1"),
        ({"count": 0}, "holds 3 tokens, its header says 0"),
        ({"ids": [1, 257, 3]}, "holds the token 257, beyond the tokenizer's vocabulary of 257"),
    ],
)
def test_bad_shards_are_refused(make, tmp_path, change, message):
    shard(tmp_path / "a.bin", **{"ids": [1, 2, 3], **change})
    assert refused(make, "a.bin").startswith(f"{tmp_path / 'a.bin'} {message}")
    assert stores(tmp_path) == []


def test_a_shard_with_a_byte_more_is_refused(make, tmp_path):
    shard(tmp_path / "a.bin", [1, 2, 3])
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"x")
    assert "a.bin holds 3.5 tokens, its header says 3" in refused(make, "a.bin")


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 1024])
def test_bin_files_that_are_something_else(make, tmp_path, content):
    (tmp_path / "a.bin").write_bytes(content)
    assert "is not a shard of tokens" in refused(make, "a.bin")


def test_half_a_header_is_not_said_to_start_wrongly(make, tmp_path):
    np.array([20240520], "<i4").tofile(tmp_path / "a.bin")
    assert "is not a shard of tokens: it has 4 bytes, fewer than a header's 1024" in refused(make, "a.bin")


def test_options_that_are_not_for_shards(make, tmp_path):
    shard(tmp_path / "a.bin", [1, 2, 3])
    assert "max_documents does not apply to shards" in refused(make, "a.bin", max_documents=3)
    assert "is trained on text, and there is none" in refused(make, "a.bin", "bpe:300")
