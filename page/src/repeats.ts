// Repetition in a sequence: found by comparing it with itself, shifted.

export interface Run {
  start: number;
  period: number;
  count: number;
}

const SHORTEST = 4;
const LONGEST = 600;

/** Runs that do not overlap, in order: the longest stretch first, of equal ones the shortest period. */
export function repeats(tokens: number[]): Run[] {
  const found: Run[] = [];
  for (let period = SHORTEST; period <= Math.min(LONGEST, tokens.length >> 1); period++) {
    let same = 0;
    for (let i = 0; i + period <= tokens.length; i++) {
      if (i + period < tokens.length && tokens[i] === tokens[i + period]) {
        same++;
        continue;
      }
      const count = Math.floor(same / period) + 1;
      if (count > 1) found.push({ start: i - same, period, count });
      same = 0;
    }
  }
  const length = (run: Run) => run.period * run.count;
  found.sort((a, b) => length(b) - length(a) || a.period - b.period);
  const taken = new Uint8Array(tokens.length);
  const out: Run[] = [];
  for (const run of found) {
    const end = run.start + length(run);
    if (taken[run.start] || taken[end - 1] || taken.subarray(run.start, end).includes(1)) continue;
    taken.fill(1, run.start, end);
    out.push(run);
  }
  return out.sort((a, b) => a.start - b.start);
}
