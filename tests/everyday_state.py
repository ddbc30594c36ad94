"""More everyday models: state, gradient modes, randomness, recurrence, and what models return."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from everyday_registry import Everyday, everyday, rows
from torch import Tensor, nn

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
