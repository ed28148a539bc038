import errno
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, GPTNeoXConfig, PreTrainedTokenizerFast

from softfocus.lab.data import tokenizer as room
from softfocus.lab.data.tokenizer import encoder, end_of_document, load_tokenizer, vocabulary
from softfocus.lab.errors import LabError

TEXTS = [
    "the cat sat on the mat, the cat that sat",
    "def f(x):\n    return x + 1\n",
    "häufige Wörter 日本語 \U0001f600",
] * 3


@pytest.fixture(scope="module")
def byte():
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def bpe():
    return load_tokenizer("bpe:300", TEXTS)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_bytes_are_the_bytes(byte, text):
    (ids,) = encoder(byte)([text])
    assert ids == list(text.encode())
    assert byte(text).input_ids == ids
    assert byte.decode(ids) == text


@given(st.lists(st.text(), min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_bpe_gives_back_any_text(bpe, texts):
    assert [bpe.decode(ids) for ids in encoder(bpe)(texts)] == texts


@pytest.mark.parametrize(
    "text", ["a<|endoftext|>b", " , . ' n't 's  ! ?", "\n\n\t \r\n", "\0\x01\x7f", "e\u0301", "\ufeffx"]
)
def test_awkward_texts_come_back(byte, bpe, text):
    for tokenizer in (byte, bpe):
        (ids,) = encoder(tokenizer)([text])
        assert end_of_document(tokenizer) not in ids
        assert tokenizer.decode(ids) == text


def test_vocabulary_and_end(byte, bpe):
    assert (vocabulary(byte), end_of_document(byte)) == (257, 256)
    assert (vocabulary(bpe), end_of_document(bpe)) == (300, 0)
    assert byte.decode([104, 105, 256], skip_special_tokens=True) == "hi"
    assert byte.decode([104, 105, 256]) == "hi<|endoftext|>"


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_saved_beside_a_model_it_comes_back_without_softfocus(tmp_path, spec):
    tokenizer = load_tokenizer(spec, TEXTS)
    GPTNeoXConfig().save_pretrained(tmp_path)  # whose own tokenizer class must not take over
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "Wörter <|endoftext|>\n  日本"
    assert again(text).input_ids == tokenizer(text).input_ids == encoder(again)([text])[0]
    assert again.decode(again(text).input_ids) == text
    assert vocabulary(again) == vocabulary(tokenizer)
    assert end_of_document(again) == end_of_document(tokenizer)
    assert "softfocus" not in (tmp_path / "tokenizer_config.json").read_text()
    assert encoder(load_tokenizer(str(tmp_path)))([text]) == encoder(tokenizer)([text])


def test_a_bpe_is_the_same_for_the_same_documents(bpe):
    again = load_tokenizer("bpe:300", iter(TEXTS))
    assert again.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    other = load_tokenizer("bpe:300", ["something else entirely, again and again and again"] * 3)
    assert other.backend_tokenizer.to_str() != bpe.backend_tokenizer.to_str()


def test_a_bpe_learns_words(bpe):
    assert len(encoder(bpe)([" the cat"])[0]) < len(" the cat") / 2


def test_a_bpe_is_trained_on_so_many_characters(monkeypatch):
    monkeypatch.setattr(room, "_TRAINING_CHARACTERS", 10)

    def documents():
        yield "abcdef"
        yield "ghijkl"
        raise AssertionError("read on after enough characters")

    assert list(room._first(documents(), 10)) == ["abcdef", "ghij"]
    load_tokenizer("bpe:260", documents())


@pytest.mark.parametrize(
    "spec", ["bpe:256", "bpe:", "bpe:many", "bpe:-1", "bpe:1e4", "bpe:1048577", "bpe:1000000000", "bpe:" + "9" * 5000]
)
def test_bpe_sizes_that_make_no_sense(spec):
    with pytest.raises(LabError, match="no vocabulary size from 257 to 1048576"):
        load_tokenizer(spec, TEXTS)


def test_bpe_without_text():
    with pytest.raises(LabError, match="is trained on text, and there is none"):
        load_tokenizer("bpe:300")


def test_specs_that_name_nothing(tmp_path):
    with pytest.raises(LabError, match="there is no tokenizer 'byte'; use 'bytes'"):
        load_tokenizer("byte")
    with pytest.raises(LabError, match=r"cannot load the tokenizer .*; name a folder that holds a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_the_hub(monkeypatch, byte):
    def from_pretrained(name):
        if name == "openai-community/gpt2":
            return byte
        raise OSError(f"\n{name} is not a repository\nsecond line")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    assert load_tokenizer("hub:openai-community/gpt2") is byte
    with pytest.raises(LabError) as caught:
        load_tokenizer("hub:gpt3")
    assert str(caught.value) == (
        "cannot load the tokenizer hub:gpt3: gpt3 is not a repository; check the name and the network"
    )


def word_level(folder, **options):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "[SEP]": 9}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.enable_truncation(3)
    backend.enable_padding(length=5)
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    with pytest.raises(LabError, match="has no token to end a document with; set eos_token"):
        load_tokenizer(word_level(tmp_path))


def test_settings_of_a_folder_neither_cut_nor_pad_a_corpus(tmp_path):
    tokenizer = load_tokenizer(word_level(tmp_path, sep_token="[SEP]", unk_token="[UNK]"))
    before = tokenizer.backend_tokenizer.to_str()
    assert encoder(tokenizer)(["a b a b a b", "a"]) == [[0, 1] * 3, [0]]
    assert tokenizer.backend_tokenizer.to_str() == before, "the tokenizer itself is left as it was"
    assert json.loads(before)["truncation"] is not None, "or this test would show nothing"
    assert (vocabulary(tokenizer), end_of_document(tokenizer)) == (10, 9), (
        "the largest id counts, not how many there are"
    )


def test_a_tokenizer_written_in_python_works_too():
    class Slow:
        is_fast = False

        def __call__(self, texts, *, add_special_tokens, split_special_tokens, verbose):
            assert (add_special_tokens, split_special_tokens, verbose) == (False, True, False)
            return type("Encoding", (), {"input_ids": [[len(text)] for text in texts]})

    assert encoder(Slow())(["ab", "c"]) == [[2], [1]]


def test_saving_to_a_full_disk_is_an_os_error(tmp_path):
    class Full:
        def __init__(self, message):
            self.message = message

        def save_pretrained(self, folder):
            raise Exception(self.message)

    with pytest.raises(OSError, match="No space left") as caught:
        room.save(Full("No space left on device (os error 28)"), tmp_path)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(Exception, match="something else"):
        room.save(Full("something else"), tmp_path)
