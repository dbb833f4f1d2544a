"""What the page shows of a trace: documents by name, most of them the JSON of the command of that name."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from stepscope.commands.read import tables
from stepscope.commands.read.costs import costs_of, note
from stepscope.commands.shared.options import user_code_from
from stepscope.errors import StepscopeError, UsageError
from stepscope.report.document import compact_json
from stepscope.threads import cached_property
from stepscope.view.documents import NoDocument, Options, address, page_file, with_options

if TYPE_CHECKING:
    from stepscope.analysis.places import PlaceCosts
    from stepscope.analysis.telemetry import TelemetryPicture
    from stepscope.commands.read.tables import TableCommand
    from stepscope.compare import Comparison
    from stepscope.diagnosis.diffs import Diffs
    from stepscope.diagnosis.finding import Finding, Unreadable
    from stepscope.diagnosis.job import JobSteps
    from stepscope.diagnosis.rank_summary import RankSteps
    from stepscope.diagnosis.view import View
    from stepscope.report.diagnosis import TraceReport
    from stepscope.report.redaction import Redactor
    from stepscope.trace import Trace
    from stepscope.view.timeline import TimelineIndex
    from stepscope.whatif.answer import Tried

ROWS: Final = 20
"""Operators and kernels of a diagnosis, as in the other reports."""


class OpenTrace:
    """One trace, and what several documents need of it, each computed once.

    Args:
        arguments: with the options of reading and of the user's code.
        whole: the trace that the timeline shows, where the other documents are about a part of it.
        view: of the trace, if there is one already.

    Attributes:
        kept: what makers of single documents found, which serves again.
    """

    def __init__(
        self, arguments: argparse.Namespace, trace: Trace, whole: Trace | None = None, view: View | None = None
    ) -> None:
        self.arguments = arguments
        self.trace = trace
        self._whole, self._view = whole, view
        self.kept: dict[str, Any] = {}

    @cached_property
    def view(self) -> View:
        from stepscope.diagnosis.view import View

        return self._view or View(self.trace, None, user_code_from(self.arguments))

    @cached_property
    def timeline(self) -> TimelineIndex:
        from stepscope.view.timeline import TimelineIndex

        return TimelineIndex(self.view, self._whole)

    @cached_property
    def report(self) -> TraceReport:
        """The diagnosis, with all findings, however small."""
        from stepscope.report.diagnosis import trace_report, with_own_commands

        report = trace_report(self.view, rules=None, top=ROWS, minimum_share=0.0)
        report = replace(report, diagnosis=self.diffs.filled(report.diagnosis))
        return report if getattr(self.arguments, "redact", False) else with_own_commands(report)

    @cached_property
    def diffs(self) -> Diffs:
        from stepscope.commands.shared.reading import UserSources
        from stepscope.diagnosis.diffs import Diffs

        return Diffs(UserSources(Path.cwd()).read)

    @cached_property
    def tried(self) -> Tried:
        """What earlier questions replayed."""
        from stepscope.whatif.answer import Tried

        return Tried()

    @cached_property
    def costs(self) -> PlaceCosts:
        return costs_of(self.trace, self.view.user_code)


Make: TypeAlias = Callable[[OpenTrace, Options], Any]


@dataclass(frozen=True)
class Maker:
    """How a document is made.

    Attributes:
        options: those of its address that it heeds.
    """

    make: Make
    options: tuple[str, ...] = ()

    def __call__(self, opened: OpenTrace, options: Options) -> Any:
        return self.make(opened, options)


def number(options: Options, name: str, *, least: int = -(2**62), most: int = 2**62) -> int | None:
    """A whole number of the address; None where it has none.

    Raises:
        UsageError: it is something else.
    """
    text = options.get(name)
    if text is None:
        return None
    try:
        value = round(float(text))
    except (ValueError, OverflowError):
        value = most + 1
    if not least <= value <= most:
        raise UsageError(f"{name}={text[:50]} is not a number that can be")
    return value


def _table(command: TableCommand, *known: str) -> Maker:
    """The rows of a command's table; `known` are its options that an address may have, as group_by."""

    def make(opened: OpenTrace, options: Options) -> Any:
        given = [name for name in known if options.get(name)]
        words = [
            f"--{name.replace('_', '-')}" + ("" if options[name] == "yes" else f"={options[name]}") for name in given
        ]
        arguments = command.parsed(["-", *words])
        for name in ("user_code", "not_user_code"):
            setattr(arguments, name, getattr(opened.arguments, name))
        return command.table(opened.trace, arguments)[0]

    return Maker(make, known)


def _diagnosis(opened: OpenTrace, options: Options) -> Any:
    from stepscope.report.diagnosis import json_report

    return json_report(opened.report)


def _timeline(opened: OpenTrace, options: Options) -> Any:
    start, end = number(options, "start"), number(options, "end")
    width = number(options, "width", least=1, most=100_000)
    path = options.get("path", "") not in ("", "0", "false")
    return opened.timeline.window(start, end, width or 1000, path=path, mark=options.get("mark", ""))


def _perfetto(opened: OpenTrace, options: Options) -> Any:
    """The trace that is diagnosed, as `stepscope export` writes it for Perfetto's page."""
    from stepscope.report.exports.chrome import timeline
    from stepscope.whatif.critical_path import critical_path

    view = opened.view
    return msgspec.Raw(b"".join(timeline(view.trace, view.idle, critical_path(view.experiment))))


def _lines(opened: OpenTrace, options: Options) -> Any:
    from stepscope.analysis.places import line_table
    from stepscope.report.places import places_json

    return places_json(opened.costs, line_table(opened.trace, costs=opened.costs), "lines", top=0)


def _modules(opened: OpenTrace, options: Options) -> Any:
    from stepscope.analysis.places import module_table
    from stepscope.report.places import places_json

    depth = number(options, "depth", least=1)
    return places_json(opened.costs, module_table(opened.trace, costs=opened.costs, depth=depth), "modules", top=0)


def _source(opened: OpenTrace, options: Options) -> Any:
    """A file of the user's code that the lines name, as `stepscope lines TRACE FILE` shows it."""
    from stepscope.analysis.places import line_table
    from stepscope.commands.shared.reading import SOURCE_ENDINGS, source_lines
    from stepscope.trace.line_records import kept_source, split_lines

    file = options.get("file", "")
    if file not in line_table(opened.trace, costs=opened.costs)["file"].drop_nulls():
        raise NoDocument("the trace's lines are not of this file")
    if not file.endswith(SOURCE_ENDINGS):  # a trace can name any file of this machine
        raise NoDocument("only source files of Python are shown")
    found, kept = source_lines(file, file, None), kept_source(opened.trace.metadata.path, file)
    if kept is not None:
        lines = split_lines(kept)
        is_same = found is not None and found[1] == lines
        caveat = "" if is_same else "as it was recorded: the file has changed since, or is not here"
        return {"file": file, "text": "\n".join(lines), "note": caveat}
    if found is None:
        missing = f"{file} was not found here: start stepscope view where the file is"
        return {"file": file, "text": None, "note": missing}
    place, lines = found
    caveat = note(opened.trace.metadata.origin_unix_ns, place)
    return {"file": file, "text": "\n".join(lines), "note": caveat.strip(" ()")}


def _flame(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.drawings import flame_json

    return flame_json(opened.view)


def _links(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.drawings import links_json

    return links_json(opened.view)


def _slice(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.slices import slice_of

    return slice_of(opened.timeline, options.get("table", ""), number(options, "row") or 0)


def _stretch(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.slices import stretch

    first, last = opened.timeline.bounds
    start, end = number(options, "start"), number(options, "end")
    return stretch(opened.timeline, first if start is None else start, last if end is None else end)


def _places(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.slices import places_of

    return places_of(opened.timeline, options.get("text", ""), number(options, "near") or 0)


def _memory(opened: OpenTrace, options: Options) -> Any:
    from stepscope.analysis.memory import device_memories, memory_summary
    from stepscope.report.memory import memory_json

    return memory_json([memory_summary(opened.trace, memory) for memory in device_memories(opened.trace)])


def _memory_levels(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.drawings import memory_levels_json

    return memory_levels_json(opened.view, options.get("device"), options.get("by", "category"))


def _memory_alive(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.drawings import memory_alive_json

    return memory_alive_json(opened.view, options.get("device"), number(options, "time") or 0)


def _loading(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.drawings import loading_json

    return loading_json(opened.view)


def _roofline(opened: OpenTrace, options: Options) -> Any:
    from stepscope.view.drawings import roofline_json

    return roofline_json(opened.trace)


def _telemetry(opened: OpenTrace, options: Options) -> Any:
    from stepscope.report.diagnosis import telemetry_beside
    from stepscope.view.drawings import telemetry_json

    found = telemetry_beside(opened.trace)
    if found is None:
        raise NoDocument("no telemetry lies beside the trace: stepscope run --telemetry records some")
    return telemetry_json([(opened.trace.metadata.rank, found)])


MAKERS: Final[dict[str, Maker]] = {
    "diagnosis": Maker(_diagnosis),
    "timeline": Maker(_timeline, ("start", "end", "width", "path", "mark")),
    "slice": Maker(_slice, ("table", "row")),
    "stretch": Maker(_stretch, ("start", "end")),
    "places": Maker(_places, ("text", "near")),
    "links": Maker(_links),
    "perfetto": Maker(_perfetto),
    "steps": _table(tables.STEPS),
    "idle": _table(tables.IDLE, "pieces", "group_by"),
    "operators": _table(tables.OPERATORS, "group_by"),
    "kernels": _table(tables.KERNELS, "group_by", "launches"),
    "input": _table(tables.INPUT),
    "loading": Maker(_loading),
    "roofline": Maker(_roofline),
    "lines": Maker(_lines),
    "source": Maker(_source, ("file",)),
    "modules": Maker(_modules, ("depth",)),
    "memory": Maker(_memory),
    "memory-levels": Maker(_memory_levels, ("device", "by")),
    "memory-alive": Maker(_memory_alive, ("device", "time")),
    "flame": Maker(_flame),
    "telemetry": Maker(_telemetry),
}


def available(trace: Trace) -> list[str]:
    """Names of the documents that this trace has, told without computing them."""
    from stepscope.commands.read.export import has_slices

    has_work, has_memory = not trace.device_work.is_empty(), not trace.memory.is_empty()
    has = {
        **dict.fromkeys(("kernels", "roofline"), has_work),
        **dict.fromkeys(("memory", "memory-levels", "memory-alive"), has_memory),
        "telemetry": _has_telemetry(trace),
        "perfetto": has_slices(trace),
    }
    return [name for name in MAKERS if has.get(name, True)]


def _has_telemetry(trace: Trace) -> bool:
    from stepscope.trace.telemetry import telemetry_files

    place = Path(trace.metadata.path)
    return any(file != place for file in telemetry_files(place))


_IN_FILE: Final[tuple[tuple[str, Options], ...]] = (
    *((name, {}) for name in ("links", "steps", "idle", "lines", "operators", "kernels", "modules", "memory", "flame")),
    *((name, {}) for name in ("input", "loading", "roofline", "telemetry")),
)
"""What a report file has besides session, diagnosis and the timeline of a typical step: the most wanted first."""
FILE_BYTES: Final = 24 << 20
"""Of all documents of a report file; a trace gets half of what is left, and what does not fit is left out."""
_VIEWS: Final = {
    "timeline": ("The timeline", "view"),
    "links": ("What belongs together in several views", "view"),
    "steps": ("The table of steps", "steps"),
    "idle": ("The table of idle time", "idle"),
    "lines": ("The table of lines", "lines"),
    "operators": ("The table of operators", "operators"),
    "kernels": ("The table of kernels", "kernels"),
    "modules": ("The table of modules", "modules"),
    "memory": ("The summary of memory", "memory"),
    "flame": ("The flame graph", "view"),
    "input": ("The table of input functions", "input"),
    "loading": ("The picture of loading", "view"),
    "roofline": ("The roofline", "view"),
    "telemetry": ("Telemetry", "view"),
    "memory-levels": ("Memory over time", "view"),
    "memory-alive": ("What is alive at the peak of memory", "memory"),
    "source": ("Some source code", "lines"),
}
"""What each document of a report file shows, and the command that shows it as well."""
_STEP_WIDTH: Final = 4096
_MOST_SOURCES: Final = 20


@dataclass
class Room:
    """What a report file still has room for."""

    bytes: int = FILE_BYTES


@dataclass(frozen=True)
class PagePart:
    """What a report file has of one trace besides its diagnosis.

    Attributes:
        documents: JSON by the document's address.
        steps: the trace's row among the ranks.
        too_large: names of documents for which there was no room.
    """

    documents: Mapping[str, bytes]
    steps: RankSteps
    too_large: tuple[str, ...] = ()


def page_part(opened: OpenTrace, redactor: Redactor | None, room: Room) -> PagePart:
    """The part of a trace, in at most half of the room that is left; source code only without a redactor."""
    from stepscope.diagnosis.rank_summary import rank_steps

    found: dict[str, bytes] = {}
    too_large: dict[str, None] = {}
    left = room.bytes // 2
    for name, options in _wanted_in_file(opened, with_source=redactor is None):
        try:
            data = compact_json(_typical_step(opened) if name == "timeline" else MAKERS[name](opened, options))
        except StepscopeError:
            continue  # the page has no such view
        if redactor is not None:
            data = compact_json(redactor.redact(msgspec.json.decode(data)))
        if len(data) > left:
            too_large[name] = None
            continue
        left -= len(data)
        room.bytes -= len(data)
        found[address(name, options)] = data
    steps = rank_steps(opened.view)
    return PagePart(found, steps if redactor is None else redactor.redact(steps), tuple(too_large))


def _wanted_in_file(opened: OpenTrace, *, with_source: bool) -> Iterator[tuple[str, Options]]:
    from stepscope.view.drawings import groupings_of

    known = available(opened.trace)
    yield "timeline", {}
    yield from ((name, options) for name, options in _IN_FILE if name in known)
    if "memory-levels" in known:
        for memory in opened.view.memories:
            yield from (("memory-levels", {"device": memory.device, "by": by}) for by in groupings_of(memory))
            yield "memory-alive", {"device": memory.device, "time": str(memory.peak_ns)}
    if with_source:
        from stepscope.analysis.places import line_table

        files = line_table(opened.trace, costs=opened.costs)["file"].drop_nulls().unique(maintain_order=True)
        yield from (("source", {"file": file}) for file in files.head(_MOST_SOURCES) if _is_below_here(file))


def _is_below_here(file: str) -> bool:
    """Whether a file is in the folder that the command was started in: a report to share has no other's source."""
    try:
        return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(os.curdir))
    except ValueError:  # an invalid name, such as with a null character
        return False


def _typical_step(opened: OpenTrace, step_ns: float | None = None) -> Any:
    """The timeline of the step nearest to the typical one, slice by slice where they are not too many.

    Args:
        step_ns: of the typical step, if not that of the diagnosis.
    """
    steps = opened.view.steps
    steps = steps.filter("complete") if steps["complete"].any() else steps
    if steps.is_empty():
        return opened.timeline.window(width=_STEP_WIDTH)
    nearest = (steps["duration_ns"] - (opened.view.step_ns if step_ns is None else step_ns)).abs().arg_min()
    start, duration = steps.select("start_ns", "duration_ns").row(nearest)
    return opened.timeline.window(start, start + duration, _STEP_WIDTH)


def comparison_file(
    arguments: argparse.Namespace, comparisons: Sequence[Comparison], redactor: Redactor | None
) -> bytes:
    """The page of a comparison as one file: what differs, and the typical step of each side."""
    from stepscope.report.comparison import comparison_json
    from stepscope.report.format import count, file_name

    found: dict[str, bytes] = {}
    for number, each in enumerate(comparisons):
        found[address("compare", {"with": str(number)} if number else {})] = compact_json(comparison_json([each]))
    sides = [comparisons[0].before, *(each.after for each in comparisons)]
    for number, side in enumerate(sides):
        opened = OpenTrace(arguments, side.trace)
        drawn = {"timeline": _typical_step(opened, side.step_ns), "steps": MAKERS["steps"](opened, {})}
        for name, document in drawn.items():
            data = compact_json(document)
            if redactor is not None:
                data = compact_json(redactor.redact(msgspec.json.decode(data)))
            found[address(name, {"other": str(number - 1)} if number else {})] = data
    names = [file_name(side.name) or "a trace" for side in sides]
    title = f"{names[0]} and {names[1] if len(names) == 2 else f'{count(len(names) - 1)} others'}"
    return page_file(title, {"session": compact_json(session_of(title, "trace", ["compare"], names[1:])), **found})


def telemetry_file(title: str, pictures: Sequence[tuple[int | None, TelemetryPicture]]) -> bytes:
    """The page of telemetry without a trace, as one file."""
    from stepscope.view.drawings import telemetry_json

    session = session_of(title, "trace", ["telemetry"])
    return page_file(title, {"session": compact_json(session), "telemetry": compact_json(telemetry_json(pictures))})


def session_of(
    title: str, kind: str, documents: Sequence[str], others: Sequence[str] = (), left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """The document that the page begins with.

    Args:
        kind: "trace", "ranks" or "runs".
        others: names of what the trace can be compared with.
        left_out: sentences about what a report file does not have.
    """
    from stepscope import __version__
    from stepscope.report.palette import cause_palette, kind_palette, series_palette

    return {
        "title": title,
        "kind": kind,
        "version": __version__,
        "documents": list(documents),
        "others": list(others),
        "left_out": list(left_out),
        "causes": cause_palette(),
        "kinds": kind_palette(),
        "series": series_palette(),
    }


def report_file(
    reports: Sequence[TraceReport],
    across: Sequence[Finding],
    unreadable: Sequence[Unreadable],
    job: JobSteps | None = None,
) -> bytes:
    """The page of these reports as one file; the first trace's views come first.

    Args:
        across: findings about the ranks together.
        unreadable: files that could not be diagnosed.
        job: what the steps of the ranks together wait for.
    """
    from stepscope.report.diagnosis import json_report
    from stepscope.report.format import count, file_name

    found: dict[str, bytes] = {}
    for number, report in enumerate(reports):
        metadata = report.diagnosis.metadata
        chosen = {"rank": metadata.path if metadata.rank is None else str(metadata.rank)}
        own = {"diagnosis": compact_json(json_report(report)), **report.page.documents}
        if number == 0:
            found |= own
        if len(reports) > 1:
            found |= {with_options(name, chosen): data for name, data in own.items()}
    if len(reports) > 1:
        found |= _ranks_in_file(reports, across, [each.reason for each in unreadable], job)
    filled = [report for report in reports if report.page.documents]
    bare = len(reports) - len(filled)
    left_out = [f"Of {count(bare)} of {count(len(reports))} traces this file has the diagnosis only."] if bare else []
    left_out += _too_large(filled, len(reports))
    left_out += [f"Not in this report: {each.reason}." for each in unreadable]
    alone = len(reports) == 1
    title = file_name(reports[0].diagnosis.metadata.path) or "a trace" if alone else f"{count(len(reports))} traces"
    names = list(dict.fromkeys(name.partition("?")[0] for name in found))
    session = compact_json(session_of(title, "trace" if alone else "ranks", names, left_out=left_out))
    sessions = dict.fromkeys(("session", *_sessions_of(found)), session)
    return page_file(title, {**sessions, **found})


def _too_large(reports: Sequence[TraceReport], total: int) -> Iterator[str]:
    """What did not fit into the file, and which command shows it."""
    from stepscope.report.format import count, size

    for name, (what, command) in _VIEWS.items():
        without = [report for report in reports if name in report.page.too_large]
        if without:
            of = f" of {count(len(without))} of {count(total)} traces" if total > 1 else ""
            path = shlex.quote(without[0].diagnosis.metadata.path)
            limit = size(FILE_BYTES)
            yield f"{what}{of} did not fit into this file of at most {limit}: stepscope {command} {path} shows it."


def _sessions_of(found: Mapping[str, bytes]) -> Iterator[str]:
    """Addresses of the session with each rank."""
    for name in found:
        if name.startswith("diagnosis?"):
            yield name.replace("diagnosis?", "session?", 1)


def _ranks_in_file(
    reports: Sequence[TraceReport], across: Sequence[Finding], unreadable: Sequence[str], job: JobSteps | None
) -> dict[str, bytes]:
    from stepscope.analysis.matching import matched_collectives
    from stepscope.diagnosis.rank_groups import exchanges
    from stepscope.report.diagnosis import finding_json, largest_saving
    from stepscope.report.ranks import job_sentences
    from stepscope.view.drawings import ranks_json

    steps = [report.page.steps for report in reports]
    records = [report.rank.record for report in reports if report.rank is not None]
    records = records if len(records) == len(reports) else []
    late = matched_collectives([record.collectives for record in records])
    together, sentences = exchanges(records, late), [] if job is None else list(job_sentences(job))
    saves = None if job is None else [largest_saving(report) for report in reports]

    def document(cause: str | None) -> dict[str, Any]:
        shown = ranks_json(steps, cause, late, sentences, unreadable, together=together)
        return {**shown, "findings": [finding_json(finding) for finding in across], "saves_ns": saves}

    whole = document(None)
    return {"ranks": compact_json(whole)} | {
        address("ranks", {"cause": cause}): compact_json(document(cause)) for cause in whole["causes"]
    }
