// The page's colours, for the canvas: they are defined once, in the styles.

export interface Theme {
  [name: string]: string;
}

const NAMES = [
  "ink", "muted", "line", "card", "ground", "group", "wire", "accent", "added", "added-ground",
  "removed", "removed-ground", "changed", "changed-ground", "region", "region-line",
];

export function theme(): Theme {
  const style = getComputedStyle(document.querySelector(".gem")!);
  return Object.fromEntries(NAMES.map((n) => [n, style.getPropertyValue(`--${n}`).trim()]));
}

export const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
export const MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
