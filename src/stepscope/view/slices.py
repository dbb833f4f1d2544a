"""What the timeline tells of a stretch of time, of a text, and of one slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import TABLES as HOST_TABLES
from stepscope.errors import UsageError
from stepscope.trace.nesting import Rows, at
from stepscope.trace.tables import SCHEMAS
from stepscope.trace.window import Times, union
from stepscope.view.rows import KIND_OF, KINDS, TABLES, Json, Lane, value_of
from stepscope.view.timeline import TimelineIndex

MOST_ROWS: Final = 300
"""Rows of each table of a stretch of time, the largest; the rest is counted."""
MOST_PLACES: Final = 1000
"""Places of a text around a moment."""
MOST_PARTNERS: Final = 100
_BLOCK: Final = 4_000_000
_NOWHERE: Final[Json] = {"where": None, "module": None}
_WORK: Final = TABLES.index("device_work")


def stretch(index: TimelineIndex, start_ns: int | None = None, end_ns: int | None = None) -> Json:
    """The document `Stretch` of web/src/schema.ts: what ran between two moments; all times are cut at them."""
    first, last = index.bounds
    start = first if start_ns is None else start_ns
    window = np.array([start, max(last if end_ns is None else end_ns, start)], np.int64)
    by_name, total = _by_name(index, window)
    lines, modules = ([], []) if index.is_partial else _by_place(index, window)
    return {
        "start": int(window[0]),
        "end": int(window[1]),
        "devices": [_device(index, gaps.device, window) for gaps in index.gaps],
        "slices": by_name,
        "slices_in_all": total,
        "lines": lines[:MOST_ROWS],
        "lines_in_all": len(lines),
        "modules": modules[:MOST_ROWS],
        "modules_in_all": len(modules),
    }


def _inside(index: TimelineIndex, window: Times) -> Iterator[tuple[Rows, Times]]:
    """The slices that touch a window, some at a time, and the time of each in it."""
    slices = index.slices
    for first, last in (bounds for lane in slices.lanes for bounds in lane.rows):
        low, high = slices.part(first, last).touching(int(window[0]), int(window[1]))
        for begin in range(first + low, first + high, _BLOCK):
            found = np.arange(begin, min(begin + _BLOCK, first + high))
            start = slices.start[found]
            end = start + slices.duration[found]
            yield found, np.minimum(end, window[1]) - np.maximum(start, window[0])


def _by_name(index: TimelineIndex, window: Times) -> tuple[list[Json], int]:
    """Count and time of the slices of each kind and name; of host slices also the time in which they are innermost."""
    slices = index.slices
    sums = pl.DataFrame(schema={"key": pl.Int64, "ns": pl.Int64, "count": pl.UInt32})
    for found, spent in _inside(index, window):
        key = slices.kind[found].astype(np.int64) * len(slices.names) + slices.name[found]
        part = pl.DataFrame({"key": key, "ns": spent}).group_by("key").agg(pl.col("ns").sum(), count=pl.len())
        sums = pl.concat([sums, part]).group_by("key").agg(pl.col("ns", "count").sum())
    sums = sums.join(_own_time(index, window), on="key", how="left")
    sums = sums.sort("ns", "count", "key", descending=[True, True, False])
    kinds, names = np.divmod(sums["key"].head(MOST_ROWS).to_numpy(), max(len(slices.names), 1))
    rows = sums.head(MOST_ROWS).select("count", "ns", "self_ns").rows()
    hosts = set() if index.is_partial else set(KIND_OF.values()) - {"wait", "line", "module"}
    return [
        {
            "kind": KINDS[kind],
            "name": value_of(slices.names[name]),
            "count": count,
            "ns": ns,
            "self_ns": (self_ns or 0) if KINDS[kind] in hosts else None,
        }
        for kind, name, (count, ns, self_ns) in zip(kinds.tolist(), names.tolist(), rows, strict=True)
    ], sums.height


def _own_time(index: TimelineIndex, window: Times) -> pl.DataFrame:
    """Time in a window in which the slices of each kind and name are the innermost ones of their thread."""
    if index.is_partial:
        return pl.DataFrame(schema={"key": pl.Int64, "self_ns": pl.Int64})
    activity, slices = index.view.activity, index.slices
    keys, spent = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for timeline in activity.timelines.values():
        _, begin, end, inner = timeline.cut(window[:1], window[1:])
        begin, end, inner = (each[inner >= 0] for each in (begin, end, inner))
        kind = index.host_kinds[activity.table[inner]]
        keys.append(kind * len(slices.names) + index.host_names[inner])
        spent.append(end - begin)
    times = pl.DataFrame({"key": np.concatenate(keys), "self_ns": np.concatenate(spent)})
    return times.group_by("key").agg(pl.col("self_ns").sum())


def _by_place(index: TimelineIndex, window: Times) -> tuple[list[Json], list[Json]]:
    """Time of the main thread and of device work by line and by module, the largest first."""
    view, slices = index.view, index.slices
    attribution = view.attribution
    parts = [
        (slices.row[found[is_work]].astype(np.int64), spent[is_work])
        for found, spent in _inside(index, window)
        if (is_work := slices.table[found] == _WORK).any()
    ]
    work, worked = (
        np.concatenate([np.zeros(0, np.int64), *each]) for each in (zip(*parts, strict=True) if parts else ((), ()))
    )
    pieces = view.activity.cut(-1 if view.lane is None else view.lane, window[:1], window[1:])
    inner, line = pieces["slice"].to_numpy(), pieces["line"].to_numpy()
    lasted = (pieces["end"] - pieces["start"]).to_numpy()
    place = np.where(inner >= 0, at(attribution.place, inner), at(attribution.line_place, line))
    lines = _sums(len(attribution.places), (place, lasted), (attribution.work_place[work], worked))
    modules = _sums(
        len(attribution.modules), (at(attribution.module, inner), lasted), (attribution.work_module[work], worked)
    )
    named = [
        {"file": each.file, "line": each.line, "function": each.function, "exact_line": each.exact_line}
        for each in attribution.places
    ]
    return (
        [{**named[number], "host_ns": host, "device_ns": device} for number, host, device in lines],
        [
            {"module": attribution.modules[number], "host_ns": host, "device_ns": device}
            for number, host, device in modules
        ],
    )


def _sums(count: int, host: tuple[Rows, Times], device: tuple[Rows, Times]) -> list[tuple[int, int, int]]:
    """Sums of host and device time by number, those that have any, the largest first."""
    sums = []
    for number, times in (host, device):
        total = np.zeros(count, np.int64)
        known = number >= 0
        np.add.at(total, number[known], times[known])
        sums.append(total)
    some = np.flatnonzero(sums[0] + sums[1])
    ordered = some[np.lexsort((some, -sums[0][some], -sums[1][some]))]
    return [(int(each), int(sums[0][each]), int(sums[1][each])) for each in ordered]


def _device(index: TimelineIndex, device: str, window: Times) -> Json:
    """Busy time of a device and its idle time by cause; of a main thread, its time by cause."""
    gaps = next(each for each in index.gaps if each.device == device)
    idle = {cause: int(np.diff(row.covered_until(window))[0]) for cause, (row, _) in gaps.by_cause.items()}
    work = index.trace.device_work.filter(pl.col("device") == device)
    start = work["start_ns"].to_numpy()
    busy = union(start, start + work["duration_ns"].to_numpy()).overlap_of(window[:1], window[1:])
    told = [
        {"cause": cause, "ns": ns} for cause, ns in sorted(idle.items(), key=lambda each: (-each[1], each[0])) if ns
    ]
    return {"device": device, "busy_ns": int(busy[0]), "idle": told}


def places_of(index: TimelineIndex, text: str, near_ns: int = 0) -> Json:
    """The document `Places` of web/src/schema.ts: slices whose name contains a text, ignoring case.

    All are counted by lane; those around a moment are listed.
    """
    slices = index.slices
    wanted = slices.names.str.to_lowercase().str.contains(text.lower(), literal=True).to_numpy()
    matched = np.flatnonzero(wanted[slices.name]) if text else np.zeros(0, np.int64)
    lanes, shown = [], []
    for lane in slices.lanes:
        first, last = (int(np.searchsorted(matched, each)) for each in (lane.rows[0][0], lane.rows[-1][1]))
        if last > first:
            mine = matched[first:last]
            lanes.append({"id": lane.id, "count": len(mine), "ns": int(slices.duration[mine].sum())})
            shown.append(mine)
    found = np.concatenate(shown) if shown else matched[:0]
    found = found[np.argsort(slices.start[found], kind="stable")]
    middle = int(np.searchsorted(slices.start[found], near_ns))
    listed = max(min(middle - MOST_PLACES // 2, len(found) - MOST_PLACES), 0)
    return {
        "text": text,
        "count": len(found),
        "names": int(wanted.sum()) if text else 0,
        "lanes": lanes,
        "first": listed,
        "places": [_place(index, position) for position in found[listed : listed + MOST_PLACES].tolist()],
    }


def _place(index: TimelineIndex, position: int) -> Json:
    """Where a slice is drawn, and its name and times."""
    slices = index.slices
    lane, depth = next(
        (lane, depth)
        for lane in slices.lanes
        if lane.rows[0][0] <= position < lane.rows[-1][1]
        for depth, (first, last) in enumerate(lane.rows)
        if first <= position < last
    )
    return {
        "lane": lane.id,
        "depth": depth,
        "table": TABLES[slices.table[position]],
        "row": int(slices.row[position]),
        "kind": KINDS[slices.kind[position]],
        "name": value_of(slices.names[int(slices.name[position])]),
        "start": int(slices.start[position]),
        "duration": int(slices.duration[position]),
    }


def slice_of(index: TimelineIndex, table: str, row: int) -> Json:
    """The document `Slice` of web/src/schema.ts: one slice, its place in the code, and what it is linked with.

    Raises UsageError if there is no such row.
    """
    record = _record(index, table, row) if table in TABLES else None
    if record is None:
        raise UsageError(f"the trace has no row {row} of {table!r}")
    position = _position(index, table, row, record)
    hidden = {"start_ns", "duration_ns", "name", "lane", "kind", "parent", "operator", "launch"}
    about = {key: value for key, value in record.items() if key in SCHEMAS[table] and key not in hidden}
    return {
        **({"lane": "", "depth": 0, "kind": table} if position is None else _place(index, position)),
        "table": table,
        "row": row,
        "name": record["name"] or "",
        "start": record["start_ns"],
        "duration": record["duration_ns"],
        "about": {key: value for key, value in about.items() if value is not None},
        **(_NOWHERE if index.is_partial else _source(index, table, row)),
        "links": [] if index.is_partial else list(_links(index, table, row, record)),
    }


def _record(index: TimelineIndex, table: str, row: int) -> Json | None:
    """A row of a table, read from its part; None if there is none."""
    if not index.is_partial:
        rows = index.trace.table(table)
        return rows.row(row, named=True) if 0 <= row < rows.height else None
    first = 0
    for part in index.trace.parts(table) if row >= 0 else []:
        if row < first + part.span.rows:
            return part.read().row(row - first, named=True)
        first += part.span.rows
    return None


def _position(index: TimelineIndex, table: str, row: int, record: Json) -> int | None:
    """Position of a table's row in the timeline; None for a frame that has no row in it."""
    number = TABLES.index(table)
    slices = index.slices
    for lane in _lanes_of(index, record["lane"]):
        for first, last in lane.rows:
            found = first + int(np.searchsorted(slices.start[first:last], record["start_ns"]))
            if found < last and slices.table[found] == number and slices.row[found] == row:
                return found
    return None


def _lanes_of(index: TimelineIndex, number: int) -> Iterator[Lane]:
    return (lane for lane in index.slices.lanes if lane.id.split(".")[0] == str(number))


def _source(index: TimelineIndex, table: str, row: int) -> Json:
    """File, line, function and module of a slice, as far as they are known."""
    attribution = index.view.attribution
    if table == "device_work":
        place, module = int(attribution.work_place[row]), int(attribution.work_module[row])
    elif table == "lines":
        place, module = int(attribution.line_place[row]), -1
    elif table in HOST_TABLES:
        number = index.view.activity.slices_of(table)[row]
        place, module = (int(at(each, np.array([number]))[0]) for each in (attribution.place, attribution.module))
    else:
        place = module = -1
    where = attribution.places[place]._asdict() if place >= 0 else None
    return {"where": where, "module": attribution.modules[module] if module >= 0 else None}


def _links(index: TimelineIndex, table: str, row: int, record: Json) -> Iterator[Json]:
    """What a slice launched or was launched by, its forward or backward, and the event that it waits for."""
    trace = index.trace

    def linked(kind: str, other: str, rows: Iterable[int | None], outgoing: bool) -> Iterator[Json]:
        for number in rows:
            if number is not None:
                found = trace.table(other).row(number, named=True)
                position = _position(index, other, number, found)
                if position is not None:
                    yield {"link": kind, "outgoing": outgoing, **_place(index, position)}

    def where(other: str, condition: pl.Expr) -> list[int]:
        return trace.table(other).with_row_index().filter(condition)["index"].head(MOST_PARTNERS).to_list()

    if table == "device_work":
        yield from linked("launch", "launches", [record["launch"]], False)
    if table == "launches":
        yield from linked("launch", "device_work", where("device_work", pl.col("launch") == row), True)
    if table == "operators":
        calls = where("launches", pl.col("operator") == row)
        yield from linked("launch", "device_work", where("device_work", pl.col("launch").is_in(calls)), True)
        for ends, outgoing in ((("source", "target"), True), (("target", "source"), False)):
            partners = trace.links.filter((pl.col("kind") == "forward_backward") & (pl.col(ends[0]) == row))[ends[1]]
            yield from linked("forward_backward", "operators", partners.head(MOST_PARTNERS).to_list(), outgoing)
    if table == "synchronisations" and record["waited_correlation"] is not None:
        recorded = where("launches", pl.col("correlation") == record["waited_correlation"])
        yield from linked("event", "launches", recorded, False)
    if table == "launches" and record["correlation"] is not None and record["kind"] == "event":
        waits = where("synchronisations", pl.col("waited_correlation") == record["correlation"])
        yield from linked("event", "synchronisations", waits, True)
    if table == "launches" and record["correlation"] is not None and record["kind"] in ("queue_wait", "synchronise"):
        waits = where("synchronisations", pl.col("correlation") == record["correlation"])
        yield from linked("wait", "synchronisations", waits, True)
