"""``gem::padded_attention``: attention over [B, L, H, D], what FuseAttention writes into graphs.

It is composite: AOTAutograd decomposes it into reshapes around ``gem::jagged_attention``, whose
offsets are then regular, or into torch's own fused attention where that is as good.
EliminatePadding may replace it by a truly jagged call before that.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import gemcompile.ops.tiles  # noqa: F401  (registers the op)
from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.ops.attention_masks import visible

EMPTY_ROWS = ("zero", "mean", "assume")

_library = torch.library.Library("gem", "FRAGMENT")
_library.define(
    "padded_attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? bias, "
    "Tensor? out_scale, Tensor? dropout_seed, str activation, float scale, bool causal, "
    "str empty, float dropout_p, int window_left=-1, int window_right=-1, int block=0, "
    "Tensor? history=None, int contextual=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    bias: Tensor | None,
    out_scale: Tensor | None,
    dropout_seed: Tensor | None,
    activation: str,
    scale: float,
    causal: bool,
    empty: str,
    dropout_p: float,
    window_left: int = -1,
    window_right: int = -1,
    block: int = 0,
    history: Tensor | None = None,
    contextual: int = 0,
) -> Tensor:
    """Attention over padded batches.

    Args:
        q: [B, Lq, H, D]; k: [B, Lk, Hk, D]; v: [B, Lk, Hk, Dv]; Hk divides H.
        key_mask: bool [B, Lk]; a False key is seen by nobody.
        bias: four dimensions, broadcastable to [B, H, Lq, Lk]; added before the activation. Or a
            table [H or 1, 2 * m - 1], read at column m - 1 + j - i, with m at least Lq and Lk.
        out_scale: float32 [1] or [B, Lq], multiplied after the activation.
        causal: query i sees the keys j <= i; needs Lq == Lk, as do the masks that follow.
        empty: what a softmax row without a visible key gives. "zero"; "mean": the mean of v over
            all Lk keys, as softmax over equal finite fills gives; "assume": no such row exists.
        window_left, window_right: query i sees the keys i - left <= j <= i + right; -1: no limit.
        block: query i sees the keys j with i // block == j // block; 0: all.
        history: int32 or int64 [B], how many rows come before the targets, the contextual ones
            included; ``num_targets`` of ``jagged_attention``, counted from the other end.
        contextual: how many rows see the whole history. Both need causal.

    All places are counted from the start of the padded sequence.

    Returns:
        [B, Lq, H, Dv].
    """
    if empty not in EMPTY_ROWS:
        raise ValueError(f"empty must be one of {EMPTY_ROWS}, not {empty!r}")
    a = _regular(
        q, k, v, key_mask, bias, out_scale, dropout_seed, activation, scale, causal, dropout_p,
        window_left, window_right, block, history, contextual,
    )  # fmt: skip
    plain = bias is None and out_scale is None and not dropout_p
    if q.is_cuda and a.softmax and plain and not (a.window or a.block or a.history):
        out = _torch_attention(q, k, v, key_mask, scale, causal)
    else:
        a = replace(a, tiles=_tiles(a))
        values = [getattr(a, f.name) for f in fields(a)]
        packed, _ = torch.ops.gem.jagged_attention(*values)
        out = packed.unflatten(0, q.shape[:2])
    if empty != "mean" or activation != "softmax" or key_mask is None:
        return out
    mean = v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    if out_scale is not None:
        mean = (mean * out_scale[..., None, None]).to(out.dtype)
    return out.where(~_sees_nothing(key_mask, a)[..., None, None], mean)


def padded_attention_result(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """An empty tensor like the op's result."""
    return q.new_empty(*q.shape[:3], v.shape[3])


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """torch's own fused attention: on padded rows nothing is saved by a kernel that skips them."""
    mask = None if key_mask is None else key_mask[:, None, None, :]
    if mask is not None and causal:
        mask = mask & torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal and mask is None, scale=scale
    )
    return out.transpose(1, 2)


def _regular(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    bias: Tensor | None,
    out_scale: Tensor | None,
    dropout_seed: Tensor | None,
    activation: str,
    scale: float,
    causal: bool,
    dropout_p: float,
    left: int,
    right: int,
    block: int,
    history: Tensor | None,
    contextual: int,
) -> AttentionArgs:
    """The jagged op's arguments for sequences that all have the full length."""
    (batch, lq), lk = q.shape[:2], k.shape[1]
    if bias is not None and bias.dim() == 4:
        bias = bias.expand(-1, -1, lq, lk)
    return AttentionArgs(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        _regular_offsets(batch, lq, q.device),
        _regular_offsets(batch, lk, q.device),
        None if key_mask is None else key_mask.flatten(),
        None,
        None,
        bias,
        None if out_scale is None else out_scale.flatten(),
        dropout_seed,
        activation,
        scale,
        causal,
        dropout_p,
        lq,
        lk,
        left,
        right,
        block,
        None if history is None else lk - history,
        _everywhere(contextual, batch, q.device) if contextual else None,
    )


def _tiles(a: AttentionArgs) -> Tensor | None:
    """The list that GPU kernels walk; AOTAutograd merges those of equal layers."""
    if not a.q.is_cuda:
        return None
    rows = a.q.shape[0], a.k.shape[0]
    mask = a.causal, a.window_left, a.window_right
    tiles: Tensor = torch.ops.gem.attention_tiles(a.q_offsets, a.k_offsets, *rows, *mask)
    return tiles


def _regular_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, device=device) * length


def _everywhere(count: int, batch: int, device: torch.device) -> Tensor:
    return torch.full((batch,), count, dtype=torch.int64, device=device)


def _sees_nothing(key_mask: Tensor, a: AttentionArgs) -> Tensor:
    """bool [B, Lq] or [B, 1]: the rows without a visible key."""
    if not a.masked:
        return ~key_mask.any(1, keepdim=True)
    if not (a.window or a.block or a.history):
        return key_mask.cumsum(1) == 0
    batch, length = key_mask.shape
    place = torch.arange(length, device=key_mask.device)
    sequence = torch.arange(batch, device=key_mask.device)[:, None, None]
    ends = torch.full_like(sequence, length)
    seen = visible(a, place[:, None], place, sequence, torch.zeros_like(sequence), ends)
    assert seen is not None
    return ~(seen & key_mask[:, None, :]).any(-1)


_library.impl("padded_attention", padded_attention, "CompositeImplicitAutograd")
