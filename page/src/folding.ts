// What is open when a pass is first looked at: the changes, as far as a screen has room.

import { hasChanges } from "./paint";
import type { Group, Item } from "./tree";

const ROOM = 70; // boxes in the fuller of the two graphs

export function openAtFirst(trees: Group[]): Set<string> {
  const open = new Set<string>();
  const shown = trees.map((tree) => tree.items.length);
  const anyChange = trees.some((tree) => hasChanges(tree));
  let queue = candidates(trees.map((tree) => tree.items), anyChange);
  while (queue.length) {
    const next = queue.shift()!;
    const grown = shown.map((n, i) => n + (next.perTree[i]?.items.length ?? 0));
    if (Math.max(...grown) > ROOM) continue;
    grown.forEach((n, i) => (shown[i] = n));
    open.add(next.key);
    const below = next.perTree.map((item) => item?.items ?? []);
    queue = [...queue, ...candidates(below, anyChange)];
  }
  return open;
}

interface Candidate {
  key: string;
  perTree: (Folder | undefined)[];
}

type Folder = Exclude<Item, { kind: "leaf" }>;

/** Groups by key over both trees, since folding is common to them. */
function candidates(levels: Item[][], changedOnly: boolean): Candidate[] {
  const found = new Map<string, Candidate>();
  levels.forEach((items, i) => {
    for (const item of items) {
      if (item.kind === "leaf" || (changedOnly && !hasChanges(item))) continue;
      const entry = found.get(item.key) ?? { key: item.key, perTree: [] };
      entry.perTree[i] = item;
      found.set(item.key, entry);
    }
  });
  return [...found.values()];
}
