"""A padded transformer encoder as ranking models use it, in several spellings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    """Pre-norm attention and feed-forward; ``spelling`` says how attention is written."""

    def __init__(self, width: int = 16, heads: int = 2, spelling: str = "masked_fill") -> None:
        super().__init__()
        self.heads, self.spelling = heads, spelling
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        visible = keep[:, None, None, :]
        if self.spelling == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        out = self.attend(q, k, v, keep).transpose(1, 2).reshape(x.shape)
        x = x + self.out(out)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Ids [B, L] and lengths [B] to a mean over the valid positions, [B, width]."""

    def __init__(
        self,
        layers: int = 2,
        spelling: str = "masked_fill",
        pooled: bool = True,
        checkpointed: bool = False,
        wrap: Callable[[nn.Module], Any] = lambda layer: layer,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(Layer(spelling=spelling) for _ in range(layers))
        self.calls = [wrap(layer) for layer in self.layers]
        self.pooled, self.checkpointed = pooled, checkpointed

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        keep = torch.arange(ids.shape[1], device=ids.device)[None, :] < lengths[:, None]
        x = self.embed(ids)
        for layer in self.calls:
            if self.checkpointed:
                x = checkpoint(layer, x, keep, use_reentrant=False)
            else:
                x = layer(x, keep)
        if not self.pooled:
            return x
        return (x * keep[:, :, None]).sum(1) / lengths.clamp(min=1)[:, None]


def batch(lengths: tuple[int, ...] = (5, 2, 9, 1), length: int = 12) -> tuple[Tensor, Tensor]:
    """Random ids [B, length] and the lengths [B]."""
    return torch.randint(0, 100, (len(lengths), length)), torch.tensor(lengths)
