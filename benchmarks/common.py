"""What every benchmark shares: interleaved timing, peak memory, and where it was measured."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(step: Callable[[], object], device: str) -> float:
    """Wall-clock time of one call, the device's work included."""
    sync(device)
    start = time.perf_counter()
    step()
    sync(device)
    return time.perf_counter() - start


def interleaved(
    steps: Mapping[str, Callable[[], object]], device: str, rounds: int, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each step in every round. A round runs each of them once, so that a slow spell of
    the machine falls on all; their order turns from round to round."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            times[name].append(seconds(steps[name], device))
    return times


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Median over the rounds of how many times faster ours is."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def peak_gigabytes(step: Callable[[], object], device: str) -> float | None:
    """Peak of allocated device memory over one call, in GB (10^9 bytes); None on CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e9


class Clock:
    """The SM clock of a GPU, sampled beside the work: matrix kernels meet the card's power cap."""

    def __init__(self, device: str) -> None:
        self.samples: list[int] = []
        self.process: subprocess.Popen[str] | None = None
        self.watched = device == "cuda"

    def __enter__(self) -> Clock:
        command = [
            "nvidia-smi",
            "--query-gpu=clocks.sm",
            "--format=csv,noheader,nounits",
            "-lms",
            "50",
        ]
        if self.watched and shutil.which("nvidia-smi"):
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.terminate()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for text in self.process.stdout:
            if text.strip().isdigit():
                self.samples.append(int(text))

    def reset(self) -> None:
        self.samples.clear()

    def last(self) -> list[int]:
        """The last half second, so that compilation does not count."""
        return self.samples[-10:]


def environment(device: str) -> dict[str, Any]:
    """Date, machine, versions and clocks: what a figure needs beside it to mean something."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["clocks"] = _query_gpu("clocks.sm,clocks.max.sm,clocks.mem,power.limit")
    else:
        found["device"] = _cpu_name()
    return found


def _version(module: str) -> str | None:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _query_gpu(fields: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table; the first row's keys are the headings."""
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def save(path: Path | None, device: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Write the rows, and where they were measured, as JSON."""
    if path is None:
        return
    content = {"environment": environment(device), **more, "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
