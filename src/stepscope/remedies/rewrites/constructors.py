"""Arguments of DataLoaders, optimizers and DistributedDataParallel."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

from stepscope.remedies.rewrites.calls import calls_of, is_constant, literal_keywords, with_keywords
from stepscope.remedies.rewrites.context import Context
from stepscope.remedies.rewrites.kinds import Edit, Rewrite
from stepscope.remedies.rewrites.source_text import whole_number

LOADER: Final = "loader-settings"
OPTIMIZER: Final = "fuse-optimizer"
DATA_PARALLEL: Final = "data-parallel-settings"

_FUSED: Final = ("torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adagrad")
"""Those that have a fused kernel since torch 2.4 or before."""
_FOREACH: Final = (
    "torch.optim.RMSprop",
    "torch.optim.Adadelta",
    "torch.optim.Adamax",
    "torch.optim.NAdam",
    "torch.optim.RAdam",
    "torch.optim.Rprop",
    "torch.optim.ASGD",
)
_OF_LOADERS: Final = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
_OF_WORKERS: Final = ("prefetch_factor", "persistent_workers")
_OF_DATA_PARALLEL: Final = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
_NOT_FUSED: Final = ast.Constant(False)
_POSITIONAL: Final = 5
"""Arguments of a DataLoader before num_workers."""


def find_loaders(context: Context) -> Iterator[Rewrite]:
    """DataLoaders without the settings that are wanted."""
    wanted = {name: value for name, value in context.settings.items() if name in _OF_LOADERS}
    for place, call, name in calls_of(context) if wanted else ():
        if name != "torch.utils.data.DataLoader" or len(call.args) > _POSITIONAL:
            continue
        given = literal_keywords(call)
        if given is None:
            continue
        new = _of_loader(wanted, given, is_iterable="IterableDataset" in context.every_name)
        edits = _edits(context, call, given, new)
        if edits:
            assumptions = ["Random numbers that samples draw may be others in worker processes."] * (
                "num_workers" in new
            )
            if new.get("persistent_workers") == "True":
                assumptions.append("The dataset stays the same from epoch to epoch.")
            sentence = f"Makes the DataLoader with {', '.join(f'{key}={value}' for key, value in new.items())}."
            yield context.rewrite(LOADER, call, place.scope, sentence, edits, assumptions)


def find_optimizers(context: Context) -> Iterator[Rewrite]:
    """Optimizers of torch that update one parameter after another, or by lists where one kernel could."""
    for place, call, name in calls_of(context):
        given = literal_keywords(call)
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
    """DistributedDataParallel without the settings that are wanted."""
    wanted = {name: value for name, value in context.settings.items() if name in _OF_DATA_PARALLEL}
    for place, call, name in calls_of(context) if wanted else ():
        given = literal_keywords(call)
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
    """The keywords to set: those that are absent, or literal and otherwise."""
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
