// Scrolling one graph scrolls the other: what both hold stays side by side.

import type { Picture } from "./layout";
import type { Pane } from "./pane";

/** Moves `pane` to where `leader` looks. */
export function follow(leader: Pane, pane: Pane): void {
  const marks = anchors(leader.picture, pane.picture);
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

type Anchors = [number, number][];

const known = new WeakMap<Picture, { of: Picture; found: Anchors }>();

/** Heights of what both pictures show, rising in both. */
function anchors(leader: Picture, other: Picture): Anchors {
  const last = known.get(leader);
  if (last?.of === other) return last.found;
  const pairs: Anchors = [];
  for (const box of leader.boxes) {
    const twin = other.byKey.get(box.item.key);
    if (twin) pairs.push([box.y + 20, twin.y + 20]);
  }
  pairs.sort((a, b) => a[0] - b[0]);
  let highest = -Infinity;
  const found = pairs.filter(([, b]) => b > highest && ((highest = b), true));
  known.set(leader, { of: other, found });
  return found;
}
