"""In-place operators on parts of a tensor: seen through its other views, and not by other parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gemcompile import gem, record

PARTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(3, -1),
    "split": lambda x: x.split(4, -1),
    "split_with_sizes": lambda x: x.split([4, 4, 4], -1),
    "tensor_split": lambda x: x.tensor_split(3, -1),
    "unbind": lambda x: x.unflatten(-1, (3, 4)).unbind(-2),
}


def read_back(x: Tensor, part: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
    """The change of one part shows in the whole, and in a view that was taken before."""
    whole = x @ x.mT
    before = whole[..., 2:6]
    q, _, v = part(whole)
    q.mul_(2)
    v.mT.add_(1)
    return whole.sum(-1) + before.sum(-1)


def attend(x: Tensor, part: Callable[[Tensor], tuple[Tensor, ...]]) -> Tensor:
    """The change of one part does not show in the others."""
    q, k, v = part(x @ x.mT)
    q.mul_(0.5)
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("fn", [read_back, attend])
def test_part_changed_in_place(fn: Callable[..., Tensor], name: str) -> None:
    x = torch.randn(2, 12, 12)
    torch._dynamo.reset()
    with record() as report:
        found = torch.compile(fn, backend=gem, options={"inner": "eager"})(x, PARTS[name])
    torch.testing.assert_close(found, fn(x, PARTS[name]))
    if fn is attend:
        report.expect(attention=1)
