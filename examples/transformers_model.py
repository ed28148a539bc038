"""A layout in a Transformers model: some heads see all keys, others 32; save, load, generate."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import softfocus.hf

config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=64**-0.5,  # 1 / sqrt(hidden_size): from the default, 0.02, the layout had no gain
)
near = {"mechanism": "laser(lssa)", "window": 32}
model = softfocus.hf.use(
    LlamaForCausalLM(config),
    {
        0: [{"mechanism": "softmax", "window": 2, "heads": 2}, near],  # two heads see a token and the one before
        "1::2": [{"mechanism": "cosine_log_n", "rope": 0, "heads": 2}, near],  # two see all keys, without RoPE
        "*": near,
    },
)
tokens = torch.randint(256, (1, 100))
print(softfocus.hf.explain(model))

loss = model(tokens, labels=tokens).loss
loss.backward()
print(f"loss {loss.item():.3f}")

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)  # the layout is in config.json
    same = AutoModelForCausalLM.from_pretrained(folder)
assert torch.allclose(model(tokens).logits, same(tokens).logits, atol=1e-5)

model.eval()
new = model.generate(tokens, max_new_tokens=10, do_sample=False)
print("generated", new[0, -10:].tolist())
