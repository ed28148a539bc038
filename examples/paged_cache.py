"""Serving: two sequences of different lengths decode from a cache in pages of 16 tokens."""

import torch

import softfocus

HEADS, KEY_HEADS, HEAD_DIM, PAGE = 8, 2, 64, 16
torch.manual_seed(0)
key_pages, value_pages = torch.zeros(
    2, 100, KEY_HEADS, PAGE, HEAD_DIM
).unbind()  # [pages, key heads, page size, head_dim]
free_pages = list(range(100))
lengths = torch.tensor([0, 0])
page_table = torch.zeros(2, 8, dtype=torch.int64)  # where tokens 16 j and following of a sequence lie


def write(sequence: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Append the key and the value of a new token, [key heads, head_dim], to a sequence."""
    position = int(lengths[sequence])
    if position % PAGE == 0:
        page_table[sequence, position // PAGE] = free_pages.pop()
    page = page_table[sequence, position // PAGE]
    key_pages[page, :, position % PAGE], value_pages[page, :, position % PAGE] = key, value
    lengths[sequence] += 1


written: list[list[torch.Tensor]] = [[], []]
for sequence, tokens in ((0, 37), (1, 5)):  # the prompts
    for _ in range(tokens):
        written[sequence].append(torch.randn(2, KEY_HEADS, HEAD_DIM))
        write(sequence, *written[sequence][-1])

for _ in range(20):  # decoding: one token each at every step
    for sequence in (0, 1):
        written[sequence].append(torch.randn(2, KEY_HEADS, HEAD_DIM))
        write(sequence, *written[sequence][-1])
    query = torch.randn(2, HEADS, 1, HEAD_DIM)
    out = softfocus.attention_with_cache(
        query, key_pages, value_pages, lengths, page_table, enable_gqa=True, mechanism="lssar"
    )

for sequence in (0, 1):  # the same, from keys and values that lie one after another
    key, value = torch.stack(written[sequence], dim=2).unsqueeze(1)  # [1, key heads, length, head_dim] each
    plain = softfocus.attention(
        query[sequence : sequence + 1], key, value, is_causal=True, enable_gqa=True, mechanism="lssar"
    )
    assert torch.allclose(out[sequence], plain[0], atol=1e-5)
print("lengths", lengths.tolist(), "pages in use", 100 - len(free_pages), "out", tuple(out.shape))
