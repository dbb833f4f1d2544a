"""Giving functions of a running program the code that their source has after a rewrite.

The new code runs from the function's next call on. Lines keep their numbers, so that tracebacks and profiles name the
places of the user's file. A function is left alone wherever its file is not what it was compiled from.
"""

from __future__ import annotations

import ast
import builtins
import gc
import io
import os
import tokenize
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, ClassVar, Final

from stepscope.guard import attempt, entry
from stepscope.remedies.rewrites import Edit, Rewrite, rewrites_of, rewritten
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


_LARGEST_BYTES: Final = 4 * 2**20


class NotSwapped(Exception):
    """Why a function keeps its code, as the end of a sentence."""


@lru_cache(maxsize=256)
def source_of(file: str) -> str | None:
    """The text of a source file; None for what is no file of reasonable size, or no text."""
    path = os.path.abspath(file)
    if file.startswith("<") or not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as opened:
            data = opened.read(_LARGEST_BYTES + 1)
        if len(data) > _LARGEST_BYTES:
            return None
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (OSError, SyntaxError, UnicodeError):
        return None


@lru_cache(maxsize=256)
def rewrites_in(file: str, kind: str) -> tuple[Rewrite, ...]:
    """The rewrites of one kind in a file; none where it cannot be read."""
    source = source_of(file)
    if source is None:
        return ()
    try:
        return tuple(rewrites_of(source, names=[kind]))
    except ValueError:
        return ()


def swap(code: CodeType, rewrites: Sequence[Rewrite], guard: Guard) -> CodeType:
    """Have all live functions of that code run what their source says after the rewrites; returns the new code.

    Raises:
        NotSwapped: they keep their code.
    """
    new = rewritten_code(code, rewrites, guard)
    functions = [each for each in gc.get_referrers(code) if isinstance(each, FunctionType) and each.__code__ is code]
    if not functions:
        raise NotSwapped("no function that runs this code was found")
    for function in functions:
        function.__code__ = new
    return new


def rewritten_code(code: CodeType, rewrites: Sequence[Rewrite], guard: Guard) -> CodeType:
    """What the code's source compiles to after the rewrites, each done where the guard says that it holds.

    Raises:
        NotSwapped: its file is another than it was compiled from, or the new code would not fit the function.
    """
    source = _current_source(code)
    lines = _old_lines(source, [edit for rewrite in rewrites for edit in rewrite.edits])
    try:
        tree = guarded(source, rewrites, guard, lambda each: _keep_lines(each, lines))
    except NotGuarded as error:
        raise NotSwapped(str(error)) from error
    new = _same_place(compile(tree, code.co_filename, "exec", dont_inherit=True), code)
    for name in ("co_freevars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"):
        if new is None or getattr(new, name) != getattr(code, name):
            raise NotSwapped("its new code would need other variables around it")
    assert new is not None
    count = code.co_argcount + code.co_kwonlyargcount
    if new.co_varnames[:count] != code.co_varnames[:count] or (new.co_flags ^ code.co_flags) & ~_NESTED:
        raise NotSwapped("its new code would be called in another way")
    return new


_NESTED: Final = 0x10


def is_current(code: CodeType) -> bool:
    """Whether the code's file is still what it was compiled from."""
    try:
        _current_source(code)
    except NotSwapped:
        return False
    return True


def _current_source(code: CodeType) -> str:
    source = source_of(code.co_filename)
    if source is None:
        raise NotSwapped("its file cannot be read")
    module = compile(source, code.co_filename, "exec", dont_inherit=True)
    if (module if code.co_name == "<module>" else _same_place(module, code)) != code:
        raise NotSwapped("its file is not the one that runs")
    return source


def _same_place(module: CodeType, code: CodeType) -> CodeType | None:
    """The code object of the same name and first line in a module; None where there is none, or several."""
    found = [
        each for each in _codes(module) if (each.co_name, each.co_firstlineno) == (code.co_name, code.co_firstlineno)
    ]
    return found[0] if len(found) == 1 else None


def _codes(module: CodeType) -> Iterator[CodeType]:
    todo = [module]
    while todo:
        code = todo.pop()
        yield code
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]


def _old_lines(source: str, edits: Sequence[Edit]) -> list[int]:
    """The line before the edits of each line after them, both from 1 on; the first entry is of no line."""
    lines, old, position = [0, 1], 1, 0
    for edit in sorted(edits):
        for _ in range(source.count("\n", position, edit.start)):
            old += 1
            lines.append(old)
        last = old + source.count("\n", edit.start, edit.end)
        for number in range(1, edit.text.count("\n") + 1):
            lines.append(min(old + number, last))
        old, position = last, edit.end
        lines[-1] = max(lines[-1], min(old, last)) if edit.end == edit.start else lines[-1]
    for _ in range(source.count("\n", position)):
        old += 1
        lines.append(old)
    return lines


def _keep_lines(tree: ast.AST, lines: Sequence[int]) -> None:
    """Give every node of the rewritten source the line that it, or what it replaced, had."""
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt | ast.excepthandler | ast.arg | ast.keyword | ast.alias | ast.pattern):
            node.lineno = lines[min(node.lineno, len(lines) - 1)]
            if node.end_lineno is not None:
                node.end_lineno = max(lines[min(node.end_lineno, len(lines) - 1)], node.lineno)
                if node.end_lineno == node.lineno and node.end_col_offset is not None:
                    node.end_col_offset = max(node.end_col_offset, node.col_offset)
