import errno
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPTNeoXConfig, PreTrainedTokenizerFast

from softfocus.lab.data import tokenizer as room
from softfocus.lab.data.tokenizer import Encoder, end_of_document, load_tokenizer, vocabulary
from softfocus.lab.errors import LabError

TEXTS = [
    "the cat sat on the mat, the cat that sat",
    "def f(x):\n    return x + 1\n",
    "häufige Wörter 日本語 \U0001f600",
] * 3


def ids_of(tokenizer):
    """What encodes a batch of texts, of which nothing may be lost."""

    def encode(texts):
        found = Encoder(tokenizer)(texts)
        assert not any(lost for _, lost in found)
        return [ids for ids, _ in found]

    return encode


@pytest.fixture(scope="module")
def byte():
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def bpe():
    return load_tokenizer("bpe:300", TEXTS)


@pytest.mark.long
@given(st.text())
@settings(max_examples=200, deadline=None)
def test_bytes_are_the_bytes(byte, text):
    (ids,) = ids_of(byte)([text])
    assert ids == list(text.encode())
    assert byte(text).input_ids == ids
    assert byte.decode(ids) == text


@given(st.lists(st.text(), min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_bpe_gives_back_any_text(bpe, texts):
    assert [bpe.decode(ids) for ids in ids_of(bpe)(texts)] == texts


@pytest.mark.parametrize(
    "text", ["a<|endoftext|>b", " , . ' n't 's  ! ?", "\n\n\t \r\n", "\0\x01\x7f", "e\u0301", "\ufeffx"]
)
def test_awkward_texts_come_back(byte, bpe, text):
    for tokenizer in (byte, bpe):
        (ids,) = ids_of(tokenizer)([text])
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
    second = AutoTokenizer.from_pretrained(tmp_path)
    text = "Wörter <|endoftext|>\n  日本"
    assert second(text).input_ids == tokenizer(text).input_ids == ids_of(second)([text])[0]
    assert second.decode(second(text).input_ids) == text
    assert vocabulary(second) == vocabulary(tokenizer)
    assert end_of_document(second) == end_of_document(tokenizer)
    assert "softfocus" not in (tmp_path / "tokenizer_config.json").read_text()
    assert ids_of(load_tokenizer(str(tmp_path)))([text]) == ids_of(tokenizer)([text])


def test_a_bpe_is_the_same_for_the_same_documents(bpe):
    second = load_tokenizer("bpe:300", iter(TEXTS))
    assert second.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    other = load_tokenizer("bpe:300", ["something else entirely, again and again and again"] * 3)
    assert other.backend_tokenizer.to_str() != bpe.backend_tokenizer.to_str()


def test_a_bpe_learns_words(bpe):
    assert len(ids_of(bpe)([" the cat"])[0]) < len(" the cat") / 2


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
    assert ids_of(tokenizer)(["a b a b a b", "a"]) == [[0, 1] * 3, [0]]
    assert tokenizer.backend_tokenizer.to_str() == before, "the tokenizer itself is left as it was"
    assert json.loads(before)["truncation"] is not None, "or this test would show nothing"
    assert (vocabulary(tokenizer), end_of_document(tokenizer)) == (10, 9), (
        "the largest id counts, not how many there are"
    )


def test_a_tokenizer_written_in_python_works_too():
    class Slow:
        is_fast, unk_token, unk_token_id = False, "?", 1

        def __call__(self, texts, *, add_special_tokens, split_special_tokens, verbose):
            assert (add_special_tokens, split_special_tokens, verbose) == (False, True, False)
            return type("Encoding", (), {"input_ids": [[len(text)] for text in texts]})

    encode = Encoder(Slow())
    assert encode(["ab", "c"]) == [([2], 0), ([1], 1)]
    assert encode.lost == "tokens that are only '?'"


def small_bpe(**options):
    """A BPE of the characters of "abc", which learns "ab"."""
    backend = Tokenizer(models.BPE(**options))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"], show_progress=False, **options)
    backend.train_from_iterator(["abc ab ab"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@pytest.mark.parametrize(
    ("text", "lost"),
    [("ab c", 0), ("a\u2603b", 1), ("\u2603\u2603 abd", 3), ("<end>", 5), ("", 0), (" ", 0), ("\u2603", 1)],
)
def test_what_a_bpe_without_an_unknown_token_drops_is_counted(text, lost):
    """<end> is spelt out, and has "<", "e", "n", "d" and ">"."""
    tokenizer = small_bpe()
    encode = Encoder(tokenizer)
    ((ids, found),) = encode([text])
    assert found == lost
    assert encode.lost == "characters (or bytes) that the tokenizer has no token for and drops"
    if "<" not in text:
        assert ids == tokenizer(text, add_special_tokens=False).input_ids, "they are what the tokenizer itself gives"
        assert len("".join(tokenizer.convert_ids_to_tokens(ids))) == len(text.replace(" ", "")) - lost


def test_a_bpe_that_drops_by_place_is_counted():
    """It knows "a" in a word but not at its end, where it would be "a</w>"."""
    encode = Encoder(small_bpe(end_of_word_suffix="</w>"))
    assert [lost for _, lost in encode(["ab", "abc", "ba", "b a"])] == [0, 0, 1, 1]


def test_bytes_that_a_byte_level_bpe_lacks_are_counted():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(["a cat"], trainers.BpeTrainer(special_tokens=["<end>"], show_progress=False))
    encode = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>"))
    assert [lost for _, lost in encode(["a cat", "\u00e9", "\u65e5 a", "a\n"])] == [0, 2, 3, 1]


def test_an_unknown_token_that_ends_documents_too_is_counted():
    """As CLIP's, or one that Transformers was not told of."""
    vocabulary = {"a": 0, "b": 1, "<end>": 2}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<end>"))
    for options in ({}, {"unk_token": "<end>"}):
        encode = Encoder(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **options))
        assert encode(["abx"]) == [([0, 1, 2], 1)]
        assert encode.lost == "tokens that are only '<end>'"


@pytest.mark.parametrize(
    "model", [models.WordLevel({"a": 0, "<end>": 1}, unk_token="?"), models.Unigram([("a", 0.0), ("<end>", 0.0)])]
)
def test_a_tokenizer_that_fails_on_what_it_does_not_know_is_named(model):
    encode = Encoder(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<end>"))
    assert encode(["a"]) == [([0], 0)]
    with pytest.raises(LabError, match=r"cannot encode the text: .*; give the tokenizer an unknown token"):
        encode(["b"])


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
