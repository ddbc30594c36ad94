"""torch.compile's modes and the option ``inductor``, as Inductor's configuration of one compile."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch._inductor import config

from .options import Options


def inductor_patches(mode: str | None, options: Options) -> dict[str, Any]:
    """Inductor's settings for ``mode``, and over them those of ``options.inductor``.

    torch hands a mode to Inductor alone and to other backends as a word; the words mean here what
    they mean there. ``None`` and "default" change nothing.

    Raises:
        ValueError: no such mode or setting.
    """
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    name = mode or "default"
    if name not in modes:
        raise ValueError(f"mode={mode!r} is not one of {', '.join(map(repr, modes))}")
    for setting in options.inductor:
        if setting not in (known := config.get_config_copy()):
            near = difflib.get_close_matches(setting, known, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else "see torch._inductor.list_options()"
            raise ValueError(f"option inductor has an unknown setting {setting!r}; {hint}")
    return {**modes[name], **options.inductor}


def asks_for_cuda_graphs(patches: dict[str, Any]) -> bool:
    """By mode, by option, or for the whole process."""
    return bool(patches.get("triton.cudagraphs", config.triton.cudagraphs))
