"""The kernels for short queries: on a GPU where there is one, interpreted and compiled elsewhere.

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
    from gemcompile.lowering import attention_triton_short as short

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton package")
HOPPER = Target("cuda", 90)
BASE = AttentionRequest(torch.bfloat16, 4, 4, 128, 128, "softmax", False, short_queries=True)

QUERIES = (5, 1, 0, 16, 7, 0)
KEYS = (40, 0, 9, 70, 130, 0)
SELF = (0, 1, 33, 0, 17, 64, 0)
POOLED = (32, 32, 32), (260, 3, 100)

CASES: tuple[Case, ...] = (
    Case(QUERIES, KEYS),
    Case(SELF),
    Case(*POOLED, dim=128, activation="gelu"),
    Case(QUERIES, KEYS, causal=True),
    Case(SELF, causal=True, activation="silu"),
    Case(()),
    Case((0, 0), (3, 4)),
    Case((1,), (1,)),
    Case((5, 0), (0, 4)),
    *(Case(QUERIES, KEYS, dim=dim) for dim in (8, 24, 64, 80, 96, 128, 256)),
    Case(QUERIES, KEYS, dim=16, value_dim=24),
    Case(QUERIES, KEYS, dim=40, value_dim=8, activation="sigmoid"),
    Case(QUERIES, KEYS, heads=8, kv_heads=2),
    Case(QUERIES, KEYS, heads=3, kv_heads=1, causal=True, activation="gelu_tanh"),
    Case(QUERIES, KEYS, strided=True),
    Case(QUERIES, KEYS, expanded_grad=True, heads=4, kv_heads=2, activation="relu2"),
    Case(QUERIES, KEYS, key_mask=True),
    Case(QUERIES, KEYS, key_mask=True, causal=True, activation="sigmoid"),
    Case(QUERIES, KEYS, positions=True),
    Case(QUERIES, KEYS, out_scale="rows"),
    Case(SELF, out_scale="one", activation="silu"),
    Case(QUERIES, KEYS, dropout=0.3, heads=4, kv_heads=2),
    Case(QUERIES, KEYS, dropout=0.3, activation="hardswish", out_scale="rows", key_mask=True),
    Case(QUERIES, KEYS, offsets=torch.int64),
    Case(QUERIES, KEYS, activation=own_activation.NAME),
)
LONG_KEYS = Case((5, 1, 2, 0), (1600, 0, 30, 700))  # in chunks, where multiprocessors are idle
IN_CHUNKS = (
    LONG_KEYS,
    replace(LONG_KEYS, activation="gelu", heads=4, kv_heads=2, dropout=0.2, out_scale="rows"),
    replace(LONG_KEYS, causal=True, key_mask=True),
)


def in_half(case: Case, dtype: torch.dtype) -> Case:
    return replace(case, dtype=dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", (*CASES, *IN_CHUNKS), ids=str)
def test_on_a_gpu(case, dtype):
    check(in_half(case, dtype), "short", "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_forty_repeats_give_the_same_bits(activation):
    case = Case((32,) * 60, tuple(range(1, 2100, 35)), dim=128, activation=activation)
    call = build(replace(case, dtype=torch.bfloat16, heads=4), torch.device("cuda"))
    first = run(call, "short")
    for _ in range(40):
        again = run(call, "short")
        assert all(torch.equal(x, again[name]) for name, x in first.items())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(short_queries=False), "a group of heads has more than 64 queries in a sequence"),
        (dict(causal=True, positions=True), "it has no causal masks by positions"),
        (dict(bias=True, block=True), "it has no bias and no block"),
        (dict(dtype=torch.float32), "it computes in float16 and bfloat16, not torch.float32"),
        (dict(head_dim=264), "head dimension 264 is above 256"),
    ],
)
def test_what_it_refuses(change, reason):
    assert short.supports(HOPPER, BASE) is None
    assert short.supports(HOPPER, replace(BASE, **change)) == reason
    assert "runs on a CPU only" in str(short.supports(Target("cpu"), BASE))
    wide = replace(BASE, value_dim=256)
    assert short.supports(HOPPER, wide) is None
    assert "256 does not fit on chip" in str(short.supports(Target("cuda", 80), wide))


def test_it_is_the_first_choice_for_short_queries():
    for op in ("jagged_attention", "jagged_attention_backward"):
        assert kernels.choose(op, HOPPER, BASE).name == "short"
        assert kernels.choose(op, HOPPER, replace(BASE, short_queries=False)).name != "short"


@pytest.mark.parametrize(
    ("max_q", "heads", "kv_heads", "expected"),
    [(64, 4, 4, True), (65, 4, 4, False), (16, 8, 2, True), (17, 8, 2, False)],
)
def test_queries_are_counted_over_the_group(max_q, heads, kv_heads, expected):
    args = build(Case((3,), heads=heads, kv_heads=kv_heads), torch.device("cpu")).args
    assert replace(args, max_q=max_q).request().short_queries is expected


def test_chunks_deal_long_keys_to_idle_multiprocessors():
    args = build(Case((2, 2), (1000, 24)), torch.device("cpu")).args
    with mock.patch.object(short, "multiprocessors", lambda device: 132):
        assert short.chunking(args) == (512, 2)
        # A bound that is far too high costs nothing but room.
        assert short.chunking(replace(args, max_k=10**9)) == (512, 3)
    assert short.chunking(args) == (1024, 1)  # one multiprocessor has enough to do


@old_numpy
def test_under_the_interpreter(tmp_path):
    output = run_script(__file__, "interpret", cache=tmp_path, interpret=True)
    assert "0 failed" in output and not output.startswith("0 passed")


def test_compile_without_a_device(tmp_path):
    output = run_script(__file__, "compile", cache=tmp_path)
    for target in ("cuda:80", "cuda:89", "cuda:90", "cuda:100", "hip:gfx942", "hip:gfx950"):
        for kernel in ("forward_kernel", "backward_kernel", "combine_kernel"):
            assert f"{target} {kernel}" in output


COMPILED = (
    Case((32, 3), (70, 9), dim=128, activation="gelu"),
    Case((5,), (70,), dim=64, heads=4, kv_heads=2, causal=True, key_mask=True, dropout=0.1),
    Case((2,), (2000,), dim=80),  # in chunks
    Case((64, 3), (70, 9), dim=256, out_scale="rows"),
)


if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_everywhere(short, [in_half(case, torch.bfloat16) for case in COMPILED], most=3)
    else:
        # Several chunks for short keys too.
        with mock.patch.multiple(short, SMALLEST_CHUNK=64, TAIL_PROGRAMS=2):
            interpret("short", [case for case in CASES if case.dim <= 96])
