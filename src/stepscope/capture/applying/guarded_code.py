"""Rewritten statements that ask in every run whether what they rest on holds, and else do what they did before.

A function is called with other tensors, lists instead of tensors, or another criterion after it was given new code: the
loop that it had then has to run.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from stepscope.capture.guard import attempt, entry
from stepscope.remedies.rewrites import Rewrite, rewritten
from stepscope.remedies.rewrites.source_text import Place, SourceText

_NAME: Final = "__stepscope_holds__"
"""Of the built-in function that the new code asks: any module sees it, and none lists it."""

Holds = Callable[[Rewrite, list[Any], Any], bool]


class NotGuarded(Exception):
    """Why rewrites cannot be chosen anew in every run, as the end of a sentence."""


class Guard:
    """What the new code asks.

    Args:
        holds: whether what a rewrite rests on holds, given its tensors and its criterion.
    """

    _rewrites: ClassVar[list[Rewrite]] = []
    """By the numbers in the new codes, which stay when another guard is installed."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds

    @entry(otherwise=False)
    def __call__(self, number: int, *values: Any) -> bool:
        """Whether the rewrite of that number holds for these tensors, and the criterion behind them."""
        with attempt():
            return self._holds(self._rewrites[number], list(values[:-1]), values[-1])
        return False  # the statement then does what it did before

    def question(self, rewrite: Rewrite) -> str:
        """The expression that asks, as source text."""
        self._rewrites.append(rewrite)
        values = [each.expression for each in rewrite.expected]
        values.append(rewrite.criterion.expression if rewrite.criterion is not None else "None")
        return f"{_NAME}({len(self._rewrites) - 1}, {', '.join(values)})"

    def install(self) -> None:
        """Have all modules see it."""
        setattr(builtins, _NAME, self)


def guarded(
    source: str, rewrites: Sequence[Rewrite], guard: Guard, keep_lines: Callable[[ast.AST], None]
) -> ast.Module:
    """The tree of the source in which each rewritten statement is chosen between its new and its old form.

    Args:
        keep_lines: gives the nodes of the rewritten source their lines in the source.

    Raises:
        NotGuarded: a rewrite changes more than one statement.
    """
    before, after = SourceText(source), SourceText(rewritten(source, rewrites))
    olds = {before.span(place.statement)[0]: place for place in before.places()}
    news = list(after.places())
    chosen = [_new_statements(before, after, olds, news, each, rewrites) for each in rewrites]
    keep_lines(after.tree)
    for rewrite, (block, first, count, old) in sorted(
        zip(rewrites, chosen, strict=True), key=lambda each: each[1][1], reverse=True
    ):
        question = ast.parse(guard.question(rewrite), mode="eval").body
        choice = ast.copy_location(ast.If(question, list(block[first : first + count]), [old]), old)
        for node in ast.walk(question):
            ast.copy_location(node, old)
        block[first : first + count] = [choice]  # type: ignore[index]
    return after.tree


def _new_statements(
    before: SourceText,
    after: SourceText,
    olds: dict[int, Place],
    news: Sequence[Place],
    rewrite: Rewrite,
    rewrites: Sequence[Rewrite],
) -> tuple[Sequence[ast.stmt], int, int, ast.stmt]:
    """The block, place and number of what a statement became, and the statement."""
    place = olds.get(rewrite.edits[0].start)
    if place is None:
        raise NotGuarded("its losses are used by other statements, too")
    start, end = before.span(place.statement)
    if any(not start <= edit.start <= edit.end <= end for edit in rewrite.edits):
        raise NotGuarded("its losses are used by other statements, too")
    edits = [edit for each in rewrites for edit in each.edits]
    moved = start + sum(
        len(edit.text) - (edit.end - edit.start) for edit in edits if edit.end <= start and edit.start < start
    )
    grown = sum(len(edit.text) - (edit.end - edit.start) for edit in rewrite.edits)
    inside = [
        each
        for each in news
        if moved <= after.span(each.statement)[0] and after.span(each.statement)[1] <= moved + end - start + grown
    ]
    first = min(inside, key=lambda each: after.span(each.statement)[0])
    count = sum(each.block is first.block for each in inside)
    return first.block, first.index, count, place.statement
