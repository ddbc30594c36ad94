"""Tile sizes of the portable attention kernels: shipped choices, a rule, or a bounded search.

A choice is looked up under a key that holds no size but buckets, so that a new batch of lengths
never asks again. Choices for an H200 ship with the package (``tuned/cuda_90.json``, written by
benchmarks/tune.py). Elsewhere a rule decides; with GEM_TUNE=1 the first call under a new key times
at most ``MOST`` tilings instead and keeps the winner in the user's cache folder: the order of sums
depends on the tiles, so that a choice, once made, should stay. A search waits for the device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import triton

from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.target import Target

MOST = 8  # tilings that a search may try
TUNE = "GEM_TUNE"
_SHIPPED = Path(__file__).parent / "tuned"
_LENGTHS = (64, 256, 1024)  # bounds of the buckets of mean lengths


@dataclass(frozen=True)
class Tiling:
    """Tile sizes and launch options of one kernel."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


def padded_dim(dim: int) -> int:
    """The tile's width: a power of two that matrix instructions take."""
    return max(16, int(triton.next_power_of_2(dim)))


def rule(kind: str, dtype: torch.dtype, width: int, target: Target) -> Tiling:
    """What fits everywhere, for the "forward", "query" or "key" kernel."""
    if dtype is torch.float32:
        return Tiling(32, 32, 4, 1)
    if width <= 128:
        stages = 1 if target.device == "hip" else 3 if kind == "forward" else 2
        return Tiling(32 if kind == "key" and width <= 64 else 64, 64, 4, stages)
    if target.device == "hip":
        return Tiling(64, 32, 4, 1)
    stages = 2 if int(target.arch) >= 90 else 1  # shared memory of sm_80 holds one
    return Tiling(128 if kind == "forward" else 64, 64, 8, stages)


def candidates(kind: str, dtype: torch.dtype, width: int, target: Target) -> list[Tiling]:
    """What a search tries, the rule's choice first."""
    first = rule(kind, dtype, width, target)
    if dtype is torch.float32:
        others = [Tiling(*x) for x in ((64, 32, 4, 1), (32, 64, 4, 1), (64, 64, 8, 1))]
    elif kind == "key":
        sizes = ((32, 64, 4, 2), (64, 64, 4, 2), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2))
        others = [Tiling(*x) for x in sizes]
    else:
        sizes = ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 3), (64, 32, 4, 3))
        others = [Tiling(*x) for x in (*sizes, (128, 128, 8, 2), (32, 64, 4, 3))]
    return [first, *(t for t in others if t != first)][:MOST]


def key_of(kind: str, a: AttentionArgs) -> str:
    """What decides the best tiles: kernel, type, width, activation, mask, mean length."""
    width = max(padded_dim(a.q.shape[2]), padded_dim(a.v.shape[2]))
    mean = a.k.shape[0] // max(1, a.k_offsets.shape[0] - 1)
    bucket = next((f"to {n}" for n in _LENGTHS if mean <= n), f"above {_LENGTHS[-1]}")
    parts = (kind, str(a.q.dtype).removeprefix("torch."), f"width {width}")
    activation = "softmax" if a.softmax else "element-wise"
    return ", ".join((*parts, activation, "causal" if a.causal else "full", f"keys {bucket}"))


def tiling(kind: str, a: AttentionArgs, run: Callable[[Tiling], object] | None = None) -> Tiling:
    """The tiles for a call. ``run`` launches it with given tiles, for a search."""
    target = Target.of(a.q.device)
    key, width = key_of(kind, a), max(padded_dim(a.q.shape[2]), padded_dim(a.v.shape[2]))
    known = choices(target)
    if key in known:
        return known[key]
    if run is not None and searching(a.q.device):
        known[key] = search(candidates(kind, a.q.dtype, width, target), run)
        save(target, {key: known[key]})
        return known[key]
    return rule(kind, a.q.dtype, width, target)


def searching(device: torch.device) -> bool:
    asked = os.environ.get(TUNE) == "1" and device.type == "cuda"
    return asked and not torch.cuda.is_current_stream_capturing()


def search(tilings: list[Tiling], run: Callable[[Tiling], object]) -> Tiling:
    """The fastest of those that fit the device."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times: dict[Tiling, float] = {}
    for tiles in tilings:
        try:
            run(tiles)
        except OutOfResources:
            continue
        times[tiles] = do_bench(lambda t=tiles: run(t), warmup=5, rep=20, return_mode="median")
    return min(times, key=lambda t: times[t])


@lru_cache
def choices(target: Target) -> dict[str, Tiling]:
    """Known choices by key: the user's own before the shipped ones."""
    shipped, own = _files(target)
    return _read(shipped) | _read(own)


def save(target: Target, searched: dict[str, Tiling]) -> None:
    """Adds choices to the user's own file; does without where the folder cannot be written.

    Shipped choices stay out of it: there they would hide those of a newer package.
    """
    _, own = _files(target)
    known = _read(own) | searched
    lines = {key: list(astuple(tiles)) for key, tiles in sorted(known.items())}
    try:
        own.parent.mkdir(parents=True, exist_ok=True)
        partial = own.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(lines, indent=0) + "\n")
        partial.replace(own)
    except OSError:
        pass


def _read(path: Path) -> dict[str, Tiling]:
    if not path.is_file():
        return {}
    return {key: Tiling(*x) for key, x in json.loads(path.read_text()).items()}


def _files(target: Target) -> tuple[Path, Path]:
    """Where the shipped choices are, and the user's own."""
    name = f"{target.device}_{target.arch}.json"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return _SHIPPED / name, cache / "gemcompile" / f"tiles-{triton.__version__}" / name
