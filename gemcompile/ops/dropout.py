"""Counter-based dropout: whether a probability is kept is a pure function of where it stands.

Forward, backward, recompute and every kernel derive the same mask from (seed, query row, head, key),
so no mask is ever stored. The hash is the 32-bit finaliser "lowbias32" of the hash-prospector
project; each (row, head) owns a random affine sequence over the keys, which is hashed once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The two multipliers of lowbias32 and two odd constants, as signed 32-bit numbers.
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B - 2**32
GOLDEN = 0x9E3779B9 - 2**32
SALT = 0x5BD1E995


def drop_threshold(p: float) -> int:
    """Hashes (31 bits) below this number are dropped."""
    return min(int(p * 2**31), 2**31 - 1)


def keep_scale(p: float) -> float:
    """The factor on kept probabilities, so that the expectation is unchanged."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _mix(x: Tensor) -> Tensor:
    """lowbias32 on int32, in place; right shifts are made logical by masking the sign bits off."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= MIX_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= MIX_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def keep_mask(seed: Tensor, rows: Tensor, heads: Tensor, keys: Tensor, p: float) -> Tensor:
    """Which entries survive dropout with probability ``p``.

    Args:
        seed: int64 [1].
        rows: int32, the query's row in the packed tensor.
        heads: int32, the query head.
        keys: int32, the key's rank in its sequence. The three broadcast against each other.

    Returns:
        bool of the broadcast shape, True where the entry is kept.
    """
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    start = _mix(_mix(rows + low) ^ high ^ (heads * GOLDEN))
    step = _mix(start ^ SALT) | 1
    return _mix(keys * step + start).bitwise_and_(0x7FFFFFFF) >= drop_threshold(p)
