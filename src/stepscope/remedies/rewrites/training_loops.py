"""Replace statements of training loops that have a faster form: reads that wait, zeroed gradients, debugging aids."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Final

from stepscope.remedies.rewrites.context import (
    Context,
    Edit,
    Rewrite,
    StatementPlace,
    assigned,
    bindings,
    dotted,
    is_pure,
    is_unplaced,
    names_in,
    whole_number,
)

_COMMENT = re.compile(r"#[^\r\n]*")


def literal_keywords(call: ast.Call) -> dict[str, ast.expr] | None:
    """The call's keywords; None if some are unpacked from a dictionary, or arguments from a list."""
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    is_literal = len(named) == len(call.keywords) and not any(isinstance(each, ast.Starred) for each in call.args)
    return named if is_literal else None


def is_constant(node: ast.expr | None, *values: object) -> bool:
    """Whether the expression is one of these literals; True does not equal 1 here."""
    return isinstance(node, ast.Constant) and any(
        node.value == value and type(node.value) is type(value) for value in values
    )


def with_keywords(context: Context, call: ast.Call, added: Mapping[str, str]) -> Edit | None:
    """The edit that adds keywords after the last argument; None if its end is unclear."""
    source = context.source
    end = source.span(call)[1]
    text = ", ".join(f"{name}={value}" for name, value in added.items())
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    if not arguments:
        return Edit(end - 1, end - 1, text) if re.search(r"\(\s*\)$", source.text[:end]) else None
    last = max(arguments, key=lambda each: source.span(each)[1])
    start, at = source.span(last)
    rest = _COMMENT.sub("", source.text[at:end]).split()
    if isinstance(last, ast.GeneratorExp) or "".join(rest) not in (")", ",)"):
        return None
    line = source.before(last)
    if line.strip() or not isinstance(last, ast.keyword) or len(arguments) == 1:
        return Edit(at, at, f", {text}")
    # One argument a line: insert before the last one, so that a comment behind that stays with it.
    return Edit(start, start, "".join(f"{name}={value},{source.line_end}{line}" for name, value in added.items()))


NON_BLOCKING: Final = "non-blocking"
ZERO_GRAD: Final = "zero-grad"
NO_DEBUG: Final = "no-debug"
ON_DEVICE: Final = "tensor-on-device"

_MADE: Final = ("zeros", "ones", "full", "arange", "empty", "eye", "linspace", "tensor")
_KEEPS_ON_HOST: Final = {"device", "pin_memory", "requires_grad", "out"}
"""Keywords for which it matters that the tensor is first created on the host."""
_LOADERS: Final = ("load", "batch", "data", "dl")
_ANOMALY: Final = ("torch.autograd.set_detect_anomaly", "torch.autograd.anomaly_mode.set_detect_anomaly")
_DETECT: Final = ("torch.autograd.detect_anomaly", "torch.autograd.anomaly_mode.detect_anomaly")


def find_copies(context: Context) -> Iterator[Rewrite]:
    """Find `.to(device)` and `.cuda()` of what a loop takes from a loader."""
    for place, call in context.calls:
        function = call.func
        if not isinstance(function, ast.Attribute) or not _goes_to_device(call):
            continue
        loops = [each for each in place.around if isinstance(each, ast.For) and _is_of_loader(each.iter)]
        taken = {name for loop in loops for name in names_in(loop.target)}
        root = function.value
        while isinstance(root, ast.Subscript | ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in taken:
            continue
        edit = with_keywords(context, call, {"non_blocking": "True"})
        if edit is not None:
            yield context.rewrite(
                NON_BLOCKING,
                call,
                place.scope,
                "Copies the batch while the host continues, which needs a DataLoader with pin_memory=True.",
                [edit],
                [f"`{context.source.of(function.value)}` comes from the host, and is not changed right afterwards."],
            )


def find_zeroed(context: Context) -> Iterator[Rewrite]:
    """Find gradients that are filled with zeros instead of dropped."""
    sentence = "Drops the gradients instead of filling them with zeros, so that the backward pass need not add to them."
    assumption = "Nothing reads a gradient between this and the backward pass; what gets none in a step is not updated."
    for place, call in context.calls:
        match call:
            case ast.Call(ast.Attribute(attr="zero_grad"), [ast.Constant(False)], []):
                pass
            case ast.Call(ast.Attribute(attr="zero_grad"), [], [ast.keyword("set_to_none", ast.Constant(False))]):
                pass
            case _:
                continue
        edit = context.replaced(call, f"{context.source.of(call.func)}()")
        yield context.rewrite(ZERO_GRAD, call, place.scope, sentence, [edit], [assumption])
    for place in context.places:
        owner = _zeroing_loop(place.statement)
        if owner is not None and context.source.indent(place.statement) is not None:
            edit = context.replaced(place.statement, f"{context.source.of(owner)}.zero_grad()")
            if not context.source.comments(place.statement):
                yield context.rewrite(ZERO_GRAD, place.statement, place.scope, sentence, [edit], [assumption])


def find_debugging(context: Context) -> Iterator[Rewrite]:
    """Find anomaly detection that was left on."""
    for place, call in context.calls:
        name = context.names.meaning(call.func, place.scope)
        sentence = "Turns anomaly detection off: turn it on for a few steps when a NaN has to be found."
        edit: Edit | None = None
        modes = [*call.args[:1], *(each.value for each in call.keywords if each.arg == "mode")]
        if name in _ANOMALY and len(modes) == 1 and is_constant(modes[0], True):
            edit = context.replaced(modes[0], "False")
        elif name in _DETECT and isinstance(place.statement, ast.With | ast.AsyncWith):
            spelled = context.names.spelling("torch.autograd.set_detect_anomaly", place.scope)
            edit = context.replaced(call, f"{spelled}(False)") if spelled is not None else None
        if edit is not None:
            yield context.rewrite(NO_DEBUG, call, place.scope, sentence, [edit])


def find_host_made(context: Context) -> Iterator[Rewrite]:
    """Find `torch.zeros(...).to(device)`: a tensor that could be created on the device."""
    for place, call in context.calls:
        made = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(made, ast.Call) or not _goes_to_device(call):
            continue
        name = context.names.meaning(made.func, place.scope) or ""
        given = literal_keywords(made)
        if not name.startswith("torch.") or name.removeprefix("torch.") not in _MADE or given is None:
            continue
        device = context.source.of(call.args[0]) if call.args else '"cuda"'
        ready = with_keywords(context, made, {"device": device})
        if given.keys() & _KEEPS_ON_HOST or ready is None:
            continue
        rest = Edit(context.source.span(made)[1], context.source.span(call)[1], "")
        yield context.rewrite(
            ON_DEVICE, call, place.scope, "Makes the tensor on the device instead of copying it there.", [ready, rest]
        )


def _goes_to_device(call: ast.Call) -> bool:
    """Whether the call is `.cuda()`, or `.to(...)` with an argument that may be a device other than the host."""
    match call:
        case ast.Call(ast.Attribute(attr="cuda"), [], []):
            return True
        case ast.Call(ast.Attribute(attr="to"), [ast.Constant(value)], []):
            return isinstance(value, str) and value.split(":")[0] != "cpu"
        case ast.Call(ast.Attribute(attr="to"), [device], []):
            last = (dotted(device) or "").rpartition(".")[2].lower()
            return last in ("device", "dev", "local_rank", "rank", "gpu")
        case _:
            return False


def _is_of_loader(iterated: ast.expr) -> bool:
    """Whether the name of the iterable suggests a loader; in enumerate() or tqdm(), too."""
    while isinstance(iterated, ast.Call):
        name = dotted(iterated.func) or ""
        if any(word in name.rpartition(".")[2].lower() for word in _LOADERS):
            return True
        if not iterated.args:
            return False
        iterated = iterated.args[0]
    return any(word in (dotted(iterated) or "").rpartition(".")[2].lower() for word in _LOADERS)


def _zeroing_loop(statement: ast.stmt) -> ast.expr | None:
    """The module or optimizer of a loop `for p in x.parameters(): p.grad.zero_()`; None for anything else."""
    match statement:
        case ast.For(ast.Name(name), ast.Call(ast.Attribute(owner, "parameters"), [], []), body, []) if is_pure(owner):
            pass
        case _:
            return None
    match body:
        case [ast.If(ast.Compare(test, [ast.IsNot()], [ast.Constant(None)]), inner, [])] if _is_gradient(test, name):
            body = inner
        case [ast.If(test, inner, [])] if _is_gradient(test, name):
            body = inner
    zeroing = {f"{name}.grad.zero_", f"{name}.grad.data.zero_"}
    calls = [each.value for each in body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    names = {dotted(each.func) for each in calls if not each.args and not each.keywords}
    if len(calls) != len(body) or not names <= {*zeroing, f"{name}.grad.detach_"}:
        return None
    return owner if zeroing & names and not any(each.args or each.keywords for each in calls) else None


def _is_gradient(node: ast.expr, name: str) -> bool:
    return dotted(node) == f"{name}.grad"


LOADER: Final = "loader-settings"
OPTIMIZER: Final = "fuse-optimizer"
DATA_PARALLEL: Final = "data-parallel-settings"

_FUSED: Final = ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adagrad")
"""Optimizers with a fused kernel since torch 2.4 or before."""
_FOREACH: Final = tuple(
    f"torch.optim.{name}" for name in ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
)
_OF_LOADERS: Final = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
_OF_WORKERS: Final = ("prefetch_factor", "persistent_workers")
_OF_DATA_PARALLEL: Final = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
_NOT_FUSED: Final = ast.Constant(False)
_POSITIONAL: Final = 5
"""Arguments of a DataLoader before num_workers."""


def find_loaders(context: Context) -> Iterator[Rewrite]:
    """Find DataLoaders without the wanted settings."""
    wanted = {name: value for name, value in context.settings.items() if name in _OF_LOADERS}
    for place, call in context.calls if wanted else ():
        name, given = context.names.meaning(call.func, place.scope), literal_keywords(call)
        if name != "torch.utils.data.DataLoader" or len(call.args) > _POSITIONAL or given is None:
            continue
        new = _of_loader(wanted, given, is_iterable="IterableDataset" in context.every_name)
        edits = _edits(context, call, given, new)
        if edits:
            assumptions = ["Random numbers that samples draw may differ in worker processes."] * ("num_workers" in new)
            if new.get("persistent_workers") == "True":
                assumptions.append("The dataset stays the same from epoch to epoch.")
            sentence = f"Makes the DataLoader with {', '.join(f'{key}={value}' for key, value in new.items())}."
            yield context.rewrite(LOADER, call, place.scope, sentence, edits, assumptions)


def find_optimizers(context: Context) -> Iterator[Rewrite]:
    """Find torch optimizers that update one parameter after another, or by lists where one kernel could."""
    for place, call in context.calls:
        name, given = context.names.meaning(call.func, place.scope), literal_keywords(call)
        if given is None or not (call.args or "params" in given):
            continue
        if is_constant(given.get("differentiable"), True) or not is_constant(given.get("fused", _NOT_FUSED), False):
            continue
        edit: Edit | None = None
        if name in _FUSED:
            replaced = next((each for each in call.keywords if each.arg in ("fused", "foreach")), None)
            both = {"fused", "foreach"} <= given.keys()
            if replaced is None:
                edit = with_keywords(context, call, {"fused": "True"})
            elif not both:
                edit = Edit(*context.source.span(replaced), "fused=True")
            sentence = "Updates all parameters in one fused call; the update is the same."
            assumption = "All parameters are floating point and on devices that have the fused kernel."
        elif name in _FOREACH and is_constant(given.get("foreach"), False):
            edit = context.replaced(given["foreach"], "True")
            sentence = "Updates all parameters by operators over lists of tensors; the update is the same."
            assumption = "There is memory for one more copy of the parameters' intermediate results."
        if edit is not None:
            yield context.rewrite(OPTIMIZER, call, place.scope, sentence, [edit], [assumption])


def find_data_parallel(context: Context) -> Iterator[Rewrite]:
    """Find DistributedDataParallel without the wanted settings."""
    wanted = {name: value for name, value in context.settings.items() if name in _OF_DATA_PARALLEL}
    for place, call in context.calls if wanted else ():
        name, given = context.names.meaning(call.func, place.scope), literal_keywords(call)
        if name != "torch.nn.parallel.DistributedDataParallel" or given is None:
            continue
        new = {
            key: value
            for key, value in wanted.items()
            if (key in given and isinstance(given[key], ast.Constant) and context.source.of(given[key]) != value)
            or (key not in given and key != "find_unused_parameters")
        }
        edits = _edits(context, call, given, new)
        if edits:
            assumptions = {
                "find_unused_parameters": "Every parameter gets a gradient in every step.",
                "static_graph": "Every step uses the same parameters in the same order.",
                "gradient_as_bucket_view": "Nothing calls detach_() on gradients.",
            }
            sentence = f"Sets {', '.join(f'{key}={value}' for key, value in new.items())}."
            found = [text for key, text in assumptions.items() if key in new]
            yield context.rewrite(DATA_PARALLEL, call, place.scope, sentence, edits, found)


def _of_loader(wanted: Mapping[str, str], given: Mapping[str, ast.expr], *, is_iterable: bool) -> dict[str, str]:
    """The keywords to set: those that are absent, or given as another literal."""
    new: dict[str, str] = {}
    before = whole_number(given["num_workers"]) if "num_workers" in given else 0
    workers = before
    if "num_workers" in wanted and before is not None and not is_iterable and wanted["num_workers"] != str(before):
        new["num_workers"] = wanted["num_workers"]
        workers = int(new["num_workers"]) if new["num_workers"].isdecimal() else None
        if workers == 0 and given.keys() & {*_OF_WORKERS, "multiprocessing_context", "timeout"}:
            return {}
    for name in ("prefetch_factor", "persistent_workers", "pin_memory"):
        if name not in wanted or (name in _OF_WORKERS and not workers):
            continue
        value = given.get(name)
        if value is None or (isinstance(value, ast.Constant) and str(value.value) != wanted[name]):
            new[name] = wanted[name]
    return new


def _edits(context: Context, call: ast.Call, given: Mapping[str, ast.expr], new: Mapping[str, str]) -> list[Edit]:
    edits = [context.replaced(given[name], value) for name, value in new.items() if name in given]
    added = {name: value for name, value in new.items() if name not in given}
    more = with_keywords(context, call, added) if added else None
    if added and more is None:
        return []
    return [*edits, *([more] if more is not None else [])]


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


def _history(context: Context, place: StatementPlace, outermost: ast.stmt) -> Rewrite | None:
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


def _sum(context: Context, place: StatementPlace) -> Rewrite | None:
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


def _is_changed_in_place(place: StatementPlace, name: str) -> bool:
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


def _is_conditional(place: StatementPlace) -> bool:
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


def _assignments(place: StatementPlace, name: str) -> list[tuple[int, ast.expr]]:
    """(line, value) of each plain assignment of a name in the function."""
    found = []
    for node in ast.walk(place.scope.node):
        targets, value = assigned(node)
        if value is not None and [dotted(each) for each in targets] == [name]:
            found.append((targets[0].lineno, value))
    return found


def _is_own_list(place: StatementPlace, name: str, outermost: ast.stmt) -> bool:
    """Whether the function creates the list empty before the loop, and no other code can see it until then."""
    made = _assignments(place, name)
    if len(made) != 1 or len(bindings(place.scope, name)) != 1 or _is_seen_elsewhere(place, name):
        return False
    line, value = made[0]
    if not isinstance(value, ast.List) or value.elts or line >= outermost.lineno:
        return False
    uses = (node for node in ast.walk(place.scope.node) if isinstance(node, ast.Name) and node.id == name)
    return not any(line < node.lineno < outermost.lineno for node in uses)


def _is_seen_elsewhere(place: StatementPlace, name: str) -> bool:
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


def _reads(place: StatementPlace, name: str) -> list[ast.expr] | None:
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
