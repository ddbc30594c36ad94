"""Searches the tiles of the portable attention kernels on this GPU and writes the file to ship.

    python benchmarks/tune.py --processes 16 --out lowering/tuned/cuda_90.json

Kernels are compiled by several processes first, then timed by one, alone. Lengths are uniform on
1..L; half a million key rows in all, bfloat16 (float16 gets the same choices), 4 heads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from attention_shapes import Batch, Shape

from gemcompile.lowering import tuning
from gemcompile.ops import kernels
from gemcompile.target import Target

ROWS = 500_000
LENGTHS = (64, 400, 1600, 6000)  # longest; their means fall into the four buckets


def shapes(dims: list[int], lengths: Sequence[int]) -> Iterator[tuple[Shape, str]]:
    """What is searched: shapes with their activation; those that share kernels side by side."""
    for dim, activation, causal, longest in itertools.product(
        dims, ("softmax", "silu"), (False, True), lengths
    ):
        yield Shape(2 * ROWS // longest, 4, dim, longest, causal=causal), activation


def step(shape: Shape, activation: str) -> None:
    batch = Batch(shape, "cuda", torch.bfloat16, 1.0)
    out = batch.jagged(activation)
    torch.autograd.grad(out, batch.inputs, batch.dout)


def compile_share(dims: list[int], share: int, processes: int) -> None:
    """Runs tilings once without timing them: one of each kernel's, for this process's kinds."""

    def run_one(tilings: list[tuning.Tiling], run: Callable[[tuning.Tiling], None]) -> object:
        from triton.runtime.errors import OutOfResources

        tiles = tilings[share % len(tilings)]
        try:
            run(tiles)
        except OutOfResources:
            return tilings[0]
        return tiles

    with mock.patch.object(tuning, "search", run_one), mock.patch.object(tuning, "save"):
        kinds = list(shapes(dims, LENGTHS[:1]))
        for shape, activation in kinds[share // tuning.MOST :: max(1, processes // tuning.MOST)]:
            step(Shape(64, 4, shape.dim, 64, causal=shape.causal), activation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ |= {kernels.FORCE: "triton", tuning.TUNE: "1"}
    if arguments.share is not None:
        compile_share(arguments.dims, arguments.share, arguments.processes)
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty
        command = [sys.executable, *sys.argv, "--share"]
        workers = [
            subprocess.Popen([*command, str(i)], env=os.environ) for i in range(arguments.processes)
        ]
        failed = [worker.args for worker in workers if worker.wait() != 0]
        print(f"compiled in {time.perf_counter() - start:.0f} s; failed: {failed or 'none'}")
        with mock.patch.object(tuning, "_SHIPPED", Path(empty)):
            for shape, activation in shapes(arguments.dims, arguments.lengths):
                step(shape, activation)
            found = tuning.choices(Target.of(torch.device("cuda", 0)))
    lines = {key: [t.BM, t.BN, t.num_warps, t.num_stages] for key, t in sorted(found.items())}
    lines |= {key.replace("bfloat16", "float16"): tiles for key, tiles in lines.items()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f" {json.dumps(key)}: {json.dumps(tiles)}" for key, tiles in lines.items())
    arguments.out.write_text(f"{{\n{rows}\n}}\n")
    print(f"{len(found)} choices in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
