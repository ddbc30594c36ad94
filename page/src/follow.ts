// Scrolling one graph scrolls the other: what both hold stays side by side.

import type { Pane } from "./pane";

/** Moves `pane` to where `leader` looks. */
export function follow(leader: Pane, pane: Pane): void {
  const marks = anchors(leader, pane);
  const view = leader.view;
  const middle = view.y + view.height / view.scale / 2;
  const ratio = (pane.picture.height || 1) / (leader.picture.height || 1);
  let [a0, b0] = [0, 0];
  let [a1, b1] = [leader.picture.height, pane.picture.height];
  for (const [a, b] of marks) {
    if (a <= middle) [a0, b0] = [a, b];
    else {
      [a1, b1] = [a, b];
      break;
    }
  }
  const goal = a1 > a0 ? b0 + ((middle - a0) * (b1 - b0)) / (a1 - a0) : middle * ratio;
  pane.view.scale = view.scale;
  pane.view.y = goal - pane.view.height / pane.view.scale / 2;
  pane.pan(0, 0);
}

/** Heights of what both pictures show, rising in both. */
function anchors(leader: Pane, pane: Pane): [number, number][] {
  const out: [number, number][] = [];
  for (const box of leader.picture.boxes) {
    const other = pane.picture.byKey.get(box.item.key);
    if (other) out.push([box.y + 20, other.y + 20]);
  }
  out.sort((a, b) => a[0] - b[0]);
  let last = -Infinity;
  return out.filter(([, b]) => b > last && ((last = b), true));
}
