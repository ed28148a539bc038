"""Decoding with a cache is the full forward, and generate() writes the same text with every kind of
cache.
"""

import pytest
import torch
from transformers import DynamicCache, StaticCache

LENGTH = 10
CASES = [
    ("gpt_neox", "lssar"),
    ("llama", "lssar"),
    ("llama", "laser(lssa)"),
    ("llama", "ssmax"),
    ("mistral", "lssar"),
    ("t6", "lssar"),
    ("t6", "laser(lssa)"),
]


def logits(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).logits


def in_chunks(model, ids, cache, sizes):
    """Logits [B, LENGTH, V] of ids fed into a cache a chunk at a time."""
    return torch.cat([logits(model, chunk, past_key_values=cache) for chunk in ids.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize(("family", "mechanism"), CASES)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [4, 3, 1, 2], [6, 1, 1, 1, 1]], ids=["tokens", "chunks", "prefill"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cached_decoding_is_the_full_forward(build, tokens, in_double, agree, family, mechanism, sizes, kind):
    model, ids = build(family, mechanism), tokens(2, LENGTH)
    double = in_double(model)
    # A static cache is longer than what it holds: its empty slots must not be counted among the
    # visible keys.
    cache = DynamicCache(config=double.config) if kind == "dynamic" else StaticCache(double.config, LENGTH + 5)
    agree(in_chunks(double, ids, cache, sizes), logits(double, ids), logits(model, ids))


def generated(model, ids, **kwargs):
    torch.manual_seed(0)
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, **kwargs)


@pytest.mark.parametrize(("family", "mechanism"), CASES)
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_writes_the_same_with_every_cache(build, tokens, in_double, family, mechanism, beams):
    model, ids = in_double(build(family, mechanism)), tokens(2, 6)
    want = generated(model, ids, num_beams=beams, use_cache=False)
    assert want.shape == (2, 14)
    assert torch.equal(generated(model, ids, num_beams=beams), want)
    assert torch.equal(generated(model, ids, num_beams=beams, cache_implementation="static"), want)
    assert not torch.equal(generated(in_double(build(family)), ids, num_beams=beams), want)  # softmax writes otherwise


@pytest.mark.parametrize("family", ["llama", "t6"])
@pytest.mark.parametrize("implementation", [None, "static"])
def test_a_left_padded_batch_writes_what_each_prompt_does(build, tokens, in_double, implementation, family):
    model = in_double(build(family, "lssar"))
    long, short = tokens(1, 7), tokens(1, 4, seed=2)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1)])
    together = generated(model, ids, attention_mask=(ids != 0).long(), cache_implementation=implementation)
    assert torch.equal(together[:1], generated(model, long))
    assert torch.equal(together[1:, 3:], generated(model, short))


def test_generate_cannot_return_weights(build, tokens):
    with pytest.raises(ValueError, match="output_attentions"):
        generated(build("llama", "lssar"), tokens(1, 4), output_attentions=True, return_dict_in_generate=True)


def test_continuous_batching_is_refused(build):
    """It runs attention of its own over a paged cache."""
    with pytest.raises(ValueError, match="softfocus"):
        build("llama", "lssar").generate_batch([[1, 2, 3], [4, 5]])
