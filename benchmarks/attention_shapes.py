"""The shapes that attention is measured on: lengths, tensors, true work, floors.

Lengths are drawn with seed 2026: "full"; "half" uniform on 1..L; "lognormal" exp(N(ln(L/8), 1))
clipped to 16..L; "0.7" uniform on 0.4 L..L. FLOPs count true pairs: forward 4 H D pairs, backward
2.5 times that. A floor is the larger of bytes (each input read once, each output written once) over
4.3 TB/s and FLOPs over 790 TFLOP/s, an H200's measured copy bandwidth and matrix rate in a burst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gemcompile.ops import jagged_attention

BANDWIDTH, RATE = 4.3e12, 790e12


@dataclass(frozen=True)
class Shape:
    """``keys`` None: the queries' own; ``block``: block-aligned attention."""

    batch: int
    heads: int
    dim: int
    longest: int
    lengths: str = "half"
    keys: tuple[int, str] | None = None
    causal: bool = False
    block: int = 0


SHAPES = {
    "self_full_512": Shape(1152, 4, 128, 512, "full"),
    "self_half_512": Shape(1152, 4, 128, 512),
    "self_half_2048": Shape(288, 4, 128, 2048),
    "cross_q1024_kv256": Shape(1152, 4, 128, 1024, keys=(256, "full")),
    "pooled_q32_kv2048": Shape(1152, 4, 128, 32, "full", keys=(2048, "half")),
    "hist_lognormal_8192_causal": Shape(64, 4, 128, 8192, "lognormal", causal=True),
    "self_half_1024_d64": Shape(512, 8, 64, 1024),
    "block64_2000": Shape(1152, 4, 128, 2000, "0.7", block=64),
}


def draw(kind: str, count: int, longest: int, generator: torch.Generator) -> Tensor:
    if kind == "full":
        return torch.full((count,), longest)
    if kind == "half":
        return torch.randint(1, longest + 1, (count,), generator=generator)
    if kind == "0.7":
        return torch.randint(round(0.4 * longest), longest + 1, (count,), generator=generator)
    normal = torch.randn(count, generator=generator) + math.log(longest / 8)
    return normal.exp().clamp(16, longest).long()


class Batch:
    """One shape's tensors, packed."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, scale: float) -> None:
        generator = torch.Generator().manual_seed(2026)
        count = max(1, round(shape.batch * scale))
        self.shape, self.device = shape, device
        self.q_lengths = draw(shape.lengths, count, shape.longest, generator)
        self.max_q, self.max_k, self.k_lengths = shape.longest, shape.longest, self.q_lengths
        if shape.keys is not None:
            self.max_k = shape.keys[0]
            self.k_lengths = draw(shape.keys[1], count, self.max_k, generator)
        rows, keys = int(self.q_lengths.sum()), int(self.k_lengths.sum())
        size = (shape.heads, shape.dim)
        self.q = torch.randn(rows, *size, device=device, dtype=dtype).requires_grad_()
        self.k = torch.randn(keys, *size, device=device, dtype=dtype).requires_grad_()
        self.v = torch.randn(keys, *size, device=device, dtype=dtype).requires_grad_()
        self.dout = torch.randn(rows, *size, device=device, dtype=dtype)
        self.q_offsets, self.k_offsets = (
            F.pad(x.cumsum(0), (1, 0)).to(device, torch.int32)
            for x in (self.q_lengths, self.k_lengths)
        )

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def flops(self) -> int:
        """Forward, on true lengths."""
        pairs = self.q_lengths * self.k_lengths
        if self.shape.causal:
            pairs = pairs - self.q_lengths * (self.q_lengths - 1) // 2
        if self.shape.block:
            whole, rest = self.q_lengths // self.shape.block, self.q_lengths % self.shape.block
            pairs = whole * self.shape.block**2 + rest**2
        return 4 * self.shape.heads * self.shape.dim * int(pairs.sum())

    def floors(self, softmax: bool) -> tuple[float, float]:
        """Milliseconds, forward and backward."""
        q, kv = (x.numel() * x.element_size() for x in (self.q, self.k))
        forward_bytes, backward_bytes = 2 * q + 2 * kv, (4 if softmax else 3) * q + 4 * kv
        flops = self.flops()
        forward = max(forward_bytes / BANDWIDTH, flops / RATE)
        return 1e3 * forward, 1e3 * max(backward_bytes / BANDWIDTH, 2.5 * flops / RATE)

    def jagged(self, activation: str, deterministic: bool = False) -> Tensor:
        return jagged_attention(
            *(self.q, self.k, self.v, self.q_offsets, self.k_offsets),
            activation=activation,
            scale=1 / math.sqrt(self.shape.dim),
            causal=self.shape.causal,
            block=self.shape.block or None,
            max_q=self.max_q,
            max_k=self.max_k,
            deterministic=deterministic,
        )

    def repeats(self, activation: str, times: int) -> bool:
        """Whether output and gradients have the same bits every time, in deterministic mode."""
        first: list[Tensor] = []
        for _ in range(times):
            out = self.jagged(activation, deterministic=True)
            found = [out.detach(), *torch.autograd.grad(out, self.inputs, self.dout)]
            first = first or found
            if not all(map(torch.equal, found, first)):
                return False
        return True
