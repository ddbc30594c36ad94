"""The command line: ``gem explain``, ``gem doctor``, ``gem bench`` (also ``python -m gemcompile``).

Exit codes: 0 fine, 1 what was asked about failed, 2 bad input.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from .errors import BadInput, Failed

__all__ = ["BadInput", "Failed", "main"]

EXPLAIN = """Say what gem does with a model: what it rewrites, and why not the rest.

The factory takes nothing and returns (model, args): args is a tuple of positional arguments, a
dictionary of keyword arguments, or one tensor. The model runs once, as a copy, forward and, where
an output requires grad, backward; no code is generated."""
DOCTOR = """Say what gem finds on this machine: versions, devices, the kernel that each typical
attention would get and why not the others; then compile a small padded model and compare its loss
and gradients with eager mode."""
BENCH = """Time the training step of a small padded encoder at three fills: eager, Inductor, gem.
A quick look at this machine; docs/performance.md has the measured tables."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; messages go to stderr."""
    args = _parser().parse_args(argv)
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except (BadInput, Failed) as e:
        if args.debug:
            traceback.print_exc()
        print(f"gem {args.command}: {e}", file=sys.stderr)
        return 2 if isinstance(e, BadInput) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # a pager that was closed early
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace) -> int:
    # Only what the command needs: TORCH_LOGS=gemcompile imports this package together with torch.
    if args.command == "explain":
        from .explain import run
    elif args.command == "doctor":
        from .doctor import run
    else:
        from .bench import run
    return run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gem", description="gemcompile: a torch.compile backend for ranking models."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print JSON")
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        summary = text.split(":" if name != "bench" else ".")[0]
        return commands.add_parser(
            name,
            parents=[shared],
            help=summary[0].lower() + summary[1:],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    explain = command("explain", EXPLAIN)
    explain.add_argument(
        "factory", metavar="MODULE:FACTORY", help="or path/to/file.py:FACTORY; dots are followed"
    )
    explain.add_argument("--html", metavar="PATH", help="write the report as a page, too")
    explain.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of the backend, as in --option pack=True",
    )
    doctor = command("doctor", DOCTOR)
    doctor.add_argument(
        "--target", metavar="DEVICE", help="choose kernels as if for cpu, cuda:90, hip:gfx942, ..."
    )
    doctor.add_argument("--no-test", action="store_true", help="leave the self-test out")
    bench = command("bench", BENCH)
    bench.add_argument("--device", help="cpu or cuda; default: a GPU where there is one")
    bench.add_argument("--rounds", type=int, default=7, help="timed steps of each; default 7")
    return parser
