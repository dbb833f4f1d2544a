"""Figures of findings counted again, from the tables' rows alone, without the rules' code or the analyses they use.

What a step is, and which device is meant, is the view's; all that a finding then says of them is counted here a second
time, in plain Python: how many launches, copies, collectives and calls, their medians and sums, memory kinds, the kinds
of collectives, the spread of the steps, peaks of memory. Figures that only a model gives (what would remain) are not.
Besides, whatever rule it is: shares are shares, no cost is longer than the step, examples lie within the recording, and
every place stands in the recording's frames, lines or facts.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

import polars as pl

from stepscope.analysis.steps import are_of_a_device
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.view import View

Row: TypeAlias = dict[str, Any]
_IN: Final = "share of the communication in "
_KINDS: Final = {
    "all-reduce": "all_?reduce", "all-gather": "all_?gather", "reduce-scatter": "reduce_?scatter",
    "all-to-all": "all_?to_?all", "broadcast": "broadcast", "sends and receives": "send|recv",
}  # fmt: skip


@dataclass(frozen=True)
class Recount:
    """The rows of a recording that belong to a view's steps."""

    view: View

    @cached_property
    def launches(self) -> list[Row]:
        return self.view.trace.launches.rows(named=True)

    @cached_property
    def work(self) -> list[Row]:
        """What the device did for the steps: launched in them, or run in them where the launch is unknown."""
        rows = self.view.trace.device_work.rows(named=True)
        mine = [row for row in rows if row["device"] == self.view.device]
        left = self._left_over(mine)
        return [row for row in mine if id(row) not in left and self._is_in_steps(self._begun(row))]

    @cached_property
    def are_steps_of_device(self) -> bool:
        return are_of_a_device(self.view.trace, self.view.steps)

    @cached_property
    def backend_marks(self) -> list[Row]:
        """The marks of NCCL, RCCL, HCCL and the like around their collectives."""
        return [row for row in self.view.trace.annotations.rows(named=True) if re.match("[a-z]*ccl:", row["name"])]

    def _left_over(self, rows: Sequence[Row]) -> set[int]:
        """Work of steps that was launched before the recording: before all of its queue whose launch is known."""
        if not self.view.complete_steps.height or self.are_steps_of_device:
            return set()
        left = set()
        for queue in {row["lane"] for row in rows}:
            of_queue = sorted((row for row in rows if row["lane"] == queue), key=lambda row: row["start_ns"])
            known = [number for number, row in enumerate(of_queue) if row["launch"] is not None]
            first = known[0] if known else 0
            if len(known) >= 0.9 * (len(of_queue) - first):
                left |= {id(row) for row in of_queue[:first]}
        return left

    @cached_property
    def operators(self) -> list[Row]:
        return [row for row in self.view.trace.operators.rows(named=True) if self._is_in_steps(row["start_ns"])]

    @cached_property
    def steps(self) -> list[int]:
        return self.view.complete_steps["duration_ns"].to_list()

    def per_step(self, total: float) -> float:
        return total / self.view.step_count

    def of_kind(self, *kinds: str) -> list[Row]:
        return [row for row in self.work if row["kind"] in kinds]

    def calls(self, rows: Sequence[Row]) -> list[Row]:
        """The calls that launched this work, each once."""
        return [self.launches[number] for number in {row["launch"] for row in rows} - {None}]

    def within(self, table: str, *kinds: str) -> list[Row]:
        rows = self.view.trace.table(table).rows(named=True)
        return [row for row in rows if row["kind"] in kinds and self._is_in_steps(row["start_ns"])]

    def marks(self, pattern: str) -> list[Row]:
        return [row for row in self.within("annotations", "host") if re.search(pattern, row["name"])]

    def named(self, pattern: str) -> list[Row]:
        return [row for row in self.operators if re.search(pattern, row["name"])]

    @cached_property
    def end_ns(self) -> int:
        """The end of what was recorded last."""
        tables = (self.view.trace.table(name) for name in ("operators", "launches", "device_work", "annotations"))
        frames = (self.view.trace.frames, self.view.trace.memory)
        rows = [row for table in tables for row in table.select("start_ns", "duration_ns").rows()]
        rows += [(row["start_ns"], row.get("duration_ns") or 0) for table in frames for row in table.rows(named=True)]
        return max((start + duration for start, duration in rows), default=0)

    @cached_property
    def places(self) -> set[tuple[str, int]]:
        """Every file and line in frames, stacks, sampled lines and facts."""
        trace = self.view.trace
        found = {(row["file"], row["line"]) for row in (*trace.frames.rows(named=True), *trace.lines.rows(named=True))}
        for table in (trace.operators, trace.device_work, trace.memory, trace.annotations):
            for name in ("source_file", "call_stack"):
                if name in table.columns:
                    found |= _lines_of(table, name)
        program = self.view.program
        found |= {(fact.file or "", fact.line or 0) for fact in program.compilations}
        compiled = self.view.run_counts.compiled
        found |= {(each.file, each.line) for each in compiled}
        found |= {(each.file, each.line) for compilation in compiled for each in compilation.breaks}
        found |= {(fact.file or "", fact.line or 0) for fact in program.pauses}
        found |= {(fact.file, fact.line) for fact in (program.evaluations,) if fact is not None}
        found |= {(fact.file, fact.first) for fact in program.works}
        found |= {(fact.file, fact.line) for fact in program.waiting}
        for fact in program.operations:
            found |= {(fact.file, line) for line, names in enumerate(fact.names, 1) if names}
        return found | {(fact.file or "", fact.line or 0) for fact in program.input_stages}

    def _begun(self, row: Row) -> int:
        by_itself = row["launch"] is None or self.are_steps_of_device
        return int(row["start_ns"] if by_itself else self.launches[row["launch"]]["start_ns"])

    def _is_in_steps(self, ns: int) -> bool:
        return self.view.span.start_ns <= ns < self.view.span.end_ns


def _lines_of(table: pl.DataFrame, column: str) -> set[tuple[str, int]]:
    if column == "source_file":
        return {*table.select("source_file", "source_line").drop_nulls().unique().iter_rows()}
    stacks = "\n".join(table["call_stack"].drop_nulls().unique())
    return {(file.strip(), int(line)) for file, line in re.findall(r"([^\n;]+?)\((\d+)\):", stacks)}


def _sum(rows: Sequence[Row], column: str = "duration_ns") -> int:
    return sum(int(row[column]) for row in rows)


def _median(rows: Sequence[Row]) -> float:
    return statistics.median(row["duration_ns"] for row in rows) if rows else 0.0


def _pageable(rows: Sequence[Row]) -> float:
    return _sum([row for row in rows if "pageable" in row["name"].lower()]) / max(_sum(rows), 1)


def _in_collectives(recount: Recount, words: str) -> float:
    """Share of the communication whose calls, or else kernels, bear this kind's name."""
    rows = recount.of_kind("communication")
    return _sum([row for row in rows if _called(recount, row) == words]) / max(_sum(rows), 1)


def _called(recount: Recount, row: Row) -> str | None:
    names = [row["collective"]] if row["collective"] else [*_around(recount, row), row["name"]]
    kinds = (word for name in names for word, kind in _KINDS.items() if re.search(kind, name, re.IGNORECASE))
    return next(kinds, None)


def _around(recount: Recount, row: Row) -> Iterator[str]:
    """The c10d operators around the work's call, from the inside out, and the backend's mark that holds it."""
    if row["launch"] is None:
        return
    call, operators = recount.launches[row["launch"]], recount.view.trace.operators
    number = call["operator"]
    while number is not None:
        name = operators["name"][number]
        if name.startswith("c10d::"):
            yield name
        number = operators["parent"][number]
    for mark in recount.backend_marks:
        begin = mark["start_ns"]
        if begin <= call["start_ns"] < begin + mark["duration_ns"] and mark["lane"] == call["lane"]:
            yield mark["name"]


def _peak(recount: Recount, device: str) -> float:
    rows = [row for row in recount.view.trace.memory.rows(named=True) if row["device"] == device]
    return max((row["total_reserved"] or row["total_allocated"] or 0 for row in rows), default=0)


def _gives_back(row: Row) -> bool:
    return re.search("free|unmap|release", row["name"], re.IGNORECASE) is not None


def _allocations(recount: Recount, *, back: bool) -> int:
    return len([row for row in recount.within("launches", "allocate") if _gives_back(row) == back])


_COPIES: Final = ("copy_in", "copy_out")
_COUNTED: Final[Mapping[tuple[str, str], Callable[[Recount], float]]] = {
    ("launch-bound", "launches"): lambda all: all.per_step(len(all.calls(all.work))),
    ("launch-bound", "kernels"): lambda all: all.per_step(len(all.of_kind("compute"))),
    ("launch-bound", "median length of the device's work"): lambda all: _median(all.work),
    ("launch-bound", "median length of a launch call"): lambda all: _median(all.calls(all.work)),
    ("exposed-copy", "copies"): lambda all: all.per_step(len(all.of_kind(*_COPIES))),
    ("exposed-copy", "bytes moved"): lambda all: _sum(all.of_kind(*_COPIES), "bytes") // all.view.step_count,
    ("exposed-copy", "share of the copies' time from or to pageable memory"): lambda all: _pageable(
        all.of_kind(*_COPIES)
    ),
    ("allocator-retries", "calls that ask for memory,"): lambda all: all.per_step(_allocations(all, back=False)),
    ("allocator-retries", "calls that give memory back,"): lambda all: all.per_step(_allocations(all, back=True)),
    ("gradient-copies", "copies"): lambda all: all.per_step(len(all.named("::copy_bucket_to_grad$"))),
    ("input-bound", "batches loaded"): lambda all: all.per_step(len(all.marks("DataLoader"))),
    ("step-variance", "mean step"): lambda all: statistics.mean(all.steps),
    ("step-variance", "median step"): lambda all: statistics.median(all.steps),
    ("step-variance", "shortest step"): lambda all: min(all.steps),
    ("step-variance", "longest step"): lambda all: max(all.steps),
    ("step-variance", "steps compared"): lambda all: len(all.steps),
}
"""Rule, and figure without "per step" -> the same counted again."""
_AT_MOST: Final[Mapping[tuple[str, str], Callable[[Recount], float]]] = {
    ("zero-grad", "gradients filled"): lambda all: sum(
        max(len(re.findall(r"\[[\d, ]*\]", row["input_shapes"] or "")), 1) for row in all.named("zero_$")
    ),
    ("host-synchronisation", "waits"): lambda all: len(all.within("launches", "synchronise", "copy")),
    ("host-synchronisation", "calls"): lambda all: len(all.operators),
    ("unfused-attention", "written-out attentions"): lambda all: len(all.named("softmax")),
    ("single-tensor-optimizer", "launches in the optimizer"): lambda all: len(all.calls(all.work)),
    ("single-tensor-optimizer", "operators in the optimizer"): lambda all: len(all.operators),
    ("low-precision", "such kernels"): lambda all: len(all.of_kind("compute")),
    ("layout-conversion", "kernels that convert layouts"): lambda all: len(all.of_kind("compute")),
    ("repeated-casts", "conversions of all kinds"): lambda all: len(all.named(r"::(?:_to_copy|to|copy_|type_as)$")),
    ("host-created-tensor", "such tensors"): lambda all: len(all.of_kind("copy_in")),
    ("device-ping-pong", "round trips"): lambda all: min(len(all.of_kind(kind)) for kind in _COPIES),
    ("cpu-fallback", "round trips"): lambda all: min(len(all.of_kind(kind)) for kind in _COPIES),
    ("inefficient-kernel", "calls"): lambda all: len({row["operator"] for row in all.calls(all.work)} - {None}),
    ("small-buckets", "reductions"): lambda all: len(all.of_kind("communication")) or len(all.operators),
    ("late-first-launch", "steps that begin with waiting"): lambda all: len(all.steps) * all.view.step_count,
}
"""The same, of which the tables only show how many there can be at most, in all steps."""


def differences(finding: Finding, recount: Recount) -> list[str]:
    """What a recording says otherwise than a finding, a phrase each."""
    return [*_of_figures(finding, recount), *_of_places(finding, recount)]


def _of_figures(finding: Finding, recount: Recount) -> Iterator[str]:
    for figure in finding.evidence.figures:
        name = figure.name.removesuffix(f" {recount.view.per}")
        counted = _counted(finding.rule, name, recount)
        if counted is not None and abs(counted - figure.value) > 1e-6 * max(abs(counted), 1.0):
            yield f"{figure.name}: {figure.value}, counted again {counted}"
        most = _AT_MOST.get((finding.rule, name))
        if most is not None and figure.value * recount.view.step_count > most(recount) + 1e-6:
            yield f"{figure.name}: {figure.value}, of {most(recount)} in all steps"
        if not 0 <= figure.value < math.inf or (figure.unit == "share" and figure.value > 1):
            yield f"{figure.name} is {figure.value}"
    if not 0 <= finding.saving_ns_per_step <= recount.view.step_ns:
        yield f"{finding.saving_ns_per_step} ns are more than the step"


def _counted(rule: str, name: str, recount: Recount) -> float | None:
    if (rule, name) in _COUNTED:
        return _COUNTED[rule, name](recount)
    if rule != "exposed-communication" or recount.view.device is None:
        return None
    rows = recount.of_kind("communication")
    if name.startswith(_IN):
        return _in_collectives(recount, name.removeprefix(_IN))
    sums = {"collectives": recount.per_step(len(rows)), "communication in all": _sum(rows) // recount.view.step_count}
    return sums.get(name)


def _of_places(finding: Finding, recount: Recount) -> Iterator[str]:
    for interval in finding.evidence.intervals:
        if not 0 <= interval.start_ns <= interval.start_ns + interval.duration_ns <= recount.end_ns:
            yield f"{interval} lies outside of the recording"
    for place in finding.where:
        if not 0 <= place.share <= 1 + 1e-9:
            yield f"{place} has an impossible share"
        if (place.file, place.line) not in recount.places:
            yield f"{place.file}:{place.line} {place.function} stands nowhere in the recording"
