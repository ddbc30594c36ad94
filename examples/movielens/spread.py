"""How far the losses of different seeds lie apart, against how far those of the backends do.

    python examples/movielens/spread.py [--seeds 5] [--write docs/movielens.md]

Dropout is drawn differently by each backend, so equal losses are not to be expected; a gap between
backends that is small against the spread over seeds is. The table is printed, and written into the
place that a page marks with `<!-- spread:NAME -->` ... `<!-- /spread:NAME -->`, NAME the attention.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from data import load
from rich.console import Console
from rich.progress import track
from training import BACKENDS, Settings, evaluate, start, train

Row = tuple[float, float, float]  # loss, HR@10, NDCG@10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=("softmax", "silu"), default="softmax")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=Settings().epochs)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> tuple[dict[str, list[Row]], list[float]]:
    """Per backend one row a seed; and gem's speed-up over Inductor per seed, where both ran."""
    histories = load(arguments.data)
    settings = Settings(attention=arguments.attention, epochs=arguments.epochs)
    rows: dict[str, list[Row]] = {backend: [] for backend in arguments.backends}
    speedups = []
    for seed in track(range(arguments.seeds), description="seeds", console=Console(stderr=True)):
        seeded = replace(settings, seed=seed)
        runs = [start(name, histories, seeded, arguments.device) for name in arguments.backends]
        train(runs, histories, seeded, arguments.device)
        for run in runs:
            rows[run.backend].append((run.loss, *evaluate(run.model, histories, arguments.device)))
        by_name = {run.backend: run for run in runs}
        if {"gem", "inductor"} <= by_name.keys():
            speedups.append(by_name["gem"].speedup_over(by_name["inductor"]))
        torch.compiler.reset()
    return rows, speedups


def spread(values: Sequence[float]) -> str:
    """Mean and sample standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def page(arguments: argparse.Namespace, rows: dict[str, list[Row]], speedups: list[float]) -> str:
    """The measured figures as a Markdown table."""
    lines = ["| backend | loss | HR@10 | NDCG@10 |", "|---|--:|--:|--:|"]
    for backend, measured in rows.items():
        cells = " | ".join(spread(column) for column in zip(*measured, strict=True))
        lines.append(f"| {backend} | {cells} |")
    lines += ["", f"Mean ± standard deviation over {arguments.seeds} seeds."]
    if speedups:
        low, high = min(speedups), max(speedups)
        middle = statistics.median(speedups)
        lines[-1] += (
            f" Training step of gem against Inductor's, median over the steps: "
            f"{middle:.2f}x (over the seeds {low:.2f}x to {high:.2f}x)."
        )
    where = arguments.device if arguments.device == "cpu" else torch.cuda.get_device_name()
    lines += [
        "",
        f"{datetime.date.today().isoformat()}, {where} ({torch.get_num_threads()} threads), "
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{arguments.epochs} epochs, attention {arguments.attention}.",
    ]
    return "\n".join(lines)


def write(path: Path, name: str, text: str) -> None:
    """Replace what stands between the page's marks."""
    begin, end = f"<!-- spread:{name} -->", f"<!-- /spread:{name} -->"
    old = path.read_text()
    if begin not in old or end not in old:
        raise SystemExit(f"{path} has no place for the table; add the lines {begin} and {end}")
    section = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    path.write_text(section.sub(lambda _: f"{begin}\n{text}\n{end}", old))


def main() -> None:
    arguments = parse()
    text = page(arguments, *measure(arguments))
    print(text)
    if arguments.write:
        write(arguments.write, arguments.attention, text)


if __name__ == "__main__":
    main()
