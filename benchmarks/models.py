"""The padded encoder that the packing and compile-time benchmarks train."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    batch: int
    length: int
    width: int
    heads: int
    layers: int
    dtype: torch.dtype


SIZES = {
    "cpu": Size(batch=16, length=512, width=256, heads=4, layers=2, dtype=torch.float32),
    "cuda": Size(batch=512, length=512, width=512, heads=4, layers=4, dtype=torch.bfloat16),
}


class Layer(nn.Module):
    """Pre-norm attention and a four times wider MLP; `style` is "sdpa" or "manual"."""

    def __init__(self, size: Size, style: str) -> None:
        super().__init__()
        self.heads, self.style = size.heads, style
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mask = keep[:, None, None, :]
        if self.style == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            mixed = scores.masked_fill(~mask, -1e9).softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Ids to a mean over each sequence's real rows to eight outputs."""

    def __init__(self, size: Size, style: str, vocabulary: int = 1000) -> None:
        super().__init__()
        self.items = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(Layer(size, style) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 8)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """ids [B, L] int64, lengths [B] int64 -> [B, 8]."""
        steps = torch.arange(ids.shape[1], device=ids.device)
        keep = steps[None, :] < lengths[:, None]
        x = self.items(ids) + self.positions(steps)[None]
        for layer in self.layers:
            x = layer(x, keep)
        pooled = (self.norm(x) * keep[:, :, None]).sum(dim=1) / lengths.clamp(min=1)[:, None]
        return self.head(pooled)


def spread_lengths(size: Size, fill: float, seed: int = 2026) -> Tensor:
    """Lengths [B] in random order: all L at fill 1, else evenly spaced on 1 .. 2 * fill * L.

    Evenly spaced rather than drawn, so that a small batch has the fill that it is named after.
    """
    if fill == 1.0:
        return torch.full((size.batch,), size.length)
    places = (torch.arange(size.batch) + 0.5) / size.batch
    order = torch.randperm(size.batch, generator=torch.Generator().manual_seed(seed))
    return (places * 2 * fill * size.length).ceil().long()[order]
