"""The report's page in a real browser: what it shows, how it is steered, and that it is safe."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples
import torch
from encoders import Encoder, batch

from gemcompile import Report, explain
from gemcompile.report_html import embedded, page

ROOT = Path(__file__).parents[1]
# Hover and layout are the browser's business; these wait only for what the page itself does.
# Not `wait_for_function`: it polls through eval, which the page's policy forbids.
READY = (
    "() => new Promise(r => { const look = () => window.gem ? r() : setTimeout(look, 5); look() })"
)
FRAMES = "() => new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))"


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    model = Encoder(3)
    model.head = torch.nn.Linear(16, 16)
    return explain(model, *batch(), options={"pack": True})


def chromium() -> str:
    """The browser's path. CI must have one; elsewhere the tests are skipped."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None and os.environ.get("CI"):
        pytest.fail("CI needs Chromium: apt-get install chromium, or set CHROMIUM to its path")
    if found is None:
        pytest.skip("no Chromium found: apt-get install chromium, or set CHROMIUM to its path")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if os.environ.get("CI"):
        import playwright.sync_api as sync_api
    else:
        sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as play:
        # As root there is no sandbox; containers have little shared memory.
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        running = play.chromium.launch(executable_path=path, args=flags)
        yield running
        running.close()


Opener = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """Opens a report from disk; afterwards fails where the page complained or reached out."""
    complaints: list[str] = []
    requests: list[str] = []
    opened: list[Any] = []

    def open_(report: Report, width: int = 1400, scheme: str = "light") -> Any:
        path = report.to_html(tmp_path / "report.html")
        viewport = {"width": width, "height": 900}
        tab = browser.new_page(viewport=viewport, color_scheme=scheme)
        tab.set_default_timeout(120_000)
        opened.append(tab)
        tab.on("console", lambda m: complaints.append(m.text))
        tab.on("pageerror", lambda e: complaints.append(str(e)))
        tab.on("dialog", lambda d: (complaints.append("dialog"), d.dismiss()))
        tab.on("request", lambda r: requests.append(r.url))
        tab.goto(path.as_uri())
        tab.evaluate(READY)
        return tab

    yield open_
    for tab in opened:
        tab.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith("file://")] == []


def boxes(tab: Any, side: str = "after") -> list[str]:
    """Keys of the boxes that are laid out, open groups included."""
    found: list[str] = tab.evaluate(
        f"window.gem.explorer.{side}.picture.boxes.map(b => b.item.key)"
    )
    return found


def statuses(tab: Any, side: str) -> set[str]:
    script = f"[...window.gem.explorer.{side}.side.status.values()]"
    return set(tab.evaluate(script))


def click(tab: Any, key: str, side: str = "after") -> None:
    """Scrolls a box into the window and clicks its head."""
    where = tab.evaluate(
        f"""key => {{
            const pane = window.gem.explorer.{side};
            const box = pane.picture.byKey.get(key);
            pane.center(box);
            pane.canvas.scrollIntoView();
            const at = pane.canvas.getBoundingClientRect();
            const s = pane.view.scale;
            return [at.x + (box.x + 20 - pane.view.x) * s, at.y + (box.y + 12 - pane.view.y) * s];
        }}""",
        key,
    )
    tab.mouse.click(*where)
    tab.evaluate(FRAMES)


# --- what it shows --------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1400, 420])
def test_opens(open_page: Opener, report: Report, width: int) -> None:
    tab = open_page(report, width)
    text = tab.inner_text("body")
    assert "4 sites rewritten" in re.sub(r"\s+", " ", text)
    assert "65%" in text and "of the rows were padding" in text and "17 of 48 rows are real" in text
    assert "less forward work" in text
    assert "gem.padded_attention(softmax)" in text and "×3" in text
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.gem.explorer.after.drawn") > 5


def test_declined_sites_carry_advice(open_page: Opener) -> None:
    found = explain(Encoder(1, pooled=False), *batch(), options={"pack": True})
    text = open_page(found).inner_text(".gem-declined")
    assert "because its padded output leaves the graph" in text
    assert "What to write instead" in text and "docs/troubleshooting.md#" in text


def test_passes(open_page: Opener, report: Report) -> None:
    tab = open_page(report)
    tabs = tab.locator("[role=tab]")
    names = [p.name for p in report.passes]
    assert [re.sub(r"[\d,]+$", "", t).strip() for t in tabs.all_inner_texts()] == names
    chosen = tab.locator("[role=tab][aria-selected=true]")
    assert chosen.inner_text().startswith("EliminatePadding")
    assert statuses(tab, "before") >= {"removed", "same"}
    assert statuses(tab, "after") >= {"added", "same"}
    assert "packed rows" in tab.inner_text(".legend")
    assert tab.evaluate("window.gem.explorer.after.side.region.size") > 20
    assert tab.evaluate("window.gem.explorer.before.side.region.size") > 20

    tabs.nth(names.index("FuseAttention")).click()
    assert "After FuseAttention" in tab.inner_text(".column.after h3")
    targets = "window.gem.explorer.{}.side.nodes.map(n => n.target)"
    assert "aten.softmax.int" in tab.evaluate(targets.format("before"))
    assert "gem.padded_attention" in tab.evaluate(targets.format("after"))
    assert "packed rows" not in tab.inner_text(".legend")

    tabs.nth(names.index("ShareTiles")).click()
    assert tab.inner_text(".legend").split("\n") == ["nothing changed", "packed rows"]


def test_node_details(open_page: Opener, report: Report) -> None:
    tab = open_page(report)
    last = report.passes[-1].nodes_after
    assert last is not None
    node = next(n for n in last if n.target == "gem.jagged_attention")
    tab.evaluate("name => window.gem.explorer.goTo(name)", node.name)
    after, before = tab.inner_text(".column.after .under"), tab.inner_text(".column.before .under")
    assert node.target in after and node.where in after and node.code in after
    assert "packed, row set 0" in after and "added" in after
    assert "not there before this pass" in before and "stands for" in before


def test_clicking_a_node_selects_it(open_page: Opener, report: Report) -> None:
    tab = open_page(report)
    key = next(k for k in boxes(tab) if k.startswith("n:jagged_attention"))
    click(tab, key)
    assert "gem.jagged_attention" in tab.inner_text(".column.after .under")


# --- folding --------------------------------------------------------------------------------------


def test_modules_fold(open_page: Opener, report: Report) -> None:
    """`calls` holds the three layers: folded, it is one box; unfolded, its nodes are boxes."""
    tab = open_page(report)
    tab.get_by_role("button", name="Fold", exact=True).click()
    folded = boxes(tab)
    assert "calls" in folded and not any("layer_norm" in k for k in folded)
    click(tab, "calls")
    opened = boxes(tab)
    assert set(folded) < set(opened)
    click(tab, "calls")
    assert boxes(tab) == folded
    tab.get_by_role("button", name="Unfold").click()
    assert any("layer_norm" in k for k in boxes(tab)) and len(boxes(tab)) > len(opened)


def test_alike_layers_are_one_stack(open_page: Opener) -> None:
    tab = open_page(samples.layered(100))
    assert "layers.0…layers.99" in boxes(tab) and len(boxes(tab)) < 80


def test_repetition_without_modules_is_found(open_page: Opener) -> None:
    tab = open_page(samples.repeated(40, 12))
    stacks = [k for k in boxes(tab) if "…" in k]
    assert len(stacks) == 1
    script = "key => window.gem.explorer.after.picture.byKey.get(key).item.groups.length"
    assert tab.evaluate(script, stacks[0]) == 40
    tab.get_by_role("button", name="Fold", exact=True).click()
    assert len(boxes(tab)) == 2


# --- search ---------------------------------------------------------------------------------------


def test_search(open_page: Opener, report: Report) -> None:
    tab = open_page(report)
    tab.get_by_role("button", name="Fold", exact=True).click()
    tab.keyboard.press("/")
    tab.keyboard.type("jagged_attention f")
    expected = [n.name for n in report.passes[2].nodes_after or () if "jagged" in n.target]
    assert tab.inner_text(".found") == str(len(expected)) == "3"
    assert tab.locator(".results [role=option]").count() == 3
    assert tab.evaluate("[...window.gem.explorer.after.marks.hits.values()]") == [3]
    tab.keyboard.press("Enter")
    assert tab.inner_text(".found") == "1 of 3"
    assert expected[0] in tab.inner_text(".column.after .under")
    assert any("jagged_attention" in k for k in boxes(tab))
    tab.keyboard.press("Escape")
    assert tab.locator(".results [role=option]").count() == 0


def test_search_opens_what_a_stack_hides(open_page: Opener) -> None:
    """A node of the 70th of 100 alike layers is shown in the one that is drawn."""
    tab = open_page(samples.layered(100))
    tab.get_by_role("button", name="Fold", exact=True).click()
    tab.fill("input[type=search]", "n70_33")
    tab.keyboard.press("Enter")
    assert "n70_33" in tab.inner_text(".column.after .under")
    assert tab.evaluate("window.gem.explorer.after.marks.selected") == "n:n0_33"


def test_next_change(open_page: Opener, report: Report) -> None:
    tab = open_page(report)
    tab.keyboard.press("n")
    assert tab.locator(".column.after .status.added").count() == 1


def test_scrolling_one_graph_moves_the_other(open_page: Opener, report: Report) -> None:
    tab = open_page(report)
    tab.get_by_role("button", name="Unfold").click()
    tab.locator(".column.before canvas").hover()
    tab.mouse.wheel(0, 500)
    tab.evaluate(FRAMES)
    assert tab.evaluate("window.gem.explorer.before.view.y") > 300
    assert tab.evaluate("window.gem.explorer.after.view.y") > 100


# --- colours, safety, size ------------------------------------------------------------------------


def test_light_and_dark(open_page: Opener, report: Report) -> None:
    def brightness(scheme: str) -> list[float]:
        tab = open_page(report, scheme=scheme)
        css = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        corner = tab.evaluate(
            "[...document.querySelector('.column.after canvas').getContext('2d')"
            ".getImageData(2, 2, 1, 1).data]"
        )
        return [sum(map(int, re.findall(r"\d+", css)[:3])) / 3, sum(corner[:3]) / 3]

    assert min(brightness("light")) > 230
    assert max(brightness("dark")) < 50


def test_hostile_text_stays_text(open_page: Opener) -> None:
    """`open_page` fails on a dialog, an error or a request."""
    tab = open_page(samples.hostile())
    tab.evaluate("window.gem.explorer.goTo('m')")
    tab.fill("input[type=search]", "alert(1)")
    assert tab.locator("main img, main script").count() == 0
    assert "onerror='alert(2)'" in tab.inner_text(".gem-rewritten")
    assert "onerror='alert(2)'" in tab.inner_text(".column.after .under")
    assert tab.locator(".results [role=option]").count() == 2


class Elements(HTMLParser):
    """Counts elements, and collects addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.count: dict[str, int] = {}
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "data", "srcset")]


def test_hostile_text_in_the_file() -> None:
    found = Elements()
    found.feed(page(samples.hostile()))
    assert found.count["script"] == 2 and "img" not in found.count
    notebook = Elements()
    notebook.feed(samples.hostile()._repr_html_())
    assert "script" not in notebook.count and "img" not in notebook.count


def test_embedded_json_is_the_data() -> None:
    data = {"a": samples.HOSTILE, "b": [1, None]}
    text = embedded(data)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == data


def test_loads_nothing(report: Report) -> None:
    text = page(report)
    found = Elements()
    found.feed(text)
    assert found.addresses == []
    assert "default-src 'none'" in text and "@import" not in text and "url(" not in text


@pytest.mark.parametrize("sample", [samples.layered(100), samples.flat(5000)], ids=["deep", "flat"])
def test_five_thousand_nodes(open_page: Opener, sample: Report) -> None:
    """Bounds that a slow machine keeps; benchmarks/report_page.py has the figures."""
    tab = open_page(sample)
    assert tab.evaluate("window.gem.ready") < 10_000
    tab.get_by_role("button", name="Unfold").click()
    tab.get_by_role("button", name="Fit").click()
    tab.evaluate(FRAMES)
    assert tab.evaluate("window.gem.explorer.after.paintSeconds") < 1
    assert len(sample._repr_html_()) < 20_000


def test_collectives(open_page: Opener, report: Report) -> None:
    tab = open_page(samples.distributed())
    bars = tab.locator(".timeline .bar")
    assert bars.count() == 2
    assert "3 operations until it is waited for" in bars.first.evaluate("b => b.textContent")
    assert "not time" in tab.inner_text(".timeline")
    assert open_page(report).locator(".timeline").count() == 0


def test_several_graphs(open_page: Opener) -> None:
    both = samples.layered(2)
    both.absorb(samples.repeated(3))
    tab = open_page(both)
    assert "101 nodes" in tab.inner_text(".column.after h3")
    choice = tab.locator(".explorer-head select")
    assert choice.locator("option").all_inner_texts() == [
        "graph 0 (101 nodes)",
        "graph 1 (37 nodes)",
    ]
    choice.select_option("1")
    assert "37 nodes" in tab.inner_text(".column.after h3")
    assert tab.inner_text(".legend") == "nothing changed"


def test_collectives_of_sites_alone(open_page: Opener) -> None:
    found = Report(graphs=1)
    found.add("collective", "rewritten", "all_reduce", where="m.py:1")
    found.add("collective", "declined", "all_gather", "its result is used at once", "m.py:2")
    steps = open_page(found).locator(".timeline li")
    assert steps.all_inner_texts() == ["all_reduce m.py:1", "all_gather m.py:2"]


def test_without_graphs(open_page: Opener) -> None:
    found = Report(graphs=1)
    found.add("graph", "declined", "the whole graph", "it reads .data")
    assert "No graph was recorded" in open_page(found).inner_text("body")


def test_notebook(report: Report) -> None:
    text = report._repr_html_()
    assert "of the rows were padding" in text and "<script" not in text
    many = Report()
    for i in range(5000):
        many.add("attention", "declined", f"op{i}", "no", f"m.py:{i}")
    assert len(many._repr_html_()) < 100_000 and "4,800 more" in many._repr_html_()


# --- what it is made from -------------------------------------------------------------------------


def test_the_built_script_is_of_these_sources() -> None:
    """`make page` writes the digest of its sources into what it builds."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "page" / "src").iterdir()):
        digest.update(path.read_bytes())
    digest.update((ROOT / "page" / "package-lock.json").read_bytes())
    mark = f"/* sources {digest.hexdigest()[:16]}"
    for name in ("report.js", "report.css", "summary.css"):
        built = (ROOT / "gemcompile" / "page" / name).read_text()
        assert mark in built[:200], f"gemcompile/page/{name} is not of page/src: run `make page`"
