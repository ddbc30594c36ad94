"""matmul, bmm, baddbmm and einsum as one thing: two tensors whose dimensions carry letters."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.node import Argument

from gemcompile.graph import arguments, same_size, shape

from .axes import Axis, Label, Labels

aten = torch.ops.aten

Letters = tuple[Hashable, ...]


@dataclass(frozen=True)
class Contraction:
    """out[letters] = beta * addend + alpha * sum over the shared letter of left * right."""

    node: Node
    left: Node
    right: Node
    left_letters: Letters
    right_letters: Letters
    out_letters: Letters
    summed: Hashable
    alpha: Argument = 1
    beta: Argument = 1
    addend: Node | None = None

    def pull(self, labels: Labels) -> tuple[Labels, Labels, Label] | None:
        """Labels of left and right from those of the result, and the label of the summed axis."""
        known = dict(zip(self.out_letters, labels))
        sizes = dict(zip(self.out_letters, shape(self.node)))
        dim = self.left_letters.index(self.summed)
        sizes[self.summed] = shape(self.left)[dim]
        known[self.summed] = (Axis(sizes[self.summed]),)
        operands = []
        for node, letters in ((self.left, self.left_letters), (self.right, self.right_letters)):
            operand: list[Label] = []
            for letter, size in zip(letters, shape(node)):
                if same_size(size, sizes[letter]):
                    operand.append(known[letter])
                elif same_size(size, 1) and letter != self.summed:
                    operand.append(())
                else:
                    return None
            operands.append(tuple(operand))
        return operands[0], operands[1], known[self.summed]


def contraction(node: object) -> Contraction | None:
    """The node as a contraction of two tensors over one axis, or None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if node.target in (aten.matmul.default, aten.bmm.default, aten.mm.default):
        return _matmul(node, node.args[0], node.args[1])
    if node.target is aten.baddbmm.default:
        given = arguments(node)
        return _matmul(
            node,
            given["batch1"],
            given["batch2"],
            alpha=given["alpha"],
            beta=given["beta"],
            addend=given["self"],
        )
    if node.target is aten.einsum.default:
        return _einsum(node)
    return None


def _matmul(
    node: Node,
    left: Argument,
    right: Argument,
    alpha: Argument = 1,
    beta: Argument = 1,
    addend: Node | None = None,
) -> Contraction | None:
    assert isinstance(left, Node) and isinstance(right, Node)
    left_rank, right_rank = len(shape(left)), len(shape(right))
    if left_rank < 2 or right_rank < 2:
        return None
    batch = tuple(range(len(shape(node)) - 2))
    return Contraction(
        node,
        left,
        right,
        (*batch[len(batch) - left_rank + 2 :], "row", "sum"),
        (*batch[len(batch) - right_rank + 2 :], "sum", "column"),
        (*batch, "row", "column"),
        "sum",
        alpha,
        beta,
        addend,
    )


def _einsum(node: Node) -> Contraction | None:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, (list, tuple))
    if len(operands) != 2 or not all(isinstance(x, Node) for x in operands):
        return None
    left, right = operands
    assert isinstance(left, Node) and isinstance(right, Node)
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if inputs.count(",") != 1:
        return None
    terms = inputs.split(",")
    parsed = [_letters(t, len(shape(x))) for t, x in zip(terms, (left, right))]
    if not arrow:
        output = _implicit_output(inputs)
    out = _letters(output, len(shape(node)))
    if out is None or parsed[0] is None or parsed[1] is None:
        return None
    shared = set(parsed[0]) & set(parsed[1])
    summed = (set(parsed[0]) | set(parsed[1])) - set(out)
    if len(summed) != 1 or not summed <= shared:
        return None
    return Contraction(node, left, right, parsed[0], parsed[1], out, summed.pop())


def _letters(term: str, rank: int) -> Letters | None:
    """The letters of one term, an ellipsis written out as numbers that count from its end."""
    head, dots, tail = term.partition("...")
    hidden = rank - len(head) - len(tail)
    letters = (*head, *(range(-hidden, 0) if dots else ()), *tail)
    ok = len(letters) == rank and len(set(letters)) == rank
    return letters if ok else None


def _implicit_output(inputs: str) -> str:
    """Einsum's default: the ellipsis, then the letters that occur once, in alphabetical order."""
    dots = "..." if "..." in inputs else ""
    return dots + "".join(sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1))
