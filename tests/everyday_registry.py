"""What an everyday model is, and the list of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Everyday:
    """A model and one call of it.

    Attributes:
        autocast: call it inside ``torch.autocast("cpu", dtype=torch.bfloat16)``.
        low_precision: bfloat16 is computed with somewhere.
        eager_differs: why stock Inductor's gradients are not eager's, where they are not; else "".
        graphs: how many graphs Dynamo makes of it.
        falls_back: why gem hands the graph to plain Inductor, or "".
        random_attention: attention dropout in training, for which gem's attention draws a random
            stream of its own.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    low_precision: bool = False
    eager_differs: str = ""
    graphs: int = 1
    falls_back: str = ""
    random_attention: bool = False


MODELS: dict[str, Callable[[], Everyday]] = {}


def everyday(build: Callable[[], Everyday]) -> Callable[[], Everyday]:
    """Add a builder to `MODELS` under its own name."""
    MODELS[build.__name__] = build
    return build


def rows(n: int = 4, width: int = 8, grad: bool = False) -> Tensor:
    return torch.randn(n, width, requires_grad=grad)
