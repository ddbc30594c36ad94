"""Every reason that gem gives has advice, and a heading on the troubleshooting page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import attention_near_misses  # noqa: F401  (fills DECLINED)
import pytest
import torch
from advice_followed import FOLLOWED, Pair
from attention_helpers import Rewritten, inputs, only_site
from attention_spellings import DECLINED

from gemcompile.advice import KNOWN, Advice, advise

ROOT_FOLDER = Path(__file__).parents[1]
PAGE = ROOT_FOLDER / "docs" / "troubleshooting.md"

# How a reason comes about: as the argument of one of these, or returned by one of those.
RAISED = {
    *("Declined", "PrologueDeclined", "CaptureDeclined", "PassError", "Unreadable", "fail"),
    "_no",
}
RETURNING = {"unsound", "_not_worth", "observer", "_leaves", "_rule", "obstacle"}
# Messages inside another one: "pass X failed after Y: ...".
WITHIN = ("{} has no value; insert nodes", "{} lost its checkpoint mark")


def sources() -> list[Path]:
    """The files of the framework and of the passes."""
    return sorted((*(ROOT_FOLDER / "gemcompile").glob("*.py"), *(ROOT_FOLDER / "passes").glob("*")))


TREES = {p.name: ast.parse(p.read_text()) for p in sources() if p.suffix == ".py"}
CONSTANTS = {
    target.id: node.value
    for tree in TREES.values()
    for node in tree.body
    if isinstance(node, ast.Assign)
    for target in node.targets
    if isinstance(target, ast.Name)
}


def template(node: ast.AST | None) -> str | None:
    """The text of a string or f-string with {} in its holes, or None where it is neither."""
    if isinstance(node, ast.Name) and node.id in CONSTANTS:
        node = CONSTANTS[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and (start := template(node.left)) is not None:
        return start + "{}"
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
        return "".join(map(str, parts))
    return None


def parts(node: ast.Return) -> list[ast.expr]:
    """What is returned, a tuple as its elements."""
    if isinstance(node.value, ast.Tuple):
        return node.value.elts
    return [node.value] if node.value else []


def said_in(tree: ast.Module) -> Iterator[str]:
    """The reasons of one file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in RAISED and node.args and (text := template(node.args[0])):
                yield text
        if isinstance(node, ast.FunctionDef):
            if node.name in RETURNING:
                found = [x for n in ast.walk(node) if isinstance(n, ast.Return) for x in parts(n)]
                yield from filter(None, map(template, found))
            yield from declined_by(node)


def declined_by(function: ast.FunctionDef) -> Iterator[str]:
    """Reasons that a function hands to ``report.add(kind, "declined", op, reason)``, as a string or
    as a name that is assigned one there.
    """
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(function):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add"):
            continue
        if len(node.args) > 3 and template(node.args[1]) == "declined":
            reason = node.args[3]
            values = assigned.get(reason.id, []) if isinstance(reason, ast.Name) else [reason]
            yield from filter(None, map(template, values))


SAID = sorted(
    {
        text
        for tree in TREES.values()
        for text in (
            *said_in(tree),
            *(str(template(CONSTANTS[x])) for x in ("_NO_RULE", "_UNEQUAL")),
        )
        if text and not text.startswith(WITHIN)
    }
)


def headings() -> list[str]:
    return re.findall(r"^### (.*)$", PAGE.read_text(), re.MULTILINE)


# --- Page, advice and code ------------------------------------------------------------------------


def holes_unnamed(a: Advice) -> str:
    return re.sub(r"\{[A-Z]*\}", "{}", a.sentence)


def test_the_collector_sees_the_sentences() -> None:
    assert len(SAID) > 55
    assert "the fill value {} is too small to count as a mask" in SAID  # self.fail
    assert "there is no padding mask: torch's own kernel is as good" in SAID  # a constant
    assert "fill is {}: packing would cost more than it saves" in SAID  # returned
    assert "the number of packed rows changes at every step" in SAID  # assigned, then reported


@pytest.mark.parametrize("sentence", SAID)
def test_every_sentence_has_advice(sentence: str) -> None:
    assert sentence in {holes_unnamed(a) for a in KNOWN}, "add it to gemcompile/advice_*.py"


@pytest.mark.parametrize("a", KNOWN, ids=lambda a: a.heading)
def test_advice_is_for_a_sentence_that_is_said(a: Advice) -> None:
    assert holes_unnamed(a) in SAID, "the code no longer says it"
    assert a.pattern and a.write and "\n" not in a.pattern


def test_page_has_one_heading_for_each_sentence() -> None:
    found, wanted = headings(), [a.heading for a in KNOWN]
    assert set(found) - set(wanted) == set(), "headings for sentences that nothing says"
    assert set(wanted) - set(found) == set(), "sentences without a heading"
    assert len(found) == len(set(found)) and len({a.anchor for a in KNOWN}) == len(KNOWN)


def test_page_repeats_the_advice() -> None:
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    for section in sections:
        a = next(a for a in KNOWN if section.startswith(a.heading + "\n"))
        text = " ".join(section.split())
        assert f"gem knows: {a.pattern} **Write instead:** {a.write}" in text, a.heading


# --- What advise() answers ------------------------------------------------------------------------


def test_the_most_specific_sentence_answers() -> None:
    found = advise("ValueError: the mask is as large as the scores")
    assert found is not None and found.heading == "ERROR: MESSAGE"
    found = advise("aten.tanh stands between the scores and softmax")
    assert found is not None and found.anchor == "op-stands-between-the-scores-and-activation"
    assert advise("it was only counted") is None


@pytest.mark.parametrize("name", DECLINED)
def test_declined_spellings_get_advice(name: str) -> None:
    fn, _ = DECLINED[name]
    run = Rewritten(fn)
    run(*inputs())
    declined = [s for s in run.report.sites if s.status == "declined"]
    assert declined
    for site in declined:
        assert advise(site.reason) is not None, site.reason


@pytest.mark.parametrize("pair", FOLLOWED, ids=lambda pair: pair.heading)
def test_followed_advice_is_rewritten(pair: Pair) -> None:
    """What the advice says is attention to gem, and computes what the declined form computes."""
    args = inputs()
    before, after = Rewritten(pair.before), Rewritten(pair.after)
    result = before(*args)
    found = advise(only_site(before).reason)
    assert found is not None and found.heading == pair.heading
    assert pair.advice in found.write
    if pair.equal:
        torch.testing.assert_close(after(*args), result)
    after.check(args)
    after.report.expect(attention=1)
