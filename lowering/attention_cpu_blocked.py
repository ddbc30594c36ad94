"""Attention on CPU with everything: any activation, masks, bias, dropout; in blocks of query rows.

A block's scores are bounded, so they stay in the cache between the few passes over them and no
tensor of size H * lq * lk exists. Sums are taken in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gemcompile.ops.activations import ELEMENTWISE
from gemcompile.ops.attention_args import AttentionArgs, AttentionRequest
from gemcompile.ops.attention_masks import relative_index
from gemcompile.ops.attention_masks import visible as mask_visible
from gemcompile.ops.attention_reference import wide
from gemcompile.ops.dropout import keep_mask, keep_scale
from gemcompile.ops.kernels import Kernel, register
from gemcompile.target import Target

from .cpu_batches import Piece, pieces, visible_keys

BLOCK_ELEMENTS = 2**18  # scores of one block: 1 MB in float32
ENOUGH_ROWS = 128  # of a block of few keys, for its calls to cost less than what they compute


def supports(target: Target, request: AttentionRequest) -> str | None:
    if request.dtype is torch.float64:
        return "its sums over a row are kept in float32"
    return None if target.device == "cpu" else f"it runs on cpu, not on {target.device}"


class _Batch:
    """The arguments with masked keys taken out, and where the remaining keys came from."""

    def __init__(self, a: AttentionArgs) -> None:
        self.args = a
        self.q_offsets: list[int] = a.q_offsets.tolist()
        self.k_offsets: list[int] = a.k_offsets.tolist()
        self.k, self.v = a.k, a.v
        self.kept: Tensor | None = None
        self.k_rank: Tensor | None = None  # rank in the sequence, where it is not the row's own
        self.k_positions = a.k_positions
        if a.key_mask is not None:
            original = self.k_offsets
            self.k, self.v, self.kept, self.k_offsets = visible_keys(a.k, a.v, original, a.key_mask)
            self.k_rank = _ranks(original)[self.kept]
            if a.k_positions is not None:
                self.k_positions = a.k_positions[self.kept]
        self.lengths = a.q_offsets.diff(), a.k_offsets.diff()  # before masking

    def pieces(self) -> Iterator[Piece]:
        most_keys = BLOCK_ELEMENTS // (64 * self.args.q.shape[1])
        return pieces(self.q_offsets, self.k_offsets, most_keys)

    def rank_of_keys(self, piece: Piece) -> Tensor:
        """int64 [1 or G, lk]."""
        if self.k_rank is not None:
            return piece.k.take(self.k_rank)
        return torch.arange(piece.k.length)[None]

    def positions(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """int64 [1 or G, lq] and [1 or G, lk]: places in the padded sequence."""
        q, k = self.args.q_positions, self.k_positions
        q_positions = torch.arange(piece.q.length)[None] if q is None else piece.q.take(q).long()
        k_positions = self.rank_of_keys(piece) if k is None else piece.k.take(k).long()
        return q_positions, k_positions

    def spread(self, gradient: Tensor) -> Tensor:
        """The gradient of all keys from that of the kept ones."""
        if self.kept is None:
            return gradient
        shape = (self.args.k.shape[0], *gradient.shape[1:])
        return gradient.new_zeros(shape).index_copy_(0, self.kept, gradient)


def _ranks(offsets: list[int]) -> Tensor:
    ends = torch.tensor(offsets)
    return torch.arange(offsets[-1]) - ends[:-1].repeat_interleave(ends.diff())


@dataclass
class _Block:
    """Query rows ``rows`` of a piece against its keys ``keys``; the others are seen by no row.

    Keys before ``clear`` are visible to every row of the block, so only the rest is masked.
    """

    rows: slice
    keys: slice
    clear: int
    visible: Tensor | None  # bool, broadcastable to [G, H, rows, keys from clear on]
    bias: Tensor | None  # [1 or G, 1 or H, rows, keys]
    keep: Tensor | None  # bool [G, H, rows, keys]
    bias_index: tuple[Tensor, ...] = ()


class _Work:
    """One piece in the wide type: q [G, H, lq, D], k [G, Hk, lk, D], v [G, Hk, lk, Dv]."""

    def __init__(self, batch: _Batch, piece: Piece) -> None:
        a = batch.args
        self.batch, self.piece, self.args = batch, piece, a
        kind = wide(a.q.dtype)
        self.q = piece.q.take(a.q).transpose(1, 2).to(kind)
        self.k = piece.k.take(batch.k).transpose(1, 2).to(kind)
        self.v = piece.k.take(batch.v).transpose(1, 2).to(kind)
        self.out_scale = None
        if a.out_scale is not None:
            rows = a.out_scale.expand(a.q.shape[0])
            self.out_scale = piece.q.take(rows)[:, None, :, None].to(kind)

    def blocks(self) -> Iterator[_Block]:
        lq, lk = self.piece.q.length, self.piece.k.length
        step = max(16, BLOCK_ELEMENTS // (self.piece.q.count * self.q.shape[1] * lk))
        step = min(step, self._useful_step(lq))
        positions = self.batch.positions(self.piece)
        for start in range(0, lq, step):
            rows = slice(start, min(start + step, lq))
            block = self._block(rows, positions)
            if block.keys.start < block.keys.stop:
                yield block

    def _useful_step(self, lq: int) -> int:
        """How many rows share enough of their keys; smaller blocks compute less in vain."""
        a = self.args
        if a.block:
            return a.block * max(1, ENOUGH_ROWS // a.block)
        if not a.masked:
            return lq
        right = 0 if a.causal else a.window_right
        bounded = a.window_left >= 0 and right >= 0
        if bounded:
            return max(ENOUGH_ROWS, min(lq // 8, a.window_left + right))
        return max(ENOUGH_ROWS, lq // 8)

    def _block(self, rows: slice, positions: tuple[Tensor, Tensor]) -> _Block:
        q_positions, k_positions = positions
        keys, clear = self._key_range(rows)
        rest = slice(clear, keys.stop)
        visible = None
        if self.piece.k.live is not None:
            visible = self.piece.k.live[:, None, None, rest]
        allowed = mask_visible(
            self.args,
            q_positions[:, None, rows, None],
            k_positions[:, None, None, rest],
            torch.tensor(self.piece.sequences)[:, None, None, None],
            self._shift()[:, None, None, None],
            self._key_lengths()[:, None, None, None],
        )
        if allowed is not None:
            visible = allowed if visible is None else visible & allowed
        bias, index = self._bias(rows, keys, positions)
        return _Block(rows, keys, clear, visible, bias, self._keep(rows, keys), index)

    def _key_range(self, rows: slice) -> tuple[slice, int]:
        """The keys that any of the rows may see, and the end of those at their front that all do.

        Only where keys and queries stand at their ranks, and alike in every sequence of the piece.
        """
        a, piece = self.args, self.piece
        start, stop, clear = 0, piece.k.length, 0
        uneven = piece.k.live is not None or piece.q.live is not None
        if not a.masked:
            return slice(start, stop), stop if piece.k.live is None else 0
        if uneven or not a.aligned_at_end or self.batch.kept is not None:
            return slice(start, stop), clear
        shift = int(self._shift()[0])
        first, last = rows.start + shift, rows.stop - 1 + shift
        contextual, newest = self._history()
        ordered = a.causal and (contextual == 0 or contextual <= min(first, newest))
        if ordered:  # no contextual rows, which see beyond their own place
            stop = min(stop, last + 1)
        if not a.history:
            if a.window_left >= 0:
                start = max(start, first - a.window_left)
            if a.window_right >= 0:
                stop = min(stop, last + a.window_right + 1)
        if a.block:
            start = max(start, rows.start // a.block * a.block)
            stop = min(stop, ((rows.stop - 1) // a.block + 1) * a.block)
        if ordered and not (a.window or a.block):
            clear = min(stop, max(0, min(first + 1, newest)))
        return slice(start, max(start, stop)), max(start, clear)

    def _history(self) -> tuple[int, int]:
        """Of all sequences of the piece: the most contextual rows, the lowest place of a target."""
        a, piece = self.args, self.piece
        counts = (a.num_contextual, a.num_targets)
        most = [0 if x is None else int(x[piece.sequences].max()) for x in counts]
        return most[0], piece.k.length - most[1]

    def _key_lengths(self) -> Tensor:
        """int64 [G], before masking."""
        return self.batch.lengths[1][self.piece.sequences].long()

    def _shift(self) -> Tensor:
        """int64 [G]: how far beyond its own position a query sees."""
        if not self.args.aligned_at_end:
            return torch.zeros(1, dtype=torch.int64)
        return self._key_lengths() - self.batch.lengths[0][self.piece.sequences].long()

    def _bias(
        self, rows: slice, keys: slice, positions: tuple[Tensor, Tensor]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        bias = self.args.bias
        if bias is None:
            return None, ()
        if self.args.relative:
            shift = self._shift()[:, None, None, None]
            i, j = positions[0][:, None, rows, None], positions[1][:, None, None, keys]
            heads = torch.arange(bias.shape[0])[:, None, None]
            table_index = (heads, relative_index(self.args, i, j, shift))
            return bias[table_index].to(self.q.dtype), table_index
        # A shared bias is read, and its gradient added to, once per sequence.
        chosen = self.piece.sequences
        sequences = torch.tensor(chosen if bias.shape[0] > 1 else [0] * len(chosen))
        index = (
            sequences[:, None, None, None],
            torch.arange(bias.shape[1])[:, None, None],
            positions[0][:, None, rows, None],
            positions[1][:, None, None, keys],
        )
        return bias[index].to(self.q.dtype), index

    def _keep(self, rows: slice, keys: slice) -> Tensor | None:
        a, piece = self.args, self.piece
        if a.dropout_p == 0.0:
            return None
        assert a.dropout_seed is not None
        row = piece.q.take(torch.arange(a.q.shape[0], dtype=torch.int32))[:, None, rows, None]
        head = torch.arange(a.q.shape[1], dtype=torch.int32)[:, None, None]
        key = self.batch.rank_of_keys(piece)[:, None, None, keys].to(torch.int32)
        return keep_mask(a.dropout_seed, row, head, key, a.dropout_p)

    def scores(self, block: _Block) -> Tensor:
        q = self.q[:, :, block.rows] * self.args.scale
        scores = _per_group(q, self.k[:, :, block.keys].mT)
        return scores if block.bias is None else scores.add_(block.bias)


def _per_group(x: Tensor, y: Tensor) -> Tensor:
    """x [G, H, m, n] @ y [G, Hk, n, p], query heads sharing key heads, to [G, H, m, p]."""
    group = x.shape[1] // y.shape[1]
    if group == 1:
        return x @ y
    merged: Tensor = x.unflatten(1, (-1, group)).flatten(2, 3)
    result: Tensor = (merged @ y).unflatten(2, (group, -1))
    return result.flatten(1, 2)


def _over_group(x: Tensor, y: Tensor, kv_heads: int) -> Tensor:
    """x^T y over rows, summed over the query heads of a key head: [G, Hk, n, p]."""
    group = x.shape[1] // kv_heads
    if group > 1:
        x, y = (z.unflatten(1, (-1, group)).flatten(2, 3) for z in (x, y))
    return x.mT @ y


def _hide_(x: Tensor, block: _Block, fill: float) -> Tensor:
    if block.visible is not None and block.clear < block.keys.stop:
        x[..., block.clear - block.keys.start :].masked_fill_(~block.visible, fill)
    return x


def forward(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    total, heads = a.q.shape[:2]
    out = a.q.new_zeros(total, heads, a.v.shape[2])
    lse = torch.full((total, heads) if a.softmax else (0,), torch.inf)
    batch = _Batch(a)
    for piece in batch.pieces():
        work = _Work(batch, piece)
        result = work.q.new_zeros(*work.q.shape[:3], a.v.shape[2])
        row_lse = lse.new_full(work.q.shape[:3], torch.inf)
        for block in work.blocks():
            result[:, :, block.rows], row_lse[:, :, block.rows] = _forward_block(work, block)
        if work.out_scale is not None:
            result *= work.out_scale
        piece.q.put(out, result.transpose(1, 2))
        if a.softmax:
            piece.q.put(lse, row_lse.transpose(1, 2))
    return out, lse


def _forward_block(work: _Work, block: _Block) -> tuple[Tensor, Tensor | float]:
    a, v = work.args, work.v[:, :, block.keys]
    p = work.scores(block)
    total: Tensor | None = None
    lse: Tensor | float = torch.inf
    if a.softmax:
        _hide_(p, block, -torch.inf)
        top = p.amax(-1, keepdim=True).clamp_(min=torch.finfo(p.dtype).min)
        total = p.sub_(top).exp_().sum(-1, keepdim=True)
        lse = (top + total.log()).squeeze(-1).masked_fill_(total.squeeze(-1) == 0, torch.inf)
    else:
        p = _hide_(ELEMENTWISE[a.activation].forward(p), block, 0.0)
    if block.keep is not None:
        p.mul_(block.keep)
    result = _per_group(p, v)
    if total is not None:
        result /= total.masked_fill_(total == 0, 1)
    if block.keep is not None:
        result *= keep_scale(a.dropout_p)
    return result, lse


def backward(
    dout: Tensor, a: AttentionArgs, out: Tensor, lse: Tensor, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = _Batch(a)
    dq = a.q.new_zeros(a.q.shape)
    dk, dv = batch.k.new_zeros(batch.k.shape), batch.v.new_zeros(batch.v.shape)
    dbias = None
    if bias_grad and a.bias is not None:
        dbias = torch.zeros(a.bias.shape, dtype=wide(a.q.dtype))
    for piece in batch.pieces():
        work = _Work(batch, piece)
        gradients = _backward_piece(work, dout, out, lse, dbias)
        piece.q.put(dq, gradients[0].transpose(1, 2))
        piece.k.put(dk, gradients[1].transpose(1, 2))
        piece.k.put(dv, gradients[2].transpose(1, 2))
    bias_gradient = (a.q if a.bias is None else a.bias).new_empty(0)
    if dbias is not None and a.bias is not None:
        bias_gradient = dbias.to(a.bias.dtype)
    return dq, batch.spread(dk), batch.spread(dv), bias_gradient


def _backward_piece(
    work: _Work, dout: Tensor, out: Tensor, lse: Tensor, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    a, piece, q, k, v = work.args, work.piece, work.q, work.k, work.v
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk, dv = k.new_zeros(k.shape), v.new_zeros(v.shape)
    grad = piece.q.take(dout).transpose(1, 2).to(q.dtype)
    if piece.q.live is not None:  # repeated rows carry no gradient
        grad = grad * piece.q.live[:, None, :, None]
    delta = row_lse = None
    if a.softmax:
        result = piece.q.take(out).transpose(1, 2).to(q.dtype)
        delta = (grad * result).sum(-1, keepdim=True)
        row_lse = piece.q.take(lse).transpose(1, 2).unsqueeze(-1).to(q.dtype)
    if work.out_scale is not None:
        grad = grad * work.out_scale
    if a.dropout_p > 0.0:
        # dv and dp take this factor from the gradient; delta has it through the output.
        grad = grad * keep_scale(a.dropout_p)
    for block in work.blocks():
        rows, keys = block.rows, block.keys
        upstream = grad[:, :, rows]
        dropped, ds = _score_gradient(
            work,
            block,
            upstream,
            None if row_lse is None else row_lse[:, :, rows],
            None if delta is None else delta[:, :, rows],
        )
        dv[:, :, keys] += _over_group(dropped, upstream, v.shape[1])
        if dbias is not None:
            dbias.index_put_(block.bias_index, _sum_to(ds, block.bias), accumulate=True)
        dq[:, :, rows] = _per_group(ds, k[:, :, keys]).mul_(a.scale)
        dk[:, :, keys] += _over_group(ds, q[:, :, rows], k.shape[1]).mul_(a.scale)
    return dq, dk, dv


def _score_gradient(
    work: _Work, block: _Block, upstream: Tensor, lse: Tensor | None, delta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """P after dropout (without its factor), and the gradient of the scores."""
    a = work.args
    scores = work.scores(block)
    dp = _per_group(upstream, work.v[:, :, block.keys].mT)
    if block.keep is not None:
        dp.mul_(block.keep)
    if lse is not None and delta is not None:
        p = _hide_(scores.sub_(lse).exp_(), block, 0.0)
        ds = dp.sub_(delta).mul_(p)
    else:
        activation = ELEMENTWISE[a.activation]
        ds = _hide_(activation.backward(dp, scores), block, 0.0)
        p = _hide_(activation.forward(scores), block, 0.0)
    if block.keep is not None:
        p = p * block.keep
    return p, ds


def _sum_to(ds: Tensor, bias: Tensor | None) -> Tensor:
    """Summed over the heads where the bias has one for all."""
    return ds.sum(1, keepdim=True) if bias is not None and bias.shape[1] == 1 else ds


register(Kernel("cpu_blocked", "jagged_attention", supports, forward))
register(Kernel("cpu_blocked", "jagged_attention_backward", supports, backward))
