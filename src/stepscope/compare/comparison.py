"""Comparison of two programs: whether one is faster, what makes the difference, and caveats for the reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import polars as pl

from stepscope.compare.job import JobComparison, compared_jobs
from stepscope.compare.matching import (
    CAUSE_LEVELS,
    CHANGE_SCHEMA,
    COMMUNICATION_LEVELS,
    KERNEL_LEVELS,
    MEMORY_LEVELS,
    MODULE_LEVELS,
    ONLY_AFTER,
    ONLY_BEFORE,
    OPERATOR_LEVELS,
    PARTLY,
    SAME,
    Level,
    kernel_changes,
    matched,
    matched_lines,
    with_families,
    without_unknown,
)
from stepscope.compare.statistics import SampleComparison, compare_samples, joint_confidence
from stepscope.compare.trace_record import (
    SCHEMAS,
    Edge,
    EnergyComparison,
    LeftOut,
    SideSummary,
    StepEnergies,
    TraceRecord,
    compared_energies,
    different_settings,
    merged_settings,
    trace_record,
)
from stepscope.diagnosis.view import View
from stepscope.trace import Trace, TraceWarning
from stepscope.trace.model import Displayed
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode

_NOTICEABLE: Final = 0.005  # means of the same steps that differ by more than this share are shown separately
_MOST_WARNINGS: Final = 3
_MILLISECOND: Final = 1_000_000
_SECOND: Final = 1_000_000_000


def notes(
    ours: SideSummary,
    theirs: SideSummary,
    *,
    basis: str,
    samples: SampleComparison,
    is_unprofiled: bool,
    unknown: Collection[str],
) -> Iterator[str]:
    """Caveats of a comparison; `unknown` are tables and columns that only one recording has."""
    if ours.paths == theirs.paths and all(ours.paths):
        yield f"Both sides are the same {'trace' if len(ours.paths) == 1 else 'traces'}."
    if basis == "mixed":
        without = "before" if ours.basis == "host" else "after"
        yield (
            f"No device was recorded {without}: there the step is the main thread's time, on the other side "
            "the device's; operators are compared by their time on the host."
        )
    yield from _about_side("before", ours)
    yield from _about_side("after", theirs)
    several = max(side.trace.device_work["device"].n_unique() for side in (ours, theirs))
    if several > 1:
        yield (
            f"A trace has {several} devices: operators and lines of your code count all of them, the other tables one."
        )
    yield from _of_one_side(ours, theirs, unknown)
    if ours.ranks != theirs.ranks:
        yield f"Ranks: {ours.ranks} before and {theirs.ranks} after; the tables are a rank's mean."
    takes = f"{_time(ours.step_ns)} before and {_time(theirs.step_ns)} after."
    means = ((ours, samples.before_ns), (theirs, samples.after_ns))
    if is_unprofiled:
        yield (
            "The verdict is about steps that ran without the profiler; what makes the difference is told by those in "
            f"the traces, which take {takes}"
        )
    elif any(mean is not None and abs(mean - side.step_ns) > _NOTICEABLE * side.step_ns for side, mean in means):
        yield ("Every run counts the same in the verdict, and every step in the tables: their mean step is " + takes)


def _about_side(word: str, side: SideSummary) -> Iterator[str]:
    if side.left_out:
        yield _left_out(word, side.left_out)
    if side.warnings:
        found = [f"{each.detail} ({each.count:,})" for each in side.warnings[:_MOST_WARNINGS]]
        more = f"; and {len(side.warnings) - len(found)} more" if len(side.warnings) > len(found) else ""
        yield f"{word.capitalize()}, while reading: {'; '.join(found)}{more}."
    if side.step_source == "none":
        yield f"No steps were found {word}: the whole recording counts as one step."


def _of_one_side(ours: SideSummary, theirs: SideSummary, unknown: Collection[str]) -> Iterator[str]:
    for name, what in (("input_shapes", "input shapes"), ("module", "modules")):
        if name in unknown:
            yield f"Only one side's recording has {what}: operators are matched without them."
    for name, what in (("lines", "lines of your code"), ("memory", "memory")):
        if name in unknown:
            yield f"Only one side's recording has {what}, so this is not compared."
    kept = [side.trace.metadata.recorded for side in (ours, theirs)]
    if kept[0] is not None and kept[1] is not None and (more := sorted(set(kept[0]) ^ set(kept[1]))):
        yield f"Only one side's recording kept {', '.join(more)}, which costs time itself: record both alike."


def _left_out(word: str, steps: Sequence[LeftOut]) -> str:
    """Sentence such as "After, the last step (206.5 ms) is left out: it is far from the 117.9 to 127.1 ms ..."."""
    by_edge: dict[Edge, list[LeftOut]] = {}
    for step in sorted(steps, key=lambda step: step.edge):
        by_edge.setdefault(step.edge, []).append(step)
    which = " and ".join(f"the {edge} step{_lengths(found)}" for edge, found in by_edge.items())
    between = _range([step.shortest_ns for step in steps], [step.longest_ns for step in steps])
    are, they = ("are", "they are") if len(steps) > 1 else ("is", "it is")
    return (
        f"{word.capitalize()}, {which} {are} left out: {they} far from the {between} of those between, and a recording "
        "begins or ends there. --all-steps counts all."
    )


def _lengths(steps: Sequence[LeftOut]) -> str:
    lengths = [step.duration_ns for step in steps]
    of = f" of {len(steps)} traces" if len(steps) > 1 else ""
    return f"{of} ({_range(lengths, lengths)})"


def _range(shortest: Sequence[int], longest: Sequence[int]) -> str:
    low, high = min(shortest), max(longest)
    return _time(high) if low == high else f"{_time(low)} to {_time(high)}"


def _time(ns: float) -> str:
    if ns >= _SECOND:
        return f"{ns / _SECOND:,.2f} s"
    return f"{ns / _MILLISECOND:,.1f} ms" if ns >= _MILLISECOND else f"{ns / 1e3:,.1f} us"


@dataclass(frozen=True)
class Side:
    """One of the compared programs.

    Attributes:
        traces: one trace, or those of several ranks or runs; each is read once. Consecutive traces of different ranks
            belong to one run.
        settings: settings known from outside the traces, by name; never secrets.
        unprofiled: step times without the profiler for each run, nanoseconds. If both sides have some, the verdict is
            about these: there are more of them, and the profiler does not slow them down.
        energies: energies measured by counters.
    """

    name: str
    traces: Iterable[Trace]
    settings: Mapping[str, str] = field(default_factory=dict)
    unprofiled: Sequence[Sequence[float]] = ()
    energies: StepEnergies = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Comparison(Displayed):
    """Two programs side by side.

    Each table row is something matched on both sides: the columns that name it; columns `after_...` with its place,
    shapes or name after, null where unchanged; `match` (see `stepscope.compare.matching`); `before_total_ns` and
    `after_total_ns`, in nanoseconds over all steps; `before_ns`, `after_ns` and `difference_ns`, per step (totals over
    `step_count`); `share`, the difference over the step before; and calls per step. The largest difference comes first.

    Attributes:
        samples: step times, the verdict and its interval.
        basis: "device" if both sides' times are their devices', "host" if their main threads', else "mixed".
        causes: kind ("busy", "idle" or "host"), name (of the kind of work, or of the cause) and the times. Per side the
            totals add up to `total_ns`; the differences to that of the steps.
        operators: name, module, input_shapes; own time.
        kernels: name, kind, module and input_shapes of the operator that launched it.
        kernel_changes: kernels that took the place of others; see `stepscope.compare.matching.CHANGE_SCHEMA`.
        lines: file, line, function; device time and idle time, or operator time and main-thread time.
        modules: module; the same, without nested modules.
        communication: kind, ranks and bytes of collectives.
        memory: category, before_bytes, after_bytes, difference_bytes, share: at the peak; mean of the traces.
        settings: name, before, after of settings that differ.
        is_unprofiled: whether `samples` are steps that ran without the profiler, instead of those in the traces.
        notes: caveats, one sentence each.
        disturbed: those of them that come first, about a recording on a busy machine.
        energies: energies measured by counters on both sides.
        job: the ranks together, if each side is one run of several that meet in collectives.
    """

    before: SideSummary
    after: SideSummary
    samples: SampleComparison
    basis: str
    causes: pl.DataFrame
    operators: pl.DataFrame
    kernels: pl.DataFrame
    lines: pl.DataFrame
    modules: pl.DataFrame
    communication: pl.DataFrame
    memory: pl.DataFrame
    settings: pl.DataFrame
    is_unprofiled: bool = False
    notes: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()
    energies: tuple[EnergyComparison, ...] = ()
    kernel_changes: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=dict(CHANGE_SCHEMA)))
    job: JobComparison | None = None

    @property
    def difference_ns(self) -> float:
        """Increase of the mean step time; negative where it decreases."""
        return self.after.step_ns - self.before.step_ns


_LINE_KEYS: Final = ("file", "line", "function", "exact_line")
_LINE_SUMS: Final = ("ns", "idle_ns", "calls")
_PLACES: Final = (("lines", "file"), ("modules", "module"), ("memory", "category"))
"""Tables that need their subject in both recordings, and the column that shows whether it is there."""
_MODULE_AND_SHAPES: Final = ("module", "input_shapes")
_COMPARED: Final[tuple[tuple[str, Sequence[Level], Sequence[str], Sequence[str]], ...]] = (
    ("causes", CAUSE_LEVELS, ("ns",), ()),
    ("operators", OPERATOR_LEVELS, ("ns", "calls"), _MODULE_AND_SHAPES),
    ("kernels", KERNEL_LEVELS, ("ns", "calls"), _MODULE_AND_SHAPES),
    ("modules", MODULE_LEVELS, _LINE_SUMS, ()),
    ("communication", COMMUNICATION_LEVELS, ("ns", "calls"), ("bytes", "ranks")),
)
"""Tables with their matching levels, their sums, and columns that one recording may lack."""


def compare_traces(
    before: Trace | Sequence[Trace] | Side,
    after: Trace | Sequence[Trace] | Side,
    *,
    confidence: float = 0.95,
    user_code: UserCode = DEFAULT_USER_CODE,
    all_steps: bool = False,
) -> Comparison:
    """Compare two programs by one trace of each, or by several ranks or runs.

    Args:
        before, after: a trace; several traces, where consecutive ones of different ranks form one run; or a `Side`.
        confidence: confidence of the intervals.
        user_code: which files are the user's.
        all_steps: count the first and the last step of a recording even where they are far from the others.

    Raises:
        ValueError: a side has no trace.
    """
    return compare_sides(before, [after], confidence=confidence, user_code=user_code, all_steps=all_steps)[0]


def compare_sides(
    before: Trace | Sequence[Trace] | Side,
    after: Sequence[Trace | Sequence[Trace] | Side],
    *,
    confidence: float = 0.95,
    user_code: UserCode = DEFAULT_USER_CODE,
    all_steps: bool = False,
) -> list[Comparison]:
    """Compare several programs with the same one; `confidence` applies to all intervals together."""
    confidence = joint_confidence(confidence, len(after))
    collector = _Collector(user_code, all_steps)
    baseline = collector.collected(before, "before")
    others = (collector.collected(each, "after", baseline.records) for each in after)
    return [_compared(baseline, other, confidence) for other in others]


@dataclass(frozen=True)
class _Collected:
    """Combined traces of one side."""

    side: Side
    summary: SideSummary
    records: Sequence[TraceRecord]
    runs: Sequence[Sequence[float]]

    @property
    def unprofiled(self) -> list[Sequence[float]]:
        return [run for run in self.side.unprofiled if len(run)]

    @property
    def settings(self) -> dict[str, str]:
        return {**merged_settings(record.settings for record in self.records), **self.side.settings}

    def tables(self, *, on_host: bool) -> dict[str, pl.DataFrame]:
        """Sums over all traces; `on_host` uses the host time of operators."""
        tables = {name: pl.concat([record.tables[name] for record in self.records]) for name in SCHEMAS}
        if on_host:
            tables["operators"] = tables["operators"].with_columns(ns="host_ns")
        tables["operators"] = tables["operators"].drop("host_ns")
        tables["memory"] = tables["memory"].with_columns(pl.col("bytes") // len(self.records))
        sums = pl.col(_LINE_SUMS).sum()
        tables["lines"] = tables["lines"].group_by(_LINE_KEYS).agg(pl.col("operators").drop_nulls().first(), sums)
        return tables


@dataclass(frozen=True)
class _Collector:
    user_code: UserCode
    all_steps: bool

    def collected(
        self, given: Trace | Sequence[Trace] | Side, name: str, baseline: Sequence[TraceRecord] = ()
    ) -> _Collected:
        """Collect a side's sums; each trace uses the device that the baseline's trace at its position uses."""
        side = given
        if not isinstance(side, Side):
            side = Side(name, (side,) if isinstance(side, Trace) else tuple(side))
        first: Trace | None = None
        records: list[TraceRecord] = []
        for number, trace in enumerate(side.traces):
            first = first or trace
            device = baseline[number].device if number < len(baseline) else None
            records.append(trace_record(trace, self.user_code, self.all_steps, number=number, device=device))
        if first is None:
            raise ValueError(f"{side.name} has no trace")
        groups = _groups(records)
        runs = [_step_times(ranks) for ranks in groups]
        return _Collected(side, _summary(side.name, first, records, groups), records, runs)


def _summary(
    name: str, first: Trace, records: Sequence[TraceRecord], groups: Sequence[Sequence[TraceRecord]]
) -> SideSummary:
    sources = {record.step_source for record in records}
    mixed = "none" if "none" in sources else "inferred"
    warnings: Counter[tuple[str, str]] = Counter()
    for warning in (each for record in records for each in record.warnings):
        warnings[warning.kind, warning.detail] += warning.count
    return SideSummary(
        name=name,
        paths=tuple(record.metadata.path for record in records),
        ranks=max(map(len, groups)),
        runs=len(groups),
        basis="device" if all(record.basis == "device" for record in records) else "host",
        devices=tuple(dict.fromkeys(each.name for record in records for each in record.metadata.devices if each.name)),
        step_source=sources.pop() if len(sources) == 1 else mixed,
        step_count=sum(record.step_count for record in records),
        total_ns=sum(record.total_ns for record in records),
        trace=first,
        left_out=tuple(each for record in records for each in record.left_out),
        warnings=tuple(TraceWarning(kind, number, detail) for (kind, detail), number in warnings.items()),
    )


def _groups(records: Sequence[TraceRecord]) -> list[list[TraceRecord]]:
    """Traces of each run: consecutive ranks belong together until a rank repeats."""
    groups: list[list[TraceRecord]] = []
    for record in records:
        seen = {each.metadata.rank for each in groups[-1]} if groups else {None}
        if None in seen | {record.metadata.rank} or record.metadata.rank in seen:
            groups.append([])
        groups[-1].append(record)
    return groups


def _step_times(ranks: Sequence[TraceRecord]) -> list[float]:
    """Step times of one run: those of the rank that takes longest for each, since the others then wait for it."""
    common = [index for index in ranks[0].steps if all(index in record.steps for record in ranks)]
    if not common:
        return [float(ns) for ns in ranks[0].steps.values()]
    return [float(max(record.steps[index] for record in ranks)) for index in common]


def _compared(before: _Collected, after: _Collected, confidence: float) -> Comparison:
    ours, theirs = before.summary, after.summary
    basis = ours.basis if ours.basis == theirs.basis else "mixed"
    summed = [each.tables(on_host=basis == "mixed") for each in (before, after)]
    counts = (ours.step_count, theirs.step_count)
    per_step = [
        each["kernels"].with_columns(pl.col("ns", "calls") / max(count, 1))
        for each, count in zip(summed, counts, strict=True)
    ]
    tables, unknown = _matched_tables(*summed)
    sums = {"lines": _LINE_SUMS, **{name: sums for name, _, sums, _ in _COMPARED}}
    memory = tables.pop("memory")
    shown = {name: _per_step(table, sums[name], counts, ours.step_ns) for name, table in tables.items()}
    is_unprofiled = bool(before.unprofiled and after.unprofiled)
    runs = [each.unprofiled if is_unprofiled else each.runs for each in (before, after)]
    samples = compare_samples(runs[0], runs[1], confidence=confidence)
    differences = (samples.change or 0.0, theirs.step_ns / ours.step_ns - 1 if ours.step_ns else 0.0)
    if is_unprofiled and contradict(samples, *differences):
        samples = replace(samples, verdict="contradictory")
    disturbed = tuple(_disturbed(ours, theirs))
    remarks = notes(ours, theirs, basis=basis, samples=samples, is_unprofiled=is_unprofiled, unknown=unknown)
    return Comparison(
        before=ours,
        after=theirs,
        samples=samples,
        basis=basis,
        memory=_memory(memory),
        settings=different_settings(before.settings, after.settings),
        is_unprofiled=is_unprofiled,
        energies=compared_energies(before.side.energies, after.side.energies, confidence),
        job=_jobs(before, after, confidence),
        notes=(*disturbed, *remarks),
        disturbed=disturbed,
        kernel_changes=kernel_changes(*without_unknown(per_step[0], per_step[1], _MODULE_AND_SHAPES)[:2]),
        **shown,
    )


def _jobs(before: _Collected, after: _Collected, confidence: float) -> JobComparison | None:
    ours, theirs = ([record.rank for record in side.records if record.rank is not None] for side in (before, after))
    is_one_run = before.summary.runs == after.summary.runs == 1
    return compared_jobs(ours, theirs, confidence) if is_one_run else None


def _disturbed(ours: SideSummary, theirs: SideSummary) -> Iterator[str]:
    """Which side was recorded on a busy machine, whose difference may be that of the machine."""
    for word, side in (("before", ours), ("after", theirs)):
        contention = View(side.trace).contention
        if contention is not None:
            yield (
                f"The machine was busy {word}: for {contention.share:.0%} of the recorded steps' time their thread "
                "waited for a processor. The difference may be that: record both while it is quiet."
            )


_OPPOSITE: Final = 0.01


def contradict(samples: SampleComparison, timed: float, recorded: float) -> bool:
    """Whether the recorded steps contradict the verdict on the steps that ran without the profiler.

    They must differ in the other direction, by 1 % or more, and, if no difference was shown, lie outside the interval.
    """
    if timed * recorded >= 0 or abs(recorded) < _OPPOSITE:
        return False
    low, high = samples.change_low, samples.change_high
    return samples.is_shown or (low is not None and high is not None and not low <= recorded <= high)


def _matched_tables(
    left: dict[str, pl.DataFrame], right: dict[str, pl.DataFrame]
) -> tuple[dict[str, pl.DataFrame], list[str]]:
    """Match both sides' tables; also return the tables and columns that only one recording has."""
    unknown = []
    for name, column in _PLACES:
        if left[name][column].is_not_null().any() != right[name][column].is_not_null().any():
            unknown.append(name)
            left[name], right[name] = left[name].clear(), right[name].clear()
    result = {"lines": matched_lines(left["lines"], right["lines"], _LINE_SUMS)}
    for name, levels, sums, optional in _COMPARED:
        ours, theirs = left[name], right[name]
        if optional == _MODULE_AND_SHAPES:
            ours, theirs = with_families(ours, theirs)
        ours, theirs, gone = without_unknown(ours, theirs, optional)
        unknown += gone
        table = matched(ours, theirs, levels, sums, "ns")
        result[name] = table.drop("family") if optional == _MODULE_AND_SHAPES else table
    result["memory"] = matched(left["memory"], right["memory"], MEMORY_LEVELS, ("bytes",), "bytes")
    return result, unknown


def _per_step(table: pl.DataFrame, sums: Sequence[str], counts: tuple[int, int], step_ns: float) -> pl.DataFrame:
    """Totals over all steps, and figures per step; largest difference first, then by name."""
    sides = dict(zip(("before", "after"), counts, strict=True))
    keys = pl.exclude([f"{side}_{name}" for side in sides for name in sums])
    names = [name for name in table.select(keys).columns if name != "match"]
    totals = [pl.col(f"{side}_ns").alias(f"{side}_total_ns") for side in sides]
    means = [pl.col(f"{side}_{name}") / count for side, count in sides.items() for name in sums]
    shown = table.select(keys, *totals, *means)
    shown = shown.with_columns(difference_ns=pl.col("after_ns") - pl.col("before_ns"))
    shown = shown.with_columns(share=pl.col("difference_ns") / max(step_ns, 1.0))
    order = [pl.col("difference_ns").abs(), *names]
    return shown.sort(order, descending=[True, *[False] * len(names)], nulls_last=True)


def _memory(table: pl.DataFrame) -> pl.DataFrame:
    peak = max(int(table["before_bytes"].sum()), 1)
    difference = pl.col("after_bytes") - pl.col("before_bytes")
    return (
        table.select("category", "match", "before_bytes", "after_bytes", difference_bytes=difference)
        .with_columns(share=pl.col("difference_bytes") / peak)
        .sort(pl.col("difference_bytes").abs(), "category", descending=[True, False], nulls_last=True)
    )


def by_name(table: pl.DataFrame) -> pl.DataFrame:
    """Combine a comparison's operators or kernels by name, largest difference first.

    Returns:
        Columns name, match ("same" if all rows are the same; "partly" if some are on one side only), before_ns,
            after_ns,
        difference_ns, share, before_calls, after_calls, rows, and module and input_shapes of the row that differs most.
    """
    is_before, is_after = (pl.col(f"{side}_calls").sum() > 0 for side in ("before", "after"))
    one_sided = pl.col("match").is_in([ONLY_BEFORE, ONLY_AFTER])
    match = (
        pl.when(~is_before | ~is_after)
        .then(pl.col("match").first())
        .when(one_sided.any())
        .then(pl.lit(PARTLY))
        .otherwise(pl.coalesce(pl.col("match").filter(pl.col("match") != SAME).first(), pl.lit(SAME)))
    )
    sums = ("before_ns", "after_ns", "difference_ns", "share", "before_calls", "after_calls")
    ordered = table.sort(pl.col("difference_ns").abs(), descending=True, maintain_order=True)
    result = ordered.group_by("name", maintain_order=True).agg(
        match.alias("match"), pl.col(sums).sum(), pl.len().alias("rows"), pl.col("module", "input_shapes").first()
    )
    return result.sort(pl.col("difference_ns").abs(), "name", descending=[True, False])
