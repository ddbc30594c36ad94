// A layered layout in linear time, for levels on which dagre would take seconds: ranks by longest
// path, places in a rank by the mean of what feeds it.

import type { Placed, Point } from "./layout";

const RANK = 24;
const GAP = 18;

/** The first `count` of `sizes` are items, in the graph's order; others mark the group's edge. */
export function layered(all: Point[], links: Point[], count: number): Placed {
  const sizes = all.slice(0, count);
  const feeds: number[][] = sizes.map(() => []);
  const uses: number[][] = sizes.map(() => []);
  for (const [a, b] of links) {
    if (a >= b || b >= count) continue; // a link back, or to the edge
    feeds[b].push(a);
    uses[a].push(b);
  }
  const rank = new Array<number>(sizes.length).fill(0);
  sizes.forEach((_, i) => {
    for (const a of feeds[i]) rank[i] = Math.max(rank[i], rank[a] + 1);
  });
  for (let i = sizes.length - 1; i >= 0; i--) {
    if (!feeds[i].length && uses[i].length) rank[i] = Math.min(...uses[i].map((u) => rank[u])) - 1;
  }
  const rows: number[][] = [];
  sizes.forEach((_, i) => (rows[rank[i]] ??= []).push(i));
  const at: Point[] = new Array(sizes.length);
  let y = 0;
  for (const row of rows) {
    if (!row) continue;
    const wish = new Map(row.map((i) => [i, mean(feeds[i].map((a) => at[a]?.[0] ?? 0))]));
    row.sort((i, j) => wish.get(i)! - wish.get(j)! || i - j);
    const height = Math.max(...row.map((i) => sizes[i][1]));
    const width = row.reduce((sum, i) => sum + sizes[i][0] + GAP, -GAP);
    const middle = mean(row.map((i) => wish.get(i)!));
    let x = middle - width / 2;
    for (const i of row) {
      at[i] = [x + sizes[i][0] / 2, y + height / 2];
      x += sizes[i][0] + GAP;
    }
    y += height + RANK;
  }
  let [left, right] = [Infinity, -Infinity];
  at.forEach(([x], i) => {
    left = Math.min(left, x - sizes[i][0] / 2);
    right = Math.max(right, x + sizes[i][0] / 2);
  });
  for (const point of at) point[0] -= left;
  return { at, bends: links.map(() => []), width: right - left, height: Math.max(y - RANK, 0) };
}

function mean(values: number[]): number {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0;
}
