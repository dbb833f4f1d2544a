"""Facts from the user's source, which is read and not run.

Loops that need their last result, bindings of names, and statements that compute on the host with values copied from
tensors, as metrics do.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stepscope.trace.program_facts import BindingFacts, ListFacts, LoopFacts, MetricFacts, OperationFacts

_Facts = TypeVar("_Facts")
_MOST_FILES: Final = 50
_MOST_LOOPS: Final = 500
_LARGEST_BYTES: Final = 1 << 20
_COLLECTING: Final = frozenset(
    {
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "add",
        "maximum",
        "minimum",
        "max",
        "min",
        "logaddexp",
    }
)
"""Functions of a variable and a new value whose order hardly matters: the variable only collects."""
_ADDING: Final = frozenset({"append", "extend", "add", "insert", "update", "appendleft"})

_SIMPLE: Final = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
Loop = ast.For | ast.While | ast.AsyncFor


def source_facts(files: Iterable[str]) -> tuple[tuple[LoopFacts, ...], tuple[BindingFacts, ...]]:
    found = of_sources(files, lambda text, file: (loops_of_source(text, file), bindings_of_source(text, file)))
    loops = [loop for part, _ in found for loop in part]
    return tuple(loops[:_MOST_LOOPS]), tuple(binding for _, part in found for binding in part)


def of_sources(files: Iterable[str], read: Callable[[str, str], _Facts]) -> list[_Facts]:
    """Apply `read` to the text and name of each source file; files that cannot be read or parsed are left out."""
    found: list[_Facts] = []
    for file in list(dict.fromkeys(files))[:_MOST_FILES]:
        try:
            path = Path(file)
            if path.stat().st_size <= _LARGEST_BYTES:
                found.append(read(path.read_text(encoding="utf-8"), file))
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
    return found


def bindings_of_source(text: str, file: str) -> list[BindingFacts]:
    """Return the statements that bind or change names and have their lines for themselves, by function.

    Raises SyntaxError if it is not Python.
    """
    tree = ast.parse(text)
    scopes = [(0, tree.body)]
    scopes += [(function_begin(node), node.body) for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    found = []
    lines = Counter(each.lineno for each in ast.walk(tree) if isinstance(each, ast.stmt))
    for begin, body in scopes:
        for statement in _statements(body):
            if isinstance(statement, (*FUNCTIONS, ast.ClassDef)) or lines[statement.lineno] > 1:
                continue
            uses, last = uses_of(statement), statement.end_lineno or statement.lineno
            for name in sorted(uses.binds | uses.changes):
                is_change = name not in uses.binds
                found.append(BindingFacts(
                    file=file, function=begin, name=name, first=statement.lineno, last=last, is_change=is_change
                ))  # fmt: skip
    return found


def operations_of_source(text: str, file: str) -> OperationFacts:
    """Return the operations that the statements of a source text make themselves.

    Raises SyntaxError if it is not Python.
    """
    names: list[list[str]] = [[] for _ in range(text.count("\n") + 1)]
    for statement in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)):
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            continue
        own = [part for part in ast.iter_child_nodes(statement) if isinstance(part, (ast.expr, ast.withitem))]
        made = [name for part in own for node in ast.walk(part) for name in _operations(node)]
        if isinstance(statement, ast.AugAssign):
            made.append(_OPERATORS.get(type(statement.op), ""))
        last = max((getattr(part, "end_lineno", 0) for part in own), default=0)
        for line in range(statement.lineno, max(statement.lineno, last) + 1):
            names[line - 1] += made
    return OperationFacts(file=file, names=tuple(" ".join(filter(None, each)) for each in names))


_OPERATORS: Final[dict[type[ast.AST], str]] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.MatMult: "matmul",
    ast.FloorDiv: "floor_divide", ast.Mod: "remainder", ast.USub: "neg", ast.Invert: "bitwise_not",
    ast.BitAnd: "bitwise_and", ast.BitOr: "bitwise_or", ast.BitXor: "bitwise_xor", ast.Eq: "eq", ast.NotEq: "ne",
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip


def _operations(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare):
        return [_OPERATORS.get(type(each), "") for each in node.ops]
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        return [_OPERATORS.get(type(node.op), "")]
    if isinstance(node, ast.Call):
        name = node.func.attr.rstrip("_") if isinstance(node.func, ast.Attribute) else dotted_name(node.func)
        return [name, *(_option(each) for each in node.keywords if each.arg is not None)]
    return []


def _option(keyword: ast.keyword) -> str:
    is_on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
    return f"{keyword.arg}=True" if is_on else f"{keyword.arg}="


def with_readers(lists: tuple[ListFacts, ...]) -> tuple[ListFacts, ...]:
    """Add to growing lists the statements that read them other than to add entries."""
    trees = dict(of_sources({each.file for each in lists if each.growth > 0}, _tree))
    return tuple(
        msgspec.structs.replace(each, read=tuple(_readers(trees[each.file], each.function, each.name)))
        if each.growth > 0 and each.file in trees
        else each
        for each in lists
    )


def _tree(text: str, file: str) -> tuple[str, ast.Module]:
    return file, ast.parse(text)


def _readers(tree: ast.Module, function: int, name: str) -> Iterator[tuple[int, int]]:
    found = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and function_begin(node) == function]
    for statement in ast.walk(found[0] if found else tree):
        if isinstance(statement, ast.For) and name in _names(statement.iter):
            yield statement.lineno, statement.end_lineno or statement.lineno
        elif isinstance(statement, _SIMPLE):
            uses = uses_of(statement)
            if name in uses.reads - uses.collects:
                yield statement.lineno, statement.end_lineno or statement.lineno


def function_begin(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line of the code object: that of the first decorator, if there is one."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def loops_of_source(text: str, file: str) -> list[LoopFacts]:
    """Return the loops of a source text. Raises SyntaxError if it is not Python."""
    nodes = list(ast.walk(ast.parse(text)))
    comprehensions = [node for node in nodes if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp))]
    return [
        LoopFacts(
            file=file,
            line=one.lineno,
            first=one.elt.lineno,
            last=one.elt.end_lineno or one.elt.lineno,
            is_comprehension=True,
        )
        for one in comprehensions
    ] + [
        LoopFacts(
            file=file,
            line=loop.lineno,
            first=loop.body[0].lineno,
            last=loop.body[-1].end_lineno or loop.body[-1].lineno,
            carried=tuple(sorted(_carried(loop)))[:10],
        )
        for loop in (node for node in nodes if isinstance(node, Loop))
    ]


@dataclass
class Uses:
    """The names that a statement reads, binds, changes in place, and collects in (reads only to bind them again)."""

    reads: set[str] = field(default_factory=set)
    binds: set[str] = field(default_factory=set)
    changes: set[str] = field(default_factory=set)
    collects: set[str] = field(default_factory=set)


def _carried(loop: Loop) -> set[str]:
    """Names whose value from the previous repetition is read, other than to collect values in them."""
    uses = [uses_of(statement) for statement in _statements(loop.body)]
    if isinstance(loop, ast.While):
        uses.append(Uses(reads=_names(loop.test)))
    targets = bound_names(loop.target) if not isinstance(loop, ast.While) else set()
    driven = _driven(loop)
    changed = {name for use in uses for name in use.binds | use.changes} | set(driven)
    changed -= targets | _own_items(loop, targets)
    bound: set[str] = set()
    carried: set[str] = set()
    for use in uses:
        carried |= (use.reads - use.collects - bound) & changed
        bound |= use.binds
    later = {name for use in uses for name in use.reads - use.collects}
    return {driven.get(name, name) for name in (carried & later) - targets}


def _own_items(loop: Loop, targets: set[str]) -> set[str]:
    """Names from which each repetition uses only the item of the loop's variable."""
    items: dict[str, set[str]] = {}
    used = Counter(dotted_name(node) for statement in loop.body for node in ast.walk(statement))
    for each in (node for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.Subscript)):
        name = dotted_name(each.value)
        used[name] -= 1
        items.setdefault(name, set()).add(ast.dump(each.slice) if _names(each.slice) & targets else "")
    return {name for name, slices in items.items() if name and not used[name] and len(slices) == 1 and "" not in slices}


def _driven(loop: Loop) -> dict[str, str]:
    """Objects with a method that is called for its effect, each with one of its attributes that is read."""
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    called = {id(node.func): node.func for node in nodes if isinstance(node, ast.Call)}
    for_effect = [node.value.func for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    owners = {
        dotted_name(each.value) for each in for_effect if isinstance(each, ast.Attribute) and each.attr not in _ADDING
    }
    read = [node for node in nodes if isinstance(node, ast.Attribute) and id(node) not in called]
    found = {dotted_name(node.value): f"{dotted_name(node.value)}.{node.attr}" for node in read}
    return {name: attribute for name, attribute in found.items() if name in owners - {"", "self"}}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The simple statements of a body in the order of the text; a condition comes as an expression."""
    for statement in body:
        inner = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if not any(inner) or isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            yield statement
            continue
        for name in ("test", "iter"):
            condition = getattr(statement, name, None)
            if condition is not None:
                yield ast.copy_location(ast.Expr(condition), statement)
        for part in inner:
            yield from _statements(part)


def uses_of(statement: ast.stmt) -> Uses:
    own = {
        name for each in ast.walk(statement) if isinstance(each, ast.comprehension) for name in bound_names(each.target)
    }
    reads, binds = _names(statement) - own, bound_names(statement) - own
    if isinstance(statement, ast.AugAssign):
        name = dotted_name(statement.target)
        names = {name} if name and name not in _names(statement.value) else set()
        return Uses(reads | names, binds | names, _changed(statement), names)
    collects: set[str] = set()
    if isinstance(statement, ast.Assign):
        collects = {name for name in binds & reads if _only_collected(statement.value, name)}
    changes = _changed(statement)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value.func
        owner = dotted_name(call.value) if isinstance(call, ast.Attribute) and call.attr in _ADDING else ""
        changes |= {owner} - {""}
        if not any(owner in _names(argument) for argument in statement.value.args):
            collects |= {owner}
    return Uses(reads, binds, changes, collects)


def _changed(statement: ast.stmt) -> set[str]:
    """Names with an item that is set, and another one (or the whole) that is read."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(dotted_name(node.value))
    return found - {""}


def _only_collected(value: ast.expr, name: str) -> bool:
    """Whether an expression uses the name once, to add something to it."""
    if sum(dotted_name(node) == name for node in ast.walk(value)) != 1:
        return False
    if isinstance(value, ast.BinOp):
        return name in (dotted_name(value.left), dotted_name(value.right)) or _only_collected(value.left, name)
    if isinstance(value, ast.Call):
        function = value.func
        called = function.attr if isinstance(function, ast.Attribute) else dotted_name(function)
        return called in _COLLECTING
    return False


def _names(node: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    """Names and dotted names used in this context, except those with only one item read, which is also set."""
    own = [each for each in ast.walk(node) if isinstance(each, ast.Subscript)]
    stored = {ast.dump(ast.Tuple([each.value, each.slice], ast.Load())) for each in own if _is(each, ast.Store)}
    same = {
        id(each.value)
        for each in own
        if _is(each, ast.Store) or ast.dump(ast.Tuple([each.value, each.slice], ast.Load())) in stored
    }
    found = (dotted_name(each) for each in ast.walk(node) if _is(each, context) and id(each) not in same)
    return {name for name in found if name and name != "self"}


def bound_names(node: ast.AST) -> set[str]:
    return _names(node, ast.Store)


def _is(node: ast.AST, context: type[ast.expr_context]) -> bool:
    return isinstance(getattr(node, "ctx", None), context)


def dotted_name(node: ast.AST) -> str:
    """The expression as a name, "x" or "self.x"; "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return ""


_COPYING: Final = frozenset({"numpy", "tolist", "item", "cpu"})
"""Methods of a tensor that copy its values to the host."""
_MAKING: Final = frozenset({"tensor", "as_tensor", "from_numpy", "FloatTensor", "LongTensor", "Tensor", "to", "cuda"})
"""Functions that make a tensor of values."""
_MOST: Final = 200
_TURNS: Final = 5
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def metric_facts(files: Iterable[str]) -> tuple[MetricFacts, ...]:
    """Return the statements of these source files that compute on the host with values copied from tensors."""
    return tuple([fact for found in of_sources(files, metrics_of_source) for fact in found][:_MOST])


def metrics_of_source(text: str, file: str) -> list[MetricFacts]:
    """Return these statements of a source text, and its functions that are called with such values.

    Raises SyntaxError if it is not Python.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
    scopes: list[tuple[str, list[ast.stmt]]] = [("<module>", tree.body)]
    scopes += [(name, node.body) for name, node in functions.items()]
    found: dict[tuple[int, int], str] = {}
    for scope, body in scopes:
        for statement in _metric_statements(list(_simple_statements(body))):
            found[statement.lineno, statement.end_lineno or statement.lineno] = scope
            for name in _last_names(statement) & functions.keys():
                function = functions[name]
                if not _makes_tensors(function):
                    found[function.lineno, function.end_lineno or function.lineno] = name
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        inner = [(each.lineno, each.end_lineno or each.lineno) for each in _simple_statements(loop.body)]
        if inner and all(each in found for each in inner):
            found[loop.lineno, loop.lineno] = found[inner[0]]
    return [
        MetricFacts(file=file, function=name, first=first, last=last) for (first, last), name in sorted(found.items())
    ]


def _metric_statements(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that copy values to the host or use such values; none if a tensor is made of any of them."""
    hosted: set[str] = set()
    for _ in range(_TURNS):
        before = len(hosted)
        for each in statements:
            if _copies(each) or _reads(each) & hosted:
                hosted |= bound_names(each) | _collected_in(each)
        if len(hosted) == before:
            break
    using = [each for each in statements if _copies(each) or _reads(each) & hosted]
    return [] if any(_makes_tensors(each) for each in using if _reads(each) & hosted) else using


def _simple_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements of a scope, without those of functions and classes in it."""
    for node in body:
        if isinstance(node, _SIMPLE):
            yield node
        elif not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _simple_statements(getattr(node, part, []))


def _copies(node: ast.AST) -> bool:
    return any(isinstance(each.func, ast.Attribute) and each.func.attr in _COPYING for each in _calls(node))


def _makes_tensors(node: ast.AST) -> bool:
    return not _last_names(node).isdisjoint(_MAKING)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def _last_names(node: ast.AST) -> set[str]:
    """The last parts of the called names."""
    functions = [each.func for each in _calls(node)]
    return {each.attr if isinstance(each, ast.Attribute) else dotted_name(each) for each in functions}


def _reads(node: ast.AST) -> set[str]:
    found = {dotted_name(each) for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Load)}
    return found - {"", "self"}


def _collected_in(statement: ast.stmt) -> set[str]:
    """The names that a statement adds values to."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING:
        return {dotted_name(call.func.value)} - {""}
    return set()
