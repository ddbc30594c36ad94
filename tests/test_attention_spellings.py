"""Every spelling of attention equals eager after the rewrite, in value and in every gradient."""

from __future__ import annotations

import attention_near_misses  # noqa: F401 (fills DECLINED)
import attention_spellings as spellings
import attention_spellings_places as places
import attention_spellings_wider as wider
import pytest
import sympy
import torch
from attention_helpers import Rewritten, only_site, results
from torch.fx import GraphModule

from gemcompile.options import Options
from gemcompile.passes.axes import expression

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
    "window_added_as_floats",
}  # fmt: skip


def inputs(lengths: list[int], length: int) -> list[torch.Tensor]:
    shape = (len(lengths), length, spellings.WIDTH)
    return [*(torch.randn(shape, requires_grad=True) for _ in range(3)), torch.tensor(lengths)]


def as_large_as_scores(gm: GraphModule, dense: bool = True) -> list[str]:
    """Values of at least B * H * L * L elements, by their symbolic sizes.

    Without ``dense`` those of L * L elements, too.
    """
    q = next(
        n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")
        if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].dim() == 3
    )  # fmt: skip
    batch, length = (expression(s) for s in q.shape[:2])
    found = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            numel = sympy.prod(expression(s) for s in value.shape)
            heads = sympy.cancel(numel / (batch * length**2))
            square = not dense and sympy.degree(sympy.expand(numel), length) > 1
            if square or heads.is_Integer and heads >= spellings.HEADS:
                found.append(node.name)
    return found


@pytest.mark.parametrize("name", spellings.REWRITTEN)
def test_spelling_equals_eager_at_all_lengths(name: str) -> None:
    run = Rewritten(spellings.REWRITTEN[name])
    run.check(inputs([16, 5, 9], 16))
    run.report.expect(attention=1)
    assert not run.report.of("attention", "declined")
    assert not run.new_guards
    assert not as_large_as_scores(run.graph, dense=name not in places.PLACED)
    if name in places.PLACED:
        assert only_site(run).details == places.PLACED[name]
    run.check(inputs([1, 7, 3, 7], 7))
    if name not in UNDEFINED:
        run.check(inputs([0, 16, 0], 16))
    assert run.graphs == 1


@pytest.mark.parametrize("name", spellings.REWRITTEN)
def test_spelling_equals_eager_where_all_sizes_are_equal(name: str) -> None:
    """B == L == H, static: axes cannot be told apart by their sizes."""
    run = Rewritten(spellings.REWRITTEN[name], dynamic=False)
    run.check(inputs([4, 1, 2, 3], spellings.HEADS))
    run.report.expect(attention=1)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "equal sizes"])
@pytest.mark.parametrize("name", spellings.DECLINED)
def test_near_miss_is_declined_with_a_reason(name: str, dynamic: bool) -> None:
    fn, reason = spellings.DECLINED[name]
    run = Rewritten(fn, dynamic)
    run.check(inputs([16, 5, 9], 16) if dynamic else inputs([4, 1, 2, 3], 4))
    run.report.expect(attention=0)
    (site,) = run.report.of("attention", "declined")
    assert site.reason.startswith(reason)
    assert site.where.startswith("attention_near_misses.py:")


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "equal sizes"])
@pytest.mark.parametrize("name", places.DENSE)
def test_mask_or_bias_that_the_op_has_no_argument_for_stays_a_tensor(
    name: str, dynamic: bool
) -> None:
    fn, details = places.DENSE[name]
    run = Rewritten(fn, dynamic)
    run.check(inputs([16, 5, 9], 16) if dynamic else inputs([4, 1, 2, 3], 4))
    assert only_site(run).status == "rewritten"
    assert only_site(run).details == details


def test_context_without_targets_is_rewritten_under_a_recorded_assumption() -> None:
    fn = spellings.REWRITTEN["hstu_context_without_targets"]
    run = Rewritten(fn)
    run.check(inputs([16, 5, 9], 16))
    assert only_site(run).reason == "assuming that no sequence ends among its contextual rows"
    strict = Rewritten(fn, options=Options(strict=True))
    strict.check(inputs([16, 1, 0], 16))
    why = "for some lengths it is no window and none of HSTU's masks"
    assert only_site(strict).reason == ""
    assert only_site(strict).details["mask kept as a tensor"] == why


@pytest.mark.parametrize("dynamic", [True, False])
def test_width_of_a_window_is_known_only_where_sizes_are(dynamic: bool) -> None:
    def half(q, k, v, lens):
        near = places.apart(q.shape[1]).abs() <= q.shape[1] // 2
        return places.softmax_over(q, k, v, near & spellings.keys(lens, q.mT))

    run = Rewritten(half, dynamic)
    run.check(inputs([6, 5, 4], 6))
    why = "places are compared with a number that varies from call to call"
    kept = {"mask": "keys", "bias": True, "mask kept as a tensor": why}
    assert only_site(run).details == (kept if dynamic else {"mask": "keys, window (3, 3)"})


@pytest.mark.parametrize("name", ["masked_fill_inf", "exp_over_sum", "multihead_attention"])
def test_infinite_fills_give_zero_where_eager_gives_nan(name: str) -> None:
    run = Rewritten(spellings.REWRITTEN[name])
    run(*inputs([16, 5, 9], 16))
    args = inputs([0, 16, 2], 16)
    out, *grads = results(run, args)
    expected = wider._mha.out_proj.bias if name == "multihead_attention" else 0
    assert torch.equal(out[0], torch.zeros_like(out[0]) + expected)
    assert all(g.isfinite().all() and not g[0].any() for g in grads)
    torch.testing.assert_close(out[1:], run.fn(*args)[1:], rtol=2e-5, atol=2e-5)
