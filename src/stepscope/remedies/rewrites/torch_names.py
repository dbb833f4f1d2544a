"""What names of a module mean in torch, and how something of torch can be called there."""

from __future__ import annotations

import ast
from functools import cached_property
from typing import Final

from stepscope.remedies.rewrites.source_text import Scope, dotted

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
"""Other homes of what torch has: full name -> the documented one."""


class TorchNames:
    """Names of one module that stand for something of torch.

    A name that is also bound by anything but an import, or by imports of different things, means nothing here.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._seen: dict[int, dict[str, str]] = {}

    def meaning(self, node: ast.AST | None, scope: Scope) -> str | None:
        """The full documented name, such as "torch.nn.functional.cross_entropy"; None for what is not torch's."""
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
        """How something of torch can be called in this scope, in the shortest way; None where it cannot."""
        found = []
        for alias, home in self._visible(scope).items():
            if wanted == home:
                found.append(alias)
            elif wanted.startswith(f"{home}."):
                found.append(f"{alias}{wanted[len(home) :]}")
        return min(found, key=lambda each: (len(each), each), default=None)

    def _visible(self, scope: Scope) -> dict[str, str]:
        """Alias -> full name, of the imports at the top of the module and in the functions around."""
        if id(scope.node) not in self._seen:
            self._seen[id(scope.node)] = self._imported_around(scope)
        return self._seen[id(scope.node)]

    def _imported_around(self, scope: Scope) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in scope.chain:
            if each.is_function or each.parent is None:
                for alias, home in self._imports.get(id(each.node), {}).items():
                    found.setdefault(alias, home)
        return {alias: home for alias, home in found.items() if alias not in self._bound}

    @cached_property
    def _imports(self) -> dict[int, dict[str, str]]:
        """By the identity of the module's or function's node."""
        found: dict[int, dict[str, str]] = {}
        todo: list[tuple[ast.AST, dict[str, str]]] = [(self._tree, found.setdefault(id(self._tree), {}))]
        while todo:
            node, names = todo.pop()
            for child in ast.iter_child_nodes(node):
                inner = names
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    inner = found.setdefault(id(child), {})
                elif isinstance(child, ast.Import | ast.ImportFrom):
                    names.update(_imported(child))
                if not isinstance(child, ast.expr):
                    todo.append((child, inner))
        return found

    @cached_property
    def _bound(self) -> set[str]:
        """Names that are bound in another way somewhere, or imported from elsewhere as well."""
        found: set[str] = set()
        homes: dict[str, set[str]] = {}
        for node in ast.walk(self._tree):
            found |= names_bound_by(node)
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias, home in _every_import(node).items():
                    homes.setdefault(alias, set()).add(home)
        return found | {alias for alias, different in homes.items() if len(different) > 1}


def names_bound_by(node: ast.AST) -> set[str]:
    """The names that a node itself gives a meaning, but for those it imports: a target, an argument, a definition."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        return {node.id}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return set()


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Of one import statement: alias -> full name, of what is torch's."""
    return {alias: home for alias, home in _every_import(node).items() if home.split(".")[0] == "torch"}


def _every_import(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {
            each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
            for each in node.names
        }
    home = "." * node.level + (node.module or "")
    return {each.asname or each.name: f"{home}.{each.name}" for each in node.names if each.name != "*"}
