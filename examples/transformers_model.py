"""A layout in a Transformers model: local LSSA layers, global LSSAR; save, load, generate."""

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
)
model = softfocus.hf.use(
    LlamaForCausalLM(config),
    {
        "0::2": {"mechanism": "lssa", "window": 32},  # layers 0 and 2 see 32 keys
        "*": {"mechanism": "sharpened(lssa, 31)", "rope": 0.5},  # the others see all, with half of RoPE
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
