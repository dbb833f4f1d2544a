"""The critical path: the chain of host and device work that made the steps as long as they are."""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.causes import CAUSES
from stepscope.analysis.host import TABLES, slice_columns
from stepscope.analysis.per_slice import at
from stepscope.trace.intervals import Times
from stepscope.trace.nesting import Rows
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.replay import Replay
from stepscope.whatif.walk import Chain, walk_back

PATH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "start_ns": pl.Int64,
    "duration_ns": pl.Int64,
    "kind": pl.String,  # one of PATH_KINDS
    "cause": pl.String,  # of host time: one of CAUSES, or "compute" for operators of a machine without a device
    "lane": pl.Int32,  # the thread of host time, the queue of device work
    "device": pl.String,
    "queue": pl.String,
    "table": pl.String,  # where `row` is: "device_work", or the table of the thread's innermost slice; null for none
    "row": pl.UInt32,
    "name": pl.String,
}
PATH_KINDS: Final = ("host", "launch_latency", "compute", "communication", "copy", "wait")
"""Device work is compute, communication or copy; "wait" is waiting for what the trace does not show."""
RESOURCE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "kind": pl.String,
    "cause": pl.String,  # of host time, else null
    "ns": pl.Int64,
    "share": pl.Float64,  # of the path, 0 to 1
}
_OF_WORK: Final = {
    "communication": "communication",
    "copy_in": "copy",
    "copy_out": "copy",
    "copy_on_device": "copy",
}


def critical_path(experiment: Experiment, done: Replay | None = None) -> pl.DataFrame:
    """The critical path of the steps of a replay, by default of the one without a change.

    Returns:
        Columns as in PATH_SCHEMA, in order of time. From the beginning of the first complete step to the end of the
        last one or of its device work, without holes; in a trace without steps over the device's window.
    """
    chain = walk_back(experiment, done or experiment.measured)
    parts = [_work_rows(experiment, chain), _delay_rows(experiment, chain), _host_rows(experiment, chain)]
    parts.append(_other_rows(experiment, chain))
    path = pl.concat([pl.DataFrame(schema=dict(PATH_SCHEMA)), *parts])
    path = path.with_columns(end=pl.col("start_ns") + pl.col("duration_ns")).with_columns(
        start_ns=pl.max_horizontal("start_ns", pl.lit(chain.begin))
    )
    path = path.with_columns(duration_ns=pl.col("end") - pl.col("start_ns")).filter(pl.col("duration_ns") > 0)
    path = path.sort("start_ns", "end").select(list(PATH_SCHEMA))
    if path.height and path["start_ns"][0] > chain.begin:  # what the earliest piece waited for is not in the trace
        unknown = pl.DataFrame({"start_ns": [chain.begin], "duration_ns": [path["start_ns"][0] - chain.begin]})
        path = pl.concat([_conform(unknown.with_columns(kind=pl.lit("wait"))), path])
    return path


def resources(path: pl.DataFrame) -> pl.DataFrame:
    """What the path consists of, columns as in RESOURCE_SCHEMA, the largest first: what limits the steps."""
    total = max(int(path["duration_ns"].sum()), 1)
    table = path.group_by("kind", "cause").agg(ns=pl.col("duration_ns").sum())
    table = table.with_columns(share=pl.col("ns") / total)
    table = table.sort(["ns", "kind", "cause"], descending=[True, False, False])
    return table.select([pl.col(name).cast(dtype) for name, dtype in RESOURCE_SCHEMA.items()])


def _of_device(experiment: Experiment, taken: list[tuple[int, int, int]]) -> tuple[Rows, Times, Times]:
    """Rows, starts and ends of what a device did."""
    return _rows_from(taken, 0, experiment.trace.device_work.height)


def _rows_from(taken: list[tuple[int, int, int]], first: int, end: int | None = None) -> tuple[Rows, Times, Times]:
    """Of what was taken the works with these numbers: number, start and end."""
    table = np.array(taken, np.int64).reshape(-1, 3)
    inside = (table[:, 0] >= first) & ((table[:, 0] < end) if end is not None else True)
    table = table[inside]
    return table[:, 0], table[:, 1], table[:, 2]


def _other_rows(experiment: Experiment, chain: Chain) -> pl.DataFrame:
    """Collectives that the host runs, and batches that worker processes load in a changed replay; with their delays."""
    first, on_host = experiment.trace.device_work.height, chain.done.graph.on_host
    rows, start, end = _rows_from(chain.works, first)
    delayed, since, until = _rows_from(chain.delays, first)
    rows, start, end = np.append(rows, delayed), np.append(start, since), np.append(end, until)
    number = rows - first
    collective = number < len(on_host)
    row = on_host[number[collective]]
    annotations = experiment.trace.annotations
    sent = pl.DataFrame({"start_ns": start[collective], "duration_ns": (end - start)[collective], "row": row})
    sent = sent.with_columns(
        kind=pl.lit("communication"),
        table=pl.lit("annotations"),
        lane=annotations["lane"].gather(row),
        name=annotations["name"].gather(row),
    )
    loaded = pl.DataFrame({"start_ns": start[~collective], "duration_ns": (end - start)[~collective]}).with_columns(
        kind=pl.lit("host"), cause=pl.lit("input"), name=pl.lit("a batch loaded by a worker process")
    )
    return pl.concat([_conform(sent), _conform(loaded)])


def _work_rows(experiment: Experiment, chain: Chain) -> pl.DataFrame:
    rows, start, end = _of_device(experiment, chain.works)
    table = experiment.trace.device_work[rows].select("kind", "lane", "device", "queue", "name")
    return _conform(
        table.with_columns(
            pl.col("kind").replace_strict(_OF_WORK, default="compute"),
            start_ns=start,
            duration_ns=end - start,
            table=pl.lit("device_work"),
            row=rows,
        )
    )


def _delay_rows(experiment: Experiment, chain: Chain) -> pl.DataFrame:
    """What passed between what work waited for and its start: latency, and the rest that nothing explains."""
    rows, start, end = _of_device(experiment, chain.delays)
    late = np.minimum(experiment.graph.unexplained_ns[rows], np.maximum(end - start, 0))
    parts = []
    for kind, since, until in (("launch_latency", start, end - late), ("wait", end - late, end)):
        table = experiment.trace.device_work[rows].select("lane", "device", "queue", "name")
        parts.append(
            _conform(
                table.with_columns(
                    kind=pl.lit(kind), start_ns=since, duration_ns=until - since, table=pl.lit("device_work"), row=rows
                )
            )
        )
    return pl.concat(parts)


def _host_rows(experiment: Experiment, chain: Chain) -> pl.DataFrame:
    """Host time, cut where what the thread does changes."""
    activity, scale = experiment.activity, chain.done.graph.host_scale
    on_host = experiment.device is None
    parts = [pl.DataFrame(schema=dict(PATH_SCHEMA))]
    pieces = np.array(chain.host, np.int64).reshape(-1, 5)
    for lane in np.unique(pieces[:, 0]).tolist():
        mine = pieces[pieces[:, 0] == lane]
        cut = activity.cut(lane, mine[:, 1], mine[:, 2])
        lanes = np.full(len(cut.start), lane, np.int32)
        since = scale.length(lanes, mine[cut.interval, 1], cut.start)
        until = scale.length(lanes, mine[cut.interval, 1], cut.end)
        whole = scale.length(np.full(len(mine), lane, np.int32), mine[:, 1], mine[:, 2])
        gone = (whole <= 0)[cut.interval]  # time that is gone, and yet passes while the thread waits
        since = np.where(gone, cut.start - mine[cut.interval, 1], since)
        until = np.where(gone, cut.end - mine[cut.interval, 1], until)
        whole = np.where(whole <= 0, np.maximum(mine[:, 2] - mine[:, 1], 1), whole)
        stretched = ((mine[:, 4] - mine[:, 3]) / whole)[cut.interval]
        begin = mine[cut.interval, 3]
        start, end = (begin + np.rint(at * stretched).astype(np.int64) for at in (since, until))
        cause = pl.Series(list(CAUSES)).gather(cut.cause.astype(np.int64))
        columns = slice_columns(activity, cut.slices, cut.lines)
        frame = pl.DataFrame(
            {
                "start_ns": start,
                "duration_ns": end - start,
                "lane": lanes,
                "cause": cause.replace({"dispatch": "compute"}) if on_host else cause,
            }
        )
        frame = frame.with_columns(
            columns[0].alias("table"), columns[1].alias("row"), kind=pl.lit("host"), name=_names(experiment, cut.slices)
        )
        parts.append(_conform(frame))
    return pl.concat(parts)


def _names(experiment: Experiment, slices: Rows) -> pl.Series:
    """The name of each slice, null for none."""
    activity = experiment.activity
    names = pl.repeat(None, len(slices), dtype=pl.String, eager=True).to_frame("name")["name"]
    tables = at(activity.table, slices)
    for code, table in enumerate(TABLES):
        mine = np.flatnonzero(tables == code)
        if len(mine):
            names = names.scatter(mine, experiment.trace.table(table)["name"].gather(activity.row[slices[mine]]))
    return names


def _conform(table: pl.DataFrame) -> pl.DataFrame:
    return table.select(
        [
            (pl.col(name) if name in table.columns else pl.lit(None)).cast(dtype).alias(name)
            for name, dtype in PATH_SCHEMA.items()
        ]
    )
