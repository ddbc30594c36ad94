"""Runs the Triton kernels on the edge suite under the interpreter: python interpreted_kernels.py.

A process of its own, as TRITON_INTERPRET is read when a kernel is decorated. float32 only: the
interpreter computes bfloat16 wrongly.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace

import torch
from kernel_cases import CASES, OPS, Case, check

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import kernels
from gemcompile.target import Target


def small(case: Case) -> bool:
    refused = (name for op in OPS for name, _ in kernels.why_not(op, Target("cpu"), case.request()))
    return case.dtype is torch.float32 and case.dim <= 96 and "triton" not in refused


def shortened(case: Case) -> Case:
    """Half the lengths: the tiles are 32 wide in float32, so long sequences still have several."""
    keys = None if case.k_lengths is None else halves(case.k_lengths)
    return replace(case, q_lengths=halves(case.q_lengths), k_lengths=keys)


def halves(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((n + 1) // 2 for n in lengths)


def main() -> int:
    chosen = [shortened(case) for case in CASES if small(case)]
    if len(sys.argv) > 1:
        chosen = [case for case in chosen if sys.argv[1] in str(case)]
    failed = 0
    for case in chosen:
        try:
            check(case, "triton", repeat=False)
        except Exception:
            failed += 1
            print(f"FAILED {case}")
            traceback.print_exc(limit=-4, file=sys.stdout)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
