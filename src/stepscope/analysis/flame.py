"""Flame graphs: time by stack, from the user's code or modules down to operators and kernels.

A stack is a list of frames, outermost first: the user's functions where Python frames were recorded, else the modules;
then the user's line; then nested operators and the kernel. Backward work appears under the line of its forward, after a
frame "backward".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import numpy as np
import polars as pl

from stepscope.analysis.attribution import Attribution, attribute, parse, user_entries
from stepscope.analysis.host import TABLES, HostActivity
from stepscope.analysis.module_paths import FORWARD, PHASES
from stepscope.analysis.operators import operator_costs
from stepscope.analysis.places import call_path
from stepscope.trace import Trace
from stepscope.trace.naming import UserCode
from stepscope.trace.nesting import Rows, at, depths, row_numbers
from stepscope.trace.window import Times

NAME_LENGTH: Final = 200
"""Longest frame name, in characters."""
DEEPEST: Final = 200
"""Deepest stack that is kept; real ones are shallower, but a damaged trace could nest endlessly."""
MAXIMUM_FRAMES: Final = 3000
"""Most frames to draw in a flame graph."""
_NOWHERE: Final = "(no line of yours)"
_AROUND: Final = [() if phase == FORWARD else (name,) for phase, name in enumerate(PHASES)]


@dataclass(frozen=True, slots=True)
class FlameStack:
    """Time of one stack, nanoseconds; `frames` from the outermost inwards."""

    frames: tuple[str, ...]
    ns: int


@dataclass(frozen=True, slots=True)
class FlameFrame:
    name: str
    parent: int  # index of the frame below it, -1 for those at the bottom
    ns: int  # including everything above it


@dataclass(frozen=True, slots=True)
class FlameGraph:
    """Stacks merged into a tree, ready to draw."""

    # "device" for the time of device work, "host" for operators' self time
    basis: Literal["device", "host"]
    total_ns: int
    frames: tuple[FlameFrame, ...]  # each after the one below it; siblings sorted by cost, costliest first
    dropped: int  # frames too small to draw


def user_stacks(trace: Trace, attribution: Attribution | None = None) -> list[FlameStack]:
    """Device time by the user's stack, or operators' self time if the trace has no device.

    The times add up to all device time, or all operators' self time. Stacks are in order of first appearance.
    """
    attribution = attribute(trace) if attribution is None else attribution
    sums: dict[tuple[str, ...], int] = {}
    stacks = _Stacks(attribution)
    if trace.device_work.height:
        leaves = _shortened(trace.device_work["name"])
        costs = trace.device_work["duration_ns"].to_list()
        slices = attribution.work_slices
        operators = _operators_of(attribution, slices)
        keys = zip(slices.tolist(), operators.tolist(), attribution.work_phase.tolist(), strict=True)
        written = trace.device_work["call_stack"].to_list()
    else:
        leaves = [""] * trace.operators.height
        costs = operator_costs(trace)["host_self_ns"].to_list()
        slices, operators = attribution.operator_slices, np.arange(trace.operators.height)
        phase = np.where(slices >= 0, at(attribution.phase, slices), len(PHASES) - 1)
        keys = zip(slices.tolist(), operators.tolist(), phase.tolist(), strict=True)
        written = [None] * len(leaves)
    for (row, operator, phase_number), origin, leaf, ns in zip(keys, written, leaves, costs, strict=True):
        frames = stacks.written(origin, phase_number) or stacks.frames(row, operator, phase_number)
        stack = (*frames, leaf) if leaf else frames
        sums[stack] = sums.get(stack, 0) + ns
    return [FlameStack(frames, ns) for frames, ns in sums.items() if ns > 0]


def flame_graph(trace: Trace, attribution: Attribution | None = None, maximum: int = MAXIMUM_FRAMES) -> FlameGraph:
    """Merge the stacks of `user_stacks` into one tree; beyond `maximum` frames the smallest are left out."""
    stacks = user_stacks(trace, attribution)
    children: dict[tuple[int, str], int] = {}
    names, parents, times = list[str](), list[int](), list[int]()
    for stack in stacks:
        below = -1
        for name in stack.frames:
            number = children.get((below, name))
            if number is None:
                number = children[below, name] = len(names)
                names.append(name)
                parents.append(below)
                times.append(0)
            times[number] += stack.ns
            below = number
    # A frame is never larger than its parent, which comes first, so the largest frames form a tree.
    kept = sorted(range(len(names)), key=lambda number: (-times[number], number))[:maximum]
    place = {number: position for position, number in enumerate(kept)}
    frames = tuple(FlameFrame(names[n], place.get(parents[n], -1), times[n]) for n in kept)
    basis: Literal["device", "host"] = "device" if trace.device_work.height else "host"
    return FlameGraph(basis, sum(stack.ns for stack in stacks), frames, len(names) - len(kept))


@dataclass(frozen=True, slots=True)
class ThreadEvents:
    """One thread's activity as frames that open and close, properly nested."""

    name: str  # thread name
    start_ns: int  # first event
    end_ns: int  # last event
    events: Iterator[tuple[int, str, bool]]  # time, name, and whether the frame opens


def thread_events(trace: Trace, activity: HostActivity) -> Iterator[ThreadEvents]:
    """Stacks of each host thread over time, the busiest thread first."""
    names = dict(trace.lanes.select("lane", "name").iter_rows())
    count = {lane: int((activity.lane == lane).sum()) for lane in activity.timelines}
    depth = depths(activity.parent)
    tables = [_shortened(trace.table(name)["name"]) for name in TABLES]
    for lane in sorted(count, key=lambda lane: (-count[lane], lane)):
        timeline = activity.timelines[lane]
        times, slices = timeline.times[1:], timeline.slices[1:]
        if len(times):
            events = _events(tables, activity, times, slices, depth)
            yield ThreadEvents(names.get(lane) or f"thread {lane}", int(times[0]), int(times[-1]), events)


_EVENTS: Final = 20_000
"""Events that are made and written at a time."""


def _by_parts(times: Times, slices: Rows) -> Iterator[tuple[int, int]]:
    """Both as Python's numbers, which are not all made at once."""
    for first in range(0, len(times), _EVENTS):
        yield from zip(times[first : first + _EVENTS].tolist(), slices[first : first + _EVENTS].tolist(), strict=True)


def _events(
    tables: list[list[str]], activity: HostActivity, times: Times, slices: Rows, depth: Rows
) -> Iterator[tuple[int, str, bool]]:
    """Differences between consecutive stacks; `tables` has the names of each table's slices."""
    parent, is_open = activity.parent, list[int]()
    for time, innermost in _by_parts(times, slices):
        opening = []
        current = innermost
        while current >= 0 and not (depth[current] < len(is_open) and is_open[depth[current]] == current):
            opening.append(current)
            current = int(parent[current])
        while len(is_open) > (0 if current < 0 else int(depth[current]) + 1):
            closed = is_open.pop()
            yield time, tables[activity.table[closed]][activity.row[closed]], False
        for opened in reversed(opening):
            is_open.append(opened)
            yield time, tables[activity.table[opened]][activity.row[opened]], True
    while is_open:
        closed = is_open.pop()
        yield int(times[-1]), tables[activity.table[closed]][activity.row[closed]], False


class _Stacks:
    """Frames of operators, each computed once."""

    def __init__(self, attribution: Attribution) -> None:
        self._attribution = attribution
        operators = attribution.trace.operators
        self._names = _shortened(operators["name"])
        self._parent = operators["parent"].cast(pl.Int64).fill_null(-1).to_list()
        self._users: dict[tuple[int, int, int], tuple[str, ...]] = {}
        self._chains: dict[int, tuple[str, ...]] = {-1: ()}

    def frames(self, row: int, operator: int, phase: int) -> tuple[str, ...]:
        """Frames of work under a slice and an operator, either of which may be -1."""
        return (*self._user(row), *_AROUND[phase], *self._chain(operator))

    def written(self, call_stack: str | None, phase: int) -> tuple[str, ...]:
        """Frames of compiled work from its source location; empty if unknown or not in the user's code."""
        if call_stack is None:
            return ()
        return (*_written(call_stack, self._attribution.activity.user_code), *_AROUND[phase])

    def _user(self, row: int) -> tuple[str, ...]:
        """The user's functions or the modules, then the line; cached by place, module and frame."""
        attribution = self._attribution
        if row < 0:
            return (_NOWHERE,)
        place, module, frame = (
            int(values[row]) for values in (attribution.place, attribution.module, attribution.frame)
        )
        key = (place, module, frame if attribution.stack[row] < 0 else -2 - int(attribution.stack[row]))
        if key not in self._users:
            path = call_path(attribution, row) if place >= 0 else ()
            if not path and module >= 0:
                path = tuple(attribution.modules[module].split("."))
            self._users[key] = (*map(_cut, path), self._line(place))
        return self._users[key]

    def _line(self, place: int) -> str:
        if place < 0:
            return _NOWHERE
        file, line, function, _ = self._attribution.places[place]
        return _cut(f"{file}:{line} {function}")

    def _chain(self, operator: int) -> tuple[str, ...]:
        """An operator and those around it, outermost first."""
        missing = []
        current = operator
        while current not in self._chains:
            missing.append(current)
            current = self._parent[current]
        for number in reversed(missing):
            self._chains[number] = (*self._chains[self._parent[number]], self._names[number])[:DEEPEST]
        return self._chains[operator]


@lru_cache(maxsize=4096)
def _written(call_stack: str, user_code: UserCode) -> tuple[str, ...]:
    """The user's part of a call stack, outermost first."""
    parsed = [parse(entry) for entry in reversed(user_entries(call_stack, user_code))]
    return tuple(_cut(f"{entry[0]}:{entry[1]} {entry[2]}") for entry in parsed if entry is not None)


def _operators_of(attribution: Attribution, slices: Rows) -> Rows:
    """Operator that each slice is or belongs to, -1 for none."""
    activity, trace = attribution.activity, attribution.trace
    table = at(activity.table, slices)
    row = at(activity.row, slices)
    launching = row_numbers(trace.launches["operator"])
    by_launch = at(launching, np.where(table == TABLES.index("launches"), row, -1))
    return np.where(table == TABLES.index("operators"), row, by_launch)


def _shortened(names: pl.Series) -> list[str]:
    """The beginning of each name; the same names are one object."""
    shortened = names.fill_null("").str.head(NAME_LENGTH)
    different = shortened.unique()
    numbers = shortened.replace_strict(different, range(len(different)), return_dtype=pl.UInt32)
    words = different.to_list()
    return [words[number] for number in numbers] if words else []


def _cut(name: str) -> str:
    return name[:NAME_LENGTH]


_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def speedscope(trace: Trace, attribution: Attribution | None = None) -> Iterator[bytes]:
    """Stream a JSON document in speedscope's file format.

    First comes a profile of the device's time by the user's stack, or of operators' self time without a device,
    costliest stacks first; then one profile of each host thread over time, with everything recorded.
    """
    attribution = attribute(trace) if attribution is None else attribution
    frames: dict[str, int] = {}
    head = {"$schema": _SCHEMA, "exporter": "stepscope", "name": trace.metadata.path, "activeProfileIndex": 0}
    yield json.dumps(head).encode()[:-1] + b', "profiles": [\n'
    yield _sampled(user_stacks(trace, attribution), stacks_name(trace), frames)
    for thread in thread_events(trace, attribution.activity):
        about = {"type": "evented", "name": thread.name, "unit": "nanoseconds"}
        values = {"startValue": thread.start_ns, "endValue": thread.end_ns}
        yield b",\n" + json.dumps({**about, **values}).encode()[:-1] + b', "events": ['
        separator, part = "", list[str]()
        for time, name, opens in thread.events:
            number = frames.setdefault(name, len(frames))
            part.append(f'{{"type":"{"O" if opens else "C"}","frame":{number},"at":{time}}}')
            if len(part) == _EVENTS:
                yield (separator + ",".join(part)).encode()
                separator, part = ",\n", []
        yield (separator if part else "").encode() + ",".join(part).encode() + b"]}"
    shared = {"frames": [{"name": name} for name in frames]}
    yield b'\n], "shared": ' + json.dumps(shared).encode() + b"}\n"


def folded(trace: Trace, attribution: Attribution | None = None) -> Iterator[bytes]:
    """Folded stacks, one line each: frames separated by semicolons, and nanoseconds; the costliest first."""
    for stack in _costliest_first(user_stacks(trace, attribution)):
        frames = ";".join(_one_line(frame) for frame in stack.frames)
        yield f"{frames} {stack.ns}\n".encode("utf-8", "backslashreplace")


def stacks_name(trace: Trace) -> str:
    """Describe what the stacks of `user_stacks` measure."""
    return "device time by line" if trace.device_work.height else "operators' own time by line"


def _sampled(stacks: list[FlameStack], name: str, frames: dict[str, int]) -> bytes:
    ordered = _costliest_first(stacks)
    samples = [[frames.setdefault(frame, len(frames)) for frame in stack.frames] for stack in ordered]
    weights = [stack.ns for stack in ordered]
    profile = {"type": "sampled", "name": name, "unit": "nanoseconds", "startValue": 0, "endValue": sum(weights)}
    return json.dumps({**profile, "samples": samples, "weights": weights}).encode()


def _costliest_first(stacks: list[FlameStack]) -> list[FlameStack]:
    return sorted(stacks, key=lambda stack: (-stack.ns, stack.frames))


def _one_line(frame: str) -> str:
    """Remove separators of frames and stacks, and characters that could move a terminal's cursor."""
    return "".join(mark if mark.isprintable() else " " for mark in frame.replace(";", ",")) or "?"
