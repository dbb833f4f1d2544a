"""Report how long a model would take to answer on each device, and what that rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl

from stepscope.predict.model_shape import ModelShape
from stepscope.predict.serving import HOST_NS, PassTime, ServingPrediction, ServingRequest
from stepscope.report.document import Document, Items, Section, Table, fields, section_if, sentences, stamped, texts
from stepscope.report.format import count, duration, file_name, size
from stepscope.report.predict import range_text

_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    "devices": pl.String,
    "first_token": pl.String,
    "each_token": pl.String,
    "answer": pl.String,
    "tokens_per_s": pl.Float64,
    "at_once": pl.Int64,
}
_LINK: Final = "communication"


def serving_document(
    path: str, model: ModelShape, request: ServingRequest, found: Sequence[ServingPrediction]
) -> Document:
    """The times on each device, the quickest answer first.

    Args:
        path: of the model's configuration.
    """
    rows = sorted(found, key=_order)
    times = pl.DataFrame([_row(each) for each in rows], schema=_COLUMNS)
    notes = tuple(_notes(rows))
    head = (
        f"{file_name(path)}: {count(model.parameters / 1e9)} billion weights in {model.layers} layers, "
        f"{request.weights or model.weights}. {_asked(request)}. {_memory(rows)}."
    )
    what = "What answers would take, and where nine of ten should lie"
    blocks = (
        Section("", texts(head), is_quiet=True),
        Section(what, (Table(times, "devices", len(rows)), *texts(_meaning(request)))),
        *_parts(rows),
        *section_if("", *((Items(notes),) if notes else ()), is_quiet=True),
    )
    return Document("serving", blocks)


def _meaning(request: ServingRequest) -> str:
    host = f"Nothing is added for the host, but up to {duration(HOST_NS)} of each pass to the ranges"
    if request.host_ns is not None:
        host = f"Each pass waits {duration(request.host_ns)} for the host, as given"
    return (
        "first token: from the prompts, all at once, to a token of each; each token: the mean of the further ones; "
        "answer: of a batch that starts together; tokens per s: with a new request for each that ends; at once: how "
        f"many such requests fit beside the weights. {host}. Queues and the server are not counted."
    )


def _asked(request: ServingRequest) -> str:
    requests = "1 request" if request.batch == 1 else f"{count(request.batch)} requests at once"
    return f"{requests}, {count(request.prompt)} tokens in and {count(request.output)} out"


def _memory(found: Sequence[ServingPrediction]) -> str:
    """The weights and the cache, which are the same on every device but for the cache's number type."""
    caches = {each.cache_bytes for each in found}
    cache = size(min(caches)) if len(caches) == 1 else f"{size(min(caches))} to {size(max(caches))}"
    where = "Each device holds" if found[0].request.devices > 1 else "They take"
    return f"{where} {size(found[0].weight_bytes)} of weights and {cache} of keys and values"


def _order(each: ServingPrediction) -> tuple[bool, bool, float, str]:
    total = each.total
    return total is None, each.fits is False, 0.0 if total is None else total[0], each.device.name


def _row(each: ServingPrediction) -> dict[str, Any]:
    row: dict[str, Any] = {"devices": _name(each), "at_once": each.most_requests}
    if each.fits is False:
        return {**row, "first_token": "does not fit"}
    if each.prefill is None or each.decode is None or each.total is None:
        return {**row, "first_token": "not given"}
    return {
        **row,
        "first_token": _with_range(each.prefill),
        "each_token": _with_range(each.decode),
        "answer": duration(each.total[0]),
        "tokens_per_s": each.tokens_per_s,
    }


def _name(each: ServingPrediction) -> str:
    number = each.request.devices
    return each.device.name if number == 1 else f"{number} x {each.device.name}"


def _with_range(one: PassTime) -> str:
    return range_text(one.ns, one.low_ns, one.high_ns)


def _parts(found: Sequence[ServingPrediction]) -> Iterator[Section]:
    """What the passes consist of and what their times rest on."""
    rows = [
        {"devices": _name(each), "pass": name, "limit": one.limit, **_largest(one), **_knowledge(one)}
        for each in found
        if each.fits is not False
        for name, one in (("first token", each.prefill), ("each token", each.decode))
        if one is not None
    ]
    if rows:
        names = dict.fromkeys(name for row in rows for name in row)
        schema = {
            name: pl.String if name in ("devices", "pass", "limit", "most_of_it") else pl.Float64 for name in names
        }
        yield Section("What that rests on: share of the time by what was known", (Table(pl.DataFrame(rows, schema)),))


def _largest(one: PassTime) -> dict[str, str]:
    named = {_LINK if kind == "link" else kind: ns for kind, ns in one.parts.items()}
    return {"most_of_it": ", ".join(f"{kind} {100 * ns / one.ns:.0f} %" for kind, ns in list(named.items())[:2])}


def _knowledge(one: PassTime) -> dict[str, float]:
    return {f"{name}_share": part for name, part in one.knowledge.items()}


def _notes(found: Sequence[ServingPrediction]) -> Iterator[str]:
    notes: dict[str, list[str]] = {}
    for each in found:
        if each.fits is False:
            why = f"of {size(each.device.memory_bytes or 0)} a tenth stays free for the runtime"
            notes.setdefault(why, []).append(each.device.name)
        for note in each.notes:
            notes.setdefault(note, []).append(each.device.name)
    for note, names in notes.items():
        yield f"Note: {'' if len(names) == len(found) else ', '.join(names) + ': '}{note}."


def serving_json(
    path: str, model: ModelShape, request: ServingRequest, found: Sequence[ServingPrediction]
) -> dict[str, Any]:
    """Times are nanoseconds, shares 0 to 1; null where unknown."""
    names = ("fits", "most_requests", "weight_bytes", "cache_bytes", "prefill", "decode", "tokens_per_s", "notes")
    return stamped(
        model={"path": path, "parameters": model.parameters, **fields(model, "layers", "experts", "weights")},
        request=request,
        servings=[
            {"device": each.device.name, "link": None if each.link is None else each.link.name, **fields(each, *names)}
            for each in sorted(found, key=_order)
        ],
        sentences=sentences(serving_document(path, model, request, found)),
    )
