"""Small models as people write them; each shows one thing that a compiler backend can get wrong.

``MODELS`` maps a name to a function that builds an `Everyday`: the model and one call of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from everyday_registry import MODELS, Everyday, everyday, rows
from everyday_state import Breaks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

__all__ = ["MODELS", "AutocastIsland", "Breaks", "Checkpointed", "Everyday", "FeedForward", "rows"]

# --- attention modules of torch.nn ---------------------------------------------------------------

_PADDING = torch.arange(6)[None] >= torch.tensor([[6], [3]])  # True where there is no event


def encoder_layer(dropout: float) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)


@everyday
def encoder() -> Everyday:
    return Everyday(encoder_layer(0.1), (torch.randn(2, 6, 16),), random_attention=True)


@everyday
def encoder_with_mask() -> Everyday:
    return Everyday(
        encoder_layer(0.0), (torch.randn(2, 6, 16),), {"src_key_padding_mask": _PADDING}
    )


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)
        return out


@everyday
def mha() -> Everyday:
    return Everyday(SelfAttention(need_weights=False), (torch.randn(2, 6, 16), _PADDING))


@everyday
def mha_weights() -> Everyday:
    return Everyday(SelfAttention(need_weights=True), (torch.randn(2, 6, 16), _PADDING))


@everyday
def mha_dropout() -> Everyday:
    model = SelfAttention(need_weights=False, dropout=0.2)
    return Everyday(model, (torch.randn(2, 6, 16), _PADDING), random_attention=True)


# --- precision -----------------------------------------------------------------------------------


class AutocastIsland(nn.Module):
    """Low precision around, an island in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
            with torch.autocast("cpu", enabled=False):
                z = y.float()
                z = (z @ z.mT).softmax(-1) @ z
            return self.b(y) + z


@everyday
def autocast_region() -> Everyday:
    return Everyday(
        AutocastIsland(), (torch.randn(3, 8, 16, requires_grad=True),), low_precision=True
    )


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.norm(self.a(x)))).float()


@everyday
def autocast_around() -> Everyday:
    return Everyday(FeedForward(), (torch.randn(3, 8, 16),), autocast=True, low_precision=True)


# --- checkpoints and opaque operators ------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0, **how: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=False, **self.how)


@everyday
def checkpointed() -> Everyday:
    return Everyday(Checkpointed(), (rows(3, 16),))


@everyday
def checkpointed_dropout() -> Everyday:
    return Everyday(Checkpointed(0.3), (rows(3, 16),))


@everyday
def selective_checkpoint() -> Everyday:
    save = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(create_selective_checkpoint_contexts, save)
    return Everyday(Checkpointed(context_fn=contexts), (rows(3, 16),))


class CheckpointWithCapture(nn.Module):
    """The checkpointed function closes over a module used outside too, and over a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weights = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        def body(y: Tensor) -> Tensor:
            return self.linear(y) * self.weights

        return checkpoint(body, x, use_reentrant=False) + self.linear(x)


@everyday
def checkpoint_shared() -> Everyday:
    return Everyday(CheckpointWithCapture(), (rows(),))


class Sign(torch.autograd.Function):
    """The straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class StraightThrough(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Sign.apply(self.linear(x)) * 2


@everyday
def autograd_function() -> Everyday:
    return Everyday(StraightThrough(), (rows(),))


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)) + y


@everyday
def conditional() -> Everyday:
    return Everyday(Conditional(), (rows(),))
