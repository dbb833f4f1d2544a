"""Shared by the rules about input: how long steps wait for batches, and how long making a batch takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.input_pipeline import HANDED_OVER_NS, Batches, Load, batches
from stepscope.diagnosis.finding import Figure, Location, Remedy
from stepscope.diagnosis.lines.costs import calls_at
from stepscope.diagnosis.lines.function_work import FunctionWork, Work
from stepscope.diagnosis.view import View, once
from stepscope.trace import Window
from stepscope.trace.naming import LOADER_START, cause_of_name, is_stepscope_file
from stepscope.trace.program_facts import LoaderFacts
from stepscope.whatif.changes import scaled_cause

CARRIES_MOST: Final = 0.5
"""Share of the time to make a batch above which a function counts as the slow one."""
NEARLY_ALL: Final = 0.8
"""Workers are the remedy if they remove at least this share of the waits; otherwise a faster function is."""
_BEGUN: Final = 0.5
"""Share of batches from a new iterator above which the program makes one for each batch."""
KEPT_ITERATOR: Final = Remedy(
    "The program makes a new iterator of the loader for each batch, which shuffles anew and starts workers, if "
    "there are any: make one before the loop and take the next batch from it. More workers would make it slower.",
    "batches = iter(loader)                   # once, before the loop\n"
    "batch = next(batches)                    # in the step, instead of next(iter(loader))",
)
_AS_FAST: Final = 1.05
"""Workers keep up if a step takes at most this many times its computation."""
_LEAST_LEFT: Final = 0.01
_FREE: Final = 0.5
"""Part of a processor from which a worker finds it free."""
HANDED_OUT_NS: Final = 50_000
"""Least time that a recorded function needs to hand out a sample that is in memory."""
INDEXED: Final = 0.1
"""Share of the time to make a batch of single samples that taking it from whole tensors needs."""
_COLLATED_NS: Final = 10_000
"""Least time that it needs to put such a sample into a batch: stacking a tensor takes 1 to 2 us, a few fields more."""


@dataclass(frozen=True, slots=True)
class Loading:
    """The data loader's part in the steps; times are nanoseconds over the span unless stated otherwise.

    Attributes:
        pieces: idle pieces (without a device: pieces of the main thread's time) in which the host waited for a batch.
        wait_ns: sum of the pieces; with a device, also the idle time until it has work again, and waits before its
            first work.
        calls: number of batches requested.
        waits: the part of `wait_ns` inside each of these calls; columns start_ns, wait_ns.
        batches: what the recording shows about making one batch.
        load: per step; None if the time to make a batch is unknown.
        loader: facts about the loader with the most workers; None without facts.
        processors: number that the program may use; None if unknown.
        other_cores: how many of them other programs kept busy; None if unknown.
    """

    pieces: pl.DataFrame
    wait_ns: int
    calls: int
    waits: pl.DataFrame
    batches: Batches
    load: Load | None
    loader: LoaderFacts | None
    processors: int | None
    other_cores: float | None = None

    @property
    def has_no_free_core(self) -> bool:
        """Whether other programs leave no processor for a worker beside the thread that runs the steps."""
        if self.processors is None or self.other_cores is None or self.other_cores < _FREE:
            return False
        return self.processors - self.other_cores < 1 + _FREE

    @property
    def workers(self) -> int | None:
        """Number of worker processes; None if unknown."""
        return self.batches.workers

    @property
    def keeps_up(self) -> bool:
        """Whether the existing workers make batches as fast as they are used."""
        load, workers = self.load, self.workers
        return load is not None and bool(workers) and load.step_ns(workers or 0) <= _AS_FAST * load.ahead_ns

    @property
    def received_ns(self) -> int:
        """The waits, each capped at the median: with workers that keep up, the time to receive batches."""
        waits = self.waits["wait_ns"].to_numpy()
        return int(np.minimum(waits, np.median(waits)).sum()) if len(waits) else 0

    @property
    def is_begun_anew(self) -> bool:
        """Whether most batches are the first of a new iterator although the loader has more."""
        made, batches = (self.loader.iterators, self.loader.batches) if self.loader is not None else (None, None)
        return bool(made and self.calls and batches != 1 and made >= _BEGUN * self.calls)

    def samples_per_step(self, view: View) -> float:
        """Samples in a step's batches; at least 1."""
        size = self.loader.batch_size if self.loader is not None else None
        return max(self.calls / view.step_count * (size or 1), 1.0)

    def saved_ns(self, view: View, workers: int, cheaper_ns: float = 0.0) -> int:
        """Time the span would lose with this number of workers, or with batches cheaper by `cheaper_ns` a step.

        At most the waits; all of them if the time to make a batch is unknown.
        """
        if self.load is None:
            return self.wait_ns
        gain = view.step_ns - self.load.step_ns(workers, cheaper_ns=cheaper_ns)
        return int(min(max(gain, 0.0) * view.step_count, self.wait_ns))


@dataclass(frozen=True, slots=True)
class Costly:
    """The function that makes batches slow.

    Attributes:
        share: share of the time to make a batch, 0 to 1.
        avoidable: part of that share beyond what handing out samples from memory takes.
        total_ns: its time over the recording.
    """

    stage: str
    name: str
    file: str
    line: int
    calls: int
    total_ns: int
    share: float
    avoidable: float


@once
def loading_of(view: View) -> Loading:
    pieces = view.pieces_of("input")
    marks = marks_of(view)
    made = batches(view.program, " ".join(marks["name"].unique().to_list()))
    wait_ns = int(pieces["duration_ns"].sum())
    if view.device is not None:
        wait_ns += _refill_ns(view, pieces)
    usable = view.program.process.get("usable_processors")
    processors = usable if isinstance(usable, int) and usable > 0 else None
    loader = max(view.program.loaders, key=lambda each: each.workers or 0, default=None)
    load = _load(view, made, marks, wait_ns, processors)
    return Loading(
        pieces, wait_ns, marks.height, _waits(pieces, marks), made, load, loader, processors, view.program.other_cores
    )


def marks_of(view: View) -> pl.DataFrame:
    """Annotations in the span that mark requests for batches; columns as in `annotations`."""
    return view.begin_in_span(view.trace.annotations.filter(pl.col("name").str.contains("DataLoader")))


def _refill_ns(view: View, pieces: pl.DataFrame) -> int:
    """Idle time after the waits until the device has work again.

    The late batch caused it as well: with the batch in time, the host would have been ahead. Idle time after the host
    synchronised is left out, because that removes the host's lead in any case.
    """
    waits = pieces.drop_nulls("gap").group_by("gap").agg(begin=pl.col("start_ns").min())
    others = view.pieces.filter((pl.col("cause") != "input") & pl.col("trigger_launch").is_null())
    after = others.join(waits, on="gap").filter(pl.col("start_ns") > pl.col("begin"))
    return int(after["duration_ns"].sum())


def _waits(pieces: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    calls = marks.select(call="start_ns", begin="start_ns").sort("begin")
    joined = (
        pieces.select("start_ns", "duration_ns").sort("start_ns").join_asof(calls, left_on="start_ns", right_on="begin")
    )
    sums = joined.group_by("call").agg(wait_ns=pl.col("duration_ns").sum())
    return calls.join(sums, on="call", how="left").select(start_ns="call", wait_ns=pl.col("wait_ns").fill_null(0))


def _load(view: View, made: Batches, marks: pl.DataFrame, wait_ns: int, processors: int | None) -> Load | None:
    per_step = marks.height / view.step_count
    clock = made.clock_ns
    if made.workers == 0:  # the trace shows the main process's time
        clock = float(marks["duration_ns"].sum()) / marks.height if marks.height else None
    if clock is None or not per_step:
        return None
    processor = clock if made.processor_ns is None else min(made.processor_ns, clock)
    compute = max(view.step_ns - wait_ns / view.step_count, 0.0)
    if made.workers:
        busy, left = _busy_ns(view, compute, 0.0), _left_by_others(view, processors, 0.0)
    else:
        busy, left = _busy_ns(view, compute, processor * per_step), _left_by_others(view, processors, _waiting(view))
    received = HANDED_OVER_NS * per_step * _slowed(view, wait_ns) if view.device is None and not made.workers else 0.0
    return Load(compute, busy, clock * per_step, processor * per_step, left, received)


def _slowed(view: View, wait_ns: int) -> float:
    """How many times as long steps take while they are recorded, at least 1; receiving a batch slows likewise.

    Recording may slow loading more than the rest, and a saving is replayed without the recording. So receiving a batch
    takes as large a part of the recorded loading as of the loading in that replay.
    """
    unrecorded = view.trace.metadata.unrecorded
    if unrecorded is None or not unrecorded.step_ns:
        return 1.0
    whole = max(view.step_ns / unrecorded.step_ns, 1.0)
    if view.recorded_events is None or view.experiment.why_not is not None:
        return whole
    left = view.saved_ns(scaled_cause("input", 0.0))
    return whole * max(wait_ns / view.step_count / max(left, 1), 1.0)


def _left_by_others(view: View, processors: int | None, waited: float) -> float | None:
    """Processors, less those that other programs kept busy, or where that is unknown the share of them waited for."""
    if processors is None:
        return None
    others = view.program.other_cores
    left = processors * (1 - waited) if others is None else processors - others
    return max(left, _LEAST_LEFT)


def _waiting(view: View) -> float:
    """Share of the step in which its thread was ready and got no processor."""
    waited = [step.thread_waiting_ns for step in view.program.steps if step.thread_waiting_ns is not None]
    return min(sum(waited) / len(waited) / view.step_ns, 1.0) if waited else 0.0


def _busy_ns(view: View, compute_ns: float, loading_ns: float) -> float:
    """Processor time of a step's computation: counted, or else its time multiplied by torch's threads."""
    counted = [step.process_processor_ns for step in view.program.steps if step.process_processor_ns is not None]
    if counted:
        return max(sum(counted) / len(counted) - loading_ns, 0.0)
    threads = view.program.torch.get("threads")
    if view.device is not None or not isinstance(threads, int):
        return compute_ns
    return compute_ns * threads


def costly_function(view: View, loading: Loading, *, of_users: bool = True) -> Costly | None:
    """The innermost function that takes most of the time to make a batch; None if no function does.

    Args:
        of_users: look for a function of the user; otherwise for one of a library.
    """
    table = view.input_functions
    if table.is_empty():
        return None
    where = "workers" if loading.workers and "workers" in table["runs_in"] else "main process"
    in_stage = (pl.col("runs_in") == where) & pl.col("stage").is_in(["item", "transform", "collate"])
    table = _with_avoidable(table.filter(in_stage | (pl.col("stage") == "sampler")), "total_ns", loading)
    whole = _whole_ns(view, table)
    best = None
    for row in _by_function(table).iter_rows(named=True):
        if row["total_ns"] < CARRIES_MOST * whole or whole == 0:
            break
        if (
            row["file"] is not None
            and not is_stepscope_file(row["file"])
            and (row["file"] in view.user_code) is of_users
        ):
            best = Costly(
                row["stage"], row["function"], row["file"], row["line"] or 1, row["calls"], row["total_ns"],
                min(row["total_ns"] / whole, 1.0), min(row["avoidable_ns"] / whole, 1.0),
            )  # fmt: skip
    return best


def repeated_work(view: View, loading: Loading) -> Work | None:
    """The dataset's functions that compute each sample again in each epoch although its source never changes."""
    if loading.workers or loading.is_begun_anew:
        return None
    stages = [each for each in view.program.input_stages if each.stage in ("item", "transform")]
    begins = {(each.file or "", each.line or 0) for each in stages}
    called = {name.rpartition(".")[2] for each in view.program.functions if (each.file, each.line) in begins
              for name in each.calls}  # fmt: skip
    if any(map(_TRANSFORM.fullmatch, called)) and not any(each.stage == "transform" for each in stages):
        return None  # what it does is unknown
    return FunctionWork(view, loading.pieces).repeated(begins)


READING: Final = frozenset(
    {
        "open", "load", "loads", "read", "imread", "imdecode", "read_csv", "read_parquet", "read_image", "decode_image",
        "decode_jpeg", "loadtxt", "genfromtxt", "fromfile", "loadmat", "decompress", "convert", "read_hdf", "read_json",
    }
)  # fmt: skip
"""Functions of libraries that read files or decode what was read."""


def reading_lines(view: View, loading: Loading) -> tuple[float, tuple[Location, ...]]:
    """Lines that read or decode files while batches are made: their share of that time, and the costliest of them."""
    works = FunctionWork(view, loading.pieces)
    total = max(sum(works.lines.values()), 1.0)
    places = [works.location(line, ns / total) for line, ns in works.lines.items()]
    mine = [place for place in places if not READING.isdisjoint(calls_at(view, place))]
    mine.sort(key=lambda place: (-place.share, place.file, place.line))
    return sum(place.share for place in mine), tuple(mine[:3])


_TRANSFORM: Final = re.compile(r"\w*transforms?")


def sample_ns(view: View) -> int:
    """Time in which the dataset makes one sample, as recorded; 0 if unknown."""
    items = view.input_functions.filter(pl.col("stage") == "item")
    return int(items["total_ns"].sum()) // max(int(items["calls"].sum()), 1)


def cheaper_share(view: View, loading: Loading) -> float:
    """Share of the time to make a batch that functions take beyond handing out samples from memory, 0 to 1.

    PyTorch's own part is left out.
    """
    table = _with_avoidable(
        view.input_functions.filter(pl.col("stage").is_in(["item", "transform", "collate"])), "self_ns", loading
    )
    whole = int(table["self_ns"].sum())
    others = table.filter(~pl.col("file").fill_null("").str.contains("torch/utils/data/", literal=True))
    return int(others["avoidable_ns"].sum()) / whole if whole else 0.0


def _with_avoidable(table: pl.DataFrame, taken: str, loading: Loading) -> pl.DataFrame:
    """The functions with `avoidable_ns`: what this column of times has beyond handing out samples from memory."""
    size = (loading.loader.batch_size if loading.loader is not None else None) or 1
    is_collate = pl.col("stage") == "collate"
    needed = pl.col("calls") * pl.when(is_collate).then(size * _COLLATED_NS).otherwise(HANDED_OUT_NS)
    sampler = pl.col("stage") == "sampler"
    return table.with_columns(avoidable_ns=(pl.col(taken) - pl.when(sampler).then(0).otherwise(needed)).clip(0))


def _by_function(table: pl.DataFrame) -> pl.DataFrame:
    """One row per function, costliest first; a generator, for one, has a row for each of several lines."""
    sums = table.sort("total_ns", descending=True).group_by("stage", "function", "file", maintain_order=True)
    together = sums.agg(pl.col("line").first(), pl.col("calls", "total_ns", "avoidable_ns").sum())
    return together.sort("total_ns", descending=True, maintain_order=True)


def places_of(view: View, loading: Loading, costly: Costly | None) -> tuple[Location, ...]:
    """The lines at which the main process makes batches, if known; otherwise the costly function."""
    works = FunctionWork(view, loading.pieces)
    places = works.places() if view.program.functions else view.locations(loading.pieces)
    if costly is None or (not loading.workers and sum(place.share for place in places) >= CARRIES_MOST):
        return places
    return (Location(costly.file, costly.line, costly.name.rpartition(".")[2], costly.share),)


def _whole_ns(view: View, table: pl.DataFrame) -> int:
    if view.program.input_stages:
        return int(table.filter(pl.col("stage") != "transform")["total_ns"].sum())
    marks = view.begin_in_span(view.trace.annotations)
    loading_marks = [name for name in marks["name"].unique() if cause_of_name(name) == "input"]
    annotated = int(marks.filter(pl.col("name").is_in(loading_marks))["duration_ns"].sum())
    return annotated or int(table["self_ns"].sum())


def iterator_starts(view: View) -> list[Window]:
    """Windows on the main thread from creating an iterator over a loader with workers to its first batch.

    They begin in the span. A window includes the call that ended the previous iteration and stopped its workers, if
    no operator ran since.
    """
    mine = pl.col("lane") == view.lane
    slices = ("start_ns", "duration_ns", "name", "lane")
    made = pl.concat([view.trace.table(name).select(slices) for name in ("frames", "operators", "annotations")])
    made = made.filter(mine & pl.col("name").str.contains(LOADER_START)).unique("start_ns").sort("start_ns")
    end = pl.col("start_ns") + pl.col("duration_ns")
    marks = view.trace.annotations.filter(mine & pl.col("name").str.contains("DataLoader.*MultiProcessing"))
    marks = marks.select(mark_ns="start_ns", end_ns=end).sort("mark_ns")
    first = made.join_asof(marks, left_on="start_ns", right_on="mark_ns", strategy="forward").drop_nulls("mark_ns")
    first = view.begin_in_span(first)
    # Of nested slices, keep the outermost, which comes first.
    windows = first.group_by("mark_ns").agg(pl.col("start_ns").min(), pl.col("end_ns").first()).sort("start_ns")
    before = windows.join_asof(
        marks.rename({"end_ns": "last_end_ns"}).rename({"mark_ns": "last_ns"}), left_on="start_ns", right_on="last_ns"
    )
    computed = (
        view.trace.operators.filter(mine & pl.col("name").str.starts_with("aten::"))["start_ns"].sort().to_numpy()
    )
    result = []
    for begin, until, last, last_end in before.select("start_ns", "end_ns", "last_ns", "last_end_ns").iter_rows():
        begins = begin
        if last is not None and not np.diff(np.searchsorted(computed, [last_end, begin])).any():
            begins = max(last, view.span.start_ns)
        result.append(Window(begins, until))
    return result


def processors_in_words(count: int) -> str:
    return "one processor" if count == 1 else f"{count} processors"


def settings_figures(loading: Loading) -> list[Figure]:
    ahead = loading.loader.prefetch_factor if loading.loader is not None and loading.workers else None
    counts = {
        "worker processes": loading.workers,
        "batches prefetched by each worker": ahead,
        "processors the program may use": loading.processors,
        "processors that other programs kept busy": loading.other_cores if loading.has_no_free_core else None,
    }
    figures = [Figure(name, count, "count") for name, count in counts.items() if count is not None]
    if loading.batches.clock_ns is not None:
        figures.append(Figure("time to make a batch", int(loading.batches.clock_ns), "ns"))
    return figures
