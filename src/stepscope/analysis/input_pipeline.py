"""Input pipeline: the cost of its functions, and the step time with more workers or cheaper batches.

Stages come from measurements in the process and its workers (`ProgramFacts.input_stages`); without that from Python
frames inside the data loader of the main process.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.attribution import parse
from stepscope.analysis.host import HostActivity, host_activity
from stepscope.trace import Trace, Window
from stepscope.trace.naming import cause_of_name
from stepscope.trace.nesting import Rows, at, beginning_in, by_level, by_value, conformed, depths, inherit, row_numbers
from stepscope.trace.program_facts import InputStageFacts, ProgramFacts

INPUT_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "stage": pl.String,  # "item", "transform", "collate", "pin", "worker_start" or "loader"
    "function": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "calls": pl.Int64,
    "total_ns": pl.Int64,  # wall-clock time, including called functions
    "self_ns": pl.Int64,  # without called functions that have a row of their own
    "share": pl.Float64,  # share of all self_ns, 0 to 1
    "mean_ns": pl.Int64,  # total_ns per call
    "runs_in": pl.String,  # "main process" or "workers"
    "processor_ns": pl.Int64,  # processor time in total_ns
}

MOST_WORKERS: Final = 64
"""Most workers to recommend where the number of processors is unknown."""
RECEIVED_NS: Final = 1_000_000
"""Time to receive a batch of a few tensors by name from a busy worker, measured on slow virtual machines."""
HANDED_OVER_NS: Final = 1_400_000
"""The same by file descriptors, which is torch's way on Linux: measured in four programs, 1.2 to 1.7 ms."""

_ITEM: Final = re.compile(r": (?:__getitem__|__getitems__)$")
_FETCH: Final = re.compile(r"torch/utils/data/_utils/fetch\.py\(\d+\): fetch$")
_FETCH_ITEMS: Final = re.compile(r"torch/utils/data/_utils/fetch\.py\(\d+\): <listcomp>$|built-in function next>$")
_PIN: Final = re.compile(r"torch/utils/data/_utils/pin_memory\.py")
_START: Final = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): _get_iterator$")
_STAGES: Final = ("loader", "item", "transform", "collate", "pin", "worker_start")


def input_table(trace: Trace, *, activity: HostActivity | None = None, window: Window | None = None) -> pl.DataFrame:
    """List the functions of the input pipeline.

    Args:
        window: only functions that begin in it; applies to frames, not to the recorder's measurements.

    Returns:
        Columns as in INPUT_SCHEMA, one row per function, largest self time first; empty where nothing is known.
    """
    program = trace.metadata.program
    if program is not None and program.input_stages:
        return _from_facts(program.input_stages)
    return _from_frames(trace, activity or host_activity(trace), window)


def _from_facts(stages: tuple[InputStageFacts, ...]) -> pl.DataFrame:
    """Rows of measured stages; a dataset's item contains its transforms."""
    transforms = {
        workers: sum(each.total_ns for each in stages if each.stage == "transform" and each.in_workers == workers)
        for workers in (False, True)
    }
    rows = [
        {
            "stage": each.stage,
            "function": each.name,
            "file": each.file,
            "line": each.line,
            "runs_in": "workers" if each.in_workers else "main process",
            "calls": each.calls,
            "total_ns": each.total_ns,
            "self_ns": max(each.total_ns - (transforms[each.in_workers] if each.stage == "item" else 0), 0),
            "processor_ns": each.processor_ns,
        }
        for each in stages
    ]
    return _finished(pl.DataFrame(rows, schema={name: INPUT_SCHEMA[name] for name in rows[0]}))


def _from_frames(trace: Trace, activity: HostActivity, window: Window | None) -> pl.DataFrame:
    frames = trace.frames
    if frames.is_empty():
        return pl.DataFrame(schema=dict(INPUT_SCHEMA))
    rows = _frames_in_loader(frames, trace.annotations, activity)
    begun = beginning_in(frames.select("start_ns").with_row_index("row"), window)["row"].to_numpy()
    rows = rows[np.isin(rows, begun)]
    if not rows.size:
        return pl.DataFrame(schema=dict(INPUT_SCHEMA))
    parent = row_numbers(frames["parent"])
    duration = frames["duration_ns"].to_numpy()
    self_ns = duration.copy()
    inner = rows[parent[rows] >= 0]
    np.subtract.at(self_ns, parent[inner], duration[inner])
    stages = _stages_of_frames(frames["name"].to_list(), parent)
    found = pl.DataFrame(
        {
            "name": frames["name"].gather(rows),
            "stage": pl.Series(_STAGES).gather(stages[rows]),
            "total_ns": np.where(_is_recursive(frames["name"], parent)[rows], 0, duration[rows]),
            "self_ns": np.maximum(self_ns[rows], 0),
        }
    )
    table = found.group_by("name", "stage").agg(
        calls=pl.len().cast(pl.Int64), total_ns=pl.col("total_ns").sum(), self_ns=pl.col("self_ns").sum()
    )
    places = [parse(name) or (None, None, name) for name in table["name"]]
    columns = pl.DataFrame(places, {"file": pl.String, "line": pl.Int64, "function": pl.String}, orient="row")
    found = pl.concat([table, columns], how="horizontal")
    return _finished(found.with_columns(runs_in=pl.lit("main process"), processor_ns=pl.lit(None, pl.Int64)))


def _finished(table: pl.DataFrame) -> pl.DataFrame:
    total = table["self_ns"].sum()
    table = table.with_columns(
        mean_ns=pl.when(pl.col("calls") > 0).then(pl.col("total_ns") // pl.col("calls")).otherwise(0),
        share=pl.col("self_ns") / total if total else pl.lit(0.0),
    )
    return conformed(table, INPUT_SCHEMA).sort(["self_ns", "total_ns", "function"], descending=[True, True, False])


def _frames_in_loader(frames: pl.DataFrame, annotations: pl.DataFrame, activity: HostActivity) -> Rows:
    """Rows of frames inside a data loader's `__next__`, or inside calls that create its iterators."""

    def loads(name: str) -> int:
        return 1 if cause_of_name(name) == "input" or _START.search(name) else -1

    own = [activity.spread(table, by_value(rows["name"], loads)) for table, rows in
           (("frames", frames), ("annotations", annotations))]  # fmt: skip
    inside = inherit(np.maximum(*own), activity.around)
    return np.flatnonzero(at(inside, activity.slices_of("frames")) > 0)


def _stages_of_frames(names: list[str], parent: Rows) -> Rows:
    """Stage of each frame as an index into _STAGES; shape (n,)."""
    result = np.zeros(len(names), np.int64)
    item, transform, collate, pin, start = (_STAGES.index(name) for name in _STAGES[1:])
    is_entry = np.zeros(len(names), np.bool_)  # leads to the items, but is not an item itself
    for row in np.concatenate(by_level(depths(parent))).tolist() if names else []:
        above = int(parent[row])
        around = int(result[above]) if above >= 0 else 0
        name = names[row]
        if around in (item, transform):  # a dataset that wraps another requests its items
            result[row] = item if around == item and _ITEM.search(name) else transform
        elif around:
            result[row] = around
        elif _ITEM.search(name) or (above >= 0 and is_entry[above]):
            result[row] = item
        elif _PIN.search(name):
            result[row] = pin
        elif _START.search(name):
            result[row] = start
        elif above >= 0 and _FETCH.search(names[above]):
            is_entry[row] = bool(_FETCH_ITEMS.search(name))
            result[row] = 0 if is_entry[row] else collate
    return result


def _is_recursive(names: pl.Series, parent: Rows) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether each frame is called directly by a frame of its own name, as in a dataset that wraps another."""
    codes = names.rank("dense").to_numpy().astype(np.int64)
    return np.where(parent >= 0, codes[np.maximum(parent, 0)] == codes, False)


@dataclass(frozen=True, slots=True)
class Batches:
    """Cost of making one batch, and where it is made."""

    workers: int | None  # worker processes; 0 for the main process itself, None where unknown
    clock_ns: float | None  # wall-clock time of one batch in one process; None where unknown
    processor_ns: float | None  # processor time of one batch; None where unknown


def batches(program: ProgramFacts, annotated: str) -> Batches:
    """Batch costs measured by the recorder.

    Args:
        program: facts from the recorder.
        annotated: names of the loaders' annotations, which show whether there are workers.
    """
    known = [loader.workers for loader in program.loaders if loader.workers is not None]
    workers = max(known, default=0 if "SingleProcess" in annotated else None)
    where = bool(workers) if workers is not None else any(each.in_workers for each in program.input_stages)
    stages = [each for each in program.input_stages if each.in_workers == where]
    made = sum(each.calls for each in stages if each.stage == "collate")
    if not made:
        items = sum(each.calls for each in stages if each.stage == "item")
        sizes = [loader.batch_size for loader in program.loaders if loader.batch_size]
        made = items // max(sizes, default=1)
    parts = [each for each in stages if each.stage in ("item", "collate")]
    if not made or not parts:
        return Batches(workers, None, None)
    processor = [each.processor_ns for each in parts]
    return Batches(
        workers,
        sum(each.total_ns for each in parts) / made,
        None if None in processor else sum(each or 0 for each in processor) / made,
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Requirements of one step, nanoseconds, and the available processors."""

    compute_ns: float  # step without its waits for data
    busy_ns: float  # processor time of the step besides loading
    batch_ns: float  # wall-clock time to make its batches one after the other
    batch_processor_ns: float  # processor time in it
    processors: float | None  # processors that the program may use; None where unknown, which counts as enough
    received_ns: float = 0.0  # the step's time to receive its batches, where they come from workers

    @property
    def ahead_ns(self) -> float:
        """Step time if workers have its batches ready."""
        return self.compute_ns + self.received_ns

    def step_ns(self, workers: int, *, cheaper_ns: float = 0.0) -> float:
        """Step time with this many workers, when making its batches takes `cheaper_ns` less.

        It is the largest of four bounds: the computation, the workers' rate, the processors' time, and the computation
        held up by workers on its own processors.
        """
        batch = max(self.batch_ns - cheaper_ns, 0.0)
        processor = max(self.batch_processor_ns - cheaper_ns, 0.0)
        if workers == 0:
            return self.compute_ns + batch
        if self.processors is not None and self.processors < 1:  # less than one is left: they take turns
            return self.ahead_ns + batch
        processors = self.processors or math.inf
        used = self.busy_ns + self.received_ns + processor
        rate = (batch + self.received_ns) / workers  # handing a batch over takes as long as receiving it
        return max(self.ahead_ns, rate, used / processors, self.ahead_ns + self._held_up_ns(processor))

    def _held_up_ns(self, loading_ns: float) -> float:
        """Time by which workers delay the parallel part of the computation, where every thread waits for the slowest.

        The delay is what exceeds the processor time that the computation leaves, and at most doubles it.
        """
        if self.processors is None or self.processors <= 1:
            return 0.0
        parallel = min(max(self.busy_ns - self.compute_ns, 0.0) / (self.processors - 1), self.compute_ns)
        free = max(self.processors * self.compute_ns - self.busy_ns, 0.0)
        return min(max(loading_ns - free, 0.0), parallel)

    def workers_needed(self) -> int:
        """Fewest workers that hide the loading, or come nearest to it with the available processors."""
        limit = max(int(self.processors or MOST_WORKERS), 1)
        wanted = max(math.ceil(self.batch_ns / max(self.ahead_ns, 1.0)), 1)
        if wanted <= limit:
            best = self.step_ns(limit)
            return next((n for n in range(wanted, limit) if self.step_ns(n) <= best), limit)
        return limit
