"""Host time of one call of jagged attention on CUDA: what an eager call costs before the device.

    python benchmarks/host_time.py --out host.json
    python benchmarks/host_time.py --profile        # where it goes, by cProfile

The batch is so small that the device never holds the host up. "own list" is a call that makes its
tile list itself, "shared list" one that is given it, as in a compiled model; "direct" calls the
kernel's function, without dispatcher and autograd.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from attention_shapes import Batch, Shape
from common import save, show

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import kernels
from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.target import Target

SMALL = Shape(batch=16, heads=4, dim=128, longest=256)


def microseconds(step: Callable[[], object], calls: int = 100, rounds: int = 9) -> float:
    """Host time of a call: the device is idle at first and its queue never full."""
    for _ in range(20):
        step()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def steps(activation: str) -> dict[str, Callable[[], object]]:
    batch = Batch(SMALL, "cuda", torch.bfloat16, 1.0)
    own = _args(batch, activation, None)
    tiles = torch.ops.gem.attention_tiles(
        *(batch.q_offsets, batch.k_offsets, batch.q.shape[0], batch.k.shape[0], False, -1, -1)
    )
    shared = replace(own, tiles=tiles)
    target = Target.of(batch.q.device)
    forward, backward = (
        kernels.choose(op, target, own.request()).run
        for op in ("jagged_attention", "jagged_attention_backward")
    )
    out = batch.jagged(activation)
    found, lse = forward(own)
    dout = batch.dout

    def no_grad() -> None:
        with torch.no_grad():
            batch.jagged(activation)

    return {
        "forward": lambda: batch.jagged(activation),
        "forward, no_grad": no_grad,
        "forward, direct, own list": lambda: forward(own),
        "forward, direct, shared list": lambda: forward(shared),
        "backward": lambda: torch.autograd.grad(out, batch.inputs, dout, retain_graph=True),
        "backward, direct, own list": lambda: backward(dout, own, found, lse, False),
        "backward, direct, shared list": lambda: backward(dout, shared, found, lse, False),
    }


def _args(batch: Batch, activation: str, tiles: Any) -> AttentionArgs:
    q, k, v = (x.detach() for x in batch.inputs)
    return AttentionArgs(
        *(q, k, v, batch.q_offsets, batch.k_offsets, None, None, None, None, None, None),
        *(activation, 0.088, False, 0.0, batch.max_q, batch.max_k),
        tiles=tiles,
    )


def profile(step: Callable[[], object], calls: int = 300) -> None:
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    with cProfile.Profile() as profiler:
        for _ in range(calls):
            step()
    torch.cuda.synchronize()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--activations", nargs="*", default=["softmax", "gelu"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    rows = []
    for activation in arguments.activations:
        for name, step in steps(activation).items():
            rows.append({"what": f"{activation}: {name}", "host us": microseconds(step)})
            if arguments.profile and name in ("forward", "backward"):
                profile(step)
    show("host time of a call", rows)
    save(arguments.out, "cuda", rows)


if __name__ == "__main__":
    main()
