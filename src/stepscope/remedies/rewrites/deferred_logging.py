"""Defer numbers that every step reads from the device for a history or a sum, until they are needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stepscope.remedies.rewrites.context import Context, Edit, Rewrite, bindings
from stepscope.remedies.rewrites.source_text import Place, assigned, dotted, is_unplaced, names_in

NAME: Final = "deferred-logging"


def find(context: Context) -> Iterator[Rewrite]:
    """Find `history.append(loss.item())` and `running += loss.item()` in loops of functions or of the module itself."""
    for place in context.places:
        outermost = next((each for each in place.around if isinstance(each, ast.For | ast.While)), None)
        in_class = isinstance(place.scope.node, ast.ClassDef)
        if outermost is None or in_class or _is_conditional(place):
            continue
        for found in (_history(context, place, outermost), _sum(context, place)):
            if found is not None:
                yield found


def _history(context: Context, place: Place, outermost: ast.stmt) -> Rewrite | None:
    """A list that the loop only appends to, and that is read after it."""
    statement = place.statement
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name() as name, "append"), [appended], [])):
            value = _read(appended)
        case _:
            return None
    indent = context.source.indent(outermost)
    if value is None or indent is None or _leaves(outermost):
        return None
    if any(hasattr(each, "finalbody") for each in place.around):  # try, and the except* of later Pythons
        return None  # the list may be read after an exception, too
    if _is_changed_in_place(place, value):
        return None  # all kept numbers would become the last one
    uses, filled = [], set[int]()
    for node in ast.walk(outermost):
        match node:
            case ast.Name() if node.id == name.id:
                uses.append(node)
            case ast.Call(func=ast.Attribute(owner, "append" | "extend")):
                filled.add(id(owner))
    if not all(id(use) in filled for use in uses) or not _is_own_list(place, name.id, outermost):
        return None
    end = context.source.whole_lines(outermost)[1]
    line_end = context.source.line_end
    before = "" if end == 0 or context.source.text[end - 1] in "\r\n" else line_end
    number = "number.item()"
    if len(uses) > 1:  # other values put there may be read already
        is_tensor = context.names.spelling("torch.is_tensor", place.scope)
        if is_tensor is None:
            return None
        number = f"number.item() if {is_tensor}(number) else number"
    reading = f"{before}{indent}{name.id} = [{number} for number in {name.id}]{line_end}"
    edits = [context.replaced(appended, f"{value}.detach()"), Edit(end, end, reading)]
    return context.rewrite(
        NAME,
        statement,
        place.scope,
        "Keeps the numbers on the device in the loop, and reads them all after it.",
        edits,
        [
            "Each step's number stays in the device's memory until the loop ends, 512 bytes of it.",
            f"`{value}` is a tensor, and is not changed in place afterwards.",
        ],
    )


def _sum(context: Context, place: Place) -> Rewrite | None:
    """A number that every step adds to, and that is read in some of them or after the loop."""
    statement = place.statement
    match statement:
        case ast.AugAssign(ast.Name() as target, ast.Add(), added):
            value = _read(added)
        case _:
            return None
    if value is None:
        return None
    starts = _assignments(place, target.id)
    if not starts or not all(_is_zero(start, may_be_whole="loss" in value) for _, start in starts):
        return None  # a sum of integers, such as of right answers, would become a float
    if len(bindings(place.scope, target.id)) != len(starts) + 1:
        return None  # other code writes to it
    reads = _reads(place, target.id)
    if reads is None:
        return None
    edits = [context.replaced(added, f"{value}.detach().float()")]
    edits += [context.replaced(each, f"float({target.id})") for each in reads]
    return context.rewrite(
        NAME,
        statement,
        place.scope,
        "Adds up on the device, and reads the sum where it is used.",
        edits,
        [f"`{value}` is a tensor.", f"`{target.id}` is added up in 32 bits: Python's numbers have 64."],
    )


def _is_changed_in_place(place: Place, name: str) -> bool:
    """Whether the loop changes the tensor in place after its number is kept, or reuses one tensor in every step."""
    innermost = next(each for each in reversed(place.around) if isinstance(each, ast.For | ast.While))
    made, changed = list[int](), list[int]()
    for node in ast.walk(innermost):
        match node:
            case ast.AugAssign(target) if dotted(target) == name:
                changed.append(node.lineno)
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                targets = (each for target in assigned(node)[0] for each in ast.walk(target))
                made += [node.lineno for each in targets if dotted(each) == name]
            case ast.Call(func=ast.Attribute(owner, method)) if dotted(owner) == name:
                if method.endswith("_") and not method.endswith("__"):
                    changed.append(node.lineno)
            case ast.keyword("out", value) if dotted(value) == name:
                changed.append(value.lineno)
    read = place.statement.lineno
    return any(each >= read for each in changed) or (bool(changed) and not any(each < read for each in made))


def _read(value: ast.expr) -> str | None:
    """The name whose number is read by .item(); None for anything else."""
    match value:
        case ast.Call(ast.Attribute(read, "item"), [], []):
            return dotted(read)
        case _:
            return None


def _is_conditional(place: Place) -> bool:
    """Whether the statement runs in some iterations of the innermost loop around it, and not in others."""
    inside: list[ast.stmt] = []
    for each in reversed(place.around):
        if isinstance(each, ast.For | ast.While):
            names = (node for node in ast.walk(each) if isinstance(node, ast.Name))
            written = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
            return any(
                not isinstance(one, ast.With) and not (isinstance(one, ast.If) and _is_constant(one.test, written))
                for one in inside
            )
        inside.append(each)
    return True


def _is_constant(test: ast.expr, written: set[str]) -> bool:
    """Whether a condition is a name or attribute that the loop does not write, such as an option of the program."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    name = dotted(test)
    return name is not None and name.split(".")[0] not in written


def _leaves(loop: ast.stmt) -> bool:
    """Whether the function may be left inside the loop, which skips the code after it."""
    return any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(loop))


def _assignments(place: Place, name: str) -> list[tuple[int, ast.expr]]:
    """(line, value) of each plain assignment of a name in the function."""
    found = []
    for node in ast.walk(place.scope.node):
        targets, value = assigned(node)
        if value is not None and [dotted(each) for each in targets] == [name]:
            found.append((targets[0].lineno, value))
    return found


def _is_own_list(place: Place, name: str, outermost: ast.stmt) -> bool:
    """Whether the function creates the list empty before the loop, and no other code can see it until then."""
    made = _assignments(place, name)
    if len(made) != 1 or len(bindings(place.scope, name)) != 1 or _is_seen_elsewhere(place, name):
        return False
    line, value = made[0]
    if not isinstance(value, ast.List) or value.elts or line >= outermost.lineno:
        return False
    uses = (node for node in ast.walk(place.scope.node) if isinstance(node, ast.Name) and node.id == name)
    return not any(line < node.lineno < outermost.lineno for node in uses)


def _is_seen_elsewhere(place: Place, name: str) -> bool:
    """Whether a nested function reads the name, or it is not a local variable at all."""
    for node in ast.walk(place.scope.node):
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda)
        if inner and node is not place.scope.node and name in names_in(node):
            return True
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return True
    return False


def _is_zero(value: ast.expr, *, may_be_whole: bool) -> bool:
    types = (int, float) if may_be_whole else (float,)
    return isinstance(value, ast.Constant) and type(value.value) in types and value.value == 0


def _reads(place: Place, name: str) -> list[ast.expr] | None:
    """Where the sum is read; None if that is in every step, or outside of the function."""
    if _is_seen_elsewhere(place, name) or is_unplaced(place.scope.node, name):
        return None
    uses = (node for node in ast.walk(place.scope.node) if isinstance(node, ast.Name) and node.id == name)
    found: list[ast.expr] = [node for node in uses if isinstance(node.ctx, ast.Load)]
    innermost = next(each for each in reversed(place.around) if isinstance(each, ast.For | ast.While))
    in_step = {id(node) for node in ast.walk(innermost)}
    rarely: set[int] = set()
    for each in ast.walk(innermost):
        if isinstance(each, ast.If):
            rarely |= {id(node) for statement in [*each.body, *each.orelse] for node in ast.walk(statement)}
    return None if any(id(node) in in_step and id(node) not in rarely for node in found) else found
