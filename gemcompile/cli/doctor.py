"""``gem doctor``: what gem finds on this machine, and whether it works there."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

import torch

from gemcompile.target import Target

from .choices import Choice, choices
from .errors import BadInput
from .machine import Finding, machine
from .self_test import Outcome, self_test
from .show import console, table


def run(args: argparse.Namespace) -> int:
    target = _target(args.target)
    findings, found = machine(), choices(target)
    outcomes = [] if args.no_test else self_test(_device())
    if args.json:
        content = {
            "target": str(target),
            "machine": [asdict(f) for f in findings],
            "kernels": [asdict(c) for c in found],
            "self_test": [asdict(o) for o in outcomes],
        }
        print(json.dumps(content, indent=1))
    else:
        _print(target, findings, found, outcomes)
    broken = any(f.state == "fail" for f in findings) or any(o.error for o in outcomes)
    return 1 if broken else 0


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _target(text: str | None) -> Target:
    if text is None:
        return Target.of(torch.device(_device()))
    device, _, arch = text.partition(":")
    if device == "cpu" and not arch:
        return Target("cpu")
    if device == "cuda" and arch.isdigit():
        return Target("cuda", int(arch))
    if device == "hip" and arch.startswith("gfx"):
        return Target("hip", arch)
    raise BadInput(f"--target {text} is none; write cpu, cuda:90 (sm_90) or hip:gfx942")


def _print(
    target: Target, findings: list[Finding], found: list[Choice], outcomes: list[Outcome]
) -> None:
    out = console()
    rows = [(f.name, f.text, "" if f.state == "ok" else f.state, f.cure) for f in findings]
    out.print(table(("", "found", "", "cure"), rows, "machine"))
    kernels = [(c.request, c.forward, c.backward) for c in found]
    out.print(table(("jagged attention", "forward", "backward"), kernels, f"kernels on {target}"))
    out.print("why not the others")
    for line in _reasons(found):
        out.print(f"  {line}")
    if outcomes:
        out.print("\nself-test: a padded encoder, gem against eager, distance from float64")
    for o in outcomes:
        out.print(f"  {o.dtype} on {o.device}: {o}")


def _reasons(found: list[Choice]) -> list[str]:
    """A line for each kernel and reason, with up to three requests where not all meet it."""
    met: dict[tuple[str, str], list[str]] = {}
    for choice in found:
        for kernel, reason in choice.refused.items():
            met.setdefault((kernel, reason), []).append(choice.request)
    lines = []
    for (kernel, reason), requests in sorted(met.items()):
        rest = f"; {len(requests) - 3} more" if len(requests) > 3 else ""
        where = f" ({'; '.join(requests[:3])}{rest})"
        lines.append(f"{kernel}: {reason}{where if len(requests) < len(found) else ''}")
    return lines
