"""What is known of a run beside its trace: counts and log lines that the framework wrote into files of its own.

Counts are of the whole run, which the trace shows a part of. A time is given only where the file tells one; what a
count cost is then still open, for it may have passed while the device worked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

FREQUENT_SHARE = 0.5
"""Of the steps; what happens in more of them is too frequent, as torch_xla's own analysis has it."""
WARM_UP_STEPS = 10
"""Steps in which compiling is usual, by the same."""


@dataclass(frozen=True, slots=True)
class Tally:
    """How often something happened in the whole run; times are None where only the number was counted."""

    count: int
    total_ns: int | None = None
    longest_ns: int | None = None


_TALLY: Final = tuple(field.name for field in fields(Tally))


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator that ran on the CPU because the device cannot run it.

    Attributes:
        operator: its qualified name, such as "aten::digamma".
        count: None where the file only names it.
        types: of its inputs, in the log's words.
    """

    operator: str
    count: int | None = None
    types: str | None = None


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A Python frame in a log."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Trigger:
    """What made the framework compile or execute a graph: the log's words, the Python stack, innermost first, and how
    often.
    """

    cause: str
    frames: tuple[CodePlace, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class RunCounts:
    """What the files say together; None or empty where none does.

    Attributes:
        steps: how often the framework was told that a step ends.
        compilations: of graphs.
        late_compilations: those after the first WARM_UP_STEPS steps.
        transfers_out: of values from the device to the host.
        scalar_reads: of single values by the program, as `.item()` makes them; part of the transfers.
        cached, missed: graphs that were found compiled, and that were not.
        fallbacks, compile_triggers, execute_triggers: the most frequent first.
    """

    sources: tuple[str, ...] = ()
    steps: int | None = None
    compilations: Tally | None = None
    late_compilations: int | None = None
    executions: Tally | None = None
    transfers_out: Tally | None = None
    scalar_reads: int | None = None
    cached: int | None = None
    missed: int | None = None
    fallbacks: tuple[Fallback, ...] = ()
    compile_triggers: tuple[Trigger, ...] = ()
    execute_triggers: tuple[Trigger, ...] = ()

    @property
    def compiles_too_often(self) -> bool:
        """Whether graphs are still compiled in more than half of the steps once ten of them have passed."""
        if self.steps is None or self.steps <= WARM_UP_STEPS:
            return False
        if self.late_compilations is not None:
            return self.late_compilations > FREQUENT_SHARE * (self.steps - WARM_UP_STEPS)
        return self.compilations is not None and self.compilations.count > FREQUENT_SHARE * self.steps

    @property
    def reads_too_often(self) -> bool:
        """Whether values are read from the device in more than half of the steps."""
        if not self.steps or self.transfers_out is None:
            return False
        return self.transfers_out.count > FREQUENT_SHARE * self.steps


def joined(parts: Iterable[RunCounts]) -> RunCounts:
    """What several files of the same run say: of two counts of the same thing, the larger one."""
    whole = RunCounts()
    for part in parts:
        pairs = {field.name: (getattr(whole, field.name), getattr(part, field.name)) for field in fields(RunCounts)}
        whole = RunCounts(**{name: _combined(*pair) for name, pair in pairs.items()})
    return replace(
        whole,
        fallbacks=_fallbacks(whole.fallbacks),
        compile_triggers=_triggers(whole.compile_triggers),
        execute_triggers=_triggers(whole.execute_triggers),
    )


def _combined(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tuple):
        return first + second
    if isinstance(first, Tally):
        return Tally(*(_combined(getattr(first, name), getattr(second, name)) for name in _TALLY))
    return max(first, second)


def _fallbacks(found: Iterable[Fallback]) -> tuple[Fallback, ...]:
    by_operator: dict[str, Fallback] = {}
    for each in found:
        known = by_operator.get(each.operator, each)
        by_operator[each.operator] = Fallback(
            each.operator, _combined(known.count, each.count), known.types or each.types
        )
    return tuple(sorted(by_operator.values(), key=lambda each: (-(each.count or 0), each.operator)))


def _triggers(found: Iterable[Trigger]) -> tuple[Trigger, ...]:
    counts: dict[tuple[str, tuple[CodePlace, ...]], int] = {}
    for each in found:
        counts[each.cause, each.frames] = counts.get((each.cause, each.frames), 0) + each.count
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return tuple(Trigger(cause, frames, count) for (cause, frames), count in ordered)
