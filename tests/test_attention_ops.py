"""The attention ops: every kernel on the edge suite, the public function, opcheck, FLOPs."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import CASES, OPS, Case, build, check, forced, run
from torch.utils.flop_counter import FlopCounterMode

import gemcompile.lowering  # noqa: F401  (registers the kernels)
from gemcompile.ops import jagged_attention, kernels
from gemcompile.ops.padded import padded_attention
from gemcompile.target import Target

CPU, CUDA = Target("cpu"), Target("cuda", 90)
CPU_ONLY = Case((3, 0, 9), dtype=torch.float64, bias="1H", dropout=0.2, causal=True)


def kernel_names(target: Target, case: Case) -> list[str]:
    """The kernels that run ``case`` forward and backward."""
    refused = {name for op in OPS for name, _ in kernels.why_not(op, target, case.request())}
    return [k.name for k in kernels.kernels_of(OPS[0]) if k.name not in refused]


def pairs(target: Target, cases: tuple[Case, ...]) -> list:
    return [
        pytest.param(case, name, id=f"{name}-{case}")
        for case in cases
        for name in kernel_names(target, case)
    ]


@pytest.mark.parametrize(("case", "kernel"), pairs(CPU, (*CASES, CPU_ONLY)))
def test_kernel_on_cpu(case, kernel):
    check(case, kernel)


@pytest.mark.cuda
@pytest.mark.parametrize(("case", "kernel"), pairs(CUDA, CASES))
def test_kernel_on_cuda(case, kernel):
    check(case, kernel, "cuda")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_kernels_on_drawn_cases(data):
    lengths = st.lists(st.integers(0, 70), max_size=6)
    q_lengths = data.draw(lengths)
    same = data.draw(st.booleans())
    k_lengths = q_lengths if same else [data.draw(st.integers(0, 70)) for _ in q_lengths]
    heads = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]))
    case = Case(
        tuple(q_lengths),
        None if same else tuple(k_lengths),
        heads=heads[0],
        kv_heads=heads[1],
        dim=data.draw(st.sampled_from([8, 16, 24])),
        activation=data.draw(st.sampled_from(["softmax", "silu", "sigmoid"])),
        causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([None, None, (9, 4), (-1, 30), (1, 0)])),
        block=data.draw(st.sampled_from([0, 0, 7, 32])),
        key_mask=data.draw(st.booleans()),
        positions=data.draw(st.booleans()),
        strided=data.draw(st.booleans()),
        bias=data.draw(st.sampled_from([None, "1H", "BH", "tableH"])),
        seed=data.draw(st.integers(0, 1000)),
    )
    if data.draw(st.booleans()):
        case = replace(case, causal=True, targets=data.draw(st.sampled_from([0, 8, 50])))
        case = replace(case, contextual=data.draw(st.sampled_from([0, 3, 50])))
    for kernel in kernel_names(CPU, case):
        check(case, kernel)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("case", "kernel"),
    pairs(
        CUDA,
        (
            Case((70, 0, 130), dtype=torch.bfloat16, dim=64, causal=True),
            Case((300, 64), dtype=torch.bfloat16, dim=64, bias="tableH", key_mask=True),
            Case((300, 64), dtype=torch.bfloat16, dim=64, block=64),
            Case((30, 4), (900, 0), dtype=torch.bfloat16, dim=128, activation="silu"),
        ),
    ),
)
def test_no_kernel_waits_for_the_device(case, kernel):
    if kernel == "reference":
        pytest.skip("the reference reads the offsets, and runs where no kernel can")
    call = build(case, torch.device("cuda"))
    run(call, kernel, deterministic=False)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(call, kernel)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_offsets_past_two_to_the_31_elements():
    """The last sequence of a batch whose tensors have 2.6e9 elements each."""
    length, batch, heads, dim = 512, 9800, 8, 64
    rows = length * batch
    assert rows * heads * dim > 2**31
    one = torch.randn(4, length, heads, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = (x.repeat(batch, 1, 1) for x in one)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    offsets = torch.arange(batch + 1, device="cuda") * length
    with forced("triton"):
        out = jagged_attention(q, k, v, offsets, max_q=length, max_k=length)
        gradients = torch.autograd.grad(out, leaves, dout)
    for x in (out, *gradients):
        assert torch.equal(x[-length:], x[:length])
        assert bool(x[-length:].abs().sum() > 0)


# The public function.


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def padded_softmax(q, k, v, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), scale=scale
    )[0].transpose(0, 1)


def test_scale_defaults():
    q, offsets = rows(6, 2, 16), torch.tensor([0, 6])
    torch.testing.assert_close(jagged_attention(q, q, q, offsets), padded_softmax(q, q, q))
    linear = jagged_attention(q, q, q, offsets, activation="identity")
    scores = torch.einsum("ihd,jhd->hij", q, q)
    torch.testing.assert_close(linear, torch.einsum("hij,jhd->ihd", scores, q))


def test_shared_queries_serve_every_sequence():
    q, k, offsets = rows(3, 2, 8), rows(11, 2, 8), torch.tensor([0, 4, 4, 11])
    out = jagged_attention(q, k, k, None, offsets)
    assert out.shape == (3, 3, 2, 8)
    torch.testing.assert_close(out[0], padded_softmax(q, k[:4], k[:4]))
    torch.testing.assert_close(out[1], torch.zeros(3, 2, 8))
    torch.testing.assert_close(out[2], padded_softmax(q, k[4:], k[4:]))


@pytest.mark.parametrize(
    "scale", [0.5, torch.tensor([0.5, 2.0]), torch.tensor([0.5] * 3 + [2.0] * 4)]
)
def test_out_scale_by_number_sequence_and_row(scale):
    q, offsets = rows(7, 2, 8), torch.tensor([0, 3, 7])
    plain = jagged_attention(q, q, q, offsets, activation="silu")
    factor = torch.tensor([0.5] * 3 + [0.5 if isinstance(scale, float) else 2.0] * 4)
    scaled = jagged_attention(q, q, q, offsets, activation="silu", out_scale=scale)
    torch.testing.assert_close(scaled, plain * factor[:, None, None])


def mask_of(length: int, keys: int | None = None, **options) -> torch.Tensor:
    """bool [length, keys]: what an attention call lets its queries see."""
    keys = length if keys is None else keys
    q, k = torch.zeros(length, 1, 8), torch.zeros(keys, 1, 8)
    offsets, k_offsets = torch.tensor([0, length]), torch.tensor([0, keys])
    v = torch.eye(keys)[:, None]
    return jagged_attention(q, k, v, offsets, k_offsets, activation="sigmoid", **options)[:, 0] > 0


@pytest.mark.parametrize(("length", "keys"), [(50, 50), (9, 40), (40, 9)])
def test_windows_and_blocks(length, keys):
    i, j = torch.arange(length)[:, None], torch.arange(keys)
    at = i + keys - length
    options = dict(length=length, keys=keys)
    assert torch.equal(mask_of(window=(3, 1), **options), (at - 3 <= j) & (j <= at + 1))
    assert torch.equal(mask_of(window=(None, 2), **options), j <= at + 2)
    assert torch.equal(mask_of(window=(4, -1), causal=True, **options), (at - 4 <= j) & (j <= at))
    assert mask_of(window=(None, None), **options).all()
    assert torch.equal(mask_of(block=7, **options), i // 7 == j // 7)


def hstu_mask(n: int, targets: int, contextual: int, window: int) -> torch.Tensor:
    """The mask as generative-recommenders builds it, entry by entry."""
    highest = n - targets - (contextual - 1 if contextual > 0 else 0)
    ids = [max(x - contextual + 1, 0) if contextual > 0 else x for x in range(n)]
    ids = [min(x, highest) for x in ids]

    def valid(i: int, j: int) -> bool:
        seen = i == j or ids[i] > ids[j]
        if window > 0:
            seen = seen and ids[i] - ids[j] <= window
        return seen or (contextual > 0 and ids[i] == 0 and ids[j] < highest)

    return torch.tensor([[valid(i, j) for j in range(n)] for i in range(n)])


@pytest.mark.parametrize(("lq", "lk"), [(7, 7), (3, 9), (9, 4)])
def test_a_table_of_relative_places_is_a_dense_bias(lq, lk):
    q, k = rows(lq, 2, 8), rows(lk, 2, 8)
    table = rows(2, 2 * 10 - 1).requires_grad_()
    i, j = torch.arange(lq)[:, None] + lk - lq, torch.arange(lk)
    dense = table[:, 9 + j - i]
    offsets = torch.tensor([0, lq]), torch.tensor([0, lk])
    out, expected = (
        jagged_attention(q, k, k, *offsets, bias=b, max_q=lq, max_k=lk) for b in (table, dense)
    )
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(x.square().sum(), table)[0] for x in (out, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("targets", [0, 1, 6, 20])
@pytest.mark.parametrize("contextual", [0, 1, 5])
@pytest.mark.parametrize("window", [0, 7])
def test_targets_and_context_follow_hstu(targets, contextual, window):
    options = dict(
        num_targets=torch.tensor([targets]),
        num_contextual=contextual,
        window=(window, None) if window else None,
    )
    expected = hstu_mask(20, targets, contextual, window)
    assert torch.equal(mask_of(20, **options), expected)
    # The last queries alone see what they see among all.
    assert torch.equal(mask_of(8, 20, **options), expected[12:])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 6], r"q_offsets\[0\] is 1: offsets must start at 0"),
        ([0, 4, 3], r"q_offsets\[2\] is 3, below q_offsets\[1\] = 4"),
        ([0, 4, 7], r"q_offsets\[2\] is 7, past the 6 rows"),
    ],
)
def test_bad_offsets_are_named(offsets, message):
    q = rows(6, 2, 8)
    with pytest.raises(ValueError, match=message):
        jagged_attention(q, q, q, torch.tensor(offsets))


@pytest.mark.cuda
def test_offsets_on_cuda_are_read_only_when_asked(monkeypatch):
    q = rows(6, 2, 8).cuda()
    offsets = torch.tensor([0, 4, 7], device="cuda")
    monkeypatch.setenv("GEM_CHECK", "1")
    with pytest.raises(ValueError, match="past the 6 rows"):
        jagged_attention(q, q, q, offsets)


Q, OFFSETS = rows(6, 4, 8), torch.tensor([0, 6])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q=Q[0]), ValueError, r"q must be \[rows, heads, dim\]"),
        (dict(k=Q.double()), TypeError, "one floating type; k is torch.float64"),
        (dict(q=Q.int(), k=Q.int(), v=Q.int()), TypeError, "one floating type"),
        (dict(k=Q[:, :3], v=Q[:, :3]), ValueError, "3 key heads must divide the 4 query heads"),
        (dict(v=Q[:5]), ValueError, "same rows and heads"),
        (dict(k=rows(6, 4, 16)), ValueError, "q has head dimension 8, k has 16"),
        (dict(q=rows(6, 1, 300)), ValueError, "head dimension 300; at most 256"),
        (dict(q_offsets=OFFSETS.float()), TypeError, r"int32 or int64 \[B \+ 1\]"),
        (dict(k_offsets=torch.tensor([0, 3, 6])), ValueError, "describe the same batch"),
        (dict(activation="swish"), ValueError, "activation must be one of softmax, gelu"),
        (dict(dropout_p=0.1), ValueError, "needs a dropout_seed"),
        (dict(dropout_p=1.0), ValueError, "at least 0 and below 1"),
        (dict(dropout_p=0.1, dropout_seed=torch.tensor(3)), ValueError, r"int64 \[1\]"),
        (dict(bias=rows(4, 3, 6)), ValueError, r"bias must be \[H or 1, max_q, max_k\]"),
        (dict(out_scale=rows(5)), ValueError, "B=1 or Tq=6 entries"),
        (dict(q_offsets=None), ValueError, "need k_offsets"),
        (dict(window=(3, -2)), ValueError, r"window must be \(left, right\)"),
        (dict(block=0), ValueError, "block must be at least 1"),
        (dict(num_targets=OFFSETS), TypeError, r"num_targets must be int32 or int64 \[B\]"),
        (dict(num_contextual=rows(1)), TypeError, "num_contextual must be int32 or int64"),
        (dict(rotary=object()), NotImplementedError, "rotary is not implemented"),
        (dict(bias=object()), TypeError, "bias must be a floating tensor"),
        (dict(bias=rows(4, 10)), ValueError, r"\[H or 1, 2 \* m - 1\] .* H=4 and m=6"),
        (dict(bias=rows(3, 11)), ValueError, r"got \[3, 11\]"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = dict(q=Q, k=Q, v=Q, q_offsets=OFFSETS) | change
    with pytest.raises(error, match=message):
        jagged_attention(**arguments)


# Dropout, seen through v = identity: the output is the matrix of probabilities itself.


def probabilities(p: float, seed: int, length: int = 64, heads: int = 4) -> torch.Tensor:
    """[rows, heads, keys] of uniform attention after dropout."""
    q = torch.zeros(length, heads, length)
    v = torch.eye(length)[:, None].expand(length, heads, length)
    offsets, seeds = torch.tensor([0, length]), torch.tensor([seed])
    return jagged_attention(q, q, v, offsets, dropout_p=p, dropout_seed=seeds) * length


def test_dropout_rate_scale_and_seed():
    kept = probabilities(0.3, seed=1)
    torch.testing.assert_close(kept.unique(), torch.tensor([0.0, 1 / 0.7]))
    count = kept.numel()
    dropped = int((kept == 0).sum())
    assert abs(dropped - 0.3 * count) < 4 * math.sqrt(count * 0.3 * 0.7)
    assert torch.equal(kept, probabilities(0.3, seed=1))
    assert not torch.equal(kept, probabilities(0.3, seed=2))
    assert not torch.equal(kept[:, 0], kept[:, 1]), "heads share a mask"
    assert not torch.equal(kept[0], kept[1]), "rows share a mask"


def test_backward_repeats_the_mask_of_forward():
    length, heads = 32, 2
    q = torch.zeros(length, heads, 8)
    v = torch.eye(length)[:, None].expand(length, heads, length).clone().requires_grad_()
    options = dict(dropout_p=0.4, dropout_seed=torch.tensor([7]))
    out = jagged_attention(q, q, v, torch.tensor([0, length]), **options)
    # dv = P^T dout: with dout = identity it is the transpose of the probabilities.
    dout = torch.eye(length)[:, None].expand(length, heads, length)
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close(dv, out.permute(2, 1, 0))


# The padded op.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("empty", ["zero", "mean", "assume"])
def test_padded_attention_equals_masked_softmax(causal, empty):
    q, k, v = rows(3, 9, 4, 8), rows(3, 9, 2, 8), rows(3, 9, 2, 8)
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) > 0.5
    mask[1] = False
    mask[2, 0] = False
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 0.4
    visible = mask[:, None, None, :].expand(3, 1, 9, 9)
    visible = visible & torch.ones(9, 9, dtype=torch.bool).tril() if causal else visible
    fill = -1e9 if empty == "mean" else -torch.inf
    p = scores.masked_fill(~visible, fill).softmax(-1).nan_to_num(0)
    expected = torch.einsum("bhij,bjhd->bihd", p, v.repeat_interleave(2, 2))
    out = padded_attention(q, k, v, mask, None, None, None, "softmax", 0.4, causal, empty, 0.0)
    torch.testing.assert_close(out, expected)


def test_padded_attention_takes_broadcast_bias_and_row_scale():
    q, bias, scale = rows(2, 5, 2, 8), rows(1, 2, 1, 5).requires_grad_(), rows(2, 5)
    out = padded_attention(q, q, q, None, bias, scale, None, "silu", 0.4, False, "zero", 0.0)
    scores = torch.einsum("bihd,bjhd->bhij", q, q) * 0.4 + bias
    expected = torch.einsum("bhij,bjhd->bihd", torch.nn.functional.silu(scores), q)
    expected = expected * scale[..., None, None]
    torch.testing.assert_close(out, expected)
    (got,) = torch.autograd.grad(out.sum(), bias)
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), bias)[0])


# The ops as PyTorch sees them.

OPCHECKED = (
    Case((5, 0, 9), causal=True),
    Case((5, 0, 9), kv_heads=1, bias="1H", out_scale="rows", activation="silu", dropout=0.2),
    Case((5, 0, 9), key_mask=True, positions=True, causal=True),
    Case((5, 0, 9), causal=True, window=(4, -1), block=6, targets=2, contextual=2, bias="tableH"),
)


@pytest.mark.parametrize("case", OPCHECKED, ids=str)
def test_opcheck(case):
    # opcheck compares outputs, and NaN is not equal to NaN: the unpoisoned call.
    truth = build(case, torch.device("cpu")).truth
    leaves = {n: getattr(truth, n).float().requires_grad_() for n in ("q", "k", "v")}
    if truth.bias is not None:
        leaves["bias"] = truth.bias.float().requires_grad_()
    args = replace(truth, **leaves)
    values = [getattr(args, f.name) for f in fields(args)]
    torch.library.opcheck(torch.ops.gem.jagged_attention.default, tuple(values))
    out, lse = torch.ops.gem.jagged_attention(*values)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in values]
    saved = (out.detach(), lse, truth.bias is not None)
    backward = (torch.ones_like(out), *detached[:17], *saved, *detached[17:])
    torch.library.opcheck(torch.ops.gem.jagged_attention_backward.default, backward)


def test_opcheck_padded():
    q = rows(2, 5, 2, 8).requires_grad_()
    mask = torch.arange(5) < torch.tensor([[3], [5]])
    arguments = (q, q, q, mask, None, None, None, "softmax", 0.3, True, "mean", 0.0)
    torch.library.opcheck(torch.ops.gem.padded_attention.default, arguments)


def test_flops_count_forward_and_backward():
    q = rows(10, 2, 8).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        jagged_attention(q, q, q, torch.tensor([0, 4, 10]), max_q=6, max_k=6).sum().backward()
    one = 2 * 10 * 2 * 6 * 8  # one product of all rows with the bound of 6 keys
    assert counter.get_total_flops() == (2 + 5) * one


# The choice of a kernel.


def test_softmax_goes_to_the_flash_kernel_and_silu_does_not():
    request = Case((100,)).request()
    assert kernels.choose(OPS[0], CPU, request).name == "cpu_flash"
    assert kernels.choose(OPS[0], CPU, replace(request, activation="silu")).name == "cpu_blocked"
    half = replace(request, dtype=torch.bfloat16, head_dim=96, value_dim=96)
    assert kernels.choose(OPS[0], CUDA, half).name == "varlen"
    assert kernels.choose(OPS[0], CUDA, replace(half, large=True)).name == "triton"
    assert kernels.choose(OPS[0], CUDA, request).name == "triton"
    assert kernels.choose(OPS[0], CUDA, replace(half, short_queries=True)).name == "short"
    expected = {"window": "triton", "block": "blocks", "history": "triton"}
    for feature, name in expected.items():
        masked = replace(half, head_dim=64, value_dim=64, causal=feature == "history")
        assert kernels.choose(OPS[0], CUDA, replace(masked, **{feature: True})).name == name
        assert kernels.choose(OPS[0], CPU, replace(request, **{feature: True})).name != "cpu_flash"
    reasons = dict(kernels.why_not(OPS[0], CPU, replace(request, activation="silu")))
    assert reasons["cpu_flash"] == "it computes softmax, not silu"


def test_a_forced_kernel_that_cannot_run_says_why():
    with pytest.raises(RuntimeError, match="varlen.*it runs on cuda from sm_80 on, not on cpu"):
        run(build(Case((4,)), torch.device("cpu")), "varlen")
