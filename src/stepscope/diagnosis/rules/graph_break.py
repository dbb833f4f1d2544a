"""# What it finds
Graph breaks of torch.compile that cost a noticeable part of each step.

# Why it costs time
Where the compiler cannot continue, it ends the graph, lets Python run the statement, and compiles the rest of the
function as another one. Each step then leaves compiled code, checks the guards of the rest and enters it again, and
nothing is fused across the break. A value that Python read may be a constant of the rest, which is then compiled again
whenever the value changes. Where the rest cannot be compiled by itself, as in a loop, the compiler gives up the whole
function, which then runs operator by operator: the rule reports that as a note.

# How it is measured
The log of torch.compile (`TORCH_TRACE`, which `stepscope run` records; `--compile-log` names one) says where and why
the compiler broke the graph. In the trace, the rest of the function is a compiled region of its own. The break costs
the host's time from the end of the compiled code before it to the first operator of the rest, without the operators
that run in between, which stay. With a device, its idle time in these stretches counts. What fusion across the break
would gain is not in the trace and not counted.

# Known false positives
With backends that make no graph call of their own (`eager`), the compiled code before the break ends with the last
operator before the rest, so the cost is a little too small.

# What to do
Do what the compiler's hint says, or move the statement out of the compiled function. `fullgraph=True` raises at each
break, so that none comes back unnoticed.

# Reference
PyTorch, "Working with graph breaks"; tlparse reads the same log.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import covered_by
from stepscope.diagnosis.finding import Figure, Location, NotAnswered
from stepscope.diagnosis.rule import Answers, Found, Limits, Remedy, Rows, Rule, Threshold, View
from stepscope.diagnosis.view import once
from stepscope.trace.metadata import CodePlace, Compilation, CompiledGraph, GraphBreak
from stepscope.trace.window import IntervalSet, Times, union
from stepscope.whatif.changes import scaled_host_time

_REGION: Final = r"^Torch-Compiled Region: (\d+/\d+)$"
_BOOKKEEPING: Final = r"^TorchDynamo Cache Lookup$|^Pregraph bytecode$|^AOTDispatcher Runtime Wrapper Prologue$"
"""Operators by which PyTorch records its own work around compiled code."""
_LOOKUP: Final = "TorchDynamo Cache Lookup"
_GRAPH_CALL: Final = r"^CompiledFunction$|^## Call CompiledFxGraph "
_REST: Final = re.compile(r"^torch_dynamo_resume_in_(.+)_at_(\d{1,9})$")
_OWN_FILE: Final = re.compile(r"/stepscope/(?:guard\.py|record/)|/torch/_dynamo/")
"""Files of stepscope and of the compiler, whose functions may stand around the call of a module."""
_MOST_KERNELS: Final = 20
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class BreakUse:
    """A graph break, and what it costs.

    Attributes:
        behind: lines behind which a function goes on as another compiled region, as "file:line": that of the break, and
            those that called the function with the break.
        per_step: times that a step enters such a region; None if the trace shows none.
        lost_ns_per_step: time between the compiled code around it, without the operators in between.
    """

    file: str
    line: int
    function: str
    reason: str
    explanation: str
    hint: str
    behind: tuple[str, ...]
    per_step: float | None
    lost_ns_per_step: int | None


@dataclass(frozen=True, slots=True)
class Recompilation:
    """A compilation after a guard failed, with the guard in the compiler's words and the line of the call."""

    guard: str
    called_from: str | None
    compile_ns: int | None


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A fused kernel, or the call of a graph by its kernels, and its time in a step; `on` is "device" or "host"."""

    name: str
    on: str
    calls_per_step: float
    ns_per_step: int


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """What torch.compile did with one function.

    Attributes:
        called_from: the user's line that called it, as "file:line".
        compile_ns: time of all its compilations, of the forward and the backward pass and behind breaks; None if the
            log does not tell.
        cold_ns: the part of compilations of which a graph was not in Inductor's cache; None without Inductor.
        calls_per_step, ns_per_step: of its compiled regions on the host; None if the trace shows none.
        lookup_ns_per_step: the part that checks guards.
        kernels: fused kernels that the trace shows, else the calls of its graphs, the costliest first.
    """

    function: str
    file: str
    line: int
    called_from: str | None
    compilations: int
    compile_ns: int | None
    cold_ns: int | None
    graphs: int
    operators: int
    fused_kernels: int
    calls_per_step: float | None
    ns_per_step: int | None
    lookup_ns_per_step: int | None
    kernels: tuple[FusedKernel, ...]
    recompilations: tuple[Recompilation, ...]
    failure: str | None


@dataclass(frozen=True, slots=True)
class CompileUse:
    """What torch.compile did in the whole run, by function, that of most time first.

    Attributes:
        compile_ns, cold_ns: as in `CompiledFunction`, of all functions.
        logging_ns: the part of `compile_ns` that writing the log took.
        lost_ns_per_step: what breaks cost; None if the trace shows no compiled region.
        breaks: the costliest first; those that the recorded steps do not show come last.
    """

    compilations: int
    compile_ns: int
    cold_ns: int | None
    logging_ns: int
    lost_ns_per_step: int | None
    functions: tuple[CompiledFunction, ...]
    breaks: tuple[BreakUse, ...]


def check(view: View, limits: Limits) -> Answers:
    if not view.run_counts.compiled:
        yield from _without_log(view)
        return
    for (file, function, line), rest in _rests(view).items():
        cost = _cost_ns(view, rest)
        if not limits.reached(cost):
            continue
        known = rest.known
        why = f", because of '{known.reason}'" if known is not None and known.reason else ""
        yield Found(
            f"{view.percent(cost)} of the {view.period} goes to a graph break of torch.compile in {function}(){why}",
            cost,
            basis="idle time of the device between the compiled code before and behind the break"
            if view.device is not None
            else "the host's time between the compiled code before and behind the break, outside of operators",
            confidence="medium",
            figures=[
                view.count_per_step("times behind the break", rest.entries),
                view.ns_per_step("host time between the compiled code", rest.length_ns),
            ],
            remedy=_remedy(known),
            where=(Location(file, line, function, exact_line=True),),
            change=scaled_host_time(*rest.arrays, 0.0),
        )
    yield from _not_compiled(view)


def _not_compiled(view: View) -> Iterator[Found]:
    """Functions that the compiler gave up, such as for a break in a loop."""
    failed: dict[tuple[str, int, str], Compilation] = {}
    for each in _compiled(view):
        if each.failure and each.file in view.user_code:
            failed.setdefault((each.file, each.line, each.function), each)
    for (file, line, function), each in failed.items():
        known = each.breaks[0] if each.breaks else None
        yield Found(
            f"torch.compile gave up {function}(), which runs operator by operator, because of '{each.failure}'",
            0,
            basis="no saving: what compiled code would take is not in the trace",
            confidence="medium",
            figures=[Figure("graph breaks in it", len(each.breaks), "count")],
            remedy=_remedy(known),
            where=(Location(known.file, known.line, "", exact_line=True),)
            if known is not None
            else (Location(file, line, function),),
            severity="note",
        )


def _remedy(known: GraphBreak | None) -> Remedy:
    said = [] if known is None else [part for part in (known.explanation, known.hint) if part]
    return Remedy(
        "Let the compiler continue there: follow its hint, or move the statement out of the compiled function.",
        "".join(f"# {part}\n" for part in said)
        + "model = torch.compile(model, fullgraph=True)   # raises at the first break, so that none comes back",
    )


def _without_log(view: View) -> Iterator[NotAnswered]:
    regions = _regions(view)
    if regions.height:
        number = regions["number"].n_unique()
        yield NotAnswered(
            "What did torch.compile compile, where did it break graphs, and why did it compile again?",
            f"the steps run {number:,} compiled {'region' if number == 1 else 'regions'}, and the trace does not say "
            "what they are",
            "record with stepscope run, or set TORCH_TRACE to a folder when the program starts and give it: "
            "stepscope diagnose TRACE --compile-log FOLDER",
        )


@once
def _compiled(view: View) -> tuple[Compilation, ...]:
    """The compilations of the trace's processes; all of them if they are of one process with another number."""
    found = view.run_counts.compiled
    processes = set(view.trace.lanes["process"].drop_nulls().to_list())
    mine = tuple(each for each in found if each.process in processes)
    return mine or (found if len({each.process for each in found}) == 1 else ())


def _function_of(compilation: Compilation) -> tuple[str, str]:
    """File and name of the function that a compilation belongs to, also if it is the rest of one behind a break.

    Where the compiler began in a function around a module's call, it is that call at the user's line.
    """
    name = compilation.function
    if _OWN_FILE.search(compilation.file) and (caller := _caller(compilation)) is not None:
        return caller.file, f"{caller.function}'s call of a module"
    while (rest := _REST.match(name)) is not None:
        name = rest[1]
    return compilation.file, name


def _caller(compilation: Compilation) -> CodePlace | None:
    """The innermost function around a compilation that is not stepscope's."""
    return next((place for place in compilation.called_from if not _OWN_FILE.search(place.file)), None)


def _break_at(compiled: Sequence[Compilation], file: str, line: int) -> GraphBreak | None:
    """The break that ended a graph at this line: there itself, or in a function called from there."""
    for found in (found for each in compiled for found in each.breaks):
        if (found.file, found.line) == (file, line) or any((at.file, at.line) == (file, line) for at in found.frames):
            return found
    return None


@once
def _regions(view: View) -> pl.DataFrame:
    """Compiled regions that begin in the span, with their `number` and `end_ns`."""
    regions = view.operators.filter(pl.col("name").str.starts_with("Torch-Compiled Region: "))
    end, number = pl.col("start_ns") + pl.col("duration_ns"), pl.col("name").str.extract(_REGION)
    return regions.with_columns(number=number, end_ns=end).filter(pl.col("number").is_not_null())


@dataclass(slots=True)
class _Rest:
    """Stretches of the host's time that a break costs, each entry into the rest with some."""

    known: GraphBreak | None
    lanes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    entries: int = 0
    behind: dict[str, None] = field(default_factory=dict)  # the lines behind which functions go on, "file:line"

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int32], Times, Times]:
        order = np.argsort(self.starts, kind="stable")
        lanes, starts, ends = (np.array(each, np.int64)[order] for each in (self.lanes, self.starts, self.ends))
        return lanes.astype(np.int32), starts, ends

    @property
    def length_ns(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def add(self, lane: int, stretches: IntervalSet) -> None:
        self.entries += 1
        self.lanes += [lane] * len(stretches.starts)
        self.starts += stretches.starts.tolist()
        self.ends += stretches.ends.tolist()


@once
def _rests(view: View) -> dict[tuple[str, str, int], _Rest]:
    """By file, function and line of each break, the stretches from the compiled code before it to that of the rest.

    A break inside a function that compiled code calls also splits its callers: it costs what all of them do.
    """
    of_rests = {each.number: each for each in _compiled(view) if _REST.match(each.function)}
    regions = _regions(view)
    entries = regions.filter(pl.col("number").is_in(list(of_rests)))
    if entries.is_empty():
        return {}
    around = _Around(view, regions)
    found: dict[tuple[str, str, int], _Rest] = {}
    columns = ("number", "lane", "start_ns", "end_ns", "parent")
    for number, lane, start_ns, end_ns, parent in entries.select(columns).iter_rows():
        compilation = of_rests[number]
        match = _REST.match(compilation.function)
        line = int(match[2]) if match is not None else compilation.line
        begin = around.end_before(lane, parent, start_ns)
        end = around.first_inside(lane, start_ns, end_ns)
        between = around.work(lane).clip(begin, end)
        known = _break_at(_compiled(view), compilation.file, line)
        key = (compilation.file, _function_of(compilation)[1], line)
        if known is not None:
            key = (known.file, known.frames[0].function if known.frames else key[1], known.line)
        rest = found.setdefault(key, _Rest(known))
        rest.behind[f"{compilation.file}:{line}"] = None
        rest.add(lane, between.complement(begin, end))
    return found


_SLICE: Final = ("lane", "start_ns", "duration_ns", "name")


@once
def _graph_calls(view: View) -> pl.DataFrame:
    """Calls of Inductor's graphs in the span, which the profiler records as annotations."""
    calls = view.trace.annotations.filter(
        (pl.col("kind") == "host") & pl.col("name").str.starts_with("## Call CompiledFxGraph ")
    )
    return view.begin_in_span(calls).select(_SLICE)


def _by_lane(rows: pl.DataFrame, made: Callable[[pl.DataFrame], _Made]) -> dict[int, _Made]:
    return {int(str(lane)): made(mine) for (lane,), mine in rows.group_by("lane")}


class _Around:
    """What runs around and inside the compiled regions of the steps."""

    def __init__(self, view: View, regions: pl.DataFrame) -> None:
        around = _with_ancestors(regions["row"].to_numpy(), view.parents)
        work = pl.concat(
            [view.operators.filter(~pl.col("row").is_in(around.tolist())).select(_SLICE), _graph_calls(view)]
        )
        work = work.filter(~pl.col("name").str.contains(_BOOKKEEPING))
        calls = work.filter(pl.col("name").str.contains(_GRAPH_CALL))
        self._parents = view.parents
        self._starts = dict(regions.select("row", "start_ns").iter_rows())
        self._tops = _by_lane(regions, lambda mine: np.sort(mine["start_ns"].to_numpy()))
        self._calls = _by_lane(calls, lambda mine: np.sort((mine["start_ns"] + mine["duration_ns"]).to_numpy()))
        self._work = _by_lane(work, covered_by)

    def work(self, lane: int) -> IntervalSet:
        """Time of a thread's operators that are no compiled regions, not around one, and not the compiler's own."""
        return self._work.get(lane, IntervalSet(np.zeros(0, np.int64), np.zeros(0, np.int64)))

    def first_inside(self, lane: int, start_ns: int, end_ns: int) -> int:
        """Start of the first operator in a region; its end if there is none."""
        starts = self.work(lane).starts
        place = int(np.searchsorted(starts, start_ns))
        return min(int(starts[place]), end_ns) if place < len(starts) else end_ns

    def end_before(self, lane: int, parent: int | None, start_ns: int) -> int:
        """End of the compiled code before a region: of a graph's call, else of an operator, else of what is around."""
        least = self._begin_around(lane, parent, start_ns)
        for ends in (self._calls.get(lane), self.work(lane).ends):
            place = -1 if ends is None else int(np.searchsorted(ends, start_ns, side="right")) - 1
            if ends is not None and place >= 0 and ends[place] > least:
                return int(ends[place])
        return least

    def _begin_around(self, lane: int, parent: int | None, start_ns: int) -> int:
        """Start of the region around this one, else of the one before it on its thread."""
        row = -1 if parent is None else parent
        while row >= 0 and row not in self._starts:
            row = int(self._parents[row])
        if row >= 0:
            return int(self._starts[row])
        tops = self._tops[lane]
        place = int(np.searchsorted(tops, start_ns)) - 1
        return int(tops[place]) if place >= 0 else start_ns


def _with_ancestors(rows: Rows, parents: Rows) -> Rows:
    found, above = rows, rows
    while len(above := np.unique(parents[above][parents[above] >= 0])):
        found = np.concatenate([found, above])
    return np.unique(found)


def _cost_ns(view: View, rest: _Rest) -> int:
    """Idle time of the device in the stretches; without a device their length."""
    _, starts, ends = rest.arrays
    stretches = union(starts, ends)
    return stretches.total_ns if view.device is None else covered_by(view.pieces).overlap_ns(stretches)


def compile_use(view: View) -> CompileUse | None:
    """What torch.compile did; None without its log."""
    compiled = _compiled(view)
    if not compiled:
        return None
    by_function: defaultdict[tuple[str, str], list[Compilation]] = defaultdict(list)
    for each in compiled:
        by_function[_function_of(each)].append(each)
    functions = sorted((_function(view, *key, mine) for key, mine in by_function.items()), key=_order)
    cold = [each.cold_ns for each in functions if each.cold_ns is not None]
    rests = _rests(view)
    return CompileUse(
        compilations=len(compiled),
        compile_ns=sum(each.compile_ns or 0 for each in functions),
        cold_ns=sum(cold) if cold else None,
        logging_ns=sum(each.logging_ns for each in compiled),
        lost_ns_per_step=view.per_step(sum(rest.length_ns for rest in rests.values()))
        if _regions(view).height
        else None,
        functions=tuple(functions),
        breaks=tuple(_breaks(view, compiled)),
    )


def _order(function: CompiledFunction) -> tuple[int, int, str, int]:
    return -(function.ns_per_step or 0), -(function.compile_ns or 0), function.file, function.line


def _function(view: View, file: str, name: str, compiled: Sequence[Compilation]) -> CompiledFunction:
    numbers = [each.number for each in compiled]
    whole = [each for each in compiled if not _REST.match(each.function)] or list(compiled)
    caller = _caller(whole[0])
    times = [(each.compile_ns or 0) + (each.backward_ns or 0) for each in compiled]
    known = [each.cached for each in compiled if each.cached is not None]
    regions = _regions(view).filter(pl.col("number").is_in(numbers))
    outermost = regions.filter(~pl.Series(np.isin(view.parents[regions["row"].to_numpy()], regions["row"].to_numpy())))
    graphs = {graph.key or number: graph for number, each in enumerate(compiled) for graph in each.graphs}
    return CompiledFunction(
        function=name,
        file=file,
        line=caller.line if whole[0].file != file and caller is not None else whole[0].line,
        called_from=_users_line(view, whole[0].called_from),
        compilations=len(compiled),
        compile_ns=sum(times) if any(each.compile_ns is not None for each in compiled) else None,
        cold_ns=sum(ns for ns, each in zip(times, compiled, strict=True) if each.cached is False) if known else None,
        graphs=len(graphs),
        operators=sum(each.operators or 0 for each in compiled),
        fused_kernels=len({kernel for graph in graphs.values() for kernel in graph.kernels}),
        calls_per_step=outermost.height / view.step_count if regions.height else None,
        ns_per_step=view.per_step(covered_by(regions).total_ns) if regions.height else None,
        lookup_ns_per_step=view.per_step(_lookup_ns(view, regions)) if regions.height else None,
        kernels=_kernels(view, list(graphs.values())),
        recompilations=tuple(
            Recompilation(_guard(each.reason), _users_line(view, each.called_from), each.compile_ns)
            for each in compiled
            if each.reason
        ),
        failure=next((each.failure for each in compiled if each.failure), None),
    )


def _guard(reason: str) -> str:
    """The guard that failed, without the number of the compilation and the compiler's comment behind it."""
    return re.sub(r"\s+#.*", "", re.sub(r"^\d+/\d+: ", "", reason.splitlines()[0])).strip()


def _users_line(view: View, frames: Sequence[CodePlace]) -> str | None:
    found = next((frame for frame in frames if frame.file in view.user_code), None)
    return None if found is None else f"{found.file}:{found.line}"


def _lookup_ns(view: View, regions: pl.DataFrame) -> int:
    """Time of the guards' checks right before these regions."""
    lookups = view.operators.filter(pl.col("name") == _LOOKUP)
    ends = lookups.select("lane", "duration_ns", start_ns=pl.col("start_ns") + pl.col("duration_ns")).sort("start_ns")
    asked = regions.select("lane", "start_ns").sort("start_ns")
    found = asked.join_asof(ends, on="start_ns", by="lane", strategy="backward", check_sortedness=False)
    return int(found["duration_ns"].sum())


def _kernels(view: View, graphs: Sequence[CompiledGraph]) -> tuple[FusedKernel, ...]:
    """Fused kernels of these graphs by their time on the device, else on the host, else the calls of the graphs."""
    names = {kernel: kernel for graph in graphs for kernel in graph.kernels}
    calls = {f"## Call CompiledFxGraph {graph.key} ##": " + ".join(graph.kernels) or str(graph.key) for graph in graphs}
    tables = (("device", view.work, names), ("host", view.operators, names), ("host", _graph_calls(view), calls))
    for on, table, shown in tables:
        found = table.filter(pl.col("name").is_in(list(shown))).group_by("name")
        rows = found.agg(calls=pl.len(), ns=pl.col("duration_ns").sum()).sort(["ns", "name"], descending=[True, False])
        if rows.height:
            return tuple(
                FusedKernel(shown[name], on, calls / view.step_count, view.per_step(ns))
                for name, calls, ns in rows.head(_MOST_KERNELS).iter_rows()
            )
    return ()


def _breaks(view: View, compiled: Sequence[Compilation]) -> Iterator[BreakUse]:
    """The breaks that the steps run into, by what they cost, then those of which only the log tells."""
    rests = _rests(view)
    for (file, function, line), rest in sorted(rests.items(), key=lambda item: -item[1].length_ns):
        times, lost_ns = rest.entries / view.step_count, view.per_step(rest.length_ns)
        yield BreakUse(file, line, function, *_words(rest.known), tuple(rest.behind), times, lost_ns)
    seen = {(file, line) for file, _, line in rests}
    for known in (found for each in compiled for found in each.breaks):
        if (known.file, known.line) not in seen:
            seen.add((known.file, known.line))
            function = known.frames[0].function if known.frames else ""
            yield BreakUse(known.file, known.line, function, *_words(known), (), None, None)


def _words(known: GraphBreak | None) -> tuple[str, str, str]:
    return ("", "", "") if known is None else (known.reason, known.explanation, known.hint)


RULE: Final = Rule(
    id="graph-break",
    title="torch.compile breaks graphs, and each step leaves and enters compiled code",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} between the compiled code around a break")},
    check=check,
    needs=("operators",),
)
