"""Convert decoded events to batches of rows: one data frame per table, with strings as indices into a pool.

Times are int64 nanoseconds on the file's clock; `assembly` shifts them to the start of the trace.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.readers.gathering import Codes, StringPool, fitting
from stepscope.readers.kineto import arguments
from stepscope.readers.kineto.events import LATEST_NS, LONGEST_NS, Damage, Event, difference, nanoseconds
from stepscope.readers.kineto.scanned import Rows, RowTables, Scan
from stepscope.trace.naming import FORWARD_BACKWARD_FLOWS, host_slice_table, is_annotation, synchronisation_kind
from stepscope.trace.tables import EXCHANGE_COLUMNS, SCHEMAS

MOST_OPEN: Final = 1_000_000
"""Open beginnings that are kept; a recording has a few on each thread."""
_EMPTY: Final = (b"{}", b"null")


_BEGINNINGS: Final = frozenset({"B", "b", "S"})
_ENDS: Final = frozenset({"E", "e", "F"})


class Pairs:
    """Matches each end to the last open beginning with the same name on the same row.

    Asynchronous slices are distinguished by category and id, and get a row for each category.
    """

    def __init__(self, damage: Damage) -> None:
        self._damage = damage
        self._open: dict[tuple[Any, ...], list[Event]] = {}
        self._count = 0

    def closed(self, events: list[Event]) -> list[Event]:
        """Return the events with beginnings removed and each end replaced by the complete event it closes."""
        if _BEGINNINGS.isdisjoint(phases := {event.ph for event in events}) and _ENDS.isdisjoint(phases):
            return events
        result = []
        for event in events:
            if event.ph in _BEGINNINGS:
                self._begin(event)
            elif event.ph not in _ENDS:
                result.append(event)
            elif (whole := self._end(event)) is not None:
                result.append(whole)
        return result

    def finish(self) -> None:
        """Count beginnings that were never closed."""
        if self._count:
            self._damage["unclosed"] += self._count

    def _begin(self, event: Event) -> None:
        if event.ts is None or self._count >= MOST_OPEN:
            self._damage["incomplete_event"] += 1
            return
        self._open.setdefault(_row(event), []).append(event)
        self._count += 1

    def _end(self, event: Event) -> Event | None:
        stack = self._open.get(_row(event), [])
        place = len(stack) - 1
        while event.name and place >= 0 and stack[place].name != event.name and len(stack) - place < 100:
            place -= 1
        if place < 0 or event.ts is None or (event.name and stack[place].name != event.name):
            self._damage["unopened"] += 1
            return None
        begin = stack.pop(place)
        self._count -= 1
        begin.ph, begin.dur = "X", difference(event.ts, begin.ts)
        begin.cat = begin.cat or event.cat
        if event.ph != "E":
            begin.tid = f"async {begin.cat}".rstrip()
        begin.args = _joined(begin.args, event.args)
        return begin


def _row(event: Event) -> tuple[Any, ...]:
    return (event.pid, event.tid) if event.ph in "BE" else (event.pid, event.cat, event.id)


def _joined(first: msgspec.Raw, second: msgspec.Raw) -> msgspec.Raw:
    """Merge both arguments; the end's values win. Unreadable arguments are counted later."""
    if bytes(second) in _EMPTY:
        return first
    if bytes(first) in _EMPTY:
        return second
    try:
        values = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
        values.update(msgspec.json.decode(second, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return second
    return msgspec.Raw(msgspec.json.encode(values))


Batch: TypeAlias = dict[str, pl.DataFrame]
_ZERO_TIME_LIMIT_NS: Final = 10**12
_HOST_TABLES: Final = ("operators", "launches", "frames")


class Columns:
    """Converts events to batches, and collects facts about the whole file.

    Attributes:
        lanes: (process, thread) -> number of the lane.
        queues: lane -> (device, stream), for lanes with device work.
        host_lanes: lanes with operators, launches or frames.
        origin_ns: the earliest start of a complete event; None before the first.
    """

    def __init__(self, damage: Damage, keep_until_ns: int = 2 * LATEST_NS) -> None:
        self.pool = StringPool()
        self.lanes = Codes()
        self._lane_of: dict[tuple[Any, Any], int] = _LaneCache(self.lanes)
        self.queues: dict[int, tuple[str, str]] = {}
        self.host_lanes: set[int] = set()
        self.process_names: dict[str, str] = {}
        self.process_labels: dict[str, str] = {}
        self.thread_names: dict[tuple[str, str], str] = {}
        self.events = 0
        self.complete_events = 0
        self.origin_ns: int | None = None
        self.damage = damage
        self._keep_until_ns = keep_until_ns
        self._seen_names: set[tuple[str, Any, Any]] = set()
        self._has_correlation = False
        self.pairs = Pairs(damage)
        self.row_tables = RowTables(self.pool, self._lane_of, self.queues, damage)

    def batch(self, events: list[Event] | Scan) -> Batch:
        self.events += len(events)
        complete: defaultdict[str, list[Event]] = defaultdict(list)
        others: defaultdict[str, list[Event]] = defaultdict(list)
        scan = events if isinstance(events, Scan) else None
        for event in events.others if isinstance(events, Scan) else self.pairs.closed(events):
            if event.ph == "X":
                complete[event.cat or self._category_without(event)].append(event)
            else:
                others[event.ph].append(event)
        batch: Batch = {}
        for category, group in (complete if scan is None else scan.complete).items():
            if isinstance(group, Rows):
                self._complete_rows(category.lower(), group, batch)
            else:
                self._complete(category.lower(), group, batch)
        if scan is not None and scan.memory is not None:
            _append(batch, "memory", self.row_tables.memory(scan.memory))
        self._memory(others.pop("i", []) + others.pop("I", []), batch)
        for phase, end in (("s", "source"), ("f", "target")):
            if scan is not None and phase in scan.flows:
                self._flow_rows(end, scan.flows[phase], batch)
            self._flows(end, others.pop(phase, []), batch)
        self._counters(others.pop("C", []), batch)
        self._names(others.pop("M", []))
        for phase in ("t", "P", "N", "O", "D", "R", "c"):  # flow steps and marks that no table uses
            others.pop(phase, None)
        for phase, group in others.items():
            self.damage[f"unsupported_phase:{phase[:8]}"] += len(group)
        return batch

    def _category_without(self, event: Event) -> str:
        category = arguments.LEGACY_CATEGORIES.get(event.pid)
        if category is None:
            category = arguments.CATEGORY_OF_TABLE.get(host_slice_table(event.name) or "", "user_annotation")
            self.damage["uncategorised"] += 1
        return category

    def lane_rows(self) -> list[dict[str, Any]]:
        rows = []
        for (process, thread), lane in self.lanes.items():
            device, queue = self.queues.get(lane, (None, None))
            label = self.process_labels.get(process, "")
            if device is not None:
                kind = "queue"
            else:
                is_thread = process.isdecimal() and label in ("", "CPU")
                kind = "host_thread" if is_thread or lane in self.host_lanes else "other"
            rows.append(
                {
                    "lane": lane,
                    "kind": kind,
                    "process": process,
                    "process_name": self.process_names.get(process),
                    "thread": thread,
                    "name": self.thread_names.get((process, thread)) or f"{process} {thread}".strip(),
                    "device": device,
                    "queue": queue,
                }
            )
        return rows

    def _complete(self, category: str, group: list[Event], batch: Batch) -> None:
        timed = [event for event in group if event.ts is not None and event.dur is not None]
        if len(timed) < len(group):
            self.damage["incomplete_event"] += len(group) - len(timed)
        self.complete_events += len(timed)
        start, start_fits = nanoseconds([event.ts for event in timed])
        duration, duration_fits = nanoseconds([event.dur for event in timed])
        usable, duration = self._usable(category, start, duration, start_fits & duration_fits)
        kept = timed
        if not usable.all():
            kept = [event for event, keep in zip(timed, usable.tolist(), strict=True) if keep]
            start, duration = start[usable], duration[usable]
        if not kept:
            return
        table, build = self._builder(category, kept)
        if table == "operators" and any(is_annotation(name) for name in {event.name for event in kept}):
            mask = np.fromiter((is_annotation(event.name) for event in kept), np.bool_, len(kept))
            marks = [event for event, is_mark in zip(kept, mask, strict=True) if is_mark]
            _append(batch, "annotations", self._slices(marks, start[mask], duration[mask], self._annotations(marks)))
            kept = [event for event, is_mark in zip(kept, mask, strict=True) if not is_mark]
            start, duration = start[~mask], duration[~mask]
        if kept:
            frame = self._slices(kept, start, duration, build(kept))
            _append(batch, table, frame)
            if table in _HOST_TABLES:
                self.host_lanes.update(frame["lane"].unique())

    def _builder(self, category: str, group: list[Event]) -> tuple[str, Any]:
        if category in arguments.OPERATOR_CATEGORIES:
            return "operators", self._operators
        if category in arguments.LAUNCH_CATEGORIES:
            return "launches", self._launches
        if category in arguments.DEVICE_CATEGORIES:
            return "device_work", lambda events: self._device_work(category, events)
        if category in arguments.FRAME_CATEGORIES:
            return "frames", self._frames
        if category in arguments.SYNCHRONISATION_CATEGORIES:
            return "synchronisations", self._synchronisations
        if category not in arguments.ANNOTATION_CATEGORIES:
            self.damage[f"unknown_category:{category[:40]}"] += len(group)
        kind = arguments.ANNOTATION_CATEGORIES.get(category, "host")
        return "annotations", lambda events: self._annotations(events, kind)

    def _complete_rows(self, category: str, rows: Rows, batch: Batch) -> None:
        self.complete_events += len(rows)
        usable, duration = self._usable(category, rows.start_ns, rows.duration_ns, np.ones(len(rows), np.bool_))
        rows.duration_ns = duration
        kept = rows.filtered(usable)
        if len(kept):
            if rows.table == "device_work":
                self._has_correlation = self._has_correlation or kept.has("correlation")
            frame = self.row_tables.slices(category, kept)
            _append(batch, rows.table, frame)
            if rows.table in _HOST_TABLES:
                self.host_lanes.update(np.unique(frame["lane"].to_numpy()).tolist())

    def _usable(
        self,
        category: str,
        start: npt.NDArray[np.int64],
        duration: npt.NDArray[np.int64],
        fits: npt.NDArray[np.bool_],
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return a mask of the usable times inside the window, and the durations without negative ones."""
        # Device work after the window may have been launched inside it.
        keep_until_ns = 2 * LATEST_NS if category in arguments.DEVICE_CATEGORIES else self._keep_until_ns
        usable = fits & (duration < LONGEST_NS)
        self._count("time_out_of_range", ~usable)
        unset = usable & (start == 0) & (duration == 0)
        if unset.any() and max(start[usable].max(), self.origin_ns or 0) > _ZERO_TIME_LIMIT_NS:
            self._count("event_without_time", unset)
            usable &= ~unset
        self._count("negative_duration", usable & (duration < 0))
        if usable.any():
            earliest = int(start[usable].min())
            self.origin_ns = earliest if self.origin_ns is None else min(self.origin_ns, earliest)
            usable &= start - self.origin_ns < keep_until_ns
        return usable, np.maximum(duration, 0)

    def _count(self, kind: str, which: npt.NDArray[np.bool_]) -> None:
        if count := int(which.sum()):
            self.damage[kind] += count

    def _slices(
        self,
        events: list[Event],
        start: npt.NDArray[np.int64],
        duration: npt.NDArray[np.int64],
        columns: dict[str, pl.Series],
    ) -> pl.DataFrame:
        return pl.DataFrame(
            {
                "start_ns": start,
                "duration_ns": duration,
                "name": self.pool.codes([event.name for event in events]),
                "lane": self._lane_codes(events),
                **columns,
            }
        )

    def _lane_codes(self, events: list[Event]) -> pl.Series:
        lane_of = self._lane_of
        return pl.Series([lane_of[event.pid, event.tid] for event in events], dtype=pl.Int32)

    def _argument_columns(self, table: str, args: Sequence[Any], *names: str) -> dict[str, pl.Series]:
        """Build columns of a table from the arguments of the same names; text becomes indices into the pool."""
        found = {}
        for name in names:
            values = list(map(attrgetter(name), args))
            dtype = SCHEMAS[table][name]
            if dtype is not pl.String:
                found[name] = pl.Series(values, dtype=dtype, strict=dtype is pl.Int64)
            elif values and isinstance(values[0], msgspec.Raw):
                found[name] = self.pool.raw_codes(values)
            else:
                found[name] = self.pool.optional_codes(values)
        return found

    def _operators(self, events: list[Event]) -> dict[str, pl.Series]:
        args = arguments.decode(events, arguments.Operator, self.damage)
        numbers = ("sequence_number", "forward_thread", "external_id")
        return self._argument_columns("operators", args, *numbers, "input_shapes", "input_types", "input_values") | {
            "call_stack": self.pool.optional_codes([a.call_stack or None for a in args])
        }

    def _launches(self, events: list[Event]) -> dict[str, pl.Series]:
        args = arguments.decode(events, arguments.Launch, self.damage)
        return self._argument_columns("launches", args, "correlation", "kernel") | {
            "external_id": arguments.external_ids(args),
            "bytes": arguments.integers([arguments.integer(a.bytes) for a in args]),
        }

    def _device_work(self, category: str, events: list[Event]) -> dict[str, pl.Series]:
        args = arguments.decode(events, arguments.DeviceWork, self.damage)
        devices = [str(e.pid if a.device is None else a.device) for e, a in zip(events, args, strict=True)]
        queues = [arguments.queue(e.tid if a.stream is None else a.stream) for e, a in zip(events, args, strict=True)]
        for event, device, queue in zip(events, devices, queues, strict=True):
            self.queues.setdefault(self._lane_of[event.pid, event.tid], (device, queue))
        kinds = _Kinds(category)
        self._has_correlation = self._has_correlation or any(a.correlation is not None for a in args)
        registers = arguments.integers([arguments.integer(a.registers) for a in args])
        return {
            "kind": self.pool.codes([kinds[e.name, a.direction] for e, a in zip(events, args, strict=True)]),
            "device": self.pool.codes(devices),
            "queue": self.pool.codes(queues),
            "external_id": arguments.external_ids(args),
            "bytes": arguments.integers([a.size if a.bytes is None else arguments.integer(a.bytes) for a in args]),
            "registers": fitting("registers", registers, pl.Int32, self.damage),
            "shared_memory_bytes": arguments.integers([arguments.integer(a.shared_memory) for a in args]),
            "occupancy": pl.Series([a.occupancy for a in args], dtype=pl.Float64, strict=False) / 100,
            **self._argument_columns("device_work", args, "correlation", "grid", "block", "blocks_per_multiprocessor"),
            **self._argument_columns("device_work", args, *EXCHANGE_COLUMNS, "module"),
        }

    def _frames(self, events: list[Event]) -> dict[str, pl.Series]:
        return self._argument_columns("frames", arguments.decode(events, arguments.Frame, self.damage), "python_id")

    def _annotations(self, events: list[Event], kind: str = "host") -> dict[str, pl.Series]:
        args = arguments.decode(events, arguments.Annotation, self.damage)
        return {
            "kind": self.pool.codes([kind] * len(events)),
            "call_stack": self.pool.optional_codes([a.call_stack or None for a in args]),
        }

    def _synchronisations(self, events: list[Event]) -> dict[str, pl.Series]:
        args = arguments.decode(events, arguments.Synchronisation, self.damage)
        words = [e.name if a.kind is None else a.kind for e, a in zip(events, args, strict=True)]
        waited = [None if a.waited_correlation == -1 else a.waited_correlation for a in args]
        return self._argument_columns("synchronisations", args, "correlation", "device") | {
            "kind": self.pool.codes(list(map(synchronisation_kind, words))),
            "queue": self.pool.optional_codes([arguments.real_queue(a.stream) for a in args]),
            "waited_queue": self.pool.optional_codes([arguments.real_queue(a.waited_stream) for a in args]),
            "waited_correlation": arguments.integers(waited),
        }

    def _memory(self, instants: list[Event], batch: Batch) -> None:
        events = [event for event in instants if event.name == "[memory]" and event.ts is not None]
        if not events:
            return
        start, fits = nanoseconds([event.ts for event in events])
        args = arguments.decode(events, arguments.Memory, self.damage)
        frame = pl.DataFrame(
            {
                "start_ns": start,
                "lane": self._lane_codes(events),
                "device": self.pool.codes([arguments.memory_device(a) for a in args]),
                **self._argument_columns("memory", args, "address", "bytes", "total_allocated", "total_reserved"),
            }
        )
        self._count("time_out_of_range", ~fits)
        _append(batch, "memory", frame.filter(pl.Series(fits)))

    def _flows(self, end: str, group: list[Event], batch: Batch) -> None:
        """Keep forward-backward flows always, other flows only until a correlation number was seen."""
        events = [
            event
            for event in group
            if event.ts is not None and (event.cat in FORWARD_BACKWARD_FLOWS or not self._has_correlation)
        ]
        if not events:
            return
        start, fits = nanoseconds([event.ts for event in events])
        frame = pl.DataFrame(
            {
                "start_ns": start,
                "lane": self._lane_codes(events),
                "end": self.pool.codes([end] * len(events)),
                "category": self.pool.codes([event.cat for event in events]),
                "flow": arguments.integers([self._flow_number(event.id) for event in events]),
            }
        )
        _append(batch, "flows", frame.filter(pl.Series(fits)))

    def _flow_number(self, written: int | str | None) -> int | None:
        """Return a flow's id if it is an integer, else a number far from those that profilers give."""
        if written is None:
            return None
        with contextlib.suppress(ValueError):
            number = int(written)
            if abs(number) < 2**63 and str(number) == str(written):
                return number
        return 2**62 + int(self.pool.numbers([written])[0])

    def _flow_rows(self, end: str, rows: Rows, batch: Batch) -> None:
        if self._has_correlation:
            wanted = [category in FORWARD_BACKWARD_FLOWS for category in rows.names.values]
            rows = rows.filtered(np.array(wanted)[rows.names.codes])
        if len(rows):
            _append(batch, "flows", self.row_tables.flows(end, rows))

    def _counters(self, events: list[Event], batch: Batch) -> None:
        timed = [event for event in events if event.ts is not None]
        start, fits = nanoseconds([event.ts for event in timed])
        rows = [
            (start_ns, self._lane_of[event.pid, event.tid], event.name, series, value)
            for event, start_ns, fit in zip(timed, start.tolist(), fits.tolist(), strict=True)
            for series, value in arguments.counter_values(event.args).items()
            if fit
        ]
        if rows:
            times, lane, name, series, value = zip(*rows, strict=True)
            frame = {
                "start_ns": arguments.integers(list(times)),
                "lane": pl.Series(lane, dtype=pl.Int32),
                "name": self.pool.codes(name),
                "series": self.pool.codes(series),
                "value": pl.Series(value, dtype=pl.Float64),
            }
            _append(batch, "counters", pl.DataFrame(frame))

    def _names(self, events: list[Event]) -> None:
        fresh: list[Event] = []
        for event in events:
            key = (event.name, event.pid, event.tid)
            if key not in self._seen_names:
                self._seen_names.add(key)
                fresh.append(event)
        for event, args in zip(fresh, arguments.decode(fresh, arguments.Name, self.damage), strict=True):
            process = str(event.pid)
            if event.name == "process_name" and args.name is not None:
                self.process_names[process] = args.name
            elif event.name == "process_labels" and args.labels is not None:
                self.process_labels[process] = args.labels
            elif event.name == "thread_name" and args.name is not None:
                self.thread_names[process, arguments.queue(event.tid)] = args.name


class _LaneCache(dict[tuple[Any, Any], int]):
    """Lane of (process, thread) as written in the file; 7, "7" and "stream 7" are the same thread."""

    def __init__(self, lanes: Codes) -> None:
        self._lanes = lanes

    def __missing__(self, key: tuple[Any, Any]) -> int:
        lane = self[key] = self._lanes[str(key[0]), arguments.queue(key[1])]
        return lane


class _Kinds(dict[tuple[str, Any], str]):
    def __init__(self, category: str) -> None:
        self._category = category

    def __missing__(self, key: tuple[str, Any]) -> str:
        kind = self[key] = arguments.device_work_kind(self._category, *key)
        return kind


def _append(batch: Batch, table: str, frame: pl.DataFrame) -> None:
    batch[table] = batch[table].vstack(frame) if table in batch else frame
