"""Two programs beside each other: whether one is faster, and what makes the difference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import polars as pl

from stepscope.compare.matching import (
    CAUSE_LEVELS,
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
    matched,
    matched_lines,
    with_families,
    without_unknown,
)
from stepscope.compare.notes import (
    EnergyComparison,
    LeftOut,
    StepEnergies,
    compared_energies,
    different_settings,
    merged_settings,
    notes,
)
from stepscope.compare.record import SCHEMAS, Basis, TraceRecord, trace_record
from stepscope.compare.statistics import SampleComparison, compare_samples, joint_confidence
from stepscope.trace import Trace, TraceWarning
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode


@dataclass(frozen=True)
class Side:
    """One of the programs that are compared.

    Attributes:
        name: what it is called in reports.
        traces: one, or those of its ranks, or of several runs of it; read one after the other, each once. Traces of
            other ranks that follow each other are of one run.
        settings: what is known of its settings beyond the traces, by name; never a secret.
        unprofiled: for each run the nanoseconds of steps that ran without the profiler. Where both sides have some, the
            verdict is about these: they are more, and nothing slows them down.
        energies: what counters measured.
    """

    name: str
    traces: Iterable[Trace]
    settings: Mapping[str, str] = field(default_factory=dict)
    unprofiled: Sequence[Sequence[float]] = ()
    energies: StepEnergies = field(default_factory=dict)


@dataclass(frozen=True)
class SideSummary:
    """What is known of one side as a whole.

    Attributes:
        name: of the side.
        paths: of its traces.
        ranks: how many of one run there are, at most.
        runs: how many runs.
        basis: "device" where times are the device's, "host" where they are the main thread's, as without a device.
        devices: the accelerators' names, where the traces tell.
        step_source: "annotation", "inferred" or "none"; with "none" all that was recorded counts as one step.
        step_count: complete steps of all its traces.
        total_ns: their length, together; the sums of the tables are over the same.
        trace: the first of its traces, such as to draw a step.
        left_out: steps at the edges of recordings that count in nothing, as `stepscope.compare.notes` says.
        warnings: what was skipped or repaired while reading its traces.
    """

    name: str
    paths: tuple[str, ...]
    ranks: int
    runs: int
    basis: Basis
    devices: tuple[str, ...]
    step_source: str
    step_count: int
    total_ns: int
    trace: Trace
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[TraceWarning, ...] = ()

    @property
    def step_ns(self) -> float:
        """The mean step's length."""
        return self.total_ns / self.step_count


@dataclass(frozen=True)
class Comparison:
    """Two programs beside each other.

    A table's row is what is the same on both sides: the columns that name it; columns `after_...` where it may be in
    another place, have other shapes or another number in its name after, null where it has not; `match` ("same", "other
    shapes", "other module", "other module and shapes", "same kernel, other number", "same operator, other number",
    "other line", "other sizes", "only before" or "only after"); `before_total_ns` and `after_total_ns`, whole
    nanoseconds over all steps; `before_ns`, `after_ns` and `difference_ns`, a step (totals over `step_count`); `share`,
    the difference over the step before; and calls a step. The largest difference comes first.

    Attributes:
        before, after: the sides.
        samples: the steps' times, the verdict and its interval.
        basis: "device" if both sides' times are their devices', "host" if their main threads', else "mixed".
        causes: kind ("busy", "idle" or "host"), name (of what the device worked on, or of the cause) and the times. Per
            side the totals add up to `total_ns`; the differences to that of the steps.
        operators: name, module, input_shapes; own time.
        kernels: name, kind, module and input_shapes of the operator that launched it.
        lines: file, line, function; device time and idle time, or time of operators and of the main thread.
        modules: module; likewise, without modules inside.
        communication: kind, ranks and bytes of collectives.
        memory: category, before_bytes, after_bytes, difference_bytes, share: at the peak; mean of the traces.
        settings: name, before, after: those that differ.
        is_unprofiled: whether `samples` are steps that ran without the profiler, and not those of the traces.
        notes: what to keep in mind, a sentence each.
        energies: of what both sides' counters measured.
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
    energies: tuple[EnergyComparison, ...] = ()

    @property
    def difference_ns(self) -> float:
        """How much longer the mean step takes after; negative where it is shorter."""
        return self.after.step_ns - self.before.step_ns


@dataclass(frozen=True)
class _Collected:
    """What one side's traces give together."""

    summary: SideSummary
    runs: list[list[float]]
    unprofiled: Sequence[Sequence[float]]
    tables: Mapping[str, pl.DataFrame]
    settings: Mapping[str, str]
    devices: Sequence[str | None]
    energies: StepEnergies


_KEYS_OF_LINES: Final = ("file", "line", "function", "exact_line")
_LINE_SUMS: Final = ("ns", "idle_ns", "calls")
_PLACES: Final = (("lines", "file"), ("modules", "module"), ("memory", "category"))
"""Tables that say nothing where only one recording kept what they are about, and the column that tells."""


def compare_traces(
    before: Trace | Sequence[Trace] | Side,
    after: Trace | Sequence[Trace] | Side,
    *,
    confidence: float = 0.95,
    user_code: UserCode = DEFAULT_USER_CODE,
    all_steps: bool = False,
) -> Comparison:
    """Hold two programs against each other: by one trace of each, or by several ranks or runs.

    Args:
        before, after: a trace; traces, of which those with other ranks that follow each other are one run's; or a
            `Side`, which has a name and settings too.
        confidence: of the intervals.
        user_code: which files are the user's.
        all_steps: count the first and the last step of a recording also where they are far from the others.

    Raises:
        ValueError: a side without a trace.
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
    """As `compare_traces`, for several programs against the same one; `confidence` is of all intervals together."""
    confidence = joint_confidence(confidence, len(after))
    baseline = _collected(_side(before, "before"), user_code, all_steps)
    others = (_collected(_side(each, "after"), user_code, all_steps, baseline.devices) for each in after)
    return [_compared(baseline, other, confidence) for other in others]


def _side(given: Trace | Sequence[Trace] | Side, name: str) -> Side:
    if isinstance(given, Side):
        return given
    return Side(name, (given,) if isinstance(given, Trace) else tuple(given))


def _collected(side: Side, user_code: UserCode, all_steps: bool, devices: Sequence[str | None] = ()) -> _Collected:
    """The side's sums; of the trace that is held against another one the same device's, given in `devices`."""
    first: Trace | None = None
    records: list[TraceRecord] = []
    for trace in side.traces:
        first = first or trace
        number = len(records)
        device = devices[number] if number < len(devices) else None
        records.append(trace_record(trace, user_code=user_code, all_steps=all_steps, number=number, device=device))
    if first is None:
        raise ValueError(f"there is no trace of {side.name}")
    groups = _groups(records)
    sources = {record.step_source for record in records}
    summary = SideSummary(
        name=side.name,
        paths=tuple(record.metadata.path for record in records),
        ranks=max(map(len, groups)),
        runs=len(groups),
        basis="device" if all(record.basis == "device" for record in records) else "host",
        devices=tuple(dict.fromkeys(each.name for record in records for each in record.metadata.devices if each.name)),
        step_source=sources.pop() if len(sources) == 1 else "none" if "none" in sources else "inferred",
        step_count=sum(record.step_count for record in records),
        total_ns=sum(record.total_ns for record in records),
        trace=first,
        left_out=tuple(each for record in records for each in record.left_out),
        warnings=_together(warning for record in records for warning in record.warnings),
    )
    tables = {name: pl.concat([record.tables[name] for record in records]) for name in SCHEMAS}
    memory = tables["memory"].with_columns(pl.col("bytes") // len(records))
    settings = {**merged_settings(record.settings for record in records), **side.settings}
    return _Collected(
        summary=summary,
        runs=[_step_times(ranks) for ranks in groups],
        unprofiled=[run for run in side.unprofiled if len(run)],
        tables={**tables, "memory": memory},
        settings=settings,
        devices=[record.device for record in records],
        energies=side.energies,
    )


def _together(warnings: Iterable[TraceWarning]) -> tuple[TraceWarning, ...]:
    """The warnings, those of one kind and detail as one."""
    counts: dict[tuple[str, str], int] = {}
    for each in warnings:
        counts[each.kind, each.detail] = counts.get((each.kind, each.detail), 0) + each.count
    return tuple(TraceWarning(kind, number, detail) for (kind, detail), number in counts.items())


def _groups(records: Sequence[TraceRecord]) -> list[list[TraceRecord]]:
    """The traces of each run: ranks that follow each other belong together until one comes again."""
    groups: list[list[TraceRecord]] = []
    for record in records:
        rank = record.metadata.rank
        seen = {each.metadata.rank for each in groups[-1]} if groups else {None}
        if rank is None or rank in seen or None in seen:
            groups.append([])
        groups[-1].append(record)
    return groups


def _step_times(ranks: Sequence[TraceRecord]) -> list[float]:
    """The step times of one run; ranks take their steps together, so that their mean counts."""
    common = [index for index in ranks[0].steps if all(index in record.steps for record in ranks)]
    if not common:
        return [float(ns) for ns in ranks[0].steps.values()]
    return [sum(record.steps[index] for record in ranks) / len(ranks) for index in common]


def _compared(before: _Collected, after: _Collected, confidence: float) -> Comparison:
    ours, theirs = before.summary, after.summary
    basis = ours.basis if ours.basis == theirs.basis else "mixed"
    tables = [dict(_on_common_basis(each.tables, basis)) for each in (before, after)]
    counts = (ours.step_count, theirs.step_count)
    unknown: dict[str, None] = {}

    def beside(name: str, levels: Sequence[Level], sums: Sequence[str], optional: Sequence[str] = ()) -> pl.DataFrame:
        left, right, gone = without_unknown(tables[0][name], tables[1][name], optional)
        unknown.update(dict.fromkeys(gone))
        return _per_step(matched(left, right, levels, sums, "ns"), sums, counts, ours.step_ns)

    for name, column in _PLACES:
        if _is_known_once(tables, name, column):
            unknown[name] = None
            tables = [{**each, name: each[name].clear()} for each in tables]
    for name in ("operators", "kernels"):
        tables[0][name], tables[1][name] = with_families(tables[0][name], tables[1][name])
    lines = matched_lines(_lines(tables[0]["lines"]), _lines(tables[1]["lines"]), _LINE_SUMS)
    result = {
        "causes": beside("causes", CAUSE_LEVELS, ("ns",)),
        "operators": beside("operators", OPERATOR_LEVELS, ("ns", "calls"), ("module", "input_shapes")).drop("family"),
        "kernels": beside("kernels", KERNEL_LEVELS, ("ns", "calls"), ("module", "input_shapes")).drop("family"),
        "lines": _per_step(lines, _LINE_SUMS, counts, ours.step_ns),
        "modules": beside("modules", MODULE_LEVELS, ("ns", "idle_ns", "calls")),
        "communication": beside("communication", COMMUNICATION_LEVELS, ("ns", "calls"), ("bytes", "ranks")),
        "memory": _memory(tables[0]["memory"], tables[1]["memory"]),
    }
    is_unprofiled = bool(before.unprofiled and after.unprofiled)
    runs = [each.unprofiled if is_unprofiled else each.runs for each in (before, after)]
    samples = compare_samples(runs[0], runs[1], confidence=confidence)
    return Comparison(
        before=ours,
        after=theirs,
        samples=samples,
        basis=basis,
        settings=different_settings(before.settings, after.settings),
        is_unprofiled=is_unprofiled,
        energies=compared_energies(before.energies, after.energies, confidence),
        notes=tuple(
            notes(ours, theirs, basis=basis, samples=samples, is_unprofiled=is_unprofiled, unknown=tuple(unknown))
        ),
        **result,
    )


def _on_common_basis(tables: Mapping[str, pl.DataFrame], basis: str) -> Mapping[str, pl.DataFrame]:
    """Where only one side has a device, operators are compared by their time on the host."""
    operators = tables["operators"].with_columns(ns="host_ns") if basis == "mixed" else tables["operators"]
    return {**tables, "operators": operators.drop("host_ns")}


def _is_known_once(tables: Sequence[Mapping[str, pl.DataFrame]], name: str, column: str) -> bool:
    known = [bool(table[name][column].is_not_null().any()) for table in tables]
    return known[0] != known[1]


def _lines(table: pl.DataFrame) -> pl.DataFrame:
    """One row a line, of all traces of a side together."""
    sums = [pl.col(name).sum() for name in _LINE_SUMS]
    return table.group_by(_KEYS_OF_LINES).agg(pl.col("operators").drop_nulls().first(), *sums)


def _per_step(table: pl.DataFrame, sums: Sequence[str], counts: tuple[int, int], step_ns: float) -> pl.DataFrame:
    """With totals over all steps, and figures for one step; the largest difference first, then by name."""
    sides = ("before", "after")
    keys = [name for name in table.columns if name not in {f"{side}_{each}" for side in sides for each in sums}]
    totals = [pl.col(f"{side}_ns").alias(f"{side}_total_ns") for side in sides]
    means = [
        (pl.col(f"{side}_{name}") / count).alias(f"{side}_{name}")
        for side, count in zip(sides, counts, strict=True)
        for name in sums
    ]
    difference = pl.col("after_ns") / counts[1] - pl.col("before_ns") / counts[0]
    shown = table.select(*keys, *totals, *means, difference.alias("difference_ns"))
    shown = shown.with_columns(share=pl.col("difference_ns") / max(step_ns, 1.0))
    names = [name for name in keys if name != "match"]
    return shown.sort(
        [pl.col("difference_ns").abs(), *names], descending=[True, *[False] * len(names)], nulls_last=True
    )


def _memory(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    table = matched(before, after, MEMORY_LEVELS, ("bytes",), "bytes")
    peak = max(int(table["before_bytes"].sum()), 1)
    difference = pl.col("after_bytes") - pl.col("before_bytes")
    return (
        table.select("category", "match", "before_bytes", "after_bytes", difference_bytes=difference)
        .with_columns(share=pl.col("difference_bytes") / peak)
        .sort(pl.col("difference_bytes").abs(), "category", descending=[True, False], nulls_last=True)
    )


def by_name(table: pl.DataFrame) -> pl.DataFrame:
    """A comparison's operators or kernels with those of one name together, the largest difference first.

    Returns:
        Columns name, match ("same" only where all are; "partly" where some are on one side only), before_ns, after_ns,
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
    sums = [f"{side}_{what}" for what in ("ns", "calls") for side in ("before", "after")]
    ordered = table.sort(pl.col("difference_ns").abs(), descending=True, maintain_order=True)
    result = ordered.group_by("name", maintain_order=True).agg(
        match.alias("match"),
        *(pl.col(name).sum() for name in ("difference_ns", "share", *sums)),
        rows=pl.len(),
        module=pl.col("module").first(),
        input_shapes=pl.col("input_shapes").first(),
    )
    columns = [
        "name",
        "match",
        "before_ns",
        "after_ns",
        "difference_ns",
        "share",
        "before_calls",
        "after_calls",
        "rows",
    ]
    return result.sort(pl.col("difference_ns").abs(), "name", descending=[True, False]).select(
        *columns, "module", "input_shapes"
    )
