// A graph's nodes as a tree to fold: modules within modules, and alike neighbours stacked as one.

import type { Node } from "./data";
import type { Side, Status } from "./diff";
import { repeats } from "./repeats";

export interface Leaf {
  kind: "leaf";
  key: string;
  label: string; // the module that holds nothing else, or ""
  node: Node;
  leaves: Leaf[];
  status: Status;
  shape: number;
  order: number;
}

export interface Group {
  kind: "group";
  key: string;
  label: string;
  items: Item[];
  leaves: Leaf[];
  shape: number; // equal for groups that look alike
  order: number;
}

/** Neighbouring groups that look alike; drawn as the first of them. */
export interface Stack {
  kind: "stack";
  key: string;
  label: string;
  items: Item[]; // of the first
  groups: Group[];
  leaves: Leaf[]; // of all
  shape: number;
  order: number;
}

export type Item = Leaf | Group | Stack;

const MANY = 24; // leaves in one module from which on repetition is looked for

export function build(side: Side, weights: boolean): Group {
  return new Builder(side).build(weights);
}

/** Parameters and sizes are used everywhere and say little; they are drawn on request. */
export function isWeight(n: Node): boolean {
  return n.op === "parameter" || n.op === "attribute" || (n.op === "input" && n.dtype === "int");
}

/** Which groups a value has passed through and left, as bits by the group's number. */
type Bits = number[];

class Builder {
  private shapes = new Map<string, number>();
  private groups = new Map<string, Group>(); // the latest of each module path
  private numbers = new Map<Group, number>();
  private parents = new Map<Group, Group>();
  private homes = new Map<string, Group[]>(); // by node name, outermost first
  private left = new Map<string, Bits>();

  constructor(private side: Side) {}

  build(weights: boolean): Group {
    const root = this.group("", "");
    this.side.nodes.forEach((node, order) => {
      if (!weights && isWeight(node)) return;
      const status = this.side.status.get(node.name) ?? "same";
      const shape = this.shape([node.target, node.dtype, node.shape, status].join("\u0000"));
      const leaf: Leaf = {
        kind: "leaf", key: `n:${node.name}`, label: "", node, leaves: [], status, shape, order,
      };
      leaf.leaves.push(leaf);
      this.home(root, node).items.push(leaf);
    });
    return this.finish(root) as Group;
  }

  private group(key: string, label: string): Group {
    return { kind: "group", key, label, items: [], leaves: [], shape: 0, order: 0 };
  }

  /** The group of the node's module; a new one where the node depends on what left the old one.
   *
   * A module that runs twice would otherwise be one group that feeds itself, and every arrow
   * around it would point both ways.
   */
  private home(root: Group, node: Node): Group {
    const rowSet = /^gem_(?:groups|index|inverse|offsets|positions)_(\d+)$/.exec(node.name);
    const path = rowSet ? [`row set ${rowSet[1]}`] : node.module ? node.module.split(".") : [];
    const passed = this.passed(node);
    const chain: Group[] = [];
    let at = root;
    let key = "";
    for (const part of path) {
      key = key ? `${key}.${part}` : part;
      let next = this.groups.get(key);
      const parentIsNew = next && this.parents.get(next) !== at;
      if (!next || parentIsNew || has(passed, this.numbers.get(next)!)) {
        const again = next ? Number(/~(\d+)$/.exec(next.key)?.[1] ?? 1) + 1 : 1;
        next = this.group(again > 1 ? `${key}~${again}` : key, part);
        this.numbers.set(next, this.numbers.size);
        this.parents.set(next, at);
        this.groups.set(key, next);
        at.items.push(next);
      }
      chain.push(next);
      at = next;
    }
    const left = passed;
    for (const input of node.inputs) {
      for (const group of this.homes.get(input) ?? []) {
        if (!chain.includes(group)) add(left, this.numbers.get(group)!);
      }
    }
    this.homes.set(node.name, chain);
    this.left.set(node.name, left);
    return at;
  }

  /** What the node's inputs have left on their way, themselves not counted. */
  private passed(node: Node): Bits {
    const out: Bits = [];
    for (const input of node.inputs) {
      this.left.get(input)?.forEach((word, i) => (out[i] = (out[i] ?? 0) | word));
    }
    return out;
  }

  private shape(text: string): number {
    let found = this.shapes.get(text);
    if (found === undefined) this.shapes.set(text, (found = this.shapes.size));
    return found;
  }

  private finish(group: Group): Item {
    let items = group.items.map((item) => (item.kind === "group" ? this.finish(item) : item));
    if (group.key && items.length === 1) {
      const only = items[0];
      only.label = only.label ? `${group.label}.${only.label}` : group.label;
      return only;
    }
    items = this.stacked(this.blocks(items, group.key));
    group.items = items;
    this.seal(group);
    return group;
  }

  private seal(group: Group): void {
    group.leaves = group.items.flatMap((item) => item.leaves);
    group.order = Math.min(...group.items.slice(0, 50).map((item) => item.order));
    group.shape = this.shape(group.items.map((item) => item.shape).join(","));
  }

  /** Repeated sequences of leaves, where no module says so, as groups. */
  private blocks(items: Item[], key: string): Item[] {
    if (items.filter((item) => item.kind === "leaf").length < MANY) return items;
    const out: Item[] = [];
    let done = 0;
    for (const run of repeats(items.map((item) => item.shape))) {
      out.push(...items.slice(done, run.start));
      for (let i = 0; i < run.count; i++) {
        const from = run.start + i * run.period;
        const block = this.group(`${key}#${from}`, `block ${i}`);
        block.items = items.slice(from, from + run.period);
        this.seal(block);
        out.push(block);
      }
      done = run.start + run.count * run.period;
    }
    return [...out, ...items.slice(done)];
  }

  private stacked(items: Item[]): Item[] {
    const out: Item[] = [];
    for (let i = 0; i < items.length; ) {
      const first = items[i];
      let end = i + 1;
      if (first.kind === "group") {
        while (end < items.length && alike(first, items[end])) end++;
      }
      out.push(end - i > 1 ? this.stack(items.slice(i, end) as Group[]) : first);
      i = end;
    }
    return out;
  }

  private stack(groups: Group[]): Stack {
    const [first, last] = [groups[0], groups[groups.length - 1]];
    const number = /\d+(?!.*\d)/.exec(last.label)?.[0] ?? last.label;
    return {
      kind: "stack", key: `${first.key}…${last.key}`, label: `${first.label} … ${number}`,
      items: first.items, groups, leaves: groups.flatMap((g) => g.leaves), order: first.order,
      shape: this.shape(`${groups.length}x${first.shape}`),
    };
  }
}

function alike(a: Item, b: Item): boolean {
  const stem = (text: string) => text.replace(/\d+/g, "#");
  return b.kind === "group" && a.shape === b.shape && stem(a.label) === stem(b.label);
}

function has(bits: Bits, i: number): boolean {
  return (((bits[i >> 5] ?? 0) >>> (i & 31)) & 1) === 1;
}

function add(bits: Bits, i: number): void {
  while (bits.length <= i >> 5) bits.push(0);
  bits[i >> 5] |= 1 << (i & 31);
}
