"""Cold compile time of a training step, gem against Inductor, and the share of gem's own passes.

    python benchmarks/compile_time.py [--device cpu|cuda] [--repeats 3] [--out FILE.json]

Every compile runs in a process of its own with an empty cache, the two backends in turn. Compile
time is the first step's time less a later step's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import save, seconds, show
from models import SIZES, Encoder, spread_lengths

ROOT = Path(__file__).parents[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--style", choices=("sdpa", "manual"), default="manual")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--child", choices=("inductor", "gem"), help=argparse.SUPPRESS)
    return parser.parse_args()


def compile_once(backend: str, device: str, style: str) -> dict[str, float]:
    """Seconds of compiling, and of gem's own passes within, in this process."""
    from gemcompile import gem, record

    size = SIZES[device]
    torch.manual_seed(0)
    encoder = Encoder(size, style).to(device, size.dtype)
    ids = torch.randint(0, 1000, (size.batch, size.length), device=device)
    lengths = spread_lengths(size, 0.2).to(device)
    # Both processes meet the parts of torch that load on first use before the clock starts.
    torch.compile(lambda x: x + 1, backend="inductor")(torch.zeros(4, device=device))
    model = torch.compile(encoder, backend=gem if backend == "gem" else backend, dynamic=True)

    def step() -> None:
        model(ids, lengths).float().sum().backward()

    with record() as report:
        first = seconds(step, device)
    later = min(seconds(step, device) for _ in range(2))
    return {"compile": first - later, "passes": sum(entry.seconds for entry in report.passes)}


def in_fresh_process(backend: str, device: str, style: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, __file__, "--device", device, "--style", style]
        command += ["--child", backend]
        result = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    arguments = parse()
    if arguments.child:
        print(json.dumps(compile_once(arguments.child, arguments.device, arguments.style)))
        return
    found: dict[str, list[dict[str, float]]] = {"inductor": [], "gem": []}
    started = time.perf_counter()
    for _ in range(arguments.repeats):
        for backend, results in found.items():
            results.append(in_fresh_process(backend, arguments.device, arguments.style))
            elapsed = time.perf_counter() - started
            print(f"{backend} {results[-1]['compile']:.1f} s ({elapsed:.0f} s)", file=sys.stderr)
    medians = {
        backend: statistics.median(result["compile"] for result in results)
        for backend, results in found.items()
    }
    shares = [result["passes"] / result["compile"] for result in found["gem"]]
    row: dict[str, Any] = {
        "style": arguments.style,
        "Inductor s": medians["inductor"],
        "gem s": medians["gem"],
        "gem / Inductor": medians["gem"] / medians["inductor"],
        "gem's own passes": f"{statistics.median(shares):.1%}",
    }
    show(f"cold compile of a training step, {arguments.device}", [row])
    save(arguments.out, arguments.device, [row], repeats=arguments.repeats)


if __name__ == "__main__":
    main()
