"""Everything a report says about one trace, and the document of a diagnosis: of one trace, or of the ranks of a job."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.analysis.telemetry import TelemetryPicture
from stepscope.diagnosis.diagnosis import Diagnosis, StepTime, Unreadable
from stepscope.diagnosis.exchanges import Exchanges, exchanges
from stepscope.diagnosis.finding import Finding, Location
from stepscope.diagnosis.job import JobSteps
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
from stepscope.report.format import count, duration, file_name, printable, share, warning_sentence
from stepscope.report.places import glances, serving_glance
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
    rank_table,
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
from stepscope.whatif.job import BEGIN, TRANSFER, Saved

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


_ALIKE: Final = 0.0005
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
    table = _rank_table(diagnoses, job)
    below = f"Below: {rank_name(best.diagnosis)}, which can save most. -v shows every {things.removesuffix('s')}."
    told = (
        *section_if(f"The {things} together", *shared),
        *job_section(job, {rank_name(each) for each in diagnoses if is_cut(each)}),
    )
    head = Section(title, table, style="summary")
    together = (*told, head) if len(reports) > _MOST_RANKS else (head, *told)
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
            *_exchanges(reports),
            *logged,
            *texts("" if every else below),
            *groups,
        ),
    )


_MOST_RANKS: Final = 16
"""So many ranks each have a row; of more, those that are late or differ most from the others."""
_SHOWN_RANKS: Final = 12


def _rank_table(diagnoses: Sequence[Diagnosis], job: JobSteps | None) -> tuple[Block, ...]:
    """A row for each rank; of many, first those that are late or not whole, then those that differ."""
    apart = () if job is None else job.apart
    table = rank_table(diagnoses, apart)
    if len(diagnoses) <= _MOST_RANKS:
        return (Table(table),)
    late = set() if job is None else set(job.holders["rank"].drop_nulls())
    first = [rank_name(each) in late or rank_name(each) in apart or is_cut(each) for each in diagnoses]
    shares = [pl.col(name) for name, kind in table.schema.items() if kind == pl.Float64]
    steps = pl.col("step_ns") / pl.col("step_ns").median()
    apart_by = pl.sum_horizontal((each - each.median()).abs().fill_null(0) for each in (steps, *shares))
    order = table.with_columns(pl.Series("first", first), apart=apart_by.round(3))
    order = order.sort("first", "apart", descending=True, maintain_order=True)
    shown = order.head(max(min(sum(first), _MOST_RANKS) + 1, _SHOWN_RANKS)).drop("first", "apart")
    rest = len(diagnoses) - shown.height
    return (Table(shown), Text(f"{count(rest)} more ranks differ less from the middle one."))


def _exchanges(reports: Sequence[TraceReport]) -> Iterator[Block]:
    records = [report.rank.record for report in reports if report.rank is not None]
    if len(records) < 2:
        return
    found = exchanges(records)
    if not found.count:
        yield Text("No exchange was recorded on all its ranks, so that nothing tells how their clocks compare.")
        return
    title = "What ranks exchange: waiting for the last one, and the transfer after it"
    yield Section(title, (_told_table(found.table.drop(_SPEED)), Text(clock_sentence(found))))
    title = "How fast the transfers are, and what of the exchanges no computation overlaps"
    yield Section(title, (_told_table(found.table.select("kind", "bytes", "ranks", *_SPEED)),))


_SPEED: Final = ("algorithm", "algorithm_gb_per_s", "bus_gb_per_s", "link_share", "exposed_ns", "overlapped_share",
                 "most_exposed")  # fmt: skip


def _told_table(frame: pl.DataFrame) -> Table:
    """Without columns that tell nothing."""
    empty = [name for name in frame.columns if not frame[name].cast(pl.String).replace("", None).count()]
    shown = frame.drop(empty).rename(lambda name: name.replace("_gb_per_s", " GB/s"))
    return Table(shown, "exchanges", shown.height, brief=tuple(shown.columns))


_MOST_PARTS: Final = 6


def job_section(job: JobSteps | None, cut: Collection[str] = ()) -> tuple[Section, ...]:
    """What the job's steps wait for; without a job nothing.

    Args:
        cut: ranks whose files are cut off.
    """
    if job is None:
        return ()
    of_all = job.parts.with_columns(rank=pl.when(pl.col("cause") != TRANSFER).then("rank").otherwise(pl.lit("all")))
    parts = Table(of_all.with_columns(_meaning(job.parts)), "parts", brief=(*job.parts.columns, "what_it_means"))
    if job.parts.height > _MOST_PARTS:
        parts = replace(parts, frame=parts.frame.head(_MOST_PARTS), total=job.parts.height)
    title = "What a step of the job waits for: the critical path across the ranks, per step"
    return (Section(title, (*texts(*job_sentences(job, cut)), parts)),)


def _meaning(parts: pl.DataFrame) -> pl.Series:
    return pl.Series("what_it_means", [_ON_PATH.get(cause) or CAUSES.get(cause, "") for cause in parts["cause"]])


_ON_PATH: Final = {
    TRANSFER: "data moved after the last rank had come",
    BEGIN: "its recorded steps had not begun",
    "busy": "its device worked, or its host beside a collective",
    "compute": "operators computed",
}


def job_sentences(job: JobSteps, cut: Collection[str] = ()) -> Iterator[str]:
    """Who holds the job's steps up, and how far that can be trusted.

    Args:
        cut: names of ranks whose files are cut off.
    """
    off = job.error_share
    gives = "the recorded times" if off < _ALIKE else f"a step that is off by {share(off)}"
    yield (
        f"A step takes {duration(job.step_ns)}, that of the rank whose step takes longest ({job.last}). The replay of "
        f"{count(job.ranks)} ranks without a change gives {gives}."
    )
    steps = job.holders["rank"].null_count()
    if steps:
        where = _of_steps(job, steps).capitalize()
        yield f"{where} no rank comes noticeably later than the others."
    holders = job.holders.drop_nulls("rank").group_by("rank").agg(steps=pl.len())
    if holders.height:
        rank, steps = holders.sort("steps", "rank", descending=[True, False]).row(0)
        most = job.holders.filter(pl.col("rank") == rank)["cause"].value_counts().sort("count", "cause").row(-1)[0]
        what = _ON_PATH.get(most) or CAUSES.get(most, most)
        yield f"The others wait for {rank} {_of_steps(job, steps)}, mostly while {what}."
    if job.missing:
        yield missing_sentence(job.missing, names=job.absent)
    if ended := [name for name in job.apart if name in cut]:
        whose, are = ("trace", "is") if len(ended) == 1 else ("traces", "are")
        yield f"The {whose} of {_named(ended)} {are} cut off: the other ranks are compared without."
    if apart := [name for name in job.apart if name not in cut]:
        yield f"Not in the replay, because their collectives or some of their steps were not recorded: {_named(apart)}."
    if job.missing and job.open_ns >= _NOTICEABLE * job.step_ns:
        some = [*job.absent, *job.apart]
        shorter = job.open_ns - job.least_open_ns >= _NOTICEABLE * job.step_ns
        shortest = f" ({duration(job.least_open_ns)} if all were as short as the shortest)" if shorter else ""
        which = _named(some) if len(some) == job.missing else "a rank that is missing"
        yield (
            f"The others may be waiting for {which if len(some) < 2 else f'any of {which}'}: after the last rank here "
            f"has come, exchanges with missing ranks go on for {duration(job.open_ns)} a step{shortest}. No saving is "
            "promised of this time."
        )


_NOTICEABLE: Final = 0.01


def _of_steps(job: JobSteps, steps: int) -> str:
    return f"in {count(steps)} of {count(job.holders.height)} steps" if job.holders.height > 1 else "in the step"


def _named(names: Sequence[str]) -> str:
    more = f" and {count(len(names) - _MOST_PARTS)} more" if len(names) > _MOST_PARTS else ""
    return f"{', '.join(names[:_MOST_PARTS])}{more}"


def missing_sentence(missing: int, where: str = "", names: Sequence[str] = ()) -> str:
    """What ranks that are not here mean for the answer.

    Args:
        names: of those that were not recorded at all, where known; the others were not recorded whole.
    """
    which = f"One rank of the job{where} is" if missing == 1 else f"{count(missing)} ranks of the job{where} are"
    if names and len(names) <= missing:
        which = (
            f"{which} not here ({_named(names)})"
            if len(names) == missing
            else f"{which} not here ({_named(names)}), or not whole"
        )
    else:
        which = f"{which} not here, or not whole"
    return f"{which}: waits for {'it' if missing == 1 else 'them'} count as transfer."


def clock_sentence(found: Exchanges) -> str:
    """How the ranks' clocks were aligned, and the error that remains."""
    error, name = max((clock.error_ns, name) for name, clock in found.clocks)
    drift, whose = max((abs(clock.drift), name) for name, clock in found.clocks)
    drifts = f" That of {whose} drifts by {drift * 1e6:,.1f} us in a second, which is taken out." if drift else ""
    rows = found.table.iter_rows(named=True)
    wait = max((row["wait_ns"] / max(row["per_step"], 1) for row in rows), default=0.0)
    doubt = " That is no less than ranks wait in an exchange on average: these waits are not certain." if error else ""
    return (
        f"Clocks are aligned by the ends of {count(found.count)} exchanges; what remains is at most "
        f"{duration(error)} ({name}, median).{doubt if error >= wait else ''}{drifts}"
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
