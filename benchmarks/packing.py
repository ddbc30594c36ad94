"""Training step of a padded encoder: gem, which packs the padding away, against Inductor.

    python benchmarks/packing.py [--device cpu|cuda] [--pack auto|always|both] [--out FILE.json]

"auto" compiles once for every fill, as a job would whose data have that fill, and the cost rule
decides on the first batch; "always" (`pack=True`) compiles once and serves all fills.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import interleaved, peak_gigabytes, ratio, save, show
from models import SIZES, Encoder, Size, spread_lengths
from torch import Tensor

from gemcompile import gem

FILLS = (1.0, 0.5, 0.2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--styles", nargs="+", choices=("sdpa", "manual"), default=["sdpa"])
    parser.add_argument("--pack", choices=("auto", "always", "both"), default="both")
    parser.add_argument("--rounds", type=int, help="timed steps of each; default 7 cpu, 20 cuda")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def training_step(
    model: Callable[..., Tensor], encoder: Encoder, ids: Tensor, lengths: Tensor
) -> Callable[[], None]:
    def step() -> None:
        encoder.zero_grad(set_to_none=True)
        model(ids, lengths).float().sum().backward()

    return step


def compiled(encoder: Encoder, pack: str | None) -> Callable[..., Tensor]:
    if pack is None:
        return torch.compile(encoder, backend="inductor", dynamic=True)
    options = {"pack": True if pack == "always" else "auto"}
    return torch.compile(encoder, backend=gem, dynamic=True, options=options)


def gradient_gap(encoder: Encoder, theirs: Callable[[], None], ours: Callable[[], None]) -> float:
    """Largest relative distance, over the parameters, between the two steps' gradients."""
    theirs()
    expected = [p.grad.float() for p in encoder.parameters() if p.grad is not None]
    ours()
    actual = [p.grad.float() for p in encoder.parameters() if p.grad is not None]
    pairs = zip(expected, actual, strict=True)
    return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in pairs)


def measure(size: Size, device: str, style: str, pack: str, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    encoder = Encoder(size, style).to(device, size.dtype)
    ids = torch.randint(0, 1000, (size.batch, size.length), device=device)
    torch.compiler.reset()
    models = {"inductor": compiled(encoder, None), "gem": compiled(encoder, pack)}
    rows = []
    for fill in FILLS:
        if pack == "auto":
            torch.compiler.reset()
            models = {"inductor": compiled(encoder, None), "gem": compiled(encoder, pack)}
        lengths = spread_lengths(size, fill).to(device)
        steps = {
            name: training_step(model, encoder, ids, lengths) for name, model in models.items()
        }
        times = interleaved(steps, device, rounds)
        milliseconds = {name: statistics.median(times[name]) * 1e3 for name in steps}
        rows.append(
            {
                "style": style,
                "pack": pack,
                "fill": float(lengths.float().mean()) / size.length,
                "Inductor ms": milliseconds["inductor"],
                "gem ms": milliseconds["gem"],
                "speed-up": ratio(times["inductor"], times["gem"]),
                "Inductor GB": peak_gigabytes(steps["inductor"], device),
                "gem GB": peak_gigabytes(steps["gem"], device),
                "gradient gap": f"{gradient_gap(encoder, steps['inductor'], steps['gem']):.1e}",
            }
        )
    return rows


def main() -> None:
    arguments = parse()
    size = SIZES[arguments.device]
    rounds = arguments.rounds or (20 if arguments.device == "cuda" else 7)
    packs = ("auto", "always") if arguments.pack == "both" else (arguments.pack,)
    rows = [
        row
        for style in arguments.styles
        for pack in packs
        for row in measure(size, arguments.device, style, pack, rounds)
    ]
    show(f"training step, padded encoder, {arguments.device}", rows)
    save(arguments.out, arguments.device, rows, size=str(size), rounds=rounds)


if __name__ == "__main__":
    main()
