"""The ops ``gem::jagged_attention`` and its backward: schema, fake kernels, autograd.

    out, lse = gem::jagged_attention(q, k, v, q_offsets, k_offsets, key_mask, q_positions,
        k_positions, bias, out_scale, dropout_seed, activation, scale, causal, dropout_p,
        max_q, max_k, window_left=-1, window_right=-1, block=0, num_targets=None,
        num_contextual=None, tiles=None, deterministic=False)

Shapes and types: ``AttentionArgs``. out [Tq, H, Dv] has q's type; lse [Tq, H] float32 is the
natural log of the row's sum for softmax, +inf where a row sees no key (so that exp(score - lse) is
0), and has size [0] for the other activations. Rows at or past ``q_offsets[-1]`` get 0, as do their
gradients.

The backward is an op of its own, so that it stays one node through AOTAutograd. Neither op reads a
device value back; max_q and max_k are bounds on the lengths that size grids, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemcompile.ops import attention_reference, kernels
from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.target import Target

FORWARD, BACKWARD = "jagged_attention", "jagged_attention_backward"

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor q_offsets, Tensor k_offsets, Tensor? key_mask, "
    "Tensor? q_positions, Tensor? k_positions, Tensor? bias, Tensor? out_scale, "
    "Tensor? dropout_seed, str activation, float scale, bool causal, float dropout_p, "
    "SymInt max_q, SymInt max_k"
)
_MASKS = (
    "int window_left=-1, int window_right=-1, int block=0, Tensor? num_targets=None, "
    "Tensor? num_contextual=None, Tensor? tiles=None, bool deterministic=False"
)
_REQUIRED = 17  # arguments without a default
_DEFAULTS = (-1, -1, 0, None, None, None, False)  # of the others
# Kernels take any strides, so Inductor may lay inputs out as it likes.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

_library = torch.library.Library("gem", "FRAGMENT")
_library.define(f"{FORWARD}({_INPUTS}, {_MASKS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    f"{BACKWARD}(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, bool bias_grad, {_MASKS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)


def _repeating(args: AttentionArgs) -> AttentionArgs:
    """The arguments, deterministic where torch.use_deterministic_algorithms says so by now."""
    if args.deterministic or not torch.are_deterministic_algorithms_enabled():
        return args
    return replace(args, deterministic=True)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    args = _repeating(AttentionArgs(*inputs))
    kernel = kernels.choose(FORWARD, Target.of(args.q.device), args.request())
    out, lse = kernel.run(args)
    return out, lse


def _backward(dout: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, (out, lse, bias_grad), masks = rest[:17], rest[17:20], rest[20:]
    args = _repeating(AttentionArgs(*inputs, *masks))
    request = replace(args.request(), bias_grad=bias_grad and args.bias is not None)
    kernel = kernels.choose(BACKWARD, Target.of(args.q.device), request)
    dq, dk, dv, dbias = kernel.run(dout, args, out, lse, bias_grad)
    return dq, dk, dv, dbias


def _fake_forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    q, v, activation = inputs[0], inputs[2], inputs[11]
    rows, heads = q.shape[0], q.shape[1]
    lse_shape = (rows, heads) if activation == "softmax" else (0,)
    return q.new_empty(rows, heads, v.shape[2]), q.new_empty(lse_shape, dtype=torch.float32)


def _fake_backward(dout: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, bias, bias_grad = rest[0], rest[1], rest[2], rest[8], rest[19]
    if bias is None:
        dbias = q.new_empty(0)
    else:
        dbias = bias.new_empty(bias.shape if bias_grad else (0,))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


class _Autograd(torch.autograd.Function):
    """Autograd of the op. By ``torch.library.register_autograd``, which goes through the schema in
    every call to fill in what was left out, a call cost the host more than all the rest of it."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *inputs: Any) -> Any:
        out, lse = _below_autograd(keys, inputs)
        ctx.options, ctx.masks, ctx.deterministic = inputs[11:17], inputs[17:20], inputs[23]
        ctx.save_for_backward(*inputs[:11], out, lse, *inputs[20:23])
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dout = grads[0]
        gradients: list[Tensor | None] = [None] * 25
        if dout is None:
            return tuple(gradients)
        tensors = ctx.saved_tensors
        wants_bias = ctx.needs_input_grad[9]
        dq, dk, dv, dbias = torch.ops.gem.jagged_attention_backward(
            *(dout, *tensors[:11], *ctx.options, *tensors[11:13], wants_bias, *ctx.masks),
            *(*tensors[13:], ctx.deterministic),
        )
        gradients[1:4] = dq, dk, dv
        gradients[9] = dbias if wants_bias else None
        return tuple(gradients)


def _below_autograd(keys: Any, inputs: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.gem.jagged_attention.default.redispatch(
            keys & torch._C._after_autograd_keyset, *inputs
        )


def _with_autograd(keys: Any, *inputs: Any) -> Any:
    if torch.is_grad_enabled() and any(x.requires_grad for x in _differentiable(inputs)):
        # The dispatcher leaves out what equals the default.
        rest = _DEFAULTS[len(inputs) - _REQUIRED :]
        return _Autograd.apply(keys, *inputs, *rest)  # type: ignore[no-untyped-call]
    return _below_autograd(keys, inputs)


def _differentiable(inputs: tuple[Any, ...]) -> Iterator[Tensor]:
    """q, k, v and the bias."""
    return (inputs[i] for i in (0, 1, 2, 8) if inputs[i] is not None)


_library.impl(FORWARD, _forward, "CompositeExplicitAutograd")
_library.impl(BACKWARD, _backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"gem::{FORWARD}", _fake_forward, lib=_library)
torch.library.register_fake(f"gem::{BACKWARD}", _fake_backward, lib=_library)
_library.impl(FORWARD, _with_autograd, "Autograd", with_keyset=True)


def _supports_all(target: Target, request: object) -> str | None:
    return None


kernels.register(
    kernels.Kernel("reference", FORWARD, _supports_all, attention_reference.forward, fallback=True)
)
kernels.register(
    kernels.Kernel(
        "reference", BACKWARD, _supports_all, attention_reference.reference_backward, fallback=True
    )
)
