"""``gem.explain``: what gem would do with a model, without generating code for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree

from .options import Options
from .report import Report, record


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | Options | None = None,
    **kwargs: Any,
) -> Report:
    """The report of ``torch.compile(model, backend="gem", options=options)(*args, **kwargs)``.

    Runs on copies of the model and of the arguments, so that buffers, gradients, the random state
    and the training flag are as before. The rewritten graphs are run without code generation.

    Args:
        model: a module or a function of tensors.
        options: as torch.compile takes them.

    Raises:
        ValueError: an unknown option.
    """
    return dry_run(model, args, kwargs, Options.parse(options))[0]


def dry_run(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Options,
    backward: bool = False,
) -> tuple[Report, int | None]:
    """What `explain` does; with ``backward``, the gradient of the outputs' sum is taken, too.

    Returns:
        The report, and how many parameters and inputs have a gradient; None: no backward ran.
    """
    from .backend import gem

    chosen = replace(options, inner="eager")
    twin = _twin(model, {})
    call_args, call_kwargs = pytree.tree_map(_copy, (args, dict(kwargs)))

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return gem(gm, example_inputs, options=chosen)

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with record() as report, torch.random.fork_rng(devices=devices):
        compiled: Any = torch.compile(twin, backend=backend, dynamic=True)
        outputs = compiled(*call_args, **call_kwargs)
        gradients = _backward(outputs) if backward else None
    return report, gradients


def _backward(outputs: Any) -> int | None:
    """How many parameters and inputs the outputs' sum has gradients for; None: no graph.

    Nothing is added to any ``.grad``: a tensor that the model reaches by a global name is no copy.
    """
    roots = [
        x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad
    ]
    if not roots:
        return None
    ones = [torch.ones_like(x) for x in roots]
    found = torch.autograd.grad(roots, _leaves(roots), ones, allow_unused=True)
    return sum(g is not None for g in found)


def _leaves(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters and inputs that the roots were computed from."""
    leaves = [x for x in roots if x.grad_fn is None]
    queue: list[Any] = [x.grad_fn for x in roots]
    seen: set[Any] = {None}
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        queue += [child for child, _ in node.next_functions]
    return leaves


def _twin(x: Any, memo: dict[int, Any]) -> Any:
    """``x`` with every module and tensor copied that a call of it can reach by name."""
    x = getattr(x, "_orig_mod", x)  # what torch.compile made, of a module or of a function
    x = getattr(x, "_torchdynamo_orig_callable", x)
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x, memo)
    if isinstance(x, MethodType):
        return MethodType(x.__func__, _twin(x.__self__, memo))
    if isinstance(x, functools.partial):
        keywords = {k: _twin(v, memo) for k, v in x.keywords.items()}
        return functools.partial(_twin(x.func, memo), *(_twin(a, memo) for a in x.args), **keywords)
    if isinstance(x, FunctionType):
        return memo[id(x)] if id(x) in memo else _twin_function(x, memo)
    return _copy(x)


def _twin_function(f: FunctionType, memo: dict[int, Any]) -> FunctionType:
    memo[id(f)] = f  # a function that calls itself
    closure = tuple(CellType(_twin(cell.cell_contents, memo)) for cell in f.__closure__ or ())
    used = {name: f.__globals__[name] for name in f.__code__.co_names if name in f.__globals__}
    modules = {k: _twin(v, memo) for k, v in used.items() if isinstance(v, torch.nn.Module)}
    twin = FunctionType(
        f.__code__, {**f.__globals__, **modules}, f.__name__, f.__defaults__, closure
    )
    twin.__kwdefaults__ = f.__kwdefaults__
    return twin


def _copy(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
