"""Which kernel runs an op: a list in order of preference, each kernel able to say why it cannot.

A kernel is registered once, at import of its module. The first that supports the request on the
target runs; the reference, marked as fallback, stands last and supports everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemcompile.target import Target

FORCE = "GEM_KERNEL"  # names the kernel that must run, for tests and measurements


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    Attributes:
        name: unique among the op's kernels.
        op: the op's name without namespace, such as "jagged_attention".
        supports: given target and request, None or the reason why not.
        run: the implementation; its arguments are those that the op's body passes on.
        fallback: True for the reference, which is asked last.
    """

    name: str
    op: str
    supports: Callable[[Target, Any], str | None]
    run: Callable[..., Any]
    fallback: bool = False


_KERNELS: dict[str, list[Kernel]] = {}


def register(kernel: Kernel) -> Kernel:
    """Adds ``kernel`` behind those already there, but before the fallback."""
    kernels = _KERNELS.setdefault(kernel.op, [])
    if any(other.name == kernel.name for other in kernels):
        raise ValueError(f"kernel {kernel.name!r} of {kernel.op} is registered already")
    kernels.append(kernel)
    kernels.sort(key=lambda k: k.fallback)
    _choose.cache_clear()
    return kernel


def kernels_of(op: str) -> tuple[Kernel, ...]:
    """The op's kernels in order of preference."""
    return tuple(_KERNELS.get(op, ()))


def named(op: str, name: str) -> Kernel:
    """The op's kernel of this name, for a kernel that leaves a call to another."""
    return next(kernel for kernel in kernels_of(op) if kernel.name == name)


def choose(op: str, target: Target, request: Hashable) -> Kernel:
    """The kernel to run; raises RuntimeError when the one named by GEM_KERNEL cannot."""
    return _choose(op, target, request, os.environ.get(FORCE))


def why_not(op: str, target: Target, request: Hashable) -> list[tuple[str, str]]:
    """(name, reason) of every kernel that cannot run the request."""
    reasons = [(kernel.name, kernel.supports(target, request)) for kernel in kernels_of(op)]
    return [(name, reason) for name, reason in reasons if reason is not None]


@lru_cache(maxsize=1024)
def _choose(op: str, target: Target, request: Hashable, forced: str | None) -> Kernel:
    for kernel in kernels_of(op):
        if forced in (None, kernel.name) and kernel.supports(target, request) is None:
            return kernel
    reasons = "; ".join(f"{name}: {reason}" for name, reason in why_not(op, target, request))
    wanted = f"kernel {forced!r} ({FORCE})" if forced else "any kernel"
    raise RuntimeError(f"{wanted} cannot run {op} on {target}: {reasons or 'no such kernel'}")
