"""The options of the backend: one frozen record, all of it part of the compile caches' key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .pass_manager import Pass


@dataclass(frozen=True)
class Options:
    """What ``torch.compile(model, backend="gem", options={...})`` accepts.

    Attributes:
        pack: "auto" packs where the cost rule says that it pays on the first batch, True wherever
            padding is proven dead, False nowhere.
        padded_outputs: "exact" keeps every element of the model's outputs; "zero" is the user's
            word that rows outside the mask of an input may hold anything, and outputs there become
            0.
        precision: None, or a recipe object for reduced-precision passes.
        passes: extra `Pass` objects, run in addition to gem's own.
        disable: names of passes not to run.
        inner: "inductor", or "eager" to run the rewritten graph without code generation.
        verify: compare every rewritten graph with the original on the first batch, gradients
            included.
        strict: raise where gem would otherwise fall back or record an assumption.
        inductor: Inductor configuration for this compile, as ``torch.compile(options=...)`` takes
            it.
        sharding: a sharding plan.
        overlap: an overlap schedule's options.

    Raises:
        ValueError: a value outside the ones listed here.
    """

    pack: str | bool = "auto"
    padded_outputs: str = "exact"
    precision: Any = None
    passes: tuple[Pass, ...] = ()
    disable: tuple[str, ...] = ()
    inner: str = "inductor"
    verify: bool = False
    strict: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)
    sharding: Any = None
    overlap: Any = None

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
                listed = ", ".join(repr(a) for a in allowed)
                raise ValueError(f"option {name}={value!r} is not one of {listed}")
        object.__setattr__(self, "passes", tuple(self.passes))
        names = (self.disable,) if isinstance(self.disable, str) else tuple(self.disable)
        object.__setattr__(self, "disable", names)
        for p in self.passes:
            if not isinstance(p, Pass):
                raise ValueError(
                    f"option passes holds {p!r}, which is not a gemcompile.Pass object"
                )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | Options | None) -> Options:
        """Options from the mapping that torch.compile gives; an unknown name is a ValueError."""
        if isinstance(options, Options):
            return options
        known = [f.name for f in fields(cls)]
        for name in options or {}:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.4)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ValueError(f"unknown gem option {name!r}; {hint}")
        return cls(**(options or {}))

    def identity(self) -> tuple[object, ...] | None:
        """A value equal in every process for equal options, or None where a user pass has none."""
        parts: list[object] = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "passes":
                ids = tuple(p.identity() for p in value)
                if any(i is None for i in ids):
                    return None
                parts.append(ids)
            else:
                parts.append(repr(sorted(value.items()) if isinstance(value, Mapping) else value))
        return tuple(parts)


_ALLOWED: dict[str, tuple[object, ...]] = {
    "pack": ("auto", True, False),
    "padded_outputs": ("exact", "zero"),
    "inner": ("inductor", "eager"),
    "verify": (True, False),
    "strict": (True, False),
}
