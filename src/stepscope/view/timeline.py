"""The timeline: lanes of slices, idle time by cause and values over time, in any window with an exact level of detail.

A window costs O(width log n) for each row, at any zoom; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import TABLES as HOST_TABLES
from stepscope.analysis.host import host_time
from stepscope.analysis.step_view import StepView
from stepscope.threads import cached_property
from stepscope.trace import Trace
from stepscope.trace.nesting import Rows, at
from stepscope.trace.window import Times
from stepscope.view.rows import (
    KIND_OF,
    KINDS,
    TABLES,
    WORK_KINDS,
    Json,
    Lane,
    Row,
    Slices,
    pixel_edges,
    slices_in_files,
    slices_of,
    value_of,
)

MOST_SLICES: Final = 20_000
"""A window with no more slices than this holds all of them, one by one."""
MOST_IN_MEMORY: Final = 4_000_000
"""Slices of a trace that are kept in memory; more are in files."""
WIDTHS: Final = (1, 8192)
_MARKS_KEPT: Final = 4


@dataclass(frozen=True)
class Series:
    """Values over time, such as allocated memory: arrays of shape (n,)."""

    id: str
    label: str
    kind: Literal["memory", "counter"]
    device: str
    unit: str
    time: Times
    value: npt.NDArray[np.float64]

    def window(self, edges: Times) -> Json:
        """The values in a window, the last one before it first; or the least and the largest of each pixel."""
        lane: Json = {"id": self.id, "label": self.label, "kind": self.kind, "device": self.device, "rows": []}
        first, last = (int(each) for each in np.searchsorted(self.time, edges[[0, -1]], side="right"))
        first = max(first - 1, 0)
        about = {"unit": self.unit, "least": float(self.value.min()), "most": float(self.value.max())}
        if last - first <= 2 * len(edges):
            points = {"start": self.time[first:last].tolist(), "value": self.value[first:last].tolist()}
            return {**lane, "values": {**about, **points, "low": [], "high": []}}
        at = np.maximum(np.searchsorted(self.time, edges, side="right") - 1, 0)
        # A pixel's values are those from the one that holds when it begins to the last one in it.
        held = self.value[: at[-1] + 1]
        low, high = (
            extreme(extreme.reduceat(held, at[:-1]), self.value[at[1:]]) for extreme in (np.minimum, np.maximum)
        )
        return {**lane, "values": {**about, "start": [], "value": [], "low": low.tolist(), "high": high.tolist()}}


def series_of(trace: Trace) -> list[Series]:
    """Memory of each device and all counters."""
    found = []
    memory = trace.scan("memory").select("device", "start_ns", "total_allocated", "total_reserved").collect()
    for column, what in (("total_allocated", "allocated"), ("total_reserved", "reserved")):
        known = memory.filter(pl.col(column).is_not_null()).sort("device", "start_ns", maintain_order=True)
        for (device,), rows in known.group_by("device", maintain_order=True):
            label = f"memory {what} ({'CPU' if device == 'cpu' else f'device {device}'})"
            points = rows["start_ns"].to_numpy(), rows[column].cast(pl.Float64).to_numpy()
            if points[1].any():
                found.append(Series(f"memory.{what}.{device}", label, "memory", str(device or ""), "bytes", *points))
    keys = ["lane", "name", "series"]
    counted = trace.counters.filter(pl.col("value").is_finite()).sort(*keys, "start_ns", maintain_order=True)
    for (lane, name, series), rows in counted.group_by(keys, maintain_order=True):
        label = " ".join(str(word) for word in dict.fromkeys((name, series)) if word)
        points = rows["start_ns"].to_numpy(), rows["value"].to_numpy()
        found.append(Series(f"counter.{lane}.{name}.{series}", label, "counter", "", "", *points))
    return found


@dataclass(frozen=True)
class Gaps:
    """Idle time of one device, or of the main thread, by cause."""

    device: str
    pieces: pl.DataFrame  # start_ns, duration_ns, cause, trigger

    @cached_property
    def by_cause(self) -> dict[str, tuple[Row, list[str | None]]]:
        found = {}
        for (cause,), rows in self.pieces.group_by("cause", maintain_order=True):
            row = Row.of(rows["start_ns"].to_numpy(), rows["duration_ns"].to_numpy())
            found[str(cause)] = (row, rows["trigger"].to_list())
        return found

    def window(self, edges: Times, names: dict[str, int]) -> Json:
        """The gaps of a window, in order; a gap without a trigger has -1."""
        found: list[tuple[int, int, int, int]] = []
        busy = {}
        whole = self.count(edges) <= MOST_SLICES // 4
        for cause, (row, triggers) in self.by_cause.items():
            detail = row.whole(edges) if whole else row.detail(edges)
            if len(detail.busy):
                busy[cause] = detail.busy.tolist()
            number = names.setdefault(cause, len(names))
            for index in detail.rows.tolist():
                trigger = triggers[index]
                told = -1 if trigger is None else names.setdefault(value_of(trigger), len(names))
                found.append((int(row.start[index]), int(row.duration[index]), number, told))
        start, duration, causes, triggers_ = (
            (list(each) for each in zip(*sorted(found), strict=True)) if found else ([],) * 4
        )
        return {
            "device": self.device,
            "start": start,
            "duration": duration,
            "cause": causes,
            "trigger": triggers_,
            "busy": busy,
        }

    def count(self, edges: Times) -> int:
        bounds = (row.touching(int(edges[0]), int(edges[-1])) for row, _ in self.by_cause.values())
        return sum(last - first for first, last in bounds)


def merged_gaps(idle: pl.DataFrame) -> pl.DataFrame:
    """Idle pieces by device and start, those that touch and have the same cause and trigger made one."""
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    keys = ["device", "cause", "trigger"]
    rows = idle.filter(pl.col("duration_ns") > 0).select(*keys, start, end.alias("end_ns")).sort("device", "start_ns")
    same = pl.struct(keys).rle_id().alias("run")
    breaks = (start != pl.col("end_ns").shift()).fill_null(False).cum_sum().alias("piece")
    whole = rows.with_columns(same, breaks).group_by("run", "piece", maintain_order=True)
    merged = whole.agg(*(pl.col(key).first() for key in keys), start.min(), pl.col("end_ns").max())
    return merged.select(*keys, start, duration_ns=pl.col("end_ns") - start)


class Marked:
    """Some of the slices, by row."""

    def __init__(self, slices: Slices, chosen: npt.NDArray[np.bool_]) -> None:
        self.slices, self.chosen = slices, chosen
        self._rows: dict[int, Row] = {}

    def row(self, first: int, last: int) -> Row:
        """Those of a row."""
        if first not in self._rows:
            mine = first + np.flatnonzero(self.chosen[first:last])
            self._rows[first] = Row.of(self.slices.start[mine], self.slices.duration[mine])
        return self._rows[first]


class TimelineIndex:
    """All that the timeline of one trace is drawn from, each part built when it is first needed.

    Args:
        view: of the trace, or of the part of it that is analysed.
        whole: the trace that is drawn, if that is more. If it has many slices, they are in files, and idle time, steps,
            lines and modules are those of the part only.
    """

    def __init__(self, view: StepView, whole: Trace | None = None) -> None:
        self.trace = view.trace if whole is None else whole
        slices = sum(part.span.rows for table in TABLES for part in self.trace.parts(table))
        self.in_files = slices > MOST_IN_MEMORY
        self.is_partial = whole is not None and self.in_files
        self.view = view if whole is None or self.is_partial else StepView(whole, user_code=view.user_code)

    @cached_property
    def slices(self) -> Slices:
        build = slices_in_files if self.in_files else slices_of
        return build(self.trace, self.view.lane)

    @cached_property
    def host_kinds(self) -> Rows:
        """Index into KINDS of each of the tables of `HostActivity`."""
        return np.array([KINDS.index(KIND_OF[table]) for table in HOST_TABLES])

    @cached_property
    def host_names(self) -> Rows:
        """Index into the slices' names of each slice of the view's activity."""
        names: Rows = self.view.activity.name.fill_null("").cast(pl.Enum(self.slices.names)).to_physical().to_numpy()
        return names.astype(np.int64)

    @cached_property
    def series(self) -> list[Series]:
        return series_of(self.trace)

    @cached_property
    def gaps(self) -> list[Gaps]:
        """Idle time of each device; without a device, the main thread's time apart from computing."""
        idle = self.view.idle
        if not self.view.trace.working_devices:
            pieces = host_time(self.view.trace, activity=self.view.activity).filter(pl.col("cause") != "compute")
            idle = pieces.with_columns(device=pl.lit(""), trigger=pl.lit(None, pl.String))
        parts = merged_gaps(idle).partition_by("device", as_dict=True, maintain_order=True)
        return [Gaps(str(device), pieces) for (device,), pieces in parts.items()]

    @cached_property
    def path(self) -> pl.DataFrame:
        """The critical path of the steps."""
        from stepscope.whatif import Experiment
        from stepscope.whatif.critical_path import critical_path

        return critical_path(Experiment(self.view))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Start and end of all that was recorded."""
        slices, times = self.slices, [each.time for each in self.series]
        ends = [int(self.slices.start[last - 1] + slices.duration[last - 1]) for _, last in self._rows()]
        starts = [int(slices.start[first]) for first, _ in self._rows()] + [int(each[0]) for each in times]
        last = max(ends + [int(each[-1]) for each in times], default=1)
        return min(starts, default=0), max(last, min(starts, default=0) + 1)

    def _rows(self) -> Iterator[tuple[int, int]]:
        return (bounds for lane in self.slices.lanes for bounds in lane.rows)

    def window(
        self,
        start_ns: int | None = None,
        end_ns: int | None = None,
        width: int = 1000,
        *,
        path: bool = False,
        mark: str = "",
    ) -> Json:
        """The document `Timeline` of web/src/schema.ts: what a window of this width in pixels shows.

        Args:
            path: with a lane of the critical path.
            mark: what to point out, such as "operator:aten::mm" or "line:train.py:12"; several in as many lines.
        """
        first, last = self.bounds
        start = first if start_ns is None else start_ns
        end = max(last if end_ns is None else end_ns, start + 1)
        edges = pixel_edges(start, end, min(max(width, WIDTHS[0]), WIDTHS[1]))
        document = _Document(self.slices, edges, self._is_whole(edges), self.marked(mark) if mark else None)
        lanes = [document.lane(lane) for lane in self.slices.lanes]
        if path:
            lanes.insert(0, document.path(self.path))
        return {
            "start": start,
            "end": end,
            "first": first,
            "last": last,
            "width": len(edges) - 1,
            "whole": document.whole,
            "lanes": lanes + [series.window(edges) for series in self.series],
            "steps": self._steps(start, end),
            "gaps": [gaps.window(edges, document.names) for gaps in self.gaps],
            "names": list(document.names),
        }

    def marked(self, mark: str) -> Marked:
        """The slices that a choice on the page is about; the last few are kept."""
        if mark not in self._marked:
            if len(self._marked) >= _MARKS_KEPT:
                del self._marked[next(iter(self._marked))]
            self._marked[mark] = Marked(self.slices, self._slices_of(mark))
        return self._marked[mark]

    @cached_property
    def _marked(self) -> dict[str, Marked]:
        return {}

    def _slices_of(self, mark: str) -> npt.NDArray[np.bool_]:
        """Whether each slice has one of these names, or belongs to one of these lines or modules."""
        slices = self.slices
        result = np.zeros(len(slices.start), np.bool_)
        for each in mark.split("\n"):
            kind, _, value = each.partition(":")
            if kind in ("operator", "kernel"):
                kinds = [KINDS.index(word) for word in (("operator",) if kind == "operator" else WORK_KINDS)]
                named = np.array([value_of(name) == value for name in slices.names.to_list()], np.bool_)
                result |= named[slices.name] & np.isin(slices.kind, kinds)
            elif kind in ("line", "module") and not self.is_partial:
                result |= self._belonging(kind, value)
        return result

    def _belonging(self, kind: str, value: str) -> npt.NDArray[np.bool_]:
        view, slices = self.view, self.slices
        about = view.attribution
        if kind == "line":
            those = [
                number for number, each in enumerate(about.places) if value_of(f"{each.file}:{each.line}") == value
            ]
            host, work = about.place, about.work_place
        else:
            inside = f"{value}."
            those = [number for number, each in enumerate(about.modules) if each == value or each.startswith(inside)]
            host, work = about.module, about.work_module
        result = np.zeros(len(slices.start), np.bool_)
        for table in (*HOST_TABLES, "device_work"):
            of_row = work if table == "device_work" else at(host, view.activity.slices_of(table))
            here = slices.table == TABLES.index(table)
            result[here] = np.isin(of_row[slices.row[here].astype(np.int64)], those)
        return result

    def _is_whole(self, edges: Times) -> bool:
        count = 0
        for first, last in self._rows():
            low, high = self.slices.part(first, last).touching(int(edges[0]), int(edges[-1]))
            count += high - low
            if count > MOST_SLICES:
                return False
        return True

    def _steps(self, start: int, end: int) -> dict[str, list[int]]:
        inside = (pl.col("start_ns") < end) & (pl.col("start_ns") + pl.col("duration_ns") > start)
        steps = self.view.steps.filter(inside)
        return {
            "index": steps["index"].to_list(),
            "start": steps["start_ns"].to_list(),
            "duration": steps["duration_ns"].to_list(),
        }


class _Document:
    """A window being written: its lanes, and the names that they refer to by number."""

    def __init__(self, slices: Slices, edges: Times, whole: bool, marked: Marked | None) -> None:
        self.slices, self.edges, self.whole, self.marked = slices, edges, whole, marked
        self.names: dict[str, int] = {}
        self._numbers = np.full(len(slices.names), -1, np.int64)  # of the slices' names
        self._kinds = np.array([self.names.setdefault(kind, len(self.names)) for kind in KINDS])
        self._tables = np.array([self.names.setdefault(table, len(self.names)) for table in TABLES])

    def lane(self, lane: Lane) -> Json:
        rows = [self._row(first, last) for first, last in lane.rows]
        about = {"id": lane.id, "label": lane.label, "kind": lane.kind, "device": lane.device}
        return {**about, "around": list(lane.around), "rows": rows}

    def _row(self, first: int, last: int) -> Json:
        part = self.slices.part(first, last)
        detail = part.whole(self.edges) if self.whole else part.detail(self.edges)
        shown = first + detail.rows
        pointed_out: Json = {}
        if self.marked is not None:
            narrow = np.zeros(0) if self.whole else self.marked.row(first, last).detail(self.edges).busy
            pointed_out = {"marked": self.marked.chosen[shown].astype(int).tolist(), "marked_busy": narrow.tolist()}
        return {
            **pointed_out,
            "start": self.slices.start[shown].tolist(),
            "duration": self.slices.duration[shown].tolist(),
            "name": self._named(self.slices.name[shown]),
            "kind": self._kinds[self.slices.kind[shown]].tolist(),
            "table": self._tables[self.slices.table[shown]].tolist(),
            "row": self.slices.row[shown].tolist(),
            "busy": detail.busy.tolist(),
        }

    def _named(self, codes: npt.NDArray[np.int32]) -> list[int]:
        new = np.unique(codes[self._numbers[codes] < 0])
        for code in new.tolist():
            self._numbers[code] = self.names.setdefault(value_of(self.slices.names[code]), len(self.names))
        return self._numbers[codes].tolist()  # type: ignore[no-any-return]

    def path(self, path: pl.DataFrame) -> Json:
        """The lane of the critical path: one row, whose kinds are causes for host time."""
        row = Row.of(path["start_ns"].to_numpy(), path["duration_ns"].to_numpy())
        whole = path.height <= MOST_SLICES // 4
        detail = row.whole(self.edges) if whole else row.detail(self.edges)
        shown = path[detail.rows]
        words = shown.select(
            pl.col("name").fill_null("").map_elements(value_of, return_dtype=pl.String),
            kind=pl.when(pl.col("kind") == "host").then(pl.col("cause").fill_null("unknown")).otherwise("kind"),
            table=pl.col("table").fill_null(""),
        )
        columns = {
            column: [self.names.setdefault(word, len(self.names)) for word in words[column].to_list()]
            for column in ("name", "kind", "table")
        }
        pieces = {
            "start": shown["start_ns"].to_list(),
            "duration": shown["duration_ns"].to_list(),
            **columns,
            "row": shown["row"].cast(pl.Int64).fill_null(-1).to_list(),
            "busy": detail.busy.tolist(),
        }
        return {"id": "path", "label": "critical path", "kind": "path", "device": "", "around": [], "rows": [pieces]}
