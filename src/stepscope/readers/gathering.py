"""Collect the rows that a reader finds in one file, in any order, until they can be sorted and written."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import polars as pl

from stepscope.readers.assembly import Assembly, Spill
from stepscope.readers.source import current
from stepscope.trace.metadata import TraceWarning
from stepscope.trace.model import StoreWriter
from stepscope.trace.tables import LANE_KINDS, SCHEMAS, SLICE_TABLES
from stepscope.trace.window import StepRange, Window

_LATEST_NS: Final = 2**62
_MOST_DETAILS: Final = 20
_WORKED_OUT: Final = frozenset(
    {("operators", "parent"), ("frames", "parent"), ("launches", "operator"), ("device_work", "launch")}
)
EXPLANATIONS: Final = {
    "time_out_of_range": "events with an impossible time were skipped",
    "number_out_of_range": "numbers that are too large for their column were left out: {}",
    "negative_duration": "events with a negative duration were given the duration 0",
    "instant_before_start": "instants recorded before the first slice were moved to the start of the trace",
    "work_before_launch": "device work starts before its launch was called: host and device clocks disagree",
    "unmatched_forward_backward": "links from forward to backward operators lead to no operator",
}
"""Warning texts for damage that any format can have; each format adds its own."""


class Gathering:
    """Rows of a trace's tables, spilled to disk when there are many.

    Attributes:
        damage: counts of what was skipped or repaired, by "kind" or "kind:detail".
        origin_ns: the earliest start of a slice on the file's clock; None before the first.
        events: rows added; a reader with a better count may set it.
        complete_events: rows added to tables of slices.
    """

    def __init__(self, directory: Path, *, damage: Counter[str] | None = None) -> None:
        self.pool = StringPool()
        self.damage: Counter[str] = Counter() if damage is None else damage
        self.origin_ns: int | None = None
        self.events = 0
        self.complete_events = 0
        self._spill = Spill(directory)
        self._lanes: dict[Hashable, dict[str, Any]] = {}

    def lane(self, key: Hashable, **columns: str | int | None) -> int:
        """Return the number of the lane with this key, creating it from `columns` of the table `lanes` on first use."""
        if columns["kind"] not in LANE_KINDS or not columns.keys() <= SCHEMAS["lanes"].keys():
            raise ValueError(f"no columns of a lane: {columns}")
        row = self._lanes.get(key)
        if row is None:
            row = self._lanes[key] = {"lane": len(self._lanes), **columns}
        return int(row["lane"])

    def add(self, table: str, frame: pl.DataFrame) -> None:
        """Add rows to a table, in any order.

        Args:
            frame: columns of the table, except those that `write` computes; times in nanoseconds on the file's clock,
                text as strings or as indices into `pool` (UInt32). Missing columns are null.
        """
        columns = [name for name in SCHEMAS[table] if name in frame.columns and (table, name) not in _WORKED_OUT]
        if len(columns) < frame.width:
            unknown = sorted(set(frame.columns) - set(columns))
            raise ValueError(f"{table} takes no columns {', '.join(unknown)}")
        if not _has_usual_times(frame):
            frame = self._with_possible_times(frame.with_columns(pl.col("start_ns").cast(pl.Int64)))
        self.events += frame.height
        if frame.is_empty():
            return
        if table in SLICE_TABLES:
            self.complete_events += frame.height
            earliest = int(frame["start_ns"].min())  # type: ignore[arg-type]
            self.origin_ns = earliest if self.origin_ns is None else min(self.origin_ns, earliest)
        self._spill.add({table: pl.DataFrame([self._column(table, name, frame[name]) for name in columns])})

    def _column(self, table: str, name: str, column: pl.Series) -> pl.Series:
        if SCHEMAS[table][name] is not pl.String:
            return fitting(name, column, SCHEMAS[table][name], self.damage)
        if column.dtype == pl.UInt32:
            return column
        text: pl.Series = column.cast(pl.String)
        different = text.unique().drop_nulls()
        codes = self.pool.codes(different.to_list())
        coded: pl.Series = text.replace_strict(different, codes, default=None, return_dtype=pl.UInt32)
        return coded.alias(name)

    def _with_possible_times(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Drop rows with impossible times; set negative durations to 0."""
        possible = pl.col("start_ns").is_between(-_LATEST_NS, _LATEST_NS, closed="none")
        if "duration_ns" in frame.columns:
            frame = frame.with_columns(pl.col("duration_ns").cast(pl.Int64))
            negative = int((frame["duration_ns"] < 0).sum())
            if negative:
                self.damage["negative_duration"] += negative
                frame = frame.with_columns(pl.col("duration_ns").clip(lower_bound=0))
            possible &= pl.col("duration_ns") < _LATEST_NS
        kept = frame.filter(possible)
        if kept.height < frame.height:
            self.damage["time_out_of_range"] += frame.height - kept.height
        return kept

    def add_flows(self, frame: pl.DataFrame) -> None:
        """Add flow ends.

        Args:
            frame: flow (text), category, end ("source" or "target"), and lane and start_ns of the slice at that end.
        """
        text = [self.pool.codes(frame[name].to_list()).alias(name) for name in ("end", "category", "flow")]
        self._spill.add(
            {"flows": frame.select(pl.col("start_ns").cast(pl.Int64), pl.col("lane").cast(pl.Int32), *text)}
        )

    def write(self, writer: StoreWriter, window: Window | None, steps: StepRange | None) -> Window | None:
        """Write every table and return the window that was read.

        Raises UsageError if the requested steps do not exist.
        """
        self._spill.flush()
        origin_ns = self.origin_ns or 0
        strings = self.pool.strings()
        assembly = Assembly(strings, self._spill, writer, self.damage, origin_ns, window, steps)
        assembly.write(list(self._lanes.values()))
        self._spill.clean()
        return assembly.window


def _has_usual_times(frame: pl.DataFrame) -> bool:
    """Whether no row must be dropped or changed for its times, which is found faster than such rows."""
    for name, above in (("start_ns", -_LATEST_NS), ("duration_ns", -1)):
        if name in frame.columns:
            column = frame[name]
            if column.dtype != pl.Int64 or column.null_count():
                return False
            least, most = column.min(), column.max()
            if isinstance(least, int) and isinstance(most, int) and not above < least <= most < _LATEST_NS:
                return False
    return True


def fitting(name: str, values: pl.Series | Sequence[int | None], dtype: Any, damage: Counter[str]) -> pl.Series:
    """Cast numbers to their column's type; those that do not fit become null and are counted in `damage`."""
    if not isinstance(values, pl.Series):
        with contextlib.suppress(TypeError, OverflowError, pl.exceptions.PolarsError):
            return pl.Series(values, dtype=dtype, strict=True)  # all fit
    column = values if isinstance(values, pl.Series) else pl.Series(values, dtype=pl.Int128, strict=False)
    if column is not values and (lost := column.null_count() - list(values).count(None)):
        damage[f"number_out_of_range:{name}"] += lost
    if column.dtype == dtype:
        return column
    kept: pl.Series = column.cast(dtype, strict=False)
    if lost := kept.null_count() - column.null_count():
        damage[f"number_out_of_range:{name}"] += lost
    return kept


def warnings(damage: Mapping[str, int], explanations: Mapping[str, str]) -> tuple[TraceWarning, ...]:
    """Convert damage counts to warnings, grouped by kind, listing only the most frequent details of each.

    Args:
        damage: counts by "kind" or "kind:detail".
        explanations: a sentence for each kind, where {} is replaced by the detail.
    """
    kinds: dict[str, Counter[str]] = {}
    for key, count in damage.items():
        kind, _, detail = key.partition(":")
        if count:
            kinds.setdefault(kind, Counter())[detail] += count
    result = []
    for kind, details in sorted(kinds.items()):
        shown = details.most_common(_MOST_DETAILS)
        if others := details.total() - sum(count for _, count in shown):
            shown.append(("and others", others))
        result += [TraceWarning(kind, count, explanations[kind].format(detail)) for detail, count in shown]
    return tuple(result)


_NOT_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)


class Codes(dict[Any, int]):
    """Assigns numbers to keys in order of first use."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code


class _RawCodes(dict[bytes, "int | None"]):
    def __init__(self, codes: Codes) -> None:
        super().__init__({b"null": None})
        self._codes = codes

    def __missing__(self, raw: bytes) -> int:
        code = self[raw] = self._codes[one_spacing(raw).decode("utf-8", "replace")]
        return code


def one_spacing(raw: bytes) -> bytes:
    """Normalise JSON text to one space after each comma and colon, since profilers format shapes differently."""
    try:
        return msgspec.json.format(raw, indent=0)
    except _NOT_JSON:
        return raw


class StringPool:
    """A pool of distinct strings, referred to by index."""

    def __init__(self) -> None:
        self._codes = Codes()
        self._raw_codes = _RawCodes(self._codes)

    def codes(self, strings: Sequence[str]) -> pl.Series:
        """Return the index of each string (UInt32)."""
        known = self._codes
        current().require("strings", len(known))
        return pl.Series([known[string] for string in strings], dtype=pl.UInt32)

    def optional_codes(self, strings: Sequence[Any]) -> pl.Series:
        """Return the index of each string or integer, null for None (UInt32)."""
        return pl.Series(self.numbers(strings), dtype=pl.UInt32)

    def numbers(self, strings: Iterable[Any], missing: int | None = None) -> list[Any]:
        """Return the index of each string or integer, `missing` for None."""
        known = self._codes
        current().require("strings", len(known))
        return [missing if s is None else known[str(s)] for s in strings]

    def raw_codes(self, raws: Sequence[Any]) -> pl.Series:
        """Return the index of each JSON text, null for JSON's null (UInt32)."""
        return pl.Series(self.raw_numbers(raws), dtype=pl.UInt32)

    def raw_numbers(self, raws: Sequence[Any]) -> list[Any]:
        known = self._raw_codes
        return [known[raw] for raw in map(bytes, raws)]

    def strings(self) -> pl.Series:
        current().require("strings", len(self._codes))
        return pl.Series([str(key) for key in self._codes], dtype=pl.String)
