"""Recognize the loss of one position: the call, what it indexes, and its form for all positions at once.

A position is one index of a loop along a dimension of a tensor; all positions together are a slice of it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stepscope.remedies.rewrites.context import (
    Context,
    Criterion,
    Scope,
    StatementPlace,
    assigned,
    assigned_value,
    bindings,
    dotted,
    is_pure,
    is_same,
    names_in,
    whole_number,
)

_FUNCTIONS: Final = {"torch.nn.functional.cross_entropy": "cross_entropy", "torch.nn.functional.nll_loss": "nll_loss"}
_CLASSES: Final = {"torch.nn.CrossEntropyLoss": "cross_entropy", "torch.nn.NLLLoss": "nll_loss"}
_MOVES: Final = ("to", "cuda", "cpu", "xpu", "npu", "hpu")
_CASTS: Final = ("float", "double", "half", "bfloat16", "long", "int", "contiguous")
_KEYWORDS: Final = ("ignore_index", "label_smoothing")
_IGNORED: Final = "-100"
"""The class number that both functions ignore by default."""


@dataclass(frozen=True, eq=False)
class Indexed:
    """One position of a tensor: `base` at `variable + offset` along `axis`.

    Attributes:
        casts: calls on the position, such as ".float()".
        after: number of full slices behind the position; None for an ellipsis.
        whole: whether the loop iterates over the tensor itself, not over numbers.
    """

    base: ast.expr
    axis: int
    offset: int = 0
    casts: str = ""
    after: int | None = 0
    whole: bool = False


@dataclass(frozen=True, eq=False)
class Callee:
    """The function or object that computes the loss.

    Attributes:
        function: "cross_entropy" or "nll_loss".
        ignored: the class number that is ignored, as source text.
        keywords: of the functional call, besides reduction, as source text.
        reduction: "mean" or "sum".
        criterion: the called object, if any.
        made_at: the line that is assumed to create it, if its name is an argument.
    """

    function: str
    ignored: str
    keywords: tuple[str, ...]
    reduction: str
    criterion: Criterion | None = None
    made_at: int | None = None


@dataclass(frozen=True, eq=False)
class LossCall:
    """The loss of one position.

    Attributes:
        own: the user's own callee and keywords, for a loss that is summed anyway.
    """

    logits: Indexed
    targets: Indexed
    callee: Callee
    spelled: str
    own: tuple[str, tuple[str, ...]]


@dataclass(frozen=True, eq=False)
class Loop:
    """The positions and names of a loop.

    Attributes:
        names: by bound name, None for the number of the position, else the tensor that is indexed.
        start: the first position.
        stop: the expression that positions stay below; None for a loop over tensors themselves.
    """

    names: dict[str, Indexed | None]
    start: int = 0
    stop: ast.expr | None = None


def loss_call(
    context: Context,
    scope: Scope,
    call: ast.expr,
    loop: Mapping[str, Indexed | None],
    temporary: Mapping[str, ast.expr],
) -> LossCall | None:
    """Parse the call as a loss of one position; None for anything else."""
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    arguments = dict(zip(("input", "target"), call.args, strict=False))
    if len(call.args) > 2 or arguments.keys() & named.keys():
        return None
    named |= arguments
    callee = _functional(context, scope, call, named) or _criterion(context, scope, call)
    if callee is None or not {"input", "target"} <= named.keys():
        return None
    others = [value for name, value in named.items() if name not in ("input", "target")]
    if any(names_in(value) & {*loop, *temporary} for value in [*others, call.func]):
        return None  # another setting at each position
    logits, targets = (_indexed(_followed(named[name], temporary), loop, temporary) for name in ("input", "target"))
    spelled = context.names.spelling(f"torch.nn.functional.{callee.function}", scope)
    if spelled is None or logits is None or targets is None:
        return None
    if (names_in(logits.base) | names_in(targets.base)) & {*loop, *temporary}:
        return None
    own = tuple(context.source.of(keyword) for keyword in call.keywords if keyword.arg not in ("input", "target"))
    return LossCall(logits, targets, callee, spelled, (context.source.of(call.func), own))


def _functional(context: Context, scope: Scope, call: ast.Call, named: Mapping[str, ast.expr]) -> Callee | None:
    function = _FUNCTIONS.get(context.names.meaning(call.func, scope) or "")
    if function is None:
        return None
    extra = {name: value for name, value in named.items() if name not in ("input", "target")}
    reduction = _reduction(extra)
    if reduction is None or not all(is_pure(value) for value in extra.values()):
        return None
    ignored = context.source.of(extra["ignore_index"]) if "ignore_index" in extra else _IGNORED
    keywords = tuple(f"{name}={context.source.of(extra[name])}" for name in _KEYWORDS if name in extra)
    return Callee(function, ignored, keywords, reduction)


def _criterion(context: Context, scope: Scope, call: ast.Call) -> Callee | None:
    """A criterion: a name or an attribute of self that is assigned nn.CrossEntropyLoss(...) once."""
    made, is_argument = _creating_call(context, scope, call.func)
    function = _CLASSES.get(context.names.meaning(made.func, scope) or "") if made is not None else None
    if made is None or function is None or made.args or any(each.arg is None for each in made.keywords):
        return None
    extra = {keyword.arg: keyword.value for keyword in made.keywords if keyword.arg is not None}
    reduction = _reduction(extra)
    text = context.source.of(call.func)
    if reduction is None or _is_altered(context, text):
        return None
    ignored = f"{text}.ignore_index" if "ignore_index" in extra else _IGNORED
    given = tuple(name for name in _KEYWORDS if name in extra)
    kind = "CrossEntropyLoss" if function == "cross_entropy" else "NLLLoss"
    criterion = Criterion(text, kind, reduction, given, is_argument)
    keywords = tuple(f"{name}={text}.{name}" for name in given)
    return Callee(function, ignored, keywords, reduction, criterion, made.lineno if is_argument else None)


def _is_altered(context: Context, criterion: str) -> bool:
    """Whether the module changes the object later: attributes, hooks, or the meaning of a global name."""
    for node in ast.walk(context.source.tree):
        match node:
            case ast.Attribute() if dotted(node.value) == criterion:
                if not isinstance(node.ctx, ast.Load) or node.attr.startswith("register_"):
                    return True
            case ast.Call(func=ast.Name("setattr" | "delattr"), args=[changed, *_]) if dotted(changed) == criterion:
                return True
            case ast.Global(names) | ast.Nonlocal(names) if criterion in names:
                return True
    return False


def _creating_call(context: Context, scope: Scope, function: ast.expr) -> tuple[ast.Call | None, bool]:
    """The call that created the called object, and whether that is known only by an argument's name."""
    value: ast.expr | None
    is_argument = False
    if isinstance(function, ast.Name):
        found = assigned_value(context, scope, function.id)
        value = found[0] if found is not None else None
        is_argument = value is None and [type(each) for each in bindings(scope, function.id)] == [ast.arg]
        value = _only_one_of_that_name(context, function.id) if is_argument else value
    elif isinstance(function, ast.Attribute) and dotted(function) == f"self.{function.attr}":
        value = _attribute_of_self(scope, function.attr)
    else:
        return None, False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        value = value.func.value
    return (value if isinstance(value, ast.Call) else None), is_argument


def _only_one_of_that_name(context: Context, name: str) -> ast.expr | None:
    """The value the module assigns to the name, if it does so in one place only."""
    found = []
    for place in context.places:
        targets, value = assigned(place.statement)
        found += [value for target in targets if isinstance(target, ast.Name) and target.id == name]
    return found[0] if len(found) == 1 else None


def _attribute_of_self(scope: Scope, attribute: str) -> ast.expr | None:
    owner = next((each.node for each in scope.chain if isinstance(each.node, ast.ClassDef)), None)
    found: list[ast.expr | None] = []
    for node in ast.walk(owner) if owner is not None else ():
        targets, value = ([node.target], None) if isinstance(node, ast.AugAssign) else assigned(node)
        if any(dotted(target) == f"self.{attribute}" for target in targets):
            found.append(value)
    return found[0] if len(found) == 1 else None


def _reduction(extra: Mapping[str, ast.expr]) -> str | None:
    """ "mean" or "sum"; None with class weights, or with keywords of an old or a future torch."""
    weight, value = extra.get("weight"), extra.get("reduction")
    if not extra.keys() <= {*_KEYWORDS, "reduction", "weight"}:
        return None
    if weight is not None and not (isinstance(weight, ast.Constant) and weight.value is None):
        return None
    if value is None:
        return "mean"
    return str(value.value) if isinstance(value, ast.Constant) and value.value in ("mean", "sum") else None


def _followed(node: ast.expr, temporary: Mapping[str, ast.expr]) -> ast.expr:
    seen: set[str] = set()
    while isinstance(node, ast.Name) and node.id in temporary and node.id not in seen:
        seen.add(node.id)
        node = temporary[node.id]
    return node


def _indexed(node: ast.expr, loop: Mapping[str, Indexed | None], temporary: Mapping[str, ast.expr]) -> Indexed | None:
    match node:
        case ast.Call(func=ast.Attribute(value=value, attr=cast), args=[], keywords=[]) if cast in _CASTS:
            inner = _indexed(_followed(value, temporary), loop, temporary)
            return None if inner is None else replace(inner, casts=f"{inner.casts}.{cast}()")
        case ast.Name(name):
            return loop.get(name)
        case ast.Subscript(value=base) if _is_base(base):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        case _:
            return None
    offsets = [_offset(item, loop) for item in items]
    places = [number for number, offset in enumerate(offsets) if offset is not None]
    if len(places) != 1:
        return None
    axis = places[0]
    after = items[axis + 1 :]
    ellipsis = bool(after) and isinstance(after[-1], ast.Constant) and after[-1].value is ...
    if not all(_is_full(item) for item in [*items[:axis], *(after[:-1] if ellipsis else after)]):
        return None
    return Indexed(base, axis, offsets[axis] or 0, after=None if ellipsis else len(after))


def _offset(item: ast.expr, loop: Mapping[str, Indexed | None]) -> int | None:
    """The c of position + c; None for anything else."""
    match item:
        case ast.Name(name):
            return 0 if name in loop and loop[name] is None else None
        case ast.BinOp(ast.Name() as left, ast.Add(), ast.Constant(int() as number)):
            pass
        case ast.BinOp(ast.Constant(int() as number), ast.Add(), ast.Name() as left):
            pass
        case ast.BinOp(ast.Name() as left, ast.Sub(), ast.Constant(int() as number)):
            number = -number if type(number) is int else number
        case _:
            return None
    return number if type(number) is int and _offset(left, loop) == 0 else None


def _is_full(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and item.lower is item.upper is item.step is None


def _is_base(node: ast.expr) -> bool:
    """A name, attributes of one, or an item of it by a string literal."""
    match node:
        case ast.Attribute(value=inner) | ast.Subscript(value=inner, slice=ast.Constant(value=str())):
            return _is_base(inner)
        case _:
            return isinstance(node, ast.Name)


def loop_of(target: ast.expr, iterated: ast.expr) -> Loop | None:
    """Parse the loop `for target in iterated`, by range() or by zip() of tensors; None for any other."""
    match target, iterated:
        case ast.Name(name), ast.Call(func=ast.Name("range"), args=[*first, stop], keywords=[]) if len(first) <= 1:
            start = whole_number(first[0]) if first else 0
            literal = whole_number(stop)
            if start is None or start < 0 or not is_pure(stop) or (literal is not None and literal < start):
                return None  # a slice would count a negative end from the end
            return Loop({name: None}, start, stop)
        case ast.Tuple([ast.Name(one), ast.Name(other)]), ast.Call(ast.Name("zip"), [left, right], []):
            parts = _unbound(left), _unbound(right)
            return Loop(dict(zip((one, other), parts, strict=True))) if None not in parts and one != other else None
        case _:
            return None


def _unbound(value: ast.expr) -> Indexed | None:
    """The tensor that is iterated: over its first dimension, or over another one by unbind."""
    axis: int | None = 0
    match value:
        case ast.Call(func=ast.Attribute(value=base, attr="unbind"), args=args, keywords=keywords):
            given = [*args, *(keyword.value for keyword in keywords if keyword.arg == "dim")]
            axis, value = whole_number(given[0]) if given else 0, base
            if len(given) != len(args) + len(keywords) or len(given) > 1 or axis not in (0, 1):
                return None
    return Indexed(value, axis or 0, after=None, whole=True) if dotted(value) is not None else None


def sliced(
    context: Context, place: StatementPlace, loop: Loop, part: Indexed, dimensions: int | None
) -> tuple[str, bool] | None:
    """All positions of a tensor as source text, and whether the tensor is known to have them.

    Args:
        dimensions: of the tensor, if known: a size may be indexed from the end.
    """
    base = context.source.of(part.base)
    if part.whole or loop.stop is None:
        return base + part.casts, True
    first = loop.start + part.offset
    if first < 0:
        return None  # counts from the end
    surplus = _surplus(context, place, loop.stop, part, dimensions)
    if surplus is None:
        last = _not_negative(_shifted(context, loop.stop, part.offset))
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
    """The end of a slice that is empty when range() is: a negative end would count from the end."""
    tree = ast.parse(stop, mode="eval").body
    number = whole_number(tree)
    if number is not None:
        return str(max(number, 0))
    return f"max({stop}, 0)" if any(isinstance(each, ast.Sub | ast.USub) for each in ast.walk(tree)) else stop


def _shifted(context: Context, value: ast.expr, offset: int) -> str:
    """The text of value + offset, with two literal numbers added up."""
    literal, added = whole_number(value), _literal_added(value)
    if literal is not None:
        return str(literal + offset)
    if added is not None:
        return _shifted(context, added[0], offset + added[1])
    text = context.source.of(value)
    if not offset:
        return text
    match value:
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.FloorDiv()):
            pass
        case ast.BinOp() | ast.UnaryOp():
            text = f"({text})"
    return f"{text} {'+' if offset > 0 else '-'} {abs(offset)}"


def _literal_added(value: ast.expr) -> tuple[ast.expr, int] | None:
    """(x, c) of x + c or x - c, c being a literal number."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add | ast.Sub):
        return None
    right = whole_number(value.right)
    return None if right is None else (value.left, right if isinstance(value.op, ast.Add) else -right)


def _surplus(
    context: Context, place: StatementPlace, stop: ast.expr, part: Indexed, dimensions: int | None
) -> int | None:
    """The c if `stop` is the tensor's own size along the axis plus c; None if that is unknown."""
    surplus = 0
    while (added := _literal_added(stop)) is not None:
        stop, surplus = added[0], surplus + added[1]
    if isinstance(stop, ast.Name):
        found = _size_named(context, place, stop.id, part)
        if found is None:
            return None
        stop = found
    return surplus if _is_size(stop, part, dimensions) else None


def _is_size(node: ast.expr, part: Indexed, dimensions: int | None) -> bool:
    axes = {part.axis, *([part.axis - dimensions] if dimensions else [])}
    match node:
        case ast.Call(func=ast.Name("len"), args=[whole], keywords=[]):
            return part.axis == 0 and is_same(whole, part.base)
        case ast.Call(func=ast.Attribute(value=whole, attr="size"), args=[axis], keywords=[]):
            return whole_number(axis) in axes and is_same(whole, part.base)
        case ast.Subscript(value=shape, slice=axis):
            of = _whole_shape(shape)
            return of is not None and whole_number(axis) in axes and is_same(of, part.base)
        case _:
            return False


def _whole_shape(node: ast.expr) -> ast.expr | None:
    """The x of x.shape or x.size()."""
    match node:
        case ast.Attribute(value=whole, attr="shape") | ast.Call(ast.Attribute(value=whole, attr="size"), [], []):
            return whole
        case _:
            return None


def _size_named(context: Context, place: StatementPlace, name: str, part: Indexed) -> ast.expr | None:
    """The size that a name refers to, if it was assigned once and the tensor has not changed since."""
    scope = place.scope
    bound = bindings(scope, name)
    if len(bound) != 1 or not isinstance(bound[0], ast.Name):
        return None
    line = bound[0].lineno
    statements = (each.statement for each in context.places if each.scope.node is scope.node)
    assignments = (each for each in statements if isinstance(each, ast.Assign))
    found = next((each for each in assignments if each.lineno <= line <= (each.end_lineno or 0)), None)
    if found is None or len(found.targets) != 1:
        return None
    for base in names_in(part.base):
        if any(getattr(each, "lineno", 0) > found.lineno for each in bindings(scope, base)):
            return None
    target = found.targets[0]
    if target is bound[0]:
        return found.value
    shape = _whole_shape(found.value)
    if isinstance(target, ast.Tuple) and bound[0] in target.elts and shape is not None:
        index = ast.Constant(target.elts.index(bound[0]))
        return ast.Subscript(ast.Attribute(shape, "shape", ast.Load()), index, ast.Load())
    return None


def is_list(scope: Scope, base: ast.expr) -> bool:
    """Whether the function shows that the name is a list, not a tensor."""
    name = dotted(base)
    for node in ast.walk(scope.node):
        targets, value = assigned(node)
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="append" | "extend")) if dotted(owner) == name:
                return True
        if isinstance(value, ast.List | ast.ListComp | ast.Tuple) and any(dotted(each) == name for each in targets):
            return True
    return False


def comes_after_a_change(nodes: Sequence[ast.AST], comprehension: ast.ListComp | ast.GeneratorExp) -> bool:
    """Whether a call earlier in the same statement receives something that the comprehension reads."""
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
