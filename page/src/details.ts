// What is known about the node that was clicked, under each graph.

import { typeOf, type Node } from "./data";
import { el } from "./dom";
import { counterparts, type Side } from "./diff";

const SAID: Record<string, string> = {
  added: "added", removed: "removed", changed: "changed", rewired: "same, with other inputs",
  same: "unchanged",
};

export function details(
  name: string, side: Side, other: Side, pick: (name: string) => void,
): HTMLElement {
  const node = side.byName.get(name);
  if (!node) return absent(name, side, other, pick);
  const status = side.status.get(name) ?? "same";
  const out = el("div", { class: "card" });
  out.append(
    el("div", { class: "card-head" },
      el("code", { class: "target" }, node.target),
      el("span", { class: `status ${status}` }, SAID[status]),
    ),
  );
  const facts = el("dl");
  const fact = (term: string, ...value: (globalThis.Node | string)[]) =>
    facts.append(el("dt", {}, term), el("dd", {}, ...value));
  if (typeOf(node)) fact("value", el("code", {}, typeOf(node)));
  fact("name", el("code", {}, node.name));
  if (node.args) fact("arguments", el("code", {}, node.args));
  if (node.inputs.length) fact("from", ...links(node.inputs, pick));
  const users = side.nodes.filter((n) => n.inputs.includes(name)).map((n) => n.name);
  if (users.length) fact("used by", ...links(users, pick));
  if (node.module) fact("module", el("code", {}, node.module));
  if (node.where) fact("line", el("code", {}, node.where), " ", el("code", { class: "code" }, node.code));
  const region = side.region.get(name);
  if (region !== undefined) {
    const packed = node.region !== null;
    fact("rows", packed ? `packed, row set ${region}` : `padded; packed by this pass, row set ${region}`);
  }
  for (const [key, value] of Object.entries(node.notes)) fact(key, value);
  out.append(facts);
  return out;
}

function absent(name: string, side: Side, other: Side, pick: (name: string) => void): HTMLElement {
  const node = other.byName.get(name);
  if (!node) return el("div", { class: "card empty" });
  const found = counterparts(node, side);
  const gone = other.status.get(name) === "removed";
  const text = gone ? "removed by this pass" : "not there before this pass";
  const out = el("div", { class: "card empty" }, el("p", {}, `${node.name}: ${text}`));
  if (found.length) {
    const lead = gone ? "in its place: " : "stands for: ";
    out.append(el("p", {}, lead, ...links(found.map((n: Node) => n.name), pick)));
  }
  return out;
}

function links(names: string[], pick: (name: string) => void): globalThis.Node[] {
  const most = 12;
  const out: globalThis.Node[] = [];
  for (const name of names.slice(0, most)) {
    const link = el("button", { type: "button", class: "link" }, name);
    link.addEventListener("click", () => pick(name));
    out.push(link, document.createTextNode(" "));
  }
  if (names.length > most) out.push(document.createTextNode(`and ${names.length - most} more`));
  return out;
}
