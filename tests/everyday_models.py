"""Small models as people write them; each shows one thing that a compiler backend can get wrong.

``MODELS`` maps a name to a function that builds an `Everyday`: the model and one call of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


@dataclass
class Everyday:
    """A model and one call of it.

    Attributes:
        autocast: call it inside ``torch.autocast("cpu", dtype=torch.bfloat16)``.
        low_precision: bfloat16 is computed with somewhere.
        eager_differs: why stock Inductor's gradients are not eager's, where they are not; else "".
        graphs: how many graphs Dynamo makes of it.
        falls_back: why gem hands the graph to plain Inductor, or "".
        random_attention: attention dropout in training, for which gem's attention draws a random
            stream of its own.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    low_precision: bool = False
    eager_differs: str = ""
    graphs: int = 1
    falls_back: str = ""
    random_attention: bool = False


MODELS: dict[str, Callable[[], Everyday]] = {}


def everyday(build: Callable[[], Everyday]) -> Callable[[], Everyday]:
    """Add a builder to `MODELS` under its own name."""
    MODELS[build.__name__] = build
    return build


def rows(n: int = 4, width: int = 8, grad: bool = False) -> Tensor:
    return torch.randn(n, width, requires_grad=grad)


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


# --- state ---------------------------------------------------------------------------------------


@everyday
def batch_norm() -> Everyday:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU())
    return Everyday(model, (torch.randn(4, 3, 9),))


class NormTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(x)))


@everyday
def batch_norm_twice() -> Everyday:
    return Everyday(NormTwice(), (rows(),))


class Running(nn.Module):
    """Buffers that the forward changes, one of which the gradient needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x) * self.steps + self.mean


@everyday
def buffers() -> Everyday:
    why = "a buffer that is changed again and saved for backward is saved after the change"
    return Everyday(Running(), (rows(),), eager_differs=why)


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        return self.linear(x) + counts


@everyday
def input_mutation() -> Everyday:
    return Everyday(ChangesInput(), (rows(), torch.zeros(8)))


class WritesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).clone()
        y[:, 0] = 0
        y[:, 1:3].mul_(2)
        return y


@everyday
def inplace_views() -> Everyday:
    return Everyday(WritesViews(), (rows(),))


class TiedWeights(nn.Module):
    """The output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids).tanh())


@everyday
def tied_weights() -> Everyday:
    return Everyday(TiedWeights(), (torch.tensor([[1, 2, 0], [3, 0, 0]]),))


class Embedded(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0, **how)
        self.linear = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embed(ids)).tanh()


@everyday
def embedding_padding_idx() -> Everyday:
    return Everyday(Embedded(), (torch.tensor([[1, 2, 0], [3, 0, 0]]),))


@everyday
def embedding_scaled_by_frequency() -> Everyday:
    return Everyday(Embedded(scale_grad_by_freq=True), (torch.tensor([[1, 2, 0], [3, 1, 0]]),))


@everyday
def embedding_renormed() -> Everyday:
    return Everyday(Embedded(max_norm=1.0), (torch.tensor([[1, 2, 0], [3, 1, 0]]),))


# --- gradient modes ------------------------------------------------------------------------------


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return (self.student(x).log_softmax(-1) * target).sum(-1)


@everyday
def no_grad_block() -> Everyday:
    return Everyday(Teacher(), (rows(grad=True),))


class GradInsideNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.linear(x)
            with torch.enable_grad():
                z = self.linear(x)
        return y + z


@everyday
def enable_grad_in_no_grad() -> Everyday:
    return Everyday(GradInsideNoGrad(), (rows(grad=True),))


class Detached(nn.Module):
    def __init__(self, data: bool) -> None:
        super().__init__()
        self.linear, self.data = nn.Linear(8, 8), data

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * y.detach() + (y.data * 2 if self.data else 0.0)


@everyday
def detach() -> Everyday:
    return Everyday(Detached(data=False), (rows(grad=True),))


@everyday
def dot_data() -> Everyday:
    return Everyday(Detached(data=True), (rows(grad=True),), falls_back="the model reads .data")


# --- randomness, recurrence, outputs -------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(F.dropout(x, 0.5, self.training))
        return y + torch.rand_like(x) + torch.randn(8)


@everyday
def random() -> Everyday:
    return Everyday(Noisy(), (rows(),))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = cell(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x)
        return out


@everyday
def gru() -> Everyday:
    return Everyday(Recurrent(nn.GRU), (torch.randn(2, 5, 8),), graphs=0)


@everyday
def lstm() -> Everyday:
    return Everyday(Recurrent(nn.LSTM), (torch.randn(2, 5, 8),), graphs=0)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(y).relu()


@everyday
def graph_break() -> Everyday:
    return Everyday(Breaks(), (rows(),), graphs=2)


class Selected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.linear(x[keep])


@everyday
def bool_index() -> Everyday:
    keep = torch.tensor([True, False, True, True])
    return Everyday(Selected(), (rows(), keep))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(0, 1)


@everyday
def output_strided() -> Everyday:
    return Everyday(Transposed(), (rows(),))


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return y, y[0], x.view(-1), x


@everyday
def output_aliases() -> Everyday:
    return Everyday(Aliases(), (rows(),))


class Structured(nn.Module):
    """A number and a flag among the arguments, a dict for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, temperature: float, double: bool) -> dict[str, Tensor]:
        y = self.linear(x) / temperature
        return {"logits": y * 2 if double else y, "probabilities": y.softmax(-1)}


@everyday
def structured() -> Everyday:
    return Everyday(Structured(), (rows(),), {"temperature": 0.7, "double": True})
