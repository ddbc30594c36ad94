"""The kernels for block-aligned attention: on a GPU where there is one, else interpreted, compiled.

Run as a script, this file is the process of its own that compiles (`compile`) or interprets
(`interpret`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import own_activation
import pytest
import torch
from kernel_cases import Case, build, check, old_numpy, run
from own_process import run_script
from specialised_kernels import compile_everywhere, interpret

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import kernels
from gemcompile.ops.attention_args import AttentionRequest
from gemcompile.target import Target

if find_spec("triton") is not None:
    from gemcompile.lowering import attention_triton_blocks as blocks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton package")
HOPPER = Target("cuda", 90)
BASE = AttentionRequest(torch.bfloat16, 4, 4, 128, 128, "softmax", False, block=True)

ODD = (0, 1, 5, 70, 0, 33, 0)
SHORT = (0, 1, 5, 37, 0)
CROSS = (7, 0, 70, 3, 65, 0)
CROSS_KEYS = (50, 6, 0, 3, 20, 9)

CASES: tuple[Case, ...] = (
    Case(ODD, block=64),
    Case(ODD, block=64, activation="gelu"),
    Case(CROSS, CROSS_KEYS, block=64, causal=True),
    Case((), block=64),
    Case((0, 0), block=64),
    Case((1,), block=64),
    Case((5, 0), (0, 4), block=64),
    Case((90, 40), block=80, causal=True),  # tiles of 128
    Case((90, 40), block=128, activation="sigmoid", causal=True),
    Case((300,), (260,), block=130),  # too long for a tile: by the next kernel
    Case(ODD, block=16),
    Case(CROSS, CROSS_KEYS, block=20, activation="gelu", causal=True, heads=4, kv_heads=2),
    Case(ODD, block=1),
    Case(ODD, block=33, window=(9, 4)),
    Case(CROSS, CROSS_KEYS, block=24, window=(4, -1), causal=True, activation="silu"),
    *(Case(SHORT, block=32, dim=dim) for dim in (8, 24, 64, 80, 96, 128, 256)),
    Case(SHORT, block=32, dim=16, value_dim=24),
    Case(SHORT, block=32, dim=40, value_dim=8, activation="sigmoid", causal=True),
    Case(SHORT, block=32, heads=6, kv_heads=2),
    Case(SHORT, block=32, strided=True, causal=True),
    Case(SHORT, block=32, expanded_grad=True, heads=4, kv_heads=2, activation="relu2"),
    Case(SHORT, block=32, key_mask=True),
    Case(CROSS, CROSS_KEYS, block=64, key_mask=True, causal=True, activation="sigmoid"),
    Case(SHORT, block=32, out_scale="rows"),
    Case(SHORT, block=32, out_scale="one", activation="hardswish"),
    Case(SHORT, block=20, dropout=0.3, heads=4, kv_heads=2),
    Case(SHORT, block=20, dropout=0.3, activation="gelu_tanh", out_scale="rows", key_mask=True),
    Case(SHORT, block=32, offsets=torch.int64),
    Case(SHORT, block=32, activation=own_activation.NAME),
)


def in_half(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, dtype=dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case, dtype):
    check(in_half(case, dtype), "blocks", "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_forty_repeats_give_the_same_bits(activation):
    lengths = tuple(range(1, 2100, 35))
    case = Case(lengths, block=64, dim=128, activation=activation, heads=4)
    call = build(in_half(case, torch.bfloat16), torch.device("cuda"))
    first = run(call, "blocks")
    for _ in range(40):
        again = run(call, "blocks")
        assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(block=False), "it is for block-aligned attention only"),
        (dict(positions=True, bias=True), "it has no positions and no bias"),
        (dict(history=True), "it has no history"),
        (dict(dtype=torch.float32), "it computes in float16 and bfloat16, not torch.float32"),
        (dict(head_dim=264), "head dimension 264 is above 256"),
    ],
)
def test_what_it_refuses(change, reason):
    assert blocks.supports(HOPPER, BASE) is None
    assert blocks.supports(HOPPER, replace(BASE, **change)) == reason
    assert "runs on a CPU only" in str(blocks.supports(Target("cpu"), BASE))


def test_it_is_the_first_choice_for_blocks():
    for op in ("jagged_attention", "jagged_attention_backward"):
        assert kernels.choose(op, HOPPER, BASE).name == "blocks"
        assert kernels.choose(op, HOPPER, replace(BASE, block=False)).name != "blocks"


@pytest.mark.parametrize(
    ("block", "dim", "expected"),
    [(64, 128, (64, 64)), (16, 128, (64, 64)), (24, 64, (64, 48)), (33, 64, (64, 33))],
)
def test_a_tile_holds_whole_blocks(block, dim, expected):
    case = Case((5,), block=block, dim=dim, dtype=torch.bfloat16)
    tiles = blocks.tiling("backward", build(case, torch.device("cpu")).args, HOPPER)
    assert (tiles.rows, tiles.span) == expected


@pytest.mark.parametrize(("block", "dim"), [(129, 16), (128, 256)])
def test_a_tile_that_does_not_fit_is_for_the_next_kernel(block, dim):
    case = Case((5,), block=block, dim=dim, dtype=torch.bfloat16)
    assert blocks.tiling("backward", build(case, torch.device("cpu")).args, HOPPER) is None


@old_numpy
def test_under_the_interpreter(tmp_path):
    output = run_script(__file__, "interpret", cache=tmp_path, interpret=True)
    assert "0 failed" in output and not output.startswith("0 passed")


def test_compile_without_a_device(tmp_path):
    output = run_script(__file__, "compile", cache=tmp_path)
    for target in ("cuda:80", "cuda:89", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"):
        for kernel in ("forward_kernel", "backward_kernel"):
            assert f"{target} {kernel}" in output


COMPILED = (
    Case((70, 3), block=64, dim=128, activation="gelu"),
    Case((70,), (9,), block=20, dim=64, heads=4, kv_heads=2, window=(9, -1), dropout=0.1),
    Case((70,), block=128, dim=64, causal=True, key_mask=True),
    Case((70,), block=64, dim=256),
    Case((200,), block=128, dim=128),
)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_everywhere(blocks, [in_half(case, torch.bfloat16) for case in COMPILED], most=2)
    else:
        with mock.patch.object(blocks, "TAIL_PROGRAMS", 2):
            interpret("blocks", [case for case in CASES if case.dim <= 96])
