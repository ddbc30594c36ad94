// Bundles src/ into ../gemcompile/page/. Each file begins with a digest of the sources, which
// tests/test_report_page.py compares, so that a forgotten build is noticed without node.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { build } from "esbuild";

const digest = createHash("sha256");
for (const name of readdirSync("src").sort()) {
  digest.update(readFileSync(`src/${name}`));
}
digest.update(readFileSync("package-lock.json"));
const mark = digest.digest("hex").slice(0, 16);

await build({
  entryPoints: { report: "src/main.ts" },
  outdir: "../gemcompile/page",
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "ascii",
  legalComments: "inline",
  banner: { js: `/* sources ${mark}; dagre: MIT, (c) Chris Pettitt and others */` },
});
await build({
  entryPoints: ["src/summary.css", "src/report.css"],
  outdir: "../gemcompile/page",
  minify: true,
  banner: { css: `/* sources ${mark} */` },
});
