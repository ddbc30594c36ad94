// Draws a picture on a canvas: what lies in the window, and of that only what the scale lets read.

import { opOf, typeOf } from "./data";
import type { Side, Status } from "./diff";
import type { Box, Picture, Point, Wire } from "./layout";
import { MONO, SANS, type Theme } from "./theme";
import type { Item, Leaf } from "./tree";

export interface Window {
  x: number; // the drawing's point at the window's upper left corner
  y: number;
  scale: number;
  width: number;
  height: number;
}

export interface Marks {
  selected: string | null; // key of an item
  related: Set<string>; // keys
  hits: Map<string, number>; // by key: search results in it
}

const measurer = document.createElement("canvas").getContext("2d")!;
const widths = new Map<string, number>();
const LEAF_FONT = `600 12.5px ${SANS}`;
const SMALL_FONT = `11px ${SANS}`;
const TYPE_FONT = `11px ${MONO}`;
const READABLE = 0.42;

function textWidth(text: string, font: string): number {
  const key = font + text;
  let found = widths.get(key);
  if (found === undefined) {
    measurer.font = font;
    widths.set(key, (found = measurer.measureText(text).width));
  }
  return found;
}

function cut(text: string, most: number): string {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

export function sizeOf(item: Item): Point {
  if (item.kind === "leaf") {
    const head = textWidth(cut(opOf(item.node), 34), LEAF_FONT);
    const label = item.label ? textWidth(cut(item.label, 22), SMALL_FONT) + 10 : 0;
    const type = textWidth(cut(typeOf(item.node), 34), TYPE_FONT);
    return [Math.max(84, Math.ceil(Math.max(head + label, type)) + 22), type ? 42 : 28];
  }
  const title = textWidth(cut(item.label, 30), LEAF_FONT);
  const changes = textWidth(changesText(item), SMALL_FONT);
  const note = textWidth(groupNote(item), SMALL_FONT);
  return [Math.max(150, Math.ceil(Math.max(title + 50, note + changes + 16)) + 26), 46];
}

function groupNote(item: Item): string {
  if (item.kind === "stack") return `${item.groups.length} alike, ${item.groups[0].leaves.length} nodes each`;
  return `${item.leaves.length} nodes`;
}

interface Tally {
  added: number;
  removed: number;
  changed: number;
}

const tallies = new WeakMap<Item, Tally>();

export function tally(item: Item): Tally {
  let found = tallies.get(item);
  if (!found) {
    found = { added: 0, removed: 0, changed: 0 };
    for (const { status } of item.leaves) {
      if (status === "added" || status === "removed" || status === "changed") found[status]++;
    }
    tallies.set(item, found);
  }
  return found;
}

export function hasChanges(item: Item): boolean {
  const { added, removed, changed } = tally(item);
  return added + removed + changed > 0;
}

function changesText(item: Item): string {
  const { added, removed, changed } = tally(item);
  const parts = [added && `+${added}`, removed && `−${removed}`, changed && `~${changed}`];
  return parts.filter(Boolean).join("  ");
}

export class Painter {
  private regional = new WeakMap<Item, boolean>();

  constructor(
    private ctx: CanvasRenderingContext2D,
    public theme: Theme,
  ) {}

  paint(picture: Picture, side: Side, view: Window, marks: Marks): number {
    const { ctx, theme } = this;
    const ratio = devicePixelRatio || 1;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.fillStyle = theme.ground;
    ctx.fillRect(0, 0, view.width, view.height);
    ctx.setTransform(
      ratio * view.scale, 0, 0, ratio * view.scale,
      -view.x * view.scale * ratio, -view.y * view.scale * ratio,
    );
    const [right, bottom] = [view.x + view.width / view.scale, view.y + view.height / view.scale];
    const inside = (x: number, y: number, w: number, h: number) =>
      x < right && x + w > view.x && y < bottom && y + h > view.y;
    const boxes = picture.boxes.filter((b) => inside(b.x - 12, b.y - 12, b.w + 24, b.h + 24));
    const wires = picture.wires.filter((w) => visible(w, inside, marks));
    for (const box of boxes) if (box.open) this.frame(box);
    this.regions(boxes, wires, side);
    for (const wire of wires) this.wire(wire, marks);
    const readable = view.scale >= READABLE;
    for (const box of boxes) {
      if (box.open) this.title(box, marks, readable);
      else if (box.item.kind === "leaf") this.leaf(box, box.item, marks, readable);
      else this.folded(box, marks, readable);
    }
    return boxes.length;
  }

  private frame(box: Box): void {
    const { ctx, theme } = this;
    ctx.beginPath();
    ctx.roundRect(box.x, box.y, box.w, box.h, 10);
    ctx.fillStyle = theme.group;
    ctx.fill();
    ctx.lineWidth = 1;
    ctx.strokeStyle = theme.line;
    ctx.stroke();
  }

  /** Tinted ground below what works on packed rows, along the wires between it. */
  private regions(boxes: Box[], wires: Wire[], side: Side): void {
    if (!side.region.size) return;
    const { ctx, theme } = this;
    const isIn = (box: Box) => !box.open && this.inRegion(box.item, side);
    ctx.strokeStyle = theme.region;
    ctx.fillStyle = theme.region;
    ctx.lineCap = "round";
    ctx.lineJoin = "round";
    ctx.lineWidth = 30;
    for (const wire of wires) {
      if (wire.quiet || !isIn(wire.from) || !isIn(wire.to)) continue;
      ctx.beginPath();
      trace(ctx, wire.points);
      ctx.stroke();
    }
    for (const box of boxes.filter(isIn)) {
      ctx.beginPath();
      ctx.roundRect(box.x - 10, box.y - 8, box.w + 20, box.h + 16, 12);
      ctx.fill();
    }
  }

  /** Most of what it holds lies in a region. An item belongs to one tree, hence to one side. */
  private inRegion(item: Item, side: Side): boolean {
    let found = this.regional.get(item);
    if (found === undefined) {
      const inside = item.leaves.filter((leaf) => side.region.has(leaf.node.name));
      this.regional.set(item, (found = inside.length * 2 > item.leaves.length));
    }
    return found;
  }

  private wire(wire: Wire, marks: Marks): void {
    const { ctx, theme } = this;
    const near = wire.from.item.key === marks.selected || wire.to.item.key === marks.selected;
    ctx.beginPath();
    trace(ctx, wire.points);
    ctx.lineWidth = near ? 2 : 1.2;
    ctx.strokeStyle = near ? theme.accent : theme.wire;
    ctx.setLineDash(wire.quiet ? [4, 4] : []);
    ctx.stroke();
    ctx.setLineDash([]);
    const [x, y] = wire.points[wire.points.length - 1];
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x - 3.5, y - 6);
    ctx.lineTo(x + 3.5, y - 6);
    ctx.fillStyle = ctx.strokeStyle;
    ctx.fill();
  }

  private card(box: Box, status: Status, marks: Marks): void {
    const { ctx, theme } = this;
    const strong = status === "added" || status === "removed" || status === "changed";
    ctx.beginPath();
    ctx.roundRect(box.x, box.y, box.w, box.h, 7);
    ctx.fillStyle = strong ? theme[`${status}-ground`] : theme.card;
    ctx.fill();
    ctx.lineWidth = strong ? 1.5 : 1;
    ctx.strokeStyle = strong ? theme[status] : theme.line;
    ctx.setLineDash(status === "rewired" ? [3, 3] : []);
    if (status === "rewired") ctx.strokeStyle = theme.muted;
    ctx.stroke();
    ctx.setLineDash([]);
    this.outline(box, marks);
  }

  private outline(box: Box, marks: Marks): void {
    const { ctx, theme } = this;
    const key = box.item.key;
    const hit = marks.hits.has(key);
    if (key !== marks.selected && !marks.related.has(key) && !hit) return;
    ctx.beginPath();
    ctx.roundRect(box.x - 3, box.y - 3, box.w + 6, box.h + 6, 10);
    ctx.lineWidth = key === marks.selected ? 3 : 2;
    ctx.strokeStyle = theme.accent;
    ctx.setLineDash(marks.related.has(key) && !hit ? [5, 4] : []);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  private leaf(box: Box, leaf: Leaf, marks: Marks, readable: boolean): void {
    this.card(box, leaf.status, marks);
    if (!readable) return;
    const { node } = leaf;
    const minor = node.op !== "call";
    this.text(cut(opOf(node), 34), box.x + 11, box.y + 17, LEAF_FONT, minor ? "muted" : "ink");
    if (leaf.label) {
      const text = cut(leaf.label, 22);
      const x = box.x + box.w - 11 - textWidth(text, SMALL_FONT);
      this.text(text, x, box.y + 17, SMALL_FONT, "muted");
    }
    this.text(cut(typeOf(node), 34), box.x + 11, box.y + 33, TYPE_FONT, "muted");
  }

  private folded(box: Box, marks: Marks, readable: boolean): void {
    const { ctx, theme } = this;
    const { added, removed, changed } = tally(box.item);
    const kinds = [added && "added", removed && "removed", changed && "changed"].filter(Boolean);
    const status = (kinds.length === 1 ? kinds[0] : kinds.length ? "changed" : "same") as Status;
    if (box.item.kind === "stack") {
      for (const d of [8, 4]) {
        ctx.beginPath();
        ctx.roundRect(box.x + d, box.y + d, box.w, box.h, 7);
        ctx.fillStyle = theme.card;
        ctx.fill();
        ctx.strokeStyle = theme.line;
        ctx.lineWidth = 1;
        ctx.stroke();
      }
    }
    this.card(box, status, marks);
    if (!readable) return;
    this.text(`▸ ${cut(box.item.label, 30)}`, box.x + 11, box.y + 19, LEAF_FONT, "ink");
    this.text(groupNote(box.item), box.x + 11, box.y + 36, SMALL_FONT, "muted");
    this.changes(box, box.y + 36);
    const hits = marks.hits.get(box.item.key);
    if (hits) {
      const text = `${hits} found`;
      const x = box.x + box.w - 11 - textWidth(text, SMALL_FONT);
      this.text(text, x, box.y + 19, SMALL_FONT, "accent");
    }
  }

  private changes(box: Box, y: number): void {
    const counts = tally(box.item);
    let x = box.x + box.w - 11 - textWidth(changesText(box.item), SMALL_FONT);
    for (const [status, sign] of [["added", "+"], ["removed", "−"], ["changed", "~"]] as const) {
      if (!counts[status]) continue;
      const text = `${sign}${counts[status]}`;
      this.text(text, x, y, SMALL_FONT, status);
      x += textWidth(`${text}  `, SMALL_FONT);
    }
  }

  private title(box: Box, marks: Marks, readable: boolean): void {
    this.outline(box, marks);
    if (!readable) return;
    const { item } = box;
    const times = item.kind === "stack" ? `   ×${item.groups.length}, the first is shown` : "";
    const text = `▾ ${cut(item.label, 30)}${times}`;
    this.ctx.font = SMALL_FONT;
    this.ctx.lineWidth = 5;
    this.ctx.strokeStyle = this.theme.group; // wires pass below the title
    this.ctx.strokeText(text, box.x + 12, box.y + 19);
    this.text(text, box.x + 12, box.y + 19, SMALL_FONT, "muted");
  }

  private text(text: string, x: number, y: number, font: string, color: string): void {
    this.ctx.font = font;
    this.ctx.fillStyle = this.theme[color];
    this.ctx.fillText(text, x, y);
  }
}

type Inside = (x: number, y: number, w: number, h: number) => boolean;

function visible(wire: Wire, inside: Inside, marks: Marks): boolean {
  const { from, to } = wire;
  const { selected } = marks;
  if (wire.quiet && from.item.key !== selected && to.item.key !== selected) return false;
  return inside(wire.x - 20, wire.y - 20, wire.w + 40, wire.h + 40);
}

/** A smooth line that leaves and arrives vertically. */
function trace(ctx: CanvasRenderingContext2D, points: Point[]): void {
  ctx.moveTo(...points[0]);
  for (let i = 1; i < points.length; i++) {
    const [[x0, y0], [x1, y1]] = [points[i - 1], points[i]];
    const half = (y1 - y0) / 2;
    ctx.bezierCurveTo(x0, y0 + half, x1, y1 - half, x1, y1);
  }
}
