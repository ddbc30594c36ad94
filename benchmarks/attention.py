"""Jagged attention by every kernel beside a peer: padded SDPA on CPU, varlen_attn on CUDA.

    python benchmarks/attention.py                     # CPU, a fraction of the batch
    python benchmarks/attention.py --device cuda --out attention.json

Useful FLOPs count true lengths: forward 4 H D sum(lq lk), causal the kept pairs, backward 2.5
times that. Lengths are drawn with seed 2026: "half" uniform on 1..L, "lognormal" exp(N(ln(L/8), 1))
clipped to 16..L.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, interleaved, show
from torch import Tensor

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import jagged_attention, kernels
from gemcompile.ops.attention_args import AttentionRequest
from gemcompile.target import Target

OPS = ("jagged_attention", "jagged_attention_backward")


@dataclass(frozen=True)
class Shape:
    """Lengths are "full", "half" or "lognormal"; keys None: the queries' own."""

    batch: int
    heads: int
    dim: int
    longest: int
    lengths: str = "half"
    keys: tuple[int, str] | None = None
    causal: bool = False


SHAPES = {
    "self_full_512": Shape(1152, 4, 128, 512, "full"),
    "self_half_512": Shape(1152, 4, 128, 512),
    "self_half_2048": Shape(288, 4, 128, 2048),
    "cross_q1024_kv256": Shape(1152, 4, 128, 1024, keys=(256, "full")),
    "pooled_q32_kv2048": Shape(1152, 4, 128, 32, "full", keys=(2048, "half")),
    "hist_lognormal_8192_causal": Shape(64, 4, 128, 8192, "lognormal", causal=True),
    "self_half_1024_d64": Shape(512, 8, 64, 1024),
}


class Batch:
    """One shape's tensors, packed and, for the CPU peer, padded."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, scale: float) -> None:
        generator = torch.Generator().manual_seed(2026)
        count = max(1, round(shape.batch * scale))
        self.shape, self.device = shape, device
        self.q_lengths = draw(shape.lengths, count, shape.longest, generator)
        self.max_q, self.max_k, self.k_lengths = shape.longest, shape.longest, self.q_lengths
        if shape.keys is not None:
            self.max_k = shape.keys[0]
            self.k_lengths = draw(shape.keys[1], count, self.max_k, generator)
        options = dict(device=device, dtype=dtype)
        size = (shape.heads, shape.dim)
        rows, keys = int(self.q_lengths.sum()), int(self.k_lengths.sum())
        self.q = torch.randn(rows, *size, **options).requires_grad_()
        self.k, self.v = (torch.randn(keys, *size, **options).requires_grad_() for _ in "kv")
        self.dout = torch.randn(rows, *size, **options)
        self.q_offsets, self.k_offsets = (
            F.pad(x.cumsum(0), (1, 0)).to(device, torch.int32)
            for x in (self.q_lengths, self.k_lengths)
        )

    def flops(self) -> int:
        """Forward, on true lengths."""
        pairs = self.q_lengths * self.k_lengths
        if self.shape.causal:
            pairs = pairs - self.q_lengths * (self.q_lengths - 1) // 2
        return 4 * self.shape.heads * self.shape.dim * int(pairs.sum())

    def jagged(self, activation: str) -> Tensor:
        return jagged_attention(
            *(self.q, self.k, self.v, self.q_offsets, self.k_offsets),
            activation=activation,
            scale=1 / math.sqrt(self.shape.dim),
            causal=self.shape.causal,
            max_q=self.max_q,
            max_k=self.max_k,
        )

    def peer(self) -> tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor]:
        """Forward, the tensors to differentiate, and the upstream gradient."""
        if self.device == "cuda":
            return self._varlen, (self.q, self.k, self.v), self.dout
        inputs = tuple(
            self._padded(x, lengths, longest)
            for x, lengths, longest in (
                (self.q, self.q_lengths, self.max_q),
                (self.k, self.k_lengths, self.max_k),
                (self.v, self.k_lengths, self.max_k),
            )
        )
        mask = (torch.arange(self.max_k) < self.k_lengths[:, None])[:, None, None]
        if self.shape.causal:
            mask = mask & torch.ones(self.max_q, self.max_k, dtype=torch.bool).tril()
        dout = torch.randn(*inputs[0].shape[:3], self.shape.dim)
        return lambda: F.scaled_dot_product_attention(*inputs, attn_mask=mask), inputs, dout

    def _varlen(self) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if self.shape.causal else (-1, -1)
        ends = (self.q_offsets, self.k_offsets, self.max_q, self.max_k)
        return varlen_attn(self.q, self.k, self.v, *ends, window_size=window)

    @staticmethod
    def _padded(x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        pieces = x.detach().split(lengths.tolist())
        padded = torch.stack([F.pad(p, (0, 0, 0, 0, 0, longest - p.shape[0])) for p in pieces])
        return padded.transpose(1, 2).contiguous().requires_grad_()


def draw(kind: str, count: int, longest: int, generator: torch.Generator) -> Tensor:
    if kind == "full":
        return torch.full((count,), longest)
    if kind == "half":
        return torch.randint(1, longest + 1, (count,), generator=generator)
    normal = torch.randn(count, generator=generator) + math.log(longest / 8)
    return normal.exp().clamp(16, longest).long()


def able(shape: Shape, activation: str, dtype: torch.dtype, target: Target) -> Iterator[str]:
    """The kernels that compute the shape; the reference is no contender."""
    request = AttentionRequest(
        *(dtype, shape.heads, shape.heads, shape.dim, shape.dim), activation, shape.causal
    )
    refused = {name for op in OPS for name, _ in kernels.why_not(op, target, request)}
    for kernel in kernels.kernels_of(OPS[0]):
        if not kernel.fallback and kernel.name not in refused:
            yield kernel.name


def milliseconds(steps: dict[str, Callable[[], object]], device: str, rounds: int) -> dict:
    if device == "cpu":
        times = interleaved(steps, device, rounds, warmup=1)
        return {name: 1e3 * statistics.median(values) for name, values in times.items()}
    from triton.testing import do_bench

    return {
        name: do_bench(step, warmup=20, rep=60, return_mode="median")
        for name, step in steps.items()
    }


def measure(name: str, activations: list[str], arguments: argparse.Namespace) -> Iterator[dict]:
    dtype = getattr(torch, arguments.dtype)
    batch = Batch(SHAPES[name], arguments.device, dtype, arguments.scale)
    target = Target.of(batch.q.device)
    peer, inputs, dout = batch.peer()
    peer_out = peer()
    steps: dict[str, Callable[[], object]] = {
        "peer forward": peer,
        "peer backward": lambda: torch.autograd.grad(peer_out, inputs, dout, retain_graph=True),
    }
    for activation in activations:
        for kernel in able(batch.shape, activation, dtype, target):
            label = f"{activation} {kernel}"
            steps |= contender(label, kernel, activation, batch)
    times = milliseconds(steps, arguments.device, arguments.rounds)
    for label in dict.fromkeys(key.rsplit(" ", 1)[0] for key in steps):
        forward, backward = times[f"{label} forward"], times[f"{label} backward"]
        yield {
            "shape": name,
            "kernel": label,
            "fwd ms": forward,
            "x peer": times["peer forward"] / forward,
            "GFLOP/s": batch.flops() / forward / 1e6,
            "bwd ms": backward,
            "x peer ": times["peer backward"] / backward,
            "GFLOP/s ": 2.5 * batch.flops() / backward / 1e6,
        }


def contender(
    label: str, kernel: str, activation: str, batch: Batch
) -> dict[str, Callable[[], object]]:
    def forced(step: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            os.environ[kernels.FORCE] = kernel  # cheap, as it is timed too
            return step()

        return run

    out = forced(lambda: batch.jagged(activation))()
    inputs = (batch.q, batch.k, batch.v)
    return {
        f"{label} forward": forced(lambda: batch.jagged(activation)),
        f"{label} backward": forced(
            lambda: torch.autograd.grad(out, inputs, batch.dout, retain_graph=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", help="default: bfloat16 on CUDA, float32 on CPU")
    parser.add_argument("--scale", type=float, help="of the batch; default 1 on CUDA, 1/64 on CPU")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--activations", nargs="*", default=["softmax", "gelu", "silu"])
    parser.add_argument("--rounds", type=int, default=5, help="on CPU")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    on_cuda = arguments.device == "cuda"
    arguments.dtype = arguments.dtype or ("bfloat16" if on_cuda else "float32")
    arguments.scale = arguments.scale or (1.0 if on_cuda else 1 / 64)
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes:
        found = list(measure(name, arguments.activations, arguments))
        show(name, [{k: v for k, v in row.items() if k != "shape"} for row in found])
        rows += found
    if arguments.out:
        options = {k: str(v) for k, v in vars(arguments).items()}
        report = {**environment(arguments.device), "options": options, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
