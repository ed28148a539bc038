"""A small GPT in plain PyTorch, trained on its own source with LSSAR. Change MECHANISM at will."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import softfocus

MECHANISM, WIDTH, HEADS, LAYERS, LENGTH = "lssar", 64, 4, 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [batch, heads, length, head_dim]
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = softfocus.attention(q, k, v, is_causal=True, mechanism=MECHANISM)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class SmallGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.place.weight[: tokens.size(1)]))


def main(steps: int = 200) -> None:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (8, 1))
        batch = text[starts + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
