"""One model trained by several backends in step, and the leave-one-out test of the result."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from data import Batch, test_batches, training_batches
from model import NextItem
from torch import Tensor, nn

BACKENDS = ("eager", "inductor", "gem")
# The first steps compile, and a shape that appears twice may compile once more.
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Settings:
    """What a run is made of; every backend gets the same."""

    attention: str = "softmax"
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-2
    seed: int = 0


@dataclass
class Run:
    """One backend's training: the model, its compiled form, and what was measured on the way."""

    backend: str
    model: NextItem
    compiled: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)

    def step(self, batch: Batch, seed: int) -> None:
        """Train on one batch; each backend draws its dropout from the same seed."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        loss = self.compiled(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())  # on a GPU this also waits for the step
        self.seconds.append(time.perf_counter() - start)
        self.events.append(batch.events)
        self.schedule.step()

    @property
    def loss(self) -> float:
        """Mean training loss of the last tenth of the steps."""
        return statistics.mean(self.losses[-max(1, len(self.losses) // 10) :])

    @property
    def events_per_second(self) -> float:
        return sum(self.events[WARMUP_STEPS:]) / sum(self.seconds[WARMUP_STEPS:])

    def speedup_over(self, other: Run) -> float:
        """Median over the steps of how many times faster this run took the same step."""
        pairs = zip(other.seconds[WARMUP_STEPS:], self.seconds[WARMUP_STEPS:], strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def resolve(backend: str) -> Any:
    """What `torch.compile` takes for a name: "gem" works by name once the package is installed."""
    if backend == "gem" and "gem" not in torch.compiler.list_backends():
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from gemcompile import gem

        return gem
    return backend


def start(backend: str, histories: Sequence[Tensor], settings: Settings, device: str) -> Run:
    """A fresh model, the same for every backend that starts with the same settings."""
    torch.manual_seed(settings.seed)
    items = max(int(history.max()) for history in histories)
    longest = max(len(history) for history in histories)
    model = NextItem(items, longest, attention=settings.attention).to(device)
    compiled: nn.Module | Callable[..., Tensor] = model
    if backend != "eager":
        compiled = torch.compile(model, backend=resolve(backend), dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=steps(histories, settings) + 1
    )
    return Run(backend, model, compiled, optimizer, schedule)


def steps(histories: Sequence[Tensor], settings: Settings) -> int:
    return settings.epochs * (len(histories) // settings.batch_size)


def train(
    runs: Sequence[Run],
    histories: list[Tensor],
    settings: Settings,
    device: str,
    on_step: Callable[[Run], None] = lambda run: None,
) -> None:
    """Train all runs side by side: each batch goes to every run before the next batch comes.

    Side by side, because whatever else the machine does then slows all of them alike; the run
    that goes first changes from step to step for the same reason.
    """
    batches = training_batches(histories, settings.batch_size, settings.epochs, settings.seed)
    for number, batch in enumerate(batches):
        batch = batch.to(torch.device(device))
        first = number % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            run.step(batch, seed=settings.seed * 1_000_003 + number)
            on_step(run)


@torch.no_grad()
def evaluate(model: NextItem, histories: list[Tensor], device: str) -> tuple[float, float]:
    """HR@10 and NDCG@10 of each user's last event, among all items that the user had not seen."""
    model.eval()
    ranks = []
    for batch in test_batches(histories, size=64):
        items, targets, lengths = batch.to(torch.device(device))
        answer = targets.gather(1, lengths[:, None] - 1)
        scores = model.predict(items, lengths)
        wanted = scores.gather(1, answer)
        scores.scatter_(1, items, float("-inf"))  # seen items
        scores[:, 0] = float("-inf")  # the padding is no item
        ranks.append((scores > wanted).sum(dim=1))
    model.train()
    rank = torch.cat(ranks).double()
    hit = rank < 10
    return hit.double().mean().item(), (hit / torch.log2(rank + 2)).mean().item()
