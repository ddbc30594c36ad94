"""Lists of tiles: the reference by its definition, the device's list against the reference.

Run as a script, under TRITON_INTERPRET=1, this file compares the two on CPU.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import old_numpy
from own_process import run_script
from torch import Tensor

from gemcompile.ops.tiles import KEYS, SECTIONS, _reference, section_ends

ODD = (0, 1, 37, 64, 65, 127, 128, 129, 700, 0, 259, 0)
ODD_KEYS = (77, 0, 256, 100, 193, 300, 128, 63, 1, 64, 31, 0)
BATCHES = ((ODD, ODD), (ODD, ODD_KEYS), (ODD_KEYS * 3, ODD * 3), ((0,), (4,)), ((), ()))
MASKS = ((False, -1, -1), (True, -1, -1), (False, -1, 70), (True, 20, -1), (False, 9, 4))


def offsets(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor((0, *lengths), device=device).cumsum(0).int()


def arguments(lengths: tuple[int, ...], keys: tuple[int, ...], device: str = "cpu") -> tuple:
    ends = offsets(lengths, device), offsets(keys, device).long()
    return *ends, sum(lengths) + 3, sum(keys) + 200


def lists(tiles: Tensor, q_rows: int, k_rows: int, batch: int) -> list[list[list[int]]]:
    """For each section: its header, then its tiles."""
    ends = section_ends(q_rows, k_rows, batch)
    pieces = [tiles[i:j] for i, j in zip([0, *ends], ends, strict=False)]
    found = []
    for piece in pieces:
        count = int(piece[0])
        records = piece[8 : 8 + 8 * count].view(-1, 8)[:, :6].tolist()
        found.append([piece[:2].tolist(), *records])
    return found


def compare(device: str) -> None:
    from gemcompile.lowering import tile_lists

    if device == "cpu":
        tile_lists.COMPARED = 16  # so that few sequences are compared in several steps
    for lengths, keys in BATCHES:
        for mask in MASKS:
            given = arguments(lengths, keys, device)
            sizes = *given[2:], len(lengths)
            found = lists(tile_lists.attention_tiles(*given, *mask).cpu(), *sizes)
            assert found == lists(_reference(*given, *mask).cpu(), *sizes), (lengths, keys, mask)
    print("equal")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=6),
    st.sampled_from(MASKS),
)
def test_every_row_is_in_one_tile_and_work_falls(lengths, mask):
    q, k = (tuple(side) for side in zip(*lengths, strict=True)) if lengths else ((), ())
    given = arguments(q, k)
    found = lists(_reference(*given, *mask), *given[2:], len(q))
    ends = [offsets(q).tolist(), offsets(k).tolist()]
    causal, left, right = mask
    for (side, block), ((count, in_use), *tiles) in zip(SECTIONS, found, strict=True):
        own, other = ends[side], ends[1 - side]
        rows, works = [], []
        for first, start, length, other_start, other_length, b in tiles:
            assert (start, length) == (own[b], own[b + 1] - own[b])
            assert (other_start, other_length) == (other[b], other[b + 1] - other[b])
            last = min(first + block, length)
            rows += range(start + first, start + last)
            i, j = torch.arange(first, first + block)[:, None], torch.arange(other_length)[None]
            if side == KEYS:
                i, j = torch.arange(other_length)[:, None], torch.arange(first, first + block)[None]
            shift = length - other_length if side == KEYS else other_length - length
            limit = 0 if causal else right
            seen = j <= i + shift + limit if limit >= 0 and left < 0 else (i == i) & (j == j)
            works.append(int(seen.any(1 if side == KEYS else 0).sum()))
        assert sorted(rows) == list(range(own[-1])) and in_use == own[-1] and count == len(tiles)
        assert works == sorted(works, reverse=True)


def test_the_op_says_its_size_without_running():
    given = arguments(ODD, ODD_KEYS)
    torch.library.opcheck(
        torch.ops.gem.attention_tiles.default,
        (*given, True, -1, -1),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton package")
@old_numpy
def test_the_devices_list_under_the_interpreter(tmp_path):
    assert run_script(__file__, cache=tmp_path, interpret=True) == "equal\n"


@pytest.mark.cuda
def test_the_devices_list_on_cuda():
    compare("cuda")


if __name__ == "__main__":
    compare("cpu")
