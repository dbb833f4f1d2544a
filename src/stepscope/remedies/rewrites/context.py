"""The input of every kind of rewrite: source text with its syntax tree, the meaning of its names, and the settings."""

from __future__ import annotations

import ast
import difflib
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
class StatementPlace:
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
    """A module's text, parsed. Raises ValueError if it is not Python, or too long."""

    def __init__(self, text: str) -> None:
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"the source has {len(text):,} characters: at most {MOST_CHARACTERS:,} are searched")
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
            raise ValueError(f"the source is not Python: {error.msg} (line {error.lineno})") from error
        except (RecursionError, MemoryError) as error:
            raise ValueError("the source nests too deeply to be parsed") from error
        except ValueError as error:  # null characters, lone surrogates
            raise ValueError(f"the source is not Python: {error}") from error

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
        lines = self.of(statement)
        if "#" not in lines:
            return []
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(f"({lines}\n)").readline))
        except (tokenize.TokenError, SyntaxError, IndentationError):
            return []
        return [token.string for token in tokens if token.type == tokenize.COMMENT]

    def places(self) -> Iterator[StatementPlace]:
        """Yield every statement of the module, including those of nested functions and classes."""
        whole = Scope(self.tree, "", None)
        todo: list[tuple[Sequence[ast.stmt], Scope, tuple[ast.stmt, ...]]] = [(self.tree.body, whole, ())]
        while todo:
            block, scope, around = todo.pop()
            for index, statement in enumerate(block):
                yield StatementPlace(statement, block, index, scope, around)
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


_SAME: Final = {
    "torch.optim.adam.Adam": "torch.optim.Adam",
    "torch.optim.adamw.AdamW": "torch.optim.AdamW",
    "torch.optim.sgd.SGD": "torch.optim.SGD",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.DataParallel": "torch.nn.parallel.DataParallel",
    "torch.nn.modules.loss.CrossEntropyLoss": "torch.nn.CrossEntropyLoss",
    "torch.nn.modules.loss.NLLLoss": "torch.nn.NLLLoss",
}
"""Undocumented full name -> the documented one."""


class TorchNames:
    """Names in one module that refer to torch.

    A name that is also bound by anything but an import, or by imports of different things, has no meaning here.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._seen: dict[int, dict[str, str]] = {}

    def meaning(self, node: ast.AST | None, scope: Scope) -> str | None:
        """The full documented name, such as "torch.nn.functional.cross_entropy"; None for anything outside torch."""
        name = dotted(node)
        if name is None:
            return None
        first, _, rest = name.partition(".")
        home = self._visible(scope).get(first)
        if home is None:
            return None
        whole = f"{home}.{rest}" if rest else home
        return _SAME.get(whole, whole)

    def spelling(self, wanted: str, scope: Scope) -> str | None:
        """The shortest spelling of a torch name in this scope; None if it is not imported there."""
        homes = self._visible(scope).items()
        found = (alias + wanted[len(home) :] for alias, home in homes if f"{wanted}.".startswith(f"{home}."))
        return min(found, key=lambda each: (len(each), each), default=None)

    def _visible(self, scope: Scope) -> dict[str, str]:
        """Alias -> full name, from the imports at the top of the module and in the enclosing functions."""
        if id(scope.node) not in self._seen:
            found: dict[str, str] = {}
            for each in scope.chain:
                if each.is_function or each.parent is None:
                    found = self._imports.get(id(each.node), {}) | found
            self._seen[id(scope.node)] = {alias: home for alias, home in found.items() if alias not in self._bound}
        return self._seen[id(scope.node)]

    @cached_property
    def _imports(self) -> dict[int, dict[str, str]]:
        """Alias -> full name, by the identity of the module's or function's node."""
        found: dict[int, dict[str, str]] = {}
        todo: list[tuple[ast.AST, dict[str, str]]] = [(self._tree, found.setdefault(id(self._tree), {}))]
        while todo:
            node, names = todo.pop()
            for child in ast.iter_child_nodes(node):
                inner = names
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = found.setdefault(id(child), {})
                homes = imported_by(child).items()
                names.update((alias, home) for alias, home in homes if home.split(".")[0] == "torch")
                if not isinstance(child, ast.expr):
                    todo.append((child, inner))
        return found

    @cached_property
    def _bound(self) -> set[str]:
        """Names that are also bound in another way, or imported from elsewhere as well."""
        found: set[str] = set()
        homes: dict[str, set[str]] = {}
        for node in ast.walk(self._tree):
            found |= names_bound_by(node)
            for alias, home in imported_by(node).items():
                homes.setdefault(alias, set()).add(home)
        return found | {alias for alias, different in homes.items() if len(different) > 1}


def names_bound_by(node: ast.AST) -> set[str]:
    """The names that a node itself binds, except by imports: a target, an argument, a definition."""
    match node:
        case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
            return {name}
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return {name}
        case _:
            return set()


def imported_by(node: ast.AST) -> dict[str, str]:
    """Alias -> full name of the names an import statement binds; empty for any other node."""
    match node:
        case ast.Import(names):
            whole = {each.asname: each.name for each in names if each.asname}
            return whole | {first: first for each in names if not each.asname for first in each.name.split(".")[:1]}
        case ast.ImportFrom(module, names, level):
            home = "." * (level or 0) + (module or "")
            return {each.asname or each.name: f"{home}.{each.name}" for each in names if each.name != "*"}
        case _:
            return {}


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Replacement of the source's characters `start` to `end` by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Expected:
    """A rewrite's assumption about a tensor: the expression that reads it, and its possible numbers of dimensions."""

    expression: str
    dimensions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Criterion:
    """A rewrite's assumptions about an object that computes a loss, besides that it has no class weights.

    Attributes:
        other: attributes that may differ from torch's defaults, since the rewrite reads them.
        is_argument: whether it is an argument, so that the next call of the function may be given another one.
    """

    expression: str
    kind: str
    reduction: str
    other: tuple[str, ...]
    is_argument: bool = False


@dataclass(frozen=True, slots=True)
class Positions:
    """The losses of all positions of a loop, for a caller that runs it and cannot change it.

    Attributes:
        statements: source text to run before, with the names of the loop's function.
        losses: an expression that is then a tensor of one loss for each position, in order.
        variable: the loop's name for the position.
        start: the first position.
    """

    statements: str
    losses: str
    variable: str
    start: int


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One change of a source text that keeps every character around it.

    Attributes:
        name: kind of rewrite, as in `REWRITES`.
        line: the first line that changes, from 1 on.
        last_line: the last line of the statement that changes.
        function: the qualified name of the enclosing function; "" for the module.
        explanation: the difference it makes, in one sentence.
        assumptions: what must hold for the program to compute the same; each a sentence.
        edits: in order, without overlaps.
        expected: what `assumptions` say about tensors, for callers that can check them.
        criterion: the same for the object that computes the loss, if there is one.
        positions: the losses of a loop over numbers of positions.
    """

    name: str
    line: int
    last_line: int
    function: str
    explanation: str
    assumptions: tuple[str, ...]
    edits: tuple[Edit, ...]
    expected: tuple[Expected, ...] = field(default=())
    criterion: Criterion | None = None
    positions: Positions | None = None


def without_overlaps(rewrites: Iterable[Rewrite]) -> list[Rewrite]:
    """The rewrites in order of place, without those whose edits overlap with an earlier one's."""
    kept: list[Rewrite] = []
    taken: list[Edit] = []
    for rewrite in sorted(rewrites, key=lambda each: (each.edits[0].start, each.name)):
        if not any(_overlap(edit, other) for edit in rewrite.edits for other in taken):
            kept.append(rewrite)
            taken += rewrite.edits
    return kept


def rewritten(source: str, rewrites: Iterable[Rewrite]) -> str:
    """Apply the rewrites to the source, except for those that overlap with an earlier one."""
    edits = sorted(edit for rewrite in without_overlaps(rewrites) for edit in rewrite.edits)
    for edit in reversed(edits):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def unified_diff(path: str, source: str, rewrites: Sequence[Rewrite]) -> str:
    """The rewrites as a diff for `git apply` and `patch -p1`; "" if nothing changes.

    Args:
        path: of the file, relative to the folder that the diff is applied in, with / between folders.
    """
    before, after = _lines(source), _lines(rewritten(source, rewrites))
    lines = difflib.unified_diff(before, after, _quoted(f"a/{path}"), _quoted(f"b/{path}"))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as git has them: only a newline ends one."""
    lines = [f"{line}\n" for line in text.split("\n")]
    return [*lines[:-1], *([lines[-1][:-1]] if lines[-1] != "\n" else [])]


def _quoted(path: str) -> str:
    """Quote a name as git does if it contains characters that would end the line or the name."""
    if path.isprintable() and not any(each in path for each in '"\\'):
        return path if " " not in path else f"{path}\t"

    def octal(letter: str) -> str:
        return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))

    escaped = re.sub(r'(["\\])', r"\\\1", path)
    return '"' + "".join(each if each.isprintable() else octal(each) for each in escaped) + '"'


def _overlap(one: Edit, other: Edit) -> bool:
    return (one.start < other.end and other.start < one.end) or one == other


@dataclass(frozen=True, eq=False)
class Context:
    """A module to search for rewrites."""

    source: SourceText
    settings: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> TorchNames:
        return TorchNames(self.source.tree)

    @cached_property
    def places(self) -> tuple[StatementPlace, ...]:
        return tuple(self.source.places())

    @cached_property
    def calls(self) -> tuple[tuple[StatementPlace, ast.Call], ...]:
        """Every call with its enclosing statement."""
        return tuple(
            (place, node)
            for place in self.places
            for node in expressions_of(place.statement)
            if isinstance(node, ast.Call)
        )

    @cached_property
    def every_name(self) -> frozenset[str]:
        found: set[str] = set()
        for node in ast.walk(self.source.tree):
            match node:
                case ast.Name(name) | ast.arg(name):
                    found.add(name)
                case ast.Global(names) | ast.Nonlocal(names):
                    found.update(names)
        return frozenset(found)

    def binds(self, *names: str) -> bool:
        """Whether the module rebinds any of the names, such as a built-in's."""
        return not self._bound.isdisjoint(names)

    @cached_property
    def _bound(self) -> frozenset[str]:
        found: set[str] = set()
        for node in ast.walk(self.source.tree):
            found |= names_bound_by(node) | imported_by(node).keys()
        return frozenset(found)

    def fresh(self, name: str) -> str:
        """The name, or one with a number after it that the module does not use."""
        number, found = 1, name
        while found in self.every_name:
            number += 1
            found = f"{name}_{number}"
        return found

    def rewrite(
        self,
        name: str,
        statement: ast.stmt | ast.expr,
        scope: Scope,
        explanation: str,
        edits: Iterable[Edit],
        assumptions: Iterable[str] = (),
        expected: Iterable[Expected] = (),
    ) -> Rewrite:
        return Rewrite(
            name=name,
            line=statement.lineno,
            last_line=statement.end_lineno or statement.lineno,
            function=scope.name,
            explanation=explanation,
            assumptions=tuple(assumptions),
            edits=tuple(sorted(edits)),
            expected=tuple(expected),
        )

    def replaced(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(*self.source.span(node), text)

    def with_replaced(self, whole: ast.expr | ast.stmt, part: ast.expr, text: str) -> str:
        start, end = self.source.span(whole)
        first, last = self.source.span(part)
        return self.source.text[start:first] + text + self.source.text[last:end]


def bindings(scope: Scope, name: str) -> list[ast.AST]:
    """Arguments and statements that bind a name in a scope itself, not in functions and classes inside it."""
    found: list[ast.AST] = []
    if isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
        of = scope.node.args
        arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]
        found += [each for each in arguments if each.arg == name]
    todo: list[ast.AST] = list(scope.node.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found += [node] if node.name == name else []
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            found.append(node)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal):
            spelled = [getattr(each, "asname", None) or getattr(each, "name", each) for each in node.names]
            found += [node] if name in spelled else []
        todo += ast.iter_child_nodes(node)
    return found


def assigned_value(context: Context, scope: Scope, name: str) -> tuple[ast.expr, Scope] | None:
    """The value of a name that is bound once, in the innermost scope that binds it; None otherwise."""
    for each in scope.chain:
        if isinstance(each.node, ast.ClassDef) and each is not scope:
            continue
        found = bindings(each, name)
        if found:
            break
    else:
        return None
    if len(found) != 1 or not isinstance(found[0], ast.Name):
        return None
    for place in context.places:
        targets, value = assigned(place.statement)
        if place.scope.node is each.node and targets == [found[0]] and value is not None:
            return value, each
    return None
