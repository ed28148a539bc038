"""T6 is what arXiv 2501.06425 says: its equations by hand, its gradients, its cache of factors, its
initial weights.
"""

import math

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

import softfocus.hf
from softfocus.hf.t6 import T6Config, T6ForCausalLM, T6Model

LENGTH = 10


def logits(model, *args, **kwargs):
    with torch.no_grad():
        return model(*args, **kwargs).logits


def turn(row, position, base=10000.0):
    """RoPE of one vector [d]: the pair (i, i + d/2) turned by position * base^(-2i/d)."""
    turned, half = row.clone(), len(row) // 2
    for i in range(half):
        angle = position * base ** (-2 * i / len(row))
        turned[i] = row[i] * math.cos(angle) - row[i + half] * math.sin(angle)
        turned[i + half] = row[i + half] * math.cos(angle) + row[i] * math.sin(angle)
    return turned


def products(weights, name, x, config, rank, position):
    """(3.1): 1/R sum_r a_r (x) b_r of one token, [h, d], b turned where there is a position
    (3.5).
    """
    total = torch.zeros(config.num_attention_heads, config.head_dim, dtype=x.dtype)
    a, b = weights[f"{name}.a.weight"] @ x, weights[f"{name}.b.weight"] @ x
    for r in range(rank):
        a_r = a[r * config.num_attention_heads : (r + 1) * config.num_attention_heads]
        b_r = b[r * config.head_dim : (r + 1) * config.head_dim]
        total += torch.outer(a_r, b_r if position is None else turn(b_r, position))
    return total / rank


def softmax(scores, values):
    return torch.softmax(torch.stack(scores) / math.sqrt(len(values[0])), 0) @ torch.stack(values)


def laser(scores, values):
    return (torch.softmax(torch.stack(scores) / math.sqrt(len(values[0])), 0) @ torch.stack(values).exp()).log()


def lssar(cosines, values):
    count = len(values)
    weights = (1 + (math.log(len(values[0])) * math.log(count) * torch.stack(cosines)).exp()).log()
    weights = torch.relu(weights / weights.sum() * count - int(count > 3)) ** 15
    return weights / weights.sum() @ torch.stack(values)


def by_hand(model, ids, mechanism):
    """Logits [L, V] of one sequence, from the weights alone, token by token and head by head."""
    config, weights = model.config, dict(model.named_parameters())
    norm = lambda x: x / (x.square().mean() + config.rms_norm_eps).sqrt()  # noqa: E731
    stream = list(weights["model.embed_tokens.weight"][ids])
    for number in range(config.num_hidden_layers):
        name = f"model.layers.{number}."
        own = {key.removeprefix(f"{name}self_attn."): value for key, value in weights.items() if key.startswith(name)}
        normed = [norm(x) for x in stream]
        q = [products(own, "query", x, config, config.q_rank, t) for t, x in enumerate(normed)]
        k = [products(own, "key", x, config, config.k_rank, t) for t, x in enumerate(normed)]
        v = [products(own, "value", x, config, config.v_rank, None) for x in normed]
        for t in range(len(ids)):
            heads = []
            for h in range(config.num_attention_heads):
                scores = [q[t][h] @ k[s][h] for s in range(t + 1)]
                if mechanism is lssar:
                    scores = [score / q[t][h].norm() / k[s][h].norm() for s, score in enumerate(scores)]
                heads.append(mechanism(scores, [v[s][h] for s in range(t + 1)]))
            stream[t] = stream[t] + own["o_proj.weight"] @ torch.cat(heads)  # (3.3)
        gate, up, down = (weights[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        for t, x in enumerate(stream):
            z = gate @ norm(x)
            stream[t] = x + down @ (z * torch.sigmoid(z) * (up @ norm(x)))
    return torch.stack([weights["model.embed_tokens.weight"] @ norm(x) for x in stream])


@pytest.mark.parametrize("mechanism", [softmax, lssar, laser], ids=lambda mechanism: mechanism.__name__)
def test_the_model_is_the_papers_equations(build, tokens, in_double, mechanism):
    model, ids = build("t6", mechanism.__name__), tokens(1, LENGTH)
    with torch.no_grad():
        want = by_hand(in_double(model), ids[0], mechanism)
    # Tables of cos and sin are float32
    torch.testing.assert_close(logits(in_double(model), ids)[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformers_own_attention_runs(build, tokens, in_double, implementation):
    model, ids = build("t6"), tokens(2, LENGTH)
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out = in_double(model)(ids, output_attentions=implementation == "eager", output_hidden_states=True)
    # Eager attention makes its weights in float32
    torch.testing.assert_close(out.logits, logits(in_double(build("t6", "softmax")), ids), rtol=1e-5, atol=1e-5)
    assert len(out.hidden_states) == 3
    if implementation == "eager":
        assert [weights.shape for weights in out.attentions] == [(2, 4, LENGTH, LENGTH)] * 2


@pytest.mark.parametrize("mechanism", ["softmax", "lssar", "laser"])
def test_gradients(build, mechanism):
    """Of one attention module, by finite differences: through the factors, RoPE, the mechanism and
    the output.
    """
    model = build("t6", mechanism).double()
    module = model.model.layers[0].self_attn
    x = torch.randn(1, 6, 32, dtype=torch.float64, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(6)[None])
    names = [name for name, _ in module.named_parameters()]

    def run(x, *weights):
        return functional_call(module, dict(zip(names, weights, strict=True)), (x, tables))[0]

    # A random direction of the inputs and of the outputs each: fast_mode
    assert torch.autograd.gradcheck(run, (x, *module.parameters()), fast_mode=True)


def size(cache):
    """The bytes of every tensor that the layers of a cache hold, but for scalars."""
    tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.dim()]
    return sum(x.numel() * x.element_size() for x in tensors)


def test_the_cache_holds_the_factors_alone(build, tokens):
    """(R_K + R_V)(h + d) numbers a token and layer in place of 2 h d: section 3.3."""
    ours, theirs = build("t6", "lssar"), build("llama", "lssar", num_key_value_heads=4)
    bytes_a_token = [
        size(model(tokens(1, LENGTH), use_cache=True).past_key_values) / LENGTH for model in (ours, theirs)
    ]
    layers, number = 2, 4
    assert bytes_a_token == [(2 + 1) * (4 + 8) * layers * number, 2 * 4 * 8 * layers * number]
    paper = T6Config()
    numbers = (paper.k_rank + paper.v_rank) * (paper.num_attention_heads + paper.head_dim)
    shares = [f"{numbers / (2 * heads * paper.head_dim):.0%}" for heads in (paper.num_attention_heads, 12)]
    assert shares == ["9%", "26%"]  # as docs/transformers.md says


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("part", ["causal_lm", "decoder"])
def test_both_names_of_the_cache_fill_one(build, tokens, name, part):
    """Transformers 5.24 renamed the argument. The older name is used widely."""
    model = build("t6").eval()
    model = model if part == "causal_lm" else model.model
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for chunk in tokens(2, LENGTH).split(5, dim=1):
            output = model(chunk, **{name: cache})
    assert output.cache is cache
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [5, 4, 1]], ids=["tokens", "chunks"])
def test_local_layers_forget(build, tokens, in_double, agree, sizes):
    model = softfocus.hf.use(build("t6"), {"0": {"mechanism": "softmax", "window": 4}, "*": {"mechanism": "lssar"}})
    ids, double = tokens(2, LENGTH), in_double(model)
    cache = DynamicCache(config=double.config)
    parts = [logits(double, chunk, past_key_values=cache) for chunk in ids.split(sizes, dim=1)]
    agree(torch.cat(parts, dim=1), logits(double, ids), logits(model, ids))
    assert [layer.keys.shape for layer in cache.layers] == [(2, 1, 3, 24), (2, 1, LENGTH, 24)]
    assert size(cache) == 2 * (3 + LENGTH) * (2 + 1) * (4 + 8) * 8


def test_heads_of_a_layer_share_what_rope_turns(build):
    with pytest.raises(ValueError, match="all heads of a layer need the same share"):
        softfocus.hf.use(build("t6"), {"*": [{"mechanism": "lssar", "heads": 2, "rope": 0.5}, "lssar"]})


def test_the_length_of_a_key_is_in_its_row_of_a(build, tokens):
    """Cosine similarity does not see it. So with one product the heads differ in the signs of their
    keys alone.
    """
    ids, scaled = tokens(1, LENGTH), {}
    for mechanism in ("softmax", "lssar"):
        model = build("t6", mechanism).double()
        before = logits(model, ids)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.key.a.weight.view(2, 4, -1)[:, 1] *= 5  # head 1 in both products
        scaled[mechanism] = (logits(model, ids) - before).abs().max() / before.abs().max()
    assert scaled["lssar"] < 1e-10
    assert scaled["softmax"] > 1e-2


def test_a_static_cache_filled_in_chunks(build, tokens, in_double):
    model, ids = in_double(build("t6", "lssar")), tokens(2, 9)
    how = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, use_cache=False, **how)
    assert torch.equal(model.generate(ids, cache_implementation="static", prefill_chunk_size=4, **how), want)


def test_a_draft_of_the_first_layers_changes_no_text(build, tokens):
    model, ids = build("t6", num_hidden_layers=3), tokens(1, LENGTH)
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    plain = model.generate(ids, **how)
    assert torch.equal(model.generate(ids, assistant_early_exit=1, **how), plain)
    assert torch.equal(model.generate(ids, **how), plain)


@pytest.mark.parametrize("mechanism", [None, "lssar"])
def test_continuous_batching_is_refused(build, mechanism):
    with pytest.raises(ValueError, match="T6 caches factors of its keys and values"):
        build("t6", mechanism).generate_batch([[5, 6, 7]])


def test_initial_weights():
    """Appendix G: uniform within sqrt(6 / (in + out)). What writes into the residual stream starts
    as zeros.
    """
    torch.manual_seed(0)
    model = T6ForCausalLM(T6Config(vocab_size=64, hidden_size=128, num_hidden_layers=1, bos_token_id=0, eos_token_id=0))
    layer = model.model.layers[0]
    for factors in (layer.self_attn.query, layer.self_attn.key, layer.self_attn.value):
        for linear in (factors.a, factors.b):
            bound = math.sqrt(6 / sum(linear.weight.shape))
            assert 0.99 * bound < linear.weight.abs().max() <= bound
            torch.testing.assert_close(linear.weight.std().item(), bound / math.sqrt(3), rtol=0.02, atol=0)
    assert not layer.self_attn.o_proj.weight.any()
    assert not layer.mlp.down_proj.weight.any()
    for weight in (layer.mlp.gate_proj.weight, model.lm_head.weight):
        torch.testing.assert_close(weight.std().item(), 0.02, rtol=0.02, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_papers_small_model():
    """124 M parameters: table 1's d_model (R_Q + R_K + R_V)(h + d) + d_model h d a layer, SwiGLU,
    tied embeddings.
    """
    with torch.device("meta"):
        model = T6ForCausalLM(T6Config())
    attention = 768 * (6 + 2 + 2) * (34 + 64) + 768 * 34 * 64
    assert sum(p.numel() for p in model.parameters()) == 12 * (attention + 3 * 768 * 2048) + 50304 * 768 == 124_342_272


def test_the_auto_classes_know_it(build, tokens, tmp_path):
    model, ids = build("t6"), tokens(1, LENGTH)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (type(back), type(AutoConfig.from_pretrained(tmp_path))) == (T6ForCausalLM, T6Config)
    assert torch.equal(logits(back, ids), logits(model, ids))
    assert isinstance(AutoModel.from_pretrained(tmp_path), T6Model)
    with_mechanism = AutoModelForCausalLM.from_config(
        softfocus.hf.use(T6Config(**build("t6").config.to_dict()), "lssar")
    )
    assert softfocus.hf.layout_of(with_mechanism).mechanism == softfocus.named("lssar")


@pytest.mark.long
def test_one_graph(build, tokens):
    model, ids = build("t6", "lssar"), tokens(2, LENGTH)
    torch.testing.assert_close(logits(torch.compile(model, fullgraph=True, backend="eager"), ids), logits(model, ids))


def test_rope_is_scaled_as_transformers_does(build, tokens):
    """Dynamic NTK beyond max_position_embeddings: the same model, with the base by hand."""
    ids, rope = tokens(1, 32), {"rope_theta": 10000.0, "factor": 1.0}
    scaled = build("t6", "lssar", max_position_embeddings=16, rope_parameters=rope | {"rope_type": "dynamic"})
    base = 10000.0 * (32 / 16) ** (8 / (8 - 2))
    want = build("t6", "lssar", rope_parameters={"rope_type": "default", "rope_theta": base})
    torch.testing.assert_close(logits(scaled, ids), logits(want, ids))
    assert not torch.allclose(logits(scaled, ids), logits(build("t6", "lssar"), ids), atol=1e-2)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"k_rank": 0}, "k_rank: got 0, expected 1 or more"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
        ({"q_rank": "6"}, "q_rank"),
    ],
)
def test_mistakes_in_a_config(values, says):
    with pytest.raises(Exception, match=says):  # huggingface_hub wraps what a config's own checks raise
        T6Config(**values)


def test_ids_and_embeddings_exclude_one_another(build, tokens):
    model, ids = build("t6", "lssar"), tokens(1, LENGTH)
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
    for given in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="got both or neither"):
            model(**given)
