"""Everything a report says about one trace, and the document of a diagnosis: of one trace, or of the ranks of a job."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from stepscope.analysis.telemetry import TelemetryPicture
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.finding import Finding, Location, StepTime, Unreadable
from stepscope.diagnosis.job import JobSteps
from stepscope.diagnosis.rank_groups import exchanges
from stepscope.diagnosis.rank_summary import RankSummary
from stepscope.diagnosis.recording_costs import Contention
from stepscope.errors import UsageError
from stepscope.predict.cost.energy_parts import TraceEnergy
from stepscope.record.runs import own_names
from stepscope.report.document import (
    Block,
    Causes,
    Document,
    Figures,
    FindingBlock,
    Group,
    Items,
    Place,
    Section,
    Table,
    Text,
    Where,
    fields,
    section_if,
    stamped,
    texts,
)
from stepscope.report.energy import measured_section, trace_json
from stepscope.report.format import duration, file_name, printable, share, warning_sentence
from stepscope.report.places import glances, serving_glance
from stepscope.report.ranks import MOST_RANKS, exchanges_blocks, job_section, ranks_blocks
from stepscope.report.words import (
    afterwards_sentence,
    basis_sentence,
    busy_sentences,
    causes_of,
    compile_sentences,
    contention_sentence,
    device_table,
    diff_text,
    exceptional_sentences,
    graph_sentences,
    headline,
    hidden_sentence,
    idle_share,
    is_cut,
    line_sentences,
    nothing_sentence,
    rank_name,
    ranks_or_traces,
    saving_sentence,
    sentence,
    shown_devices,
    together_sentence,
    top_columns,
    trial,
    unreadable_heading,
    unreadable_sentences,
)
from stepscope.trace import Trace, Window
from stepscope.trace.naming import package_path
from stepscope.whatif.job import Saved

if TYPE_CHECKING:
    from stepscope.diagnosis.view import View


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The report of one trace.

    Attributes:
        rank: for comparing the ranks of a job; None for a single trace.
        saved: for each finding what it saves of the rank's own work, for the replay of the job; None where unknown.
        energy: what the run measured.
        page: what a report file keeps of the trace besides.
    """

    diagnosis: Diagnosis
    rank: RankSummary | None = None
    saved: tuple[Saved | None, ...] = ()
    energy: TraceEnergy | None = None
    page: Any = None

    @property
    def order(self) -> tuple[float, str]:
        """Sort key among the reports of several traces."""
        rank = self.diagnosis.metadata.rank
        return (float("inf") if rank is None else rank, self.diagnosis.metadata.path)

    def at(self, path: str) -> TraceReport:
        """The same report of a trace that is named by another path."""
        metadata = replace(self.diagnosis.metadata, path=path)
        rank = None if self.rank is None else self.rank.at(path)
        return replace(self, diagnosis=replace(self.diagnosis, metadata=metadata), rank=rank)

    def by_device(self) -> TraceReport:
        """The same report, which shows each device's window from its first to its last work."""
        return replace(self, diagnosis=replace(self.diagnosis, by_device=True))


def trace_report(
    view: View,
    *,
    rules: Sequence[str] | None,
    top: int,
    minimum_share: float,
    progress: Callable[[int, int], None] | None = None,
) -> TraceReport:
    """Build the report of the trace in `view`; the report keeps no reference to the trace's tables.

    Args:
        top: rows of operators and kernels, 0 for all.
        progress: called with the number of rules that have been asked, and of all.
    """
    from stepscope.diagnosis import diagnose_view
    from stepscope.diagnosis.rank_summary import rank_summary
    from stepscope.record.apply.flags import applied_beside

    trace = view.trace
    diagnosis = diagnose_view(view, rules=rules, top=top, minimum_share=minimum_share, progress=progress)
    rank, saved = None, []
    if (trace.metadata.world_size or 1) > 1:
        rank = view.earlier.value("rank summary", lambda: rank_summary(view))
        saved = [_saved(view, finding) for finding in diagnosis.findings]
        view.earlier.keep()
    return TraceReport(
        replace(diagnosis, applied=applied_beside(trace.metadata.path)),
        rank=rank,
        saved=tuple(saved),
        energy=_energy(view, diagnosis),
    )


def _saved(view: View, finding: Finding) -> Saved | None:
    change = finding.change
    if change is None or finding.saving_ns_per_step <= 0:
        return None
    name = ("saved on the rank", finding.rule, finding.title, repr(finding.where), repr(finding.evidence))
    return view.earlier.value(name, lambda: view.saved(change))


def with_own_commands(report: TraceReport) -> TraceReport:
    """The report whose commands name the trace, and the program that was recorded, as the user would write them."""
    diagnosis = report.diagnosis
    names = own_names(diagnosis.metadata.path)

    def told(text: str) -> str:
        text = _OF_TRACE.sub(lambda match: f"{match[1]} {names.trace}", text) if names.trace else text
        return text.replace(_A_PROGRAM, names.command) if names.command else text

    def of_finding(finding: Finding) -> Finding:
        remedy = finding.remedy
        return replace(finding, remedy=replace(remedy, text=told(remedy.text), code=told(remedy.code)))

    questions = tuple(replace(each, how=told(each.how)) for each in diagnosis.not_answered)
    findings = tuple(map(of_finding, diagnosis.findings))
    return replace(
        report, diagnosis=replace(diagnosis, findings=findings, not_answered=questions, program=names.program)
    )


_OF_TRACE: Final = re.compile(r"\b(stepscope [a-z-]+) TRACE\b")
_A_PROGRAM: Final = "python train.py"
"""The program in remedies' commands."""


def _energy(view: View, diagnosis: Diagnosis) -> TraceEnergy | None:
    """The measured energy of the steps; None if the run did not measure energy."""
    from stepscope.trace.energy_records import record_beside

    record = record_beside(view.trace.metadata.path)
    if record is None:
        return None
    from stepscope.predict.cost.energy import energy_of_trace
    from stepscope.predict.cost.energy_parts import PowerSettings

    return energy_of_trace(view, diagnosis.findings, PowerSettings(), record=record)


def telemetry_beside(trace: Trace) -> TelemetryPicture | None:
    """What the program logged and sampled, of the files beside the trace; None without any."""
    from stepscope.analysis.telemetry import telemetry_picture
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    path = Path(trace.metadata.path)
    files = [file for file in telemetry_files(path) if file != path]  # Nsight Systems exports share the suffix
    try:
        telemetry = read_telemetry(files)
    except UsageError as error:
        print(f"stepscope: {printable(str(error))}", file=sys.stderr)
        return None
    window, origin = _whole(trace), trace.metadata.origin_unix_ns
    recorded = None if origin is None else (origin + window.start_ns, origin + window.end_ns)
    return telemetry_picture(telemetry, recorded)


def _whole(trace: Trace) -> Window:
    """From the start of the first device work (or operator) to the end of the last one."""
    for table in (trace.device_work, trace.operators):
        if table.height:
            first = int(table["start_ns"].to_numpy().min())
            last = int((table["start_ns"] + table["duration_ns"]).to_numpy().max())
            return Window(first, max(last, first + 1))
    return Window(0, 1)


_RATIOS: Final = ("device_ratio", "device_host_ratio", "low_precision_ratio", "host_overlap")


def diagnosis_document(
    reports: Sequence[TraceReport],
    across: Sequence[Finding] = (),
    unreadable: Sequence[Unreadable] = (),
    logged: Sequence[Block] = (),
    *,
    job: JobSteps | None = None,
    every: bool = True,
) -> Document:
    """Report one trace, or several ranks: an overview table, findings across ranks, then each rank.

    Args:
        across: findings about the ranks together.
        unreadable: files that could not be diagnosed.
        logged: what logs of collectives show beside the traces.
        job: what the steps of the ranks together wait for.
        every: show every rank, not only the one that can save most.

    Raises:
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("a document needs at least one report")
    without = section_if(unreadable_heading(unreadable), *_items(unreadable_sentences(unreadable)))
    if len(reports) == 1:
        name = file_name(reports[0].diagnosis.metadata.path) or "a trace"
        return Document(name, (*_rank(reports[0], name), *logged, *without))
    diagnoses = [report.diagnosis for report in reports]
    things = ranks_or_traces(diagnoses)
    holds = {} if job is None else dict(job.parts.group_by("rank").agg(pl.col("ns").sum()).iter_rows())
    best = max(reports, key=lambda each: (largest_saving(each), holds.get(rank_name(each.diagnosis), 0)))
    slowest = max(diagnoses, key=lambda diagnosis: diagnosis.step_ns)  # savings across ranks are shares of this step
    shared = [_finding(number, each, slowest) for number, each in enumerate(across, start=1)]
    title = f"{len(reports)} {things}"
    table = ranks_blocks(diagnoses, job)
    below = f"Below: {rank_name(best.diagnosis)}, which can save most. -v shows every {things.removesuffix('s')}."
    told = (
        *section_if(f"The {things} together", *shared),
        *job_section(job, {rank_name(each) for each in diagnoses if is_cut(each)}),
    )
    head = Section(title, table, style="summary")
    together = (*told, head) if len(reports) > MOST_RANKS else (head, *told)
    groups = [
        Group(name, tuple(_rank(report, name)), f"r{number}")
        for number, report in enumerate(reports)
        for name in (rank_name(report.diagnosis),)
        if every or report is best
    ]
    return Document(
        title,
        (
            *together,
            *without,
            *exchanges_blocks([report.rank.record for report in reports if report.rank is not None]),
            *logged,
            *texts("" if every else below),
            *groups,
        ),
    )


def largest_saving(report: TraceReport) -> int:
    """Of a step, by one finding, in nanoseconds."""
    return max((finding.saving_ns_per_step for finding in report.diagnosis.findings), default=0)


def _items(sentences: Sequence[str]) -> tuple[Items, ...]:
    return (Items(tuple(sentences)),) if sentences else ()


def _rank(report: TraceReport, name: str) -> Iterator[Block]:
    diagnosis = report.diagnosis
    yield Section(name, (*_summary(diagnosis),), style="summary", is_quiet=True)
    findings = tuple(_findings(diagnosis))
    yield Section("Findings", findings, is_quiet=True)
    if diagnosis.serving is not None:
        served = serving_glance(diagnosis.serving)
        yield Section(served.heading, (Figures(served.rows),))
    yield from _times(diagnosis)
    busy = _items(busy_sentences(diagnosis))
    yield from section_if("What the device worked on, and what it reached", *busy)
    graphs = _items(graph_sentences(diagnosis))
    compiled = _items(compile_sentences(diagnosis))
    yield from section_if("What torch.compile did", *compiled)
    yield from section_if("Kernels in graphs", *graphs)
    yield from _glances(diagnosis)
    if report.energy is not None:
        yield measured_section(report.energy)
    for things, frame, total in (
        ("kernels", diagnosis.kernels, diagnosis.kernel_count),
        ("operators", diagnosis.operators, diagnosis.operator_count),
    ):
        if not frame.is_empty():
            table = Table(frame, things, total, brief=top_columns(frame))
            title = f"{things.capitalize()}, the costliest first"
            yield Section(title, (table,))
    questions = [_question(each.question, each.why, each.rules, each.how) for each in diagnosis.not_answered]
    yield from section_if("What this trace cannot answer", *_items(questions))
    yield from section_if("Applied to the program", *_items(diagnosis.applied))
    yield from section_if("While reading the trace", *_items([warning_sentence(each) for each in diagnosis.warnings]))


def _question(question: str, why: str, rules: Sequence[str], how: str) -> str:
    about = f"Rules: {', '.join(rules)}." if rules else ""
    return " ".join(filter(None, (question, sentence(why), about, f"How: {how}")))


def _summary(diagnosis: Diagnosis) -> Iterator[Block]:
    yield Text(headline(diagnosis), "headline")
    yield from texts(*exceptional_sentences(diagnosis))


def _findings(diagnosis: Diagnosis) -> Iterator[Block]:
    if not diagnosis.findings:
        open_questions = diagnosis.not_answered and " Questions that the trace leaves open follow below."
        yield Text(f"{nothing_sentence(diagnosis)}{open_questions or ''}")
    for number, finding in enumerate(diagnosis.findings, start=1):
        yield _finding(number, finding, diagnosis)
    together = texts(together_sentence(diagnosis), style="together")
    yield from section_if("", *together, *texts(afterwards_sentence(diagnosis)), is_quiet=True)
    yield from texts(hidden_sentence(diagnosis), style="muted")
    yield from section_if(
        "Costly lines, of whose time the findings explain less than half", *_items(line_sentences(diagnosis))
    )


def _finding(number: int, finding: Finding, diagnosis: Diagnosis) -> FindingBlock:
    remedy = finding.remedy
    return FindingBlock(
        number,
        finding.rule,
        finding.title,
        finding.severity,
        saving_sentence(finding, diagnosis),
        finding.saving_share,
        basis_sentence(finding),
        tuple(map(_place, finding.where)),
        remedy.text,
        remedy.code,
        diff_text(remedy),
        trial(remedy, diagnosis.program),
    )


def _place(location: Location) -> Place:
    place = f"{location.file}:{location.line} {location.function}".rstrip()
    inside = ", module ".join(filter(None, (package_path("".join(location.inside[-1:])), location.module)))
    return Place(place, location.share, location.exact_line, location.call_path, inside)


def _times(diagnosis: Diagnosis) -> Iterator[Section]:
    """Why each device was idle, or without a device where the host's time went."""
    shown = shown_devices(diagnosis)
    devices, times, _ = diagnosis.shown
    if len(shown) < len(devices):
        yield Section(f"All {len(devices)} devices", (Table(device_table(diagnosis)),), only="text")
    for device in devices:
        idle = causes_of(times.filter(pl.col("device") == device.device))
        total = f"{duration(device.idle_ns)} of {duration(device.window_ns)} ({share(idle_share(device))})"
        causes = Causes(idle, device.window_ns, device.busy_ns, f"Device {device.device}")
        only: Where = "everywhere" if device.device in shown else "off text"
        yield Section(
            f"Why device {device.device} was idle: {total}",
            (causes,),
            only=only,
        )
    if not diagnosis.devices and diagnosis.host.height:
        causes = Causes(causes_of(diagnosis.host), int(diagnosis.host["ns"].sum()), 0, "Host time", "Of the time")
        title = "Where the host's time went"
        yield Section(title, (causes,))


def _glances(diagnosis: Diagnosis) -> Iterator[Section]:
    at_length = {glance.heading for glance in glances(diagnosis, shown_devices(diagnosis))}
    for glance in glances(diagnosis):
        only: Where = "everywhere" if glance.heading in at_length else "off text"
        yield Section(glance.heading, (Figures(glance.rows),), only=only)


def json_reports(
    reports: Sequence[TraceReport],
    across: Sequence[Finding] = (),
    unreadable: Sequence[Unreadable] = (),
    logged: dict[str, Any] | None = None,
    job: JobSteps | None = None,
) -> dict[str, Any]:
    """The report of one trace, or of several as {"schema", "stepscope", "ranks": [a report each], "across_ranks"}.

    Args:
        across: findings about the ranks together.
        unreadable: files that could not be diagnosed, as {"path", "reason"}.
        logged: what logs of collectives show beside the traces.
        job: what the steps of the ranks together wait for.
    """
    found = [json_report(report) for report in reports]
    beside = {} if logged is None else {"collectives": logged}
    if len(found) == 1:
        return {**found[0], "unreadable": unreadable, **beside}
    together = exchanges([report.rank.record for report in reports if report.rank is not None])
    return stamped(
        ranks=found,
        across_ranks=[finding_json(finding) for finding in across],
        job_steps=None if job is None else fields(job),
        exchanges=together.table,
        clocks=[{"rank": name, **clock._asdict()} for name, clock in together.clocks],
        unreadable=unreadable,
        **beside,
    )


def json_report(report: TraceReport) -> dict[str, Any]:
    """The report of one trace without its drawings."""
    diagnosis = report.diagnosis
    return stamped(
        headline=headline(diagnosis),
        trace=_trace_json(diagnosis),
        devices=diagnosis.devices,
        summary=_summary_json(diagnosis),
        steps={
            "source": diagnosis.step_source,
            "step_ns": diagnosis.step_ns,
            "unrecorded_ns": diagnosis.unrecorded_ns or None,
            "job_step_ns": diagnosis.job_step_ns or None,
            "count": diagnosis.step_count,
            "typical_ns": diagnosis.typical_step_ns,
            "mean_ns": diagnosis.mean_step_ns,
            "median_ns": diagnosis.median_step_ns,
            "set_apart": diagnosis.set_apart,
            "list": diagnosis.steps,
        },
        accounting=[_accounting(device, diagnosis) for device in diagnosis.in_steps],
        once=diagnosis.once,
        **fields(diagnosis, "idle", "host", "operators", "operator_count", "kernels", "kernel_count"),
        findings=[finding_json(finding) for finding in diagnosis.findings],
        findings_hidden=diagnosis.hidden,
        **fields(diagnosis, "together", "afterwards", "lines", "busy", "not_answered"),
        **({"program": diagnosis.program} if diagnosis.program else {}),
        **({} if diagnosis.contention is None else {"contention": _contention_json(diagnosis, diagnosis.contention)}),
        **({} if diagnosis.compiled is None else {"compile": diagnosis.compiled}),
        **({} if diagnosis.graphs is None else {"graphs": diagnosis.graphs}),
        **({} if diagnosis.serving is None else {"serving": diagnosis.serving}),
        **({"applied": diagnosis.applied} if diagnosis.applied else {}),
        **({} if report.energy is None else {"energy": trace_json(report.energy)}),
    )


def _contention_json(diagnosis: Diagnosis, contention: Contention) -> dict[str, Any]:
    return {
        **fields(contention),
        "calm_step_ns": diagnosis.calm_step_ns,
        "sentence": contention_sentence(contention),
    }


def _accounting(device: StepTime, diagnosis: Diagnosis) -> dict[str, Any]:
    idle = diagnosis.idle_in_steps.filter(pl.col("device") == device.device).drop("device")
    return {**fields(device, "device", "window", "window_ns", "busy_ns", "backlog_ns"), "idle": idle}


def _trace_json(diagnosis: Diagnosis) -> dict[str, Any]:
    metadata = diagnosis.metadata
    names = ("path", "format", "events", "rank", "world_size", "origin_unix_ns", "host", "window")
    given = metadata.evidence
    evidence = (
        {} if given is None else {"evidence": fields(given, *(each for each in fields(given) if each != "compiled"))}
    )
    return {**fields(metadata, *names), "warnings": diagnosis.warnings, **evidence}


def _summary_json(diagnosis: Diagnosis) -> dict[str, Any]:
    devices = [{**fields(use), **fields(use, *_RATIOS)} for use in diagnosis.device_uses]
    engines = {"engines": diagnosis.engine_uses} if diagnosis.engine_uses else {}
    return {"devices": devices, "host": diagnosis.host_use, **engines}


def finding_json(finding: Finding) -> dict[str, Any]:
    names = ("rule", "title", "severity", "saving_ns_per_step", "saving_share", "saving_basis", "saving_from")
    return fields(finding, *names, "confidence", "ends_run_in_ns", "evidence", "where", "remedy")
