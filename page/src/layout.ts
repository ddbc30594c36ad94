// Places for what is visible: dagre within each open group, a plain layered layout where a level is
// large.

import * as dagre from "@dagrejs/dagre";
import { layered } from "./layered";
import type { Group, Item, Leaf } from "./tree";

export interface Box {
  item: Item;
  x: number; // left
  y: number; // top
  w: number;
  h: number;
  open: boolean;
  depth: number;
}

export interface Wire {
  from: Box;
  to: Box;
  points: [number, number][];
  quiet: boolean; // one of many uses of a value: drawn when one of its ends is looked at
  x: number; // of the rectangle that holds it
  y: number;
  w: number;
  h: number;
}

export interface Picture {
  boxes: Box[];
  wires: Wire[];
  byKey: Map<string, Box>;
  shownAs: Map<string, Item>; // by node name
  width: number;
  height: number;
}

export interface Edge {
  from: Item;
  to: Item;
  quiet: boolean;
}

export type Point = [number, number];

export interface Placed {
  at: Point[]; // centres, by place in the list of items
  bends: Point[][]; // by place in the list of edges
  width: number;
  height: number;
}

/** A group's edge, where wires from outside come in, or leave. */
type End = Item | "in" | "out";

interface Level {
  edges: Edge[];
  pairs: [End, End][];
}

const DAGRE_ITEMS = 160;
const USES = 4; // of a value that are drawn; an input's other uses are quiet from the second on
const PAD = 14;
const HEAD = 26;

export function layout(root: Group, open: Set<string>, size: (item: Item) => Point): Picture {
  return new Layout(root, open, size).run();
}

class Layout {
  private parent = new Map<Item, Item | null>();
  private shownAs = new Map<string, Item>();
  private instance = new Map<string, [string, number][]>();
  private levels = new Map<Item, Level>();
  private placed = new Map<Item, Placed>();
  private boxes: Box[] = [];
  private byItem = new Map<Item, Box>();
  private bends = new Map<Edge, Point[]>();

  constructor(
    private root: Group,
    private open: Set<string>,
    private size: (item: Item) => Point,
  ) {}

  run(): Picture {
    this.show(this.root, null);
    const edges = this.edges();
    this.distribute(edges);
    const [width, height] = this.measure(this.root);
    this.place(this.root, 0, 0, 0);
    const wires = edges.map((edge) => this.wire(edge));
    const byKey = new Map(this.boxes.map((box) => [box.item.key, box]));
    return { boxes: this.boxes, wires, byKey, shownAs: this.shownAs, width, height };
  }

  private isOpen(item: Item): boolean {
    return item.kind !== "leaf" && (item === this.root || this.open.has(item.key));
  }

  private show(item: Item, parent: Item | null): void {
    this.parent.set(item, parent);
    if (item.kind === "leaf" || !this.isOpen(item)) {
      for (const leaf of item.leaves) this.shownAs.set(leaf.node.name, item);
      return;
    }
    for (const child of item.items) this.show(child, item);
    if (item.kind !== "stack") return;
    const first = item.groups[0].leaves;
    item.groups.forEach((group, j) =>
      group.leaves.forEach((leaf, i) => {
        const name = leaf.node.name;
        this.shownAs.set(name, this.shownAs.get(first[i].node.name)!);
        this.instance.set(name, [...(this.instance.get(name) ?? []), [item.key, j]]);
      }),
    );
  }

  private edges(): Edge[] {
    const seen = new Map<Item, Set<Item>>();
    const out: Edge[] = [];
    for (const leaf of this.root.leaves) {
      const to = this.shownAs.get(leaf.node.name)!;
      for (const input of leaf.node.inputs) {
        const from = this.shownAs.get(input);
        if (!from || from === to || this.betweenCopies(input, leaf)) continue;
        const uses = seen.get(from) ?? new Set();
        seen.set(from, uses);
        if (uses.has(to)) continue;
        uses.add(to);
        out.push({ from, to, quiet: false });
      }
    }
    const drawn = new Map<Item, number>();
    for (const edge of out) {
      const n = drawn.get(edge.from) ?? 0;
      const few = edge.from.kind === "leaf" && edge.from.node.op !== "call" ? 2 : USES;
      edge.quiet = seen.get(edge.from)!.size > few && n > 0;
      drawn.set(edge.from, n + 1);
    }
    return out;
  }

  /** From one of a stack's copies into the next: within the one that is drawn it would run back. */
  private betweenCopies(input: string, leaf: Leaf): boolean {
    const a = this.instance.get(input);
    const b = this.instance.get(leaf.node.name);
    if (!a || !b) return false;
    return a.some(([key, i]) => b.some(([other, j]) => key === other && i !== j));
  }

  private chain(item: Item): Item[] {
    const out: Item[] = [];
    for (let at: Item | null | undefined = item; at; at = this.parent.get(at)) out.push(at);
    return out.reverse();
  }

  /** Each edge to the innermost group that holds both of its ends, and to those it enters or
   * leaves on its way, whose layouts keep a lane free for it. */
  private distribute(edges: Edge[]): void {
    for (const edge of edges) {
      if (edge.quiet) continue;
      const [a, b] = [this.chain(edge.from), this.chain(edge.to)];
      let i = 0;
      while (a[i + 1] && a[i + 1] === b[i + 1]) i++;
      if (!a[i + 1] || !b[i + 1]) continue;
      this.add(a[i], edge, [a[i + 1], b[i + 1]]);
      for (let j = i + 1; j + 1 < a.length; j++) this.add(a[j], edge, [a[j + 1], "out"]);
      for (let j = i + 1; j + 1 < b.length; j++) this.add(b[j], edge, ["in", b[j + 1]]);
    }
  }

  private add(group: Item, edge: Edge, pair: [End, End]): void {
    const level = this.levels.get(group) ?? { edges: [], pairs: [] };
    this.levels.set(group, level);
    level.edges.push(edge);
    level.pairs.push(pair);
  }

  private measure(item: Item): Point {
    if (item.kind === "leaf" || !this.isOpen(item)) return this.size(item);
    const sizes = item.items.map((child) => this.measure(child));
    const pairs = this.levels.get(item)?.pairs ?? [];
    const index = new Map<End, number>(item.items.map((child, i) => [child, i]));
    for (const end of ["in", "out"] as const) {
      if (!pairs.some((pair) => pair.includes(end))) continue;
      index.set(end, sizes.length);
      sizes.push([1, 1]);
    }
    const links = pairs.map(([a, b]): Point => [index.get(a)!, index.get(b)!]);
    const arrange = item.items.length <= DAGRE_ITEMS ? withDagre : layered;
    this.placed.set(item, arrange(sizes, links, item.items.length));
    return this.extent(item);
  }

  private place(item: Item, x: number, y: number, depth: number): void {
    const [w, h] = this.placed.has(item) ? this.extent(item) : this.size(item);
    const open = this.isOpen(item);
    if (item !== this.root) {
      const box = { item, x, y, w, h, open, depth };
      this.boxes.push(box);
      this.byItem.set(item, box);
    }
    const placed = this.placed.get(item);
    if (!open || item.kind === "leaf" || !placed) return;
    const left = x + (w - placed.width) / 2;
    const top = y + (item === this.root ? PAD : HEAD + PAD);
    item.items.forEach((child, i) => {
      const [cw, ch] = this.placed.has(child) ? this.extent(child) : this.size(child);
      const [cx, cy] = placed.at[i];
      this.place(child, left + cx - cw / 2, top + cy - ch / 2, depth + 1);
    });
    (this.levels.get(item)?.edges ?? []).forEach((edge, i) => {
      const bends = placed.bends[i].map(([px, py]): Point => [left + px, top + py]);
      const known = this.bends.get(edge) ?? [];
      const leaving = this.levels.get(item)!.pairs[i][1] === "out";
      this.bends.set(edge, leaving ? [...bends, ...known] : [...known, ...bends]);
    });
  }

  private extent(item: Item): Point {
    const placed = this.placed.get(item)!;
    const head = item === this.root ? PAD : HEAD + PAD;
    const least = item === this.root ? 0 : this.size(item)[0];
    return [Math.max(placed.width + 2 * PAD, least), placed.height + head + PAD];
  }

  private wire(edge: Edge): Wire {
    const [from, to] = [this.byItem.get(edge.from)!, this.byItem.get(edge.to)!];
    const start: Point = [from.x + from.w / 2, from.y + from.h];
    const end: Point = [to.x + to.w / 2, to.y];
    let last = start[1];
    const between = (this.bends.get(edge) ?? []).filter(
      ([, y]) => y > last && y < end[1] && ((last = y), true),
    );
    const points = [start, ...between, end];
    const [xs, ys] = [points.map((p) => p[0]), points.map((p) => p[1])];
    const [x, y] = [Math.min(...xs), Math.min(...ys)];
    const [w, h] = [Math.max(...xs) - x, Math.max(...ys) - y];
    return { from, to, points, quiet: edge.quiet, x, y, w, h };
  }
}

function withDagre(sizes: Point[], links: Point[]): Placed {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  const ranker = sizes.length > 60 ? "tight-tree" : "network-simplex";
  graph.setGraph({ ranksep: 24, nodesep: 18, edgesep: 10, ranker });
  graph.setDefaultEdgeLabel(() => ({}));
  sizes.forEach(([width, height], i) => graph.setNode(String(i), { width, height }));
  links.forEach(([a, b], i) => graph.setEdge(String(a), String(b), {}, String(i)));
  dagre.layout(graph as never);
  const label: any = graph.graph();
  const at = sizes.map((_, i): Point => {
    const n: any = graph.node(String(i));
    return [n.x, n.y];
  });
  const bends = links.map(([a, b], i): Point[] => {
    const edge: any = graph.edge(String(a), String(b), String(i));
    const points: { x: number; y: number }[] = edge?.points ?? [];
    return points.slice(1, -1).map((p): Point => [p.x, p.y]);
  });
  return { at, bends, width: label.width ?? 0, height: label.height ?? 0 };
}
