"""What the page shows of a trace: documents by name, most of them the JSON of the command of that name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stepscope.commands.read import tables
from stepscope.commands.read.costs import costs_of, note
from stepscope.commands.shared.options import user_code_from
from stepscope.errors import UsageError
from stepscope.view.documents import NoDocument, Options

if TYPE_CHECKING:
    from stepscope.analysis.places import PlaceCosts
    from stepscope.commands.read.tables import TableCommand
    from stepscope.diagnosis.diffs import Diffs
    from stepscope.diagnosis.view import View
    from stepscope.report.diagnosis import TraceReport
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
    """

    def __init__(self, arguments: argparse.Namespace, trace: Trace, whole: Trace | None = None) -> None:
        self.arguments = arguments
        self.trace = trace
        self._whole = whole

    @cached_property
    def view(self) -> View:
        from stepscope.diagnosis.view import View

        return View(self.trace, None, user_code_from(self.arguments))

    @cached_property
    def timeline(self) -> TimelineIndex:
        from stepscope.view.timeline import TimelineIndex

        return TimelineIndex(self.view, self._whole)

    @cached_property
    def report(self) -> TraceReport:
        """The diagnosis, with all findings, however small."""
        from stepscope.report.diagnosis import trace_report

        report = trace_report(self.view, rules=None, top=ROWS, minimum_share=0.0, is_drawn=False)
        return replace(report, diagnosis=self.diffs.filled(report.diagnosis))

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


Maker: TypeAlias = Callable[[OpenTrace, Options], Any]


def number(options: Options, name: str, *, least: int = -(2**63), most: int = 2**63 - 1) -> int | None:
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

    return make


def _diagnosis(opened: OpenTrace, options: Options) -> Any:
    from stepscope.report.diagnosis import json_report

    return json_report(opened.report)


def _timeline(opened: OpenTrace, options: Options) -> Any:
    start, end = number(options, "start"), number(options, "end")
    width = number(options, "width", least=1, most=100_000)
    path = options.get("path", "") not in ("", "0", "false")
    return opened.timeline.window(start, end, width or 1000, path=path, mark=options.get("mark", ""))


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
    from stepscope.commands.shared.reading import source_lines

    file = options.get("file", "")
    if file not in line_table(opened.trace, costs=opened.costs)["file"].drop_nulls():
        raise NoDocument("the trace's lines are not of this file")
    found = source_lines(file, file, None)
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
    from stepscope.view.links import links_json

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
    "diagnosis": _diagnosis,
    "timeline": _timeline,
    "slice": _slice,
    "stretch": _stretch,
    "places": _places,
    "links": _links,
    "steps": _table(tables.STEPS),
    "idle": _table(tables.IDLE, "pieces", "group_by"),
    "operators": _table(tables.OPERATORS, "group_by"),
    "kernels": _table(tables.KERNELS, "group_by", "launches"),
    "input": _table(tables.INPUT),
    "loading": _loading,
    "roofline": _roofline,
    "lines": _lines,
    "source": _source,
    "modules": _modules,
    "memory": _memory,
    "memory-levels": _memory_levels,
    "memory-alive": _memory_alive,
    "flame": _flame,
    "telemetry": _telemetry,
}


def available(trace: Trace) -> list[str]:
    """Names of the documents that this trace has, told without computing them."""
    has_work, has_memory = not trace.device_work.is_empty(), not trace.memory.is_empty()
    has = {
        **dict.fromkeys(("kernels", "roofline"), has_work),
        **dict.fromkeys(("memory", "memory-levels", "memory-alive"), has_memory),
        "telemetry": _has_telemetry(trace),
    }
    return [name for name in MAKERS if has.get(name, True)]


def _has_telemetry(trace: Trace) -> bool:
    from stepscope.trace.telemetry import telemetry_files

    place = Path(trace.metadata.path)
    return any(file != place for file in telemetry_files(place))
