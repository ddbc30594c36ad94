"""pack_index and gem::gather_rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from gemcompile.ops import pack_index

gather_rows = torch.ops.gem.gather_rows
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)


def test_pack_index_of_a_mask_with_holes():
    packed = pack_index(MASK, multiple=4)
    assert packed.index.tolist() == [0, 1, 3, 8, 10, -1, -1, -1]
    assert packed.inverse.tolist() == [0, 1, -1, 2, -1, -1, -1, -1, 3, -1, 4, -1]
    assert packed.offsets.tolist() == [0, 3, 3, 5]
    assert packed.positions.tolist() == [0, 1, 3, 0, 2, 0, 0, 0]
    assert [x.dtype for x in packed] == [torch.int64, torch.int64, torch.int32, torch.int32]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 5)])
def test_pack_index_of_nothing_has_one_group(shape):
    packed = pack_index(torch.zeros(shape, dtype=torch.bool))
    assert packed.index.tolist() == [-1] * 128
    assert packed.inverse.tolist() == [-1] * (shape[0] * shape[1])
    assert packed.offsets.tolist() == [0] * (shape[0] + 1)


def test_pack_index_wants_a_mask():
    with pytest.raises(TypeError, match=r"bool mask \[B, L\], got torch.int64 \[3, 4\]"):
        pack_index(MASK.long())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), max_size=6),
    st.sampled_from([1, 4, 128]),
)
def test_packing_and_unpacking_keeps_the_masked_rows(mask, multiple):
    mask = torch.tensor(mask, dtype=torch.bool).reshape(-1, 5)
    packed = pack_index(mask, multiple)
    assert packed.index.shape[0] % multiple == 0
    x = torch.arange(mask.numel() * 2).reshape(-1, 2) + 1
    there = gather_rows(x, packed.index, packed.inverse)
    back = gather_rows(there, packed.inverse, packed.index)
    assert torch.equal(back, x * mask.flatten()[:, None])
    total = int(packed.offsets[-1])
    assert torch.equal(there[:total], x[mask.flatten()])
    assert not there[total:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_gather_rows_of_every_type_and_rank(dtype, shape):
    packed = pack_index(MASK, multiple=4)
    x = torch.randint(0, 9, (12, *shape)).to(dtype)
    out = gather_rows(x, packed.index, packed.inverse)
    assert out.dtype is dtype
    assert torch.equal(out[:5], x[MASK.flatten()])
    assert not out[5:].any()


def test_nan_in_unread_rows_stays_there():
    packed = pack_index(MASK, multiple=4)
    x = torch.randn(12, 3).masked_fill(~MASK.flatten()[:, None], torch.nan).requires_grad_()
    out = gather_rows(x, packed.index, packed.inverse)
    assert not out.isnan().any()
    grad = torch.randn(8, 3)
    grad[5:] = torch.nan
    (dx,) = torch.autograd.grad(out, x, grad)
    expected = torch.zeros(12, 3)
    expected[MASK.flatten()] = grad[:5]
    assert torch.equal(dx, expected)


def test_opcheck():
    packed = pack_index(MASK, multiple=4)
    x = torch.randn(12, 3, requires_grad=True)
    torch.library.opcheck(gather_rows.default, (x, packed.index, packed.inverse))


def test_inductor_fuses_it_with_its_neighbours():
    """One loop forward and one backward, no call out to the op."""
    frames = torch.compile(
        lambda x, index, inverse: (gather_rows(x * 2, index, inverse) + 1).relu(), dynamic=True
    )
    packed = pack_index(MASK, multiple=4)
    x = torch.randn(12, 3, requires_grad=True)

    def step():
        out = frames(x, packed.index, packed.inverse)
        return out, torch.autograd.grad(out.sum(), x)[0]

    (out, dx), code = run_and_get_code(step)
    reference = (gather_rows(x * 2, packed.index, packed.inverse) + 1).relu()
    torch.testing.assert_close(out, reference)
    torch.testing.assert_close(dx, torch.autograd.grad(reference.sum(), x)[0])
    assert len(code) == 2
    for program in code:
        assert "gem.gather_rows" not in program and "extern_kernels." not in program
        assert program.count("async_compile.cpp") == 1


@pytest.mark.cuda
def test_pack_index_reads_back_once(monkeypatch):
    mask = MASK.cuda()
    pack_index(mask)  # warm
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchroniz") as caught:
            packed = pack_index(mask, multiple=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
    assert packed.index.tolist() == [0, 1, 3, 8, 10, -1, -1, -1]
