"""Facts from the user's source about what functions do: work that their arguments do not change, lookups, loops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, cast

from stepscope.record.source_facts import FUNCTIONS, bound_names, dotted_name, function_begin, of_sources, uses_of
from stepscope.trace.program_facts import FunctionFacts, WorkFacts

_CHANGING: Final = re.compile(
    r"rand\w*|.*random.*|.*augment.*|jitter|shuffle|sample|choices?|uniform|normal|gauss|integers|noise|permutation|bernoulli|multinomial"
    r"|next|now|time|time_ns|perf_counter|monotonic|read|readline|recv|pop|popleft|popitem|get_nowait|sleep|seed|urandom"
    r"|grab|retrieve|fetch\w*|draw|poll|wait|acquire"
)
"""Functions whose result differs from call to call, although their arguments do not."""
_ROWS: Final = frozenset({"iloc", "loc", "iat", "at"})
_SEARCHES: Final = frozenset({"index", "count"})
_CONVERTERS: Final = frozenset({"tensor", "as_tensor", "array", "asarray", "Tensor", "FloatTensor", "LongTensor"})
"""Functions that make a tensor or an array from what need not be one."""
_OF_OBJECTS: Final = (ast.In, ast.NotIn, ast.Is, ast.IsNot)
_COLUMNS: Final = (ast.Attribute, ast.Subscript)
_JOINING: Final = frozenset({"cat", "concat", "concatenate", "append", "hstack", "vstack", "column_stack", "row_stack"})
"""Functions that copy their arguments into one new tensor, array or table."""
_ALONE: Final = frozenset({"converted", "masked", "shuffled", "weighted", "appended"})
"""Kinds of work that the call itself does, and not what computes its arguments."""
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LISTS: Final = frozenset({"list", "sorted", "tuple", "split", "splitlines", "tolist", "readlines"})
_SIMPLE: Final = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_LOOPS: Final = (ast.For, ast.AsyncFor, ast.While)
_MOST: Final = 2000
_MOST_CALLS: Final = 50
_MOST_TURNS: Final = 20
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def work_facts(files: Iterable[str]) -> tuple[tuple[FunctionFacts, ...], tuple[WorkFacts, ...]]:
    found = of_sources(files, work_of_source)
    functions = [function for part, _ in found for function in part]
    works = [work for _, part in found for work in part]
    return tuple(functions[:_MOST]), tuple(works[:_MOST])


def work_of_source(text: str, file: str) -> tuple[list[FunctionFacts], list[WorkFacts]]:
    """Return the functions of a source text, and the work in them. Raises SyntaxError if it is not Python."""
    tree = ast.parse(text)
    lists = _lists(tree)
    functions, works = [], []
    for function, owner in _functions(tree):
        inside = _Inside(function, owner)
        begin = function_begin(function)
        functions.append(FunctionFacts(
            file=file,
            name=f"{owner.name}.{function.name}" if owner else function.name,
            line=begin,
            last=function.end_lineno or function.lineno,
            calls=tuple(sorted(inside.called(function)))[:_MOST_CALLS],
            changes_by_itself=inside.changes_by_itself,
        ))  # fmt: skip
        for kind, node, name in (
            *inside.constants(),
            *inside.lookups(lists),
            *inside.masks(),
            *inside.draws(),
            *inside.appends(),
            *inside.conversions(),
            *inside.loops(),
        ):
            last = node.end_lineno or node.lineno
            works.append(WorkFacts(
                file=file, function=begin, kind=kind, name=name, first=node.lineno, last=last,
                calls=() if kind in _ALONE else tuple(sorted(inside.called(node)))[:_MOST_CALLS],
            ))  # fmt: skip
    return functions, works


def _functions(tree: ast.Module) -> Iterator[tuple[_Function, ast.ClassDef | None]]:
    owners = {id(each): node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            yield node, owners.get(id(node))


def _lists(tree: ast.Module) -> set[str]:
    """Names that stand for lists wherever the file binds them."""
    lists: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                name = dotted_name(target)
                lists[name] = lists.get(name, True) and _is_list(node.value)
    return {name for name, is_list in lists.items() if is_list and name}


def _is_list(value: ast.expr) -> bool:
    called = _last_name(value) if isinstance(value, ast.Call) else ""
    return isinstance(value, (ast.List, ast.ListComp, ast.Tuple)) or called in _LISTS


def _last_name(call: ast.Call) -> str:
    """The last part of the called name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else dotted_name(call.func)


def _changes_by_itself(node: ast.AST) -> bool:
    """Whether something in a statement gives different results for the same arguments, or waits for them."""
    if any(isinstance(each, (ast.Await, ast.Yield, ast.YieldFrom)) for each in ast.walk(node)):
        return True
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    parts = (part for call in calls for part in ast.walk(call))
    names = (part.attr if isinstance(part, ast.Attribute) else dotted_name(part) for part in parts)
    return any(_CHANGING.fullmatch(name.lower()) for name in names if name)


def _inherited(owner: ast.ClassDef, names: set[str]) -> set[str]:
    """Those of these names that are attributes which another class, whose source may change them, gives the object."""
    if not owner.bases:
        return set()
    stored = (node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own = {dotted_name(node) for node in stored}
    own |= {f"self.{node.name}" for node in owner.body if isinstance(node, FUNCTIONS)}
    own |= {f"self.{name}" for node in owner.body if isinstance(node, ast.stmt) for name in _bound_or_changed(node)}
    return {name for name in names if name.startswith("self.") and name not in own}


@dataclass
class _Statement:
    """A simple statement with what it uses, and the names that decide whether it runs."""

    node: ast.stmt
    reads: set[str]
    gives: set[str]
    changes_by_itself: bool


_Work = tuple[str, ast.expr | ast.stmt, str]


@dataclass
class _Inside:
    function: _Function
    owner: ast.ClassDef | None
    varying: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        arguments = self.function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        self.varying |= {each.arg for each in every if each is not None}
        if self.owner is not None and (arguments.args or arguments.posonlyargs):
            self.varying.discard((arguments.posonlyargs or arguments.args)[0].arg)
            self.varying |= _changed_attributes(self.owner)
        named = (each for each in ast.walk(self.function) if isinstance(each, (ast.Global, ast.Nonlocal)))
        self.varying.update(*(each.names for each in named))
        self.statements = list(self._statements(self.function.body, set()))
        if self.owner is not None:
            self.varying |= _inherited(self.owner, {name for each in self.statements for name in each.reads})
        for _ in range(_MOST_TURNS):
            before = len(self.varying)
            for each in self.statements:
                if each.changes_by_itself or each.reads & self.varying:
                    self.varying |= each.gives
            if len(self.varying) == before:
                break
        self.changes_by_itself = any(each.changes_by_itself for each in self.statements)

    def called(self, node: ast.expr | ast.stmt) -> set[str]:
        """Names that a part of it reads, and may call; see `FunctionFacts`."""
        owner = self.owner.name if self.owner else ""
        names = {dotted_name(each) for each in ast.walk(node)} - {"", "self"}
        others = {
            f".{each.attr}" for each in ast.walk(node) if isinstance(each, ast.Attribute) and not dotted_name(each)
        }
        return others | {f"{owner}.{name[5:]}" if name.startswith("self.") else name for name in names}

    def _statements(self, body: list[ast.stmt], around: set[str]) -> Iterator[_Statement]:
        """The simple statements; the targets of a loop are bound by a statement of its head."""
        for node in body:
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                continue
            parts = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            handlers = [each.body for each in getattr(node, "handlers", [])]
            if not any(parts):
                yield _Statement(node, uses_of(node).reads | around, _bound_or_changed(node), _changes_by_itself(node))
                continue
            items: list[ast.withitem] = getattr(node, "items", [])
            heads = [getattr(node, name, None) for name in ("test", "iter", "subject")]
            known = [each for each in (*heads, *(item.context_expr for item in items)) if each is not None]
            reads = around.union(*(uses_of(ast.copy_location(ast.Expr(each), node)).reads for each in known))
            targets = [getattr(node, "target", None), *(item.optional_vars for item in items)]
            given = set[str]().union(*(bound_names(each) for each in targets if each is not None))
            if given:
                yield _Statement(node, reads, given, any(map(_changes_by_itself, known)))
            for part in (*parts, *handlers):
                yield from self._statements(part, reads)

    def constants(self) -> Iterator[_Work]:
        """Statements whose result is the same in each call, as far as the source tells."""
        for each in self.statements:
            fixed = not each.changes_by_itself and not (each.reads | each.gives) & self.varying
            if fixed and isinstance(each.node, _SIMPLE) and (each.gives or isinstance(each.node, ast.Return)):
                yield "constant", each.node, min(each.gives, default="")

    def lookups(self, lists: set[str]) -> Iterator[_Work]:
        """Lookups by comparing with one entry after the other, rows taken from a table, ever longer slices."""
        for node in ast.walk(self.function):
            name = _searched(node)
            if name and isinstance(node, ast.expr):
                yield ("lookup" if name in lists else "maybe_lookup"), node, name
            elif isinstance(node, ast.expr) and (table := _table_of(node)):
                yield "row", node, table
        yield from self._rows_used()
        yield from self._growing()

    def _rows_used(self) -> Iterator[_Work]:
        """Statements that use a row which an earlier one took from a table."""
        rows: dict[str, str] = {}
        for node in ast.walk(self.function):
            if isinstance(node, ast.Assign) and (table := _table_of(node.value)):
                rows.update(dict.fromkeys(bound_names(node), table))
        for statement in self.statements:
            for name in sorted(uses_of(statement.node).reads & rows.keys()):
                yield "row", statement.node, rows[name]

    def _growing(self) -> Iterator[_Work]:
        """Slices that reach from one end to a loop's variable, and inner loops over such a range."""
        for loop in ast.walk(self.function):
            targets: set[str] = set()
            parts: list[ast.AST] = []
            if isinstance(loop, (ast.For, ast.AsyncFor)):
                targets, parts = bound_names(loop.target), [*loop.body]
            elif isinstance(loop, _COMPREHENSIONS):
                targets = set().union(*(bound_names(each.target) for each in loop.generators))
                parts = [loop.value, loop.key] if isinstance(loop, ast.DictComp) else [loop.elt]
            for node in (each for part in parts for each in ast.walk(part)):
                if isinstance(node, ast.Subscript) and _grows_with(node, targets):
                    yield "growing", node, dotted_name(node.value)
                elif isinstance(node, ast.For) and (name := _summed_again(node, targets)):
                    yield "growing", node, name

    def masks(self) -> Iterator[_Work]:
        """Comparisons of a column, which is an attribute or an item of a table, and indexing by their results."""
        masks: dict[str, str] = {}
        for node in ast.walk(self.function):
            if table := _compared_column(node):
                yield "masked", cast(ast.expr, node), table
            if isinstance(node, ast.Assign) and (
                tables := [*filter(None, map(_compared_column, ast.walk(node.value)))]
            ):
                masks.update(dict.fromkeys(bound_names(node), tables[0]))
        for node in ast.walk(self.function):
            if isinstance(node, ast.Subscript) and (name := dotted_name(node.slice)) in masks:
                yield "masked", node, masks[name]

    def draws(self) -> Iterator[_Work]:
        """Draws by NumPy's `choice` that go through all entries: without replacement, or by probabilities."""
        for node in ast.walk(self.function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "choice":
                given = {each.arg: each.value for each in node.keywords}
                if "p" in given:
                    yield "weighted", node, _root(given["p"])
                elif _is_false(given.get("replace")) and not _is_false(given.get("shuffle")):
                    yield "shuffled", node, ""

    def appends(self) -> Iterator[_Work]:
        """Statements of a loop that bind a name to what it stood for, copied together with a new part."""
        loops = [each for each in ast.walk(self.function) if isinstance(each, _LOOPS)]
        inside = {id(node): node for loop in loops for part in loop.body for node in ast.walk(part)}
        for node in inside.values():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last_name(node.value) in _JOINING:
                joined = {dotted_name(each) for argument in node.value.args[:2] for each in _items(argument)}
                for name in sorted(bound_names(node) & joined):
                    yield "appended", node, name

    def conversions(self) -> Iterator[_Work]:
        """Calls that convert a variable, or a part of one, to a tensor or an array."""
        for node in ast.walk(self.function):
            if isinstance(node, ast.Call) and node.args and _last_name(node) in _CONVERTERS:
                value, parts = node.args[0], list(ast.walk(node.args[0]))
                if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)) and not any(
                    isinstance(each, ast.Call) for each in parts
                ):
                    yield "converted", node, _root(value)

    def loops(self) -> Iterator[_Work]:
        """Loops that yield nothing, the outer ones first."""
        for node in ast.walk(self.function):
            if isinstance(node, (*_COMPREHENSIONS, *_LOOPS)) and not _yields(node):
                yield "loop", node, ""


def _items(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]


def _compared_column(node: ast.AST) -> str:
    """The name of the table a column of which is compared; "" for other expressions."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1 or isinstance(node.ops[0], _OF_OBJECTS):
        return ""
    sides = (each for each in (node.left, node.comparators[0]) if isinstance(each, _COLUMNS))
    return next(filter(None, map(_root, sides)), "")


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _yields(node: ast.AST) -> bool:
    return any(isinstance(each, (ast.Yield, ast.YieldFrom)) for each in ast.walk(node))


def _table_of(node: ast.AST) -> str:
    """The name of the table from which an expression takes a row; "" if it takes none."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr in _ROWS:
        return _root(node.value.value)
    return ""


def _searched(node: ast.AST) -> str:
    """The name of the list that an expression searches for one value; "" if it searches none."""
    if isinstance(node, ast.Compare) and any(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops):
        return dotted_name(node.comparators[-1])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES:
        return dotted_name(node.func.value)
    return ""


def _bound_or_changed(node: ast.stmt) -> set[str]:
    """Names that a statement binds or may change, also by a method or through an item or attribute."""
    found = bound_names(node)
    for each in ast.walk(node):
        if isinstance(each, (ast.Subscript, ast.Attribute)) and isinstance(each.ctx, (ast.Store, ast.Del)):
            found.add(_root(each))
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        found.add(_root(node.value.func))
    return found - {""}


def _root(node: ast.AST) -> str:
    """The name, or attribute of self, whose part an expression is; "" for anything else."""
    while not dotted_name(node) and isinstance(node, (ast.Subscript, ast.Attribute, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return dotted_name(node)


def _changed_attributes(owner: ast.ClassDef) -> set[str]:
    """Attributes that methods other than the constructor change, and methods that change by themselves."""
    found: set[str] = set()
    for method in owner.body:
        if not isinstance(method, FUNCTIONS):
            continue
        if _changes_by_itself(method):
            found.add(f"self.{method.name}")
        if method.name not in ("__init__", "__post_init__", "__new__"):
            for node in ast.walk(method):
                if isinstance(node, _SIMPLE):
                    found |= {name for name in _bound_or_changed(node) if name.startswith("self.")}
    return found


def _grows_with(node: ast.Subscript, targets: set[str]) -> bool:
    index = node.slice
    if not isinstance(index, ast.Slice) or index.step is not None or not isinstance(node.ctx, ast.Load):
        return False
    ends = [each for each in (index.lower, index.upper) if each is not None]
    return len(ends) == 1 and any(isinstance(each, ast.Name) and each.id in targets for each in ast.walk(ends[0]))


def _summed_again(inner: ast.For, targets: set[str]) -> str:
    """What a loop over a range that one of the targets bounds reads by its own variable alone; "" for other loops."""
    if not isinstance(inner.iter, ast.Call) or _last_name(inner.iter) != "range" or len(inner.iter.args) > 2:
        return ""
    bounds = [uses_of(ast.copy_location(ast.Expr(each), inner)).reads & targets for each in inner.iter.args]
    own = bound_names(inner.target)
    reads = [
        (each.value, {name.id for name in ast.walk(each.slice) if isinstance(name, ast.Name)})
        for statement in inner.body
        for each in ast.walk(statement)
        if isinstance(each, ast.Subscript)
    ]
    if sum(map(bool, bounds)) != 1 or any(names & targets for _, names in reads):
        return ""
    return next((dotted_name(value) for value, names in reads if names & own), "")
