"""The attention ops: every kernel on the edge suite, the public function, opcheck, FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import CASES, OPS, Case, Call, build, check, forced, run

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import attention_reference, jagged_attention, kernels
from gemcompile.target import Target

CPU, CUDA = Target("cpu"), Target("cuda", 90)


def kernel_names(target: Target, case: Case) -> list[str]:
    """The kernels that run ``case`` forward and backward."""
    refused = {name for op in OPS for name, _ in kernels.why_not(op, target, case.request())}
    return [k.name for k in kernels.kernels_of(OPS[0]) if k.name not in refused]


def pairs(target: Target) -> list:
    return [
        pytest.param(case, name, id=f"{name}-{case}")
        for case in CASES
        for name in kernel_names(target, case)
    ]


@pytest.mark.parametrize(("case", "kernel"), pairs(CPU))
def test_kernel_on_cpu(case, kernel):
    check(case, kernel)


@pytest.mark.cuda
@pytest.mark.parametrize(("case", "kernel"), pairs(CUDA))
def test_kernel_on_cuda(case, kernel):
    check(case, kernel, "cuda")
