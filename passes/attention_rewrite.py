"""A plan written as ``gem::padded_attention`` and the few nodes around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from gemcompile.graph import Editor, shape, value

from .attention_additive import Addend
from .attention_arrange import Arranger, Sizes, destination, plain
from .attention_match import Factor
from .attention_plan import Plan
from .axes import settle
from .masks import Leaf, Literal

aten = torch.ops.aten

# A dense mask becomes a bias. Softmax swallows any score beside this fill, and it stays finite.
_SOFTMAX_FILL, _ELEMENTWISE_FILL = -1e30, -1e4


class MaskCache:
    """[B, L] bool masks made once for all layers of a graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self._made: dict[Any, Node] = {}

    def visible(self, leaf: Leaf, before: Node) -> Node:
        """The leaf's tensor as bool, True where visible; a value that stands before the site."""
        node = leaf.node
        if value(node).dtype is not torch.bool:
            return self._after(node, aten.ne.Scalar if leaf.want else aten.eq.Scalar, node, 0)
        if leaf.want:
            return node
        for user in node.users:
            negates = user.target in (aten.bitwise_not.default, aten.logical_not.default)
            if negates and user < before:
                return user
        return self._after(node, aten.bitwise_not.default, node)

    def both(self, a: Node, b: Node) -> Node:
        """a and b."""
        return self._after(max(a, b), aten.bitwise_and.Tensor, a, b)

    def remember(self, key: Any, make: Callable[[], Node]) -> Node:
        """The node made for this key, made now if need be."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _after(self, node: Node, op: Any, *args: Argument) -> Node:
        """One node right after ``node``, or after the inputs where it is one."""
        place = node.next
        while place.op == "placeholder":
            place = place.next
        edit = Editor(self.gm, like=node, before=place)
        return self.remember((op, args), lambda: edit(op, *args))


def rewrite(gm: GraphModule, site: Plan, sizes: Sizes, cache: MaskCache) -> Node:
    """Put the op in the graph and let the users of the match read it. Returns the op's node."""
    return _Writer(gm, site, sizes, cache).write()


class _Writer:
    def __init__(self, gm: GraphModule, site: Plan, sizes: Sizes, cache: MaskCache) -> None:
        self.site, self.match, self.g, self.cache = site, site.match, site.groups, cache
        self.sizes = sizes
        self.gm = gm
        self.edit = Editor(gm, like=self.match.node)
        self._dense_masks: dict[Literal, Node] = {}
        ends = [x.places[-1][0] for x in (self.match.q, self.match.k, self.match.v)]
        firsts = [x.places[0][0] for x in (self.match.q, self.match.k, self.match.v)]
        self.arrange = Arranger(self.edit, sizes, ends + firsts)

    def write(self) -> Node:
        match, g, site = self.match, self.g, self.site
        q = self._query()
        k = self._cast(self.arrange.pick(match.k.places, (g.b, g.k, g.kv_h, g.d)))
        v = self._cast(self.arrange.pick(match.v.places, (g.b, g.k, g.kv_h, g.dv)))
        key_mask = self._key_mask()
        by_hand = bool(site.before.dense) and match.softmax and site.empty != "assume"
        empty = "assume" if by_hand else site.empty
        arguments = (
            q, k, v, key_mask, self._bias(), self._out_scale(q), self._seed(), match.activation,
            float(match.scale), site.before.placed.rule.causal, empty, match.dropout_p,
        )  # fmt: skip
        op = self.edit(torch.ops.gem.padded_attention.default, *arguments, *self._placed())
        out = op
        if by_hand:
            out = self._where(self._row_sees_something(key_mask), out, v)
        for leaf in site.before.rows:
            out = self._where(self._row_mask(leaf), out, v)
        for leaf in site.after.rows:
            out = self.edit(aten.where.ScalarOther, self._row_mask(leaf), out, 0)
        self._replace(self._row_scaled(out))
        return op

    def _cast(self, x: Node) -> Node:
        dtype = self.site.dtype
        return x if value(x).dtype is dtype else self.edit(aten.to.dtype, x, dtype)

    def _query(self) -> Node:
        g = self.g
        q = self._cast(self.arrange.pick(self.match.q.places, (g.b, g.q, g.h, g.d)))
        for f in self.match.query_factors:
            q = self._scaled(q, f)
        return q

    def _scaled(self, x: Node, f: Factor) -> Node:
        """x [b, q, h, d] times a tensor that varies along some of b, q, h."""
        g = self.g
        by = f.node
        if isinstance(value(by), torch.Tensor):
            by = self.arrange(by, f.labels, (g.b, g.q, g.h, ()), expand=False)
        op = aten.div.Tensor if f.divide else aten.mul.Tensor
        dtype = value(x).dtype
        scaled = self.edit(op, x, by)
        return scaled if value(scaled).dtype is dtype else self.edit(aten.to.dtype, scaled, dtype)

    # --- Masks. ---

    def _key_mask(self) -> Node | None:
        leaves = sorted(self.site.before.keys, key=lambda x: x.node.name)
        masks = [self._one_key_mask(leaf) for leaf in leaves]
        if not masks:
            return None
        return functools.reduce(self.cache.both, masks)

    def _one_key_mask(self, leaf: Leaf) -> Node:
        mask = self.cache.visible(leaf, self.match.node)
        labels, target = plain(leaf.labels), (self.g.b, self.g.k)
        # Axes are made anew for every site: what repeats is their place and size in the target.
        axes = [a for label in plain(target) for a in label]
        where = tuple(tuple(axes.index(a) for a in label) for label in labels)
        key = ("keys", mask, where, tuple(a.size for a in axes))
        edit = Editor(
            self.gm,
            like=mask if mask.op == "call_function" else self.match.node,
            before=self.match.node,
        )
        arrange = Arranger(edit, self.sizes, [mask, *self.arrange.near])
        return self.cache.remember(key, lambda: arrange(mask, labels, target))

    def _row_mask(self, leaf: Leaf) -> Node:
        g = self.g
        mask = self.cache.visible(leaf, self.match.node)
        return self.arrange(mask, leaf.labels, (g.b, g.q, g.h, ()), expand=False)

    def _placed(self) -> list[Argument]:
        """Window, block, history and contextual rows, as far as there is something to say."""
        placed = self.site.before.placed
        rule = placed.rule
        given: list[Argument] = [rule.left, rule.right, placed.block, None, rule.contextual]
        if rule.history is not None:
            assert placed.data is not None
            rows = self.arrange(placed.data, placed.data_labels, (self.g.b,))
            given[3] = self.edit(aten.add.Tensor, rows, rule.history) if rule.history else rows
        nothing = [-1, -1, 0, None, 0]
        while given and given[-1] == nothing[len(given) - 1]:
            given.pop()
        return given

    def _dense(self, x: Literal) -> Node:
        """bool, broadcastable to [b, h, q, k]; made once."""
        if x not in self._dense_masks:
            self._dense_masks[x] = self._write_dense(x)
        return self._dense_masks[x]

    def _write_dense(self, x: Literal) -> Node:
        g = self.g
        if isinstance(x, Leaf):
            mask = self.cache.visible(x, self.match.node)
            return self.arrange(mask, x.labels, (g.b, g.h, g.q, g.k), expand=False)
        # Band(q, k): k <= q + offset. Band(k, q): q <= k + offset, that is k >= q - offset.
        lower = settle(x.row) == g.q
        device = value(self.match.node).device
        lengths = [self.arrange.size(g.q), self.arrange.size(g.k)]
        ones = self.edit(aten.ones.default, lengths, dtype=torch.bool, device=device)
        if lower:
            return self.edit(aten.tril.default, ones, x.offset)
        return self.edit(aten.triu.default, ones, -x.offset)

    def _all_of(self, masks: list[Node]) -> Node:
        return functools.reduce(lambda a, b: self.edit(aten.bitwise_and.Tensor, a, b), masks)

    def _row_sees_something(self, key_mask: Node | None) -> Node:
        """bool [b, q, h, 1], or with dimensions of size 1."""
        masks = [self._dense(x) for x in self.site.before.wide]
        if key_mask is not None:
            wide = self.edit(aten.unsqueeze.default, key_mask, 1)
            masks.append(self.edit(aten.unsqueeze.default, wide, 1))
        seen = self.edit(aten.any.dim, self._all_of(masks), -1, True)
        while len(shape(seen)) < 4:
            seen = self.edit(aten.unsqueeze.default, seen, 0)
        return self.edit(aten.permute.default, seen, [0, 2, 1, 3])

    def _where(self, rows: Node, out: Node, v: Node) -> Node:
        """Rows that see nothing: 0, or the mean of v."""
        if self.site.empty != "mean":
            return self.edit(aten.where.ScalarOther, rows, out, 0)
        mean = self.edit(aten.mean.dim, v, [1], True)
        repeats = shape(out)[2] // shape(v)[2] if self.g.kv_h != self.g.h else 1
        if repeats != 1:
            mean = self.edit(aten.repeat_interleave.self_int, mean, int(repeats), 2)
        return self.edit(aten.where.self, rows, out, mean)

    # --- Bias, dropout, scale. ---

    def _bias(self) -> Node | None:
        if self.site.table is not None:
            return self.site.table.write(self.edit, self.arrange)
        terms = [self._bias_term(b) for b in self.match.biases]
        if self.site.before.dense:
            terms.append(
                self._mask_bias(self._all_of([self._dense(x) for x in self.site.before.dense]))
            )
        if not terms:
            return None
        return functools.reduce(lambda a, b: self.edit(aten.add.Tensor, a, b), terms)

    def _bias_term(self, bias: Addend) -> Node:
        g = self.g
        x = self.arrange(bias.node, bias.labels, (g.b, g.h, g.q, g.k), expand=False)
        if not value(x).dtype.is_floating_point:
            x = self.edit(aten.to.dtype, x, torch.float32)
        return x if bias.factor == 1 else self.edit(aten.mul.Tensor, x, bias.factor)

    def _mask_bias(self, mask: Node) -> Node:
        while len(shape(mask)) < 4:
            mask = self.edit(aten.unsqueeze.default, mask, 0)
        fill = _SOFTMAX_FILL if self.match.softmax else _ELEMENTWISE_FILL
        wide = torch.float64 if self.site.dtype is torch.float64 else torch.float32
        device = value(mask).device
        zero = self.edit(aten.full.default, [], 0.0, dtype=wide, device=device)
        return self.edit(aten.where.ScalarOther, mask, zero, fill)

    def _seed(self) -> Node | None:
        if self.match.dropout is None:
            return None
        edit = Editor(self.gm, like=self.match.dropout)
        device = value(self.match.node).device
        return edit(aten.randint.low, 0, 2**62, [1], dtype=torch.int64, device=device)

    def _out_scale(self, q: Node) -> Node | None:
        """1/N of an element-wise activation, a float32 [1]."""
        if self._scales_after or self.match.out_scale == 1 and not self._symbolic:
            return None
        device = value(q).device
        number = self.match.out_scale
        x = self.edit(aten.full.default, [1], number, dtype=torch.float32, device=device)
        for f in self._symbolic:
            op = aten.div.Tensor if f.divide else aten.mul.Tensor
            x = self.edit(op, x, f.node)
        return x

    @property
    def _symbolic(self) -> list[Factor]:
        """Factors that are one number for all rows, such as 1/N."""
        return [f for f in self.match.row_factors if not isinstance(value(f.node), torch.Tensor)]

    @property
    def _scales_after(self) -> bool:
        # float32 would be too coarse for float64 models; softmax averages and needs no such care.
        return self.match.softmax or self.site.dtype is torch.float64

    def _row_scaled(self, out: Node) -> Node:
        folded = [] if self._scales_after else self._symbolic
        for f in self.match.row_factors:
            if f not in folded:
                out = self._scaled(out, f)
        if self._scales_after and self.match.out_scale != 1:
            out = self.edit(aten.mul.Tensor, out, self.match.out_scale)
        return out

    def _replace(self, out: Node) -> None:
        """Let the users of the match read ``out``, and erase what the match consisted of."""
        g = self.g
        canonical = (g.b, g.q, g.h, g.dv)
        chain = destination(self.match.node, self.match.out, canonical)
        place, labels = chain[-1]
        new = self.arrange(out, canonical, labels)
        dtype = value(place).dtype
        if value(new).dtype is not dtype:
            new = self.edit(aten.to.dtype, new, dtype)
        place.replace_all_uses_with(new)
        # Dead-code removal would keep dropout, SDPA and in-place operators.
        doomed = {*self.match.interior, *(node for node, _ in chain)}
        for node in sorted(doomed, reverse=True):
            self.gm.graph.erase_node(node)
