"""Moving rows between the padded and the packed form.

``pack_index`` turns a mask into a row map and its inverse; ``gem::gather_rows`` applies either, and
its backward is the same op with the two maps exchanged: no scatter, no atomics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import decompositions, register_decomposition

_library = torch.library.Library("gem", "FRAGMENT")
_library.define(
    "gather_rows(Tensor x, Tensor index, Tensor inverse) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)


def _gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """out[i] = x[index[i]], or 0 where index[i] < 0; unread rows of x never matter.

    Args:
        x: [R, ...] of any type.
        index: int64 [n], rows of x or -1.
        inverse: int64 [R], for each row of x its place in the output, or -1 where nobody reads it.
    """
    if x.shape[0] == 0:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    rows = x.index_select(0, index.clamp(min=0))
    dead = (index < 0).reshape(-1, *[1] * (x.dim() - 1))
    return rows.masked_fill_(dead, 0)


def _fake_gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    _, index, inverse = inputs
    ctx.save_for_backward(index, inverse)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index, inverse = ctx.saved_tensors
    dx: Tensor = torch.ops.gem.gather_rows(grad, inverse, index)
    return dx, None, None


_library.impl("gather_rows", _gather_rows, "CompositeExplicitAutograd")
torch.library.register_fake("gem::gather_rows", _fake_gather_rows, lib=_library)
torch.library.register_autograd(
    "gem::gather_rows", _autograd, setup_context=_setup_context, lib=_library
)


def _decomposed(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """A masked indirect load, which Inductor fuses with whatever stands around it."""
    live = (index >= 0).reshape(-1, *[1] * (x.dim() - 1))
    rows: Tensor = torch.ops.aten._unsafe_masked_index(x, live, [index.clamp(min=0)], 0)
    return rows


if torch.ops.gem.gather_rows.default not in decompositions:
    register_decomposition(torch.ops.gem.gather_rows.default)(_decomposed)


class PackIndex(NamedTuple):
    """How the True entries of a mask [B, L] are packed into groups * multiple rows.

    Attributes:
        index: int64 [groups * multiple], flat row b * L + l of each packed row, -1 for dead ones.
        inverse: int64 [B * L], the packed row of each flat row, -1 where the mask is False.
        offsets: int32 [B + 1], where each sequence starts among the packed rows.
        positions: int32 [groups * multiple], l of each packed row, 0 for dead ones.
    """

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    inverse: Tensor
    offsets: Tensor
    positions: Tensor


def pack_index(mask: Tensor, multiple: int = 128) -> PackIndex:
    """The row map of a bool mask [B, L] of any pattern; row order is kept.

    The packed row count is filled up to a multiple of ``multiple`` and is at least that. Plain
    eager code; on CUDA it reads one number back (how many entries are True).
    """
    if mask.dtype is not torch.bool or mask.dim() != 2:
        raise TypeError(f"pack_index wants a bool mask [B, L], got {mask.dtype} {list(mask.shape)}")
    flat = mask.flatten()
    rows = flat.nonzero().squeeze(1)
    groups = max(1, -(-rows.shape[0] // multiple))
    index = F.pad(rows, (0, groups * multiple - rows.shape[0]), value=-1)
    inverse = torch.where(flat, flat.cumsum(0) - 1, -1)
    offsets = F.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    positions = (index % max(1, mask.shape[1])).masked_fill(index < 0, 0).to(torch.int32)
    return PackIndex(index, inverse, offsets, positions)
