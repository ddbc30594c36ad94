"""Cutting a jagged batch into pieces that one CPU call works on.

A piece is a slice of rows where it can be: one long sequence, or neighbouring sequences of equal
length (a padded batch is one piece). Short sequences, which would each cost more to call than to
compute, are collected by length into pieces addressed by an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT = 48  # sequences up to this length are collected
COLLECTED = 64  # at most so many in one piece


@dataclass(frozen=True)
class Rows:
    """The rows of G sequences, each ``length`` long: a slice of all rows, or an index.

    Where lengths differ, ``index`` repeats the last row of the shorter ones, so that what is read
    there is finite, and ``live`` [G, length] tells those repeats from the rows themselves.
    """

    start: int
    count: int
    length: int
    index: Tensor | None = None
    live: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """[rows, ...] to [G, length, ...]; a view where possible."""
        if self.index is not None:
            return x[self.index]
        stop = self.start + self.count * self.length
        rows: Tensor = x[self.start : stop].unflatten(0, (self.count, self.length))
        return rows

    def put(self, x: Tensor, values: Tensor) -> None:
        """Writes [G, length, ...] into the rows of x [rows, ...]."""
        if self.index is None:
            self.take(x).copy_(values)
        elif self.live is None:
            x[self.index] = values.to(x.dtype)
        else:
            x[self.index[self.live]] = values[self.live].to(x.dtype)


@dataclass(frozen=True)
class Piece:
    """G sequences that are computed together.

    Attributes:
        sequences: their numbers in the batch.
        q, k: their query and key rows.
        q_lengths, k_lengths: int64 [G], the true lengths.
    """

    sequences: list[int]
    q: Rows
    k: Rows
    q_lengths: Tensor
    k_lengths: Tensor


def pieces(
    q_offsets: list[int], k_offsets: list[int], most_keys: int | None = None
) -> Iterator[Piece]:
    """Covers every sequence that has both a query and a key.

    Neighbours of equal length join one piece, with ``most_keys`` only up to that many keys.
    """
    lengths = [
        (q_offsets[b + 1] - q_offsets[b], k_offsets[b + 1] - k_offsets[b])
        for b in range(len(q_offsets) - 1)
    ]
    short: list[int] = []
    b = 0
    while b < len(lengths):
        first, lq, lk = b, *lengths[b]
        last = len(lengths) if most_keys is None else b + max(1, most_keys // max(1, lk))
        while b < min(last, len(lengths)) and lengths[b] == (lq, lk):
            b += 1
        if lq == 0 or lk == 0:
            continue
        if b - first == 1 and max(lq, lk) <= SHORT:
            short.append(first)
        else:
            yield _sliced(range(first, b), q_offsets, k_offsets, lq, lk)
    short.sort(key=lambda s: lengths[s])
    for i in range(0, len(short), COLLECTED):
        yield _collected(short[i : i + COLLECTED], q_offsets, k_offsets)


def _sliced(
    sequences: range, q_offsets: list[int], k_offsets: list[int], lq: int, lk: int
) -> Piece:
    first, count = sequences.start, len(sequences)
    return Piece(
        list(sequences),
        Rows(q_offsets[first], count, lq),
        Rows(k_offsets[first], count, lk),
        torch.full((count,), lq),
        torch.full((count,), lk),
    )


def _collected(sequences: list[int], q_offsets: list[int], k_offsets: list[int]) -> Piece:
    q, q_lengths = _indexed(sequences, q_offsets)
    k, k_lengths = _indexed(sequences, k_offsets)
    return Piece(sequences, q, k, q_lengths, k_lengths)


def _indexed(sequences: list[int], offsets: list[int]) -> tuple[Rows, Tensor]:
    starts = torch.tensor([offsets[s] for s in sequences])
    lengths = torch.tensor([offsets[s + 1] - offsets[s] for s in sequences])
    longest = int(lengths.max())
    rank = torch.arange(longest)
    index = starts[:, None] + torch.minimum(rank, lengths[:, None] - 1)
    live = rank < lengths[:, None]
    all_live = bool(live.all())
    return Rows(0, len(sequences), longest, index, None if all_live else live), lengths


def visible_keys(
    k: Tensor, v: Tensor, offsets: list[int], key_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Keys and values without the masked rows: (k, v, which rows were kept, offsets)."""
    kept = key_mask[: offsets[-1]].nonzero().squeeze(1)
    before = torch.zeros(offsets[-1] + 1, dtype=torch.int64)
    torch.cumsum(key_mask[: offsets[-1]], 0, out=before[1:])
    return k[kept], v[kept], kept, before[offsets].tolist()
