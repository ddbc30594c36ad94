"""Models for the padding tests: small encoders written as people write them, with many kinds
of exits.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def keep_mask(lens: Tensor, length: int) -> Tensor:
    """bool [B, L], true for real items."""
    return torch.arange(length, device=lens.device)[None, :] < lens[:, None]


class Block(nn.Module):
    """Pre-norm attention and MLP; ``style`` is "sdpa", "causal only", "manual" or "finite"."""

    def __init__(self, width: int, heads: int, style: str, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.style, self.causal = heads, style, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor, keep: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = (
            t.view(b, n, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        mask = keep[:, None, None, :]
        if self.causal:
            mask = mask & torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None]
        if self.style == "causal only":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.style == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            fill = -1e9 if self.style == "finite" else float("-inf")
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(width // self.heads)
            y = scores.masked_fill(~mask, fill).softmax(-1) @ v
        return y.transpose(1, 2).reshape(b, n, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x + self.dropout(self.out(self.attend(self.norm1(x), keep)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    """ids [B, L] and lens [B] to what ``head`` says."""

    def __init__(
        self,
        head: str = "mean",
        *,
        style: str = "sdpa",
        layers: int = 2,
        width: int = 32,
        heads: int = 2,
        dropout: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self.embed, self.position = nn.Embedding(100, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, style, dropout, causal) for _ in range(layers)
        )
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 8)

    def forward(self, ids: Tensor, lens: Tensor) -> Tensor:
        b, n = ids.shape
        keep = keep_mask(lens, n)
        x = self.embed(ids) + self.position(torch.arange(n, device=ids.device))[None]
        for block in self.blocks:
            x = block(x, keep)
        return self.leave(self.norm(x), ids, keep, lens)

    def leave(self, x: Tensor, ids: Tensor, keep: Tensor, lens: Tensor) -> Tensor:
        """The exit under test."""
        real = keep[:, :, None]
        if self.head == "mean":
            return self.score((x * real).sum(1) / lens.clamp(min=1)[:, None])
        if self.head == "float mean":
            weight = keep.to(x.dtype).unsqueeze(-1)
            return self.score((x * weight).sum(1) / weight.sum(1).clamp(min=1.0))
        if self.head == "max":
            return self.score(x.masked_fill(~real, -1e4).amax(1))
        if self.head == "where":
            return torch.where(real, x, 0.0)
        if self.head == "fill":
            return x.masked_fill(~real, 0.0)
        if self.head == "last":
            return self.score(x[torch.arange(x.shape[0], device=x.device), lens - 1])
        if self.head == "last clamped":
            return self.score(x[torch.arange(x.shape[0], device=x.device), (lens - 1).clamp(min=0)])
        if self.head == "last gathered":
            at = (lens - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, x.shape[-1])
            return self.score(x.gather(1, at).squeeze(1))
        if self.head == "cross entropy":
            target = (ids % 8).masked_fill(~keep, -100)
            return F.cross_entropy(self.score(x).view(-1, 8), target.view(-1), reduction="sum")
        if self.head == "masked loss":
            loss = F.cross_entropy(
                self.score(x).flatten(0, 1), (ids % 8).flatten(), reduction="none"
            )
            return (loss.view_as(ids) * keep).sum() / keep.sum().clamp(min=1)
        assert self.head == "raw"
        return x


EXITS = (
    "mean", "float mean", "max", "where", "fill", "last", "last clamped", "last gathered",
    "cross entropy", "masked loss",
)  # fmt: skip


class TwoMasks(nn.Module):
    """A user history and an item list, each with its own padding; items look at the history."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(100, width)
        self.block = Block(width, heads, "sdpa", 0.0, False)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.score = nn.Linear(width, 1)

    def forward(
        self, history: Tensor, history_lens: Tensor, items: Tensor, item_lens: Tensor
    ) -> Tensor:
        keep = keep_mask(history_lens, history.shape[1])
        wanted = keep_mask(item_lens, items.shape[1])
        x = self.block(self.embed(history), keep)
        y = self.embed(items)

        def heads(t: Tensor) -> Tensor:
            return t.view(*t.shape[:2], self.heads, -1).transpose(1, 2)

        z = F.scaled_dot_product_attention(
            heads(self.q(y)), heads(self.k(x)), heads(self.v(x)), attn_mask=keep[:, None, None, :]
        )
        y = y + z.transpose(1, 2).flatten(2)
        return (self.score(y).squeeze(-1) * wanted).sum(1)


class Torch(nn.Module):
    """nn.TransformerEncoderLayer with a key padding mask, mean-pooled."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, lens: Tensor) -> Tensor:
        keep = keep_mask(lens, x.shape[1])
        y = self.layer(x, src_key_padding_mask=~keep)
        return (y * keep[:, :, None]).sum(1)
