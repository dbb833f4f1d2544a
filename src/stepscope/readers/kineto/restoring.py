"""Reading a Chrome trace of `stepscope export` back to the tables it was made of; `own` has its words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final

import polars as pl

from stepscope.readers import names
from stepscope.readers.kineto import own
from stepscope.readers.kineto.columns import Batch, Columns
from stepscope.readers.kineto.events import Damage, Event, nanoseconds
from stepscope.readers.kineto.fields import ANNOTATION_CATEGORIES, counter_values, device_work_kind
from stepscope.trace.store import StoreWriter
from stepscope.trace.tables import LANE_KINDS, LINK_KINDS, REFERENCES, SCHEMAS, VOCABULARY, empty

_MARK: Final = own.PREFIX.encode()
_MOST_ROWS: Final = 2**32
_CATEGORY_OF: Final = {table: category for category, table in reversed(own.TABLES.items())}
"""Table -> the first of the categories of its events."""
_TARGETS: Final = {(table, column): target for table, column, target in REFERENCES}


class RestoringColumns(Columns):
    """Batches of such a file: its rows are in order and complete, and nothing follows from names any more."""

    exact = True

    def __init__(self, damage: Damage, keep_until_ns: int, *, whole: bool) -> None:
        """`whole`: the whole file is wanted, so that numbers of rows mean the same as in the trace that was written."""
        super().__init__(damage, keep_until_ns)
        self.origin_ns = 0
        self._whole = whole
        self._lanes_told = _Lanes()
        self._lane_of = self._lanes_told
        self._rows: list[own.Rows] = []
        self._launch_kinds = _Known(names.launch_kind)
        self._work_kinds = _Known(lambda key: device_work_kind(key[0], key[1], None))
        self._steps = _Known(lambda name: names.step_number(name, own=False))
        self._frame_parts = _Known(names.frame)

    def batch(self, events: list[Event]) -> Batch:
        """The rows of these events, by table."""
        for event in events:
            if event.ph == "M" and _MARK[:-1] in bytes(event.args) + event.name.encode():
                self._declare(event)
        groups: defaultdict[str, list[Event]] = defaultdict(list)  # a table's rows together, in the file's order
        others = []
        for event in events:
            if event.ph == "X":
                category = event.cat.lower()
                groups[_CATEGORY_OF.get(own.TABLES.get(category, ""), category)].append(event)
            else:
                others.append(event)
        batch = super().batch(others)
        self.events += len(events) - len(others)
        for category, group in groups.items():
            self._complete(category, group, batch)
        return batch

    def _declare(self, event: Event) -> None:
        if event.name == own.EVENT:
            self._rows += own.decoded([bytes(event.args)], own.Rows, self.damage) if self._whole else []
            return
        for found in own.decoded([bytes(event.args)], own.ThreadName, self.damage):
            if found.rows_of is not None and 0 <= found.rows_of < len(self._lanes_told.rows):
                self._lanes_told[event.pid, event.tid] = found.rows_of
            elif found.lane is not None and (event.pid, event.tid) not in self._lanes_told:
                self._lanes_told.tell(event.pid, event.tid, found.lane)

    def lane_rows(self) -> list[dict[str, Any]]:
        """The rows of the table `lanes`: as they were written, and of threads that were not."""
        return self._lanes_told.rows

    def _builder(self, category: str, group: list[Event]) -> tuple[str, Callable[[list[Event]], dict[str, pl.Series]]]:
        table = own.TABLES.get(category)
        if table in ("lines", "modules"):
            return table, lambda events: self._restored(table, events, {})
        table, build = super()._builder(category, group)
        return table, lambda events: self._restored(table, events, {**build(events), **self._told(table, events)})

    def _told(self, table: str, events: list[Event]) -> dict[str, pl.Series]:
        """The columns that follow from names and categories."""
        if table == "launches":
            return {"kind": self.pool.optional_codes([self._launch_kinds[event.name] for event in events])}
        if table == "device_work":
            known = self._work_kinds
            return {"kind": self.pool.codes([known[event.cat.lower(), event.name] for event in events])}
        if table == "annotations":
            kinds = [ANNOTATION_CATEGORIES.get(event.cat.lower(), "host") for event in events]
            return {
                "kind": self.pool.codes(kinds),
                "step": pl.Series([self._steps[event.name] for event in events], dtype=pl.Int64),
            }
        if table == "frames":
            parts = [self._frame_parts[event.name] for event in events]
            text = {
                column: self.pool.optional_codes([part[place] for part in parts])
                for column, place in (("file", 0), ("function", 2), ("module", 3))
            }
            return {**text, "line": pl.Series([part[1] for part in parts], dtype=pl.Int32)}
        return {}

    def _restored(self, table: str, events: list[Event], columns: dict[str, pl.Series]) -> dict[str, pl.Series]:
        """The columns with what the events' own arguments set."""
        changed: dict[str, tuple[list[int], list[Any]]] = {}
        for row, event in enumerate(events):
            raw = bytes(event.args)
            if _MARK in raw:
                for column, value in self._columns_of(table, raw).items():
                    rows, values = changed.setdefault(column, ([], []))
                    rows.append(row)
                    values.append(value)
        found = dict(columns)
        for column in _columns(table):
            plain = found.get(column)
            if column == "name":
                if column not in changed:
                    continue
                plain = self.pool.codes([event.name for event in events])
            kept = pl.UInt32 if SCHEMAS[table][column] is pl.String else SCHEMAS[table][column]
            whole = pl.Series([None] * len(events), dtype=kept) if plain is None else plain.cast(kept)
            if column in changed:
                rows, values = changed[column]
                told = self.pool.optional_codes(values) if kept is pl.UInt32 else pl.Series(values, dtype=kept)
                whole = whole.clone().scatter(rows, told)
            found[column] = whole
        return found

    def _columns_of(self, table: str, raw: bytes) -> dict[str, Any]:
        try:
            values = own.columns_of(table, raw)
        except ValueError:
            self.damage["damaged_arguments"] += 1
            return {}
        words = {column: VOCABULARY.get((table, column)) for column in values}
        return {
            column: value
            for column, value in values.items()
            if (known := words[column]) is None or value is None or value in known
        }

    def _memory(self, instants: list[Event], batch: Batch) -> None:
        events = [event for event in instants if event.name == "[memory]" and event.ts is not None]
        mine: Batch = {}
        super()._memory(events, mine)
        if "memory" in mine and mine["memory"].height == len(events):
            frame = mine["memory"]
            plain = {name: frame[name] for name in frame.columns if name not in own.UNWRITTEN}
            batch["memory"] = frame.select("start_ns", "lane").with_columns(**self._restored("memory", events, plain))

    def _counters(self, events: list[Event], batch: Batch) -> None:
        timed = [event for event in events if event.ts is not None]
        starts, fits = nanoseconds([event.ts for event in timed])
        kept = [event for event, fit in zip(timed, fits.tolist(), strict=True) if fit]
        if not kept:
            return
        found = [_first_value(event) for event in kept]
        columns = {
            "name": self.pool.codes([event.name for event in kept]),
            "series": self.pool.optional_codes([series for series, _ in found]),
            "value": pl.Series([value for _, value in found], dtype=pl.Float64),
        }
        frame = pl.DataFrame({"start_ns": starts[fits], "lane": self._lane_codes(kept)})
        batch["counters"] = frame.with_columns(**columns | self._restored("counters", kept, columns))

    def _flows(self, starts: list[Event], ends: list[Event], batch: Batch) -> None:
        if not self._whole:
            super()._flows(starts, ends, batch)

    def restore_rows(self, writer: StoreWriter) -> None:
        """Write the links, and set the references between rows that the file tells, in the tables that were written."""
        if self._whole:
            restore_rows(writer, self._rows, self.damage)


def restore_rows(writer: StoreWriter, told: list[own.Rows], damage: Counter[str]) -> None:
    """Write the links that were told, and set references between rows, in the tables that were written."""
    heights = {table: writer.scan(table).select(pl.len()).collect().item() for table in own.REFERENCES}
    for rows in told:
        part = _links(rows, heights["operators"]) if rows.table == "links" else empty("links")
        if part is None:
            damage["damaged_arguments"] += 1
        elif part.height:
            writer.write_part("links", part)
    for table, column in own.REFERENCES.items():
        mine = [rows for rows in told if rows.table == table and rows.column == column]
        if mine:
            _set_references(writer, table, column, mine, heights[_TARGETS[table, column]])


def _first_value(event: Event) -> tuple[str | None, float | None]:
    """Series and value of a counter that has one."""
    values = counter_values(event.args)
    return next(((name, value) for name, value in values.items() if not name.startswith(own.PREFIX)), (None, None))


class _Lanes(dict[tuple[Any, Any], int]):
    """Lane of (process, thread) as written; `rows` are those of the table."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def tell(self, process: int | str, thread: int | str, lane: own.Lane) -> int:
        number = self[process, thread] = len(self.rows)
        self.rows.append({"lane": number, **lane_columns(lane)})
        return number

    def __missing__(self, key: tuple[Any, Any]) -> int:
        process, thread = map(str, key)
        kind = "host_thread" if process.isdecimal() else "other"
        return self.tell(*key, own.Lane(kind=kind, process=process, thread=thread, name=f"{process} {thread}".strip()))


class _Known(dict[Any, Any]):
    """What follows from a name, worked out once each."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __missing__(self, key: Any) -> Any:
        found = self[key] = self._function(key)
        return found


def _columns(table: str) -> list[str]:
    return [column for column in SCHEMAS[table] if column not in own.UNWRITTEN]


def lane_columns(lane: own.Lane) -> dict[str, Any]:
    """The columns of `lanes` that an export tells of a lane, but for its number."""
    kind = lane.kind if lane.kind in LANE_KINDS else "other"
    rank = lane.rank if lane.rank is not None and abs(lane.rank) < 2**31 else None
    return {
        "kind": kind,
        "process": lane.process,
        "process_name": lane.process_name,
        "thread": lane.thread,
        "name": lane.name,
        "rank": rank,
        "device": lane.device,
        "queue": lane.queue,
    }


def _links(rows: own.Rows, operators: int) -> pl.DataFrame | None:
    """Rows of `links`; None where they point at nothing."""
    ends = [*rows.sources, *rows.targets]
    if not len(rows.kinds) == len(rows.sources) == len(rows.targets) or any(
        kind not in (*LINK_KINDS, None) for kind in rows.kinds
    ):
        return None
    if any(end is not None and not 0 <= end < operators for end in ends):
        return None
    return pl.DataFrame(
        {"kind": rows.kinds, "source": rows.sources, "target": rows.targets}, schema=dict(SCHEMAS["links"])
    )


def _set_references(writer: StoreWriter, table: str, column: str, told: list[own.Rows], beyond: int) -> None:
    """Set rows of a column of row numbers; those that would point at nothing stay as they are."""
    pairs = [
        (row, target)
        for rows in told
        for row, target in zip(rows.rows, rows.targets, strict=False)
        if 0 <= row < _MOST_ROWS and (target is None or 0 <= target < beyond)
    ]
    changes = pl.DataFrame(pairs, schema={"row": pl.Int64, "target": pl.UInt32}, orient="row").unique(
        "row", keep="first", maintain_order=True
    )
    if column == "parent":
        changes = _possible_parents(changes, writer.scan(table).select("lane", "start_ns", "duration_ns").collect())

    def changed(part: pl.DataFrame, first: int) -> pl.DataFrame:
        mine = changes.filter(pl.col("row").is_between(first, first + part.height - 1))
        kept = part[column].clone().scatter((mine["row"] - first).to_list(), mine["target"])
        return part.with_columns(kept.alias(column))

    writer.change(table, changed)


def _possible_parents(changes: pl.DataFrame, slices: pl.DataFrame) -> pl.DataFrame:
    """Without parents that are not open on the lane of their child when it starts, or could close a circle."""
    changes = changes.filter(pl.col("row") < slices.height)
    child, parent = slices[changes["row"]], slices.select(pl.all().gather(changes["target"]))
    starts, durations = (child["start_ns"], parent["start_ns"]), (child["duration_ns"], parent["duration_ns"])
    later = (durations[1] == durations[0]) & (changes["target"] < changes["row"])
    before = (starts[1] < starts[0]) | ((starts[1] == starts[0]) & ((durations[1] > durations[0]) | later))
    possible = (child["lane"] == parent["lane"]) & before & (starts[1] + durations[1] >= starts[0])
    return changes.filter(possible | changes["target"].is_null())
