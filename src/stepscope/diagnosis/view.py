"""One trace as the rules see it: tables and analyses, each computed once, and helpers that build findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Final, Literal, TypeAlias, TypeVar, cast

import numpy as np
import polars as pl

from stepscope.analysis.captured import tied_kernels
from stepscope.analysis.host import HOST_SCHEMA, TABLES, host_time
from stepscope.analysis.places import Place, line_places, merged, places
from stepscope.analysis.serving import (
    Engine,
    ServingSummary,
    engine_called,
    iteration_costs,
    serving_summary,
    trains,
)
from stepscope.analysis.step_view import StepView
from stepscope.diagnosis.earlier import Earlier
from stepscope.diagnosis.finding import Figure, Interval, Location, RuleResult, Trainer, trainer_of
from stepscope.diagnosis.recording_costs import (
    Contention,
    RecordedEvents,
    contention_of,
    recorded_events,
    without_recorded_faults,
)
from stepscope.threads import cached_property
from stepscope.trace import Trace
from stepscope.trace.metadata import RunCounts, Tally, Trigger
from stepscope.trace.model import XLA_FORMATS
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode
from stepscope.trace.nesting import Rows, at, those
from stepscope.trace.program_facts import ProgramFacts
from stepscope.whatif import Change, Experiment, Graph
from stepscope.whatif.changes import together, without_cause
from stepscope.whatif.graph import Replay
from stepscope.whatif.host_waits import operator_waits
from stepscope.whatif.job import Saved
from stepscope.whatif.waits import collective_waits, saved_between

Framework: TypeAlias = Literal["jax", "torch_xla", "hpu"]
"""Frameworks other than PyTorch on a GPU or CPU; "hpu" is PyTorch on Intel Gaudi."""
_ONLY_RECORDED_BY: Final[dict[Framework, str]] = {
    "torch_xla": r"SyncTensorsGraph|XLAGraphExecutor|LazyGraphExecutor|XlaMarkStep|torch_xla/|^StepMarker$",
    "jax": r"^PjitFunction|^jit\(|\bjit_\w|(?:^|/)jax/|backend_compile|^\$?(?:pjit|api|pxla|dispatch)\.py[:(]",
}
"""Patterns of names that only this framework records; the first match counts."""
_Result = TypeVar("_Result")
LookedUp: TypeAlias = dict[str, tuple[float, float]]
"""Thresholds by name: the value, and the one by default."""
MOSTLY_ONCE = 0.5
"""One-off share of a one-step recording that leaves nothing to promise."""
MOST_PLACES = 20
"""Maximum number of operators' places to merge with the lines of the remaining time."""
MOST_TRIGGERS = 3
_TAKEN_OUT = 0.005
"""Share of the step by which a saving must be smaller without contention for that to count as taken out of it."""
SMALLEST_PLACE = 0.02
"""Places with a smaller share of a finding's cost explain nothing and are not reported."""


class View(StepView):
    """The data that rules look at.

    Args:
        settings: thresholds by "rule.threshold", as the user set them.
        user_code: which files are the user's.
        device: the device that findings are about, if it did any work; otherwise the busiest one.
    """

    def __init__(
        self,
        trace: Trace,
        settings: Mapping[str, float] | None = None,
        user_code: UserCode = DEFAULT_USER_CODE,
        device: str | None = None,
    ) -> None:
        super().__init__(trace, user_code=user_code, device=device)
        self.settings = dict(settings or {})
        self.computed: dict[Callable[[View], object], tuple[object, LookedUp]] = {}
        self._looking: list[LookedUp] = [{}]
        self.answers: dict[str, RuleResult] = {}
        self.earlier = Earlier(self)

    def setting(self, name: str, default: float) -> float:
        """The threshold of this name as the user set it; noted for `looked_up`."""
        value = self.settings.get(name, default)
        self._looking[-1][name] = (value, default)
        return value

    def looked_up(self, compute: Callable[[], _Result]) -> tuple[_Result, LookedUp]:
        """What `compute` gives, and the thresholds that it looked up, also in what is computed once for all rules."""
        self._looking.append({})
        try:
            result = compute()
        finally:
            looked_up = self._looking.pop()
            self._looking[-1].update(looked_up)
        return result, looked_up

    def once(self, compute: Callable[[View], _Result]) -> _Result:
        """What `compute` gives for this view, computed once."""
        if compute not in self.computed:
            self.computed[compute] = self.looked_up(lambda: compute(self))
        result, looked_up = self.computed[compute]
        self._looking[-1].update(looked_up)
        return cast(_Result, result)

    @cached_property
    def program(self) -> ProgramFacts:
        """Settings of the program; all unknown if the recording has none."""
        return self.trace.metadata.program or ProgramFacts()

    @cached_property
    def run_counts(self) -> RunCounts:
        """Counts from other files of the run; empty if none were given."""
        return self.trace.metadata.evidence or RunCounts()

    @cached_property
    def experiment(self) -> Experiment:
        """The trace's dependency graph, for replays with changes."""
        return Experiment(self)

    @cached_property
    def contention(self) -> Contention | None:
        """How much other programs or a quota held up the recorded steps; None if little, or unknown."""
        return contention_of(self.experiment) if self.program.steps else None

    @cached_property
    def _typical(self) -> tuple[Graph, float, float]:
        """The graph for replays, its step, and that step on a machine as busy as during the recording, nanoseconds.

        The graph is without one-off work, costs of recording and contention.
        """
        graph, step_ns = self._contended
        if self.contention is None or self.experiment.why_not is not None:
            return graph, step_ns, step_ns
        calm = self.contention.change(self.experiment, graph)
        return calm, self.experiment.run(calm).step_ns, step_ns

    @cached_property
    def _contended(self) -> tuple[Graph, float]:
        experiment = self.experiment
        events = self.recorded_events
        changes = [
            self._recorded_faults,
            events.change if events is not None else None,
            without_cause("once") if self.once_ns else None,
        ]
        known = [change for change in changes if change is not None]
        if not known:
            return experiment.graph, experiment.measured_ns / experiment.step_count
        graph = together(*known)(experiment, experiment.graph)
        return graph, experiment.run(graph).step_ns

    @cached_property
    def _recorded_faults(self) -> Change | None:
        return without_recorded_faults(self.experiment)

    @cached_property
    def recorded_events(self) -> RecordedEvents | None:
        """What recording each event cost; None if unknown or nothing."""
        if self.trace.metadata.unrecorded is None:
            return None
        experiment, faults = self.experiment, self._recorded_faults
        return recorded_events(experiment, faults(experiment, experiment.graph) if faults else experiment.graph)

    def saved_ns(self, change: Change) -> int:
        """Time that a replay of a step loses with this change; at most the step.

        If the recording slowed the steps in a known way, the replay leaves that out, and its relative saving is
        applied to the recorded step. What other programs took of the step is in no saving.
        """
        graph, before, step_ns = self._typical
        done = self.experiment.run(change(self.experiment, graph))
        if (self.trace.metadata.world_size or 1) > 1:
            self._saved[change] = saved_between(self.experiment, self.met, self._typical_replay, done.replay)
        return min(max(round((before - done.step_ns) / step_ns * self.step_ns), 0), self.step_ns)

    def saved(self, change: Change) -> Saved:
        """What a change saves of the own work of a rank, for a replay of its job."""
        if change not in self._saved:
            self.saved_ns(change)
        return self._saved[change]

    @cached_property
    def _saved(self) -> dict[Change, Saved]:
        return {}

    @cached_property
    def _typical_replay(self) -> Replay:
        graph = self._typical[0]
        return self.experiment.measured if graph is self.experiment.graph else self.experiment.run(graph).replay

    @cached_property
    def met(self) -> pl.DataFrame:
        """The rank's collectives and how its own work depends on them; see `collective_waits`."""
        return collective_waits(self)

    @cached_property
    def calm_step_ns(self) -> int:
        """The step without what other programs took of it; the step itself if they took little."""
        if self.contention is None:
            return self.step_ns
        if self.experiment.why_not is not None:
            return max(self.step_ns - self.contention.ns_per_step, 1)
        _, before, step_ns = self._typical
        return max(round(before / step_ns * self.step_ns), 1)

    def is_counted_in(self, change: Change, saved_ns: int) -> bool:
        """Whether the contention that was taken out was a part of what this change saves."""
        graph, step_ns = self._contended
        after = self.experiment.run(change(self.experiment, graph)).step_ns
        return (1 - after / step_ns) * self.step_ns > saved_ns + _TAKEN_OUT * self.step_ns

    @cached_property
    def torch_device(self) -> str:
        """PyTorch's module for the device: torch.cuda for NVIDIA, AMD and unknown devices, else torch.accelerator.

        torch.accelerator has the same functions for every accelerator (PyTorch 2.9 and later).
        """
        calls = self.trace.launches["name"]
        has_cuda = calls.is_empty() or bool(calls.str.contains(r"^(?:cuda|cu[A-Z]|hip)").any())
        return "torch.cuda" if has_cuda else "torch.accelerator"

    @cached_property
    def torch_stream(self) -> str:
        """PyTorch's stream class for the device."""
        return "torch.cuda.Stream" if self.torch_device == "torch.cuda" else "torch.Stream"

    def on_stream(self, stream: str) -> str:
        """The expression for a `with` statement that works on a stream of the device."""
        return f"torch.cuda.stream({stream})" if self.torch_device == "torch.cuda" else stream

    @cached_property
    def framework(self) -> Framework | None:
        """The program's framework, by names that only it records; None for PyTorch on a GPU or CPU and if unknown."""
        return framework_of(self.trace)

    @cached_property
    def trainer(self) -> Trainer | None:
        """The library that runs the training loop, by the files in which steps ran; None if it is none that is known.

        Files are those of recorded frames, of a stack at the end of a step, and of functions that made batches.
        """
        program = self.program
        files = [*program.stack, *(stage.file or "" for stage in program.input_stages)]
        return trainer_of([*files, *self.trace.frames["file"].drop_nulls().unique()]) if self.trains else None

    @cached_property
    def trains(self) -> bool:
        """Whether a backward pass or an optimizer's step was recorded; other programs get no advice on training."""
        return trains(self.trace)

    @cached_property
    def iteration_costs(self) -> pl.DataFrame:
        """The iterations with what each launched; see `serving.iteration_costs`."""
        return iteration_costs(self.trace, self.iterations)

    @cached_property
    def serving(self) -> ServingSummary | None:
        """What was served; None if nothing shows that the program serves or generates."""
        return serving_summary(self.trace, self.iteration_costs) if self.iterations.height else None

    @property
    def serves(self) -> bool:
        """Whether the program serves or generates, and trains nothing meanwhile."""
        return self.serving is not None and not self.trains

    @property
    def engine(self) -> Engine:
        """The engine that serves; one without options where it is unknown, or nothing serves."""
        return engine_called(self.serving.engine if self.serving is not None else "")

    @property
    def knows_recording_costs(self) -> bool:
        """Whether replays leave out what recording added to the steps."""
        return self.recorded_events is not None or self._recorded_faults is not None

    @property
    def period(self) -> str:
        """What costs are shares of: "step", or "recording" without steps."""
        return "step" if self.complete_steps.height else "recording"

    @property
    def per(self) -> str:
        """The end of a figure's name: "per step", or "in the recording" without steps."""
        return "per step" if self.complete_steps.height else "in the recording"

    @property
    def a_step(self) -> str:
        """The words for "3 times a step": "a step", or "in the recording" without steps."""
        return "a step" if self.complete_steps.height else "in the recording"

    @property
    def each_step(self) -> str:
        """The words "in each step", or "in the recording" without steps."""
        return "in each step" if self.complete_steps.height else "in the recording"

    @property
    def length_ns(self) -> int:
        """Duration of the steps, without one-off work; at least 1."""
        return max(self.window.duration_ns - self.once_ns, 1)

    @cached_property
    def once_ns(self) -> int:
        """Idle time of the device in the steps due to one-off work."""
        return int(self.pieces_of("once")["duration_ns"].sum())

    @property
    def is_warm_up(self) -> bool:
        """Whether most of the recording is one-off work, and no second step shows what is left without it."""
        return self.step_count < 2 and self.once_ns > MOSTLY_ONCE * self.window.duration_ns

    @cached_property
    def step_ns(self) -> int:
        return max(self.length_ns // self.step_count, 1)

    @cached_property
    def pieces(self) -> pl.DataFrame:
        """The time that findings explain: idle pieces of `device`, or without a device the main thread's time.

        Columns gap, start_ns, duration_ns, cause, trigger_launch, lane, launch, as in `idle_time`, and slice, the
        index of the thread's innermost slice in `activity`, -1 for none.
        """
        if self.device is None:
            return self.host_pieces
        idle = self.idle_in_steps
        return self._with_slices(those(idle, (idle["device"] == self.device).fill_null(False).to_numpy()))

    @cached_property
    def host_pieces(self) -> pl.DataFrame:
        """The main thread's time in the span, including while the device works; columns as in `pieces`."""
        rows = (
            host_time(self.trace, window=self.span, activity=self.activity)
            if self.lane is not None
            else pl.DataFrame(schema=dict(HOST_SCHEMA))
        )
        rows = rows.with_columns(
            gap=pl.lit(None, pl.Int64),
            trigger_launch=pl.lit(None, pl.UInt32),
            launch=pl.lit(None, pl.UInt32),
        )
        return self._with_slices(rows)

    def _with_slices(self, rows: pl.DataFrame) -> pl.DataFrame:
        index = self.activity.slice_index(rows["slice_table"], rows["slice_row"])
        columns = ["gap", "start_ns", "duration_ns", "cause", "trigger_launch", "lane", "launch"]
        return rows.select(columns).with_columns(slice=pl.Series(index, dtype=pl.Int64))

    @cached_property
    def waited_for(self) -> Rows:
        """Rows of `device_work` whose end the operators that launched them waited for."""
        return operator_waits(self.trace).work

    def pieces_of(self, *causes: str) -> pl.DataFrame:
        return self.pieces.filter(pl.col("cause").is_in(causes))

    def cost_ns(self, rows: Rows) -> int:
        """Cost of these operators, with each moment counted once.

        Without a device, the threads' time in them; with a device, its time for the work launched inside them and its
        idle time before that work.

        Args:
            rows: rows of `operators`; one may run inside another.
        """
        if not len(rows):
            return 0
        outermost = self.outermost(rows)
        if self.device is None:
            return int(self.trace.operators["duration_ns"].to_numpy()[outermost].sum())
        inside = self.inside(outermost)
        device = int(self.operator_costs["device_self_ns"].to_numpy()[inside].sum())
        launched = pl.Series(self.launched_in(outermost), dtype=pl.UInt32)
        idle = self.pieces.filter(pl.col("launch").is_in(launched.implode()))
        return device + int(idle["duration_ns"].sum())

    def per_step(self, ns: int | float) -> int:
        """A cost over the span as a cost per step, never more than the step."""
        return min(int(ns) // self.step_count, self.step_ns)

    def share(self, ns: int | float) -> float:
        """A cost over the span as a share of the steps' time, 0 to 1."""
        return min(float(ns) / self.length_ns, 1.0)

    def percent(self, ns: int | float) -> str:
        """A cost over the span in percent of the steps' time, for a title; "<1%" if it would round to nothing."""
        percent = f"{self.share(ns):.0%}"
        return percent if percent != "0%" else "<1%"

    def locations(self, pieces: pl.DataFrame, top: int = 3) -> tuple[Location, ...]:
        """Places in the user's code that account for these pieces' time; needs the columns of `pieces`.

        Time outside of operators is placed by the line that the thread was executing, if the recording has lines.
        """
        slices, ns = pieces["slice"].to_numpy(), pieces["duration_ns"].to_numpy()
        in_operator = at(self.activity.table, slices) >= TABLES.index("operators")
        lanes = np.array(list(self.activity.line_timelines), np.int64)
        by_line = ~in_operator & np.isin(pieces["lane"].cast(pl.Int64).fill_null(-1).to_numpy(), lanes)
        found = places(self.attribution, slices[~by_line], ns[~by_line], MOST_PLACES)
        found += line_places(self.trace, self.activity, pieces.filter(pl.Series(by_line, dtype=pl.Boolean)))
        total = max(int(np.sum(ns)), 1)
        return tuple(_location(place, total) for place in merged(found)[:top] if place.ns >= SMALLEST_PLACE * total)

    def locations_of(self, slices: Rows, ns: Rows, top: int = 3) -> tuple[Location, ...]:
        """Places in the user's code that contain these slices, weighted by `ns`."""
        total = max(int(np.sum(ns)), 1)
        found = places(self.attribution, slices, ns, top)
        return tuple(_location(place, total) for place in found if place.ns >= SMALLEST_PLACE * total)

    def at_operators(self, rows: Rows, ns: Rows | None = None) -> tuple[Location, ...]:
        """Places in the user's code that called these rows of `operators`, weighted by `ns` or by their duration."""
        if ns is None:
            ns = self.trace.operators["duration_ns"].to_numpy()[rows]
        return self.locations_of(self.slices_of_operators(rows), np.maximum(ns, 1))

    def at_launches(self, work: pl.DataFrame, weight: str = "duration_ns") -> tuple[Location, ...]:
        """Places in the user's code that launched this work, or captured it; columns launch, `weight`, perhaps row."""
        if "row" in work.columns and tied_kernels(self.trace):
            return self._at_captures(work, weight)
        launched = work.filter(pl.col("launch").is_not_null())
        return self.locations_of(self.slices_of_launches(launched["launch"]), launched[weight].to_numpy())

    def _at_captures(self, work: pl.DataFrame, weight: str) -> tuple[Location, ...]:
        attribution, rows = self.attribution, work["row"].to_numpy().astype(np.int64)
        ns = work[weight].to_numpy()
        elsewhere = attribution.own_work_place[rows]  # known from another recording, which has no slices here
        found = places(attribution, np.where(elsewhere < 0, attribution.work_slices[rows], -1), ns, MOST_PLACES)
        for place in np.unique(elsewhere[elsewhere >= 0]):
            found.append(Place(*attribution.places[int(place)], int(ns[elsewhere == place].sum()), ()))
        total = max(int(np.sum(ns)), 1)
        ranked = [place for place in merged(found) if place.ns >= SMALLEST_PLACE * total]
        return tuple(_location(place, total) for place in ranked[:3])

    def at_triggers(self, triggers: Sequence[Trigger]) -> tuple[Location, ...]:
        """The lines of the user's code that files beside the trace name most often."""
        counts: Counter[tuple[str, int, str]] = Counter()
        for trigger in triggers:
            frame = next((frame for frame in trigger.frames if frame.file in self.user_code), None)
            if frame is not None:
                counts[frame.file, frame.line, frame.function] += trigger.count
        total = max(sum(trigger.count for trigger in triggers), 1)
        return tuple(
            Location(*place, share=min(count / total, 1.0), exact_line=True)
            for place, count in counts.most_common(MOST_TRIGGERS)
        )

    def longest(self, pieces: pl.DataFrame, what: str, count: int = 3) -> tuple[Interval, ...]:
        """The longest gaps among idle pieces, as examples."""
        keys = ["gap"] if "gap" in pieces.columns and pieces["gap"].null_count() < pieces.height else ["start_ns"]
        gaps = pieces.group_by(keys).agg(begin=pl.col("start_ns").min(), ns=pl.col("duration_ns").sum())
        top = gaps.sort(["ns", "begin"], descending=[True, False]).head(count)
        return tuple(Interval(begin, ns, what) for begin, ns in top.select("begin", "ns").iter_rows())

    def saving_ns(self, cost_ns: float, change: Change | None) -> tuple[int, Change | None]:
        """The saving per step and the replayed change; the cost and None if no replay is possible."""
        if change is None or self.experiment.why_not is not None:
            return min(self.per_step(cost_ns), self.calm_step_ns), None
        return self.saved_ns(change), change

    def count_per_step(self, name: str, count: float) -> Figure:
        """A number over the span as a figure per step."""
        return Figure(f"{name} {self.per}", count / self.step_count, "count")

    def ns_per_step(self, name: str, ns: float) -> Figure:
        """A cost over the span as a figure per step, never more than the step."""
        return Figure(f"{name} {self.per}", self.per_step(ns), "ns")

    def bytes_per_step(self, name: str, size: int) -> Figure:
        return Figure(f"{name} {self.per}", size // self.step_count, "bytes")

    def bytes_of(self, name: str, sizes: pl.Series) -> tuple[Figure, ...]:
        """The sum of sizes over the span as a figure per step; none if any of them is unknown."""
        if sizes.null_count() or sizes.is_empty():
            return ()
        return (self.bytes_per_step(name, int(sizes.sum())),)

    def share_figure(self, name: str, ns: float) -> Figure:
        """A cost over the span as a share of the steps' time; the figure's name is "share of the step" and `name`."""
        return Figure(f"share of the {self.period} {name}", self.share(ns), "share")


def framework_of(trace: Trace) -> Framework | None:
    """The framework of a program other than PyTorch on a GPU or CPU, by names that only it records."""
    if trace.metadata.format == "gaudi":
        return "hpu"
    if trace.metadata.format not in XLA_FORMATS:
        return None
    tables = (trace.operators, trace.frames, trace.launches, trace.annotations, trace.device_work)
    names = pl.concat([table["name"] for table in tables]).unique()
    return next((one for one, pattern in _ONLY_RECORDED_BY.items() if bool(names.str.contains(pattern).any())), None)


def tally_figures(what: str, tally: Tally | None) -> list[Figure]:
    """Count, total time and longest time of an event in the whole run, as far as they are known."""
    if tally is None:
        return []
    times = ((f"time of all {what}", tally.total_ns), (f"longest of the {what}", tally.longest_ns))
    return [
        Figure(f"{what} in the whole run", tally.count, "count"),
        *(Figure(name, ns, "ns") for name, ns in times if ns is not None),
    ]


def rows_of(table: pl.DataFrame) -> Rows:
    rows: Rows = table["row"].to_numpy().astype(np.int64)
    return rows


def _location(place: Place, total: int) -> Location:
    return Location(
        place.file,
        place.line,
        place.function,
        min(place.ns / total, 1.0),
        place.exact_line,
        place.call_path,
        place.inside,
        place.module,
    )


def once(compute: Callable[[View], _Result]) -> Callable[[View], _Result]:
    """Keep a function's result with the view, for all rules that ask for it."""

    @wraps(compute)
    def kept(view: View) -> _Result:
        return view.once(compute)

    return kept
