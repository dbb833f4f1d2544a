"""Facts from the user's source: statements that compute on the host with values copied from tensors, as metrics do."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from stepscope.record.source_facts import FUNCTIONS, bound_names, dotted_name, of_sources
from stepscope.trace.program_facts import MetricFacts

_COPYING: Final = frozenset({"numpy", "tolist", "item", "cpu"})
"""Methods of a tensor that copy its values to the host."""
_MAKING: Final = frozenset({"tensor", "as_tensor", "from_numpy", "FloatTensor", "LongTensor", "Tensor", "to", "cuda"})
"""Functions that make a tensor of values."""
_ADDING: Final = frozenset({"append", "extend", "add", "update", "insert"})
_SIMPLE: Final = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_MOST: Final = 200
_TURNS: Final = 5
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def metric_facts(files: Iterable[str]) -> tuple[MetricFacts, ...]:
    """Return such statements of these source files."""
    return tuple([fact for found in of_sources(files, metrics_of_source) for fact in found][:_MOST])


def metrics_of_source(text: str, file: str) -> list[MetricFacts]:
    """Return such statements of a source text, and the functions of it that are called with such values.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
    scopes: list[tuple[str, list[ast.stmt]]] = [("<module>", tree.body)]
    scopes += [(name, node.body) for name, node in functions.items()]
    found: dict[tuple[int, int], str] = {}
    for scope, body in scopes:
        for statement in _of_scope(list(_statements(body))):
            found[statement.lineno, statement.end_lineno or statement.lineno] = scope
            for name in _called(statement) & functions.keys():
                function = functions[name]
                if not _makes_tensors(function):
                    found[function.lineno, function.end_lineno or function.lineno] = name
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        inner = [(each.lineno, each.end_lineno or each.lineno) for each in _statements(loop.body)]
        if inner and all(each in found for each in inner):
            found[loop.lineno, loop.lineno] = found[inner[0]]
    return [
        MetricFacts(file=file, function=name, first=first, last=last) for (first, last), name in sorted(found.items())
    ]


def _of_scope(statements: list[ast.stmt]) -> list[ast.stmt]:
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


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Simple statements of a scope, without those of functions and classes in it."""
    for node in body:
        if isinstance(node, _SIMPLE):
            yield node
        elif not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))


def _copies(node: ast.AST) -> bool:
    return any(isinstance(each.func, ast.Attribute) and each.func.attr in _COPYING for each in _calls(node))


def _makes_tensors(node: ast.AST) -> bool:
    return not _called(node).isdisjoint(_MAKING)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Call)]


def _called(node: ast.AST) -> set[str]:
    """The last parts of the names of what is called."""
    functions = [each.func for each in _calls(node)]
    return {each.attr if isinstance(each, ast.Attribute) else dotted_name(each) for each in functions}


def _reads(node: ast.AST) -> set[str]:
    found = {dotted_name(each) for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Load)}
    return found - {"", "self"}


def _collected_in(statement: ast.stmt) -> set[str]:
    """The name of what a statement adds values to."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING:
        return {dotted_name(call.func.value)} - {""}
    return set()
