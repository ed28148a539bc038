"""softfocus.nn.MultiheadAttention beside torch's: with softmax the same, with a mechanism that
mechanism everywhere.
"""

import math
import re
from pathlib import Path

import pytest
import torch

import softfocus
from softfocus import catalog, mechanisms, named
from softfocus.backends import triton
from softfocus.dispatch import BACKENDS
from softfocus.nn import MultiheadAttention

N, L, S, E, H = 3, 5, 7, 16, 4
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
    "other dimensions": {"kdim": 6, "vdim": 10, "batch_first": True},
    "appended keys": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


def pair(**options):
    """torch's module and ours, of softmax, with the same parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, H, **options).double()
    ours = MultiheadAttention(E, H, **options, mechanism="softmax").double()
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    return theirs, ours


def inputs(module, batched=True, square=False):
    generator = torch.Generator().manual_seed(1)
    lengths = (L, L if square else S, L if square else S)
    shapes = [(length, width) for length, width in zip(lengths, (E, module.kdim, module.vdim), strict=True)]
    if batched:
        shapes = [(N, *shape) if module.batch_first else (shape[0], N, shape[1]) for shape in shapes]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def floating(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def masks(kind):
    generator = torch.Generator().manual_seed(2)
    hides = torch.rand(N, H, L, S, generator=generator) < 0.3
    padding = torch.arange(S) >= torch.tensor([S, 4, 5])[:, None]
    hides[..., 0] = False  # torch gives NaN for a row that sees nothing
    return {
        "none": {},
        "bool": {"attn_mask": hides[0, 0]},
        "of heads": {"attn_mask": hides.flatten(0, 1)},
        "padding": {"key_padding_mask": padding},
        "both": {"key_padding_mask": padding, "attn_mask": hides[0, 0]},
        "floating": {
            "key_padding_mask": floating(padding) + 0.25 * torch.arange(S),
            "attn_mask": floating(hides[0, 0]) + torch.randn(L, S, generator=generator, dtype=torch.float64),
        },
    }[kind]


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("kind", ["none", "bool", "of heads", "padding", "both", "floating"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_softmax_is_torchs_module(options, kind):
    theirs, ours = pair(**options)
    given, hidden = inputs(theirs), masks(kind)
    for average in (True, False):
        out, shown = ours(*given, **hidden, average_attn_weights=average)
        want, weights = theirs(*given, **hidden, average_attn_weights=average)
        torch.testing.assert_close((out, shown), (want, weights))
    assert ours(*given, **hidden, need_weights=False)[1] is None
    torch.testing.assert_close(ours(*given, **hidden, need_weights=False)[0], want)
    above = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    leaves = [*given, *ours.parameters()], [*given, *theirs.parameters()]
    for got, expected in zip(
        *(torch.autograd.grad(o, x, above) for o, x in zip((out, want), leaves, strict=True)), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_one_sequence_without_a_batch():
    theirs, ours = pair()
    given = inputs(theirs, batched=False)
    hidden = {
        "key_padding_mask": torch.arange(S) > 4,
        "attn_mask": torch.zeros(H, L, S, dtype=torch.bool).index_fill_(2, torch.tensor([2]), True),
    }
    torch.testing.assert_close(ours(*given, **hidden), theirs(*given, **hidden))


@pytest.mark.parametrize("mechanism", ["lssar", "laser_lssa", "ssmax"])
def test_a_mechanism_is_attention_between_the_projections(mechanism):
    module = MultiheadAttention(E, H, batch_first=True, mechanism=mechanism).double()
    x = inputs(module, square=True)[0]
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    q, k, v = (
        part.unflatten(-1, (H, -1)).transpose(1, 2)
        for part in torch.nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    )
    head_scale = torch.full((H,), 0.43, dtype=torch.float64) if mechanism == "ssmax" else None
    same = {"is_causal": True, "mechanism": mechanism, "head_scale": head_scale}
    want = module.out_proj(softfocus.attention(q, k, v, **same).transpose(1, 2).flatten(2))
    for is_causal in (True, False):
        out, shown = module(x, x, x, attn_mask=causal, is_causal=is_causal, average_attn_weights=False)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(shown, softfocus.weights(q, k, **same))
    learned = {"softfocus_head_scale"} if mechanism == "ssmax" else set()
    assert {name for name, _ in module.named_parameters() if "softfocus" in name} == learned
    assert f"mechanism='{mechanism}'" in repr(module)


def test_a_learned_power_takes_the_mechanisms_place(monkeypatch):
    monkeypatch.setattr(catalog._CATALOG, "_entries", catalog._CATALOG._entries)  # registered for this test alone
    softfocus.register("lssar_p7", softfocus.sharpened(softfocus.named("lssa"), 7), learned={"power": 3.0})
    module = MultiheadAttention(E, H, mechanism="lssar_p7").double()
    fixed = MultiheadAttention(E, H, mechanism="lssar_p3").double()
    fixed.load_state_dict({name: x for name, x in module.state_dict().items() if name != "softfocus_power"})
    x = inputs(module, square=True)[0]
    got, want = module(x, x, x), fixed(x, x, x)
    torch.testing.assert_close(got, want)
    got[0].sum().backward()
    assert (module.softfocus_power.grad != 0).all()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("padded", [False, True])
def test_torchs_encoder_runs_the_mechanism_in_evaluation_too(padded):
    """Its fast path multiplies the module's weights itself, by softmax."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadAttention(E, H, batch_first=True, mechanism="lssar")
    encoder = torch.nn.TransformerEncoder(layer, 2)
    x = torch.randn(N, L, E)
    padding = {"src_key_padding_mask": torch.arange(L) >= torch.tensor([L, 3, 4])[:, None]} if padded else {}
    trained = encoder.train()(x, **padding)
    with torch.no_grad():
        evaluated = encoder.eval()(x, **padding)
    torch.testing.assert_close(evaluated, trained.detach())
    other = torch.nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    other.load_state_dict(layer.state_dict())
    assert not torch.allclose(other(x), layer(x), atol=1e-3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_was_built_before_the_swap_is_told_not_to_nest():
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    for one in encoder.layers:
        one.self_attn = MultiheadAttention(E, H, batch_first=True)
    padded = {"src": torch.randn(N, L, E), "src_key_padding_mask": torch.arange(L) >= torch.tensor([L, 3, 4])[:, None]}
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"^query: got a nested .* set encoder\.use_nested_tensor = False in one"):
            encoder(**padded)
        encoder.use_nested_tensor = False
        assert encoder(**padded).shape == (N, L, E)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 4}, {"add_bias_kv": True}], ids=str)
def test_parameters_are_reset_as_torchs_are(options):
    """As after a meta device, whose tensors come without numbers."""
    mine = MultiheadAttention(8, 2, mechanism="ssmax", device="meta", **options).to_empty(device="cpu")
    initial = MultiheadAttention(8, 2, mechanism="ssmax").softfocus_head_scale
    theirs = torch.nn.MultiheadAttention(8, 2, **options)
    for module in (mine, theirs):
        torch.manual_seed(0)
        module._reset_parameters()
    own = dict(mine.named_parameters())
    assert torch.equal(own.pop("softfocus_head_scale"), initial)
    for name, parameter in theirs.named_parameters():
        assert name == "out_proj.weight" or torch.equal(own[name], parameter), name  # that one is not reset


def test_it_is_made_without_numbers_as_torchs_is():
    """skip_init looks for ``device`` in the signature."""
    theirs, ours = (
        torch.nn.utils.skip_init(kind, 12, 3, kdim=5, dtype=torch.float64)
        for kind in (torch.nn.MultiheadAttention, MultiheadAttention)
    )
    assert {n: (x.shape, x.dtype) for n, x in ours.state_dict().items()} == {
        n: (x.shape, x.dtype) for n, x in theirs.state_dict().items()
    }


def test_a_row_that_sees_nothing_is_not_nan():
    module = MultiheadAttention(E, H, mechanism="lssar")
    x = torch.randn(L, N, E)
    out, shown = module(x, x, x, attn_mask=torch.ones(L, L, dtype=torch.bool))
    torch.testing.assert_close(out, module.out_proj.bias.expand(L, N, E))
    assert not shown.any()


@pytest.mark.parametrize("appended", [{}, {"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_with_one_entry_for_all_keys_hides_no_appended_key(appended, dtype):
    module = MultiheadAttention(E, H, batch_first=True, **appended)
    x = torch.randn(N, L, E)
    hides = (torch.arange(L) < 2)[:, None]
    one, full = (floating(mask).float() if dtype != torch.bool else mask for mask in (hides, hides.expand(L, L)))
    torch.testing.assert_close(module(x, x, x, attn_mask=one), module(x, x, x, attn_mask=full.contiguous()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_it_does_not_take():
    with pytest.raises(ValueError, match=r"^dropout_p: got 0\.1 with a LASER mechanism"):
        MultiheadAttention(E, H, dropout=0.1, mechanism="laser")
    module = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(N, L, E)
    with pytest.raises(ValueError, match=r"^is_causal: is a hint about attn_mask, which is None"):
        module(x, x, x, is_causal=True)
    for place, wrong in (("query", x[..., 1:]), ("key", x[0]), ("value", x[None])):
        with pytest.raises(ValueError, match=rf"^{place}: got shape .*, expected \[length, batch, {E}\]"):
            module(**{name: wrong if name == place else x for name in ("query", "key", "value")})
    with pytest.raises(TypeError, match=r"^key_padding_mask: got dtype torch\.int64"):
        module(x, x, x, key_padding_mask=torch.zeros(N, L, dtype=torch.int64))
    hides = torch.zeros(N + 1, L, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^key_padding_mask: got shape \[4, 5\], expected .* = \[3, 5\]"):
        module(x, x, x, key_padding_mask=hides)
    with pytest.raises(ValueError, match=r"^key_padding_mask: is on meta, expected the query's device cpu"):
        module(x, x, x, key_padding_mask=hides[:N].to("meta"))
    with pytest.raises(TypeError, match=r"^key_padding_mask: got dtype torch\.float8_e4m3fn, expected .* 16 bits"):
        module(x, x, x, key_padding_mask=hides[:N].to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"^key_padding_mask: got shape \[1, 5\], expected \[key length\] = \[5\]"):
        module(x[0], x[0], x[0], key_padding_mask=hides[:1])
    with pytest.raises(ValueError, match=r"^key: got batch 2, expected the query's, 3$"):
        module(x, x[:2], x[:2])
    with pytest.raises(ValueError, match=r"^value: got batch 3 and length 4, expected .* 3 and length 5$"):
        module(x, x, x[:, 1:])
    with pytest.raises(ValueError, match=r"^value: got length 4, expected the key's, length 5$"):
        module(x[0], x[0], x[0, 1:])
    for shape in [(L, L + 1), (N, L, L), (N, H, L, L), (L,)]:
        expected = rf"^attn_mask: got shape \[{', '.join(map(str, shape))}\], expected .* = \[5, 5\] .* = \[12, 5, 5\]"
        with pytest.raises(ValueError, match=expected):
            module(x, x, x, attn_mask=torch.zeros(shape, dtype=torch.bool))
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(L, E)])
    with pytest.raises(TypeError, match=r"^query: got a nested tensor.*enable_nested_tensor=False"):
        module(nested, nested, nested)
    x = torch.randn(L, 2, E)
    for name, wrong in {"query": (None, x, x), "key": (x, [1.0], x), "value": (x, x, 2)}.items():
        with pytest.raises(TypeError, match=rf"^{name}: got \w+, expected a torch.Tensor"):
            module(*wrong)
    for name in ("need_weights", "average_attn_weights", "is_causal"):
        with pytest.raises(TypeError, match=rf"^{name}: got str, expected True or False"):
            module(x, x, x, **{name: "no"})
    with pytest.raises(TypeError, match=r"^need_weights: got torch\.Tensor, expected True or False"):
        module(x, x, x, None, torch.zeros(L, L))  # a mask in the place of a flag


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_what_is_said_of_masks_of_0_and_1_is_right_here(name):
    """Where True hides a key, the advice to ``attention()``'s callers would invert the mask."""
    module = MultiheadAttention(E, H, mechanism="lssar")
    x, seen = torch.randn(L, L, E), torch.ones(L, L, dtype=torch.int64).tril()
    with pytest.raises(TypeError, match=rf"^{name}: got dtype torch\.int64, .* True hides .* pass {name} == 0$"):
        module(x, x, x, **{name: seen})
    shown = module(x, x, x, **{name: seen == 0})[1]  # [N, L, S]
    of_masks = shown if name == "attn_mask" else shown.transpose(0, 1)
    assert not of_masks[:, seen == 0].any()
    if name == "attn_mask":
        with pytest.warns(UserWarning, match=r"^attn_mask: got only 0 and 1 .* attn_mask == 0 to softfocus\.nn\.Multi"):
            module(x, x, x, attn_mask=seen.float())


def test_a_mask_per_sample_is_not_read_as_one_per_head():
    """Of as many samples as heads its shape is that of a mask per head without the batch."""
    theirs, ours = (kind(E, H, batch_first=True) for kind in (torch.nn.MultiheadAttention, MultiheadAttention))
    x, hides = torch.randn(H, L, E), torch.rand(H, L, L) < 0.5
    with pytest.raises(RuntimeError, match="should be"):
        theirs(x, x, x, attn_mask=hides)
    with pytest.raises(ValueError, match=r"^attn_mask: got shape \[4, 5, 5\].* attn_mask\.repeat_interleave\(4, 0\)$"):
        ours(x, x, x, attn_mask=hides)
    got = ours(x, x, x, attn_mask=hides.repeat_interleave(H, 0))[0]
    want = torch.cat([ours(x[i : i + 1], x[i : i + 1], x[i : i + 1], attn_mask=hides[i])[0] for i in range(H)])
    torch.testing.assert_close(got, want)


def test_the_page_about_sdpa_runs():
    """Every block of Python, in order; it asserts what it says."""
    page = Path(__file__).parents[2] / "docs" / "replacing-sdpa.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})


def test_the_page_about_sdpa_says_what_backends_support():
    text = (Path(__file__).parents[2] / "docs" / "replacing-sdpa.md").read_text(encoding="utf-8")
    fields = "similarity", "length_scale", "score_bias", "phi", "normaliser", "post"
    for name, backend in BACKENDS.items():
        supported = backend.SUPPORTED
        (row,) = re.findall(rf"^\| `{name}` \|.*$", text, re.MULTILINE)
        dtypes = [str(dtype).removeprefix("torch.") for dtype in supported.dtypes]
        assert re.findall(r"b?float\d+", row) == dtypes, name
        lacking = [
            one
            for one in mechanisms()
            if any(getattr(named(one), field) not in getattr(supported, field) for field in fields)
        ]
        common = {"bias", "head_scale", "power", "mask", "key_mask", "document_ids", "dropout"}
        assert common <= set(supported.features), "all four support these"
        assert supported.reweighting
        assert supported.laser
        assert ("all but seven" in row) == (len(lacking) == 7), name
        if lacking:
            listed = f"The seven are {', '.join(f'`{one}`' for one in lacking[:-1])} and `{lacking[-1]}`."
            assert listed in " ".join(text.split())
    assert (
        f"head_dim of at most {triton.MAX_HEAD_DIM}, of values too; batch x heads of at most {triton.MAX_HEADS:,};"
        in text
    )


def test_a_nan_in_a_floating_padding_mask_makes_the_rows_nan():
    """As in torch's module, and as in attn_mask."""
    module = MultiheadAttention(8, 2, mechanism="softmax", batch_first=True)
    x, mask = torch.randn(2, 4, 8), torch.zeros(2, 4)
    mask[0, 2] = math.nan
    out, _ = module(x, x, x, key_padding_mask=mask, need_weights=False)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()
