"""A trace as Chrome-trace JSON in the PyTorch profiler's (Kineto's) conventions, for every tool that reads such traces.

Data that Kineto has no argument for, such as the user's line of an operator, is written under its column name. The
export is lossy: use `Trace.save` to keep a trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.kineto.arguments import RECORDED
from stepscope.readers.perfetto.events import ANNOTATIONS, category
from stepscope.report.exports import json_text
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import KEY, to_json
from stepscope.trace.tables import SLICE_TABLES

_OWN_ROWS: Final = ("lines", "modules")
"""Tables whose slices would overlap those of their thread: each gets a row of its own."""
_WRITTEN_OTHERWISE: Final = {
    ("launches", "kind"),
    ("device_work", "kind"),
    ("annotations", "kind"),
    ("memory", "device"),
}
_JSON: Final = frozenset({"input_shapes", "input_types", "input_values", "grid", "block"})
_IDENTIFIERS: Final = frozenset({"device", "queue", "waited_queue"})
_KINETO_ARGUMENTS: Final = {
    ("device_work", "occupancy"): "est. achieved occupancy %",
    ("synchronisations", "kind"): "cuda_sync_kind",
}
"""Columns that Kineto's argument holds in another form than `ANNOTATIONS` names."""
_SYNCHRONISATIONS: Final = {
    "queue_wait": "Stream Wait Event",
    "event": "Event Sync",
    "queue": "Stream Sync",
    "device": "Context Sync",
    "other": "Other",
}
"""Kind of a synchronisation -> Kineto's word for it."""


def chrome(trace: Trace) -> Iterator[bytes]:
    """Yield the pieces of the JSON document, in order."""
    header = _header(trace.metadata).items()
    yield b"{" + b"".join(json.dumps(key).encode() + b": " + value + b",\n" for key, value in header)
    yield b'"traceEvents": [\n'
    lanes = _Lanes(trace)
    yield lanes.events()
    for table in (*SLICE_TABLES, "memory", "counters"):
        yield from _rows(trace, table, lanes)
    yield from _flows(trace, lanes)
    yield json.dumps(_metadata_event("stepscope", 0, 0, {})).encode() + b"\n]}\n"  # the last one has no comma


def _header(metadata: Metadata) -> dict[str, bytes]:
    """Kineto's top-level keys, each value as JSON."""
    header: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms"}
    if metadata.origin_unix_ns is not None:
        header["baseTimeNanoseconds"] = metadata.origin_unix_ns
    header["deviceProperties"] = [
        {
            "id": json_text.identifier(device.device),
            **({} if device.name is None else {"name": device.name}),
            **({} if device.memory_bytes is None else {"totalGlobalMem": device.memory_bytes}),
            **({} if device.multiprocessors is None else {"numSms": device.multiprocessors}),
        }
        for device in metadata.devices
    ]
    told = {"backend": metadata.backend, "rank": metadata.rank, "world_size": metadata.world_size}
    if distributed := {key: value for key, value in told.items() if value is not None}:
        header["distributedInfo"] = distributed
    header |= {key: 1 for key, word in RECORDED.items() if word in (metadata.recorded or ())}
    if metadata.host is not None:
        header["host_name"] = metadata.host
    texts = {key: json.dumps(value).encode() for key, value in header.items()}
    return texts | ({KEY: to_json(metadata.program).encode()} if metadata.program is not None else {})


class _Lanes:
    """Process and thread of each lane and pseudo-thread, as JSON text."""

    def __init__(self, trace: Trace) -> None:
        self._rows = list(trace.lanes.iter_rows(named=True))
        self._pairs = _pairs(self._rows)
        self._own_rows = {table: trace.table(table)["lane"].unique().to_list() for table in _OWN_ROWS}
        self.places = pl.DataFrame(
            [(lane, json.dumps(process), json.dumps(thread)) for lane, (process, thread) in enumerate(self._pairs)],
            schema={"lane": pl.Int32, "pid": pl.String, "tid": pl.String},
            orient="row",
        )

    def events(self) -> bytes:
        events: list[dict[str, Any]] = []
        named: set[int | str] = set()
        for row, (process, thread) in zip(self._rows, self._pairs, strict=True):
            if process not in named:
                named.add(process)
                label = "CPU" if row["device"] is None else f"GPU {row['device']}"
                name = row["process_name"]
                events += [] if name is None else [_metadata_event("process_name", process, 0, {"name": name})]
                events.append(_metadata_event("process_labels", process, 0, {"labels": label}))
            events.append(_metadata_event("thread_name", process, thread, {"name": row["name"] or ""}))
        for table, lanes in self._own_rows.items():
            for lane in lanes:
                name = {"name": f"{self._rows[lane]['name'] or ''}: {table}"}
                events.append(_metadata_event("thread_name", self._pairs[lane][0], f"{table} of lane {lane}", name))
        return b"".join(json.dumps(event).encode() + b",\n" for event in events)

    def placed(self, rows: pl.DataFrame, table: str, lane: str = "lane") -> pl.DataFrame:
        placed = rows.join(self.places, left_on=lane, right_on="lane", how="left", maintain_order="left")
        if table in _OWN_ROWS:
            placed = placed.with_columns(tid=pl.format('"{} of lane {}"', pl.lit(table), lane))
        return placed


def _pairs(rows: list[dict[str, Any]]) -> list[tuple[int | str, int | str]]:
    """Process and thread of each lane; the lane's number is appended to a pair that is already taken."""
    pairs: list[tuple[int | str, int | str]] = []
    taken = set()
    for row in rows:
        process, thread = row["process"] or "", row["thread"] or ""
        if (process, thread) in taken or " of lane " in thread:
            thread = f"{thread} (lane {row['lane']})"
        while (process, thread) in taken:
            thread += "+"
        taken.add((process, thread))
        pairs.append((json_text.identifier(process), json_text.identifier(thread)))
    return pairs


def _metadata_event(name: str, process: int | str, thread: int | str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _rows(trace: Trace, table: str, lanes: _Lanes) -> Iterator[bytes]:
    height = trace.scan(table).select(pl.len()).collect().item()
    for rows in json_text.parts(trace.scan(table), height):
        name = '"[memory]"' if table == "memory" else pl.col("name_text")
        events = lanes.placed(rows, table).with_columns(args=_arguments(table, rows))
        if table != "memory":
            events = events.with_columns(name_text=json_text.quoted(rows["name"].fill_null("")))
        place = (', "name": ', name, ', "pid": ', pl.col("pid"), ', "tid": ', pl.col("tid"))
        start = (', "ts": ', json_text.microseconds(pl.col("start_ns")))
        end: tuple[str | pl.Expr, ...] = (', "args": ', pl.col("args"), "},\n")
        if table in SLICE_TABLES:
            events = events.with_columns(category=_categories(table, rows))
            duration = (', "dur": ', json_text.microseconds(pl.col("duration_ns")))
            yield json_text.lines(
                events, '{"ph": "X", "cat": "', pl.col("category"), '"', *place, *start, *duration, *end
            )
        else:
            head = '{"ph": "C"' if table == "counters" else '{"ph": "i", "cat": "cpu_instant_event", "s": "t"'
            yield json_text.lines(events, head, *place, *start, *end)


def _categories(table: str, rows: pl.DataFrame) -> pl.Series:
    plain = category(table, None)
    if "kind" not in rows.columns:
        return pl.Series([plain] * rows.height, dtype=pl.String)
    return json_text.by_value(rows["kind"], lambda kind: category(table, kind), pl.String).fill_null(plain)


def _arguments(table: str, rows: pl.DataFrame) -> pl.Series:
    """The arguments of each row's event, a JSON object."""
    if table == "counters":
        columns = {"series": rows["series"].fill_null("value"), "value": json_text.numbers(rows["value"])}
        frame = pl.DataFrame(columns).with_columns(series=json_text.quoted(columns["series"]))
        text = pl.concat_str(pl.lit("{"), "series", pl.lit(": "), "value", pl.lit("}")).fill_null("{}")
        return frame.select(object=text)["object"]
    columns = {
        _KINETO_ARGUMENTS.get((table, column), argument): _json(table, column, rows[column])
        for column, argument in ANNOTATIONS[table].items()
        if (table, column) not in _WRITTEN_OTHERWISE
    }
    if table == "memory":
        numbered = json_text.by_value(rows["device"], lambda text: text if text.isdecimal() else None, pl.String)
        columns["Device Type"] = json_text.by_value(numbered, lambda _: "1", pl.String).fill_null("0")
        columns["Device Id"] = numbered.fill_null("-1")
    return json_text.members(columns) if columns else pl.Series(["{}"] * rows.height, dtype=pl.String)


def _json(table: str, column: str, values: pl.Series) -> pl.Series:
    """A column as JSON text in Kineto's notation; null if nothing is to be written."""
    if column == "occupancy":
        return json_text.numbers(values * 100)
    if values.dtype != pl.String:
        return json_text.numbers(values)
    if column in _JSON:
        return json_text.by_value(values, _plain_json, pl.String)
    if (table, column) == ("synchronisations", "kind"):
        return json_text.quoted(json_text.by_value(values, _SYNCHRONISATIONS.get, pl.String))
    return (json_text.identifiers if column in _IDENTIFIERS else json_text.quoted)(values)


def _plain_json(text: str) -> str | None:
    """JSON text on one line, sizes such as "4,1,1" as a list; None for invalid JSON."""
    try:
        return json.dumps(msgspec.json.decode(f"[{text}]" if text[:1].isdecimal() else text), ensure_ascii=False)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _flows(trace: Trace, lanes: _Lanes) -> Iterator[bytes]:
    """Arrows from launches to device work (id: the work's row) and from forward to backward operators (higher ids)."""
    calls = trace.scan("launches").select(call_ns="start_ns", call_lane="lane").with_row_index("launch").collect()
    work = trace.scan("device_work").select("launch", "start_ns", "lane").with_row_index("id").collect()
    launched = work.join(calls, on="launch", how="inner", maintain_order="left")
    yield from _arrows(launched, "ac2g", lanes, ("call_ns", "call_lane"))
    if trace.links.is_empty():
        return
    places = trace.scan("operators").select("start_ns", "lane").with_row_index("row").collect()
    ends = places.rename({"start_ns": "call_ns", "lane": "call_lane"})
    links = trace.links.with_row_index("id", offset=work.height).join(ends, left_on="source", right_on="row")
    links = links.join(places, left_on="target", right_on="row").sort("id")
    yield from _arrows(links, "fwdbwd", lanes, ("call_ns", "call_lane"))


def _arrows(rows: pl.DataFrame, category: str, lanes: _Lanes, source: tuple[str, str]) -> Iterator[bytes]:
    for first in range(0, rows.height, json_text.PART_ROWS):
        part = rows.slice(first, json_text.PART_ROWS)
        for phase, (time, lane) in (('"s"', source), ('"f", "bp": "e"', ("start_ns", "lane"))):
            head = f'{{"ph": {phase}, "cat": "{category}", "name": "{category}", "id": '
            yield json_text.lines(
                lanes.placed(part, "", lane),
                head,
                pl.col("id").cast(pl.String),
                ', "pid": ',
                pl.col("pid"),
                ', "tid": ',
                pl.col("tid"),
                ', "ts": ',
                json_text.microseconds(pl.col(time)),
                "},\n",
            )
