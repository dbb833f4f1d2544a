"""Repetitions: a prefix recomputed for each new position, a model called on one sample after another, and loops that
need their earlier results.

Repetitions that need earlier results cannot be batched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.loops import PARAMETRISED, Loop
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.work import base_name, elements, shapes_of, tensor_shapes_of
from stepscope.diagnosis.lines.costs import SourceLoops, Visits, carried_by, main_visits
from stepscope.diagnosis.lines.graphs import outermost_calls
from stepscope.diagnosis.view import View, once, rows_of
from stepscope.trace.nesting import Rows, outermost
from stepscope.trace.program_facts import LoopFacts

CHOOSING: Final = frozenset({"argmax", "multinomial", "topk", "bernoulli"})
"""Operators that choose from a result; in a loop, mostly the next repetition's input."""
_FEWEST: Final = 8
"""Fewest calls in a step for growing inputs to be a pattern."""
_MOST: Final = 0.8
_GROWTH: Final = 1.5
_FEWEST_STEPS: Final = 4
"""Fewest one-call steps for the same pattern, if each adds equally much."""
_SHORT: Final = 0.05
"""Quantile that counts as the shortest operator time; the very shortest may be a clock error."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Calls of one module, each for one new position and all positions before it.

    Attributes:
        module: path of the outermost module.
        calls: columns as in `modules`, in order, and `size` (input elements of operators with parameters) and `added`
            (new elements).
        rows: rows of `operators`: the outermost operators of the calls.
        left: the part of each operator's time that the new positions need, 0 to 1: their part of the input, but no
            less than the shortest operators take.
    """

    module: str
    calls: pl.DataFrame
    rows: Rows
    left: npt.NDArray[np.float64]


@once
def recomputed_prefixes(view: View) -> list[Prefix]:
    """Find modules that are called on a growing sequence, each time on all of it.

    The inputs of operators with parameters count: with a cache they would be only as large as the new positions. The
    sequence grows within each step or, in a program that does not train, from step to step. Its length may also be
    fixed (a window, or room for later positions) if one position of each sequence is chosen after each call, and the
    loop needs the previous call's result.
    """
    return list(_recomputed_prefixes(view))


def _recomputed_prefixes(view: View) -> Iterator[Prefix]:
    calls = outermost_calls(view)
    if calls.height < _FEWEST_STEPS or view.lane is None:
        return
    bounds = view.steps["start_ns"].to_numpy()
    step = np.searchsorted(bounds, calls["start_ns"].to_numpy(), side="right")
    shaped = view.operators.filter((pl.col("lane") == view.lane) & pl.col("input_shapes").is_not_null())
    shaped = shaped.select("name", "input_shapes", "start_ns").sort("start_ns", maintain_order=True)
    calls = calls.with_columns(step=pl.Series(step, dtype=pl.Int64), size=pl.Series(_sizes(shaped, calls)))
    loops = SourceLoops(view)
    for (name,), mine in calls.group_by("name", maintain_order=True):
        by_step = [part for _, part in mine.group_by("step", maintain_order=True)]
        growing = [_growing(part) for part in by_step if _grows(part["size"].to_numpy(), _infers(view, part))]
        if growing:
            yield _prefix(view, str(name), growing)
        elif not view.trains and _grows_by_steps(mine["size"].to_numpy()):
            yield _prefix(view, str(name), [_growing(mine)])
        elif fixed := [part for each in by_step if (part := _of_one_length(shaped, loops, each)) is not None]:
            yield _prefix(view, str(name), fixed)


def _sizes(shaped: pl.DataFrame, calls: pl.DataFrame) -> Rows:
    """For each call, the total input size of its operators with parameters."""
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    sizes = np.zeros(len(begin), np.int64)
    for name, shapes, start in shaped.iter_rows():
        base = base_name(name)
        if base not in PARAMETRISED:
            continue
        call = int(np.searchsorted(begin, start, side="right")) - 1
        inputs = tensor_shapes_of(shapes)
        place = 1 if base.startswith("embedding") else 0
        if call >= 0 and start < end[call] and len(inputs) > place:
            sizes[call] += min(elements(inputs[place]), 2**40)
    return sizes


def _infers(view: View, calls: pl.DataFrame) -> bool:
    return not view.trains or bool(calls["evaluates"].fill_null(value=False).all())


def _grows(sizes: Rows, infers: bool) -> bool:
    """Whether each call adds as much; in training only if that adds up to half of the first call's size."""
    if len(sizes) < _FEWEST or sizes[0] <= 0 or (sizes[-1] < _GROWTH * sizes[0] and not infers):
        return False
    steps = np.diff(sizes)
    usual = int(np.median(steps))
    return usual > 0 and float(np.mean(steps == usual)) >= _MOST


def _grows_by_steps(sizes: Rows) -> bool:
    steps = np.diff(sizes)
    return len(sizes) >= _FEWEST_STEPS and bool(steps[0] > 0 and (steps == steps[0]).all() and sizes[0] > steps[0])


def _growing(calls: pl.DataFrame) -> pl.DataFrame:
    """These calls with `added`, the elements that each call adds; all of the first call is new."""
    added = np.diff(calls["size"].to_numpy(), prepend=0)
    if calls["step"].n_unique() == calls.height:  # the first of them was not recorded
        added[0] = added[-1]
    return calls.with_columns(added=pl.Series(added))


def _of_one_length(shaped: pl.DataFrame, loops: SourceLoops, calls: pl.DataFrame) -> pl.DataFrame | None:
    """A step's calls with `added`, if each adds one position to sequences of fixed length, else None.

    Args:
        shaped: the thread's operators with shapes, in order.
    """
    if calls.height < _FEWEST or calls["size"].n_unique() > 1:
        return None
    begin, last = calls["start_ns"].to_numpy(), int(calls["start_ns"][-1])
    end = last + int(calls["duration_ns"][-1])
    first, behind = shaped["start_ns"].search_sorted(int(begin[0])), shaped["start_ns"].search_sorted(end, side="right")
    read: dict[int, tuple[int, ...]] = {}
    chosen: dict[int, int] = {}
    for name, text, start in shaped.slice(first, behind - first).iter_rows():
        call = int(np.searchsorted(begin, start, side="right")) - 1
        base, shapes = base_name(name), shapes_of(text)
        if base == "embedding" and len(shapes) > 1 and len(shapes[1]) in (1, 2):
            read.setdefault(call, (1, *shapes[1])[-2:])
        elif base in CHOOSING and shapes and shapes[0]:
            chosen.setdefault(call, elements(shapes[0][:-1]))
    lengths = set(read.values())
    if len(lengths) != 1 or len(read) < calls.height:
        return None
    [(sequences, length)] = lengths
    one_each = sum(rows <= sequences for rows in chosen.values())
    if length < _FEWEST or one_each < _MOST * (calls.height - 1):
        return None
    if not carried_by(loops.between(int(begin[0]), last, calls.height)):
        return None
    size = int(calls["size"][0])
    return calls.with_columns(added=pl.Series([size, *[size // length] * (calls.height - 1)]))


def _prefix(view: View, name: str, runs: list[pl.DataFrame]) -> Prefix:
    calls = pl.concat(runs)
    needed = np.clip(calls["added"].to_numpy() / np.maximum(calls["size"].to_numpy(), 1), 0.0, 1.0)
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    operators = view.operators.filter(pl.col("lane") == view.lane)
    starts = operators["start_ns"].to_numpy()
    call = np.searchsorted(begin, starts, side="right") - 1
    within = (call >= 0) & (starts < end[np.maximum(call, 0)])
    rows, call = rows_of(operators)[within], call[within]
    top = np.isin(rows, outermost(rows, view.parents))
    rows, call = rows[top], call[top]
    work = (
        view.trace.operators["duration_ns"] if view.device is None else view.operator_costs["device_total_ns"]
    ).to_numpy()[rows]
    shortest = float(np.quantile(work, _SHORT)) if len(work) else 0.0
    left = np.maximum(needed[call], shortest / np.maximum(work, 1))
    return Prefix(name, calls, rows, np.minimum(left, 1.0))


_FEWEST_SAMPLES: Final = 3
"""Fewest calls in one run of a loop for single samples to be worth a batch."""


@dataclass(frozen=True, slots=True)
class OneByOneCalls:
    """Calls of one module, each on one sample, in a loop of the user's source that needs no earlier result.

    Attributes:
        module: path of the outermost module.
        loop: the loop in the source.
        calls: columns as in `modules`; a repetition may make several.
        repetitions: columns lane, start_ns, duration_ns: the visits of the loop's line, in order.
        runs: how often the loop was entered.
    """

    module: str
    loop: LoopFacts
    calls: pl.DataFrame
    repetitions: pl.DataFrame
    runs: int


def one_by_one_calls(view: View) -> Iterator[OneByOneCalls]:
    """Find modules that a loop calls on one sample after another, although no repetition needs another one's result.

    A call is on one sample if the first operator with parameters gets an input whose first dimension is 1, or one
    without a batch dimension. Loops whose repetitions each run backward are left out: they may save memory.
    """
    independent = any(not each.carried for each in view.program.loops)
    calls = _on_one_sample(view) if independent and view.lane is not None else None
    if calls is None or calls.height < _FEWEST_SAMPLES:
        return
    visits = main_visits(view)
    steps = view.steps["start_ns"].to_numpy()
    found: dict[tuple[LoopFacts, str], dict[tuple[int, int], dict[int, list[int]]]] = {}
    for number, (name, start) in enumerate(calls.select("name", "start_ns").iter_rows()):
        inside = ((loop, visit) for loop, visit in loops_around(view, visits, visits.at(start)) if not loop.carried)
        for loop, visit in islice(inside, 1):
            run = (int(visits.parents[visit]), int(np.searchsorted(steps, start, side="right")))
            runs = found.setdefault((loop, name), {})
            runs.setdefault(run, {}).setdefault(visit, []).append(number)
    for (loop, name), runs in found.items():
        whole = [run for run in runs.values() if len(run) >= _FEWEST_SAMPLES]
        chosen = np.array([visit for run in whole for visit in run], np.int64)
        if len(chosen) and not _runs_backward(view, visits, whole):
            numbers = [number for run in whole for each in run.values() for number in each]
            stretches = pl.DataFrame({"start_ns": visits.starts[chosen], "end": visits.ends[chosen]}).select(
                pl.lit(view.lane, pl.Int32).alias("lane"), "start_ns", duration_ns=pl.col("end") - pl.col("start_ns")
            )
            yield OneByOneCalls(name, loop, calls[numbers], stretches, len(whole))


def loops_around(view: View, visits: Visits, visit: int) -> Iterator[tuple[LoopFacts, int]]:
    """The innermost loop of the source around a visit, and around those that called it, each with the visit inside."""
    while visit >= 0:
        file, line, _ = visits.place(visit)
        around = [each for each in view.program.loops if each.file == file and each.first <= line <= each.last]
        innermost = min(around, key=lambda each: (each.last - each.first, not each.is_comprehension), default=None)
        if innermost is not None:
            yield innermost, visit
        visit = int(visits.parents[visit])


def _on_one_sample(view: View) -> pl.DataFrame:
    """Outermost calls of modules whose first operator with parameters gets one sample; columns as in `modules`."""
    calls = outermost_calls(view)
    layers = (pl.col("lane") == view.lane) & pl.col("input_shapes").is_not_null()
    begin = calls["start_ns"].to_numpy()
    end = begin + calls["duration_ns"].to_numpy()
    is_one: dict[int, bool] = {}
    for name, text, start in (
        view.operators.filter(layers).select("name", "input_shapes", "start_ns").sort("start_ns").iter_rows()
    ):
        call, base = int(np.searchsorted(begin, start, side="right")) - 1, base_name(name)
        if call in is_one or call < 0 or start >= end[call] or base not in PARAMETRISED:
            continue
        shapes = tensor_shapes_of(text)
        place = 1 if base.startswith("embedding") else 0
        if len(shapes) > place:
            shape = shapes[place]
            is_one[call] = len(shape) <= (0 if place else 1) or (len(shape) > 1 and shape[0] == 1)
    return calls[[call for call, one in is_one.items() if one]]


def _runs_backward(view: View, visits: Visits, runs: list[dict[int, list[int]]]) -> bool:
    """Whether the first run's repetitions each run a backward pass."""
    nodes = view.operators.filter(pl.col("name").str.contains(BACKWARD_NAME))["start_ns"].sort().to_numpy()
    first, second, *_ = runs[0]
    begin, end = np.searchsorted(nodes, [visits.starts[first], visits.starts[second]])
    return bool(end > begin)


@once
def dependencies(view: View) -> Dependencies:
    """Which loops carry results, computed once for all rules."""
    return Dependencies(view)


class Dependencies:
    """Tells which loops of a view carry results from one repetition to the next."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._prefixes = [prefix.rows for prefix in recomputed_prefixes(view)]
        self._source_loops = SourceLoops(view)

    def carried(self, loop: Loop) -> tuple[str, ...] | None:
        """Names that carry results from one repetition to the next; () for none, None for unknown."""
        if any(np.isin(loop.operators[:1], rows).any() for rows in self._prefixes):
            return ("the sequence",)
        sources = self._sources(loop)
        if not sources and self._is_in_comprehension(loop):
            return ()
        if not sources:
            chooses = any(base_name(name) in CHOOSING for name in loop.body)
            return ("the chosen position",) if chooses else None
        return carried_by(sources)

    def _is_in_comprehension(self, loop: Loop) -> bool:
        """Whether the innermost loop of the source around the operators is a comprehension."""
        if not any(each.is_comprehension for each in self._view.program.loops):
            return False
        start = int(self._view.trace.operators["start_ns"][int(loop.operators[-1])])
        visits = main_visits(self._view)
        around = next(loops_around(self._view, visits, visits.at(start)), None)
        return around is not None and around[0].is_comprehension

    def runs(self, loop: Loop) -> int:
        """How often the program entered the loop, whose repetitions may span several turns of an outer loop."""
        return max((runs for _, runs in self._sources(loop)), default=1)

    def _sources(self, loop: Loop) -> list[tuple[LoopFacts, int]]:
        operators = self._view.trace.operators
        begin, last = int(operators["start_ns"][int(loop.operators[0])]), int(loop.operators[-1])
        end = int(operators["start_ns"][last] + operators["duration_ns"][last])
        return self._source_loops.between(begin, end, loop.repetitions)
