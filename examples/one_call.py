"""One call in place of scaled_dot_product_attention, and what can be asked about it."""

import torch

import softfocus

q, k, v = (torch.randn(2, 8, 256, 64, requires_grad=True) for _ in range(3))  # [batch, heads, length, head_dim]

out = softfocus.attention(q, k, v, is_causal=True, mechanism="lssar")
out.square().mean().backward()
print("out", tuple(out.shape), "gradient of the queries", tuple(q.grad.shape))

# Which backend ran, and why not another
print(softfocus.explain(q, k, v, is_causal=True, mechanism="lssar"))

# The weights of the last row: LSSAR's are exactly zero where a key is not above the row's mean
weights = softfocus.weights(q, k, rows=[-1], is_causal=True, mechanism="lssar")
print(f"zeros in the last row: {(weights == 0).double().mean():.0%}")

# A mechanism is algebra: combine names, or change a field
gentle = softfocus.named("lssar").replace(power=3.0)
second = softfocus.attention(q, k, v, is_causal=True, mechanism=gentle)
print("p = 3 differs from p = 15 by at most", f"{(second - out).abs().max():.3f}")

# A sliding window of 32 keys, and a batch whose second sequence is padded on the right
real = torch.ones(2, 256, dtype=torch.bool)
real[1, 200:] = False
out = softfocus.attention(q, k, v, is_causal=True, mechanism="softmax", window_size=(31, 0), key_mask=real)
print("with window and padding", tuple(out.shape))
