"""Labels follow dimensions: whatever views lie between, the labels say how to undo or redo them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gemcompile.graph import Editor
from gemcompile.passes.attention_arrange import Arranger, Sizes
from gemcompile.passes.axes import Axis, fresh, regroup, settle_all, through
from gemcompile.passes.contractions import contraction

Step = Callable[[Tensor], Tensor]

# Equal sizes on purpose: sizes must not tell the axes apart.
SIZES = (4, 4, 2, 4)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """A random chain of views, as (name, random number)."""
    names = ["permute", "transpose", "merge", "split", "unsqueeze", "squeeze", "expand", "repeat"]
    chain = st.lists(st.tuples(st.sampled_from(names), st.integers(0, 10**6)), max_size=6)
    return draw(chain)


def apply(x: Tensor, name: str, seed: int) -> Tensor:
    rank = x.dim()
    dim = seed % rank
    if name == "permute":
        return x.permute([(i + dim) % rank for i in range(rank)])
    if name == "transpose":
        return x.transpose(dim, (seed // rank) % rank)
    if name == "merge" and rank > 1:
        dim = seed % (rank - 1)
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
    if name == "split" and x.shape[dim] % 2 == 0:
        return x.reshape(*x.shape[:dim], 2, x.shape[dim] // 2, *x.shape[dim + 1 :])
    if name == "unsqueeze":
        return x.unsqueeze(seed % (rank + 1))
    if name == "squeeze" and x.shape[dim] == 1 and rank > 1:
        return x.squeeze(dim)
    if name == "expand" and x.shape[dim] == 1 and x.numel() < 4096:
        return x.expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])
    if name == "repeat" and x.numel() < 1024:
        return x.repeat_interleave(2, dim)
    return x


@settings(max_examples=60, deadline=None)
@given(steps())
def test_labels_rebuild_a_chain_of_views(chain: list[tuple[str, Any]]) -> None:
    def fn(x: Tensor) -> Tensor:
        for name, seed in chain:
            x = apply(x, name, seed)
        return x.contiguous()

    x = torch.arange(float(4 * 4 * 2 * 4)).view(SIZES)
    gm = make_fx(fn, tracing_mode="fake", pre_dispatch=True)(x)
    (out,) = gm.graph.find_nodes(op="output")
    end = out.args[0]
    labels = fresh(end)
    place = (end, labels)
    while (step := through(*place)) is not None:
        place = step
    assert place[0].op == "placeholder"
    edit = Editor(gm, like=end, before=out)
    rebuilt = Arranger(edit, Sizes(gm.graph), [end])(*place, labels)
    out.args = ((end, rebuilt),)
    gm.recompile()
    theirs, ours = gm(x)
    assert torch.equal(theirs, ours.reshape(theirs.shape))


def test_a_reshape_that_does_not_split_evenly_is_not_followed() -> None:
    assert regroup([(Axis(6),), (Axis(4),)], [8, 3]) is None


def test_splits_are_seen_by_all_who_hold_the_axis() -> None:
    axis, inner = Axis(12), Axis(5)
    parts = regroup([(axis,), (inner,)], [3, 20])
    assert parts is not None
    assert [a.size for a in settle_all([(axis,)])[0]] == [3, 4]
    assert settle_all([parts[1]])[0][-1] is inner


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [
        ("bhqd,bhkd->bhqk", "bhqd", "bhkd"),
        ("bqhd, bkhd -> bhqk", "bqhd", "bkhd"),
        ("...qd,...kd->...qk", "bhqd", "bhkd"),
        ("xz,yz", "xz", "yz"),
    ],
)
def test_einsum_is_read_by_its_letters(equation: str, left: str, right: str) -> None:
    sizes = dict(zip("bhqkdxyz", (2, 3, 4, 4, 4, 4, 4, 4)))
    a, b = (torch.randn([sizes[c] for c in letters]) for letters in (left, right))
    gm = make_fx(lambda a, b: torch.einsum(equation, a, b), pre_dispatch=True)(a, b)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default)
    found = contraction(node)
    assert found is not None
    of_out = {}
    labels = fresh(node)
    pulled = found.pull(labels)
    assert pulled is not None
    for letters, operand in ((left, pulled[0]), (right, pulled[1])):
        for letter, label in zip(letters, operand):
            assert of_out.setdefault(letter, label) == label
    assert len(set(of_out.values())) == len(of_out)


@pytest.mark.parametrize("equation", ["bhk,bhk->b", "ii,ij->j", "bk,bk->bk", "ab,bc,cd->ad"])
def test_other_einsums_are_no_contraction(equation: str) -> None:
    sizes = equation.partition("->")[0].split(",")
    gm = make_fx(lambda *xs: torch.einsum(equation, *xs), pre_dispatch=True)(
        *(torch.randn([3] * len(s)) for s in sizes)
    )
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default)
    assert contraction(node) is None
