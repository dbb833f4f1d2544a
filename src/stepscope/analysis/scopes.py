"""What the scopes of compiled code tell: modules, and the direction of differentiation.

XLA keeps with each operation the names it was written under: JAX "jit(step)/transpose(jvp(Model))/dense/dot_general",
PyTorch/XLA "train_step.1/forward.2/aten__mm.3/aten__mm". Functions that JAX transforms stand in brackets; control flow
and the operation itself are no modules.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from stepscope.line_records import DEEPEST_MODULE, LONGEST_MODULE

_TRANSFORMED: Final = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_COMPILING: Final = frozenset({"jit", "pjit", "xla_call", "pmap", "shard_map", "custom_jvp_call", "custom_vjp_call"})
"""Transformations whose bracket holds a function's name, which is no module."""
_NO_MODULES: Final = frozenset({
    "while", "body", "cond", "branch", "scan", "closed_call", "core_call", "remat", "checkpoint", "main",
    "rematted_computation", "body_fun", "cond_fun", "custom_jvp_call", "custom_vjp_call", "pjit", "XlaModule:",
})  # fmt: skip
_NUMBER: Final = re.compile(r"\.\d+$")
_TORCH_OPERATOR: Final = re.compile(r"(?:aten|xla|prim)__")
_BRANCH: Final = re.compile(r"branch_\d+_fun$")


class Scope(NamedTuple):
    """A scope, taken apart.

    Attributes:
        modules: names of the modules around the operation, outermost first.
        direction: "backward" where it is transposed, "forward" where it is differentiated, None where neither.
    """

    modules: tuple[str, ...]
    direction: Literal["forward", "backward"] | None


NO_SCOPE: Final = Scope((), None)


@lru_cache(maxsize=65536)
def parsed_scope(scope: str) -> Scope:
    """The modules and the direction that a scope tells of."""
    parts = _parts(scope[:LONGEST_MODULE])
    modules: list[str] = []
    backward = forward = False
    for part in parts[:-1]:
        name = part
        while match := _TRANSFORMED.fullmatch(name):
            backward |= match[1] == "transpose"
            forward |= match[1] == "jvp"
            name = "" if match[1] in _COMPILING else match[2]
        name = _NUMBER.sub("", name)
        if name and name not in _NO_MODULES and not _TORCH_OPERATOR.match(name) and not _BRANCH.match(name):
            modules.append(name)
    return Scope(tuple(modules[:DEEPEST_MODULE]), "backward" if backward else "forward" if forward else None)


def _parts(scope: str) -> list[str]:
    """The scope cut at slashes outside of brackets."""
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(scope):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "/" and depth <= 0:
            parts.append(scope[begin:position])
            begin = position + 1
    return [*parts, scope[begin:]]
