"""``gem bench``: eager, Inductor and gem on the device at hand, in one short interleaved run."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import gemcompile.backend

from .errors import BadInput, Failed
from .sample import Encoder, Size, batch
from .show import console, table

FILLS = (1.0, 0.5, 0.2)
SIZES = {"cpu": Size(16, 256, 128, 2, 2), "cuda": Size(256, 512, 512, 8, 2)}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
WARMUP = 2


@dataclass
class Row:
    """Milliseconds of a training step at one fill, medians over the rounds.

    ``speed_up`` is the median over the rounds of Inductor's time by gem's.
    """

    fill: float
    eager_ms: float
    inductor_ms: float
    gem_ms: float
    speed_up: float


def run(args: argparse.Namespace) -> int:
    device = _device(args.device)
    if args.rounds < 1:
        raise BadInput(f"--rounds {args.rounds} times nothing; give 1 or more")
    try:
        rows = measure(device, SIZES[device], args.rounds)
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        raise Failed(f"the benchmark's model failed: {text}; gem doctor finds out more") from e
    where = _where(device)
    if args.json:
        print(json.dumps({"environment": where, "rows": [asdict(r) for r in rows]}, indent=1))
        return 0
    out = console()
    out.print(f"training step of a padded encoder: {where['model']}, {where['dtype']}")
    out.print(f"{where['device']}, {where['threads']} threads, torch {where['torch']}")
    headings = ("fill", "eager ms", "Inductor ms", "gem ms", "Inductor / gem")
    out.print(table(headings, [list(asdict(r).values()) for r in rows]))
    return 0


def measure(device: str, size: Size, rounds: int) -> list[Row]:
    """Compile once, and time every fill: gem's graph serves them all."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Encoder(size).to(device, DTYPES[device])
    options: dict[str, Any] = {"pack": True}
    calls: dict[str, Callable[..., Tensor]] = {
        "eager": model,
        "inductor": torch.compile(model, dynamic=True),
        "gem": torch.compile(model, backend=gemcompile.backend.gem, dynamic=True, options=options),
    }
    out = []
    for fill in FILLS:
        ids, lengths = batch(size, fill, device)
        times = _interleaved(calls, model, (ids, lengths), device, rounds)
        ratios = [a / b for a, b in zip(times["inductor"], times["gem"], strict=True)]
        real = float(lengths.float().mean()) / size.length
        eager, inductor, gem = (statistics.median(times[name]) * 1e3 for name in calls)
        out.append(Row(real, eager, inductor, gem, statistics.median(ratios)))
    return out


def _interleaved(
    calls: dict[str, Callable[..., Tensor]],
    model: Encoder,
    inputs: tuple[Tensor, Tensor],
    device: str,
    rounds: int,
) -> dict[str, list[float]]:
    """Seconds of each call's step. A round runs all, so that a slow spell falls on all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(WARMUP + rounds):
        for name, call in calls.items():
            seconds = _seconds(call, model, inputs, device)
            if i >= WARMUP:
                times[name].append(seconds)
    return times


def _seconds(
    call: Callable[..., Tensor], model: Encoder, inputs: tuple[Tensor, Tensor], device: str
) -> float:
    model.zero_grad(set_to_none=True)
    _wait(device)
    start = time.perf_counter()
    call(*inputs).float().square().sum().backward()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _device(asked: str | None) -> str:
    device = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in SIZES:
        raise BadInput(f"--device {device} is not one of {', '.join(SIZES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch finds no GPU here; gem doctor says what it finds")
    return device


def _where(device: str) -> dict[str, Any]:
    size = SIZES[device]
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(DTYPES[device]).removeprefix("torch."),
        "model": ", ".join(f"{k} {v}" for k, v in asdict(size).items()),
        "pack": True,
    }
