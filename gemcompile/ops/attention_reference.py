"""Jagged attention in plain PyTorch: the truth that every kernel is measured against.

With S = scale * q k^T + bias over the visible keys of one sequence and head:

    softmax      P = softmax(S)             (a row without a visible key: 0)
    otherwise    P = act(S), and 0 where a key is not visible
    out          = out_scale * (P * keep / (1 - p)) v

Written for reading, one sequence at a time. ``attention_reference`` is differentiable by autograd;
``reference_backward`` is the closed form that the op's backward needs, as an op's body runs below
autograd. The tests hold the two against each other in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gemcompile.ops.activations import ELEMENTWISE
from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.ops.attention_masks import relative_index, visible
from gemcompile.ops.dropout import keep_mask, keep_scale


@dataclass
class Sequence:
    """One sequence, its heads first: q [H, lq, D], k [H, lk, D], v [H, lk, Dv], in a wide type."""

    index: int
    q_rows: slice
    k_rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor  # bool [lq, lk]
    bias: Tensor | None  # [1 or H, lq, lk]
    keep: Tensor | None  # what dropout multiplies with, [H, lq, lk]
    out_scale: Tensor | None  # [1 or lq, 1]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are taken in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def sequences(a: AttentionArgs) -> Iterator[Sequence]:
    """The sequences of the batch that have a query and a key."""
    q_ends, k_ends = a.q_offsets.tolist(), a.k_offsets.tolist()
    group = a.q.shape[1] // a.k.shape[1]
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        k, v = a.k[keys], a.v[keys]
        if a.key_mask is not None:  # zeroed, as NaN times a zero probability would be NaN
            seen = a.key_mask[keys, None, None]
            k, v = k.where(seen, 0), v.where(seen, 0)
        yield Sequence(
            index=b,
            q_rows=rows,
            k_rows=keys,
            q=_heads_first(a.q[rows]),
            k=_heads_first(k).repeat_interleave(group, 0),
            v=_heads_first(v).repeat_interleave(group, 0),
            visible=_visible(a, b, rows, keys),
            bias=_bias(a, b, rows, keys),
            keep=_keep(a, rows, keys),
            out_scale=_out_scale(a, rows),
        )


def attention_reference(a: AttentionArgs) -> Tensor:
    """The output [Tq, H, Dv] in q's type; differentiable in q, k, v and bias."""
    return forward(a)[0]


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, Dv], lse [Tq, H] float32 for softmax, else [0])."""
    total, heads = a.q.shape[:2]
    out = a.q.new_zeros(total, heads, a.v.shape[2])
    lse = a.q.new_full((total, heads) if a.softmax else (0,), float("inf"), dtype=torch.float32)
    for s in sequences(a):
        scores = _scores(s, a.scale)
        p = _probabilities(s, scores, a.activation)
        result = (p if s.keep is None else p * s.keep) @ s.v
        result = result if s.out_scale is None else result * s.out_scale
        out[s.q_rows] = result.transpose(0, 1).to(out.dtype)
        if a.softmax:
            row_lse = scores.detach().masked_fill(~s.visible, -torch.inf).logsumexp(-1)
            lse[s.q_rows] = row_lse.masked_fill(row_lse == -torch.inf, torch.inf).T.float()
    return out, lse


def reference_backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias) in closed form, contiguous; dbias has size [0] unless asked."""
    dq = torch.zeros(a.q.shape, dtype=wide(a.q.dtype), device=a.q.device)
    dk, dv = dq.new_zeros(a.k.shape), dq.new_zeros(a.v.shape)
    want_bias = bias_grad and a.bias is not None
    dbias = dq.new_zeros(a.bias.shape if want_bias and a.bias is not None else (0,))
    for s in sequences(a):
        scores = _scores(s, a.scale)
        p = _probabilities(s, scores, a.activation)
        grad = _heads_first(dout[s.q_rows])
        grad = grad if s.out_scale is None else grad * s.out_scale
        dropped = p if s.keep is None else p * s.keep
        dp = grad @ s.v.mT
        dp = dp if s.keep is None else dp * s.keep
        if a.softmax:
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        else:
            ds = ELEMENTWISE[a.activation].backward(dp, scores).masked_fill(~s.visible, 0)
        dq[s.q_rows] = (a.scale * ds @ s.k).transpose(0, 1)
        dk[s.k_rows] = _sum_groups(a.scale * ds.mT @ s.q, a.k.shape[1])
        dv[s.k_rows] = _sum_groups(dropped.mT @ grad, a.v.shape[1])
        if want_bias:
            _add_bias_gradient(dbias, a, s, ds)
    bias_dtype = a.bias.dtype if a.bias is not None else a.q.dtype
    return dq.to(a.q.dtype), dk.to(a.k.dtype), dv.to(a.v.dtype), dbias.to(bias_dtype)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).to(wide(x.dtype))


def _visible(a: AttentionArgs, b: int, rows: slice, keys: slice) -> Tensor:
    lq, lk = rows.stop - rows.start, keys.stop - keys.start
    seen = torch.ones(lq, lk, dtype=torch.bool, device=a.q.device)
    if a.key_mask is not None:
        seen = seen & a.key_mask[keys]
    i, j = _positions(a.q_positions, rows, a.q), _positions(a.k_positions, keys, a.k)
    shift = lk - lq if a.aligned_at_end else 0
    numbers = (torch.tensor(number, device=a.q.device) for number in (b, shift, lk))
    allowed = visible(a, i[:, None], j, *numbers)
    return seen if allowed is None else seen & allowed


def _positions(positions: Tensor | None, rows: slice, like: Tensor) -> Tensor:
    if positions is not None:
        return positions[rows].long()
    return torch.arange(rows.stop - rows.start, device=like.device)


def _bias(a: AttentionArgs, b: int, rows: slice, keys: slice) -> Tensor | None:
    if a.bias is None:
        return None
    i, j = _positions(a.q_positions, rows, a.q), _positions(a.k_positions, keys, a.k)
    if a.relative:
        shift = j.shape[0] - i.shape[0] if a.aligned_at_end else 0
        return a.bias[:, relative_index(a, i[:, None], j, shift)].to(wide(a.q.dtype))
    bias = a.bias[b if a.bias.shape[0] > 1 else 0]
    return bias[:, i[:, None], j[None, :]].to(wide(a.q.dtype))


def _keep(a: AttentionArgs, rows: slice, keys: slice) -> Tensor | None:
    if a.dropout_p == 0.0:
        return None
    if a.dropout_seed is None:
        raise ValueError("dropout_p > 0 needs a dropout_seed: an int64 tensor of shape [1]")
    row = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=a.q.device)
    head = torch.arange(a.q.shape[1], dtype=torch.int32, device=a.q.device)
    key = torch.arange(keys.stop - keys.start, dtype=torch.int32, device=a.q.device)
    kept = keep_mask(a.dropout_seed, row[:, None], head[:, None, None], key, a.dropout_p)
    return kept.to(wide(a.q.dtype)) * keep_scale(a.dropout_p)


def _out_scale(a: AttentionArgs, rows: slice) -> Tensor | None:
    if a.out_scale is None:
        return None
    scale = a.out_scale if a.out_scale.numel() == 1 else a.out_scale[rows]
    return scale[:, None].to(wide(a.q.dtype))


def _scores(s: Sequence, scale: float) -> Tensor:
    scores: Tensor = s.q @ s.k.mT * scale
    if s.bias is not None:
        scores = scores + s.bias
    return scores


def _probabilities(s: Sequence, scores: Tensor, activation: str) -> Tensor:
    if activation != "softmax":
        values = ELEMENTWISE[activation].forward(scores)
        return values.masked_fill(~s.visible, 0)
    # A bias of -inf hides a key too. The finite fill keeps rows without any key free of NaN.
    hidden = ~s.visible | (scores == -torch.inf)
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(hidden, lowest), -1).masked_fill(hidden, 0)


def _sum_groups(x: Tensor, kv_heads: int) -> Tensor:
    """[H, lk, D], a gradient per query head, to [lk, Hk, D]."""
    grouped: Tensor = x.unflatten(0, (kv_heads, -1))
    return grouped.sum(1).transpose(0, 1)


def _add_bias_gradient(dbias: Tensor, a: AttentionArgs, s: Sequence, ds: Tensor) -> None:
    i = _positions(a.q_positions, s.q_rows, a.q)
    j = _positions(a.k_positions, s.k_rows, a.k)
    heads = torch.arange(dbias.shape[-3 if dbias.dim() == 4 else 0], device=ds.device)
    if heads.numel() == 1:
        ds = ds.sum(0, keepdim=True)
    if a.relative:
        shift = j.shape[0] - i.shape[0] if a.aligned_at_end else 0
        column = relative_index(a, i[:, None], j, shift)
        dbias.index_put_((heads[:, None, None], column), ds, True)
        return
    batch = dbias[s.index if dbias.shape[0] > 1 else 0]
    batch.index_put_((heads[:, None, None], i[None, :, None], j[None, None, :]), ds, True)
