"""What gem adds to the compile caches' key: its source, its options, the user's passes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from .options import Options


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Hash of every Python file of the three wings: editing any of them is a cache miss."""
    here = Path(__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for folder in (here, here / "passes", here / "lowering"):
        for path in sorted(folder.resolve().rglob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Stamp(CustomGraphPass):
    """A post-grad pass that changes nothing and makes gem part of Inductor's and AOTAutograd's
    cache keys.

    The user's own pass at the same hook runs inside it.
    """

    def __init__(self, options: Options, chained: Callable[[Graph], Any] | None) -> None:
        self.options_identity: tuple[object, ...] | None = options.identity()
        self.chained = chained

    def __call__(self, g: Graph) -> None:
        if self.chained is not None:
            self.chained(g)

    def uuid(self) -> Any | None:
        """None, which makes the caches step aside, where a user pass has no stable identity."""
        if self.options_identity is None:
            return None
        theirs = None
        if self.chained is not None:
            theirs = self.chained.uuid() if isinstance(self.chained, CustomGraphPass) else None
            if theirs is None:
                return None
        return ("gem", source_digest(), self.options_identity, theirs)


def stamped(options: Options, patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor's configuration patches with gem's stamp added."""
    hook = "post_grad_custom_pre_pass"
    theirs = patches.get(hook, getattr(inductor_config, hook))
    if isinstance(theirs, (list, tuple)):
        theirs = _Several(tuple(theirs)) if theirs else None
    return {**patches, hook: Stamp(options, theirs)}


class _Several(CustomGraphPass):
    """torch 2.13 takes a list of passes at one hook."""

    def __init__(self, passes: tuple[Callable[[Graph], Any], ...]) -> None:
        self.passes = passes

    def __call__(self, g: Graph) -> None:
        for p in self.passes:
            p(g)

    def uuid(self) -> Any | None:
        ids = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.passes)
        return None if None in ids else ids
