// Elements from code: text is always set as text, never parsed.

type Child = Node | string;

export function el(tag: string, attributes: Record<string, string> = {}, ...children: Child[]): HTMLElement {
  const out = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) out.setAttribute(name, value);
  out.append(...children);
  return out;
}

export function button(text: string, title: string, act: () => void): HTMLButtonElement {
  const out = el("button", { type: "button", title }, text) as HTMLButtonElement;
  out.addEventListener("click", act);
  return out;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag: string, attributes: Record<string, string | number>, text = ""): SVGElement {
  const out = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) out.setAttribute(name, String(value));
  if (text) out.textContent = text;
  return out;
}
