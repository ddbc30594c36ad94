"""EliminatePadding: prove that padded rows are never observed, and compute the rest on packed rows
only.

The proof is a backward analysis. Every value has a demand: nothing, all of it, or the rows of a
mask over (batch, position). Outputs and operators without a rule demand all of their inputs; exits
(a masked sum, a masked loss, the gather of the last item) turn "all" into rows; row-wise operators
pass rows on; attention demands of its keys and values the rows of its key mask. What is demanded
by rows and computed row-wise forms regions; each region is packed once at its inputs and unpacked
once at its exits. Equal functions have equal gradients, so that the backward needs no proof.
"""

from __future__ import annotations

from torch.fx import GraphModule

from gemcompile.pass_manager import Context, Pass
from gemcompile.prologue import Prologue, PrologueDeclined
from gemcompile.report import source_line
from gemcompile.target import Target

from .padding_demand import Analysis, analyse
from .padding_emit import emit
from .padding_regions import Region, regions
from .padding_report import observer, report_rewritten

# Above this share of real rows packing does not pay. Without any padding it was ahead on Hopper and
# about level on CPU, on the models of docs/performance.md.
_WORTH = {Target("cuda", 90): 1.0, Target("cpu"): 1.0}
_WORTH_ELSEWHERE = 0.95


class EliminatePadding(Pass):
    """Pack the rows that a mask keeps through everything row-wise, with jagged attention in
    between.
    """

    after = ("FuseAttention",)

    def run(self, gm: GraphModule, context: Context) -> int:
        if context.options.pack is False:
            return 0
        prologue = Prologue(gm, context.example_inputs)
        blocked: dict[object, str] = {}
        while True:
            analysis = analyse(gm, blocked, context.options.padded_outputs == "zero")
            found = regions(analysis)
            refused = self._refuse(found, analysis, prologue, context)
            if not refused:
                break
            blocked.update(refused)
        self._report_declined(analysis, blocked, context)
        if not found:
            return 0
        result = emit(gm, analysis, found, prologue)
        context.prologue = prologue
        report_rewritten(context, result, found)
        return result.changes

    def _refuse(
        self, found: list[Region], analysis: Analysis, prologue: Prologue, context: Context
    ) -> dict[object, str]:
        """Attention sites whose packing is wrong or does not pay, with the reason."""
        refused: dict[object, str] = {}
        for region in found:
            reason = region.unsound(analysis) or self._not_worth(region, prologue, context)
            if reason:
                refused.update({site: reason for site in region.sites})
        return refused

    def _not_worth(self, region: Region, prologue: Prologue, context: Context) -> str:
        try:
            rows, total = prologue.count(region.mask(analysis_graph=prologue.gm))
        except PrologueDeclined as e:
            return str(e)
        if context.options.pack == "auto" and rows is not None and total:
            fill = min(-(-rows // 128) * 128 / total, 9.99)
            if fill > _WORTH.get(context.target, _WORTH_ELSEWHERE):
                return f"fill is {fill:.2f}: packing would cost more than it saves"
        return ""

    def _report_declined(
        self, analysis: Analysis, blocked: dict[object, str], context: Context
    ) -> None:
        for n in analysis.attention:
            if analysis.rows_of(n) is not None and n not in blocked:
                continue
            reason = blocked.get(n) or observer(analysis, n, context)
            if reason:
                context.report.add(
                    "padding", "declined", "gem.padded_attention", reason, source_line(n)
                )
