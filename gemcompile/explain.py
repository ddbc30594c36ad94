"""``gem.explain``: what gem would do with a model, without generating code for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
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
    from .backend import gem

    chosen = replace(Options.parse(options), inner="eager")
    twin = copy.deepcopy(model) if isinstance(model, torch.nn.Module) else model
    call_args, call_kwargs = pytree.tree_map(_copy, (args, kwargs))

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        return gem(gm, example_inputs, options=chosen)

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with record() as report, torch.random.fork_rng(devices=devices):
        torch.compile(twin, backend=backend, dynamic=True)(*call_args, **call_kwargs)
    return report


def _copy(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
