"""The trace: immutable tables with what is known about their origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

import polars as pl

from stepscope.program_facts import ProgramFacts
from stepscope.trace.evidence import Evidence
from stepscope.trace.tables import SCHEMAS, conform, empty
from stepscope.trace.window import Window

if TYPE_CHECKING:
    from pathlib import Path

TableLoader = Callable[[str], pl.LazyFrame]


@dataclass(frozen=True, slots=True)
class TraceWarning:
    """Something that was skipped or repaired while reading, how often, and what.

    Attributes:
        kind: a stable, short identifier such as "truncated" or "damaged_event".
        count: how many times it happened.
        detail: one sentence for the user.
    """

    kind: str
    count: int
    detail: str


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator as the profiler describes it; null where the file does not say.

    Attributes:
        peak_flops_s: operations per second at best, of the number type that it is fastest in but for those of 8 bits.
        bandwidth_bytes_s: of its memory, bytes per second at best.
    """

    device: str
    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    peak_flops_s: float | None = None
    bandwidth_bytes_s: float | None = None


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a trace says about itself.

    Attributes:
        path: where it was read from.
        format: the reader's name, such as "kineto".
        events: number of events in the file, of any kind.
        complete_events: number of events with a start and a duration.
        origin_unix_ns: wall clock at time 0 of the trace, nanoseconds since 1970, where known.
        recorded: which optional parts the profiler was asked for ("stacks", "shapes", "memory", "modules", "flops"),
            None where the file does not say.
        window: what was read, when only a part was asked for.
        program: settings of the program, where stepscope itself recorded it.
        evidence: what other files of the run say, where some were given; never part of what is kept in the cache.
    """

    path: str = ""
    format: str = ""
    events: int = 0
    complete_events: int = 0
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    origin_unix_ns: int | None = None
    host: str | None = None
    devices: tuple[Device, ...] = ()
    recorded: tuple[str, ...] | None = None
    window: Window | None = None
    program: ProgramFacts | None = None
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Trace:
    """A profile as tables (see `stepscope.trace.tables` for their columns); loaded when first asked for.

    Attributes:
        metadata: where the trace comes from.
        warnings: what was skipped or repaired while reading it.
    """

    metadata: Metadata
    warnings: tuple[TraceWarning, ...]
    _load: TableLoader = field(repr=False, compare=False)
    _loaded: dict[str, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    _owner: object = field(default=None, repr=False, compare=False)
    """Whatever must live as long as the trace: a temporary directory, a lock on a cache entry."""

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, pl.DataFrame],
        metadata: Metadata | None = None,
        warnings: tuple[TraceWarning, ...] = (),
    ) -> Trace:
        """A trace from frames in memory; missing tables are empty and missing columns null."""
        unknown = sorted(set(tables) - set(SCHEMAS))
        if unknown:
            raise ValueError(f"no such tables: {', '.join(unknown)}")
        frames = {name: conform(name, tables[name]) if name in tables else empty(name) for name in SCHEMAS}
        return cls(metadata or Metadata(), warnings, lambda name: frames[name].lazy(), dict(frames))

    def table(self, name: str) -> pl.DataFrame:
        """The whole table of that name."""
        if name not in self._loaded:
            self._loaded[name] = self.scan(name).collect()
        return self._loaded[name]

    def scan(self, name: str) -> pl.LazyFrame:
        """The table for a lazy query, which reads only the columns it needs."""
        if name not in SCHEMAS:
            raise KeyError(name)
        return self._loaded[name].lazy() if name in self._loaded else self._load(name)

    @property
    def working_devices(self) -> list[str]:
        """The devices that did anything, sorted; work whose device a damaged file does not name belongs to none."""
        return sorted(self.device_work["device"].unique().drop_nulls().to_list())

    @property
    def lanes(self) -> pl.DataFrame:
        """Host threads and device queues."""
        return self.table("lanes")

    @property
    def operators(self) -> pl.DataFrame:
        """Framework operators."""
        return self.table("operators")

    @property
    def launches(self) -> pl.DataFrame:
        """Host calls of a device's API."""
        return self.table("launches")

    @property
    def device_work(self) -> pl.DataFrame:
        """What devices did."""
        return self.table("device_work")

    @property
    def frames(self) -> pl.DataFrame:
        """Python frames."""
        return self.table("frames")

    @property
    def lines(self) -> pl.DataFrame:
        """Where in the user's code threads were."""
        return self.table("lines")

    @property
    def modules(self) -> pl.DataFrame:
        """Calls of nn.Modules."""
        return self.table("modules")

    @property
    def annotations(self) -> pl.DataFrame:
        """Annotations of the user, the framework and the profiler."""
        return self.table("annotations")

    @property
    def synchronisations(self) -> pl.DataFrame:
        """A device's own records of waits."""
        return self.table("synchronisations")

    @property
    def memory(self) -> pl.DataFrame:
        """Allocations."""
        return self.table("memory")

    @property
    def counters(self) -> pl.DataFrame:
        """Sampled values."""
        return self.table("counters")

    @property
    def links(self) -> pl.DataFrame:
        """Slice to slice."""
        return self.table("links")

    def check(self) -> None:
        """Raise `InconsistentTraceError` unless every table keeps its promises; see `stepscope.trace.check`."""
        from stepscope.trace.check import check

        check(self)

    def save(self, directory: str | Path) -> None:
        """Write the trace as Parquet files into a new directory, complete or not at all."""
        from stepscope.trace.store import save

        save(self, directory)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name}</td><td style='text-align:right'>{self.table(name).height:,}</td></tr>" for name in SCHEMAS
        )
        title = escape(f"{self.metadata.format} trace {self.metadata.path}".strip())
        return f"<b>{title}</b><table><tr><th>table</th><th>rows</th></tr>{rows}</table>"
