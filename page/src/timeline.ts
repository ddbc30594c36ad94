// Collectives in the order of the graph, from where each is issued to where it is waited for.
// The axis counts operations; nothing here was timed.

import type { Data, Node } from "./data";
import { el, svg } from "./dom";

interface Bar {
  node: Node;
  from: number;
  to: number;
}

const COLLECTIVE = /c10d|all_reduce|all_gather|reduce_scatter|all_to_all/;
const HEAVY = /\b(mm|bmm|addmm|baddbmm|linear|matmul|einsum|convolution|\w*attention\w*)\b/;
const [WIDTH, LANE, LEFT] = [1000, 22, 90];

export function timeline(data: Data): HTMLElement | null {
  const parts: HTMLElement[] = [];
  for (const passes of data.graphs) {
    const nodes = data.snapshots[passes[passes.length - 1].after];
    const found = bars(nodes);
    if (found.length) parts.push(el("div", { class: "lane" }, draw(nodes, found)));
  }
  if (!parts.length && data.collectives.length) parts.push(listed(data));
  if (!parts.length) return null;
  const note = "In the order of the graph, from issue to wait; widths count operations, not time.";
  return el("section", { class: "timeline" }, el("h2", {}, "Collectives"), el("p", { class: "gem-hint" }, note), ...parts);
}

function bars(nodes: Node[]): Bar[] {
  const calls = nodes.filter((n) => n.op === "call");
  const place = new Map(calls.map((n, i) => [n.name, i]));
  const out: Bar[] = [];
  for (const node of calls) {
    if (!COLLECTIVE.test(node.target) || node.target.includes("wait_tensor")) continue;
    const waits = calls.filter((n) => n.target.includes("wait_tensor") && n.inputs.includes(node.name));
    const from = place.get(node.name)!;
    const to = Math.max(from + 1, ...waits.map((n) => place.get(n.name)!));
    out.push({ node, from, to });
  }
  return out;
}

/** Bars that overlap go to lanes of their own. */
function lanes(found: Bar[]): Bar[][] {
  const out: Bar[][] = [];
  for (const bar of found) {
    const free = out.find((lane) => lane[lane.length - 1].to <= bar.from);
    if (free) free.push(bar);
    else out.push([bar]);
  }
  return out;
}

function draw(nodes: Node[], found: Bar[]): SVGElement {
  const calls = nodes.filter((n) => n.op === "call");
  const rows = lanes(found);
  const height = (rows.length + 1) * (LANE + 6) + 6;
  const x = (i: number) => LEFT + (i * (WIDTH - LEFT)) / Math.max(calls.length, 1);
  const out = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": "collectives" });
  out.append(svg("text", { x: 0, y: 19 }, "compute"), svg("text", { x: 0, y: 19 + LANE + 6 }, "collectives"));
  calls.forEach((n, i) => {
    if (COLLECTIVE.test(n.target)) return;
    const heavy = HEAVY.test(n.target);
    const tall = heavy ? LANE : 8;
    const width = Math.max(x(1) - x(0) - 0.5, 0.5);
    out.append(svg("rect", { x: x(i), y: 4 + (LANE - tall) / 2, width, height: tall, class: heavy ? "heavy" : "light" }));
  });
  rows.forEach((row, r) => {
    const y = 4 + (r + 1) * (LANE + 6);
    for (const { node, from, to } of row) {
      const rect = svg("rect", { x: x(from), y, width: Math.max(x(to) - x(from), 2), height: LANE, rx: 4, class: "bar" });
      const name = node.target.split(".")[1] ?? node.target;
      rect.append(svg("title", {}, `${node.target}: ${to - from - 1} operations until it is waited for, ${node.where}`));
      out.append(rect);
      if (x(to) - x(from) > name.length * 7) out.append(svg("text", { x: x(from) + 6, y: y + 15, class: "in" }, name));
    }
  });
  return out;
}

function listed(data: Data): HTMLElement {
  const steps = data.collectives.map((c) => el("li", {}, el("code", {}, c.op), ` ${c.where}`));
  return el("ol", { class: "steps" }, ...steps);
}
