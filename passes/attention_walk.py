"""The walk from the contraction with v up to q k^T, collecting what stands between.

Labels travel with it: at every step the dimensions of the tensor at hand are known by their axes,
so that a mask, a bias or a softmax dimension is understood by what it runs along, not by its size.
"""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch.fx import Node
from torch.fx.node import Argument

from gemcompile.graph import arguments, is_call, shape, target_name, value
from gemcompile.ops.activations import ELEMENTWISE

from .attention_activation import Found, activation, unshifted
from .attention_additive import additive, two_valued
from .attention_match import (
    MASK_FILL,
    Declined,
    Factor,
    Masking,
    Match,
    NotAttention,
    operand,
    scaled_operand,
    swallows,
)
from .attention_mutation import functional
from .attention_scores import Scores, factors
from .axes import (
    Label,
    Labels,
    aligned,
    axes_of,
    fresh,
    settle,
    through,
)
from .contractions import Contraction, contraction
from .masks import (
    CASTS,
    Literals,
    conjuncts,
    constant,
    is_binary,
)

aten = torch.ops.aten

_ADD = (aten.add.Tensor, aten.sub.Tensor)
_MUL = (aten.mul.Tensor, aten.mul.Scalar)
_DIV = (aten.div.Tensor, aten.div.Scalar)
_MASKED_FILL = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)
_WHERE = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)


def match_contraction(node: Node, scores: Scores) -> Match | None:
    """The attention whose product with v is ``node``; None where it is not that.

    Raises:
        Declined: it is one, but something is not proven.
    """
    found = contraction(node)
    if found is None or found.addend is not None:
        return None
    for weights, values in ((found.left, found.right), (found.right, found.left)):
        if scores.leads(weights) and not scores.is_weight(values):
            try:
                return _Walk(found, weights, values, scores).run()
            except NotAttention:
                continue
    return None


class _Walk:
    """One walk; ``node`` and ``labels`` are the tensor it has reached."""

    def __init__(self, last: Contraction, weights: Node, values: Node, scores: Scores) -> None:
        self.scores = scores
        self.match = Match(last.node, fresh(last.node))
        pulled = last.pull(self.match.out)
        if pulled is None:
            raise NotAttention
        left, right, self.match.keys = pulled
        self.node, self.labels = weights, left if weights is last.left else right
        v_labels = right if weights is last.left else left
        self.match.v = operand(values, v_labels)
        self.factor = 1.0

    def run(self) -> Match:
        match = self.match
        while (found := activation(self.node)) is None and contraction(self.node) is None:
            self._after_step()
        if found is not None:
            self._activate(found)
        else:
            match.activation = "identity"
            if not match.kept:
                raise NotAttention
        while contraction(self.node) is None:
            self._before_step()
        self._scores()
        match.mask_nodes = [n for n in match.mask_nodes if n not in match.interior]
        return match

    # --- Helpers. ---

    def fail(self, reason: str) -> NoReturn:
        """Report where the shape is that of attention, else pass by in silence."""
        name = self.match.activation
        shaped = name == "softmax" or name and self.scores.leads(self.node)
        if self.scores.leads(self.node, learned=False) and (shaped or self._softmax_above()):
            raise Declined(reason)
        raise NotAttention

    def _softmax_above(self) -> bool:
        stack, seen = [self.node], set[Node]()
        while stack:
            x = stack.pop()
            found = activation(x)
            if found is not None and found.name == "softmax":
                return self.scores.leads(found.source)
            if x not in seen and self.scores.leads(x) and contraction(x) is None:
                seen.add(x)
                stack += x.all_input_nodes
        return False

    def _move(self, node: Argument, labels: Labels | None = None) -> None:
        """Step over the current node to one of its inputs."""
        self.match.interior.append(self.node)
        if not isinstance(node, Node):
            raise NotAttention
        if labels is None:
            labels = aligned(node, shape(self.node), self.labels)
            if labels is None or any(
                not label and mine for label, mine in zip(labels, self.labels)
            ):
                self.fail("the scores themselves are broadcast")
        self.node, self.labels = node, labels

    def _step_over_rearrangement(self) -> bool:
        view = through(self.node, self.labels)
        if view is not None:
            self._move(*view)
            return True
        if is_call(self.node, *CASTS):
            source = self.node.args[0]
            if value(source).dtype.is_floating_point and value(self.node).dtype.is_floating_point:
                self._move(source, self.labels)
                return True
        return False

    def _side(self, node: Argument) -> Labels:
        """Labels of an operand that broadcasts to the tensor at hand."""
        assert isinstance(node, Node)
        self.match.mask_nodes.append(node)
        labels = aligned(node, shape(self.node), self.labels)
        if labels is None:
            raise NotAttention
        return labels

    def _chain_first(self, a: Argument, b: Argument) -> tuple[Argument, Argument]:
        """The operand that carries the scores, then the other one."""
        if not self.scores.leads(b):
            return a, b
        if not self.scores.leads(a):
            return b, a
        full = [isinstance(x, Node) and shape(x) == shape(self.node) for x in (a, b)]
        return (b, a) if full[1] and not full[0] else (a, b)

    def _fill(self) -> tuple[Literals, float, Argument] | None:
        """(visible where, fill, the other choice) of masked_fill and where."""
        node, op = self.node, functional(self.node)
        if op in _MASKED_FILL:
            fill = constant(node.args[2])
            mask, kept, want = node.args[1], node.args[0], False
        elif op in _WHERE:
            mask, yes, no = node.args[:3]
            want = self.scores.leads(yes)
            kept, fill = (yes, constant(no)) if want else (no, constant(yes))
        else:
            return None
        if fill is None or not isinstance(mask, Node):
            return None
        return conjuncts(mask, self._side(mask), want), fill, kept

    # --- Between the activation and v. ---

    def _after_step(self) -> None:
        if self._step_over_rearrangement() or self._dropout():
            return
        op, args = functional(self.node), self.node.args
        if op is aten.nan_to_num.default and arguments(self.node)["nan"] in (None, 0.0):
            # Only rows without a visible key are NaN, and the op gives 0 there.
            self._move(args[0])
        elif (filled := self._fill()) is not None:
            literals, fill, kept = filled
            if fill != 0:
                self.fail(f"masked weights are set to {fill:g} instead of 0")
            self.match.kept += literals
            self._move(kept)
        elif op in _MUL or op in _DIV and len(args) == 2:
            chain, other = args if op in _DIV else self._chain_first(*args[:2])
            self._multiply_after(other, divide=op in _DIV)
            self._move(chain)
        else:
            self.fail(f"{target_name(self.node)} stands between the weights and the values")

    def _dropout(self) -> bool:
        if functional(self.node) is not aten.dropout.default:
            return False
        given = arguments(self.node)
        if given["train"] and given["p"] != 0:
            if self.match.dropout is not None or not 0 < given["p"] < 1:
                self.fail("the weights pass through dropout in a way the op does not have")
            self.match.dropout, self.match.dropout_p = self.node, float(given["p"])
        self._move(given["input"])
        return True

    def _multiply_after(self, other: Argument, divide: bool) -> None:
        number = constant(other)
        if number is not None:
            self.match.out_scale *= 1 / number if divide else number
            return
        if not isinstance(other, Node):
            raise NotAttention
        if not isinstance(value(other), torch.Tensor):
            self.match.row_factors.append(Factor(other, (), divide))
            return
        for x, labels, inverse in factors(other, self._side(other), divide):
            two = None if inverse else two_valued(x, labels)
            if two is not None and two.low == 0 and two.high != 0:
                self.match.kept += two.where(True)
                self.match.out_scale *= two.high
            elif axes_of([self.match.keys]) & axes_of(labels):
                self.fail("the weights are multiplied by a tensor that varies over the keys")
            else:
                self.match.row_factors.append(Factor(x, labels, inverse))

    # --- The activation. ---

    def _activate(self, found: Found) -> None:
        self.match.activation = found.name
        if found.dim is not None:
            over = settle(self.labels[found.dim % len(self.labels)])
            if over != settle(self.match.keys):
                self._wrong_axis(over)
            masks = [(m, self._side(m)) for m in found.kept]
            if not all(is_binary(m) for m, _ in masks):
                self.fail("the exponentials are multiplied by something that is not a mask")
            literals = tuple(x for m, labels in masks for x in conjuncts(m, labels, True))
            if literals:
                self.match.hidden.append(Masking(literals, -math.inf, True, True))
        self.match.interior += [n for n in found.nodes if n is not self.node]
        self._move(found.source, self.labels)

    def _wrong_axis(self, over: Label) -> NoReturn:
        shared = axes_of([over]) & self.match.v.axes()
        self.fail(
            f"softmax runs over {'a batch or head' if shared else 'the query'} axis, not the keys"
        )

    # --- Between q k^T and the activation. ---

    def _before_step(self) -> None:
        if self._step_over_rearrangement():
            return
        op, args = functional(self.node), self.node.args
        if (filled := self._fill()) is not None:
            literals, fill, kept = filled
            self._hide(literals, fill * self.factor if fill else 0.0, replaced=True)
            self._move(kept)
        elif self.match.softmax and (shifted := self._shifted()) is not None:
            source, nodes = shifted
            self.match.interior += nodes
            self._move(source, self.labels)
        elif op in _ADD and all(isinstance(x, Node) for x in args[:2]):
            self._add()
        elif op in _MUL or op in _DIV and len(args) == 2:
            chain, other = args if op in _DIV else self._chain_first(*args[:2])
            self._multiply_before(other, divide=op in _DIV)
            self._move(chain)
        elif op is aten.dropout.default and not (args[2] and args[1]):
            self._move(args[0])
        else:
            name = self.match.activation
            self.fail(f"{target_name(self.node)} stands between the scores and {name}")

    def _shifted(self) -> tuple[Node, list[Node]] | None:
        """scores - max(scores) over the keys: softmax does not change."""
        keys = settle(self.match.keys)
        for dim, label in enumerate(self.labels):
            if settle(label) == keys:
                source, nodes = unshifted(self.node, dim)
                return (source, nodes[1:]) if nodes else None
        return None

    def _add(self) -> None:
        a, b = self.node.args[:2]
        alpha = arguments(self.node)["alpha"]
        if not isinstance(alpha, (int, float)):
            raise NotAttention
        chain, other = self._chain_first(a, b)
        subtracts = functional(self.node) is aten.sub.Tensor
        sign = -alpha if subtracts else alpha
        if chain is not a:
            if subtracts or alpha != 1:
                self.fail("the scores are subtracted or scaled by an addition")
            sign = 1
        self._add_tensor(other, sign * self.factor)
        self._move(chain)

    def _add_tensor(self, other: Argument, factor: float) -> None:
        assert isinstance(other, Node)
        if self.match.query_factors:
            self.fail("a bias or mask is scaled by a tensor")
        masks, biases = additive(other, self._side(other), factor, MASK_FILL)
        for hidden in masks:
            self._hide(hidden.literals, hidden.fill, replaced=False)
        self.match.biases += biases

    def _hide(self, literals: Literals, fill: float, replaced: bool) -> None:
        if not literals:
            return
        if self.match.query_factors and fill != 0:
            self.fail("the mask is applied before a scale whose sign is not known")
        if self.match.softmax:
            if not fill <= MASK_FILL:
                self.fail(f"the fill value {fill:g} is too small to count as a mask")
            swallowed = swallows(fill, value(self.node).dtype)
            uniform = swallowed or replaced and not self.match.biases
            self.match.hidden.append(Masking(literals, fill, uniform, replaced))
            return
        self._hide_elementwise(literals, fill, replaced)

    def _hide_elementwise(self, literals: Literals, fill: float, replaced: bool) -> None:
        name = self.match.activation
        stays = fill <= MASK_FILL or fill == 0 and replaced and not self.match.biases
        if name == "identity" and stays and fill == 0:
            self.match.kept += literals
            return
        function = ELEMENTWISE[name].forward
        if not stays or float(function(torch.tensor(fill))) != 0:
            self.fail(f"{name} of the fill value {fill:g} is not 0")
        self.match.hidden.append(Masking(literals, fill, False, replaced))

    def _multiply_before(self, other: Argument, divide: bool) -> None:
        number = constant(other)
        if number is not None:
            number = 1 / number if divide else number
            self.factor *= number
            return
        if not isinstance(other, Node):
            raise NotAttention
        if not isinstance(value(other), torch.Tensor):
            self._factor(Factor(other, (), divide))
            return
        for x, labels, inverse in factors(other, self._side(other), divide):
            two = None if inverse else two_valued(x, labels)
            if two is not None and two.low == 0 and two.high == 1:
                self._multiply_mask(two.where(True))
            elif axes_of([self.match.keys]) & axes_of(labels):
                self.fail("the scores are multiplied by a tensor that varies over the keys")
            else:
                self._factor(Factor(x, labels, inverse))

    def _multiply_mask(self, literals: Literals) -> None:
        if self.match.softmax:
            self.fail("the mask is multiplied into the logits before softmax")
        self._hide_elementwise(literals, 0.0, replaced=True)

    def _factor(self, factor: Factor) -> None:
        self.match.query_factors.append(factor)

    # --- q k^T. ---

    def _scores(self) -> None:
        match, found = self.match, contraction(self.node)
        assert found is not None
        if not isinstance(found.alpha, (int, float)) or not isinstance(found.beta, (int, float)):
            self.fail("baddbmm scales by a symbolic number")
        if found.addend is not None and found.beta != 0:
            self._add_tensor(found.addend, found.beta * self.factor)
        pulled = found.pull(self.labels)
        if pulled is None or not self.scores.leads(self.node):
            raise NotAttention
        left, right, match.depth = pulled
        match.interior.append(self.node)
        match.score_dtype = value(self.node).dtype
        keys = axes_of([match.keys])
        if not keys:
            self.fail("there is a single key")
        sides = [(found.left, left, found.left_letters), (found.right, right, found.right_letters)]
        if keys & axes_of(left):
            sides.reverse()
        (q, q_labels, q_letters), (k, k_labels, k_letters) = sides
        if not keys <= axes_of(k_labels) or keys & axes_of(q_labels):
            self.fail("the keys of the scores are not the keys of the values")
        match.q, q_scale = scaled_operand(q, q_labels)
        match.k, k_scale = scaled_operand(k, k_labels)
        if self.scores.is_weight(k):
            raise NotAttention
        match.scale = self.factor * found.alpha * q_scale * k_scale
        known = dict(zip(found.out_letters, self.labels))
        for letter in found.out_letters:
            label = known[letter]
            if set(settle(label)) & set(settle(match.keys)):
                continue
            if letter in q_letters and letter not in k_letters:
                match.rows += label
            else:
                match.batch += label
