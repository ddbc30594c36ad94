// Finds nodes by any of their words.

import type { Node } from "./data";
import type { Diff } from "./diff";

const texts = new WeakMap<Node, string>();

function textOf(n: Node): string {
  let found = texts.get(n);
  if (found === undefined) {
    const notes = Object.entries(n.notes).flat();
    const parts = [n.name, n.target, n.dtype, n.shape, n.module, n.where, n.code, ...notes];
    texts.set(n, (found = parts.join("\n").toLowerCase()));
  }
  return found;
}

/** Names of the nodes that hold all words, in the order of the graph after, then those removed. */
export function find(query: string, { before, after }: Diff): string[] {
  const words = query.toLowerCase().split(/\s+/);
  const holds = (n: Node) => words.every((word) => textOf(n).includes(word));
  const gone = before.nodes.filter((n) => !after.byName.has(n.name));
  return [...after.nodes, ...gone].filter(holds).map((n) => n.name);
}
