"""Attribution of operators and device work to the user's line, the module and the phase of the step.

The place is the line that the recording kept with an operator, else the user's innermost Python frame, else the call
stack. What runs inside a backward node belongs to the forward operator that made the node, unless user code runs inside
the node (a hook, the backward of a custom autograd function). A node that no forward operator of the trace made, such
as one that accumulates gradients, belongs to the line that called the backward pass, as does what an autograd
thread does outside of nodes. Work of the optimizer belongs to the line that called its step. A piece of device work
belongs to the call that launched it, or, where the compiler recorded its source line, to that line.

A module's name is its path: its qualified name after the class of the outermost module ("GPT2.blocks.0") where
stepscope recorded it, else by class and number as profilers count instances ("GPT2_0.Block_1.Linear_3"), in compiled
code by its scopes (see `stepscope.analysis.module_paths`).

Phases: "backward" is the work of autograd nodes, including recomputation of the forward pass; "optimizer" is the
optimizer's step and clearing gradients; "input" is loading data, and copying to the device outside of modules;
"forward" is what runs in modules, operators with an autograd node, and, in a trace without a backward pass, all other
operators and launches; "other" is the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.captured import tied_kernels
from stepscope.analysis.host import HostActivity, host_activity
from stepscope.analysis.module_paths import (
    FORWARD,
    INPUT,
    OTHER,
    PHASES,
    engine_lanes,
    node_source,
    own_modules,
    phases,
    phases_of_scopes,
)
from stepscope.trace import Trace
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode, is_third_party_file
from stepscope.trace.nesting import Numbering, Rows, at, by_value, gathered, inherit, inside, nullable, row_numbers

ATTRIBUTION_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "file": pl.String,
    "line": pl.Int32,
    "function": pl.String,
    "exact_line": pl.Boolean,  # whether `line` is the statement's, not the function definition's
    "module": pl.String,
    "phase": pl.String,  # one of PHASES
}

_ENTRY: Final = re.compile(r"(.+)\((\d{1,9})\): (.+)", re.DOTALL)


class SourcePlace(NamedTuple):
    """A place in the user's code; `line` is the function's definition unless `exact_line`."""

    file: str
    line: int
    function: str
    exact_line: bool


@dataclass(frozen=True)
class Attribution:
    """Place, module and phase of every slice of a `HostActivity`."""

    trace: Trace
    activity: HostActivity
    places: tuple[SourcePlace, ...]  # the distinct places
    modules: tuple[str, ...]  # the distinct module paths, each after its parents
    module_parents: Rows  # parent of each of `modules`, -1 if it has none
    place: Rows  # index into `places` for each slice, -1 for none; shape (n,), like the next fields
    module: Rows  # index into `modules`, -1 for none
    phase: npt.NDArray[np.int8]  # index into PHASES
    frame: Rows  # row in `frames` of the user's innermost frame, for backward slices that of their forward; -1 for none
    stack: Rows  # index of the slice whose call stack gives the place, -1 where the place comes from elsewhere
    caused: npt.NDArray[np.bool_]  # whether the slice belongs to the backward of a forward operator
    line_place: Rows  # index into `places` for each row of `lines`, -1 for none
    own_work_place: Rows  # index into `places` for each row of `device_work` by its own call stack, -1 for none
    own_work_module: Rows  # index into `modules` for each row of `device_work` by its own scope, -1 for none
    own_work_phase: Rows  # index into PHASES for each row of `device_work` by its own scope, -1 for none

    @cached_property
    def work_place(self) -> Rows:
        return np.where(self.own_work_place >= 0, self.own_work_place, at(self.place, self.work_slices))

    @cached_property
    def work_module(self) -> Rows:
        return np.where(self.own_work_module >= 0, self.own_work_module, at(self.module, self.work_slices))

    @cached_property
    def library_frames(self) -> Rows:
        """For each slice that is a library's frame (except torch's), its function's first row in `frames`, or -1."""
        frames = self.trace.frames
        files = frames["file"].unique()
        telling = [file for file in files if is_third_party_file(file) and file not in self.activity.user_code]
        row = pl.col("row").cast(pl.Int64).min().over("name")
        known = pl.col("file").is_in(telling).fill_null(False)
        first = frames.with_row_index("row").select(pl.when(known).then(row).otherwise(-1))
        return self.activity.spread("frames", first.to_series().to_numpy())

    @cached_property
    def library_frame(self) -> Rows:
        """For each slice the `library_frames` value of the innermost frame around it, or itself; -1 for none."""
        return inherit(self.library_frames, self.activity.around)

    @cached_property
    def operator_slices(self) -> Rows:
        """For each row of `operators` its slice, -1 for none."""
        return self.activity.slices_of("operators")

    @cached_property
    def work_slices(self) -> Rows:
        """For each row of `device_work` the slice of the call that launched it, else of its operator, else -1.

        A graph's kernels have the call that captured them, where it is known.
        """
        work, calls = self.trace.device_work, self.trace.launches
        launch = row_numbers(work["launch"])
        for tied in tied_kernels(self.trace):
            if tied.capture is None:
                launch = np.where(tied.launch >= 0, tied.launch, launch)
        result = at(self.activity.slices_of("launches"), launch)
        operator = at(row_numbers(calls["operator"]), launch)
        known = self.trace.operators.with_row_index("row").select("row", "external_id")
        known = known.filter(pl.col("external_id") > 0).unique("external_id", keep="none")
        named = work.select("external_id").join(known, on="external_id", how="left", maintain_order="left")["row"]
        operator = np.where(operator >= 0, operator, row_numbers(named))
        return np.where(result >= 0, result, at(self.operator_slices, operator))

    @cached_property
    def work_phase(self) -> npt.NDArray[np.int8]:
        phase = np.where(self.own_work_phase >= 0, self.own_work_phase, self._phase_of(self.work_slices))
        copied = (self.trace.device_work["kind"] == "copy_in").fill_null(False).to_numpy()
        outside = self.work_module < 0
        is_input = copied & outside & ((phase == OTHER) | (phase == FORWARD))
        return np.where(is_input, INPUT, phase).astype(np.int8)

    def _phase_of(self, slices: Rows) -> npt.NDArray[np.int8]:
        return np.where(slices >= 0, at(self.phase, slices), OTHER).astype(np.int8)

    def operators(self) -> pl.DataFrame:
        slices = self.operator_slices
        return self._frame(at(self.place, slices), at(self.module, slices), self._phase_of(slices))

    def device_work(self) -> pl.DataFrame:
        return self._frame(self.work_place, self.work_module, self.work_phase)

    def _frame(self, place_of: Rows, module_of: Rows, phase: npt.NDArray[np.int8]) -> pl.DataFrame:
        places = pl.DataFrame(self.places, schema=dict(list(ATTRIBUTION_SCHEMA.items())[:4]), orient="row")
        modules = pl.Series(self.modules, dtype=pl.String).gather(nullable(module_of))
        phases = pl.Series(PHASES).gather(phase)
        return gathered(places, place_of).with_columns(modules.alias("module"), phases.alias("phase"))


def attribute(
    trace: Trace, activity: HostActivity | None = None, user_code: UserCode = DEFAULT_USER_CODE
) -> Attribution:
    """Attribute all host activity to places, modules and phases; a given activity brings its own `user_code`."""
    activity = host_activity(trace, user_code) if activity is None else activity
    sources = node_source(trace)
    redirected, caused = _through_forward(activity, sources)
    places = Numbering[SourcePlace]()
    recorded = trace.operators.select(file="source_file", line="source_line", function="source_function")
    line = activity.spread("operators", _numbered(recorded, activity, places))
    line_place = _numbered(trace.lines.select("file", "line", "function"), activity, places)
    frame = _user_frames(trace, activity, places)
    stack = _call_stacks(trace, activity, places)
    own_work_place = _stack_places(trace.device_work["call_stack"], activity, places)
    place, frame_slice, stack_slice = _places(activity, redirected, line, frame, stack)
    modules, own_module, module_parents, own_work_module = own_modules(trace, activity)
    own_work_phase = phases_of_scopes(trace.device_work["scope"])
    phase = phases(trace, activity, sources, own_module)
    for tied in tied_kernels(trace):
        if tied.capture is not None:
            there = attribute(tied.capture, user_code=activity.user_code)
            call = np.where(tied.launch >= 0, there.activity.slices_of("launches")[tied.launch], -1)
            number = np.array([places[each] for each in there.places], np.int64)
            own_work_place = np.where(own_work_place >= 0, own_work_place, at(number, at(there.place, call)))
            modules, module_parents, number = _with_modules(modules, module_parents, there)
            own_work_module = np.where(own_work_module >= 0, own_work_module, at(number, at(there.module, call)))
            own_work_phase = np.where(call >= 0, at(there.phase.astype(np.int64), call), own_work_phase)
    place = _fill_from_lines(trace, activity, place, line_place)
    place = _fill_from_main_thread(trace, activity, place)
    frame_row = at(activity.row, frame_slice)
    return Attribution(
        trace=trace,
        activity=activity,
        places=places.words,
        modules=modules,
        module_parents=module_parents,
        place=place,
        module=inherit(own_module, redirected),
        phase=phase,
        frame=frame_row,
        stack=stack_slice,
        caused=caused,
        line_place=line_place,
        own_work_place=own_work_place,
        own_work_module=own_work_module,
        own_work_phase=own_work_phase,
    )


def _with_modules(modules: tuple[str, ...], parents: Rows, there: Attribution) -> tuple[tuple[str, ...], Rows, Rows]:
    """Add another recording's modules: all modules, their parents, and the number of each of the other's."""
    numbers = {path: number for number, path in enumerate(modules)}
    around = parents.tolist()
    for path, parent in zip(there.modules, there.module_parents.tolist(), strict=True):
        if path not in numbers:
            numbers[path] = len(numbers)
            around.append(numbers[there.modules[parent]] if parent >= 0 else -1)
    mapped = np.array([numbers[path] for path in there.modules], np.int64)
    return tuple(numbers), np.array(around, np.int64), mapped


def operator_places(trace: Trace) -> pl.DataFrame:
    """Place, module and phase of each row of `operators`; columns as in ATTRIBUTION_SCHEMA."""
    return attribute(trace).operators()


def work_places(trace: Trace) -> pl.DataFrame:
    """Place, module and phase of each row of `device_work`; columns as in ATTRIBUTION_SCHEMA."""
    return attribute(trace).device_work()


@lru_cache(maxsize=65536)
def parse(name: str) -> tuple[str, int, str] | None:
    """Parse "file(line): function"; None for anything else."""
    match = _ENTRY.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


@lru_cache(maxsize=16384)
def user_entries(call_stack: str, user_code: UserCode = DEFAULT_USER_CODE) -> tuple[str, ...]:
    """The user's entries of a call stack, innermost first."""
    found = [(entry, parse(entry)) for entry in call_stack.split(";")]
    return tuple(entry for entry, parsed in found if parsed is not None and parsed[0] in user_code)


def _through_forward(activity: HostActivity, sources: Rows) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """`activity.around` with backward nodes redirected to their forward operators, and the slices inside such nodes."""
    slices = activity.slices_of("operators")
    rows = np.flatnonzero((sources >= 0) & (slices >= 0))
    rows = rows[slices[sources[rows]] >= 0]
    node, forward = slices[rows], slices[sources[rows]]
    # Only backwards in time, so that a damaged trace cannot form a cycle.
    back = activity.start[forward] < activity.start[node]
    node, forward = node[back], forward[back]
    around: Rows = activity.around.copy()
    around[node] = forward
    return around, inside(node, activity.around)


def _numbered(lines: pl.DataFrame, activity: HostActivity, places: Numbering[SourcePlace]) -> Rows:
    """Place of each row of file, line and function, -1 outside of the user's files."""

    def number(file: str | None, line: int | None, function: str | None) -> int:
        if line is None or file is None or file not in activity.user_code:
            return -1
        return places[SourcePlace(file, line, function or "", True)]

    return by_value(lines, number)


def _user_frames(trace: Trace, activity: HostActivity, places: Numbering[SourcePlace]) -> Rows:
    """Place of each slice that is a user's frame, -1 for others."""

    def number(name: str, file: str | None) -> int:
        entry = parse(name) if file in activity.user_code else None
        return -1 if entry is None else places[SourcePlace(*entry, False)]

    return activity.spread("frames", by_value(trace.frames.select("name", "file"), number))


def _call_stacks(trace: Trace, activity: HostActivity, places: Numbering[SourcePlace]) -> Rows:
    """Place of each slice whose call stack has an entry of the user, -1 for others."""
    own, annotated = (
        activity.spread(table, _stack_places(trace.table(table)["call_stack"], activity, places))
        for table in ("operators", "annotations")
    )
    return np.maximum(own, annotated)


def _stack_places(call_stacks: pl.Series, activity: HostActivity, places: Numbering[SourcePlace]) -> Rows:
    """Place of the user's innermost entry of each call stack, -1 for none."""

    def number(call_stack: str) -> int:
        entries = user_entries(call_stack, activity.user_code)
        entry = parse(entries[0]) if entries else None
        return -1 if entry is None else places[SourcePlace(*entry, True)]

    return by_value(call_stacks, number)


def _places(activity: HostActivity, redirected: Rows, line: Rows, frame: Rows, stack: Rows) -> tuple[Rows, Rows, Rows]:
    """Place of each slice, the slice of the user's innermost frame, and the slice whose call stack gave the place."""
    place = np.full(len(line), -1, np.int64)
    frame_slice, stack_slice = place.copy(), place.copy()
    index = np.arange(len(line))
    for around in (redirected, activity.around):  # without a forward place, the backward call counts
        by_line = inherit(line, around)
        origin = inherit(np.where(frame >= 0, index, -1), around)
        by_frame = at(frame, origin)
        source = inherit(np.where(stack >= 0, index, -1), around)
        open_ = place < 0
        place = np.where(open_, np.where(by_line >= 0, by_line, by_frame), place)
        frame_slice = np.where(open_ & (frame_slice < 0), origin, frame_slice)
        open_ = (place < 0) & (source >= 0)
        place[open_], stack_slice[open_] = stack[source[open_]], source[open_]
    return place, frame_slice, stack_slice


def _fill_from_lines(trace: Trace, activity: HostActivity, place: Rows, line_place: Rows) -> Rows:
    """Fill missing places of slices with their thread's line when they began.

    Steps span many lines and get no place.
    """
    is_step = activity.spread("annotations", trace.annotations["step"].is_not_null().cast(pl.Int64).to_numpy()) > 0
    result: Rows = place.copy()
    for lane, timeline in activity.line_timelines.items():
        missing = np.flatnonzero((activity.lane == lane) & (place < 0) & ~is_step)
        result[missing] = at(line_place, timeline.at(activity.start[missing]))
    return result


def _fill_from_main_thread(trace: Trace, activity: HostActivity, place: Rows) -> Rows:
    """Fill missing places of autograd threads' slices with that of the main thread, which called them."""
    processes = dict(trace.lanes.select("lane", "process").iter_rows())
    result: Rows = place.copy()
    for lane in engine_lanes(trace, activity):
        main = activity.main_lanes.get(processes.get(lane, ""))
        missing = np.flatnonzero((activity.lane == lane) & (place < 0))
        if main is not None and main != lane and main in activity.timelines:
            result[missing] = at(place, activity.timelines[main].at(activity.start[missing]))
    return result
