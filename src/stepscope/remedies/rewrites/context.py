"""What every kind of rewrite is given: the parsed module, what its names mean, and what is known besides."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stepscope.remedies.rewrites.kinds import Edit, Expected, Rewrite
from stepscope.remedies.rewrites.source_text import Place, Scope, SourceText, expressions_of
from stepscope.remedies.rewrites.torch_names import TorchNames, names_bound_by


@dataclass(frozen=True, eq=False)
class Context:
    """A module to be looked through.

    Attributes:
        settings: keywords of calls and what they are to be, as source text, such as {"num_workers": "4"}.
    """

    source: SourceText
    settings: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def names(self) -> TorchNames:
        return TorchNames(self.source.tree)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        return tuple(self.source.places())

    @cached_property
    def calls(self) -> tuple[tuple[Place, ast.Call], ...]:
        """Every call with the statement it stands in."""
        return tuple(
            (place, node)
            for place in self.places
            for node in expressions_of(place.statement)
            if isinstance(node, ast.Call)
        )

    @cached_property
    def every_name(self) -> frozenset[str]:
        """Every name and argument of the module."""
        nodes = list(ast.walk(self.source.tree))
        return frozenset(
            {node.id for node in nodes if isinstance(node, ast.Name)}
            | {node.arg for node in nodes if isinstance(node, ast.arg)}
            | {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
        )

    def binds(self, *names: str) -> bool:
        """Whether the module gives any of the names a meaning of its own somewhere, such as one of a built-in."""
        return not self._bound.isdisjoint(names)

    @cached_property
    def _bound(self) -> frozenset[str]:
        found: set[str] = set()
        for node in ast.walk(self.source.tree):
            found |= names_bound_by(node)
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {each.asname or each.name.split(".")[0] for each in node.names}
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
        """A rewrite around a statement or a call."""
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
        """The edit that puts another text in the place of a node."""
        return Edit(*self.source.span(node), text)

    def with_replaced(self, whole: ast.expr | ast.stmt, part: ast.expr, text: str) -> str:
        """The text of `whole` with another text in the place of a part of it."""
        start, end = self.source.span(whole)
        first, last = self.source.span(part)
        return self.source.text[start:first] + text + self.source.text[last:end]


def bindings(scope: Scope, name: str) -> list[ast.AST]:
    """What binds a name in a scope itself, not in functions and classes inside it: arguments and statements."""
    found: list[ast.AST] = []
    if isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef):
        found += [each for each in arguments_of(scope.node) if each.arg == name]
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


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Every argument of a function, the starred ones too."""
    of = function.args
    return [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]


def assigned_value(context: Context, scope: Scope, name: str) -> tuple[ast.expr, Scope] | None:
    """What a name is assigned where it is bound once, in the innermost scope that binds it; None otherwise."""
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
        statement = place.statement
        if place.scope.node is each.node and isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if len(targets) == 1 and targets[0] is found[0] and statement.value is not None:
                return statement.value, each
    return None
