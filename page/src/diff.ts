// What a pass did to a graph. A node keeps its name for life, and a name is never given twice.

import type { Node } from "./data";

export type Status = "same" | "added" | "removed" | "changed" | "rewired";

export interface Side {
  nodes: Node[];
  byName: Map<string, Node>;
  status: Map<string, Status>;
  region: Map<string, number>;
}

export interface Diff {
  before: Side;
  after: Side;
  counts: { added: number; removed: number; changed: number };
}

export function diff(before: Node[], after: Node[]): Diff {
  const old = side(before);
  const now = side(after);
  const counts = { added: 0, removed: 0, changed: 0 };
  for (const node of after) {
    const was = old.byName.get(node.name);
    const status = was ? compare(was, node) : "added";
    now.status.set(node.name, status);
    if (was) old.status.set(node.name, status);
    if (status === "added" || status === "changed") counts[status]++;
  }
  for (const node of before) {
    if (now.byName.has(node.name)) continue;
    old.status.set(node.name, "removed");
    counts.removed++;
  }
  markReplaced(old, now);
  markBetween(old);
  return { before: old, after: now, counts };
}

function side(nodes: Node[]): Side {
  const region = new Map<string, number>();
  for (const n of nodes) if (n.region !== null) region.set(n.name, n.region);
  return { nodes, byName: new Map(nodes.map((n) => [n.name, n])), status: new Map(), region };
}

function compare(a: Node, b: Node): Status {
  if (a === b) return "same";
  const plain = (n: Node) =>
    [n.op, n.target, n.dtype, n.shape, n.region, JSON.stringify(n.notes)].join("\u0000");
  return plain(a) === plain(b) ? "rewired" : "changed";
}

/** Nodes of this pass between two of one region lie in it too: a split, and what joins again. */
function markBetween(side: Side): void {
  const users = new Map<string, number>();
  for (const n of side.nodes) {
    const region = side.region.get(n.name);
    if (region !== undefined) for (const input of n.inputs) users.set(input, region);
  }
  for (const n of side.nodes) {
    const region = users.get(n.name);
    const status = side.status.get(n.name);
    if (region === undefined || n.dtype || side.region.has(n.name)) continue;
    if (status !== "added" && status !== "removed") continue;
    if (n.inputs.some((input) => side.region.get(input) === region)) side.region.set(n.name, region);
  }
}

/** Removed nodes whose replacement works on packed rows lay in the region that was packed. */
function markReplaced(old: Side, now: Side): void {
  const regions = new Map<number, number>();
  for (const n of now.nodes) {
    if (n.region !== null && n.origin !== null && now.status.get(n.name) === "added") {
      regions.set(n.origin, n.region);
    }
  }
  for (const n of old.nodes) {
    const region = n.origin === null ? undefined : regions.get(n.origin);
    if (region !== undefined && n.dtype !== "bool" && old.status.get(n.name) === "removed") {
      old.region.set(n.name, region);
    }
  }
}

/** What `node`, gone or new in this pass, became or was on the other side. */
export function counterparts(node: Node, other: Side): Node[] {
  if (node.origin === null) return [];
  return other.nodes.filter((n) => {
    const status = other.status.get(n.name);
    return n.origin === node.origin && (status === "added" || status === "removed");
  });
}
