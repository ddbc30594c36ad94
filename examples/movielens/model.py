"""A next-item model as people write it: padded batches, a mask, and no thought for a compiler.

With `attention="softmax"` it is SASRec (Kang and McAuley, 2018), pre-norm and with tied output
weights; with "silu" its attention is that of HSTU (Zhai et al., 2024): SiLU in softmax's place,
divided by the longest length, normalised afterwards.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, kind: str, max_length: int) -> None:
        super().__init__()
        self.heads = heads
        self.kind = kind
        self.max_length = max_length
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width) if kind == "silu" else nn.Identity()
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        if self.kind == "softmax":
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        else:
            weights = F.silu(scores).masked_fill(hidden, 0.0) / self.max_length
        mixed = torch.matmul(self.dropout(weights), v)
        return self.out(self.norm(mixed.transpose(1, 2).reshape(batch, length, width)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, kind: str, max_length: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, kind, max_length)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), hidden))
        return x + self.dropout(self.mlp(self.norm2(x)))


class NextItem(nn.Module):
    """Scores every item of the catalogue as the next one, at every position of every history."""

    def __init__(
        self,
        items: int,
        max_length: int,
        *,
        width: int = 64,
        heads: int = 2,
        layers: int = 2,
        dropout: float = 0.2,
        attention: str = "softmax",
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, dropout, attention, max_length) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.items, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def encode(self, items: Tensor, keep: Tensor) -> Tensor:
        """items, keep [B, L] -> [B, L, E]; what stands where `keep` is False means nothing."""
        length = items.shape[1]
        steps = torch.arange(length, device=items.device)
        future = steps[None, :] > steps[:, None]
        hidden = future[None, None] | ~keep[:, None, None, :]
        x = self.dropout(self.items(items) + self.positions(steps))
        for block in self.blocks:
            x = block(x, hidden)
        return self.norm(x)

    def forward(self, items: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        """The mean cross-entropy of the next item over all real events. items, targets [B, L]."""
        keep = torch.arange(items.shape[1], device=items.device) < lengths[:, None]
        logits = F.linear(self.encode(items, keep), self.items.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (loss.view_as(targets) * keep).sum() / keep.sum()

    def predict(self, items: Tensor, lengths: Tensor) -> Tensor:
        """Scores [B, items + 1] of what follows the last real event of each history."""
        keep = torch.arange(items.shape[1], device=items.device) < lengths[:, None]
        x = self.encode(items, keep)
        last = x[torch.arange(len(x), device=x.device), lengths - 1]
        return F.linear(last, self.items.weight)
