"""``gem explain``: the report of a model that a factory makes."""

from __future__ import annotations

import argparse
import ast
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from gemcompile.explain import dry_run
from gemcompile.options import Options
from gemcompile.report import Report

from .errors import BadInput, Failed
from .factory import Call, load


def run(args: argparse.Namespace) -> int:
    options = _options(args.option)
    page = _page(args.html)
    with redirect_stdout(sys.stderr):  # stdout is the report's alone
        call = load(args.factory)
        report, gradients = _explain(call, options)
    if page:
        report.to_html(page)
    if args.json:
        print(report.to_json())
    else:
        print(report)
        print(f"\nbackward: {_backward(gradients)}")
        if page:
            print(f"page: {page}")
    return 0


def _options(given: list[str]) -> Options:
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInput(f"--option {text} has no value; write --option {text}=VALUE")
        try:
            values[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):  # a word: "auto"
            values[name] = value
    try:
        return Options.parse(values)
    except (TypeError, ValueError) as e:
        raise BadInput(f"--option: {e}") from e


def _page(path: str | None) -> Path | None:
    """Found out before the model runs, which may take long."""
    if path is None:
        return None
    page = Path(path)
    if page.is_dir():
        raise BadInput(f"--html {path} is a folder; write the name of a file in it")
    if not page.absolute().parent.is_dir():
        raise BadInput(f"--html {path}: there is no folder {str(page.parent)!r}; make it first")
    return page


def _explain(call: Call, options: Options) -> tuple[Report, int | None]:
    try:
        return dry_run(call.model, call.args, call.kwargs, options, backward=True)
    except Exception as e:
        text = f"{type(e).__name__}: {e}".strip()
        try:
            call()
        except Exception as plain:
            raise BadInput(
                "the model fails on the factory's arguments without gem, too: "
                f"{type(plain).__name__}: {plain}; make model(*args) run first"
            ) from plain
        raise Failed(
            f"the model runs as it is, and fails under torch.compile: {text}; --debug shows the "
            "traceback, and backend='eager' tells whether torch.compile alone fails"
        ) from e


def _backward(gradients: int | None) -> str:
    if gradients is None:
        return "not run, no output requires grad"
    return f"ran, {gradients} parameters and inputs have gradients"
