"""The trace: immutable tables with metadata about their origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

import polars as pl

from stepscope.errors import InconsistentTraceError
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.tables import REFERENCES, SCHEMAS, SLICE_TABLES, VOCABULARY, conform, empty

if TYPE_CHECKING:
    from pathlib import Path


TableLoader = Callable[[str], pl.LazyFrame]


class _Table:
    def __set_name__(self, owner: type[Trace], name: str) -> None:
        self._name = name

    def __get__(self, trace: Trace, owner: type[Trace]) -> pl.DataFrame:
        return trace.table(self._name)


@dataclass(frozen=True)
class Trace:
    """A profile as tables, loaded on first access (see `stepscope.trace.tables` for their columns).

    Attributes:
        warnings: what was skipped or repaired while reading.
        lanes, operators, launches, device_work, frames, lines, modules, annotations, synchronisations, memory,
            counters, links: the tables.
    """

    lanes = _Table()
    operators = _Table()
    launches = _Table()
    device_work = _Table()
    frames = _Table()
    lines = _Table()
    modules = _Table()
    annotations = _Table()
    synchronisations = _Table()
    memory = _Table()
    counters = _Table()
    links = _Table()

    metadata: Metadata
    warnings: tuple[TraceWarning, ...]
    _load: TableLoader = field(repr=False, compare=False)
    _loaded: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    _owner: object = field(default=None, repr=False, compare=False)
    """An object that must live as long as the trace: a temporary directory, or a lock on a cache entry."""

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, pl.DataFrame],
        metadata: Metadata | None = None,
        warnings: tuple[TraceWarning, ...] = (),
    ) -> Trace:
        """Create a trace from frames in memory; missing tables are empty, and missing columns null."""
        unknown = sorted(set(tables) - set(SCHEMAS))
        if unknown:
            raise ValueError(f"no such tables: {', '.join(unknown)}")
        frames = {name: conform(name, tables[name]) if name in tables else empty(name) for name in SCHEMAS}
        return cls(metadata or Metadata(), warnings, lambda name: frames[name].lazy(), dict(frames))

    def table(self, name: str) -> pl.DataFrame:
        """Return the whole table of that name."""
        if name not in self._loaded:
            self._loaded[name] = self.scan(name).collect()
        return self._loaded[name]

    def scan(self, name: str) -> pl.LazyFrame:
        """Return the table for a lazy query, which reads only the columns it needs."""
        if name not in SCHEMAS:
            raise KeyError(name)
        return self._loaded[name].lazy() if name in self._loaded else self._load(name)

    @property
    def working_devices(self) -> list[str]:
        """The devices with any work, sorted; work without a device, in damaged files, belongs to no device."""
        return sorted(self.device_work["device"].unique().drop_nulls().to_list())

    def check(self) -> None:
        """Raise `InconsistentTraceError` unless every table is valid; see `stepscope.trace.model.check`."""

        check(self)

    def save(self, directory: str | Path) -> None:
        """Write the trace as Parquet files into a new directory, complete or not at all."""
        from stepscope.trace.store_writing import save

        save(self, directory)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td style='text-align:right'>{self.table(name).height:,}</td></tr>" for name in SCHEMAS
        )
        title = escape(f"{self.metadata.format} trace {self.metadata.path}".strip())
        return f"<b>{title}</b><table><tr><th>table</th><th>rows</th></tr>{rows}</table>"


def check(trace: Trace) -> None:
    """Raise `InconsistentTraceError`, naming the table, at the first broken invariant.

    The invariants are: the schema's columns and types; values within the vocabulary; lanes that exist; tables sorted by
    start; no negative time; row references that resolve; and a parent on the same lane that is open when its child
    starts. Device work may start before its launch was called, since the clocks of host and device may differ.
    """
    for name, schema in SCHEMAS.items():
        frame = trace.table(name)
        if dict(frame.schema) != {column: dtype() for column, dtype in schema.items()}:
            raise InconsistentTraceError(f"table {name} has other columns than its schema: {dict(frame.schema)}")
        _check_times(name, frame)
        _check_lanes(name, frame, trace)
    for (name, column), words in VOCABULARY.items():
        foreign = trace.table(name).filter(~pl.col(column).is_in(words) | pl.col(column).is_null())
        _fail_if(foreign.height > 0, name, f"{column} holds words outside its vocabulary", foreign)
    for name, column, target in REFERENCES:
        beyond = trace.table(name).filter(pl.col(column) >= trace.table(target).height)
        _fail_if(beyond.height > 0, name, f"{column} points past the end of {target}", beyond)
    for name in ("operators", "frames"):
        _check_nesting(name, trace.table(name))


def _fail_if(broken: bool, table: str, what: str, rows: pl.DataFrame) -> None:
    if broken:
        raise InconsistentTraceError(f"table {table}: {what}, for example {rows.row(0, named=True)}")


def _check_times(name: str, frame: pl.DataFrame) -> None:
    if "start_ns" not in frame.columns or frame.is_empty():
        return
    if not frame["start_ns"].is_sorted():
        raise InconsistentTraceError(f"table {name} is not sorted by start_ns")
    missing = frame.filter(pl.col("start_ns").is_null() | (pl.col("start_ns") < 0))
    _fail_if(missing.height > 0, name, "start_ns is missing or negative", missing)
    if name in SLICE_TABLES:
        negative = frame.filter(pl.col("duration_ns").is_null() | (pl.col("duration_ns") < 0))
        _fail_if(negative.height > 0, name, "duration_ns is missing or negative", negative)


def _check_lanes(name: str, frame: pl.DataFrame, trace: Trace) -> None:
    if "lane" not in frame.columns:
        return
    if name == "lanes":
        if frame["lane"].to_list() != list(range(frame.height)):
            raise InconsistentTraceError("table lanes is not numbered by row")
        return
    lost = frame.filter(pl.col("lane").is_null() | (pl.col("lane") < 0) | (pl.col("lane") >= trace.lanes.height))
    _fail_if(lost.height > 0, name, "lane is missing or does not exist", lost)


def _check_nesting(name: str, frame: pl.DataFrame) -> None:
    children = frame.filter(pl.col("parent").is_not_null())
    around = frame[children["parent"]]
    pairs = pl.DataFrame(
        {
            "start_ns": children["start_ns"],
            "parent": children["parent"],
            "same_lane": children["lane"] == around["lane"],
            "begins_after": around["start_ns"] <= children["start_ns"],
            "inside": around["start_ns"] + around["duration_ns"] >= children["start_ns"],
        }
    )
    broken = pairs.filter(~(pl.col("same_lane") & pl.col("begins_after") & pl.col("inside")))
    _fail_if(broken.height > 0, name, "a parent is not open on its child's lane when the child starts", broken)


XLA_FORMATS: Final = ("xplane", "xla_json")
"""Formats of XLA's profiler, for JAX, PyTorch/XLA and TensorFlow: operators are events of the runtime, and the host
runs far ahead of the devices.
"""
