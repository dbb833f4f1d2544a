"""Statements of training loops that have a faster form: copies that wait, zeroed gradients, debugging aids."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stepscope.remedies.rewrites.calls import calls_of, is_constant, literal_keywords, with_keywords
from stepscope.remedies.rewrites.context import Context
from stepscope.remedies.rewrites.kinds import Edit, Rewrite
from stepscope.remedies.rewrites.source_text import dotted, is_pure, names_in

NON_BLOCKING: Final = "non-blocking"
ZERO_GRAD: Final = "zero-grad"
NO_DEBUG: Final = "no-debug"
ON_DEVICE: Final = "tensor-on-device"

_HOST: Final = ("cpu",)
_MADE: Final = ("zeros", "ones", "full", "arange", "empty", "eye", "linspace", "tensor")
_KEEPS_ON_HOST: Final = {"device", "pin_memory", "requires_grad", "out"}
"""Keywords with which the tensor that is made first counts by itself."""
_LOADERS: Final = ("load", "batch", "data", "dl")
_ANOMALY: Final = (
    "torch.autograd.set_detect_anomaly",
    "torch.autograd.anomaly_mode.set_detect_anomaly",
)
_DETECT: Final = ("torch.autograd.detect_anomaly", "torch.autograd.anomaly_mode.detect_anomaly")


def find_copies(context: Context) -> Iterator[Rewrite]:
    """`.to(device)` and `.cuda()` of what a loop takes from a loader."""
    for place, call, _ in calls_of(context):
        function = call.func
        if not isinstance(function, ast.Attribute) or not (_is_to_device(call) or _is_cuda(call)):
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
                "Copies the batch while the host goes on; that takes a DataLoader with pin_memory=True.",
                [edit],
                [f"`{context.source.of(function.value)}` comes from the host, and is not changed there right after."],
            )


def find_zeroed(context: Context) -> Iterator[Rewrite]:
    """Gradients that are filled with zeros instead of dropped."""
    sentence = "Drops the gradients instead of filling them with zeros, so that the backward pass need not add to them."
    assumption = "Nothing reads a gradient between this and the backward pass; what gets none in a step is not updated."
    for place, call, _ in calls_of(context):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad"):
            continue
        given = [*call.args, *(each.value for each in call.keywords)]
        named = [each.arg for each in call.keywords]
        if len(given) == 1 and is_constant(given[0], False) and named in ([], ["set_to_none"]):
            edit = context.replaced(call, f"{context.source.of(call.func)}()")
            yield context.rewrite(ZERO_GRAD, call, place.scope, sentence, [edit], [assumption])
    for place in context.places:
        owner = _zeroing_loop(place.statement)
        if owner is not None and context.source.indent(place.statement) is not None:
            edit = context.replaced(place.statement, f"{context.source.of(owner)}.zero_grad()")
            if not context.source.comments(place.statement):
                yield context.rewrite(ZERO_GRAD, place.statement, place.scope, sentence, [edit], [assumption])


def find_debugging(context: Context) -> Iterator[Rewrite]:
    """Anomaly detection that was left on."""
    for place, call, name in calls_of(context):
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
    """`torch.zeros(...).to(device)`: a tensor that could be made where it is used."""
    for place, call, _ in calls_of(context):
        made = call.func.value if isinstance(call.func, ast.Attribute) else None
        if not isinstance(made, ast.Call) or not (_is_to_device(call) or _is_cuda(call)):
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


def _is_to_device(call: ast.Call) -> bool:
    """Whether the call is `.to(device)` and no more, to anything but surely the host or surely no device."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "to") or len(call.args) != 1 or call.keywords:
        return False
    device = call.args[0]
    if isinstance(device, ast.Constant):
        return isinstance(device.value, str) and device.value.split(":")[0] not in _HOST
    name = dotted(device)
    return name is not None and name.rpartition(".")[2].lower() in ("device", "dev", "local_rank", "rank", "gpu")


def _is_cuda(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.args and not call.keywords


def _is_of_loader(iterated: ast.expr) -> bool:
    """Whether the name of what is iterated tells that it is a loader's batches; in enumerate() or tqdm(), too."""
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
    if not isinstance(statement, ast.For) or statement.orelse or not isinstance(statement.target, ast.Name):
        return None
    iterated, name = statement.iter, statement.target.id
    if not (isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Attribute)):
        return None
    if iterated.func.attr != "parameters" or iterated.args or iterated.keywords or not is_pure(iterated.func.value):
        return None
    body = statement.body
    if len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse and _is_there(body[0].test, name):
        body = body[0].body
    zeroing = {f"{name}.grad.zero_", f"{name}.grad.data.zero_"}
    calls = [each.value for each in body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    names = [dotted(each.func) for each in calls if not each.args and not each.keywords]
    if len(names) != len(body) or not names or not set(names) <= {*zeroing, f"{name}.grad.detach_"}:
        return None
    return iterated.func.value if zeroing & set(names) else None


def _is_there(test: ast.expr, name: str) -> bool:
    """Whether the condition is that the gradient is there."""
    if isinstance(test, ast.Compare):
        right = test.comparators[0] if len(test.comparators) == 1 else None
        return dotted(test.left) == f"{name}.grad" and isinstance(test.ops[0], ast.IsNot) and is_constant(right, None)
    return dotted(test) == f"{name}.grad"
