"""Softmax attention on CPU by PyTorch's own flash kernel, sequence by sequence.

What it cannot do (dropout, bias, positions, another activation) is left to
``attention_cpu_blocked``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.kernels import Kernel, register
from gemcompile.target import Target

from .cpu_batches import Piece, Rows, pieces, visible_keys

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def supports(target: Target, request: AttentionRequest) -> str | None:
    if target.device != "cpu":
        return f"it runs on cpu, not on {target.device}"
    if request.dtype is torch.float64:
        return "its sums over a row are kept in float32"
    if request.activation != "softmax":
        return f"it computes softmax, not {request.activation}"
    if request.head_dim != request.value_dim:
        return f"head dimension {request.head_dim} is not value dimension {request.value_dim}"
    extras = ("dropout", "bias", "positions", "out_scale", "window", "block", "history")
    present = [name for name in extras if getattr(request, name)]
    return f"it has no {' and no '.join(present)}" if present else None


class _Keys:
    """Keys and values as the flash kernel may read them: nothing masked, or masked rows zeroed."""

    def __init__(self, a: AttentionArgs) -> None:
        self.offsets: list[int] = a.k_offsets.tolist()
        self.k, self.v = a.k, a.v
        self.kept: Tensor | None = None
        self.mask: Tensor | None = None
        if a.key_mask is None:
            return
        if a.causal:  # positions matter, so masked keys stay; zeroed, as 0 * NaN is NaN
            self.mask = a.key_mask
            seen = a.key_mask[:, None, None]
            self.k, self.v = a.k.where(seen, 0), a.v.where(seen, 0)
        else:
            self.k, self.v, self.kept, self.offsets = visible_keys(
                a.k, a.v, self.offsets, a.key_mask
            )

    def pieces(self, a: AttentionArgs) -> list[Piece]:
        return list(pieces(a.q_offsets.tolist(), self.offsets))

    def visible(self, piece: Piece, causal: bool) -> Tensor | None:
        """bool [G, 1, 1 or lq, lk] beyond the kernel's own causal mask; None: everything."""
        visible = None if self.mask is None else piece.k.take(self.mask)[:, None, None, :]
        if piece.k.live is not None:
            live = piece.k.live[:, None, None, :]
            visible = live if visible is None else visible & live
        if causal and not self.fits_kernel_causal(piece):
            shift = (piece.k_lengths - piece.q_lengths)[:, None, None, None]
            lower = torch.arange(piece.k.length) <= torch.arange(piece.q.length)[:, None] + shift
            visible = lower if visible is None else visible & lower
        return visible

    @staticmethod
    def fits_kernel_causal(piece: Piece) -> bool:
        """The flash kernel aligns at the start; equal lengths make that the same as at the end."""
        return torch.equal(piece.q_lengths, piece.k_lengths)

    def spread(self, gradient: Tensor, rows: int) -> Tensor:
        """The gradient of all keys from that of the kept ones."""
        if self.kept is None:
            return gradient
        return gradient.new_zeros(rows, *gradient.shape[1:]).index_copy_(0, self.kept, gradient)


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    total, heads = a.q.shape[:2]
    out = a.q.new_zeros(total, heads, a.v.shape[2])
    lse = torch.full((total, heads), torch.inf)
    keys = _Keys(a)
    for piece in keys.pieces(a):
        visible = keys.visible(piece, a.causal)
        causal = a.causal and keys.fits_kernel_causal(piece)
        q = _heads_first(a.q, piece.q)
        k, v = _heads_first(keys.k, piece.k), _heads_first(keys.v, piece.k)
        mask = _additive(visible, piece, a.q.dtype)
        result, row_lse = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=a.scale)
        if visible is not None:
            row_lse = row_lse.masked_fill(_sees_nothing(visible, causal), torch.inf)
        piece.q.put(out, result.transpose(1, 2))
        piece.q.put(lse, row_lse.transpose(1, 2))
    return out, lse


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys = _Keys(a)
    dq = a.q.new_zeros(a.q.shape)
    dk, dv = keys.k.new_zeros(keys.k.shape), keys.v.new_zeros(keys.v.shape)
    for piece in keys.pieces(a):
        visible = keys.visible(piece, a.causal)
        causal = a.causal and keys.fits_kernel_causal(piece)
        grad = _heads_first(dout, piece.q)
        if piece.q.live is not None:  # repeated rows carry no gradient
            grad = grad * piece.q.live[:, None, :, None]
        row_lse = piece.q.take(lse)
        if visible is not None:  # the kernel wants a finite number where a row sees nothing
            row_lse = row_lse.masked_fill(row_lse == torch.inf, 0.0)
        gradients = _flash_backward(
            _unit_stride(grad),
            _heads_first(a.q, piece.q),
            _heads_first(keys.k, piece.k),
            _heads_first(keys.v, piece.k),
            _heads_first(out, piece.q),
            row_lse.transpose(1, 2),
            0.0,
            causal,
            attn_mask=_additive(visible, piece, a.q.dtype),
            scale=a.scale,
        )
        piece.q.put(dq, gradients[0].transpose(1, 2))
        piece.k.put(dk, gradients[1].transpose(1, 2))
        piece.k.put(dv, gradients[2].transpose(1, 2))
    rows = a.k.shape[0]
    return dq, keys.spread(dk, rows), keys.spread(dv, rows), a.q.new_empty(0)


def _heads_first(x: Tensor, rows: Rows) -> Tensor:
    """[rows, H, D] to [G, H, length, D], with unit stride in D as the kernel assumes."""
    return _unit_stride(rows.take(x).transpose(1, 2))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(visible: Tensor | None, piece: Piece, dtype: torch.dtype) -> Tensor | None:
    """0 or -inf, [G, 1, lq, lk]."""
    if visible is None:
        return None
    additive = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return additive.expand(piece.q.count, 1, piece.q.length, piece.k.length)


def _sees_nothing(visible: Tensor, causal: bool) -> Tensor:
    """bool [G, 1, 1 or lq]: rows without a visible key."""
    if causal and visible.shape[2] == 1:  # row i sees the keys up to i
        return visible.squeeze(2).cumsum(-1) == 0
    return ~visible.any(-1)


register(Kernel("cpu_flash", "jagged_attention", supports, forward))
register(Kernel("cpu_flash", "jagged_attention_backward", supports, backward))
