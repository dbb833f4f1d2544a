"""A loss of one position: the call, what it indexes, and what is to be called for all positions."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from stepscope.remedies.rewrites.context import Context, Criterion, assigned_value, bindings
from stepscope.remedies.rewrites.source_text import Scope, dotted, is_pure, names_in

_FUNCTIONS: Final = {
    "torch.nn.functional.cross_entropy": "cross_entropy",
    "torch.nn.functional.nll_loss": "nll_loss",
}
_CLASSES: Final = {"torch.nn.CrossEntropyLoss": "cross_entropy", "torch.nn.NLLLoss": "nll_loss"}
_MOVES: Final = ("to", "cuda", "cpu", "xpu", "npu", "hpu")
_CASTS: Final = ("float", "double", "half", "bfloat16", "long", "int", "contiguous")
_KEYWORDS: Final = ("ignore_index", "label_smoothing")
_IGNORED: Final = "-100"
"""What both functions ignore where they are told nothing else."""


@dataclass(frozen=True, eq=False)
class Indexed:
    """One position of a tensor: `base` at `variable + offset` along `axis`.

    Attributes:
        casts: what is called on the position, such as ".float()".
        after: full slices that stand after the position; None where an ellipsis does.
        whole: the loop goes through all of the tensor by itself, not by a number.
    """

    base: ast.expr
    axis: int
    offset: int = 0
    casts: str = ""
    after: int | None = 0
    whole: bool = False


@dataclass(frozen=True, eq=False)
class LossCall:
    """The loss of one position.

    Attributes:
        callee: what can be called with reduction="none", as source text.
        own: the user's own callee and keywords, for a loss that is summed anyway.
        keywords: of the functional call, besides reduction, as source text.
        ignored: the class number that counts for nothing, as source text.
        reduction: "mean" or "sum".
        criterion: the object that is called, where one is.
        made_at: the line that is taken to make it, where its name is an argument.
    """

    logits: Indexed
    targets: Indexed
    callee: str
    own: tuple[str, tuple[str, ...]]
    keywords: tuple[str, ...]
    ignored: str
    reduction: str
    criterion: Criterion | None
    made_at: int | None


@dataclass(frozen=True, eq=False)
class _Callee:
    function: str
    ignored: str
    keywords: tuple[str, ...]
    reduction: str
    criterion: Criterion | None = None
    made_at: int | None = None


def loss_call(
    context: Context,
    scope: Scope,
    call: ast.expr,
    loop: Mapping[str, Indexed | None],
    temporary: Mapping[str, ast.expr],
) -> LossCall | None:
    """The call as a loss of one position; None for anything else.

    Args:
        loop: names that the loop binds: None for the number of the position, else what it is one position of.
        temporary: names that the loop's body assigns before, and what.
    """
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    arguments = dict(zip(("input", "target"), call.args, strict=False))
    if len(call.args) > 2 or arguments.keys() & named.keys():
        return None
    named |= arguments
    callee = _functional(context, scope, call, named) or _object(context, scope, call)
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
    return LossCall(
        logits,
        targets,
        callee=spelled,
        own=(context.source.of(call.func), own),
        keywords=callee.keywords,
        ignored=callee.ignored,
        reduction=callee.reduction,
        criterion=callee.criterion,
        made_at=callee.made_at,
    )


def _functional(context: Context, scope: Scope, call: ast.Call, named: Mapping[str, ast.expr]) -> _Callee | None:
    function = _FUNCTIONS.get(context.names.meaning(call.func, scope) or "")
    if function is None:
        return None
    extra = {name: value for name, value in named.items() if name not in ("input", "target")}
    reduction = _reduction(extra)
    if reduction is None or not _are_understood(extra) or not all(is_pure(value) for value in extra.values()):
        return None
    ignored = context.source.of(extra["ignore_index"]) if "ignore_index" in extra else _IGNORED
    keywords = tuple(f"{name}={context.source.of(extra[name])}" for name in _KEYWORDS if name in extra)
    return _Callee(function, ignored, keywords, reduction)


def _object(context: Context, scope: Scope, call: ast.Call) -> _Callee | None:
    """A criterion: a name or an attribute of self that is assigned nn.CrossEntropyLoss(...) once."""
    made, is_argument = _made(context, scope, call.func)
    function = _CLASSES.get(context.names.meaning(made.func, scope) or "") if made is not None else None
    if made is None or function is None or made.args or any(each.arg is None for each in made.keywords):
        return None
    extra = {keyword.arg: keyword.value for keyword in made.keywords if keyword.arg is not None}
    reduction = _reduction(extra)
    if reduction is None or not _are_understood(extra):
        return None
    text = context.source.of(call.func)
    if _is_altered(context, text):
        return None
    ignored = f"{text}.ignore_index" if "ignore_index" in extra else _IGNORED
    keywords = tuple(f"{name}={text}.{name}" for name in _KEYWORDS if name in extra)
    kind = "CrossEntropyLoss" if function == "cross_entropy" else "NLLLoss"
    criterion = Criterion(text, kind, reduction, tuple(name for name in _KEYWORDS if name in extra), is_argument)
    return _Callee(function, ignored, keywords, reduction, criterion, made.lineno if is_argument else None)


def _is_altered(context: Context, criterion: str) -> bool:
    """Whether the module changes an object after it is made: its attributes, its hooks, or what a global name means."""
    for node in ast.walk(context.source.tree):
        if isinstance(node, ast.Attribute) and dotted(node.value) == criterion:
            if not isinstance(node.ctx, ast.Load) or node.attr.startswith("register_"):
                return True
        elif isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
            if node.args and dotted(node.args[0]) == criterion:
                return True
        elif isinstance(node, ast.Global | ast.Nonlocal) and criterion in node.names:
            return True
    return False


def _made(context: Context, scope: Scope, function: ast.expr) -> tuple[ast.Call | None, bool]:
    """The call that made the object which is called, and whether that is only known by the name of an argument."""
    value: ast.expr | None
    is_argument = False
    if isinstance(function, ast.Name):
        found = assigned_value(context, scope, function.id)
        value = found[0] if found is not None else None
        is_argument = value is None and _is_argument(scope, function.id)
        value = _only_one_of_that_name(context, function.id) if is_argument else value
    elif isinstance(function, ast.Attribute) and dotted(function) == f"self.{function.attr}":
        value = _attribute_of_self(context, scope, function.attr)
    else:
        return None, False
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
        value = value.func.value
    return (value if isinstance(value, ast.Call) else None), is_argument


def _is_argument(scope: Scope, name: str) -> bool:
    found = bindings(scope, name)
    return len(found) == 1 and isinstance(found[0], ast.arg)


def _only_one_of_that_name(context: Context, name: str) -> ast.expr | None:
    """What the module assigns to the name, where it does so in one place alone."""
    found = []
    for place in context.places:
        statement = place.statement
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found += [statement.value for target in targets if isinstance(target, ast.Name) and target.id == name]
    return found[0] if len(found) == 1 else None


def _attribute_of_self(context: Context, scope: Scope, attribute: str) -> ast.expr | None:
    owner = next((each.node for each in scope.chain if isinstance(each.node, ast.ClassDef)), None)
    if owner is None:
        return None
    found: list[ast.expr | None] = []
    for node in ast.walk(owner):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        if any(dotted(target) == f"self.{attribute}" for target in targets):
            found.append(node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None)
    return found[0] if len(found) == 1 else None


def _reduction(extra: Mapping[str, ast.expr]) -> str | None:
    value = extra.get("reduction")
    if value is None:
        return "mean"
    return str(value.value) if isinstance(value, ast.Constant) and value.value in ("mean", "sum") else None


def _are_understood(extra: Mapping[str, ast.expr]) -> bool:
    """Whether nothing is weighed by class, and no keyword is one of an old or a coming torch."""
    weight = extra.get("weight")
    if weight is not None and not (isinstance(weight, ast.Constant) and weight.value is None):
        return False
    return extra.keys() <= {*_KEYWORDS, "reduction", "weight"}


def _followed(node: ast.expr, temporary: Mapping[str, ast.expr]) -> ast.expr:
    seen: set[str] = set()
    while isinstance(node, ast.Name) and node.id in temporary and node.id not in seen:
        seen.add(node.id)
        node = temporary[node.id]
    return node


def _indexed(node: ast.expr, loop: Mapping[str, Indexed | None], temporary: Mapping[str, ast.expr]) -> Indexed | None:
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CASTS
        and not (node.args or node.keywords)
    ):
        inner = _indexed(_followed(node.func.value, temporary), loop, temporary)
        return None if inner is None else replace(inner, casts=f"{inner.casts}.{node.func.attr}()")
    if isinstance(node, ast.Name):
        return loop.get(node.id)
    if not isinstance(node, ast.Subscript) or not _is_base(node.value):
        return None
    items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    offsets = [_offset(item, loop) for item in items]
    places = [number for number, offset in enumerate(offsets) if offset is not None]
    if len(places) != 1:
        return None
    axis = places[0]
    after = items[axis + 1 :]
    ellipsis = bool(after) and isinstance(after[-1], ast.Constant) and after[-1].value is ...
    if not all(_is_full(item) for item in [*items[:axis], *(after[:-1] if ellipsis else after)]):
        return None
    return Indexed(node.value, axis, offsets[axis] or 0, after=None if ellipsis else len(after))


def _offset(item: ast.expr, loop: Mapping[str, Indexed | None]) -> int | None:
    """The c of position + c; None for what is no such thing."""

    def is_position(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in loop and loop[node.id] is None

    if is_position(item):
        return 0
    if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Add | ast.Sub):
        left, right = item.left, item.right
        if is_position(right) and isinstance(item.op, ast.Add):
            left, right = right, left
        if is_position(left) and isinstance(right, ast.Constant) and type(right.value) is int:
            return right.value if isinstance(item.op, ast.Add) else -right.value
    return None


def _is_full(item: ast.expr) -> bool:
    return isinstance(item, ast.Slice) and item.lower is item.upper is item.step is None


def _is_base(node: ast.expr) -> bool:
    """A name, attributes of one, or an item of it by a literal."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Subscript) and not (
            isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        ):
            return False
        node = node.value
    return isinstance(node, ast.Name)
