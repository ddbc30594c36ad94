// The graphs before and after a pass, side by side, with what steers them.

import type { Data, Node, Pass } from "./data";
import { counterparts, diff, type Diff } from "./diff";
import { details } from "./details";
import { button, el } from "./dom";
import { follow } from "./follow";
import { openAtFirst } from "./folding";
import { Pane, type Host } from "./pane";
import { find } from "./search";
import type { Item } from "./tree";
import { isWeight } from "./tree";

export class Explorer implements Host {
  readonly root = el("section", { class: "explorer", "aria-label": "graphs" });
  readonly before = new Pane("before", this);
  readonly after = new Pane("after", this);
  readonly panes = [this.before, this.after];
  private open = new Set<string>();
  private weights = false;
  private graph = 0;
  private pass = 0;
  private change = -1;
  private diffs = new Map<string, Diff>();
  private diff!: Diff;
  private picked: string | null = null;
  private passes = el("div", { class: "passes", role: "tablist", "aria-label": "passes" });
  private sizes = el("p", { class: "sizes" });
  private legend = el("p", { class: "legend" });
  private input = el("input", { type: "search", placeholder: "Search nodes  /", "aria-label": "search nodes" }) as HTMLInputElement;
  private results = el("div", { class: "results", role: "listbox" });
  private found = el("span", { class: "found", "aria-live": "polite" });
  private cards = [el("div", { class: "under" }), el("div", { class: "under" })];
  private heads = [el("h3"), el("h3")];
  private columns = el("div", { class: "columns", "data-side": "after" });
  private hits: string[] = [];
  private hit = -1;

  constructor(private data: Data) {
    this.root.append(this.header(), this.passes, this.toolbar(), this.fillColumns(), this.sizes);
    this.chooseGraph(0);
    new ResizeObserver(() => this.resize()).observe(this.root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      this.panes.forEach((pane) => pane.recolor()),
    );
    document.addEventListener("keydown", (e) => this.key(e));
  }

  // --- what is shown ---------------------------------------------------------------------------

  private graphPasses(): Pass[] {
    return this.data.graphs[this.graph];
  }

  chooseGraph(index: number): void {
    this.graph = index;
    const changes = this.graphPasses().map((pass) => pass.changes);
    this.choosePass(changes.indexOf(Math.max(...changes)));
  }

  choosePass(index: number): void {
    this.pass = index;
    const chosen = this.graphPasses()[index];
    this.diff = this.diffOf(chosen);
    this.change = -1;
    this.picked = null;
    this.listPasses();
    this.describe(chosen);
    this.fill();
    this.open = openAtFirst(this.panes.map((pane) => pane.tree));
    this.arrange();
    this.home();
    this.search();
    this.showDetails();
  }

  private diffOf(pass: Pass): Diff {
    const key = `${pass.before}-${pass.after}`;
    let found = this.diffs.get(key);
    if (!found) {
      const shots = this.data.snapshots;
      this.diffs.set(key, (found = diff(shots[pass.before], shots[pass.after])));
    }
    return found;
  }

  private fill(): void {
    this.before.show(this.diff.before, this.weights);
    this.after.show(this.diff.after, this.weights);
  }

  /** The windows are no taller than what they show. */
  private grow(scale = Math.max(this.after.view.scale, 0.6)): void {
    const tallest = scale * Math.max(...this.panes.map((pane) => pane.picture.height));
    this.columns.style.setProperty("--tall", `${Math.ceil(tallest) + 24}px`);
    this.panes.forEach((pane) => pane.resize());
  }

  private arrange(): void {
    this.panes.forEach((pane) => pane.arrange(this.open));
    this.grow();
    this.mark();
  }

  private describe(pass: Pass): void {
    const { added, removed, changed } = this.diff.counts;
    const [b, a] = [this.diff.before.nodes.length, this.diff.after.nodes.length];
    this.heads[0].replaceChildren("Before ", el("span", {}, nodesText(b)));
    this.heads[1].replaceChildren(`After ${pass.name} `, el("span", {}, nodesText(a)));
    const swatch = (name: string, text: string) => el("span", { class: `swatch ${name}` }, text);
    const counts = { added, removed, changed };
    const shown = Object.entries(counts).filter(([, n]) => n);
    this.legend.replaceChildren(
      ...shown.map(([name, n]) => swatch(name, `${n.toLocaleString("en")} ${name}`)),
    );
    if (!shown.length) this.legend.textContent = "nothing changed";
    if (this.diff.after.region.size) this.legend.append(swatch("region", "packed rows"));
    const sizes = this.diff.after.nodes
      .filter((n) => n.op === "input" && n.dtype === "int" && n.notes["first batch"])
      .map((n) => `${n.shape} = ${n.notes["first batch"]}${/^gem_groups/.test(n.name) ? " groups of 128 rows" : ""}`);
    this.sizes.textContent = sizes.length ? `Sizes of the first batch: ${sizes.join(", ")}` : "";
  }

  // --- the parts of the page ---------------------------------------------------------------------

  private header(): HTMLElement {
    const head = el("div", { class: "explorer-head" }, el("h2", {}, "Graphs, pass by pass"));
    if (this.data.graphs.length > 1) {
      const choice = el("select", { "aria-label": "graph" }) as HTMLSelectElement;
      this.data.graphs.forEach((passes, i) => {
        const n = this.data.snapshots[passes[0].before].length;
        choice.append(el("option", { value: String(i) }, `graph ${i} (${n.toLocaleString("en")} nodes)`));
      });
      choice.addEventListener("change", () => this.chooseGraph(Number(choice.value)));
      head.append(choice);
    }
    return head;
  }

  private listPasses(): void {
    this.passes.replaceChildren(
      ...this.graphPasses().map((pass, i) => {
        const chosen = i === this.pass;
        const tab = button("", `${(pass.seconds * 1e3).toFixed(1)} ms`, () => this.choosePass(i));
        tab.append(pass.name, el("span", { class: "count" }, pass.changes.toLocaleString("en")));
        tab.setAttribute("role", "tab");
        tab.setAttribute("aria-selected", String(chosen));
        if (chosen) requestAnimationFrame(() => this.bringIn(tab));
        if (!pass.changes) tab.classList.add("idle");
        return tab;
      }),
    );
  }

  private bringIn(tab: HTMLElement): void {
    const { passes } = this;
    const right = tab.offsetLeft - passes.offsetLeft + tab.offsetWidth;
    if (right > passes.scrollLeft + passes.clientWidth) passes.scrollLeft = right - passes.clientWidth;
  }

  private toolbar(): HTMLElement {
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("keydown", (e) => {
      if (e.key === "Enter") this.nextHit(e.shiftKey ? -1 : 1);
      if (e.key === "Escape") this.clearSearch();
    });
    const weights = el("input", { type: "checkbox" }) as HTMLInputElement;
    weights.addEventListener("change", () => this.showWeights(weights.checked));
    const search = el("div", { class: "search" }, this.input, this.found, this.results);
    const tools = el("div", { class: "tools" },
      button("Next change", "n", () => this.nextChange(1)),
      button("Fold", "fold everything", () => this.foldAll()),
      button("Unfold", "open everything", () => this.unfoldAll()),
      button("Fit", "f", () => this.panes.forEach((pane) => pane.fit())),
      button("−", "zoom out", () => this.panes.forEach((pane) => pane.zoom(0.8))),
      button("+", "zoom in", () => this.panes.forEach((pane) => pane.zoom(1.25))),
      el("label", { title: "parameters and sizes" }, weights, " weights"),
    );
    return el("div", { class: "toolbar" }, search, tools, this.legend);
  }

  private fillColumns(): HTMLElement {
    const { columns } = this;
    const sides = el("div", { class: "sides" });
    this.panes.forEach((pane, i) => {
      const choose = button(i ? "After" : "Before", "", () => {
        columns.dataset.side = pane.name;
        this.resize();
      });
      choose.dataset.side = pane.name;
      sides.append(choose);
      columns.append(el("div", { class: `column ${pane.name}` }, this.heads[i], pane.canvas, this.cards[i]));
    });
    columns.prepend(sides);
    return columns;
  }

  private resize(): void {
    const first = this.panes.filter((pane) => pane.view.width === 0);
    this.panes.forEach((pane) => pane.resize());
    if (first.some((pane) => pane.view.width)) this.home();
  }

  /** Both graphs from their tops, at one scale. */
  private home(): void {
    const shown = this.panes.filter((pane) => pane.view.width);
    const scale = Math.min(1, ...shown.map((pane) => pane.widest()));
    this.grow(scale);
    this.panes.forEach((pane) => pane.home(scale));
  }

  // --- folding ---------------------------------------------------------------------------------

  toggle(item: Item): void {
    if (!this.open.delete(item.key)) this.open.add(item.key);
    const kept = this.panes.map((pane) => pane.picture.byKey.get(item.key));
    this.arrange();
    this.panes.forEach((pane, i) => {
      const [was, now] = [kept[i], pane.picture.byKey.get(item.key)];
      if (was && now) {
        pane.view.x += now.x + now.w / 2 - was.x - was.w / 2;
        pane.view.y += now.y - was.y;
      }
      pane.pan(0, 0);
    });
  }

  foldAll(): void {
    this.open.clear();
    this.arrange();
    this.home();
  }

  unfoldAll(): void {
    const visit = (item: Item) => {
      if (item.kind === "leaf") return;
      this.open.add(item.key);
      item.items.forEach(visit);
    };
    this.panes.forEach((pane) => visit(pane.tree));
    this.arrange();
    this.home();
  }

  private showWeights(on: boolean): void {
    this.weights = on;
    this.fill();
    this.arrange();
    this.panes.forEach((pane) => pane.pan(0, 0));
  }

  /** Opens what hides a node. */
  private reveal(name: string): void {
    let changed = false;
    const visit = (item: Item): boolean => {
      if (!item.leaves.some((leaf) => leaf.node.name === name)) return false;
      if (item.kind !== "leaf") {
        if (item.key && !this.open.has(item.key)) {
          this.open.add(item.key);
          changed = true;
        }
        const inner = item.kind === "stack" ? item.groups : item.items;
        inner.some(visit);
        if (item.kind === "stack") this.openCopies(item.groups, name);
      }
      return true;
    };
    this.panes.forEach((pane) => visit(pane.tree));
    if (changed) this.arrange();
  }

  /** The first of a stack stands for all: open in it what holds the same place. */
  private openCopies(groups: { leaves: { node: Node }[]; items: Item[] }[], name: string): void {
    const place = groups.map((g) => g.leaves.findIndex((l) => l.node.name === name)).find((i) => i >= 0);
    if (place === undefined) return;
    const wanted = groups[0].leaves[place];
    const visit = (item: Item): void => {
      if (item.kind === "leaf" || !item.leaves.some((l) => l === wanted)) return;
      this.open.add(item.key);
      item.items.forEach(visit);
    };
    groups[0].items.forEach(visit);
  }

  // --- selection -------------------------------------------------------------------------------

  select(item: Item | null, pane: Pane): void {
    this.picked = item && item.kind === "leaf" ? item.node.name : null;
    this.mark();
    this.showDetails();
    for (const other of this.panes) if (other !== pane) this.lookAt(other);
  }

  /** Shows a node in both graphs. */
  goTo(name: string): void {
    const node = this.diff.after.byName.get(name) ?? this.diff.before.byName.get(name);
    if (node && isWeight(node) && !this.weights) {
      this.root.querySelector<HTMLInputElement>("input[type=checkbox]")!.checked = true;
      this.showWeights(true);
    }
    this.picked = name;
    this.reveal(name);
    this.mark();
    this.panes.forEach((pane) => this.lookAt(pane));
    this.showDetails();
  }

  private lookAt(pane: Pane): void {
    if (!this.picked) return;
    const names = [this.picked, ...this.relatives(pane)];
    const box = names.map((name) => pane.boxOf(name)).find(Boolean);
    if (box) pane.center(box);
  }

  private relatives(pane: Pane): string[] {
    const other = pane === this.before ? this.diff.after : this.diff.before;
    if (!this.picked || pane.side.byName.has(this.picked)) return [];
    const node = other.byName.get(this.picked);
    return node ? counterparts(node, pane.side).map((n) => n.name) : [];
  }

  private mark(): void {
    for (const pane of this.panes) {
      const shown = pane.picture.shownAs;
      pane.marks.selected = (this.picked && shown.get(this.picked)?.key) || null;
      const related = this.relatives(pane).map((name) => shown.get(name)?.key ?? "");
      pane.marks.related = new Set(related);
      pane.marks.hits = new Map();
      for (const name of this.hits) {
        const key = shown.get(name)?.key;
        if (key) pane.marks.hits.set(key, (pane.marks.hits.get(key) ?? 0) + 1);
      }
      pane.redraw();
    }
  }

  private showDetails(): void {
    const sides = [this.diff.before, this.diff.after];
    this.cards.forEach((card, i) => {
      card.classList.toggle("full", this.picked !== null);
      const hint = i ? "Click a node for its shape, source line and annotations." : "";
      const empty = el("div", { class: "card empty" }, hint);
      const pick = (name: string) => this.goTo(name);
      card.replaceChildren(
        this.picked ? details(this.picked, sides[i], sides[1 - i], pick) : empty,
      );
    });
  }

  // --- search and steps ------------------------------------------------------------------------

  private search(): void {
    this.results.classList.remove("chosen");
    const words = this.input.value.trim();
    this.hits = words ? find(words, this.diff) : [];
    this.hit = -1;
    this.found.textContent = words ? this.hits.length.toLocaleString("en") : "";
    const most = 30;
    this.results.replaceChildren(
      ...this.hits.slice(0, most).map((name, i) => {
        const node = (this.diff.after.byName.get(name) ?? this.diff.before.byName.get(name))!;
        const row = button("", "", () => {
          this.hit = i;
          this.goTo(name);
        });
        row.setAttribute("role", "option");
        row.append(el("code", {}, node.target), el("small", {}, [node.module, node.where].filter(Boolean).join("  ")));
        return row;
      }),
    );
    this.mark();
  }

  private nextHit(step: number): void {
    if (!this.hits.length) return;
    this.results.classList.add("chosen");
    this.hit = (this.hit + step + this.hits.length) % this.hits.length;
    this.found.textContent = `${this.hit + 1} of ${this.hits.length.toLocaleString("en")}`;
    this.goTo(this.hits[this.hit]);
  }

  private clearSearch(): void {
    this.input.value = "";
    this.search();
    this.input.blur();
  }

  private changedNames(): string[] {
    const strong = (s?: string) => s === "added" || s === "removed" || s === "changed";
    const { before, after } = this.diff;
    const gone = before.nodes.filter((n) => before.status.get(n.name) === "removed");
    const rest = after.nodes.filter((n) => strong(after.status.get(n.name)));
    return [...rest, ...gone].filter((n) => this.weights || !isWeight(n)).map((n) => n.name);
  }

  nextChange(step: number): void {
    const names = this.changedNames();
    if (!names.length) return;
    this.change = (this.change + step + names.length) % names.length;
    this.goTo(names[this.change]);
  }

  moved(pane: Pane): void {
    for (const other of this.panes) if (other !== pane && other.view.width) follow(pane, other);
  }

  private key(e: KeyboardEvent): void {
    const typing = e.target instanceof HTMLInputElement || e.target instanceof HTMLSelectElement;
    if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
    if (e.key === "/") this.input.focus();
    else if (e.key === "n") this.nextChange(1);
    else if (e.key === "p") this.nextChange(-1);
    else if (e.key === "f") this.panes.forEach((pane) => pane.fit());
    else return;
    e.preventDefault();
  }
}

function nodesText(n: number): string {
  return `${n.toLocaleString("en")} node${n === 1 ? "" : "s"}`;
}
