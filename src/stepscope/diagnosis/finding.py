"""The parts of a diagnosis: findings with their evidence, place and remedy, and unanswered questions; and what a remedy
is called among the options of libraries that run the training loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

import msgspec

from stepscope.files import shipped
from stepscope.trace.model import Displayed
from stepscope.whatif import Change

Severity: TypeAlias = Literal["high", "medium", "low", "note"]
Confidence: TypeAlias = Literal["high", "medium", "low"]
_KEPT: Final[dict[Confidence, float]] = {"high": 1.0, "medium": 1.0, "low": 0.5}
"""Part of a promise that is kept on average, by confidence: docs/accuracy.md has the table."""
SavingFrom: TypeAlias = Literal["replayed", "attributed"]
"""How a saving was obtained: by replaying the steps without the cause, or by adding up the time that it cost."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number behind a finding.

    Attributes:
        name: what was measured, in words.
        unit: "ns", "bytes", "share" (0 to 1), "count" or "".
        threshold: the rule's limit for the value, in the same unit; None without a limit.
    """

    name: str
    value: float | int
    unit: Literal["ns", "bytes", "share", "count", ""] = ""
    threshold: float | int | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of the trace that shows the finding, to look up in a timeline."""

    start_ns: int
    duration_ns: int
    what: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Figures and examples behind a finding."""

    figures: tuple[Figure, ...] = ()
    intervals: tuple[Interval, ...] = ()


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the user's code, or in a library's where no recorded frame is the user's.

    Attributes:
        line: the statement's line if `exact_line` is true, otherwise the line of the function's definition.
        share: share of the finding's cost at this place, 0 to 1.
        call_path: the user's frames that lead there, outermost first.
        inside: library functions called from there that each contain at least half of the cost at this place,
            outermost first, as "file:line function".
        module: the library's module that contains at least half of the cost at this place; a star stands for layers
            that differ only in their number. "" if none is known.
    """

    file: str
    line: int
    function: str
    share: float = 1.0
    exact_line: bool = False
    call_path: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    module: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to change: a sentence, the change as code, and how to try it without editing the program.

    Attributes:
        apply: values for `stepscope run --apply`, such as "fuse-optimizer" or "workers=4"; empty if the program
            itself has to be changed.
        diff: the change to the user's own lines as a unified diff; empty if their source was not read.
    """

    text: str
    code: str = ""
    apply: tuple[str, ...] = ()
    diff: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class Finding(Displayed):
    """One reason why the step is slow.

    Attributes:
        rule: identifier of the rule, such as "input-bound".
        title: one sentence with the number that matters.
        saving_ns_per_step: time a step would lose if the cause were gone; 0 for a note. Never more than the step.
        saving_share: the saving as a share of the step, 0 to 1.
        saving_basis: how the saving was obtained, in words.
        where: places in the user's code, the costliest first; empty if the trace does not show them.
        ends_run_in_ns: time until the cause ends the run, as a leak does; 0 if it already has; None if it never does.
            A finding that ends it soon (severity "high") ranks before all savings, others after the large savings.
        change: the change to replay; None if no replay can show it.
    """

    rule: str
    title: str
    severity: Severity
    saving_ns_per_step: int
    saving_share: float
    saving_basis: str
    confidence: Confidence
    evidence: Evidence
    remedy: Remedy
    where: tuple[Location, ...] = ()
    ends_run_in_ns: int | None = None
    saving_from: SavingFrom = "attributed"
    change: Change | None = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """Sort key: findings that soon end the run, large savings, findings that end it later, small savings.

        A saving counts with the part of it that promises of its confidence have kept on average.
        """
        ends = self.ends_run_in_ns
        is_large = self.severity in ("high", "medium")
        group = (1 if is_large else 3) if ends is None else (0 if self.severity == "high" else 2)
        return (group, ends or 0, -round(_KEPT[self.confidence] * self.saving_ns_per_step), self.rule)


@dataclass(frozen=True, slots=True)
class NotAnswered:
    """A question the trace cannot answer, why, and how to record a trace that can.

    Attributes:
        rule: identifier of the rule that asks.
        rules: identifiers of the rules that could not run for the same reason.
    """

    question: str
    why: str
    how: str
    rule: str = ""
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RuleResult:
    findings: tuple[Finding, ...] = ()
    not_answered: tuple[NotAnswered, ...] = ()


@dataclass(frozen=True, slots=True)
class BusyWork:
    """A costly kind of work on a device, and how close it comes to what the device can do; None where unknown.

    Attributes:
        what: the operator, or without one the kernel.
        input_shapes: JSON.
        kernel: the costliest one.
        kind: as in `stepscope.analysis.work.Work`, or by the kernel's name.
        library: whose kernel it is, by its name.
        ns_per_step: the device's time for it.
        share: the same as a share of the step, 0 to 1.
        compute_share, bandwidth_share: what it reached of the peaks, 0 to 1.
        limit: "compute", "memory" or "cache".
        peaks: the device that has these peaks; "A to B" where the trace names none, and shares are at most these.
        why: what keeps it from its limit.
        better: the shape or option that does better.
    """

    what: str
    input_shapes: str | None
    kernel: str | None
    kind: str | None
    library: str | None
    ns_per_step: int
    share: float
    compute_share: float | None = None
    bandwidth_share: float | None = None
    limit: str | None = None
    peaks: str | None = None
    why: str | None = None
    better: str | None = None


class Trainer(msgspec.Struct, frozen=True):
    """One library of data/trainers.toml, which says what its fields mean."""

    name: str
    files: str
    call: str = "{options}"
    separator: str = ", "
    flags: Mapping[str, str] = {}
    rules: Mapping[str, str] = {}

    def remedy(self, rule: str, remedy: Remedy) -> Remedy:
        """The remedy with the library's own option as its code; unchanged if the library has none for it."""
        code = self.rules.get(rule, "").strip("\n")
        if not code:
            given = dict(word.partition("=")[::2] for word in remedy.apply)
            options = [self.flags[flag].format(value=value) for flag, value in given.items() if flag in self.flags]
            code = self.call.format(options=self.separator.join(dict.fromkeys(options))) if options else ""
        return replace(remedy, code=f"# {self.name}:\n{code}", diff="") if code else remedy


def trainers() -> tuple[Trainer, ...]:
    return shipped("trainers.toml", dict[str, tuple[Trainer, ...]])["trainers"]


def trainer_of(paths: Iterable[str]) -> Trainer | None:
    """The known library that some of these files belong to; None if there is none."""
    known = [path.replace("\\", "/") for path in paths]
    return next((one for one in trainers() if any(re.search(one.files, path) for path in known)), None)


@dataclass(frozen=True, slots=True)
class Once:
    """Work that the process does only once; no saving counts it.

    Attributes:
        what: "first launch", "initialisation", "graph capture" or "operator" (inside one, before its work).
        name: the call or operator that took longest.
        ns: its total time in the steps, during which the device was idle.
        count: number of calls.
        where: the user's lines that led to it.
    """

    what: str
    name: str
    ns: int
    count: int
    where: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class SetApart:
    """An outlier step, left out of the typical step.

    Attributes:
        what: what took most of it: a kind of device work or a cause of idle or host time.
        share: part of the step that it took, 0 to 1.
        phase: of an engine's iteration, such as "prefill"; "" otherwise.
    """

    index: int
    duration_ns: int
    what: str
    share: float
    phase: str = ""


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """How one device's window was spent; see `stepscope.analysis.device_time` for the definitions."""

    device: str
    name: str | None
    window_ns: int
    busy_ns: int
    idle_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int


@dataclass(frozen=True, slots=True)
class StepTime(DeviceSummary):
    """How one device spent the time of the steps, or of the recording without steps, on the host's clock.

    Attributes:
        window: "steps" or "recording".
        backlog_ns: part of `busy_ns` that went to work launched before the steps.
    """

    window: str
    backlog_ns: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file (such as one rank's) that is not in the report: it could not be read, or is left out.

    Attributes:
        reason: one sentence that names the file and says what is wrong with it.
    """

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Together:
    """What a step would save if the causes of several findings were removed together, by one replay.

    Attributes:
        count: number of shown findings whose own saving was replayed.
        saving_ns_per_step: never more than the step.
        share: the saving as a share of the step, 0 to 1.
        sum_share: sum of the findings' own shares: above `share` where savings overlap, below it where one cause
            hides behind another.
    """

    count: int
    saving_ns_per_step: int
    share: float
    sum_share: float


@dataclass(frozen=True, slots=True)
class Afterwards:
    """A finding that saves hardly anything now, but would once the causes of the shown findings are gone.

    Attributes:
        saving_ns_per_step: what it then saves in addition to them; never more than the step.
        saving_share: the saving as a share of the step as measured, 0 to 1.
    """

    rule: str
    title: str
    saving_ns_per_step: int
    saving_share: float
