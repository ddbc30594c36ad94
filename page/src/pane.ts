// One graph in a window that pans and zooms.

import type { Side } from "./diff";
import { layout, type Box, type Picture } from "./layout";
import { Painter, sizeOf, type Marks, type Window } from "./paint";
import { theme } from "./theme";
import { build, type Group, type Item } from "./tree";

export interface Host {
  toggle(item: Item): void;
  select(item: Item | null, pane: Pane): void;
  moved(pane: Pane): void;
}

const [SMALLEST, LARGEST] = [0.05, 2.5];

export class Pane {
  readonly canvas = document.createElement("canvas");
  view: Window = { x: 0, y: 0, scale: 1, width: 0, height: 0 };
  marks: Marks = { selected: null, related: new Set(), hits: new Map() };
  side!: Side;
  tree!: Group;
  picture!: Picture;
  drawn = 0; // boxes in the last frame
  paintSeconds = 0;
  private painter: Painter;
  private frame = 0;

  constructor(
    readonly name: string,
    private host: Host,
  ) {
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `graph ${name} the pass`);
    this.painter = new Painter(this.canvas.getContext("2d")!, theme());
    this.listen();
  }

  show(side: Side, weights: boolean): void {
    this.side = side;
    this.tree = build(side, weights);
  }

  arrange(open: Set<string>): void {
    this.picture = layout(this.tree, open, sizeOf);
    this.redraw();
  }

  resize(): void {
    const { clientWidth: w, clientHeight: h } = this.canvas;
    if (!w || !h) return;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(w * ratio);
    this.canvas.height = Math.round(h * ratio);
    this.view.width = w;
    this.view.height = h;
    this.redraw();
  }

  recolor(): void {
    this.painter.theme = theme();
    this.redraw();
  }

  redraw(): void {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  }

  paint(): void {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.picture || !this.view.width) return;
    const start = performance.now();
    this.drawn = this.painter.paint(this.picture, this.side, this.view, this.marks);
    this.paintSeconds = (performance.now() - start) / 1e3;
  }

  /** The scale at which the graph is as wide as the window, as far as it stays readable. */
  widest(): number {
    if (!this.view.width) return 1;
    return Math.min(1, Math.max(0.6, this.view.width / (this.picture.width || 1)));
  }

  /** The top of the graph; where it is too wide, the middle of what lies there. */
  home(scale: number): void {
    const { view, picture } = this;
    view.scale = scale;
    const first = picture.boxes.filter((box) => !box.open && box.y < view.height / scale);
    const wide = picture.width * scale > view.width && first.length > 0;
    const middle = wide
      ? first.reduce((sum, box) => sum + box.x + box.w / 2, 0) / first.length
      : picture.width / 2;
    view.x = middle - view.width / scale / 2;
    view.y = -6;
    this.clamp();
    this.redraw();
  }

  fit(): void {
    const { view, picture } = this;
    const scale = Math.min(view.width / picture.width, view.height / picture.height, 1);
    view.scale = Math.max(scale, SMALLEST);
    view.x = (picture.width - view.width / view.scale) / 2;
    view.y = (picture.height - view.height / view.scale) / 2;
    this.clamp();
    this.redraw();
  }

  center(box: Box): void {
    const { view } = this;
    view.x = box.x + box.w / 2 - view.width / view.scale / 2;
    view.y = box.y + Math.min(box.h, 60) / 2 - view.height / view.scale / 2;
    this.clamp();
    this.redraw();
  }

  boxOf(name: string): Box | undefined {
    const item = this.picture.shownAs.get(name);
    return item && this.picture.byKey.get(item.key);
  }

  /** Moves by window pixels; false at the graph's edge. */
  pan(dx: number, dy: number): boolean {
    const { view } = this;
    const [x, y] = [view.x, view.y];
    view.x += dx / view.scale;
    view.y += dy / view.scale;
    this.clamp();
    this.redraw();
    return Math.abs(view.x - x) + Math.abs(view.y - y) > 1e-6;
  }

  zoom(factor: number, px = this.view.width / 2, py = this.view.height / 2): void {
    const { view } = this;
    const scale = Math.min(LARGEST, Math.max(SMALLEST, view.scale * factor));
    view.x += px / view.scale - px / scale;
    view.y += py / view.scale - py / scale;
    view.scale = scale;
    this.clamp();
    this.redraw();
  }

  private clamp(): void {
    const { view, picture } = this;
    const axis = (at: number, whole: number, seen: number) => {
      const edge = Math.min(40, seen / 8);
      if (whole + 2 * edge <= seen) return (whole - seen) / 2;
      return Math.min(Math.max(at, -edge), whole + edge - seen);
    };
    view.x = axis(view.x, picture.width, view.width / view.scale);
    const short = picture.height <= view.height / view.scale;
    view.y = short ? 0 : axis(view.y, picture.height, view.height / view.scale);
  }

  at(px: number, py: number): Box | undefined {
    const { view, picture } = this;
    const [x, y] = [view.x + px / view.scale, view.y + py / view.scale];
    let found: Box | undefined;
    for (const box of picture.boxes) {
      const h = box.open ? 26 : box.h;
      const inside = x >= box.x && x <= box.x + box.w && y >= box.y && y <= box.y + h;
      if (inside && (!found || box.depth >= found.depth)) found = box;
    }
    return found;
  }

  private click(px: number, py: number): void {
    const box = this.at(px, py);
    if (box && box.item.kind !== "leaf") this.host.toggle(box.item);
    else this.host.select(box ? box.item : null, this);
  }

  private listen(): void {
    const { canvas } = this;
    const touches = new Map<number, [number, number]>();
    let moved = 0;
    canvas.addEventListener("pointerdown", (e) => {
      touches.set(e.pointerId, [e.offsetX, e.offsetY]);
      if (touches.size === 1) moved = 0;
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointermove", (e) => {
      const last = touches.get(e.pointerId);
      if (!last) {
        canvas.style.cursor = this.at(e.offsetX, e.offsetY) ? "pointer" : "grab";
        return;
      }
      const now: [number, number] = [e.offsetX, e.offsetY];
      moved += Math.abs(now[0] - last[0]) + Math.abs(now[1] - last[1]);
      if (touches.size === 2) this.pinch([...touches.entries()], e.pointerId, now);
      else if (moved > 3) this.pan(last[0] - now[0], last[1] - now[1]);
      touches.set(e.pointerId, now);
      if (moved > 3) this.host.moved(this);
    });
    const end = (e: PointerEvent) => {
      if (touches.delete(e.pointerId) && e.type === "pointerup" && moved <= 3) this.click(e.offsetX, e.offsetY);
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("keydown", (e) => this.key(e));
  }

  private pinch(all: [number, [number, number]][], id: number, now: [number, number]): void {
    const [other] = all.filter(([key]) => key !== id).map(([, at]) => at);
    const [old] = all.filter(([key]) => key === id).map(([, at]) => at);
    const far = (a: [number, number]) => Math.hypot(a[0] - other[0], a[1] - other[1]) || 1;
    this.zoom(far(now) / far(old), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
  }

  /** Scrolls the graph, and at its edge the page; with ctrl or a pinch it zooms. */
  private wheel(e: WheelEvent): void {
    const unit = e.deltaMode === 1 ? 16 : 1;
    if (e.ctrlKey || e.metaKey) this.zoom(Math.exp(-e.deltaY * unit * 0.01), e.offsetX, e.offsetY);
    else if (!this.pan(e.deltaX * unit, e.deltaY * unit)) return;
    e.preventDefault();
    this.host.moved(this);
  }

  private key(e: KeyboardEvent): void {
    const step = 60;
    const moves: Record<string, [number, number]> = {
      ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step],
      PageUp: [0, -this.view.height * 0.8], PageDown: [0, this.view.height * 0.8],
    };
    if (moves[e.key]) this.pan(...moves[e.key]);
    else if (e.key === "+" || e.key === "=") this.zoom(1.25);
    else if (e.key === "-") this.zoom(0.8);
    else return;
    e.preventDefault();
    this.host.moved(this);
  }
}
