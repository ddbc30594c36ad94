"""Train a next-item model on MovieLens-100K with eager, Inductor and gem, and compare.

    python examples/movielens/train.py [--attention softmax|silu] [--epochs 2] [--data PATH]

Every backend trains the same model on the same padded batches, at full history length and side by
side.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import load, training_batches
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from training import BACKENDS, Run, Settings, evaluate, resolve, start, steps, train


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = Settings()
    parser.add_argument("--attention", choices=("softmax", "silu"), default=defaults.attention)
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--data", type=Path, help="ml-100k.inter or u.data; fetched if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def describe(histories: list[Tensor], settings: Settings) -> str:
    """How much of a padded epoch is padding."""
    batches = list(training_batches(histories, settings.batch_size, 1, settings.seed))
    events = sum(batch.events for batch in batches)
    slots = sum(batch.items.numel() for batch in batches)
    lengths = [len(history) for history in histories]
    return (
        f"{len(histories)} users, {sum(lengths):,} ratings, "
        f"{min(lengths)} to {max(lengths)} a user; "
        f"{1 - events / slots:.0%} of every padded batch of {settings.batch_size} users is padding"
    )


def train_with_bars(
    console: Console, runs: Sequence[Run], histories: list[Tensor], settings: Settings, device: str
) -> None:
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = steps(histories, settings)
        bars = {
            run.backend: progress.add_task(run.backend, total=total, note="waiting to compile")
            for run in runs
        }

        def on_step(run: Run) -> None:
            note = f"loss {run.losses[-1]:.3f}"
            progress.update(bars[run.backend], advance=1, note=note)

        train(runs, histories, settings, device, on_step)


def table(runs: Sequence[Run], histories: list[Tensor], device: str) -> Table:
    """Loss, quality and speed of every run. The test always runs the model uncompiled."""
    baseline = next((run for run in runs if run.backend == "inductor"), runs[0])
    out = Table(title=f"MovieLens-100K, next item, {device}")
    out.add_column("backend")
    speed = f"speed-up over {baseline.backend}"
    for heading in ("loss", "HR@10", "NDCG@10", "first step s", "events/s", speed):
        out.add_column(heading, justify="right")
    for run in runs:
        hits, gain = evaluate(run.model, histories, device)
        out.add_row(
            run.backend,
            f"{run.loss:.3f}",
            f"{hits:.3f}",
            f"{gain:.3f}",
            f"{run.seconds[0]:.1f}",
            f"{run.events_per_second:,.0f}",
            f"{run.speedup_over(baseline):.2f}x",
        )
    return out


def recorder(backends: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """gem's report of what is compiled inside, where gem takes part."""
    if "gem" not in backends:
        return contextlib.nullcontext()
    resolve("gem")
    import gemcompile

    return gemcompile.record()


def main() -> None:
    arguments = parse()
    settings = Settings(
        attention=arguments.attention,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
    )
    console = Console()
    histories = load(arguments.data)
    console.print(describe(histories, settings))
    runs = [start(name, histories, settings, arguments.device) for name in arguments.backends]
    with recorder(arguments.backends) as report:
        train_with_bars(console, runs, histories, settings, arguments.device)
    console.print(table(runs, histories, arguments.device))
    if report is not None:
        print(report)


if __name__ == "__main__":
    main()
