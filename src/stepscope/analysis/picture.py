"""Drawing of one step: activity of host threads and device queues, and causes of idle time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import polars as pl

from stepscope.trace.model import Trace
from stepscope.trace.nesting import depths, parents
from stepscope.trace.window import IntervalSet, Window, union

MAXIMUM_THREADS: Final = 12
MAXIMUM_QUEUES: Final = 32
NAME_LENGTH: Final = 300
"""Longest slice name, in characters: a C++ kernel name can have tens of thousands."""

_HOST_TABLES: Final = (
    ("annotations", "annotation"),
    ("frames", "frame"),
    ("operators", "operator"),
    ("launches", "launch"),
)
"""Table and kind of slices. Of slices with equal times, those of the earlier table are the outer ones."""
_WORKING_KINDS: Final = ("operator", "launch")
_SLICE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "lane": pl.Int32,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "name": pl.String,
    "kind": pl.String,
}


@dataclass(frozen=True, slots=True)
class PictureLane:
    """A host thread or a device queue."""

    label: str  # displayed name
    kind: Literal["host", "queue"]
    device: str  # device of a queue; "" for a host thread
    rows: int  # depth of the deepest kept slice, plus one
    # Python frames open during the whole window, outermost first; they are not drawn
    around: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PictureSlice:
    lane: int  # index of its lane
    depth: int  # number of enclosing slices on its lane
    start_ns: int  # from the start of the window
    duration_ns: int
    name: str
    kind: str  # "annotation", "frame", "operator", "launch", or a kind of device work


@dataclass(frozen=True, slots=True)
class PictureGap:
    """Idle time of a device with one cause; `start_ns` is from the start of the window."""

    device: str
    start_ns: int
    duration_ns: int
    cause: str
    trigger: str | None


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A piece of the critical path; `start_ns` is from the start of the window."""

    start_ns: int
    duration_ns: int
    kind: str  # "host", "launch_latency", "compute", "communication", "copy" or "wait"
    cause: str | None  # for host time; else None
    name: str  # work, or host activity


@dataclass(frozen=True, slots=True)
class Shown:
    """How many items of a kind are drawn."""

    kept: int  # items drawn
    total: int  # items in the window
    shortest_ns: int = 0  # duration of the shortest one drawn; 0 if there is none


@dataclass(frozen=True, slots=True)
class StepPicture:
    """Content of a window, ready to draw."""

    start_ns: int  # start of the window, from the start of the trace
    duration_ns: int  # length of the window
    lanes: tuple[PictureLane, ...]  # host threads, the busiest first, then queues, by device
    slices: tuple[PictureSlice, ...]  # by lane, then start, outer ones first
    gaps: tuple[PictureGap, ...]  # all idle intervals, by device; none is left out
    host_slices: Shown  # slices on drawn threads
    device_slices: Shown  # slices on drawn queues
    threads: Shown  # threads with slices
    queues: Shown  # queues with work
    path: tuple[PathPiece, ...] = ()  # critical path in the window, in order of time
    path_pieces: Shown = Shown(0, 0)  # pieces of the critical path

    @property
    def dropped(self) -> int:
        """Slices of the drawn lanes left out because they are short."""
        return sum(shown.total - shown.kept for shown in (self.host_slices, self.device_slices))


@dataclass(frozen=True)
class _Nested:
    """Slices of one kind of lane with their depth, and the frames around the whole window by lane."""

    slices: pl.DataFrame
    order: list[int]
    around: dict[int, tuple[str, ...]]
    lane_total: int


def step_picture(
    trace: Trace,
    window: Window,
    idle: pl.DataFrame,
    maximum_slices: int = 6000,
    path: pl.DataFrame | None = None,
) -> StepPicture:
    """Build the picture of a window, cut at its edges.

    Host threads and queues share `maximum_slices`: each may use half, plus what the other leaves. The shortest slices
    beyond that are left out and counted.

    Args:
        idle: columns device, start_ns, duration_ns (nanoseconds from the start of the trace), cause, trigger;
            further columns are ignored.
        path: the critical path, columns start_ns, duration_ns, kind, cause, name; not drawn if None.
    """
    host = _host(trace, window)
    queues = _queues(trace, window)
    queue_room = min(queues.slices.height, max(maximum_slices // 2, maximum_slices - host.slices.height))
    host_kept, host_shown = _longest(host.slices, maximum_slices - queue_room)
    queue_kept, queue_shown = _longest(queues.slices, queue_room)
    kept = pl.concat([host_kept, queue_kept])
    drawn = set(kept["lane"])
    threads, queue_lanes = ([lane for lane in each.order if lane in drawn] for each in (host, queues))
    order = threads + queue_lanes
    pieces, path_shown = _path(path, window, maximum_slices)
    return StepPicture(
        start_ns=window.start_ns,
        duration_ns=window.duration_ns,
        lanes=_lanes(trace, kept, order, host.around),
        slices=_slices(kept, order, window),
        gaps=_gaps(idle, window),
        host_slices=host_shown,
        device_slices=queue_shown,
        threads=Shown(len(threads), host.lane_total),
        queues=Shown(len(queue_lanes), queues.lane_total),
        path=pieces,
        path_pieces=path_shown,
    )


def _host(trace: Trace, window: Window) -> _Nested:
    tables = [_inside(trace, table, kind, window) for table, kind in _HOST_TABLES]
    threads = trace.lanes.filter(pl.col("kind") == "host_thread")["lane"]
    slices = pl.concat(tables).filter(pl.col("lane").is_in(threads.implode()))
    busy = _covered(slices.filter(pl.col("kind").is_in(_WORKING_KINDS)), window)
    covered = _covered(slices, window)
    order = sorted(covered, key=lambda lane: (-busy.get(lane, 0), -covered[lane], lane))
    shown = order[:MAXIMUM_THREADS]
    nested = _with_depth(slices.filter(pl.col("lane").is_in(shown)))
    drawn, around = _without_frames_around(nested, window)
    return _Nested(drawn, shown, around, len(order))


def _queues(trace: Trace, window: Window) -> _Nested:
    slices = _inside(trace, "device_work", None, window)
    covered = _covered(slices, window)
    busiest = sorted(covered, key=lambda lane: (-covered[lane], lane))[:MAXIMUM_QUEUES]
    lanes = trace.lanes.filter(pl.col("lane").is_in(busiest)).sort("device", "lane")
    nested = _with_depth(slices.filter(pl.col("lane").is_in(busiest)))
    return _Nested(_cut(nested.drop("parent"), window), lanes["lane"].to_list(), {}, len(covered))


def _inside(trace: Trace, table: str, kind: str | None, window: Window) -> pl.DataFrame:
    """Slices of a table that touch the window, uncut; `kind` None uses the table's own column."""
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    touches = (start < window.end_ns) & ((end > window.start_ns) | (start >= window.start_ns))
    columns = [
        pl.col("lane"),
        start,
        end.alias("end_ns"),
        pl.col("name").fill_null("").str.head(NAME_LENGTH),
        (pl.col("kind") if kind is None else pl.lit(kind)).alias("kind"),
    ]
    return trace.scan(table).filter(touches).select(columns).cast(_SLICE_SCHEMA).collect()  # type: ignore[arg-type]


def _covered(slices: pl.DataFrame, window: Window) -> dict[int, int]:
    """Nanoseconds of the window covered by the slices of each lane."""
    result: dict[int, int] = {}
    for (lane,), rows in slices.group_by("lane"):
        covered = union(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())
        result[int(str(lane))] = covered.clip(window.start_ns, window.end_ns).total_ns
    return result


def _with_depth(slices: pl.DataFrame) -> pl.DataFrame:
    """Add `parent` (-1 for none) and `depth`."""
    lanes, starts = slices["lane"].to_numpy(), slices["start_ns"].to_numpy()
    durations = slices["end_ns"].to_numpy() - starts
    parent = parents(lanes, starts, durations)
    return slices.with_columns(
        pl.Series("parent", parent, pl.Int64),
        pl.Series("depth", depths(parent), pl.Int64),
    )


def _without_frames_around(nested: pl.DataFrame, window: Window) -> tuple[pl.DataFrame, dict[int, tuple[str, ...]]]:
    """Leave out frames that span the whole window inside another frame: forty rows of them would show nothing."""
    whole = (pl.col("kind") == "frame") & (pl.col("start_ns") <= window.start_ns) & (pl.col("end_ns") >= window.end_ns)
    lane, depth = nested["lane"].to_numpy(), nested["depth"].to_numpy()
    above, outer = np.zeros(nested.height, np.int64), np.zeros(nested.height, np.bool_)
    around: dict[int, tuple[str, ...]] = {}
    for (key,), rows in nested.filter(whole).sort("depth").group_by("lane", maintain_order=True):
        number, levels = int(str(key)), rows["depth"].to_numpy()[:-1]
        here = lane == number
        above[here] = np.searchsorted(levels, depth[here])
        outer |= here & np.isin(depth, levels)
        around[number] = tuple(rows["name"][:-1])
    lifted = nested.with_columns(pl.Series("depth", depth - above, pl.Int64)).drop("parent")
    return _cut(lifted.filter(pl.Series(~outer)), window), around


def _cut(slices: pl.DataFrame, window: Window) -> pl.DataFrame:
    return slices.with_columns(pl.col("start_ns").clip(window.start_ns), pl.col("end_ns").clip(None, window.end_ns))


def _longest(slices: pl.DataFrame, room: int) -> tuple[pl.DataFrame, Shown]:
    kept = slices
    if slices.height > room:
        rows = (slices["end_ns"] - slices["start_ns"]).arg_sort(descending=True).head(room).sort()
        kept = slices[rows]
    shortest = int((kept["end_ns"] - kept["start_ns"]).to_numpy().min()) if kept.height else 0
    return kept, Shown(kept.height, slices.height, shortest)


def _lanes(
    trace: Trace, kept: pl.DataFrame, order: list[int], around: dict[int, tuple[str, ...]]
) -> tuple[PictureLane, ...]:
    described = {row["lane"]: row for row in trace.lanes.filter(pl.col("lane").is_in(order)).iter_rows(named=True)}
    deepest: dict[int, int] = dict(kept.group_by("lane").agg(pl.col("depth").max() + 1).iter_rows())
    processes = {row["process"] for row in described.values() if row["kind"] == "host_thread"}
    lanes = []
    for number in order:
        row, rows = described[number], deepest[number]
        if row["kind"] == "host_thread":
            label = (row["name"] or "").strip() or f"thread {row['thread'] or number}"
            if len(processes) > 1:
                label += f" ({row['process_name'] or 'process'} {row['process'] or ''})".replace(" )", ")")
            lanes.append(PictureLane(label, "host", "", rows, around.get(number, ())))
        else:
            label = (row["name"] or "").strip() or f"queue {row['queue'] or number}"
            lanes.append(PictureLane(label, "queue", row["device"] or "", rows))
    return tuple(lanes)


def _slices(kept: pl.DataFrame, order: list[int], window: Window) -> tuple[PictureSlice, ...]:
    position = pl.DataFrame({"lane": order, "position": range(len(order))}, {"lane": pl.Int32, "position": pl.Int64})
    start = pl.col("start_ns") - window.start_ns
    duration = pl.col("end_ns") - pl.col("start_ns")
    placed = kept.join(position, on="lane").sort("position", "start_ns", "depth")
    columns = placed.select("position", "depth", start, duration.alias("duration_ns"), "name", "kind")
    return tuple(PictureSlice(*row) for row in columns.iter_rows())


def _path(path: pl.DataFrame | None, window: Window, room: int) -> tuple[tuple[PathPiece, ...], Shown]:
    """Critical path in the window, with touching pieces of the same name merged.

    If there are too many, touching pieces of one resource are merged; then the shortest are left out.
    """
    if path is None or path.is_empty():
        return (), Shown(0, 0)
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    inside = (
        path.select(
            start.clip(window.start_ns), end.clip(None, window.end_ns).alias("end_ns"), "kind", "cause",
            pl.col("name").fill_null("").str.head(NAME_LENGTH),
        )
        .filter(pl.col("end_ns") > start)
        .sort("start_ns")
    )  # fmt: skip
    merged = _runs(inside, ("kind", "cause", "name"))
    if merged.height > room:  # drop names rather than pieces
        merged = _runs(merged, ("kind", "cause"))
    kept, shown = _longest(merged, room)
    first, length = pl.col("start_ns") - window.start_ns, pl.col("end_ns") - pl.col("start_ns")
    rows = kept.sort("start_ns").select(first, length.alias("duration_ns"), "kind", "cause", "name")
    return tuple(PathPiece(*row) for row in rows.iter_rows()), shown


def _runs(pieces: pl.DataFrame, keys: tuple[str, ...]) -> pl.DataFrame:
    """Merge consecutive pieces with equal keys; a merged piece with several names has none."""
    name = pl.when(pl.col("name").n_unique() == 1).then(pl.col("name").first()).otherwise(pl.lit("")).alias("name")
    runs = pieces.group_by(pl.struct(keys).rle_id().alias("run"), maintain_order=True).agg(
        pl.col("start_ns").min(), pl.col("end_ns").max(), pl.col("kind", "cause").first(), name
    )
    return runs.drop("run")


def _gaps(idle: pl.DataFrame, window: Window) -> tuple[PictureGap, ...]:
    """Idle intervals in the window; touching ones with the same cause and trigger are merged."""
    start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    inside = (
        idle.select(
            "device", start.clip(window.start_ns), end.clip(None, window.end_ns).alias("end_ns"), "cause", "trigger"
        )
        .filter(pl.col("end_ns") > start)
        .sort("device", "start_ns")
    )
    keys = ["device", "cause", "trigger"]
    breaks = (start != pl.col("end_ns").shift()).fill_null(False).cum_sum()
    runs = inside.with_columns(run=pl.struct(keys).rle_id(), piece=breaks)
    whole = runs.group_by("run", "piece", *keys, maintain_order=True).agg(start.min(), pl.col("end_ns").max())
    length = (pl.col("end_ns") - start).alias("duration_ns")
    columns = whole.select("device", start - window.start_ns, length, "cause", "trigger")
    return tuple(PictureGap(*row) for row in columns.iter_rows())


def typical_step(steps: pl.DataFrame, causes: pl.DataFrame) -> Window | None:
    """Find the complete step whose length and times by cause are nearest to the medians; None without steps.

    Length alone would often choose the first step of a recording, whose device still works for the step before.

    Args:
        steps: as from `stepscope.analysis.steps.step_table`; incomplete ones count only if all are incomplete.
        causes: intervals with device, start_ns, duration_ns and cause; those with the same device and cause do not
            overlap.
    """
    steps = (steps.filter(pl.col("complete")) if steps["complete"].any() else steps).sort("start_ns")
    if steps.is_empty():
        return None
    starts, lengths = steps["start_ns"].to_numpy(), steps["duration_ns"].to_numpy()
    times = [lengths.astype(np.float64)]
    for _, stretches in causes.sort("start_ns").group_by("device", "cause", maintain_order=True):
        begin = stretches["start_ns"].to_numpy()
        spent = IntervalSet(begin, begin + stretches["duration_ns"].to_numpy()).overlap_of(starts, starts + lengths)
        times.append(spent.astype(np.float64))
    distance = np.sum([np.abs(each - np.median(each)) for each in times], axis=0)
    nearest = int(distance.argmin())
    return Window(int(starts[nearest]), int(starts[nearest]) + max(int(lengths[nearest]), 1))
