"""Which kernel a few typical attentions get on a target, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import gemcompile.backend  # noqa: F401  registers the kernels
from gemcompile.ops import kernels
from gemcompile.ops.attention_args import AttentionRequest
from gemcompile.target import Target

FORWARD, BACKWARD = "jagged_attention", "jagged_attention_backward"


@dataclass(frozen=True)
class Choice:
    """The kernels of one request.

    Attributes:
        request: what is asked for, in words.
        forward, backward: the kernel that runs, or "none".
        refused: kernel -> why it cannot run the request forward; a kernel that could, but stands
            behind the chosen one, is not in it.
    """

    request: str
    forward: str
    backward: str
    refused: dict[str, str]


def typical() -> dict[str, AttentionRequest]:
    """Requests of ranking models: self-attention over histories, and pooling by a few queries."""
    found = {}
    for activation in ("softmax", "gelu"):
        for dim in (64, 128):
            for dtype in (torch.bfloat16, torch.float32):
                name = f"{activation}, D {dim}, {str(dtype).removeprefix('torch.')}"
                found[name] = AttentionRequest(dtype, 8, 8, dim, dim, activation, causal=False)
    half = torch.bfloat16
    found["softmax, D 64, bfloat16, causal"] = AttentionRequest(half, 8, 8, 64, 64, "softmax", True)
    found["softmax, D 64, bfloat16, few queries"] = AttentionRequest(
        half, 8, 8, 64, 64, "softmax", False, short_queries=True
    )
    return found


def choices(target: Target) -> list[Choice]:
    """The kernels for every typical request; GEM_KERNEL is obeyed, as in a run."""
    return [
        Choice(
            name,
            _chosen(FORWARD, target, request),
            _chosen(BACKWARD, target, request),
            dict(kernels.why_not(FORWARD, target, request)),
        )
        for name, request in typical().items()
    ]


def _chosen(op: str, target: Target, request: AttentionRequest) -> str:
    try:
        return kernels.choose(op, target, request).name
    except RuntimeError:  # the one that GEM_KERNEL names cannot
        return "none"
