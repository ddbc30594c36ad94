// Starts the page: reads its data, draws the graphs and the collectives where there are any.

import { read } from "./data";
import { el } from "./dom";
import { Explorer } from "./explorer";
import { timeline } from "./timeline";

declare global {
  interface Window {
    gem?: { explorer: Explorer | null; ready: number };
  }
}

function start(): void {
  const place = document.getElementById("graphs")!;
  const data = read(document.getElementById("data")!.textContent!);
  let explorer: Explorer | null = null;
  if (data.graphs.length) {
    explorer = new Explorer(data);
    place.append(explorer.root);
  } else {
    place.append(el("p", { class: "gem-hint" }, "No graph was recorded."));
  }
  const lanes = timeline(data);
  if (lanes) place.append(lanes);
  // For tests and benchmarks: when the first picture was drawn, in ms from the start of loading.
  requestAnimationFrame(() =>
    requestAnimationFrame(() => (window.gem = { explorer, ready: performance.now() })),
  );
}

start();
