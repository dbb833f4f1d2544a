"""A trace as Chrome-trace JSON: in the PyTorch profiler's (Kineto's) conventions, or as a timeline for the Perfetto UI.

JSON text is built from columns, without a Python object per row. The timeline has tracks of idle causes and of the
critical path.

Data that Kineto has no argument for, such as the user's line of an operator, is written under its column name. The
export is lossy: use `Trace.save` to keep a trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.analysis.idle import idle_time
from stepscope.readers.kineto.arguments import RECORDED
from stepscope.readers.perfetto.events import ANNOTATIONS, category
from stepscope.report.tables import TEXT_ROWS, parts
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import KEY, to_json
from stepscope.trace.tables import SLICE_TABLES


def by_value(column: pl.Series, function: Callable[[Any], Any], dtype: type[pl.DataType]) -> pl.Series:
    """Map values with `function`, called once for each distinct value; null stays null."""
    different = column.unique().drop_nulls()
    made = pl.Series([function(value) for value in different], dtype=dtype)
    if different.is_empty():
        return pl.Series([None] * len(column), dtype=dtype)
    found: pl.Series = column.replace_strict(different, made, default=None, return_dtype=dtype)
    return found


def quoted(column: pl.Series) -> pl.Series:
    """Text as JSON strings; null stays null."""
    return by_value(column, json.dumps, pl.String)


def identifiers(column: pl.Series) -> pl.Series:
    """Text as JSON numbers if it is a canonical integer, else as strings, which is how profilers write pid and tid."""
    return by_value(column, lambda text: json.dumps(identifier(text)), pl.String)


def identifier(text: str) -> int | str:
    """The integer that a text spells in canonical form; else the text."""
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 and str(int(text)) == text else text


def numbers(column: pl.Series) -> pl.Series:
    """Numbers as JSON; null for null, NaN and infinities."""
    if column.dtype.is_integer():
        text: pl.Series = column.cast(pl.String)
        return text
    return by_value(column, lambda value: repr(value) if abs(value) < 1e300 else None, pl.String)


def microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds with three decimals, without floating point."""
    return pl.concat_str(ns // 1000, pl.lit("."), (ns % 1000).cast(pl.String).str.zfill(3))


def members(columns: Mapping[str, pl.Series]) -> pl.Series:
    """One JSON object per row from columns of JSON text; null members are left out."""
    if not columns:
        raise ValueError("an object of no columns has no length")
    frame = pl.DataFrame([column.alias(f"{number}") for number, column in enumerate(columns.values())])
    pairs = [
        pl.when(pl.col(f"{number}").is_not_null()).then(
            pl.concat_str(pl.lit(f"{json.dumps(name)}: "), pl.col(f"{number}"))
        )
        for number, name in enumerate(columns)
    ]
    listed = pl.concat_str(pairs, separator=", ", ignore_nulls=True)
    found: pl.Series = frame.select(object=pl.concat_str(pl.lit("{"), listed, pl.lit("}")))["object"]
    return found


def lines(rows: pl.DataFrame, *pieces: str | pl.Expr) -> bytes:
    """One line per row, joined from literal text and columns without nulls."""
    line = pl.concat_str([pl.lit(piece) if isinstance(piece, str) else piece for piece in pieces])
    text: str = rows.select(line.str.join("")).item()
    return text.encode()


_OWN_ROWS: Final = ("lines", "modules")
"""Tables whose slices would overlap those of their thread: each gets its own row."""
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
            "id": identifier(device.device),
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
        self._own_rows = {
            table: trace.scan(table).select("lane").unique().collect()["lane"].sort().to_list() for table in _OWN_ROWS
        }
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

    def placed(self, rows: pl.DataFrame, table: str) -> pl.DataFrame:
        placed = rows.join(self.places, on="lane", how="left", maintain_order="left")
        if table in _OWN_ROWS:
            placed = placed.with_columns(tid=pl.format('"{} of lane {}"', pl.lit(table), "lane"))
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
        pairs.append((identifier(process), identifier(thread)))
    return pairs


def _metadata_event(name: str, process: int | str, thread: int | str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _rows(trace: Trace, table: str, lanes: _Lanes) -> Iterator[bytes]:
    for rows in parts(trace.scan(table), _height(trace.scan(table))):
        name = '"[memory]"' if table == "memory" else pl.col("name_text")
        events = lanes.placed(rows, table).with_columns(args=_arguments(table, rows))
        if table != "memory":
            events = events.with_columns(name_text=quoted(rows["name"].fill_null("")))
        place = (', "name": ', name, ', "pid": ', pl.col("pid"), ', "tid": ', pl.col("tid"))
        start = (', "ts": ', microseconds(pl.col("start_ns")))
        end: tuple[str | pl.Expr, ...] = (', "args": ', pl.col("args"), "},\n")
        if table in SLICE_TABLES:
            events = events.with_columns(category=_categories(table, rows))
            duration = (', "dur": ', microseconds(pl.col("duration_ns")))
            yield lines(events, '{"ph": "X", "cat": "', pl.col("category"), '"', *place, *start, *duration, *end)
        else:
            head = '{"ph": "C"' if table == "counters" else '{"ph": "i", "cat": "cpu_instant_event", "s": "t"'
            yield lines(events, head, *place, *start, *end)


def _categories(table: str, rows: pl.DataFrame) -> pl.Series:
    plain = category(table, None)
    if "kind" not in rows.columns:
        return pl.Series([plain] * rows.height, dtype=pl.String)
    return by_value(rows["kind"], lambda kind: category(table, kind), pl.String).fill_null(plain)


def _arguments(table: str, rows: pl.DataFrame) -> pl.Series:
    """The arguments of each row's event, a JSON object."""
    if table == "counters":
        columns = {"series": rows["series"].fill_null("value"), "value": numbers(rows["value"])}
        frame = pl.DataFrame(columns).with_columns(series=quoted(columns["series"]))
        text = pl.concat_str(pl.lit("{"), "series", pl.lit(": "), "value", pl.lit("}")).fill_null("{}")
        return frame.select(object=text)["object"]
    columns = {
        _KINETO_ARGUMENTS.get((table, column), argument): _json(table, column, rows[column])
        for column, argument in ANNOTATIONS[table].items()
        if (table, column) not in _WRITTEN_OTHERWISE
    }
    if table == "memory":
        numbered = by_value(rows["device"], lambda text: text if text.isdecimal() else None, pl.String)
        columns["Device Type"] = by_value(numbered, lambda _: "1", pl.String).fill_null("0")
        columns["Device Id"] = numbered.fill_null("-1")
    return members(columns) if columns else pl.Series(["{}"] * rows.height, dtype=pl.String)


def _json(table: str, column: str, values: pl.Series) -> pl.Series:
    """A column as JSON text in Kineto's notation; null if nothing is to be written."""
    if column == "occupancy":
        return numbers(values * 100)
    if values.dtype != pl.String:
        return numbers(values)
    if column in _JSON:
        return by_value(values, _plain_json, pl.String)
    if (table, column) == ("synchronisations", "kind"):
        return quoted(by_value(values, _SYNCHRONISATIONS.get, pl.String))
    return (identifiers if column in _IDENTIFIERS else quoted)(values)


def _plain_json(text: str) -> str | None:
    """JSON text on one line, sizes such as "4,1,1" as a list; None for invalid JSON."""
    try:
        return json.dumps(msgspec.json.decode(f"[{text}]" if text[:1].isdecimal() else text), ensure_ascii=False)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _flows(trace: Trace, lanes: _Lanes) -> Iterator[bytes]:
    """Arrows from launches to device work (id: the work's row) and from forward to backward operators (higher ids)."""
    calls, operators = (trace.scan(name).select("start_ns", "lane").collect() for name in ("launches", "operators"))
    work = trace.scan("device_work").select("launch", "start_ns", "lane").with_row_index("id")
    height = _height(work)
    for part in parts(work, height):
        part = part.drop_nulls("launch")
        yield from _arrows(part["id"], "ac2g", lanes, calls[part["launch"]], part)
    links = trace.scan("links").with_row_index("id", offset=height).drop_nulls(["source", "target"])
    for part in parts(links, _height(links)):
        yield from _arrows(part["id"], "fwdbwd", lanes, operators[part["source"]], operators[part["target"]])


def _height(rows: pl.LazyFrame) -> int:
    return int(rows.select(pl.len()).collect().item())


def _arrows(
    numbers: pl.Series, category: str, lanes: _Lanes, sources: pl.DataFrame, targets: pl.DataFrame
) -> Iterator[bytes]:
    for phase, ends in (('"s"', sources), ('"f", "bp": "e"', targets)):
        yield lines(
            lanes.placed(ends.with_columns(id=numbers), ""),
            f'{{"ph": {phase}, "cat": "{category}", "name": "{category}", "id": ',
            pl.col("id").cast(pl.String),
            ', "pid": ',
            pl.col("pid"),
            ', "tid": ',
            pl.col("tid"),
            ', "ts": ',
            microseconds(pl.col("start_ns")),
            "},\n",
        )


_TABLES: Final = (
    ("annotations", "user_annotation"),
    ("frames", "python_function"),
    ("operators", "cpu_op"),
    ("launches", "cuda_runtime"),
    ("device_work", "kernel"),
    ("synchronisations", "synchronisation"),
)
_IDLE_PROCESS: Final = 1_000_000
_PATH_PROCESS: Final = 999_999


def timeline(trace: Trace, idle: pl.DataFrame | None = None, path: pl.DataFrame | None = None) -> Iterator[bytes]:
    """Yield the pieces of a JSON document in the Chrome-trace format, in order.

    Args:
        idle: as `idle_time` returns it; computed if not given.
        path: the critical path, columns start_ns, duration_ns, kind, cause, name; no such track without it.

    The document holds every slice of the trace with its exact time, and arrows from launches to the work they launched.
    Below each device a process "device N: why idle" has one slice per idle gap, named by its cause; above them,
    "critical path" has one slice per piece of it, named by what the steps waited for.
    """
    idle = idle_time(trace) if idle is None else idle
    yield b'{"displayTimeUnit": "ns", "stepscope": "idle causes by stepscope", "traceEvents": [\n'
    yield _names(trace, idle)
    if path is not None and path.height:
        yield _named_track(_PATH_PROCESS, "critical path", "what the steps waited for")
        yield from map(_path_slices, path.iter_slices(TEXT_ROWS))
    processes = _process_numbers(trace)
    for table, kind in _TABLES:
        slices = trace.scan(table).select("start_ns", "duration_ns", "name", "lane")
        for rows in parts(slices, _height(slices)):
            yield _slices(rows, kind, processes)
    yield from _timeline_flows(trace, processes)
    devices = idle["device"].unique().sort().to_list()
    for gaps in idle.iter_slices(TEXT_ROWS):
        yield _idle_slices(gaps, devices)
    last = {"ph": "M", "name": "process_labels", "pid": _IDLE_PROCESS, "tid": 0, "args": {"labels": "stepscope"}}
    yield json.dumps(last).encode() + b"\n]}\n"


def _process_numbers(trace: Trace) -> pl.DataFrame:
    """The process number of each lane: viewers require integers, but traces have process names too."""
    lanes = trace.lanes
    owner = pl.when(pl.col("device").is_not_null()).then(pl.format("device {}", "device")).otherwise("process")
    return lanes.select("lane", pid=owner.rank("dense").cast(pl.Int64))


def _names(trace: Trace, idle: pl.DataFrame) -> bytes:
    numbers = dict(_process_numbers(trace).iter_rows())
    events = []
    for lane in trace.lanes.iter_rows(named=True):
        pid = numbers[lane["lane"]]
        process = (
            f"device {lane['device']}" if lane["device"] is not None else (lane["process_name"] or lane["process"])
        )
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane["lane"], "args": {"name": lane["name"]}}
        )
    tracks = [
        _named_track(_IDLE_PROCESS + number, f"device {device}: why idle", "cause")
        for number, device in enumerate(idle["device"].unique().sort().to_list())
    ]
    return b"".join([*(json.dumps(event).encode() + b",\n" for event in events), *tracks])


def _named_track(pid: int, process: str, thread: str) -> bytes:
    names = {"process_name": process, "thread_name": thread}
    events = [{"ph": "M", "name": key, "pid": pid, "tid": 0, "args": {"name": name}} for key, name in names.items()]
    return b"".join(json.dumps(event).encode() + b",\n" for event in events)


def _at(time: str, thread: str) -> tuple[str | pl.Expr, ...]:
    """Process, thread and time of an event."""
    return ', "pid": ', pl.col("pid"), ', "tid": ', pl.col(thread), ', "ts": ', microseconds(pl.col(time))


def _slices(rows: pl.DataFrame, category: str, processes: pl.DataFrame) -> bytes:
    name = quoted(rows["name"].fill_null(""))
    rows = rows.join(processes, on="lane", how="left", maintain_order="left").with_columns(name=name)
    head = f'{{"ph": "X", "cat": "{category}", "name": '
    return lines(
        rows, head, pl.col("name"), *_at("start_ns", "lane"), ', "dur": ', microseconds(pl.col("duration_ns")), "},\n"
    )


def _timeline_flows(trace: Trace, processes: pl.DataFrame) -> Iterator[bytes]:
    """Arrows from launches to device work; the arrow's id is the work's row."""
    calls = trace.scan("launches").select("start_ns", "lane").collect()
    work = trace.scan("device_work").select("launch", "start_ns", "lane").with_row_index("row")
    for part in parts(work, _height(work)):
        part = part.drop_nulls("launch")
        for head, ends in (
            ('{"ph": "s", "cat": "launch", "name": "launch", "id": ', calls[part["launch"]]),
            ('{"ph": "f", "bp": "e", "cat": "launch", "name": "launch", "id": ', part),
        ):
            rows = ends.with_columns(row=part["row"]).join(processes, on="lane", how="left", maintain_order="left")
            yield lines(rows, head, pl.col("row"), *_at("start_ns", "lane"), "},\n")


def _path_slices(path: pl.DataFrame) -> bytes:
    on_host = pl.format("host: {}", pl.col("cause").fill_null("unknown"))
    resource = pl.when(pl.col("kind") == "host").then(on_host).otherwise(pl.col("kind").str.replace_all("_", " "))
    name = quoted(path["name"].fill_null(""))
    rows = path.with_columns(pid=pl.lit(_PATH_PROCESS), thread=pl.lit(0), resource=resource, name=name)
    return lines(
        rows,
        '{"ph": "X", "cat": "critical path", "name": "',
        pl.col("resource"),
        '"',
        *_at("start_ns", "thread"),
        ', "dur": ',
        microseconds(pl.col("duration_ns")),
        ', "args": {"what": ',
        pl.col("name"),
        "}},\n",
    )


def _idle_slices(idle: pl.DataFrame, devices: list[str]) -> bytes:
    numbers = pl.DataFrame({"device": devices, "pid": [_IDLE_PROCESS + number for number in range(len(devices))]})
    rows = idle.join(numbers, on="device", how="left", maintain_order="left").with_columns(
        trigger=quoted(idle["trigger"].fill_null("")), thread=pl.lit(0)
    )
    arguments = (', "args": {"trigger": ', pl.col("trigger"), ', "gap": ', pl.col("gap"))
    return lines(
        rows,
        '{"ph": "X", "cat": "idle", "name": "',
        pl.col("cause"),
        '"',
        *_at("start_ns", "thread"),
        ', "dur": ',
        microseconds(pl.col("duration_ns")),
        *arguments,
        "}},\n",
    )
