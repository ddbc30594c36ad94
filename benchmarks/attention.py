"""Jagged attention beside its peers: padded SDPA on CPU; on CUDA whatever of FA2 varlen, FA4,
padded cuDNN and flash, and FlexAttention is installed.

    python benchmarks/attention.py                     # CPU, a fraction of the batch
    python benchmarks/attention.py --device cuda --out attention.json

On CUDA each time is the median over 200 ms of repeats after 50 ms of warm-up (sustained, as the
card is power-capped). All contenders are measured in turn, ``--rounds`` times over, so that what
the machine does meanwhile falls on all of them: times are medians over the rounds, "x" (against the
first peer) and "x best" (against the fastest of them) medians of the rounds' ratios. The SM clock
while a line was measured stands beside it. ``attention_shapes.py`` says what FLOPs and floors
count.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attention_peers import Peer, peers
from attention_shapes import SHAPES, Batch, Shape
from common import Clock, interleaved, ratio, save, show

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import kernels
from gemcompile.ops.attention_args import AttentionRequest
from gemcompile.target import Target

OPS = ("jagged_attention", "jagged_attention_backward")
Times = dict[str, list[tuple[float, float]]]  # milliseconds forward and backward, of each round


def able(shape: Shape, activation: str, dtype: torch.dtype, target: Target) -> Iterator[str]:
    """The kernels that compute the shape; the reference is no contender."""
    request = AttentionRequest(
        *(dtype, shape.heads, shape.heads, shape.dim, shape.dim, activation, shape.causal),
        block=shape.block > 0,
    )
    refused = {name for op in OPS for name, _ in kernels.why_not(op, target, request)}
    for kernel in kernels.kernels_of(OPS[0]):
        if not kernel.fallback and kernel.name not in refused:
            yield kernel.name


def contenders(batch: Batch, arguments: argparse.Namespace) -> Iterator[tuple[Peer, str | None]]:
    """Each with the kernel it is forced to, None for what is chosen."""
    for activation in arguments.activations:
        chosen: list[str | None] = [None]
        if arguments.kernels == "all":
            dtype, target = batch.q.dtype, Target.of(batch.q.device)
            chosen += able(batch.shape, activation, dtype, target)
        for kernel in chosen:
            name = f"gem {activation}" + (f" ({kernel})" if kernel else "")
            call = _forced(kernel, lambda a=activation: batch.jagged(a))
            softmax = activation == "softmax"
            note = ""
            if arguments.repeats:
                same = _forced(kernel, lambda a=activation: batch.repeats(a, arguments.repeats))()
                note = "bits repeat" if same else "BITS DIFFER"
            yield Peer(name, call, batch.inputs, batch.dout, note, softmax), kernel


def _forced(kernel: str | None, step: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        if kernel is None:
            os.environ.pop(kernels.FORCE, None)
        else:
            os.environ[kernels.FORCE] = kernel  # cheap, as it is timed too
        return step()

    return run


def measure(name: str, arguments: argparse.Namespace, clock: Clock) -> Iterator[dict[str, Any]]:
    dtype = getattr(torch, arguments.dtype)
    batch = Batch(SHAPES[name], arguments.device, dtype, arguments.scale)
    beside = [(peer, None) for peer in peers(batch, arguments.peers)]
    everyone = [*beside, *contenders(batch, arguments)]
    times: Times = {peer.name: [] for peer, _ in everyone}
    clocks: dict[str, list[int]] = {peer.name: [] for peer, _ in everyone}
    for _ in range(arguments.rounds if arguments.device == "cuda" else 1):
        for peer, kernel in everyone:
            clock.reset()
            times[peer.name].append(timed(peer, kernel, arguments))
            clocks[peer.name] += clock.last()
    names = [peer.name for peer, _ in beside]
    for peer, _ in everyone:
        megahertz = round(statistics.median(clocks[peer.name])) if clocks[peer.name] else None
        yield line(batch, peer, megahertz, times, names)


def timed(peer: Peer, kernel: str | None, arguments: argparse.Namespace) -> tuple[float, float]:
    out = peer.forward()
    steps = [
        peer.forward,
        _forced(
            kernel,
            lambda: torch.autograd.grad(out, peer.inputs, peer.dout, retain_graph=True),
        ),
    ]
    if arguments.device == "cpu":
        rounds = interleaved(dict(zip("fb", steps, strict=True)), "cpu", arguments.rounds, warmup=1)
        forward, backward = (1e3 * statistics.median(times) for times in rounds.values())
        return forward, backward
    from triton.testing import do_bench

    forward, backward = (
        do_bench(step, warmup=arguments.warmup, rep=arguments.rep, return_mode="median")
        for step in steps
    )
    return forward, backward


def line(
    batch: Batch,
    peer: Peer,
    megahertz: int | None,
    times: Times,
    beside: list[str],
) -> dict[str, Any]:
    row: dict[str, Any] = {"what": peer.name}
    works = (batch.flops(), 2.5 * batch.flops())
    floors = batch.floors(peer.softmax)
    for i, side in enumerate(("fwd", "bwd")):
        mine = [both[i] for both in times[peer.name]]
        theirs = [[both[i] for both in times[name]] for name in beside]
        ms = statistics.median(mine)
        row |= {
            f"{side} ms": ms,
            f"{side} TFLOP/s": works[i] / ms / 1e9,
            f"{side} floors": ms / floors[i] if batch.device == "cuda" else None,
            f"{side} x": ratio(theirs[0], mine) if beside else None,
            f"{side} x best": ratio([min(x) for x in zip(*theirs)], mine) if beside else None,
        }
    return row | {"MHz": megahertz, "note": peer.note}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", help="default: bfloat16 on CUDA, float32 on CPU")
    parser.add_argument("--scale", type=float, help="of the batch; default 1 on CUDA, 1/64 on CPU")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--activations", nargs="*", default=["softmax", "gelu", "silu"])
    parser.add_argument("--peers", nargs="*", default=["varlen", "fa4", "padded", "flex"])
    parser.add_argument("--kernels", choices=["chosen", "all"], default="chosen")
    parser.add_argument("--warmup", type=int, default=50, help="ms, on CUDA")
    parser.add_argument("--rep", type=int, default=200, help="ms of repeats, on CUDA")
    parser.add_argument("--repeats", type=int, default=0, help="compare bits over so many runs")
    parser.add_argument("--rounds", type=int, help="default 3 on CUDA, 5 on CPU")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    on_cuda = arguments.device == "cuda"
    arguments.rounds = arguments.rounds or (3 if on_cuda else 5)
    arguments.dtype = arguments.dtype or ("bfloat16" if on_cuda else "float32")
    arguments.scale = arguments.scale or (1.0 if on_cuda else 1 / 64)
    return arguments


def main() -> None:
    arguments = parse()
    rows: list[dict[str, Any]] = []
    with Clock(arguments.device) as clock:
        for name in arguments.shapes:
            found = list(measure(name, arguments, clock))
            show(name, found)
            rows += [{"shape": name, **row} for row in found]
            options = {k: str(v) for k, v in vars(arguments).items()}
            save(arguments.out, arguments.device, rows, options=options)


if __name__ == "__main__":
    main()
