"""Every spelling of attention equals eager after the rewrite, in value and in every gradient."""

from __future__ import annotations

from typing import Any

import attention_spellings as spellings
import pytest
import torch
from torch.fx import GraphModule

from gemcompile.passes.attention import FuseAttention
from gemcompile.passes.canonicalize import Canonicalize
from gemcompile.testing import run_passes, trace

BATCH, LENGTH = 3, 16


def inputs(lengths: list[int], length: int = LENGTH) -> list[torch.Tensor]:
    shape = (len(lengths), length, spellings.WIDTH)
    qkv = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    return [*qkv, torch.tensor(lengths)]


def rewrite(gm: GraphModule) -> Any:
    return run_passes(gm, [Canonicalize(), FuseAttention()])


def compiled(fn: Any, args: list[torch.Tensor], dynamic: bool) -> tuple[Any, Any, GraphModule]:
    """A function that runs the rewritten graph on inputs like ``args``, and the report."""
    found: list[Any] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        from gemcompile.capture import capture

        aten = capture(gm, example_inputs)
        aten.meta["example_inputs"] = list(example_inputs)
        found.append((rewrite(aten), aten))
        return aten

    torch._dynamo.reset()
    run = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    run(*args)
    report, aten = found[0]
    return run, report, aten


def results(fn: Any, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and the gradients of q, k, v under one fixed upstream gradient."""
    out = fn(*args)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)
    grads = torch.autograd.grad(out, args[:3], upstream, allow_unused=True)
    return [out, *(torch.zeros(()) if g is None else g for g in grads)]


def assert_equal(fn: Any, run: Any, args: list[torch.Tensor]) -> None:
    for ours, theirs in zip(results(run, args), results(fn, args)):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def numel(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


# Spellings whose rows without a valid key are NaN in eager (gem gives 0 there, as torch's SDPA
# does), or hold what an additive finite mask leaves of the scores.
UNDEFINED = {
    "masked_fill_inf", "einsum_heads_first", "einsum_rows_first", "einsum_odd_orders",
    "einsum_with_ellipsis", "transposed_product", "bmm_heads_in_the_batch",
    "bmm_with_repeated_mask", "baddbmm_bias", "one_head", "exp_over_sum", "exp_over_sum_plain",
    "exp_times_mask", "exp_of_log_softmax", "causal_and_padding", "causal_by_added_triangle",
    "keys_transposed_beforehand", "learned_bias", "learned_temperature", "scalar_tensor_scale",
    "grouped_queries_expanded", "one_key_head_for_all", "mask_as_additive_log",
    "multihead_attention", "multihead_attention_weights_dropped", "multihead_attention_causal",
    "sdpa_float_mask", "bias_scaled_with_the_scores", "additive_as_in_bert", "in_place_throughout",
}  # fmt: skip


@pytest.mark.parametrize("name", spellings.REWRITTEN)
def test_spelling_equals_eager_at_all_lengths(name: str) -> None:
    fn = spellings.REWRITTEN[name]
    args = inputs([16, 5, 9])
    run, report, _ = compiled(fn, args, dynamic=True)
    report.expect(attention=1)
    assert not report.of("attention", "declined")
    assert_equal(fn, run, args)
    assert_equal(fn, run, inputs([1, 7, 3, 7], 7))
    if name not in UNDEFINED:
        assert_equal(fn, run, inputs([0, 16, 0]))


@pytest.mark.parametrize("name", spellings.REWRITTEN)
def test_spelling_equals_eager_with_static_shapes(name: str) -> None:
    fn = spellings.REWRITTEN[name]
    args = inputs([16, 5, 9])
    run, report, aten = compiled(fn, args, dynamic=False)
    report.expect(attention=1)
    assert_equal(fn, run, args)
    if name != "one_head":
        scores = BATCH * spellings.HEADS * LENGTH * LENGTH
        large = [n.name for n in aten.graph.nodes if n.op != "placeholder" and numel(n) >= scores]
        assert not large, f"tensors as large as the scores: {large}"


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", spellings.DECLINED)
def test_near_miss_is_declined_with_a_reason(name: str, dynamic: bool) -> None:
    fn, reason = spellings.DECLINED[name]
    args = inputs([16, 5, 9])
    run, report, _ = compiled(fn, args, dynamic)
    report.expect(attention=0)
    (site,) = report.of("attention", "declined")
    assert site.reason.startswith(reason)
    assert site.where.startswith("attention_spellings.py:")
    assert_equal(fn, run, args)


@pytest.mark.parametrize("name", ["masked_fill_inf", "exp_over_sum", "multihead_attention"])
def test_infinite_fills_give_zero_where_eager_gives_nan(name: str) -> None:
    fn = spellings.REWRITTEN[name]
    run, _, _ = compiled(fn, inputs([16, 5, 9]), dynamic=True)
    args = inputs([0, 16, 2])
    out, *grads = results(run, args)
    expected = spellings._mha.out_proj.bias if name == "multihead_attention" else 0
    assert torch.equal(out[0], torch.zeros_like(out[0]) + expected)
    assert all(g.isfinite().all() and not g[0].any() for g in grads)
    torch.testing.assert_close(out[1:], fn(*args)[1:], rtol=2e-5, atol=2e-5)


def test_tracing_helper_sees_the_same_graph() -> None:
    gm = trace(spellings.masked_fill_inf, *inputs([16, 5, 9]))
    rewrite(gm).expect(attention=1)
