"""The report page on graphs of 5,000 nodes: time to the first picture, time of a frame while
panning and zoomed out, of a search, and what keeping the nodes adds to a pass.

    python benchmarks/report_page.py [--nodes 5000] [--repeats 5] [--layers 0] [--out FILE.json]

Needs Chromium (CHROMIUM names its path where it is not on PATH) and playwright. A frame's time is
that of the page's own drawing, both graphs together, median and 95th percentile over 120 steps.
With ``--layers 100`` it also explains an encoder of that many layers (minutes) and tells which part
of gem's own time went into keeping its nodes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import save, show
from torch.fx import GraphModule

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import report_samples

from gemcompile import graph
from gemcompile.graph_snapshot import snapshot
from gemcompile.testing import trace

# Not `wait_for_function`: it polls through eval, which the page's policy forbids.
READY = (
    "() => new Promise(r => { const look = () => window.gem ? r() : setTimeout(look, 5); look() })"
)
# Both panes draw at once, as on a screen.
PAN = """steps => {
    const { explorer } = window.gem, times = [];
    for (let i = 0; i < steps; i++) {
        const start = performance.now();
        explorer.before.pan(3, 40);
        explorer.moved(explorer.before);
        explorer.panes.forEach(pane => pane.paint());
        times.push(performance.now() - start);
    }
    return times;
}"""
# From one picture on the screen to the next, rasterizing included.
INTERVAL = """steps => new Promise(done => {
    const { explorer } = window.gem, times = [];
    let last = 0;
    const next = now => {
        if (last) times.push(now - last);
        last = now;
        explorer.before.pan(3, 40);
        explorer.moved(explorer.before);
        if (times.length < steps) requestAnimationFrame(next);
        else done(times);
    };
    requestAnimationFrame(next);
})"""
TYPE = """words => words.map(word => {
    const input = document.querySelector("input[type=search]"), start = performance.now();
    input.value = word;
    input.dispatchEvent(new Event("input"));
    window.gem.explorer.panes.forEach(pane => pane.paint());
    return performance.now() - start;
})"""
UNFOLD = """() => {
    const start = performance.now();
    window.gem.explorer.unfoldAll();
    return performance.now() - start;
}"""
WORDS = ["l", "li", "lin", "line", "linear", "op4", "op42", "layers.3", "f32", "nothing"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        sys.exit("no Chromium found: install it, or set CHROMIUM to its path")
    return found


def measure(browser: Any, path: Path, repeats: int) -> dict[str, Any]:
    first, pans, wide, words, unfold, frames = [], [], [], [], [], []
    for _ in range(repeats):
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.goto(path.as_uri())
        tab.evaluate(READY)
        first.append(tab.evaluate("window.gem.ready"))
        words += tab.evaluate(TYPE, WORDS)
        unfold.append(tab.evaluate(UNFOLD))
        tab.evaluate("window.gem.explorer.panes.forEach(pane => pane.paint())")
        pans += tab.evaluate(PAN, 120)
        frames += tab.evaluate(INTERVAL, 60)
        tab.evaluate("window.gem.explorer.panes.forEach(pane => pane.fit())")
        wide += tab.evaluate(PAN, 20)
        boxes = tab.evaluate("window.gem.explorer.after.picture.boxes.length")
        tab.close()
    return {
        "first picture ms": statistics.median(first),
        "pan frame ms": statistics.median(pans),
        "pan frame p95 ms": statistics.quantiles(pans, n=20)[-1],
        "between frames ms": statistics.median(frames),
        "whole graph frame ms": statistics.median(wide),
        "search ms": statistics.median(words),
        "unfold ms": statistics.median(unfold),
        "boxes unfolded": boxes,
        "file kB": round(path.stat().st_size / 1e3),
    }


def large_graph(nodes: int) -> GraphModule:
    """A captured graph with sources and symbolic shapes."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes // 5):
            x = torch.nn.functional.gelu(torch.nn.functional.linear(x, w)).add(x).mul(2).sub(1)
        return x

    gm = trace(chain, torch.ones(2, 3, 8), torch.ones(8, 8))
    for n in gm.graph.nodes:
        n.meta.setdefault("stack_trace", f'  File "m.py", line {len(n.name)}, in f\n    x = f(x)\n')
    return gm


def keeping(nodes: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of one snapshot, beside those of the graph's text, which was kept before."""
    gm = large_graph(nodes)
    earlier = snapshot(gm)
    texts, shots = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        graph.text(gm)
        texts.append(time.perf_counter() - start)
        start = time.perf_counter()
        snapshot(gm, earlier)
        shots.append(time.perf_counter() - start)
    return {
        "nodes": len(gm.graph.nodes),
        "nodes of one graph ms": statistics.median(shots) * 1e3,
        "its text ms": statistics.median(texts) * 1e3,
    }


def share(layers: int) -> dict[str, Any]:
    """Of a real compile without code generation: seconds in gem, and of these in snapshots."""
    from encoders import Encoder, batch

    from gemcompile import explain, pass_manager

    spent = []

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = snapshot(*args)
        spent.append(time.perf_counter() - start)
        return result

    pass_manager.snapshot = timed
    report = explain(Encoder(layers), *batch(), options={"pack": True})
    nodes = report.passes[0].nodes_before
    assert nodes is not None
    return {
        "layers": layers,
        "nodes": len(nodes),
        "gem s": report.seconds,
        "snapshots s": sum(spent),
        "share": f"{sum(spent) / report.seconds:.1%}",
    }


def main() -> None:
    from playwright.sync_api import sync_playwright

    arguments = parse()
    samples = {
        "layers, folded": report_samples.layered(arguments.nodes // 50),
        "flat": report_samples.flat(arguments.nodes),
    }
    rows: list[dict[str, Any]] = []
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for name, report in samples.items():
            path = report.to_html(Path(folder) / "report.html")
            rows.append({"graph": name, **measure(browser, path, arguments.repeats)})
        version = browser.version
        browser.close()
    show(f"report page, {arguments.nodes} nodes, headless Chromium {version}", rows)
    kept = keeping(arguments.nodes, arguments.repeats)
    show("keeping the nodes of a graph", [kept])
    rows.append(kept)
    if arguments.layers:
        rows.append(share(arguments.layers))
        show("keeping the nodes of an encoder, without code generation", rows[-1:])
    save(arguments.out, "cpu", rows, repeats=arguments.repeats, chromium=version)


if __name__ == "__main__":
    main()
