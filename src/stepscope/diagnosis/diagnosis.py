"""The diagnosis of one trace, from which reports are made."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from stepscope.analysis.captured import GraphUse, graph_use
from stepscope.analysis.device_time import (
    DeviceUse,
    EngineUse,
    HostUse,
    busy_intervals,
    device_time,
    device_uses,
    engine_uses,
    host_use,
)
from stepscope.analysis.host import host_summary, host_time
from stepscope.analysis.idle import clipped, device_window, idle_summary
from stepscope.analysis.operators import kernel_table, operator_table
from stepscope.analysis.serving import ServingSummary
from stepscope.diagnosis.finding import (
    Afterwards,
    BusyWork,
    DeviceSummary,
    Finding,
    NotAnswered,
    Once,
    RuleResult,
    SetApart,
    StepTime,
    Together,
)
from stepscope.diagnosis.lines.costs import LineShare, unexplained
from stepscope.diagnosis.parts import PARTS
from stepscope.diagnosis.recording_costs import Contention
from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.rules._device import busy_work
from stepscope.diagnosis.rules.graph_break import CompileUse, compile_use
from stepscope.diagnosis.view import LookedUp, View
from stepscope.errors import UsageError
from stepscope.trace import Metadata, Trace, TraceWarning, Window
from stepscope.trace.model import Displayed
from stepscope.trace.naming import DEFAULT_USER_CODE, UserCode
from stepscope.whatif import Change, Experiment, Graph
from stepscope.whatif.changes import together


def once(view: View) -> tuple[Once, ...]:
    """What the process did only once during the steps, longest first."""
    found = view.pieces_of("once")
    rows = view.activity.once
    if found.is_empty():
        return ()
    starts = rows.select("lane", "what", "name", begin="start_ns", last=pl.col("start_ns") + pl.col("duration_ns"))
    pieces = found.sort("start_ns").join_asof(
        starts.sort("begin"),
        left_on="start_ns",
        right_on="begin",
        by="lane",
        strategy="backward",
        check_sortedness=False,
    )
    kinds = [
        Once(
            str(what),
            str(mine.sort("duration_ns", descending=True)["name"][0]),
            int(mine["duration_ns"].sum()),
            mine.select("lane", "begin").n_unique(),
            view.locations(mine),
        )
        for (what,), mine in pieces.group_by("what")
    ]
    return tuple(sorted(kinds, key=lambda each: (-each.ns, each.what)))


def set_apart(view: View) -> tuple[SetApart, ...]:
    """Complete steps that were not measured, in order, each with what took most of it."""
    measured = view.complete_steps["index"].implode()
    gone = view.steps.filter(pl.col("complete") & ~pl.col("index").is_in(measured))
    steps = gone.sort("start_ns").select("index", "start_ns", "duration_ns").iter_rows()
    phases = dict(view.iterations.select("start_ns", "phase").drop_nulls().iter_rows())
    return tuple(
        replace(_described(view, index, Window(start, start + length)), phase=phases.get(start, ""))
        for index, start, length in steps
    )


def _described(view: View, index: int, window: Window) -> SetApart:
    parts: dict[str, int] = {}
    if view.device is None:
        causes = view.activity.cut(view.lane or 0, np.array([window.start_ns]), np.array([window.end_ns]))
        causes = causes.select(cause=pl.col("cause").cast(pl.String), ns=pl.col("end") - pl.col("start"))
    else:
        work = view.trace.device_work.filter(pl.col("device") == view.device)
        parts = {str(kind): busy_intervals(mine, window).total_ns for (kind,), mine in work.group_by("kind")}
        idle = clipped(view.idle.filter(pl.col("device") == view.device), window)
        causes = idle.select("cause", ns="duration_ns")
    for cause, ns in causes.group_by("cause").agg(pl.col("ns").sum()).iter_rows():
        parts[cause] = parts.get(cause, 0) + ns
    what = max(parts, key=lambda name: parts[name], default="unknown")
    return SetApart(index, window.duration_ns, what, parts.get(what, 0) / max(window.duration_ns, 1))


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Displayed):
    """Everything a report needs; tables are small (already cut to the top rows).

    Attributes:
        step_source: "annotation", "inferred" or "none".
        steps: columns index, start_ns, duration_ns, complete (bool: fully inside the recording).
        step_ns: the mean complete step's duration, which savings are relative to; without steps, the length of the
            device's or the main thread's window.
        step_count: number of steps that `step_ns` and the savings refer to; 1 without steps.
        devices: one summary per device; empty for a trace without a device.
        idle: columns device, cause, trigger, ns, share (of the device's window); sums to idle_ns for each device.
        host: columns cause, ns, share: the main host thread's time by the same causes.
        operators: the top rows of `stepscope.analysis.operators.operator_table`.
        operator_count: rows of the whole table.
        kernels: the top rows of `stepscope.analysis.operators.kernel_table`.
        kernel_count: rows of the whole table.
        findings: by saving, the largest first.
        hidden: number of findings below `minimum_share`.
        not_answered: questions that this trace cannot answer.
        device_uses: summary of how each device spent its window.
        host_use: the same for the main host thread; None if none was recorded.
        engine_uses: for devices whose queues are engines, how each engine spent the window.
        together: joint saving of the shown findings; None if fewer than two of them have a replayed saving.
        afterwards: hidden findings that save more once the causes of the shown ones are gone.
        applied: outcome of each remedy applied when the program started, one sentence each.
        length_ns: duration of the measured steps, including one-off work.
        mean_step_ns: mean of all complete steps, including those set apart; 0 without steps.
        median_step_ns: median of the measured steps; 0 without steps and where the device sets their pace.
        set_apart: complete steps that `step_ns` leaves out.
        once: one-off work, longest first.
        in_steps: how each device spent the time of the steps.
        idle_in_steps: columns as in `idle`; sums to the idle_ns of `in_steps` for each device.
        uses_in_steps: as `device_uses`, over the time of the steps.
        by_device: show each device's window from its first to its last work, as other profilers do, not the steps.
        is_warm_up: most of the recording is one-off work, so nothing is promised.
        lines: costly lines that no finding explains, costliest first.
        unrecorded_ns: median of the run's unrecorded steps, if they are shorter than the recorded ones, else 0.
            Savings are shares of such a step.
        job_step_ns: the step of the rank that takes longest, if savings are those of all ranks together, else 0.
            Savings are shares of it.
        busy: work that takes a noticeable part of the step on the device, costliest first.
        graphs: what is known of the kernels in CUDA or HIP graphs; None if none were launched.
        compiled: what torch.compile did; None without its log.
        serving: what was served; None if the program neither serves nor generates.
        contention: time of the recorded steps that other programs or a quota took; None if little, or unknown.
        calm_step_ns: `step_ns` without it.
        program: the recorded script and its arguments, as for `stepscope run`; "" if unknown or not to be told.
    """

    metadata: Metadata
    warnings: tuple[TraceWarning, ...]
    step_source: str
    steps: pl.DataFrame
    step_ns: int
    step_count: int
    devices: tuple[DeviceSummary, ...]
    idle: pl.DataFrame
    host: pl.DataFrame
    operators: pl.DataFrame
    operator_count: int
    kernels: pl.DataFrame
    kernel_count: int
    findings: tuple[Finding, ...]
    hidden: int
    not_answered: tuple[NotAnswered, ...]
    device_uses: tuple[DeviceUse, ...] = ()
    host_use: HostUse | None = None
    engine_uses: tuple[EngineUse, ...] = ()
    together: Together | None = None
    afterwards: tuple[Afterwards, ...] = ()
    applied: tuple[str, ...] = ()
    length_ns: int = 0
    mean_step_ns: int = 0
    median_step_ns: int = 0
    set_apart: tuple[SetApart, ...] = ()
    once: tuple[Once, ...] = ()
    in_steps: tuple[StepTime, ...] = ()
    idle_in_steps: pl.DataFrame = field(default_factory=pl.DataFrame)
    uses_in_steps: tuple[DeviceUse, ...] = ()
    by_device: bool = False
    is_warm_up: bool = False
    lines: tuple[LineShare, ...] = ()
    unrecorded_ns: int = 0
    job_step_ns: int = 0
    busy: tuple[BusyWork, ...] = ()
    graphs: GraphUse | None = None
    compiled: CompileUse | None = None
    serving: ServingSummary | None = None
    contention: Contention | None = None
    calm_step_ns: int = 0
    program: str = ""

    @property
    def shown(self) -> tuple[Sequence[DeviceSummary], pl.DataFrame, tuple[DeviceUse, ...]]:
        """What a report shows: the devices, their idle time and uses, over the steps or each device's own window."""
        if self.by_device or not self.in_steps:
            return self.devices, self.idle, self.device_uses
        return self.in_steps, self.idle_in_steps, self.uses_in_steps

    @property
    def promised_step_ns(self) -> int:
        """The step that savings are shares of: an unrecorded one, if its time is known; the job's."""
        return self.unrecorded_ns or self.job_step_ns or self.step_ns

    @property
    def once_ns(self) -> int:
        """Time in the steps spent on one-off work."""
        return sum(each.ns for each in self.once)

    @property
    def typical_step_ns(self) -> int:
        """The median step if it is far from the mean, else the mean."""
        is_uneven = abs(self.median_step_ns - self.step_ns) > UNEVEN * self.step_ns
        return self.median_step_ns if is_uneven and self.median_step_ns else self.step_ns


MINIMUM_SHARE = 0.01
UNEVEN = 0.1
"""Difference between mean and median, as a share of the mean, above which the median is the typical step."""
AFTERWARDS_SHARE = 0.05
"""Share of the step that a hidden finding must save, once the causes of others are gone, to be reported."""
MOST_AFTERWARDS = 10
"""Number of hidden findings to try, largest savings first; each takes a replay."""
MOST_GENERAL = 8
"""Number of general rules' findings to compare with the others, largest first; each takes two replays."""
EXPLAINED = 0.5
"""Share of a general finding's saving that more precise findings must explain to replace it."""


def diagnose(
    trace: Trace,
    *,
    rules: Sequence[str] | None = None,
    settings: Mapping[str, float] | None = None,
    top: int = 20,
    minimum_share: float = MINIMUM_SHARE,
    user_code: UserCode = DEFAULT_USER_CODE,
) -> Diagnosis:
    """Diagnose why the steps of a trace are slow.

    Args:
        rules: identifiers of the rules to run; all by default.
        settings: thresholds that replace the defaults, by "rule.threshold".
        top: rows of the operator and kernel tables to keep; 0 for all.
        minimum_share: findings that save less than this share of the step are counted but not kept.
        user_code: which files are the user's, besides those that belong to no library.

    Raises:
        UsageError: unknown rule or threshold.
    """
    _check_settings(settings or {})
    return diagnose_view(View(trace, settings, user_code), rules=rules, top=top, minimum_share=minimum_share)


def diagnose_view(
    view: View,
    *,
    rules: Sequence[str] | None = None,
    top: int = 20,
    minimum_share: float = MINIMUM_SHARE,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Diagnose a trace through an existing view, which keeps what was computed for later analyses.

    Args:
        progress: called with the number of rules that have been asked, and of all.

    Raises:
        UsageError: unknown rule.
    """
    wanted = RULES if rules is None else [rule_by_id(identifier) for identifier in rules]
    findings, questions = asked(view, wanted, progress)
    base = view.earlier.value("diagnosis", lambda: _diagnosis(view))
    findings = beneath_others(view, base.step_ns, without_replaced(findings))
    findings.sort(key=lambda finding: finding.rank)
    shown: list[Finding] = []
    hidden: list[Finding] = []
    for finding in findings:
        is_worth_it = (
            finding.saving_share >= minimum_share and not base.is_warm_up
        ) or finding.ends_run_in_ns is not None
        (shown if is_worth_it or finding.severity == "note" else hidden).append(finding)
    first = [finding for finding in shown if finding.change is not None and finding.saving_ns_per_step > 0]
    small = [finding for finding in hidden if finding.change is not None]
    both = _together(view, base.step_ns, first)
    before = both.saving_ns_per_step if both is not None else sum(each.saving_ns_per_step for each in first)
    diagnosis = replace(
        base,
        findings=tuple(shown),
        hidden=len(hidden),
        not_answered=tuple(dict.fromkeys(questions)),
        operators=base.operators.head(top) if top else base.operators,
        kernels=base.kernels.head(top) if top else base.kernels,
        together=both,
        afterwards=_afterwards(view, base.step_ns, first, before, small),
        lines=() if base.is_warm_up else _unexplained(view, base.step_count, shown),
    )
    view.earlier.keep()
    return diagnosis


def _unexplained(view: View, steps: int, shown: Sequence[Finding]) -> tuple[LineShare, ...]:
    """Costly lines that the shown findings explain by less than half."""
    explained: Counter[tuple[str, int]] = Counter()
    for finding in shown:
        for place in finding.where:
            explained[place.file, place.line] += round(finding.saving_ns_per_step * steps * place.share)
    return tuple(unexplained(view, explained))


def asked(
    view: View, rules: Sequence[Rule], progress: Callable[[int, int], None] | None = None
) -> tuple[list[Finding], list[NotAnswered]]:
    """Run the rules and return their findings and unanswered questions, in the rules' order."""
    findings: list[Finding] = []
    questions: list[NotAnswered] = []
    without_operators = view.earlier.value("no operators", lambda: PARTS["operators"].is_missing(view.trace))
    for number, rule in enumerate(rules, 1):
        if progress is not None:
            progress(number, len(rules))
        if without_operators and "operators" in rule.needs:
            continue  # the rule knows only PyTorch's operators; the report says that it could not run
        result = _answer(view, rule)
        findings.extend(result.findings)
        questions.extend(_with_those_concerned(question) for question in result.not_answered)
    return findings, questions


def _answer(view: View, rule: Rule) -> RuleResult:
    """A rule's answer, now or of an earlier diagnosis, whose changes are then found out when they are replayed."""

    def ask() -> tuple[RuleResult, LookedUp]:
        result, looked_up = view.looked_up(lambda: rule.ask(view))
        view.answers[rule.id] = result
        return replace(result, findings=tuple(replace(each, change=None) for each in result.findings)), looked_up

    kept = view.earlier.answer(rule.id, ask)
    if rule.id in view.answers:
        return view.answers[rule.id]

    def change(number: int) -> Change:
        def apply(experiment: Experiment, graph: Graph) -> Graph:
            if rule.id not in view.answers:
                view.answers[rule.id] = rule.ask(view)
            meant = view.answers[rule.id].findings[number].change
            return graph if meant is None else meant(experiment, graph)

        return apply

    findings = (
        replace(each, change=change(number) if each.saving_from == "replayed" else None)
        for number, each in enumerate(kept.findings)
    )
    return replace(kept, findings=tuple(findings))


def _with_those_concerned(question: NotAnswered) -> NotAnswered:
    part = next((name for name, part in PARTS.items() if part.question == question.question), None)
    concerned = tuple(rule.id for rule in RULES if part in rule.needs)
    return replace(question, rules=concerned) if concerned else question


def _diagnosis(view: View) -> Diagnosis:
    """What does not depend on the findings."""
    trace = view.trace
    operators = operator_table(trace, costs=view.operator_costs, steps=view.steps)
    kernels = kernel_table(trace, steps=view.steps)
    windows = {name: device_window(trace, name) for name in trace.working_devices}
    main_thread = host_time(trace, activity=view.activity)
    names = {device.device: device.name for device in trace.metadata.devices}
    times = view.device_time.sort("device")
    complete = view.steps.filter("complete")
    return Diagnosis(
        metadata=trace.metadata,
        warnings=trace.warnings,
        step_source=view.summary.source if view.complete_steps.height else "none",
        steps=view.steps.select("index", "start_ns", "duration_ns", "complete"),
        step_ns=view.step_ns,
        step_count=view.step_count,
        devices=tuple(DeviceSummary(name=names.get(row["device"]), **row) for row in times.iter_rows(named=True)),
        idle=idle_summary(view.idle, windows),
        host=host_summary(main_thread),
        operators=operators,
        operator_count=operators.height,
        kernels=kernels,
        kernel_count=kernels.height,
        findings=(),
        hidden=0,
        not_answered=(),
        device_uses=device_uses(trace, main_thread),
        length_ns=view.window.duration_ns,
        is_warm_up=view.is_warm_up,
        mean_step_ns=int(complete["duration_ns"].mean() or 0) if complete.height else 0,  # type: ignore[arg-type]
        median_step_ns=view.summary.median_ns if view.window == view.span else 0,
        set_apart=set_apart(view),
        once=once(view),
        in_steps=_in_steps(view, names),
        idle_in_steps=idle_summary(view.idle_in_steps, view.windows),
        uses_in_steps=device_uses(trace, main_thread, window=view.windows),
        host_use=host_use(main_thread),
        engine_uses=engine_uses(trace),
        unrecorded_ns=_unrecorded_ns(view),
        busy=busy_work(view),
        graphs=graph_use(trace),
        compiled=compile_use(view),
        serving=view.serving,
        contention=view.contention,
        calm_step_ns=view.earlier.value("calm step", lambda: view.calm_step_ns),
    )


def _unrecorded_ns(view: View) -> int:
    unrecorded = view.trace.metadata.unrecorded
    is_shorter = unrecorded is not None and view.recorded_events is not None and unrecorded.step_ns < view.step_ns
    return unrecorded.step_ns if unrecorded is not None and is_shorter else 0


def _in_steps(view: View, names: Mapping[str, str | None]) -> tuple[StepTime, ...]:
    times = device_time(view.trace, window=view.windows).sort("device")
    window = "steps" if view.complete_steps.height else "recording"
    return tuple(
        StepTime(
            name=names.get(row["device"]),
            **row,
            window=window,
            backlog_ns=busy_intervals(view.backlog(row["device"]), view.windows[row["device"]]).total_ns,
        )
        for row in times.iter_rows(named=True)
    )


def _saved_ns(view: View, findings: Sequence[Finding]) -> int:
    changed = [finding for finding in findings if finding.change is not None]
    name = ("saved", *((each.rule, each.title, repr(each.where), repr(each.evidence)) for each in changed))
    return view.earlier.value(
        name, lambda: view.saved_ns(together(*(each.change for each in changed if each.change is not None)))
    )


def _together(view: View, step_ns: int, several: Sequence[Finding]) -> Together | None:
    if len(several) < 2:
        return None
    saving = _saved_ns(view, several)
    return Together(
        count=len(several),
        saving_ns_per_step=saving,
        share=saving / step_ns,
        sum_share=sum(finding.saving_share for finding in several),
    )


def _afterwards(
    view: View, step_ns: int, first: Sequence[Finding], before: int, small: Sequence[Finding]
) -> tuple[Afterwards, ...]:
    """Find what each hidden finding saves once the causes of the shown ones are gone.

    Args:
        before: joint saving of the shown findings, nanoseconds per step.
    """
    if not first:
        return ()
    later = []
    for finding in small[:MOST_AFTERWARDS]:
        saving = max(_saved_ns(view, [*first, finding]) - before, 0)
        if saving >= AFTERWARDS_SHARE * step_ns:
            later.append(Afterwards(finding.rule, finding.title, saving, saving / step_ns))
    return tuple(sorted(later, key=lambda each: (-each.saving_ns_per_step, each.rule)))


def without_replaced(findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings that others explain more precisely.

    A finding is dropped if the findings that replace it explain at least EXPLAINED of its saving, or if one of a rival
    rule that names its first line saves more; notes stay.
    """
    rivals = {frozenset((rule.id, rival)) for rule in RULES for rival in rule.rivals}
    findings = [finding for finding in findings if not any(_is_larger(other, finding, rivals) for other in findings)]
    precise: Counter[str] = Counter()
    replaces = {rule.id: rule.replaces for rule in RULES}
    for finding in findings:
        precise.update(dict.fromkeys(replaces.get(finding.rule, ()), finding.saving_ns_per_step))
    return [
        finding
        for finding in findings
        if finding.severity == "note" or precise[finding.rule] < max(EXPLAINED * finding.saving_ns_per_step, 1)
    ]


def _is_larger(rival: Finding, finding: Finding, rivals: Set[frozenset[str]]) -> bool:
    """Whether a finding of a rival rule is about the same lines, and saves more."""
    if finding.severity == "note" or rival.saving_ns_per_step <= finding.saving_ns_per_step or not finding.where:
        return False
    if frozenset((finding.rule, rival.rule)) not in rivals:
        return False
    first = finding.where[0]
    return any((place.file, place.line) == (first.file, first.line) for place in rival.where)


def beneath_others(view: View, step_ns: int, findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings of general rules that others explain, and subtract the explained part from the rest.

    The others are findings of less general rules, and larger ones of equally general rules. A finding is dropped if a
    replay without the others' causes shrinks its share of the step to less than EXPLAINED of what it is now.
    """
    general = {rule.id: rule.beneath for rule in RULES if rule.beneath}
    kept = [finding for finding in findings if finding.rule not in general]
    beneath = [finding for finding in findings if finding.rule in general]
    beneath.sort(key=lambda finding: (general[finding.rule], finding.rank))
    for finding in beneath[:MOST_GENERAL]:
        others = [other for other in kept if other.change is not None and other.saving_ns_per_step > 0]
        share = finding.saving_share
        if finding.change is not None and others and share > 0:
            before = _saved_ns(view, others)
            left = (_saved_ns(view, [*others, finding]) - before) / max(step_ns - before, 1)
            if left < EXPLAINED * share:
                continue
            share = min(share, left)
        kept.append(replace(finding, saving_ns_per_step=round(share * step_ns), saving_share=share))
    return kept


def rule_by_id(identifier: str) -> Rule:
    """Return the rule with this identifier.

    Raises:
        UsageError: the rule does not exist; the message suggests the nearest one.
    """
    known = {rule.id: rule for rule in RULES}
    if identifier not in known:
        near = difflib.get_close_matches(identifier, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; the rules are {', '.join(known)}"
        raise UsageError(f"there is no rule {identifier!r}{hint}")
    return known[identifier]


def _check_settings(settings: Mapping[str, float]) -> None:
    for key in settings:
        identifier, dot, name = key.partition(".")
        rule = rule_by_id(identifier)
        if not dot or name not in rule.thresholds:
            known = ", ".join(f"{identifier}.{threshold}" for threshold in rule.thresholds)
            raise UsageError(f"there is no threshold {key!r}; this rule has {known}")
