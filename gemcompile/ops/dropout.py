"""Counter-based dropout: whether a probability is kept is a pure function of where it stands.

Forward, backward, recompute and every kernel derive the same mask from (seed, query row, head,
key), so no mask is ever stored. Each (seed, row, head) owns a random affine sequence over the keys,
modulo 2^32, which a xor-shift-multiply hash scrambles. The multipliers are those of "lowbias32"
from the hash-prospector project; right shifts are arithmetic, as PyTorch has no logical ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

# As signed 32-bit numbers.
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B - 2**32
GOLDEN = 0x9E3779B9 - 2**32
SALT = 0x5BD1E995


def drop_threshold(p: float) -> int:
    """Signed 32-bit hashes below this number are dropped."""
    return min(int(p * 2**32), 2**32 - 1) - 2**31


def keep_scale(p: float) -> float:
    """The factor on kept probabilities, so that the expectation is unchanged."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _mix(x: Tensor) -> Tensor:
    """Scrambles int32 in place; the high bits are the best."""
    x ^= x >> 15
    x *= MIX_1
    x ^= x >> 15
    x *= MIX_2
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
    # The seed is scrambled first: neighbouring seeds must not give the same masks a row apart.
    seed = _mix(_mix(low ^ SALT) ^ high)
    start = _mix(_mix(rows + seed) ^ (heads * GOLDEN))
    step = _mix(start ^ SALT) | 1  # odd, so that the sequence has full period
    return _mix((keys * step).add_(start)) >= drop_threshold(p)
