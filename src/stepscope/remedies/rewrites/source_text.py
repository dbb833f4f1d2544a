"""Source text with its syntax tree: the text spans of nodes, and the statements of each function."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

MOST_CHARACTERS: Final = 4 * 2**20
"""Longer texts are refused: no hand-written module is nearly as long."""
LONGEST_LINE: Final = 20_000
"""Longer lines are refused: they are data or generated, and may nest deeper than Python's parser allows."""

STRINGS_HAVE_PLACES: Final = sys.version_info >= (3, 12)
"""Whether this Python gives positions of expressions inside f-strings; older ones give wrong ones."""
ScopeNode: TypeAlias = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LINE_END: Final = re.compile("\r\n|\r|\n")


@dataclass(frozen=True, eq=False)
class Scope:
    """A module, class or function."""

    node: ScopeNode
    name: str
    parent: Scope | None

    @property
    def chain(self) -> tuple[Scope, ...]:
        """This scope and its enclosing scopes, innermost first."""
        return (self, *(self.parent.chain if self.parent is not None else ()))

    @property
    def is_function(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)


@dataclass(frozen=True, eq=False)
class Place:
    """A statement and its context.

    Attributes:
        block: the list of statements that contains it.
        index: its position in the block.
        around: the enclosing compound statements of the same scope, outermost first.
    """

    statement: ast.stmt
    block: Sequence[ast.stmt]
    index: int
    scope: Scope
    around: tuple[ast.stmt, ...]


class SourceText:
    """A module's text, parsed.

    Raises:
        ValueError: it is not Python, or too long.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"the source has {len(text):,} characters: at most {MOST_CHARACTERS:,} are looked through")
        self.text = text
        self._mark = 1 if text.startswith("\ufeff") else 0
        bounds = [self._mark, *(match.end() for match in _LINE_END.finditer(text))]
        self._starts = bounds
        longest = max(end - start for start, end in zip(bounds, [*bounds[1:], len(text)], strict=True))
        if longest > LONGEST_LINE:
            raise ValueError(f"the source has a line of {longest:,} characters: at most {LONGEST_LINE:,} are read")
        try:
            self.tree = ast.parse(text[self._mark :])
        except SyntaxError as error:
            raise ValueError(f"the source is no Python: {error.msg} (line {error.lineno})") from error
        except (RecursionError, MemoryError) as error:
            raise ValueError("the source nests too deep to be parsed") from error
        except ValueError as error:  # null characters, lone surrogates
            raise ValueError(f"the source is no Python: {error}") from error

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Start and end of the node, in characters of the text; a decorated definition without its decorators."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self._offset(node.lineno, node.col_offset), self._offset(end_line, end_column)

    def of(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, statement: ast.stmt) -> str | None:
        """The blanks before the statement in its line; None if there is anything else."""
        before = self.before(statement)
        return before if not before.strip(" \t\f") else None

    def before(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """The text before the node in its line."""
        return self.text[self._starts[node.lineno - 1] : self.span(node)[0]]

    def ends_its_line(self, statement: ast.stmt) -> bool:
        """Whether nothing but a comment follows the statement in its last line."""
        end = self.span(statement)[1]
        rest = _LINE_END.split(self.text[end : end + LONGEST_LINE], maxsplit=1)[0].strip()
        return not rest or rest.startswith("#")

    def whole_lines(self, statement: ast.stmt) -> tuple[int, int]:
        """From the start of the statement's first line to the start of the line after its last one."""
        end_line = statement.end_lineno or statement.lineno
        last = self._starts[end_line] if end_line < len(self._starts) else len(self.text)
        return self._starts[statement.lineno - 1], last

    @property
    def line_end(self) -> str:
        """The line ending of the first line, used for new lines."""
        match = _LINE_END.search(self.text)
        return match.group() if match else "\n"

    def comments(self, statement: ast.stmt) -> list[str]:
        """The comments inside the statement, in order."""
        lines = self.of(statement)
        if "#" not in lines:
            return []
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(f"({lines}\n)").readline))
        except (tokenize.TokenError, SyntaxError, IndentationError):
            return []
        return [token.string for token in tokens if token.type == tokenize.COMMENT]

    def places(self) -> Iterator[Place]:
        """Yield every statement of the module, including those of nested functions and classes."""
        whole = Scope(self.tree, "", None)
        todo: list[tuple[Sequence[ast.stmt], Scope, tuple[ast.stmt, ...]]] = [(self.tree.body, whole, ())]
        while todo:
            block, scope, around = todo.pop()
            for index, statement in enumerate(block):
                yield Place(statement, block, index, scope, around)
                inner = _scope_of(statement, scope)
                for part in _blocks(statement):
                    todo.append((part, inner or scope, () if inner else (*around, statement)))

    def _offset(self, line: int, column: int) -> int:
        """Convert the tree's UTF-8 byte offset in a line to a character offset in the whole text."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        row = self.text[start:end]
        return start + (column if row.isascii() else len(row.encode()[:column].decode("utf-8", "ignore")))


def _scope_of(statement: ast.stmt, scope: Scope) -> Scope | None:
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return None
    before = f"{scope.name}.<locals>." if scope.is_function else f"{scope.name}." if scope.name else ""
    return Scope(statement, before + statement.name, scope)


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block:
            yield block
    for part in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        yield part.body


def expressions_of(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield every node of the statement itself that has a position, without nested statements."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            unplaced = isinstance(child, ast.JoinedStr) and not STRINGS_HAVE_PLACES
            if not (unplaced or isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)):
                todo.append(child)


def dotted(node: ast.AST | None) -> str | None:
    """ "a.b.c" for a name or attributes of one; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def assigned(node: ast.AST) -> tuple[list[ast.expr], ast.expr | None]:
    """Targets and value of a plain or annotated assignment; no targets for anything else."""
    if isinstance(node, ast.Assign):
        return node.targets, node.value
    return ([node.target], node.value) if isinstance(node, ast.AnnAssign) else ([], None)


def is_same(one: ast.AST, other: ast.AST) -> bool:
    """Whether two expressions are equal, regardless of position."""
    return ast.dump(one) == ast.dump(other)


def whole_number(node: ast.AST | None) -> int | None:
    """The value of an integer literal, possibly negative; None for anything else."""
    match node:
        case ast.UnaryOp(op=ast.USub()):
            value = whole_number(node.operand)
            return None if value is None else -value
        case ast.Constant(value=int() as number) if type(number) is int:
            return number
        case _:
            return None


def is_pure(node: ast.AST) -> bool:
    """Whether evaluating the expression twice has no effect: names, attributes, items, sizes and sums of them."""
    for each in ast.walk(node):
        match each:
            case ast.Call(func=ast.Attribute(attr="size")) | ast.Call(func=ast.Name("len" | "int" | "min" | "max")):
                continue
            case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Constant() | ast.BinOp() | ast.UnaryOp():
                continue
            case ast.operator() | ast.unaryop() | ast.expr_context() | ast.Tuple() | ast.keyword():
                continue
            case _:
                return False
    return True


def is_unplaced(node: ast.AST, name: str) -> bool:
    """Whether a name is read inside an f-string of the node, in a Python that gives such nodes no positions."""
    strings = [] if STRINGS_HAVE_PLACES else [each for each in ast.walk(node) if isinstance(each, ast.JoinedStr)]
    return any(name in names_in(each) for each in strings)


def names_in(node: ast.AST) -> set[str]:
    """Every name that the node reads or binds."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
