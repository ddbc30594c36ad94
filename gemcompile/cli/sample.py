"""A small padded encoder, for the self-test and the benchmark of the command line."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Batch, padded length, width, heads and layers of an encoder."""

    batch: int
    length: int
    width: int
    heads: int
    layers: int


class Layer(nn.Module):
    """Pre-norm attention and a twice wider feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.up = nn.Linear(size.width, 2 * size.width)
        self.down = nn.Linear(2 * size.width, size.width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = x + self.out(out.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change


class Encoder(nn.Module):
    """Ids [B, L] and lengths [B] to the mean over the valid positions, [B, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        keep = torch.arange(ids.shape[1], device=ids.device)[None, :] < lengths[:, None]
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = layer(x, keep)
        return (x * keep[:, :, None]).sum(1) / lengths.clamp(min=1)[:, None]


def batch(size: Size, fill: float, device: str) -> tuple[Tensor, Tensor]:
    """Random ids [B, L], and lengths [B] spread evenly around ``fill`` times L."""
    spread = min(fill, 1 - fill)
    share = torch.linspace(fill - spread, fill + spread, size.batch)
    lengths = (share * size.length).round().long().clamp(1, size.length)
    ids = torch.randint(0, 1000, (size.batch, size.length))
    return ids.to(device), lengths.to(device)
