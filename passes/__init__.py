"""The passes: graph -> graph, on pre-dispatch ATen before autograd."""

from __future__ import annotations

from gemcompile.pass_manager import Pass

from .attention import FuseAttention
from .canonicalize import Canonicalize
from .padding import EliminatePadding
from .share_tiles import ShareTiles

__all__ = ["Canonicalize", "EliminatePadding", "FuseAttention", "ShareTiles", "forward"]


def forward() -> list[Pass]:
    """The forward passes in the order in which they run."""
    return [Canonicalize(), FuseAttention(), EliminatePadding(), ShareTiles()]
