// The page's data, as gemcompile/report_html.py writes it.

export interface Node {
  name: string;
  op: "input" | "parameter" | "attribute" | "call" | "output";
  target: string;
  args: string;
  inputs: string[];
  dtype: string;
  shape: string;
  where: string;
  code: string;
  module: string;
  notes: Record<string, string>;
  region: number | null;
  origin: number | null;
}

export interface Pass {
  name: string;
  changes: number;
  seconds: number;
  before: number;
  after: number;
}

export interface Collective {
  op: string;
  status: string;
  where: string;
}

export interface Data {
  graphs: Pass[][];
  snapshots: Node[][];
  collectives: Collective[];
}

const FIELDS = [
  "name", "op", "target", "args", "inputs", "dtype", "shape", "where", "code", "module", "notes",
  "region", "origin",
] as const;

export function read(text: string): Data {
  const raw = JSON.parse(text);
  const nodes: Node[] = raw.nodes.map((row: unknown[]) =>
    Object.fromEntries(FIELDS.map((field, i) => [field, row[i]])),
  );
  return {
    graphs: raw.graphs,
    snapshots: raw.snapshots.map((places: number[]) => places.map((i) => nodes[i])),
    collectives: raw.collectives,
  };
}

const SHORT: Record<string, string> = {
  float32: "f32", float64: "f64", float16: "f16", bfloat16: "bf16", int64: "i64", int32: "i32",
  int16: "i16", int8: "i8", uint8: "u8", bool: "b1",
};

export function typeOf(node: Node): string {
  if (node.dtype) return (SHORT[node.dtype] ?? node.dtype) + (node.dtype === "int" ? " " : "") + node.shape;
  return node.shape.replace(/[a-z]+\d*(?=\[)/g, (dtype) => SHORT[dtype] ?? dtype);
}

/** "aten.add.Tensor" as "add"; other libraries keep their name. */
export function opOf(node: Node): string {
  if (node.op !== "call") return node.target;
  const parts = node.target.split(".");
  return parts[0] === "aten" ? parts[1] : parts.slice(0, 2).join(".");
}
