"""Which of the op's masks a formula about places is: causal, a window, HSTU's targets and context.

A formula is a Boolean combination of comparisons x - y <= n, where x and y are two of the query's
place i, the key's place j, the sequence's integer and 0. Where two such formulas differ somewhere,
they differ at a point whose coordinates are sums of their bounds: the comparisons that hold at any
point are a feasible system of difference constraints, and the shortest paths from 0 through it are
a solution. So two formulas are equal if they are equal on those finitely many points, whatever the
lengths may be, and no spelling has to be known. The op's side is ``attention_masks.visible``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gemcompile.ops.attention_args import AttentionArgs
from gemcompile.ops.attention_masks import visible

from .place_terms import Formula, Points, all_of, conjunction

# Farther than any sum of bounds, which are at most _LARGEST and not more than _MOST in number.
_FAR, _LARGEST, _MOST = 2**40, 2**31, 16
_SAMPLE = 256


@dataclass(frozen=True)
class Rule:
    """What the op can say of places.

    Attributes:
        causal, left, right: as the op's causal, window_left, window_right; -1: no limit.
        history: None, or what to add to the sequence's integer to get the number of rows before
            the targets.
        contextual: how many rows see the whole history.
    """

    causal: bool = False
    left: int = -1
    right: int = -1
    history: int | None = None
    contextual: int = 0

    def at(self, p: Points) -> Tensor:
        """Whether the query sees the key, by the op's own rule."""
        history = torch.tensor([self.history or 0])
        found = _seen(self, history, torch.tensor([self.contextual]), p)
        return torch.ones_like(p.row, dtype=torch.bool) if found is None else found[0]

    def formula(self) -> Formula:
        """The rule as a formula."""
        folds = (0, self.contextual - 1, self.history or 0)
        apart = {x - y for x in folds for y in folds}
        bounds = frozenset(n + d for n in (0, self.left, self.right) for d in apart)
        return Formula(self.at, bounds)


def _seen(rule: Rule, history: Tensor, contextual: Tensor, p: Points) -> Tensor | None:
    """The op's rule at all points, for each of several histories: bool [n, points]."""
    none, zero = torch.empty(0), torch.zeros(1, dtype=torch.int64)
    folds = rule.history is not None or bool(contextual.any())
    a = AttentionArgs(
        none, none, none, zero, zero, None, None, None, None, None, None,
        "softmax", 1.0, rule.causal, 0.0, 0, 0,
        window_left=rule.left,
        window_right=rule.right,
        num_targets=torch.zeros_like(history) if folds else None,
        num_contextual=contextual if folds else None,
    )  # fmt: skip
    sequences = torch.arange(len(history))[:, None]
    lengths = p.data + history[:, None]
    return visible(a, p.row[None], p.column[None], sequences, zero, lengths)


def rule_of(formula: Formula, has_data: bool) -> Rule | None:
    """The rule that equals the formula; None where there is none."""
    if not _looked_at(formula):
        return None
    return _history(formula) if has_data else _window(formula)


def rule_among(formula: Formula, keys: Formula) -> Rule | None:
    """The rule that equals the formula among the keys of which ``keys`` leaves a prefix.

    HSTU's contextual rows without targets see all keys of the sequence. Queries in the padding see
    the padding, too, which the op's rule would hide: that is the same where keys are masked.
    ``keys`` has to be j < n + the sequence's integer, which has to reach past the contextual rows.
    """
    both = conjunction(formula, keys)
    if not _looked_at(both):
        return None
    numbers = sorted(_numbers(both), key=abs)
    ends = [n for n in numbers if _equal(keys, _prefix(n), has_data=True)]
    for end, first in itertools.product(ends, (n for n in numbers if n >= 0)):
        rule = Rule(True, history=end, contextual=first + 1)
        long = _reaches(first, end)
        ours = all_of([rule.formula(), keys, long])
        if _equal(conjunction(both, long), ours, has_data=True):
            return rule
    return None


def _prefix(n: int) -> Formula:
    return Formula(lambda p: p.column < p.data + n, frozenset([n]))


def _reaches(place: int, n: int) -> Formula:
    return Formula(lambda p: place < p.data + n, frozenset([n - place]))


def _looked_at(formula: Formula) -> bool:
    """Points can tell it from others: they are neither too many nor too far."""
    sizes = {abs(n) for n in formula.bounds}
    return len(sizes) <= _MOST and max(sizes, default=0) <= _LARGEST


def _window(formula: Formula) -> Rule | None:
    points = _points(formula.bounds, has_data=False)
    seen = formula.at(points)
    if not bool(seen.any()):
        return None
    apart = (points.row - points.column)[seen]
    beyond = max(map(abs, formula.bounds), default=0) + 1
    left, right = int(apart.max()), -int(apart.min())
    if left < 0 or right < 0:
        return None
    left, right = (-1 if side > beyond else side for side in (left, right))
    rule = Rule(right == 0, left, -1 if right == 0 else right)
    return rule if _equal(formula, rule.formula(), has_data=False) else None


def _history(formula: Formula) -> Rule | None:
    """Candidates are made of the formula's own bounds; most fall at a few of the points."""
    bounds = _numbers(formula)
    few = _sample(formula, _points(formula.bounds, has_data=True))
    truth = formula.at(few)
    sides = [-1, *sorted(n for n in bounds if n >= 0)]
    pairs = torch.cartesian_prod(torch.tensor(sides) + 1, torch.tensor(sorted(bounds, key=abs)))
    contextual, history = pairs.unbind(1)
    for left in sides:
        seen = _seen(Rule(True, left, history=0), history, contextual, few)
        assert seen is not None
        for i in (seen == truth).all(1).nonzero().flatten().tolist():
            rule = Rule(True, left, -1, int(history[i]), int(contextual[i]))
            if _equal(formula, rule.formula(), has_data=True):
                return rule
    return None


def _numbers(formula: Formula) -> set[int]:
    """What may be compared with: a bound may be written in two ways, x < n and x <= n - 1."""
    return {s * n + d for n in formula.bounds for s in (1, -1) for d in (-1, 0, 1)} | {0}


def _equal(a: Formula, b: Formula, has_data: bool) -> bool:
    points = _points(a.bounds | b.bounds, has_data)
    return torch.equal(a.at(points), b.at(points))


def _sample(formula: Formula, p: Points) -> Points:
    """Some of the points, half of them where the formula holds."""
    truth, chance = formula.at(p), torch.Generator().manual_seed(0)
    places = [where.nonzero().flatten() for where in (truth, ~truth)]
    chosen = torch.cat(
        [x[torch.randint(len(x), (_SAMPLE,), generator=chance)] for x in places if len(x)]
    )
    return Points(p.row[chosen], p.column[chosen], p.data[chosen])


def _points(bounds: frozenset[int], has_data: bool) -> Points:
    """Points among which one is where two formulas with these bounds differ, if any is."""
    # x - y <= n where it holds, else y - x <= -n - 1; x - y < n is x - y <= n - 1.
    sizes = {0, *(abs(n) for n in bounds)}
    step = torch.tensor(sorted({m for n in sizes for m in (n, n - 1, -n, -n - 1)} | {_FAR}))
    names = ("row", "column", "data") if has_data else ("row", "column")
    grid = torch.meshgrid(*[step] * len(names), indexing="ij")
    steps_of = dict(zip(names, (x.flatten() for x in grid)))
    trees = [_along(tree, steps_of) for tree in _trees(names)]
    whole = [torch.cat([tree[name] for tree in trees]) for name in names]
    rows, columns = whole[:2]
    data = whole[2] if has_data else torch.zeros_like(rows)
    there = (rows >= 0) & (columns >= 0)
    return Points(rows[there], columns[there], data[there])


def _along(parents: dict[str, str], steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every variable as the sum of the steps on its way to the root."""

    def place(name: str) -> Tensor:
        parent = parents[name]
        return steps[name] if parent == "" else place(parent) + steps[name]

    return {name: place(name) for name in parents}


def _trees(names: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """All trees over the names and a root, "", as the parent of each."""
    for parents in itertools.product(("", *names), repeat=len(names)):
        tree = dict(zip(names, parents))
        if all(_reaches_root(tree, name) for name in names):
            yield tree


def _reaches_root(tree: dict[str, str], name: str) -> bool:
    for _ in tree:
        name = tree[name]
        if name == "":
            return True
    return False


def both(a: Rule, b: Rule) -> Rule:
    """The conjunction of two windows."""

    def narrower(x: int, y: int) -> int:
        return max(x, y) if min(x, y) < 0 else min(x, y)

    causal = a.causal or b.causal
    right = -1 if causal else narrower(a.right, b.right)
    return replace(a, causal=causal, left=narrower(a.left, b.left), right=right)
