"""``gem::padded_attention``: attention over [B, L, H, D], what FuseAttention writes into graphs.

It is composite: AOTAutograd decomposes it into reshapes around ``gem::jagged_attention``, whose
offsets are then regular, or into torch's own fused attention where that is as good.
EliminatePadding may replace it by a truly jagged call before that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EMPTY_ROWS = ("zero", "mean", "assume")

_library = torch.library.Library("gem", "FRAGMENT")
_library.define(
    "padded_attention(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? bias, "
    "Tensor? out_scale, Tensor? dropout_seed, str activation, float scale, bool causal, "
    "str empty, float dropout_p) -> Tensor",
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
) -> Tensor:
    """Attention over padded batches.

    Args:
        q: [B, Lq, H, D]; k: [B, Lk, Hk, D]; v: [B, Lk, Hk, Dv]; Hk divides H.
        key_mask: bool [B, Lk]; a False key is seen by nobody.
        bias: four dimensions, broadcastable to [B, H, Lq, Lk]; added before the activation.
        out_scale: float32 [1] or [B, Lq], multiplied after the activation.
        causal: query i sees the keys j <= i; needs Lq == Lk.
        empty: what a softmax row without a visible key gives. "zero"; "mean": the mean of v over
            all Lk keys, as softmax over equal finite fills gives; "assume": no such row exists.

    Returns:
        [B, Lq, H, Dv].
    """
    if empty not in EMPTY_ROWS:
        raise ValueError(f"empty must be one of {EMPTY_ROWS}, not {empty!r}")
    if (
        q.is_cuda
        and activation == "softmax"
        and bias is None
        and out_scale is None
        and not dropout_p
    ):
        out = _torch_attention(q, k, v, key_mask, scale, causal)
    else:
        out = _regular_jagged(
            q, k, v, key_mask, bias, out_scale, dropout_seed, activation, scale, causal, dropout_p
        )
    if empty != "mean" or activation != "softmax" or key_mask is None:
        return out
    mean = v.mean(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
    if out_scale is not None:
        mean = (mean * out_scale[..., None, None]).to(out.dtype)
    return out.where(~_sees_nothing(key_mask, causal)[..., None, None], mean)


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


def _regular_jagged(
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
) -> Tensor:
    """The jagged kernels on sequences that all have the full length."""
    (batch, lq), lk = q.shape[:2], k.shape[1]
    packed, _ = torch.ops.gem.jagged_attention(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        _regular_offsets(batch, lq, q.device),
        _regular_offsets(batch, lk, q.device),
        None if key_mask is None else key_mask.flatten(),
        None,
        None,
        None if bias is None else bias.expand(-1, -1, lq, lk),
        None if out_scale is None else out_scale.flatten(),
        dropout_seed,
        activation,
        scale,
        causal,
        dropout_p,
        lq,
        lk,
    )
    out: Tensor = packed.unflatten(0, (batch, lq))
    return out


def _regular_offsets(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, device=device) * length


def _sees_nothing(key_mask: Tensor, causal: bool) -> Tensor:
    """bool [B, Lq] or [B, 1]: the rows without a visible key."""
    return key_mask.cumsum(1) == 0 if causal else ~key_mask.any(1, keepdim=True)


_library.impl("padded_attention", padded_attention, "CompositeImplicitAutograd")
