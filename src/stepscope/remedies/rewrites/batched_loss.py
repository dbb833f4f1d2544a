"""Replace a loss that is computed position by position with one for all positions at once.

The mean over the batch is taken at each position as before, over the classes that are not ignored, and then summed:
the sum is the same whatever is ignored where. A position at which everything is ignored makes it NaN, as before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stepscope.remedies.rewrites.context import (
    Context,
    Criterion,
    Edit,
    Expected,
    Positions,
    Rewrite,
    StatementPlace,
    assigned,
    dotted,
    expressions_of,
    is_pure,
    is_unplaced,
    names_in,
    whole_number,
)
from stepscope.remedies.rewrites.loss_calls import (
    Loop,
    LossCall,
    comes_after_a_change,
    is_list,
    loop_of,
    loss_call,
    sliced,
)

NAME: Final = "batched-loss"
_EXPLANATION: Final = "Computes the loss of all positions at once: the same means, added up as before."
_WIDTH: Final = 100
"""Calls on longer lines are split over several."""


@dataclass(frozen=True, eq=False)
class _Batched:
    """The loss of all positions: the statements to insert before, and the expressions for the values and their sum."""

    before: tuple[str, ...]
    each: str
    total: str
    assumptions: tuple[str, ...]
    expected: tuple[Expected, ...]
    criterion: Criterion | None


def find(context: Context) -> Iterator[Rewrite]:
    """Find loops and comprehensions that only add up, or collect, the losses of positions."""
    if not any(word in context.source.text for word in ("cross_entropy", "nll_loss", "Loss")):
        return
    if context.binds("range", "zip", "sum", "len", "max"):
        return  # not Python's built-in
    for place in context.places:
        if isinstance(place.statement, ast.For):
            yield from _of_loop(context, place, place.statement)
        elif isinstance(place.statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr):
            yield from _of_comprehension(context, place)


def _of_loop(context: Context, place: StatementPlace, loop: ast.For) -> Iterator[Rewrite]:
    through = loop_of(loop.target, loop.iter)
    indent = context.source.indent(loop)
    if through is None or indent is None or loop.orelse or not context.source.ends_its_line(loop):
        return
    temporary = _temporaries(loop.body[:-1])
    if temporary is None or _are_used_elsewhere(place, loop, {*through.names, *temporary}):
        return
    last = loop.body[-1]
    added = _added(last)
    if added is None:
        return
    target, value, is_list_of_them = added
    changing = {*through.names, *temporary, *names_in(target)}
    inner, call = _scaled(value, temporary, changing)
    batched = _batched(context, place, through, call, temporary, names_in(target))
    if batched is None or (through.stop is not None and names_in(through.stop) & changing):
        return
    before = [f"{indent}{comment}" for comment in context.source.comments(loop)]
    before += [line for text in batched.before for line in _indented(text, indent)]
    if is_list_of_them:
        edits = _of_list(context, place, loop, target, (value, inner), batched, (before, indent))
    else:
        after = context.with_replaced(last, inner, batched.total)
        edits = [_lines(context, loop, [*before, f"{indent}{after}"], indent)]
    rewrite = context.rewrite(NAME, loop, place.scope, _EXPLANATION, edits, batched.assumptions, batched.expected)
    yield replace(rewrite, criterion=batched.criterion, positions=_positions(batched, through))


def _of_comprehension(context: Context, place: StatementPlace) -> Iterator[Rewrite]:
    """`sum(loss for ...)`, `torch.stack([loss for ...])`, or a list of losses, in a statement that starts its line."""
    statement = place.statement
    indent = context.source.indent(statement)
    nodes = list(expressions_of(statement))
    comprehensions = [node for node in nodes if isinstance(node, ast.ListComp | ast.GeneratorExp)]
    conditional = (
        ast.IfExp | ast.BoolOp | ast.Lambda | ast.NamedExpr | ast.SetComp | ast.DictComp | ast.Await | ast.Yield
    )
    if len(comprehensions) != 1 or indent is None or any(isinstance(node, conditional) for node in nodes):
        return
    comprehension = comprehensions[0]
    generator = comprehension.generators[0]
    through = loop_of(generator.target, generator.iter)
    if len(comprehension.generators) > 1 or generator.ifs or generator.is_async or through is None:
        return
    if comes_after_a_change(nodes, comprehension):
        return
    inner, call = _scaled(comprehension.elt, {}, set(through.names))
    batched = _batched(context, place, through, call, {}, set())
    if batched is None:
        return
    each = context.with_replaced(comprehension.elt, inner, batched.each)
    around = next((node for node in nodes if isinstance(node, ast.Call) and comprehension in node.args), None)
    edit: Edit | None = None
    if around is not None and dotted(around.func) == "sum" and len(around.args) == 1 and not around.keywords:
        edit = context.replaced(around, context.with_replaced(comprehension.elt, inner, batched.total))
        if inner is not comprehension.elt:
            edit = Edit(edit.start, edit.end, f"({edit.text})")
    elif around is not None and _is_stack(context, place, around):
        edit = context.replaced(around, f"({each})")
    elif isinstance(comprehension, ast.ListComp):
        edit = context.replaced(comprehension, f"list(({each}).unbind())")
    if edit is None:
        return
    start = context.source.span(statement)[0]
    before = [line for text in batched.before for line in _indented(text, indent)]
    ahead = Edit(start, start, _joined(context, [*before, indent]).removeprefix(indent))
    rewrite = context.rewrite(
        NAME, statement, place.scope, _EXPLANATION, [ahead, edit], batched.assumptions, batched.expected
    )
    yield replace(rewrite, criterion=batched.criterion, positions=_positions(batched, through))


def _positions(batched: _Batched, loop: Loop) -> Positions | None:
    variable = next((name for name, part in loop.names.items() if part is None), None)
    return None if variable is None else Positions("\n".join(batched.before), batched.each, variable, loop.start)


def _temporaries(statements: Sequence[ast.stmt]) -> dict[str, ast.expr] | None:
    """Names that the loop's body assigns before the loss is added, each once; None if it does anything else."""
    found: dict[str, ast.expr] = {}
    for statement in statements:
        match statement:
            case ast.Assign([ast.Name(name)], value) if name not in found:
                found[name] = value
            case _:
                return None
    return found


def _added(statement: ast.stmt) -> tuple[ast.expr, ast.expr, bool] | None:
    """(the sum or list, the term, whether it is appended to a list)."""
    match statement:
        case ast.AugAssign(target, ast.Add(), value) if dotted(target):
            return target, value, False
        case ast.Assign([target], ast.BinOp(left, ast.Add(), right)) if (name := dotted(target)) is not None:
            if dotted(left) == name:
                return target, right, False
            return (target, left, False) if dotted(right) == name else None
        case ast.Expr(ast.Call(ast.Attribute(target, "append"), [value], [])) if dotted(target):
            return target, value, True
        case _:
            return None


def _scaled(value: ast.expr, temporary: dict[str, ast.expr], changing: set[str]) -> tuple[ast.expr, ast.expr]:
    """The part of a term that is the loss, and the call it comes from; only constant factors may surround it."""
    while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        if is_pure(value.right) and not names_in(value.right) & changing:
            value = value.left
        elif isinstance(value.op, ast.Mult) and is_pure(value.left) and not names_in(value.left) & changing:
            value = value.right
        else:
            break
    call, seen = value, set[str]()
    while isinstance(call, ast.Name) and call.id in temporary and call.id not in seen:
        seen.add(call.id)
        call = temporary[call.id]
    return value, call


def _batched(
    context: Context,
    place: StatementPlace,
    loop: Loop,
    call: ast.expr,
    temporary: dict[str, ast.expr],
    written: set[str],
) -> _Batched | None:
    found = loss_call(context, place.scope, call, loop.names, temporary)
    if found is None:
        return None
    used = {*names_in(call), *(name for value in temporary.values() for name in names_in(value))}
    needed = names_in(found.logits.base) | names_in(found.targets.base)
    if (used | needed) & written or not _temporaries_serve(call, temporary):
        return None
    if any(not part.axis and is_list(place.scope, part.base) for part in (found.logits, found.targets)):
        return None
    expected = _expected(context, found)
    if expected is None:
        return None
    texts = [
        sliced(context, place, loop, part, each.dimensions[0] if len(each.dimensions) == 1 else None)
        for part, each in zip((found.logits, found.targets), expected, strict=True)
    ]
    if texts[0] is None or texts[1] is None:
        return None
    before, each, total = _form(context, found, texts[0][0], texts[1][0])
    assumptions = list(_assumptions(found, expected))
    bases = " and ".join(dict.fromkeys(f"`{one.expression}`" for one in expected))
    if loop.stop is None:
        assumptions.append(f"{bases} are equally long: the loop ended with the shorter one.")
    elif not (texts[0][1] and texts[1][1]):
        assumptions.append(f"{bases} have all positions of the loop, which failed where one was missing.")
    return _Batched(before, each, total, tuple(assumptions), expected, found.callee.criterion)


def _temporaries_serve(call: ast.expr, temporary: dict[str, ast.expr]) -> bool:
    """Whether the loss uses every temporary; another one would have to stay in the loop."""
    reached, todo = set[str](), [call]
    while todo:
        for name in names_in(todo.pop()) & temporary.keys() - reached:
            reached.add(name)
            todo.append(temporary[name])
    named = {name for name, value in temporary.items() if value is call}
    return reached | named == set(temporary)


def _expected(context: Context, found: LossCall) -> tuple[Expected, Expected] | None:
    """The numbers of dimensions of logits and targets, from how they are indexed; None if that is not understood."""
    logits, targets = found.logits, found.targets
    if logits.axis > 2 or targets.axis > 1 or (logits.axis == 2 and targets.axis != 1):
        return None
    of_logits: tuple[int, ...] = (3,) if logits.axis else (2, 3)
    of_targets: tuple[int, ...] = (2,) if targets.axis else (1, 2)
    if logits.after:
        of_logits = tuple(each for each in of_logits if each > logits.axis + logits.after)
    if targets.after:
        of_targets = tuple(each for each in of_targets if each > targets.axis + targets.after)
    if logits.axis or targets.axis or of_logits == (3,) or of_targets == (2,):
        of_logits, of_targets = ((3,) if 3 in of_logits else ()), ((2,) if 2 in of_targets else ())
    if not of_logits or not of_targets:
        return None
    names = context.source.of(logits.base), context.source.of(targets.base)
    return Expected(names[0], of_logits), Expected(names[1], of_targets)


def _form(context: Context, found: LossCall, x: str, y: str) -> tuple[tuple[str, ...], str, str]:
    """(statements, expression for the losses of all positions, expression for their sum)."""
    known = _expected(context, found)
    single = known is not None and len(known[0].dimensions) > 1
    per_position = 0 if found.targets.axis else 1
    rows = y
    if found.logits.axis != 2 and min(found.logits.axis, 1) != found.targets.axis:
        rows, per_position = f"{y}.transpose(0, 1)", 0 if found.logits.axis else 1
    flat_x = x if found.logits.axis == 2 else f"{x}.flatten(0, {-2 if single else 1})"
    flat_y = rows if found.logits.axis == 2 else f"{rows}.flatten()"
    arguments = [flat_x, flat_y, *found.callee.keywords, 'reduction="none"']
    if found.callee.reduction == "sum":
        callee, own = found.own
        plain = _called(callee, [flat_x, flat_y, *own])
        shaped = f".reshape(len({y}), -1)" if single else "" if found.logits.axis == 2 else f".view_as({rows})"
        return (), f"{found.spelled}({', '.join(arguments)}){shaped}.sum({per_position})", plain
    losses, counted = context.fresh("token_losses"), context.fresh("counted")
    call = _called(found.spelled, arguments, f"{losses} = ")
    ignored = found.callee.ignored
    mask = f"({rows} != {ignored}).reshape(len({y}), -1)" if single else f"{rows} != {ignored}"
    shaped = losses if found.logits.axis == 2 else f"{losses}.view_as({counted})"
    each_mean = f"({shaped}.sum({per_position}) / {counted}.sum({per_position}))"
    return (f"{losses} = {call}", f"{counted} = {mask}"), each_mean, f"{each_mean}.sum()"


def _called(callee: str, arguments: Sequence[str], before: str = "") -> str:
    line = f"{callee}({', '.join(arguments)})"
    if len(before) + len(line) <= _WIDTH:
        return line
    return f"{callee}(\n    {', '.join(arguments)}\n)"


def _assumptions(found: LossCall, expected: Sequence[Expected]) -> Iterator[str]:
    logits, targets = (each.expression for each in expected)
    yield f"`{targets}` holds class numbers, not a probability for each class."
    criterion = found.callee.criterion
    if criterion is not None and found.callee.made_at is not None:
        yield f"`{criterion.expression}` is the {criterion.kind} that line {found.callee.made_at} makes."
    if all(len(each.dimensions) == 1 for each in expected):
        words = {2: "two", 3: "three"}
        shapes = [f"`{each.expression}` has {words[each.dimensions[0]]} dimensions" for each in expected]
        yield f"{' and '.join(dict.fromkeys(shapes))}."
    else:
        yield f"`{logits}` has one dimension more than `{targets}`, and three at most."
    if not (found.logits.axis and found.targets.axis):
        bare = dict.fromkeys(
            each.expression for each, part in zip(expected, (found.logits, found.targets), strict=True) if not part.axis
        )
        are = "are tensors, not lists" if len(bare) > 1 else "is a tensor, not a list"
        yield f"{' and '.join(f'`{each}`' for each in bare)} {are}."


def _are_used_elsewhere(place: StatementPlace, loop: ast.For, names: set[str]) -> bool:
    """Whether a name that the loop binds is read outside of it, where no other loop has bound it."""
    inside = {id(node) for node in ast.walk(loop)}
    for node in ast.walk(place.scope.node):
        if isinstance(node, ast.For | ast.AsyncFor) and names_in(node.target) & names:
            inside |= {id(each) for part in (node.target, *node.body) for each in ast.walk(part)}
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            if any(names_in(each.target) & names for each in node.generators):
                inside |= {id(each) for each in ast.walk(node)}
        elif isinstance(node, ast.Global | ast.Nonlocal) and names.intersection(node.names):
            return True
    uses = (node for node in ast.walk(place.scope.node) if isinstance(node, ast.Name) and node.id in names)
    return any(not isinstance(node.ctx, ast.Store) and id(node) not in inside for node in uses)


def _of_list(
    context: Context,
    place: StatementPlace,
    loop: ast.For,
    target: ast.expr,
    term: tuple[ast.expr, ast.expr],
    batched: _Batched,
    layout: tuple[list[str], str],
) -> list[Edit]:
    """Replace the list with one tensor if every use of the list allows it; otherwise fill the list from the tensor."""
    (value, inner), (before, indent) = term, layout
    each = batched.each if inner is value else context.with_replaced(value, inner, batched.each)
    if inner is value and each.startswith("(") and each.endswith(")"):
        each = each[1:-1]
    name = dotted(target) or ""
    first = _empty_list(context, place, name)
    uses = _uses(context, place, loop, name) if first is not None else None
    if first is None or uses is None:
        losses = f"{name}.extend(({each}).unbind())"
        return [_lines(context, loop, [*before, f"{indent}{losses}"], indent)]
    edits = [Edit(*context.source.whole_lines(first), "")]
    edits.append(_lines(context, loop, [*before, f"{indent}{name} = {each}"], indent))
    return edits + [context.replaced(node, text) for node, text in uses]


def _empty_list(context: Context, place: StatementPlace, name: str) -> ast.stmt | None:
    """The statement that creates the list, before the loop in the same block, without uses in between."""
    statement = next((each for each in reversed(place.block[: place.index]) if name in names_in(each)), None)
    if statement is None or not place.scope.is_function:
        return None
    if context.source.indent(statement) is None or not context.source.ends_its_line(statement):
        return None
    match assigned(statement):
        case [ast.Name()], ast.List(elts=[]):
            return statement
        case _:
            return None


def _uses(context: Context, place: StatementPlace, loop: ast.For, name: str) -> list[tuple[ast.expr, str]] | None:
    """The function's other uses of the list, each with its form for a tensor; None if one has no such form."""
    if is_unplaced(place.scope.node, name):
        return None
    replaced: list[tuple[ast.expr, str]] = []
    inside = {id(node) for node in ast.walk(loop)}
    nodes = list(ast.walk(place.scope.node))
    uses = [each for each in nodes if isinstance(each, ast.Name) and each.id == name and id(each) not in inside]
    loads = sum(isinstance(each.ctx, ast.Load) for each in uses)
    for node in nodes:
        if not isinstance(node, ast.Call) or node.lineno <= (loop.end_lineno or loop.lineno):
            continue
        match node:
            case ast.Call(ast.Name("sum"), [ast.Name(summed)], []) if summed == name:
                replaced.append((node, f"{name}.sum()"))
            case ast.Call(ast.Name("len"), [ast.Name(counted)], []) if counted == name:
                replaced.append((node, context.source.of(node)))
            case ast.Call(args=[first, *_]) if dotted(first) == name and _is_stack(context, place, node):
                replaced.append((node, name))
    return replaced if len(uses) - loads == 1 and loads == len(replaced) else None


def _is_stack(context: Context, place: StatementPlace, call: ast.Call) -> bool:
    """Whether the call is torch.stack(list) along the first dimension."""
    if context.names.meaning(call.func, place.scope) != "torch.stack":
        return False
    dimensions = [*call.args[1:], *(each.value for each in call.keywords if each.arg == "dim")]
    return len(dimensions) == len(call.args) - 1 + len(call.keywords) and all(
        whole_number(each) == 0 for each in dimensions
    )


def _lines(context: Context, loop: ast.stmt, lines: Sequence[str], indent: str) -> Edit:
    return context.replaced(loop, _joined(context, lines).removeprefix(indent))


def _joined(context: Context, lines: Sequence[str]) -> str:
    return context.source.line_end.join(lines)


def _indented(text: str, indent: str) -> list[str]:
    return [f"{indent}{line}" for line in text.split("\n")]
