"""Which keys a query sees, as one rule: causal masks, windows, blocks, HSTU's targets and context.

Places. A row stands at its rank in its sequence, or at its position where positions are given. For
everything but blocks a query's place is moved by lk - lq where no positions are given, so that the
last query stands at the last key.

    causal    j <= i
    window    i - left <= j <= i + right
    block     i // block == j // block, both counted from the start of their own sequence

History (HSTU, Zhai et al. 2024; the rule of github.com/meta-recsys/generative-recommenders). Of n
keys the first c are contextual and the last t are targets. Places are folded before they are
compared: x becomes min(max(x, c - 1), n - t), so that all contextual rows stand at one place and
all targets at one. Then

    causal    j == i before folding, or j < i after it: targets do not see each other
    window    as above, folded: every target looks back from the end of the history
    context   a contextual row sees, besides, the whole history

With positions the rule holds where they count a sequence's keys from 0 on without holes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs


def visible(
    a: AttentionArgs, i: Tensor, j: Tensor, sequences: Tensor, shift: Tensor, lengths: Tensor
) -> Tensor | None:
    """Which of the keys at places j the mask lets the queries at places i see.

    Args:
        i, j: int64, places before the shift; they broadcast against each other and against
            the three arguments that follow.
        sequences: int64, whose number in the batch.
        shift: int64, by how much a query's place is moved.
        lengths: int64, lk of the sequence.

    Returns:
        bool of the broadcast shape; None where the mask hides nothing.
    """
    if not a.masked:
        return None
    in_block = torch.ones((), dtype=torch.bool, device=i.device)
    if a.block:
        in_block = i // a.block == j // a.block
    i = i + shift
    if not a.history:
        return _between(a, i, j, j <= i) & in_block
    first = _of(a.num_contextual, sequences) - 1
    last = lengths - _of(a.num_targets, sequences)
    place, key_place = _fold(i, first, last), _fold(j, first, last)
    seen = _between(a, place, key_place, (i == j) | (key_place < place))
    context = (i >= 0) & (place == first) & (key_place < last)
    return (seen | context) & in_block


def relative_index(a: AttentionArgs, i: Tensor, j: Tensor, shift: Tensor | int) -> Tensor:
    """Columns of the bias table [.., 2 * reach + 1], from places as for ``visible``.

    Column reach + j - i; clamped, as places of rows that are there to fill up may lie outside.
    """
    assert a.bias is not None
    reach = a.bias.shape[-1] // 2
    return (j - i - shift).clamp(-reach, reach) + reach


def _fold(places: Tensor, first: Tensor, last: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(places, first), last)


def _of(counts: Tensor | None, sequences: Tensor) -> Tensor:
    return torch.zeros_like(sequences) if counts is None else counts[sequences].long()


def _between(a: AttentionArgs, i: Tensor, j: Tensor, causal: Tensor) -> Tensor:
    seen = causal if a.causal else torch.ones((), dtype=torch.bool, device=i.device)
    if a.window_left >= 0:
        seen = seen & (i - j <= a.window_left)
    if a.window_right >= 0:
        seen = seen & (j - i <= a.window_right)
    return seen
