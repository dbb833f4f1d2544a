"""The type of a rule, how it runs, and its page.

The engine applies thresholds, drops small findings and replays the rest. Pages are Markdown: the contents of docs/rules
and the output of `stepscope explain`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

from stepscope.analysis.idle import clipped
from stepscope.diagnosis.finding import (
    Confidence,
    Evidence,
    Figure,
    Finding,
    Interval,
    Location,
    NotAnswered,
    Remedy,
    RuleResult,
    Severity,
)
from stepscope.diagnosis.view import Framework, View, rows_of, tally_figures
from stepscope.trace.nesting import Rows
from stepscope.whatif import Change

__all__ = [
    "Answers",
    "Change",
    "Figure",
    "Found",
    "InServing",
    "Limits",
    "Remedy",
    "Rows",
    "Rule",
    "Threshold",
    "View",
    "clipped",
    "note_from_files",
    "rows_of",
    "severity",
    "tally_figures",
]

PartName: TypeAlias = Literal["steps", "lines", "operators", "shapes", "types", "messages", "memory", "grids"]
"""A part that a recording may lack; see `stepscope.diagnosis.parts`."""
_MORE = 1.2
"""Multiple of the cost above which a replay's saving is explained and less sure."""
_LESS = 0.05
_VISIBLE = 0.02
"""A replay's saving is explained if it lacks more than these shares of the cost, and of the step."""
_LOWER: Final[Mapping[Confidence, Confidence]] = {"high": "medium", "medium": "low", "low": "low"}
HIGH_SHARE = 0.2
MEDIUM_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that users may set.

    Attributes:
        value: the default.
        meaning: what is compared with it; "{period}" is replaced by "step", or by "recording" without steps.
    """

    value: float
    unit: Literal["share", "ns", "bytes", "count"]
    meaning: str

    def meant(self, period: str = "step") -> str:
        """The meaning as users read it."""
        return self.meaning.replace("{period}", period)


@dataclass(frozen=True, slots=True)
class Found:
    """What a rule found; it becomes a finding if its cost reaches the rule's threshold.

    Attributes:
        title: one sentence with the number that matters.
        cost_ns: cost over the span; the saving if no replay of `change` gives one.
        basis: how the cost was obtained, in words.
        figures: evidence besides the share of the step, which the engine adds.
        limit: name of the threshold that the cost is compared with.
        weighed_ns: time that is compared with the threshold instead of the cost.
        share_at: index among the figures where the engine inserts the share; None to leave it out.
        severity: set for notes, which have no threshold; otherwise it follows from the saving.
        ends_run_in_ns: see `Finding`.
        for_every_framework: whether the remedy applies even where the rule has one for the program's framework or for
            serving.
        is_tried: whether a trial of the remedy would show something on this machine.
        is_contention: whether the cost is the recording's contention itself, which other findings leave out.
    """

    title: str
    cost_ns: float
    basis: str
    confidence: Confidence
    remedy: Remedy
    figures: Sequence[Figure] = ()
    intervals: Sequence[Interval] = ()
    where: tuple[Location, ...] = ()
    change: Change | None = None
    limit: str = "share"
    weighed_ns: float | None = None
    share_at: int | None = 0
    severity: Severity | None = None
    ends_run_in_ns: int | None = None
    for_every_framework: bool = False
    is_contention: bool = False
    is_tried: bool = True


def note_from_files(title: str, figures: Sequence[Figure], remedy: Remedy, where: tuple[Location, ...] = ()) -> Found:
    """Create a note about something that only files beside the trace report; it claims no saving."""
    basis = "no saving: the files beside the trace give counts, not what the device waited for"
    return Found(title, 0, basis, "high", remedy, figures, where=where, severity="note")


@dataclass(frozen=True, slots=True)
class InServing:
    """A remedy where an engine serves a model, or a loop generates.

    Attributes:
        purpose: of the engine's own option, which is the remedy's code; see `data/engines.toml`.
        code: what to write where the engine is unknown or has no such option.
        needs_device: whether it is a remedy only where a device does the work.
    """

    text: str
    purpose: str
    code: str
    needs_device: bool = False

    def is_for(self, view: View) -> bool:
        return view.serves and (view.device is not None or not self.needs_device)

    def remedy(self, view: View) -> Remedy:
        return Remedy(self.text, view.engine.options.get(self.purpose, self.code))


Answers: TypeAlias = Iterator[Found | NotAnswered]


class Limits:
    """A rule's thresholds for one view, as the user set them or by default."""

    def __init__(self, rule: Rule, view: View) -> None:
        self._rule, self._view = rule, view

    def __getitem__(self, name: str) -> float:
        return self._view.setting(f"{self._rule.id}.{name}", self._rule.thresholds[name].value)

    def reached(self, ns: float, name: str = "share") -> bool:
        """Whether a time over the span is positive and reaches a threshold that is a share of the step."""
        return ns > 0 and self._view.share(ns) >= self[name]

    def figure(self, name: str, value: float) -> Figure:
        """A value with the threshold that it was compared with."""
        threshold = self._rule.thresholds[name]
        return Figure(threshold.meant(self._view.period), value, threshold.unit, self[name])


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One reason why steps are slow, and everything that stepscope says about it.

    Attributes:
        check: yields findings in a view and questions that it cannot answer.
        needs: parts of a recording without which the rule cannot run.
        replaces: rules whose cause this one explains more precisely.
        rivals: rules that may find the same work at the same lines; of two such findings the larger counts.
        remedies: remedies for frameworks other than PyTorch on a GPU, used instead of the one from `check`.
        serving: the remedy where nothing is trained and an engine serves, used instead of the one from `check`.
        beneath: 0, or for a general rule a number that is higher the weaker its evidence: its findings count only as
            far as rules with lower numbers do not explain their time.
    """

    id: str
    title: str
    thresholds: Mapping[str, Threshold]
    check: Callable[[View, Limits], Answers]
    needs: tuple[PartName, ...] = ()
    replaces: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    remedies: Mapping[Framework, Remedy] = field(default_factory=dict)
    serving: InServing | None = None
    beneath: int = 0

    @property
    def page(self) -> str:
        """The user's page: the docstring of the rule's module, with the headings of SECTIONS."""
        return inspect.cleandoc(sys.modules[self.check.__module__].__doc__ or "")

    def limits(self, view: View) -> Limits:
        """The rule's thresholds as the view's user set them."""
        return Limits(self, view)

    def ask(self, view: View) -> RuleResult:
        limits = self.limits(view)
        answers = list(self.check(view, limits))
        found = [each for each in answers if isinstance(each, Found) and self._counts(each, limits)]
        return RuleResult(
            tuple(self._finding(each, view, limits) for each in found),
            tuple(replace(each, rule=self.id) for each in answers if isinstance(each, NotAnswered)),
        )

    @staticmethod
    def _counts(found: Found, limits: Limits) -> bool:
        weighed_ns = found.cost_ns if found.weighed_ns is None else found.weighed_ns
        return found.severity is not None or (found.cost_ns > 0 and limits.reached(weighed_ns, found.limit))

    def _finding(self, found: Found, view: View, limits: Limits) -> Finding:
        saving_ns, change = view.saving_ns(found.cost_ns, found.change)
        if found.is_contention:
            saving_ns = view.per_step(found.cost_ns)
        share = saving_ns / view.step_ns
        basis, confidence = _judged(found, view, saving_ns, change)
        figures = list(found.figures)
        if found.severity is None and found.share_at is not None:
            weighed_ns = found.cost_ns if found.weighed_ns is None else found.weighed_ns
            figures.insert(found.share_at, limits.figure(found.limit, view.share(weighed_ns)))
        remedy = found.remedy
        if found.for_every_framework:
            pass
        elif view.framework is not None:
            remedy = self.remedies.get(view.framework, remedy)
        elif self.serving is not None and self.serving.is_for(view):
            remedy = self.serving.remedy(view)
        elif view.trainer is not None:
            remedy = view.trainer.remedy(self.id, remedy)
        if not found.is_tried:
            remedy = replace(remedy, apply=())
        return Finding(
            self.id,
            found.title,
            found.severity or severity(share),
            saving_ns,
            share,
            basis,
            confidence,
            Evidence(tuple(figures), tuple(found.intervals)),
            remedy,
            found.where,
            ends_run_in_ns=found.ends_run_in_ns,
            saving_from="attributed" if change is None else "replayed",
            change=change,
        )


def _judged(found: Found, view: View, saving_ns: int, change: Change | None) -> tuple[str, Confidence]:
    """The basis, with the reason why the saving is not the cost, and the confidence."""
    basis, confidence = found.basis, found.confidence
    if saving_ns > _MORE * view.per_step(found.cost_ns):
        basis += "; more than that, because what waits behind it starts earlier"
        confidence = "medium" if confidence == "high" else confidence
    less_ns = view.per_step(found.cost_ns) - saving_ns
    is_less = saving_ns > 0 and less_ns > max(_LESS * view.per_step(found.cost_ns), _VISIBLE * view.step_ns)
    if found.is_contention or found.severity is not None or view.contention is None:
        return (f"{basis}; less than that, {_left_out(view)}" if is_less and change is not None else basis), confidence
    if change is not None and view.is_counted_in(change, saving_ns):
        return f"{basis}; without what other programs took of it", "medium" if confidence == "high" else confidence
    return f"{basis}; other programs may have lengthened it", _LOWER[confidence]


def _left_out(view: View) -> str:
    if view.knows_recording_costs:
        return "without what recording added to it and what other work would fill"
    return "because other work would fill the rest"


def severity(share: float) -> Severity:
    if share >= HIGH_SHARE:
        return "high"
    return "medium" if share >= MEDIUM_SHARE else "low"


SECTIONS: Final = (
    "What it finds",
    "Why it costs time",
    "How it is measured",
    "Known false positives",
    "What to do",
    "Reference",
)
"""The headings of every rule's docstring, in order."""


def rule_page(rule: Rule) -> str:
    """The page of one rule: title, identifier, the sections of its docstring, and its thresholds."""
    sections = re.sub("^# ", "## ", rule.page, flags=re.MULTILINE)
    parts = [f"# {rule.title}", f"Rule `{rule.id}`", sections, *_thresholds(rule)]
    return "\n\n".join(part for part in parts if part) + "\n"


def rule_index(rules: Iterable[Rule]) -> str:
    """The list of the rules, in the order in which they run."""
    rows = [f"| [{rule.id}]({rule.id}.md) | {rule.title} | {_first_sentence(rule)} |" for rule in rules]
    return "\n".join(
        [
            "# The rules",
            "",
            "What stepscope looks for. These pages are generated from the rules by `scripts/generate_docs`;",
            "`stepscope explain RULE` prints them.",
            "",
            "| rule | title | what it finds |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _first_sentence(rule: Rule) -> str:
    found = rule.page.partition("\n\n")[0].removeprefix(f"# {SECTIONS[0]}\n")
    return " ".join(found.split())


def _thresholds(rule: Rule) -> Iterator[str]:
    if not rule.thresholds:
        return
    rows = [
        f"| `{rule.id}.{name}` | {_amount(threshold)} | {threshold.meant()} |"
        for name, threshold in rule.thresholds.items()
    ]
    yield "## Thresholds"
    yield "\n".join(["| threshold | default | meaning |", "|---|---|---|", *rows])
    name, threshold = next(iter(rule.thresholds.items()))
    yield "Set one when diagnosing:"
    yield f"    stepscope diagnose TRACE --set {rule.id}.{name}={threshold.value:g}"


def _amount(threshold: Threshold) -> str:
    if threshold.unit == "share":
        return f"{threshold.value:g} (a share: {threshold.value:.0%})"
    return f"{threshold.value:g}" if threshold.unit == "count" else f"{threshold.value:g} {threshold.unit}"
