"""The positions that a loop goes through, as slices of the tensors that it indexes."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.remedies.rewrites.context import Context, bindings
from stepscope.remedies.rewrites.loss_calls import Indexed
from stepscope.remedies.rewrites.source_text import Place, Scope, dotted, is_pure, is_same, names_in, whole_number


@dataclass(frozen=True, eq=False)
class Loop:
    """What a loop goes through.

    Attributes:
        names: that it binds: None for the number of the position, else what it is one position of.
        start: the first position.
        stop: the expression that the positions stay below; None for a loop through tensors themselves.
    """

    names: dict[str, Indexed | None]
    start: int = 0
    stop: ast.expr | None = None


def loop_of(target: ast.expr, iterated: ast.expr) -> Loop | None:
    """The loop `for target in iterated`, by range() or by zip() of tensors; None for any other."""
    if not isinstance(iterated, ast.Call) or iterated.keywords or not isinstance(iterated.func, ast.Name):
        return None
    if iterated.func.id == "range" and isinstance(target, ast.Name) and 1 <= len(iterated.args) <= 2:
        start = whole_number(iterated.args[0]) if len(iterated.args) == 2 else 0
        stop = iterated.args[-1]
        literal = whole_number(stop)
        if start is None or start < 0 or not is_pure(stop) or (literal is not None and literal < start):
            return None  # a slice would count a negative end from the end
        return Loop({target.id: None}, start, stop)
    if iterated.func.id == "zip" and isinstance(target, ast.Tuple) and len(target.elts) == len(iterated.args) == 2:
        names: dict[str, Indexed | None] = {}
        for name, value in zip(target.elts, iterated.args, strict=True):
            part = _unbound(value)
            if not isinstance(name, ast.Name) or part is None:
                return None
            names[name.id] = part
        return Loop(names) if len(names) == 2 else None
    return None


def _unbound(value: ast.expr) -> Indexed | None:
    """A tensor that is iterated: over its first dimension, or another one by unbind."""
    axis = 0
    if isinstance(value, ast.Call):
        if not (isinstance(value.func, ast.Attribute) and value.func.attr == "unbind"):
            return None
        given = [*value.args, *(keyword.value for keyword in value.keywords if keyword.arg == "dim")]
        number = whole_number(given[0]) if given else 0
        if len(given) != len(value.args) + len(value.keywords) or len(given) > 1 or number not in (0, 1):
            return None
        axis, value = number, value.func.value
    if dotted(value) is None:
        return None
    return Indexed(value, axis, after=None, whole=True)


def sliced(
    context: Context, place: Place, loop: Loop, part: Indexed, dimensions: int | None
) -> tuple[str, bool] | None:
    """All positions of a tensor as source text, and whether the tensor is known to have them.

    Args:
        dimensions: of the tensor, where they are known: a size may be asked for from the end.
    """
    base = context.source.of(part.base)
    if part.whole or loop.stop is None:
        return base + part.casts, True
    first = loop.start + part.offset
    if first < 0:
        return None  # counts from the end
    surplus = _surplus(context, place, loop.stop, part, dimensions)
    if surplus is None:
        last = _not_negative(shifted(context, loop.stop, part.offset))
    elif surplus + part.offset > 0:
        return None  # beyond the end
    else:
        last = str(surplus + part.offset) if surplus + part.offset else ""
    if not first and not last:
        return base + part.casts, True
    simple = all(text.isidentifier() or text.lstrip("-").isdigit() or not text for text in (str(first or ""), last))
    span = f"{first or ''}:{last}" if simple else f"{first or ''} : {last}".strip()
    return f"{base}[{':, ' * part.axis}{span}]{part.casts}", surplus is not None


def _not_negative(stop: str) -> str:
    """The end of a slice that is empty where range() is: an end below zero would count from the end."""
    tree = ast.parse(stop, mode="eval").body
    number = whole_number(tree)
    if number is not None:
        return str(max(number, 0))
    return f"max({stop}, 0)" if any(isinstance(each, ast.Sub | ast.USub) for each in ast.walk(tree)) else stop


def shifted(context: Context, value: ast.expr, offset: int) -> str:
    """The text of value + offset, without a sum of two literal numbers."""
    literal = whole_number(value)
    if literal is not None:
        return str(literal + offset)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub):
        right = whole_number(value.right)
        if right is not None:
            return shifted(context, value.left, offset + (right if isinstance(value.op, ast.Add) else -right))
    text = context.source.of(value)
    if not offset:
        return text
    if isinstance(value, ast.BinOp | ast.UnaryOp) and not (
        isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv)
    ):
        text = f"({text})"
    return f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"


def _surplus(context: Context, place: Place, stop: ast.expr, part: Indexed, dimensions: int | None) -> int | None:
    """The c where `stop` is the tensor's own size along the axis plus c; None where that is not known."""
    surplus = 0
    while isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add | ast.Sub):
        right = whole_number(stop.right)
        if right is None:
            return None
        surplus += right if isinstance(stop.op, ast.Add) else -right
        stop = stop.left
    if isinstance(stop, ast.Name):
        found = _size_named(context, place, stop.id, part)
        if found is None:
            return None
        stop = found
    return surplus if _is_size(stop, part, dimensions) else None


def _is_size(node: ast.expr, part: Indexed, dimensions: int | None) -> bool:
    """Whether the expression is the size of the tensor along the axis."""
    axes = {part.axis, *([part.axis - dimensions] if dimensions else [])}
    if isinstance(node, ast.Call) and not node.keywords and len(node.args) == 1:
        if isinstance(node.func, ast.Name) and node.func.id == "len":
            return part.axis == 0 and is_same(node.args[0], part.base)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "size":
            return whole_number(node.args[0]) in axes and is_same(node.func.value, part.base)
    if isinstance(node, ast.Subscript):
        whole = _whole_shape(node.value)
        return whole is not None and whole_number(node.slice) in axes and is_same(whole, part.base)
    return False


def _whole_shape(node: ast.expr) -> ast.expr | None:
    """x of x.shape or x.size()."""
    if isinstance(node, ast.Attribute) and node.attr == "shape":
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
        return None if node.args or node.keywords else node.func.value
    return None


def _size_named(context: Context, place: Place, name: str, part: Indexed) -> ast.expr | None:
    """What a name of a size stands for, where it was assigned once and the tensor is the same since."""
    scope = place.scope
    bound = bindings(scope, name)
    if len(bound) != 1 or not isinstance(bound[0], ast.Name):
        return None
    statement = next(
        (
            each.statement
            for each in context.places
            if each.scope.node is scope.node
            and isinstance(each.statement, ast.Assign)
            and each.statement.lineno <= bound[0].lineno <= (each.statement.end_lineno or 0)
        ),
        None,
    )
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    for base in names_in(part.base):
        if any(getattr(each, "lineno", 0) > statement.lineno for each in bindings(scope, base)):
            return None
    target = statement.targets[0]
    if target is bound[0]:
        return statement.value
    shape = _whole_shape(statement.value)
    if isinstance(target, ast.Tuple) and bound[0] in target.elts and shape is not None:
        index = ast.Constant(target.elts.index(bound[0]))
        return ast.Subscript(ast.Attribute(shape, "shape", ast.Load()), index, ast.Load())
    return None


def is_list(context: Context, scope: Scope, base: ast.expr) -> bool:
    """Whether something in the function shows that the name is a list, not a tensor."""
    name = dotted(base)
    for node in ast.walk(scope.node):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("append", "extend")
        ):
            if dotted(node.func.value) == name:
                return True
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.List | ast.ListComp | ast.Tuple
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(dotted(target) == name for target in targets):
                return True
    return False


def comes_after_a_change(nodes: Sequence[ast.AST], comprehension: ast.ListComp | ast.GeneratorExp) -> bool:
    """Whether a call before the comprehension, in the same statement, has something that it reads in its hands."""
    read = names_in(comprehension)
    inside = {id(node) for node in ast.walk(comprehension)}
    begin = (comprehension.lineno, comprehension.col_offset)
    return any(
        isinstance(node, ast.Call)
        and id(node) not in inside
        and (node.end_lineno or node.lineno, node.end_col_offset or 0) <= begin
        and names_in(node) & read
        for node in nodes
    )
