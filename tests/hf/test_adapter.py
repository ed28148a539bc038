"""A model under softfocus computes what the mechanism says, whatever Transformers hands to the
adapter.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import softfocus.hf
from softfocus.hf.adapter import attention_forward

LMS = ("gpt_neox", "llama", "mistral", "t6")


def oracle_lssar(module, query, key, value, attention_mask, **kwargs):
    """LSSAR written down a second time, dense: every visible pair, then eq. 5 with p = 15."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    lengths = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True)
        attention_mask = torch.ones(lengths, dtype=torch.bool).tril() if causal else torch.ones(lengths).bool()
    count = attention_mask.sum(-1, keepdim=True).clamp(min=1).to(query.dtype)
    cosine = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(2, 3)
    score = F.softplus(math.log(query.shape[-1]) * count.log() * cosine) * attention_mask
    weights = score / score.sum(-1, keepdim=True).clamp(min=1e-30)
    weights = F.relu(weights * count - (count > 3).to(count.dtype)) ** 15
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("oracle_lssar", oracle_lssar)
AttentionMaskInterface.register("oracle_lssar", sdpa_mask)


def logits(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).logits


def padded(rows, length, side):
    """Rows of ids [1, n] in one batch [len(rows), length], with the mask and positions of the real
    tokens.
    """
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, row.shape[1]) if side == "right" else slice(length - row.shape[1], length)
        ids[i, at], mask[i, at] = row[0], 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


@pytest.mark.parametrize("family", [*LMS, "bert"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_softmax_is_sdpa(build, tokens, in_double, agree, family, padding):
    theirs, ours = build(family), build(family, "softmax")
    assert (theirs.config._attn_implementation, ours.config._attn_implementation) == ("sdpa", "softfocus")
    inputs = {"input_ids": tokens(2, 9)} if padding is None else padded([tokens(1, 9), tokens(1, 5)], 9, padding)
    real = inputs.get("attention_mask", torch.ones(2, 9)).bool()  # where the padding looks is nobody's promise
    exact = logits(in_double(theirs), **inputs)[real]
    agree(logits(in_double(ours), **inputs)[real], exact, logits(theirs, **inputs)[real])
    lssar = logits(softfocus.hf.use(ours, "lssar"), **inputs)[real]
    assert (lssar - exact).abs().max() > 0.1 * exact.abs().max()  # so that equality above means something


@pytest.mark.parametrize("family", [*LMS, "bert"])
@pytest.mark.parametrize("padding", [None, "left"])
def test_lssar_is_the_equation(build, tokens, in_double, agree, family, padding):
    theirs = build(family)
    theirs.set_attn_implementation("oracle_lssar")
    inputs = {"input_ids": tokens(2, 9)} if padding is None else padded([tokens(1, 9), tokens(1, 5)], 9, padding)
    real = inputs.get("attention_mask", torch.ones(2, 9)).bool()
    ours, exact = in_double(build(family, "lssar")), logits(in_double(theirs), **inputs)[real]
    agree(logits(ours, **inputs)[real], exact, logits(theirs, **inputs)[real])


@pytest.mark.parametrize("family", [*LMS, "bert"])
@pytest.mark.parametrize("mechanism", ["lssar", "laser(lssa)", "ssmax", "qknorm", "sigmoid_log_n"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(build, tokens, in_double, agree, family, mechanism, side):
    model = build(family, mechanism)
    rows = [tokens(1, 9), tokens(1, 5)]
    inputs = padded(rows, 9, side)
    double = in_double(model)
    together = logits(double, **inputs)
    for i, row in enumerate(rows):
        agree(together[i][inputs["attention_mask"][i].bool()], logits(double, row)[0], logits(model, row)[0])


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("family", LMS)
def test_packed_sequences_do_not_see_each_other(build, tokens, in_double, agree, family, how):
    model = build(family, "lssar")
    rows = [tokens(1, 4), tokens(1, 5, seed=2)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    inputs = {"input_ids": torch.cat(rows, dim=1), "position_ids": positions}
    if how == "position_ids":
        inputs["use_cache"] = False  # with a cache Transformers does not look for packed sequences
    else:
        bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 5, "max_length_k": 5}
    double = in_double(model)
    for row, actual in zip(rows, logits(double, **inputs)[0].split([4, 5]), strict=True):
        agree(actual, logits(double, row)[0], logits(model, row)[0])


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_sliding_window_is_a_mask(build, tokens, in_double, agree, mechanism):
    windowed, full = build("mistral", mechanism), build("mistral", mechanism, sliding_window=None)
    ids = tokens(2, 9)
    rows = torch.arange(9)
    distance = rows[:, None] - rows
    mask = ((distance >= 0) & (distance < windowed.config.sliding_window)).expand(2, 1, 9, 9)
    exact = logits(in_double(full), ids, attention_mask=mask)
    agree(logits(in_double(windowed), ids), exact, logits(full, ids, attention_mask=mask))
    assert not torch.allclose(logits(windowed, ids), logits(full, ids), atol=1e-2)


def test_float_masks_hide_keys_from_the_count(build, tokens):
    model, ids = build("llama", "lssar"), tokens(1, 6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    want = logits(model, ids, attention_mask=seen)
    for low in (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4):
        assert torch.equal(logits(model, ids, attention_mask=torch.where(seen, 0.0, low)), want)
    assert not torch.equal(logits(model, ids, attention_mask=torch.where(seen, 0.0, -1.0)), want)


class Call:
    """The adapter called directly: a stand-in for an attention module, [B, H, L, D] tensors,
    defaults.
    """

    def __init__(self, mechanism, causal=True, lengths=(6, 6), learned=None):
        heads = softfocus.hf.Heads(mechanism=mechanism, parameters=learned or ())
        entry = softfocus.hf.config.Entry(softfocus.hf.Layout.alike(heads), masks="sdpa")
        self.module = torch.nn.Module()
        self.module.config, self.module.is_causal = SimpleNamespace(softfocus=entry), causal
        self.module._softfocus_layout = entry.layout
        make = torch.Generator().manual_seed(0)
        self.query = torch.randn(2, 4, lengths[0], 8, generator=make, dtype=torch.float64)
        self.key, self.value = torch.randn(2, 2, 2, lengths[1], 8, generator=make, dtype=torch.float64)

    def __call__(self, mask=None, keys=slice(None), **kwargs):
        key, value = self.key[:, :, keys], self.value[:, :, keys]
        return attention_forward(self.module, self.query, key, value, mask, **kwargs)[0]


@pytest.mark.parametrize("mechanism", ["softmax", "lssar"])
def test_no_mask_means_what_it_means_to_sdpa(mechanism):
    decode = Call(mechanism, lengths=(1, 6))
    assert torch.equal(decode(), decode(is_causal=False))  # one query is at the end of the cache and sees all of it
    prefill = Call(mechanism, lengths=(4, 7))  # an empty static cache: three slots not yet written
    assert torch.equal(prefill(), prefill(keys=slice(0, 4)))
    square = Call(mechanism)
    assert not torch.equal(square(), square(is_causal=False))
    assert torch.equal(Call(mechanism, causal=False)(), square(is_causal=False))


def test_window_of_a_padding_free_batch():
    """Elsewhere a window is in the mask, and the keyword is for FlashAttention alone."""
    distance = torch.arange(6)[:, None] - torch.arange(6)
    for causal, seen in ((True, (distance >= 0) & (distance < 3)), (False, distance.abs() < 3)):
        call = Call("lssar", causal=causal)
        call.query, call.key, call.value = (x[:1] for x in (call.query, call.key, call.value))
        free = call(sliding_window=3, cu_seq_lens_q=torch.tensor([0, 6], dtype=torch.int32))
        torch.testing.assert_close(free, call(seen[None, None]))
        assert torch.equal(call(sliding_window=3), call())


@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_padding_behind_packed_documents_is_a_document_of_its_own(causal):
    call = Call("lssar", causal=causal)
    call.query, call.key, call.value = (x[:1] for x in (call.query, call.key, call.value))
    call.module.config.vocab_size = 61
    padded, exact = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 2, 5], [0, 2, 5, 6]))
    assert torch.equal(call(cu_seq_lens_q=padded), call(cu_seq_lens_q=exact))
    assert not torch.equal(call(cu_seq_lens_q=padded), call())


@pytest.mark.parametrize("bounds", [[0, 4, 9], [0, 2, 5]], ids=["longer", "shorter"])
def test_lengths_of_another_part_are_ignored_by_a_vision_tower_and_refused_by_a_decoder(bounds):
    """LLaVA passes those of the text on to its images; SDPA ignores them."""
    bounds = torch.tensor(bounds, dtype=torch.int32)
    tower, decoder = Call("lssar", causal=False), Call("lssar")
    assert torch.equal(tower(cu_seq_lens_q=bounds), tower())  # two images
    for call in (tower, decoder):
        call.query, call.key, call.value = (x[:1] for x in (call.query, call.key, call.value))
    assert torch.equal(tower(cu_seq_lens_q=bounds), tower())
    if bounds[-1] > 6:
        message = rf"cu_seq_lens_q: Module got a batch of 1 with 6 queries and 6 keys; .*\({bounds[-1]} tokens\)"
        with pytest.raises(ValueError, match=message):
            decoder(cu_seq_lens_q=bounds)
    own = torch.tensor([0, 4, 6], dtype=torch.int32)
    assert not torch.equal(tower(cu_seq_lens_q=own), tower())
    compiled = torch.compile(lambda bounds: tower(cu_seq_lens_q=bounds), backend="eager")
    assert torch.equal(compiled(bounds), tower())
    assert torch.equal(compiled(own), tower(cu_seq_lens_q=own))


def test_position_bias_is_added_to_the_scores():
    call, bias = Call("softmax"), torch.randn(1, 4, 6, 6, dtype=torch.float64)
    key, value = (x.repeat_interleave(2, dim=1) for x in (call.key, call.value))
    added = bias.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    want = F.scaled_dot_product_attention(call.query, key, value, attn_mask=added, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(call(position_bias=bias, scaling=0.5), want)
    torch.testing.assert_close(call(added, scaling=0.5), want)
    assert not torch.allclose(call(scaling=0.5), want)


def test_the_models_own_scale():
    """It replaces 1/sqrt(d), not log(d): a softplus mechanism keeps its own."""
    softmax, lssar = Call("softmax"), Call("lssar")
    torch.testing.assert_close(softmax(scaling=8**-0.5), softmax())
    assert not torch.allclose(softmax(scaling=0.1), softmax())
    assert torch.equal(lssar(scaling=0.1), lssar())


def test_dropout_only_while_training(build, tokens):
    model, ids = build("llama", "lssar", attention_dropout=0.5), tokens(1, 9)
    assert torch.equal(logits(model, ids), logits(model, ids))
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(logits(model, ids), logits(model, ids))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks", "indices", "block_indices", "head_mask", "cache"])
def test_what_cannot_be_honoured_is_refused(name):
    call = Call("lssar")
    call(**{name: None})
    with pytest.raises(ValueError, match=f"Module passes {name}"):
        call(**{name: 1.0})


def test_attention_weights_are_refused(build, tokens):
    model = build("gpt_neox", "lssar")
    with pytest.raises(ValueError, match="output_attentions=True: softfocus"):
        model(tokens(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True


def test_configs_that_ask_for_weights_are_refused(build, tokens):
    """They did so before they got a mechanism. Transformers would return no weights, and only later
    refuse to save.
    """
    model = build("llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert len(model(tokens(1, 4)).attentions) == 2
    for target in (model, model.config):
        with pytest.raises(ValueError, match="output_attentions: the config asks for attention weights"):
            softfocus.hf.use(target, "lssar")
    assert len(model(tokens(1, 4)).attentions) == 2


@pytest.mark.parametrize("module", [None, "torch.nn.functional"])
def test_a_replaced_sdpa_that_is_not_torchs_context_parallel_changes_nothing(build, tokens, monkeypatch, module):
    model, ids = build("llama", "lssar"), tokens(1, 5)
    want = model(ids).logits

    class Other:
        __module__ = module

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", Other())
    assert torch.equal(model(ids).logits, want)


def test_torchs_context_parallel_is_refused(build, tokens, monkeypatch):
    """By the module of what stands in SDPA's place; test_distributed.py has the real one."""
    model, ids = build("llama", "lssar"), tokens(1, 5)

    def inner(*_): ...

    inner.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", inner)
    with pytest.raises(ValueError, match=r"LlamaAttention runs in torch's context_parallel\(\)"):
        model(ids)
