"""Masks and biases made of places: windows, blocks, HSTU's masks, tables of relative places.

``@placed(mask, bias)`` notes what the report must say of a site; `DENSE` holds those that stay
tensors of L x L numbers, with what the report says of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_spellings import (
    DEVICE,
    DIM,
    HEADS,
    ROOT,
    WIDTH,
    Spelling,
    join,
    keys,
    rewritten,
    split_all,
    valid,
)
from torch import Tensor

PLACED: dict[str, dict[str, object]] = {}
DENSE: dict[str, tuple[Spelling, dict[str, object]]] = {}


def placed(mask: str, bias: str | None = None) -> Callable[[Spelling], Spelling]:
    def note(f: Spelling) -> Spelling:
        PLACED[f.__name__] = {"mask": mask} | ({"bias": bias} if bias else {})
        return rewritten(f)

    return note


def dense(why: str, what: str = "mask", mask: str = "keys") -> Callable[[Spelling], Spelling]:
    def note(f: Spelling) -> Spelling:
        DENSE[f.__name__] = f, {"mask": mask, "bias": True, f"{what} kept as a tensor": why}
        return f

    return note


def softmax_over(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT).masked_fill(~visible, -1e9)
    return join(s.softmax(-1) @ v)


def ij(n: int) -> tuple[Tensor, Tensor]:
    i = torch.arange(n, device=DEVICE)
    return i[:, None], i[None, :]


# --- Windows. ----------------------------------------------------------------------------------


@placed("keys, window (3, 3)")
def window_by_distance(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, ((i - j).abs() <= 3) & keys(lens, q.mT))


@placed("keys, causal, window (2, any)")
def window_back_by_two_comparisons(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, (i - j >= 0) & (i - j < 3) & keys(lens, q.mT))


@placed("keys, causal, window (4, any)")
def window_of_shifted_places(q, k, v, lens):
    i, j = ij(q.shape[1])
    hidden = torch.logical_not((j > i - 5) & (j <= i)).unsqueeze(0).expand(q.shape[0], -1, -1)
    return softmax_over(q, k, v, ~hidden[:, None] & keys(lens, q.mT))


@placed("keys, window (3, 1)")
def window_of_two_triangles(q, k, v, lens):
    ones = torch.ones(q.shape[1], q.shape[1], device=DEVICE)
    band = torch.triu(ones, diagonal=-3) * torch.tril(ones, 1)
    return softmax_over(q, k, v, band.bool() & keys(lens, q.mT))


@placed("causal, window (3, any)")
def sdpa_window(q, k, v, lens):
    """No padding at all: keys outside the window are not even read."""
    gi, gj = torch.meshgrid(
        torch.arange(q.shape[1], device=DEVICE),
        torch.arange(q.shape[1], device=DEVICE),
        indexing="ij",
    )
    mask = (gj <= gi) & ~(gi - gj > 3)
    return join(F.scaled_dot_product_attention(*split_all(q, k, v), attn_mask=mask))


@placed("keys, window (any, 2)")
def window_added_as_floats(q, k, v, lens):
    i, j = ij(q.shape[1])
    bias = torch.zeros(q.shape[1], q.shape[1], device=DEVICE).masked_fill(j - i > 2, -math.inf)
    pad = (1.0 - keys(lens, q.mT).float()) * -1e9
    q, k, v = split_all(q, k, v)
    return join((q @ k.mT / ROOT + bias + pad).softmax(-1) @ v)


@placed("keys, causal, window (3, any)")
def window_multiplied_onto_silu(q, k, v, lens):
    i, j = ij(q.shape[1])
    q, k, v = split_all(q, k, v)
    near = torch.where((i >= j) & (i - j < 4), 1.0, 0.0)
    return join(F.silu(q @ k.mT) * near * keys(lens, q.mT) / 7 @ v)


@placed("keys, window (1, 1)")
def window_clamped(q, k, v, lens):
    """Odd, but |i - j| clamped to 5 is below 2 where |i - j| is."""
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, ((j - i).clamp(-5, 5).abs() < 2) & keys(lens, q.mT))


# --- Blocks. -----------------------------------------------------------------------------------


@placed("keys, blocks of 4")
def blocks_by_floor_division(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, (i // 4 == j // 4) & keys(lens, q.mT))


@placed("keys, causal, blocks of 8")
def blocks_by_shifts_and_causal(q, k, v, lens):
    block = torch.arange(q.shape[1], device=DEVICE) >> 3
    n = q.shape[1]
    other = block[:, None] != block[None, :]
    hidden = (
        other | torch.triu(torch.ones(n, n, dtype=torch.bool, device=DEVICE), 1) | ~keys(lens, q.mT)
    )
    return softmax_over(q, k, v, ~hidden)


@placed("blocks of 4")
def blocks_of_relu(q, k, v, lens):
    block = torch.div(torch.arange(q.shape[1], device=DEVICE), 4, rounding_mode="floor")
    q, k, v = split_all(q, k, v)
    return join((q @ k.mT).relu() * (block[:, None] == block).to(q.dtype) @ v)


# --- HSTU. -------------------------------------------------------------------------------------


def hstu_mask(
    n: int, lens: Tensor, targets: Tensor | None, contextual: int = 0, window: int = 0
) -> Tensor:
    """bool [B, n, n], after the rule of github.com/meta-recsys/generative-recommenders."""
    ids = torch.arange(0, n, device=DEVICE).view(1, n)
    max_ids = lens.view(-1, 1, 1)
    if contextual > 0:
        ids = torch.clamp(ids - contextual + 1, min=0)
        max_ids = max_ids - contextual + 1
    if targets is not None:
        max_ids = max_ids - targets.view(-1, 1, 1)
        ids = torch.clamp(ids, max=max_ids)
        rows = ids.view(-1, n, 1).expand(-1, n, n)
        cols = ids.view(-1, 1, n).expand(-1, n, n)
    else:
        rows = ids.view(n, 1).expand(n, n)
        rows, cols = rows.view(1, n, n), rows.t().view(1, n, n)
    apart = rows - cols
    mask = torch.eye(n, dtype=torch.bool, device=DEVICE).view(1, n, n) | (apart > 0)
    if window > 0:
        mask = torch.logical_and(mask, apart <= window)
    if contextual > 0:
        mask = torch.logical_or(mask, torch.logical_and(rows == 0, cols < max_ids))
    return mask


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    n = q.shape[1]
    q, k, v = (x.view(*x.shape[:2], HEADS, DIM) for x in (q, k, v))
    a = F.silu(torch.einsum("bnhd,bmhd->bhnm", q, k)) / n
    a = a * mask.unsqueeze(1)
    return torch.einsum("bhnm,bmhd->bnhd", a, v).reshape(q.shape[0], n, WIDTH)


@placed("causal, targets")
def hstu_targets(q, k, v, lens):
    return hstu_attention(q, k, v, hstu_mask(q.shape[1], lens, lens // 3))


@placed("causal, window (3, any), targets, 2 contextual")
def hstu_targets_context_and_window(q, k, v, lens):
    mask = hstu_mask(q.shape[1], lens, lens // 3, contextual=2, window=3)
    return hstu_attention(q, k, v, mask)


@placed("keys, causal, window (3, any)")
def hstu_without_targets(q, k, v, lens):
    mask = hstu_mask(q.shape[1], lens, None, window=3) & valid(lens, q.shape[1])[:, None, :]
    return hstu_attention(q, k, v, mask)


@placed("keys, causal, targets, 2 contextual")  # no targets, but a history that ends
def hstu_context_without_targets(q, k, v, lens):
    lens = lens.clamp(min=2)  # the contextual rows are always there
    mask = hstu_mask(q.shape[1], lens, None, contextual=2) & valid(lens, q.shape[1])[:, None, :]
    return hstu_attention(q, k, v, mask)


@placed("causal, targets")
def targets_written_out(q, k, v, lens):
    """Another spelling of the same mask: no clamps."""
    i, j = ij(q.shape[1])
    history = (lens - lens // 4)[:, None, None]
    mask = (i == j) | (j < i) & (j < history)
    return softmax_over(q, k, v, mask[:, None])


# --- Relative places. --------------------------------------------------------------------------


def table(k: Tensor, buckets: int = 40) -> Tensor:
    """[buckets, HEADS], made of an input so that its gradient is looked at."""
    return (k[0, :1, :HEADS] * torch.linspace(-1, 1, buckets, device=DEVICE)[:, None]).sin()


def apart(n: int) -> Tensor:
    i, j = ij(n)
    return j - i


def softmax_with(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, bias: Tensor) -> Tensor:
    q, k, v = split_all(q, k, v)
    s = (q @ k.mT / ROOT + bias).masked_fill(~keys(lens, q.mT), -1e9)
    return join(s.softmax(-1) @ v)


def t5_bucket(relative: Tensor, buckets: int = 32, distance: int = 128) -> Tensor:
    buckets //= 2
    found = (relative > 0).to(torch.long) * buckets
    relative = relative.abs()
    exact = buckets // 2
    large = torch.log(relative.float() / exact) / math.log(distance / exact) * (buckets - exact)
    large = exact + large.to(torch.long)
    large = torch.min(large, torch.full_like(large, buckets - 1))
    found += torch.where(relative < exact, relative, large)
    return found


@placed("keys", "relative")
def bias_in_t5_buckets(q, k, v, lens):
    bias = F.embedding(t5_bucket(apart(q.shape[1])), table(k)).permute(2, 0, 1).unsqueeze(0)
    return softmax_with(q, k, v, lens, bias)


@placed("keys", "relative")
def bias_from_columns(q, k, v, lens):
    n = q.shape[1]
    return softmax_with(q, k, v, lens, table(k).t()[:, apart(n) + n - 1])


@placed("keys", "relative")
def bias_by_index_select(q, k, v, lens):
    n = q.shape[1]
    index = (apart(n) + n - 1).view(-1)
    bias = torch.index_select(table(k), 0, index).view(n, n, HEADS).permute(2, 0, 1)
    return softmax_with(q, k, v, lens, bias.contiguous()[None])


@placed("keys", "relative")
def bias_of_all_heads_clamped_and_scaled(q, k, v, lens):
    row = table(k, 11)[:, 0]
    bias = 4 * torch.sigmoid(row[apart(q.shape[1]).clamp(-5, 5) + 5])
    return softmax_with(q, k, v, lens, bias)


@placed("keys", "relative")
def bias_by_slopes(q, k, v, lens):
    slopes = k[0, 0, :HEADS].sigmoid()
    return softmax_with(q, k, v, lens, -slopes[:, None, None] * apart(q.shape[1]).abs())


@placed("keys, causal, window (5, any)", "relative")
def bias_and_window_of_silu(q, k, v, lens):
    n = q.shape[1]
    mask = ((apart(n) <= 0) & (apart(n) >= -5) & keys(lens, q.mT)).float()
    bias = table(k)[torch.bucketize(-apart(n), torch.tensor([1, 2, 4, 8], device=DEVICE))].permute(
        2, 0, 1
    )
    q, k, v = split_all(q, k, v)
    return join(F.silu(q @ k.mT + bias) * mask @ v)


# --- What stays a tensor. ------------------------------------------------------------------------


@dense("the distance of two places is not compared with a constant")
def window_of_a_tensor_width(q, k, v, lens):
    i, j = ij(q.shape[1])
    near = (i - j).abs() <= (lens // 2)[:, None, None]
    return softmax_over(q, k, v, near[:, None] & keys(lens, q.mT))


@dense("queries and keys are not equally many")
def causal_from_the_first_key(q, k, v, lens):
    k, v = k[:, :-2], v[:, :-2]
    (i, _), (_, j) = ij(q.shape[1]), ij(k.shape[1])
    return softmax_over(q, k, v, (j <= i) & keys(lens, k.mT))


@dense("queries and keys are not equally many")
def causal_up_to_the_last_key(q, k, v, lens):
    k, v = k[:, :-2], v[:, :-2]
    (i, _), (_, j) = ij(q.shape[1]), ij(k.shape[1])
    return softmax_over(q, k, v, (j <= i + (k.shape[1] - q.shape[1])) & keys(lens, k.mT))


@dense("aten.floor_divide is taken of places")
def blocks_shifted_by_one(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, (i // 4 == (j + 1) // 4) & keys(lens, q.mT))


@dense("aten.remainder.Scalar is taken of places")
def every_fourth_key(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, (i % 4 == j % 4) & keys(lens, q.mT))


@dense("aten.remainder.Scalar is taken of places", mask="keys, window (6, 6)")
def dilated_window(q, k, v, lens):
    i, j = ij(q.shape[1])
    near = ((i - j).abs() <= 6) & ((i - j) % 2 == 0)
    return softmax_over(q, k, v, near & keys(lens, q.mT))


@dense("aten.mul.Tensor is taken of places")
def product_of_places(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, (i * j <= 9) & keys(lens, q.mT))


@dense("places are added or multiplied")
def antidiagonal_window(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, ((i + j).abs() <= 9) & keys(lens, q.mT))


@dense("for some lengths it is no window and none of HSTU's masks")
def window_with_global_tokens(q, k, v, lens):
    i, j = ij(q.shape[1])
    near = ((i - j).abs() <= 2) | (j < 2) | (i < 2)
    return softmax_over(q, k, v, near & keys(lens, q.mT))


@dense("for some lengths it is no window and none of HSTU's masks")
def window_without_the_diagonal(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_over(q, k, v, (i != j) & keys(lens, q.mT))


@dense("for some lengths it is no window and none of HSTU's masks", mask="none")
def hstu_with_one_target_fewer_seen(q, k, v, lens):
    """row - col > 1 instead of > 0: off by one within the history."""
    n = q.shape[1]
    ids = torch.arange(n, device=DEVICE).clamp(max=(lens - lens // 3)[:, None])
    rows, cols = ids[:, :, None], ids[:, None, :]
    mask = torch.eye(n, dtype=torch.bool, device=DEVICE) | (rows - cols > 1)
    return hstu_attention(q, k, v, mask)


@dense("for some lengths it is no window and none of HSTU's masks", mask="none")
def hstu_context_without_targets_or_key_mask(q, k, v, lens):
    """Queries in the padding see the padding, which contextual rows do not."""
    return hstu_attention(q, k, v, hstu_mask(q.shape[1], lens, None, contextual=2))


@dense("for some lengths it is no window and none of HSTU's masks")
def hstu_context_among_fewer_keys_than_masked(q, k, v, lens):
    """Contextual rows see one key less than there are."""
    n = q.shape[1]
    mask = hstu_mask(n, lens - 1, None, contextual=2) & valid(lens, n)[:, None, :]
    return hstu_attention(q, k, v, mask)


@dense("places are compared with more than one tensor", mask="none")
def hstu_folded_at_two_ends(q, k, v, lens):
    n = q.shape[1]
    rows = torch.arange(n, device=DEVICE).clamp(max=(lens - lens // 3)[:, None])[:, :, None]
    cols = torch.arange(n, device=DEVICE).clamp(max=(lens - lens // 4)[:, None])[:, None, :]
    return hstu_attention(
        q, k, v, torch.eye(n, dtype=torch.bool, device=DEVICE) | (rows - cols > 0)
    )


@dense("it depends on places otherwise than by their distance j - i", "bias")
def bias_of_the_sum_of_places(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_with(q, k, v, lens, table(k)[i + j].permute(2, 0, 1))


@dense("aten.floor_divide is not element-wise", "bias")
def bias_of_blocks_apart(q, k, v, lens):
    i, j = ij(q.shape[1])
    return softmax_with(q, k, v, lens, table(k)[(i // 2 - j // 2).abs()].permute(2, 0, 1))


@dense("aten.cumsum is not element-wise", "bias")
def bias_of_times(q, k, v, lens):
    """As HSTU's time bias: how far apart in time, not in place."""
    times = (torch.arange(q.shape[1], device=DEVICE) * 7 % 5).cumsum(0)
    index = (times[:, None] - times[None, :]).abs().clamp(max=39)
    return softmax_with(q, k, v, lens, table(k)[index].permute(2, 0, 1))


@dense("it does not vary along both queries and keys", "bias")
def bias_of_keys(q, k, v, lens):
    return softmax_with(q, k, v, lens, k[:1, :, 0])
