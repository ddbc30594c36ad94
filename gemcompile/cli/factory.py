"""From ``module:factory`` or ``path/to/file.py:factory`` to a model and its arguments."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .errors import BadInput

FORM = "write module:factory or path/to/file.py:factory"
RETURNS = "return (model, args), with args a tuple, a dictionary of keyword arguments, or a tensor"


@dataclass(frozen=True)
class Call:
    """A model and what it is called with."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.model(*self.args, **self.kwargs)


def load(spec: str) -> Call:
    """Import the factory that ``spec`` names, and call it.

    Raises:
        BadInput: no such module or name, or something that is no factory.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise BadInput(f"{spec!r} names no factory; {FORM}")
    module = _file(place) if place.endswith(".py") else _module(place)
    factory = _follow(module, name, place)
    if not callable(factory):
        kind = type(factory).__name__
        raise BadInput(f"{name} in {place} is of type {kind}, not a function; {FORM}")
    try:
        made = factory()
    except Exception as e:
        raise BadInput(
            f"factory {spec} raised {_text(e)}; it must take no argument, and {RETURNS}"
        ) from e
    return _call(made, spec)


def _module(name: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path:  # a script's path starts at its own folder, not at the user's
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is not None and f"{name}.".startswith(f"{e.name}."):
            raise BadInput(
                f"there is no module {e.name!r}; run in the folder that holds it, install it, "
                f"or write path/to/file.py:factory"
            ) from e
        raise _broken(name, e) from e
    except Exception as e:
        raise _broken(name, e) from e


def _file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise BadInput(f"there is no file {place!r}; {FORM}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{place!r} cannot be imported; {FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as python path/to/file.py does
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise _broken(place, e) from e
    return module


def _broken(place: str, e: Exception) -> BadInput:
    return BadInput(f"importing {place} raised {_text(e)}; --debug shows the traceback")


def _follow(module: ModuleType, name: str, place: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else FORM
            raise BadInput(f"{place} has no {name!r}; {hint}")
        found = getattr(found, part)
    return found


def _call(made: object, spec: str) -> Call:
    if not isinstance(made, tuple) or len(made) != 2:
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise BadInput(f"factory {spec} returned a {type(made).__name__}{size}; it must {RETURNS}")
    model, args = made
    if not callable(model):
        kind = type(model).__name__
        raise BadInput(f"the model that factory {spec} returned is a {kind}; it must {RETURNS}")
    if isinstance(args, torch.Tensor):
        return Call(model, (args,), {})
    if isinstance(args, (tuple, list)):
        return Call(model, tuple(args), {})
    if isinstance(args, dict) and all(isinstance(k, str) for k in args):
        return Call(model, (), args)
    kind = type(args).__name__
    raise BadInput(f"the arguments that factory {spec} returned are a {kind}; it must {RETURNS}")


def _text(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"
