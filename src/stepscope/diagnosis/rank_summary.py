"""What is kept of one rank for the questions about all: its steps by cause, its collectives, its lines by cause.

    ROOT/ranks/<key>    a checksum, then a MessagePack of `RankSummary`

A summary is written when a rank is first read, and found without opening its trace: the key covers the file's content,
how it is read, which code is the user's, and stepscope with its libraries. Ranks can be summarised in any order and
anywhere, and are then compared by their summaries alone (`stepscope.diagnosis.ranks`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import polars as pl

from stepscope.analysis.communication import exposed_intervals_on_host, exposed_on_host, left_before
from stepscope.analysis.device_time import busy_intervals
from stepscope.analysis.matching import RankCollectives
from stepscope.diagnosis.finding import Location, Remedy
from stepscope.diagnosis.view import View
from stepscope.files import cache_folder, keep_sealed, kept_sealed, package_state
from stepscope.machine.devices import find_device
from stepscope.readers import place_in_job, trace_key
from stepscope.trace.cache import TraceCache
from stepscope.trace.window import Times
from stepscope.whatif.job import RankTimes

_T = TypeVar("_T")

BUSY: Final = "busy"
_MOST_BYTES: Final = 1 << 30  # of all summaries together
_MOST_COLLECTIVES: Final = 40_000
"""Of one rank, so that a summary has at most 2 MB; those of later steps are left out."""
_MOST_OF_ALL_RANKS: Final = 800_000
"""Of all ranks of a job, so that joining them takes at most 1 GiB."""
_MOST_KERNELS: Final = 200
_SHORT: Final = 0.9
"""Share of the exchanges of most ranks below which a rank that has the first of them was cut."""
_LONGEST_NAME: Final = 300


@dataclass(frozen=True, slots=True)
class RankSteps:
    """One rank's complete steps.

    Attributes:
        index: numbers of the steps, in order.
        step_ns: their durations; shape (steps,).
        cause_ns: by cause, idle time of the device (without one, the host's time) in each; shape (steps,).
    """

    name: str
    rank: int | None
    path: str
    index: list[int]
    step_ns: list[int]
    cause_ns: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What is kept of one rank's trace for comparison with the others.

    Attributes:
        name: such as "rank 3".
        path: of the trace.
        causes: time per step by cause: the device's idle time, or the host's time without a device.
        places: the user's lines for each cause.
        exposed_ns: time per step in which the rank only communicates.
        on_device: whether the collectives run on a device.
        host: name of its machine; None where unknown.
        devices: how many that machine has, as the trace states; 0 where unknown.
        kernels: its device's longest kernels: columns name, grid, count and ns, of all steps; None without a device.
        link_gb_per_s: peak of the device's links to others of its machine together, in one direction; None where
            unknown.
        remedies: by cause, what the rank's own finding about it tells to do, and where; not kept.
    """

    name: str
    path: str
    ranks: int
    step_ns: int
    steps: int
    collectives: RankCollectives
    causes: dict[str, int]
    places: dict[str, tuple[Location, ...]]
    exposed_ns: int
    on_device: bool
    host: str | None = None
    devices: int = 0
    kernels: pl.DataFrame | None = None
    link_gb_per_s: float | None = None
    remedies: dict[str, tuple[Remedy, tuple[Location, ...]]] = field(default_factory=dict)

    @property
    def without_collectives(self) -> RankRecord:
        kept = self.collectives
        none = replace(
            kept, table=kept.table.clear(), before=None if kept.before is None else kept.before.clear(), rank=None
        )
        return replace(self, collectives=none)


def cut_places(records: Sequence[RankRecord]) -> set[int]:
    """Which records lack a step with exchanges that most have, or end well before the exchanges of most others, with
    the same kinds until then; the other ranks are taken to meet without them.
    """
    steps = [set(record.collectives.table["step"].to_list()) for record in records]
    counts = Counter(step for own in steps for step in own)
    most = {step for step, count in counts.items() if 2 * count > len(records)}
    cut = {place for place, own in enumerate(steps) if not own >= most}
    kinds = [record.collectives.table["kind"] for record in records]
    [(usual, ranks)] = Counter(map(len, kinds)).most_common(1) or [(0, 0)]
    if 2 * ranks > len(records):
        whole = next(each for each in kinds if len(each) == usual)
        short = (place for place, each in enumerate(kinds) if len(each) < _SHORT * usual)
        cut |= {place for place in short if kinds[place].equals(whole.head(len(kinds[place])))}
    return cut


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What is kept of one rank.

    Attributes:
        waits: for each collective of the record lead_ns and wait_ns, as in `stepscope.whatif.job.RankTimes`.
        start_ns, end_ns: of the measured steps whose collectives are kept.
        step_count: how many these are.
    """

    steps: RankSteps
    record: RankRecord
    waits: pl.DataFrame
    start_ns: int
    end_ns: int
    step_count: int

    @property
    def unix_ns(self) -> int:
        """When its steps begin; without the wall clock, on the trace's own."""
        return self.start_ns + self.record.collectives.clock_ns

    @property
    def order(self) -> tuple[bool, int, str]:
        """Sort key among the ranks of a job."""
        return (self.steps.rank is None, self.steps.rank or 0, self.steps.path)

    def at(self, path: str) -> RankSummary:
        """The summary of the same content at another place."""
        name = self.steps.name if self.steps.rank is not None else path
        return replace(
            self, steps=replace(self.steps, path=path, name=name), record=replace(self.record, path=path, name=name)
        )

    @property
    def without_collectives(self) -> RankSummary:
        return replace(self, record=self.record.without_collectives, waits=self.waits.clear())

    @property
    def times(self) -> RankTimes:
        """The rank as a part of its job."""
        record = self.record
        return RankTimes(
            name=record.name,
            kept=record.collectives,
            waits=self.waits,
            cause_ns={cause: ns * self.step_count for cause, ns in record.causes.items()},
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            steps=self.step_count,
        )


def rank_summary(view: View) -> RankSummary:
    record = rank_record(view)
    kept, window, count = record.collectives.table.height, view.window, view.step_count
    end_ns = window.end_ns
    if kept < view.met.height:  # those of later steps are left out, and with them the steps
        starts = view.complete_steps["start_ns"].to_numpy()
        count = max(int(np.searchsorted(starts, view.met["start_ns"][kept], side="right")) - 1, 1)
        end_ns = int(starts[count]) if count < len(starts) else end_ns
    waits = view.met.select("lead_ns", "wait_ns").head(kept)
    return RankSummary(rank_steps(view), record, waits, window.start_ns, end_ns, count)


def rank_record(view: View) -> RankRecord:
    trace = view.trace
    found = view.met
    numbers = view.steps["index"].to_numpy()
    step = np.searchsorted(view.steps["start_ns"].to_numpy(), found["start_ns"].to_numpy(), side="right") - 1
    number = np.where(step >= 0, numbers[np.maximum(step, 0)], -1) if len(numbers) else np.zeros(found.height, np.int64)
    columns = ("kind", "group", "description", "members", "source", "target", "bytes", "start_ns", "duration_ns",
               "algorithm")  # fmt: skip
    size = pl.col("ranks").fill_null(pl.lit(trace.metadata.world_size, pl.Int64))
    table = found.select(*columns, group_size=size).with_columns(
        step=pl.Series(number, dtype=pl.Int64), exposed_ns=_exposed(view, found)
    )
    before = _before(view, found)
    most = min(_MOST_COLLECTIVES, _MOST_OF_ALL_RANKS // max(trace.metadata.world_size or 1, 1))
    if table.height > most:
        whole_steps = int((table["step"] < table["step"][most]).sum()) or int((table["step"] == table["step"][0]).sum())
        table, before = table.head(whole_steps), before.head(whole_steps)
    sums = view.pieces.group_by("cause").agg(ns=pl.col("duration_ns").sum())
    causes = {cause: ns // view.step_count for cause, ns in sums.iter_rows()}
    places = {cause: view.locations(view.pieces.filter(pl.col("cause") == cause)) for cause in causes}
    waiting = causes.get("communication", 0)
    exposed = view.exposed_ns(("communication",)) // view.step_count if view.device is not None else 0
    if view.device is None:
        waiting = max(waiting, exposed_on_host(trace, view.span) // view.step_count)
    return RankRecord(
        name=_name(view),
        path=trace.metadata.path,
        ranks=trace.metadata.world_size or 2,
        step_ns=view.step_ns,
        steps=view.step_count,
        collectives=RankCollectives(table, trace.metadata.origin_unix_ns or 0, before, trace.metadata.rank),
        causes=causes,
        places=places,
        exposed_ns=exposed + waiting,
        on_device=bool(found["on_device"].any()),
        host=trace.metadata.host,
        devices=len(trace.metadata.devices),
        kernels=_kernels(view) if view.device is not None else None,
        link_gb_per_s=_link_gb_per_s(view),
    )


def _kernels(view: View) -> pl.DataFrame:
    computes = view.work.filter(pl.col("kind") == "compute").group_by("name", "grid")
    longest = computes.agg(count=pl.len().cast(pl.Int64), ns=pl.col("duration_ns").sum()).top_k(_MOST_KERNELS, by="ns")
    return longest.sort("name", "grid").with_columns(pl.col("name").str.slice(0, _LONGEST_NAME))


def _exposed(view: View, found: pl.DataFrame) -> pl.Series:
    """Time in each collective in which the rank computes nothing."""
    starts = found["start_ns"].to_numpy()
    ends = starts + found["duration_ns"].to_numpy()
    if view.device is None:
        bare = exposed_intervals_on_host(view.trace, view.span)
        return pl.Series(bare.covered_until(ends) - bare.covered_until(starts))
    compute = busy_intervals(view.work.filter(pl.col("kind") == "compute"), view.window)
    return pl.Series(ends - starts - (compute.covered_until(ends) - compute.covered_until(starts)))


def _link_gb_per_s(view: View) -> float | None:
    mine = next((one for one in view.trace.metadata.devices if one.device == view.device), None)
    known = None if mine is None else find_device(mine)
    return None if known is None or known.peer_link_bytes_s is None else known.peer_link_bytes_s / 1e9


def _before(view: View, found: pl.DataFrame) -> pl.DataFrame:
    """What the rank did before each collective; see `RankCollectives.before`."""
    starts = found["start_ns"].to_numpy()
    ends = starts + found["duration_ns"].to_numpy()
    left = left_before(starts, ends)
    begins = np.where(left >= 0, ends[left], np.minimum(view.window.start_ns, starts)) if len(ends) else ends
    columns = {"begin_ns": begins}
    for (cause,), pieces in view.pieces.select("cause", "start_ns", "duration_ns").group_by("cause"):
        columns[str(cause)] = _passed(pieces, starts) - _passed(pieces, begins)
    if view.device is not None:
        work = np.sort(view.work.filter(pl.col("kind") != "communication")["start_ns"].to_numpy())
        columns["works"] = np.searchsorted(work, starts) - np.searchsorted(work, begins)
        idle = sum((ns for name, ns in columns.items() if name not in ("begin_ns", "works")), np.zeros(len(starts)))
        columns[BUSY] = np.maximum(starts - begins - idle, 0)
    return pl.DataFrame({name: values.astype(np.int64) for name, values in columns.items()})


def _passed(pieces: pl.DataFrame, moments: Times) -> Times:
    """How much of these pieces of time, which do not overlap, has passed at each moment."""
    rows = pieces.sort("start_ns")
    starts, lengths = rows["start_ns"].to_numpy(), rows["duration_ns"].to_numpy()
    bounds = np.column_stack([starts, starts + lengths]).ravel()
    passed = np.column_stack([np.cumsum(lengths) - lengths, np.cumsum(lengths)]).ravel()
    passed_by: Times = np.interp(moments, bounds, passed).astype(np.int64) if len(bounds) else np.zeros_like(moments)
    return passed_by


def rank_steps(view: View) -> RankSteps:
    steps = view.steps.filter(pl.col("complete")).sort("start_ns")
    start = steps["start_ns"].to_numpy()
    end = start + steps["duration_ns"].to_numpy()
    metadata = view.trace.metadata
    causes: dict[str, list[int]] = {}
    for (cause,), pieces in view.pieces.group_by("cause", maintain_order=True):
        begin = pieces["start_ns"].to_numpy()
        place = np.searchsorted(start, begin, side="right") - 1
        inside = (place >= 0) & (begin < end[np.maximum(place, 0)]) if len(end) else np.zeros(len(begin), np.bool_)
        sums = np.zeros(steps.height, np.int64)
        np.add.at(sums, place[inside], pieces["duration_ns"].to_numpy()[inside])
        causes[str(cause)] = sums.tolist()
    return RankSteps(
        name=_name(view),
        rank=metadata.rank,
        path=metadata.path,
        index=steps["index"].to_list(),
        step_ns=steps["duration_ns"].to_list(),
        cause_ns=causes,
    )


def _name(view: View) -> str:
    metadata = view.trace.metadata
    return f"rank {metadata.rank}" if metadata.rank is not None else metadata.path


def folder() -> Path:
    return cache_folder() / "ranks"


def recorded_once(
    found: Sequence[_T], summary_of: Callable[[_T], RankSummary | None]
) -> tuple[list[_T], list[tuple[str, str]]]:
    """The last recording of each rank, as a job has it once, and the paths of the others with why they are left out.

    All of them if all are of one rank, which are not a job.
    """
    by_rank: dict[int, list[tuple[int, int, RankSummary]]] = {}
    for place, summary in enumerate(map(summary_of, found)):
        if summary is not None and summary.steps.rank is not None:
            by_rank.setdefault(summary.steps.rank, []).append((summary.unix_ns, place, summary))
    left_out = {}
    for recordings in by_rank.values() if len(by_rank) > 1 else ():
        *earlier, (_, _, last) = sorted(recordings, key=lambda each: each[:2])
        for _, place, one in earlier:
            why = f"{one.steps.path} is left out: {last.steps.path} is a later recording of {last.steps.name}"
            left_out[place] = one.steps.path, why
    return [each for place, each in enumerate(found) if place not in left_out], list(left_out.values())


def summary_place(path: str | Path, reading: Sequence[object]) -> Path:
    """Where the summary of a trace file is kept.

    Args:
        reading: everything else that its trace depends on, such as the window.

    Raises:
        UnreadableTraceError: the file cannot be read.
    """
    content = trace_key(path, TraceCache(), least_bytes=0)
    known = [content, place_in_job(Path(path)), list(reading), _stepscope()]
    return folder() / hashlib.sha256(repr(known).encode("utf-8", "surrogateescape")).hexdigest()


@cache
def _stepscope() -> str:
    return hashlib.sha256(repr(package_state()).encode()).hexdigest()


def kept_summary(place: Path, path: str) -> RankSummary | None:
    """The summary kept at a place, of the file that is now at `path`; None if there is none, or it is damaged."""
    data = kept_sealed(place)
    if data is None:
        return None
    try:
        found = msgspec.msgpack.decode(data, type=RankSummary, dec_hook=_decoded)
    except (msgspec.MsgspecError, pl.exceptions.PolarsError, pl.exceptions.PanicException, RecursionError):
        return None
    with contextlib.suppress(OSError):  # the newest are kept longest
        os.utime(place)
    return found.at(path)


def keep_summary(place: Path, summary: RankSummary) -> None:
    """Write a summary; a cache that cannot be written is left as it is."""
    keep_sealed(place, msgspec.msgpack.encode(summary, enc_hook=_encoded), _MOST_BYTES)


def _encoded(value: Any) -> bytes:
    if not isinstance(value, pl.DataFrame):
        raise NotImplementedError
    file = io.BytesIO()
    value.write_ipc_stream(file, compression="zstd")
    return file.getvalue()


def _decoded(kind: type, value: Any) -> Any:
    return pl.read_ipc_stream(io.BytesIO(value))  # a tenth of the time of read_ipc
