"""What lines, modules, memory and energy cost: `stepscope lines`, `modules`, `memory` and `energy`."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.read.tables import add_table_options, write_table
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_memory_limit_option,
    add_raw_option,
    add_reading_options,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_trace,
    add_user_code_options,
    number,
    user_code_from,
    whole,
)
from stepscope.commands.shared.reading import open_from, readable_traces, redacted
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.analysis.memory import DeviceMemory
    from stepscope.analysis.places import PlaceCosts
    from stepscope.diagnosis.finding import Unreadable
    from stepscope.diagnosis.view import View
    from stepscope.predict.cost.energy_parts import EnergyAnswer, SampledEnergy, TraceEnergy
    from stepscope.report.document import Document
    from stepscope.trace import Trace
    from stepscope.trace.line_records import MovedLines
    from stepscope.trace.naming import UserCode

_TEXT_ROWS: Final = 20


def _add_place_options(parser: CommandParser) -> None:
    group = parser.add_argument_group("the table")
    add_top_option(group, f"rows, 0 for all (text: {_TEXT_ROWS}, else all)")
    add_report_options(
        group.add_mutually_exclusive_group(),
        json="sums over the steps, for programs; - for the terminal",
        csv="the same as a table; - for the terminal",
    )
    add_raw_option(group)
    add_redact_option(group)
    add_user_code_options(parser)
    add_reading_options(parser)


def _costs(arguments: argparse.Namespace) -> PlaceCosts:
    return costs_of(open_from(arguments, arguments.trace), user_code_from(arguments))


def costs_of(trace: Trace, user_code: UserCode) -> PlaceCosts:
    """What lines and modules cost."""
    from stepscope.analysis.attribution import attribute
    from stepscope.analysis.places import place_costs

    return place_costs(trace, attribution=attribute(trace, user_code=user_code))


def _write(costs: PlaceCosts, table: pl.DataFrame, things: str, arguments: argparse.Namespace) -> None:
    from stepscope.report.places import places_document, places_json
    from stepscope.report.tables import table_bytes

    table = redacted(arguments, table)
    top = arguments.top or 0

    def report() -> dict[str, Any]:
        content = places_json(costs, table, things, top=top)
        if arguments.redact:
            content["trace"] = os.path.basename(content["trace"])
        return content

    def document() -> Document:
        rows = _TEXT_ROWS if arguments.top is None else top
        return places_document(costs, _with_short_files(table), things, top=rows)

    def csv() -> bytes:
        return table_bytes(table.head(top) if top else table, "csv", raw=arguments.raw)

    is_printed = not (arguments.json or arguments.csv)
    output.write_reports(arguments, document, is_printed=is_printed, json=report, csv=csv)


def _with_short_files(table: pl.DataFrame) -> pl.DataFrame:
    """Make paths below the working directory relative to it."""
    import polars as pl

    here = os.path.join(os.getcwd(), "")
    return table.with_columns(pl.col("file").str.strip_prefix(here)) if "file" in table.columns else table


def _prepare_modules(parser: CommandParser) -> None:
    add_trace(parser)
    parser.add_argument(
        "--depth", metavar="N", type=whole(1, 999_999), help="levels of the tree to show (default: all)"
    )
    _add_place_options(parser)


def _run_modules(arguments: argparse.Namespace) -> int:
    from stepscope.analysis.places import module_table

    costs = _costs(arguments)
    table = module_table(costs.attribution.trace, costs=costs, depth=arguments.depth)
    _write(costs, table, "modules", arguments)
    return 0


def _prepare_lines(parser: CommandParser) -> None:
    parser.late = "file"
    add_trace(parser)
    parser.add_argument("file", metavar="FILE", nargs="?", help="show this source file, line by line")
    source = parser.add_argument_group("the source file")
    source.add_argument("--source-root", metavar="DIR", help="look for the file below DIR, by the end of its path")
    source.add_argument("--all", action="store_true", help="the whole file, not only the lines around costs")
    _add_place_options(parser)


def _run_lines(arguments: argparse.Namespace) -> int:
    from stepscope.analysis.places import line_table

    if arguments.file == "":
        raise UsageError("the name of the source file is empty")
    if arguments.file is None and (arguments.source_root is not None or arguments.all):
        raise UsageError("--source-root and --all need a FILE: stepscope lines TRACE FILE")
    if arguments.file is None and arguments.trace.endswith(".py"):  # a file of the latest run
        arguments.trace, arguments.file = "latest", arguments.trace
    costs = _costs(arguments)
    table = line_table(costs.attribution.trace, costs=costs)
    if arguments.file is not None:
        table, recorded = _of_file(table, arguments.file)
        if not arguments.json and not arguments.csv:
            _print_source(costs, table, recorded, arguments)
            return 0
    _write(costs, table, "lines", arguments)
    return 0


def _of_file(table: pl.DataFrame, wanted: str) -> tuple[pl.DataFrame, str]:
    import polars as pl

    from stepscope.commands.shared.reading import recorded_file

    recorded = recorded_file(wanted, table["file"].drop_nulls().unique(maintain_order=True).to_list())
    return table.filter(pl.col("file") == recorded), recorded


def _print_source(costs: PlaceCosts, table: pl.DataFrame, recorded: str, arguments: argparse.Namespace) -> None:
    from stepscope.commands.shared.reading import source_lines
    from stepscope.report.format import printable
    from stepscope.report.places import source_view
    from stepscope.trace.line_records import MovedLines, kept_source, moved_lines, split_lines

    place, lines = source_lines(recorded, arguments.file, arguments.source_root) or (None, None)
    metadata = costs.attribution.trace.metadata
    kept = kept_source(metadata.path, recorded)
    before = None if kept is None else split_lines(kept)
    shown = place
    if place is None or arguments.redact:
        shown = redacted(arguments, _with_short_files(table))["file"][0]
    moved = MovedLines({})
    caveat = note(metadata.origin_unix_ns, place)
    if lines is None and before is not None:
        lines, caveat = before, " (as it was recorded: the file was not found here)"
    elif lines is not None and before is not None:
        moved = moved_lines(before, lines)
        table, caveat = _moved(table, moved)
    view = source_view(costs, table, lines, every=arguments.all, width=output.width(), changed=moved.changed)
    output.print_text("\n".join([printable(shown) + caveat, *view]) + "\n")


def _moved(table: pl.DataFrame, moved: MovedLines) -> tuple[pl.DataFrame, str]:
    """The rows of lines that are still in the file, by their numbers now; and what to say above."""
    import polars as pl

    from stepscope.report.format import count, share

    now = table.with_columns(line=pl.col("line").replace_strict(moved.now, default=None, return_dtype=pl.Int32))
    gone = now.filter(pl.col("line").is_null())
    now = now.drop_nulls("line")
    if gone.height:
        lines = "1 line" if gone.height == 1 else f"{count(gone.height)} lines"
        part = share(float(gone["share"].sum()))
        return now, f" (changed since the trace was recorded: {lines} with {part} are gone)"
    is_same = not moved.changed and now["line"].equals(table["line"])
    return now, "" if is_same else " (changed since the trace was recorded: lines are where they are now)"


def note(recorded_unix_ns: int | None, place: str | None) -> str:
    """Caveats about a file whose recorded text is unknown, printed above it."""
    if place is None:
        return " (the file was not found: --source-root DIR says where it is)"
    if recorded_unix_ns is not None and os.stat(place).st_mtime_ns > recorded_unix_ns:
        return " (changed since the trace was recorded: lines may have moved)"
    return ""


MODULES: Final = Command(
    "modules",
    "What each module of the network costs, as a tree: time forward and backward, calls and memory.",
    _prepare_modules,
    _run_modules,
    """\
examples:
  stepscope modules trace.json
  stepscope modules trace.json --depth 2 --top 0
  stepscope modules trace.json --csv modules.csv
""",
    only_reads=True,
)
LINES: Final = Command(
    "lines",
    "What each line of your code costs, forward and backward: time, idle time, calls and memory.",
    _prepare_lines,
    _run_lines,
    """\
examples:
  stepscope lines trace.json                        the costliest lines of all files
  stepscope lines trace.json model.py               the file, with what each line costs beside it
  stepscope lines trace.json model.py --source-root ~/job    where the file is here, if not where it was recorded
  stepscope lines trace.json --json - | jq '.lines[0]'
""",
    only_reads=True,
)


_ROWS: Final = 8
_factor = number("is not a factor: write 0.5 or 2", least=1e-6, most=1e6)


def _prepare_memory_parser(parser: CommandParser) -> None:
    add_trace(parser, "a trace file, a memory snapshot, a run's name, or - for standard input")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="only this device: cpu, or a number (--by and --over-time: the largest)",
    )
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument(
        "--by",
        choices=("category", "line", "module", "operator", "region"),
        help="a table instead: what was allocated, and alive at the peak",
    )
    detail.add_argument("--over-time", action="store_true", help="a table instead: the level after every event")
    detail.add_argument(
        "--fit", action="store_true", help="replay PyTorch's allocator with less: would the program fit, and with what?"
    )
    changed = parser.add_argument_group("what --fit replays first, all at once")
    changed.add_argument("--batch-factor", metavar="X", type=_factor, help="a batch X times as large, such as 0.5")
    changed.add_argument(
        "--checkpoint",
        metavar="MODULE",
        action="append",
        help="activation checkpointing of these modules: a path of stepscope modules, or its end, such as 'layers.*'",
    )
    changed.add_argument("--expandable-segments", action="store_true", help="the allocator's expandable_segments:True")
    add_memory_limit_option(changed)
    add_table_options(parser)
    add_reading_options(parser)


def _run_memory(arguments: argparse.Namespace) -> int:
    import polars as pl

    from stepscope.analysis.memory import allocation_table, device_memories

    if not arguments.fit:
        for option in ("batch_factor", "checkpoint", "expandable_segments", "memory_limit"):
            if getattr(arguments, option):
                raise UsageError(f"--{option.replace('_', '-')} needs --fit, which replays the allocator")
    trace = open_from(arguments, arguments.trace)
    memories = _chosen(device_memories(trace), arguments.device)
    if arguments.fit:
        _write_fit(trace, memories, arguments)
        return 0
    if not memories and arguments.format in (None, "table") and arguments.output == "-":
        output.print_text(_why_nothing(trace))
    elif not memories and (arguments.by or arguments.over_time):
        write_table(pl.DataFrame(), arguments, "rows")
    elif arguments.by:
        write_table(allocation_table(memories[0], arguments.by), arguments, "rows")
    elif arguments.over_time:
        write_table(memories[0].levels, arguments, "events")
    else:
        _write_screen(trace, memories, arguments)
    return 0


def _why_nothing(trace: Trace) -> str:
    from stepscope.diagnosis.parts import PARTS

    if trace.memory.is_empty():
        return f"No allocations were recorded: {PARTS['memory'].how_for(trace.metadata.format)}.\n"
    return "Nothing was allocated in this trace.\n"


def _chosen(memories: tuple[DeviceMemory, ...], device: str | None) -> tuple[DeviceMemory, ...]:
    if device is None:
        return memories
    found = tuple(memory for memory in memories if memory.device == device)
    if not found and memories:
        known = ", ".join(memory.device for memory in memories)
        raise UsageError(f"this trace has no memory events of device {device!r}, only of {known}")
    return found


def _refuse_table_options(arguments: argparse.Namespace) -> None:
    given = "--sort" if arguments.sort is not None else None
    if arguments.format in ("csv", "parquet"):
        given = given or f"--format {arguments.format}"
    if given:
        raise UsageError(f"{given} needs --by or --over-time, which print one table")


def _write_screen(trace: Trace, memories: tuple[DeviceMemory, ...], arguments: argparse.Namespace) -> None:
    from stepscope.analysis.memory import memory_summary
    from stepscope.report.memory import memory_document, memory_json

    _refuse_table_options(arguments)
    summaries = [redacted(arguments, memory_summary(trace, memory)) for memory in memories]
    top = _ROWS if arguments.top is None else arguments.top
    output.write_document(arguments, lambda: memory_document(summaries), lambda: memory_json(summaries), top=top)


def _write_fit(trace: Trace, memories: tuple[DeviceMemory, ...], arguments: argparse.Namespace) -> None:
    from stepscope.analysis.allocator import Change, fit_table, modules_like, usual_changes
    from stepscope.analysis.places import module_table, place_costs
    from stepscope.report.memory import fit_document, fit_json

    _refuse_table_options(arguments)
    memories = tuple(memory for memory in memories if memory.device != "cpu" and memory.blocks.height)
    if not memories:
        raise UsageError(
            "--fit replays the allocations of an accelerator, with their addresses, and this trace has none: record "
            "with profile_memory=True, or take a snapshot (docs/memory.md)"
        )
    costs = place_costs(trace)
    modules = module_table(trace, costs=costs).drop_nulls("module")
    forward = {name: ns // max(costs.steps, 1) for name, ns in modules.select("module", "forward_ns").iter_rows()}
    limits = [arguments.memory_limit or memory.capacity_bytes for memory in memories]
    tables = []
    for memory, limit in zip(memories, limits, strict=True):
        checkpointed = modules_like(memory, arguments.checkpoint) if arguments.checkpoint else ()
        asked = Change(arguments.batch_factor or 1.0, checkpointed, arguments.expandable_segments)
        changes = [change for change in usual_changes(memory) if change != asked]
        tables.append(redacted(arguments, fit_table(memory, [asked, *changes], limit, forward)))
    output.write_document(
        arguments, lambda: fit_document(memories, tables, limits), lambda: fit_json(memories, tables, limits)
    )


MEMORY: Final = Command(
    "memory",
    "What memory was used for: the peak and what was alive then, growth, fragmentation, the allocator.",
    _prepare_memory_parser,
    _run_memory,
    """\
TRACE is a trace that was recorded with allocations, or a snapshot of torch.cuda.memory._dump_snapshot.

examples:
  stepscope memory trace.json                                one screen for each device
  stepscope memory trace.json --by operator                  what operators allocate per call and step
  stepscope memory trace.json --by line --sort peak_bytes    which lines hold memory at the peak
  stepscope memory snapshot.pickle --by category
  stepscope memory trace.json --fit --memory-limit 16GiB     would it fit there, and with which change?
  stepscope memory trace.json --fit --batch-factor 2 --checkpoint 'layers.*'
  stepscope memory trace.json --over-time --format csv       allocated and reserved, event by event
  stepscope memory trace.json --format json | jq .devices    everything, for programs
""",
    only_reads=True,
)


_TOP: Final = 10
_number_of_steps = number("is not a number of iterations: write 250000 or 4e6", least=1, most=1e15)
_watts = number("is not a power in watts: write 300 or 72.5", most=1e7)
_pue = number("is not a PUE: it is 1 or more, such as 1.2", least=1, most=100)


def _iterations(text: str) -> int:
    steps = _number_of_steps(text)
    if steps != int(steps):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of iterations: write 250000 or 4e6")
    return int(steps)


def _prepare_energy_parser(parser: CommandParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a run's name or folder, a trace file, a folder of ranks, or - for standard input"
    )
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--iterations", metavar="N", type=_iterations, help="steps to count, such as 4e6 (default: recorded)"
    )
    asked.add_argument(
        "--region", metavar="PLACE", help="source of the electricity: FRA, US-CA, SE3, aws:eu-west-3 (default: no CO2)"
    )
    asked.add_argument(
        "--pue",
        metavar="X",
        type=_pue,
        default=1.0,
        help="watts of the building for each watt of its computers (default: 1)",
    )
    powers = parser.add_argument_group("powers that you know better, in watts")
    powers.add_argument("--device-watts", metavar="W", type=_watts, help="a device's power limit")
    powers.add_argument("--idle-watts", metavar="W", type=_watts, help="power of an idle device")
    powers.add_argument("--cpu-watts", metavar="W", type=_watts, help="power of all processors together")
    reports = parser.add_argument_group("reports")
    add_top_option(reports, f"rows of each table, 0 for all (default: {_TOP})", _TOP)
    add_report_options(reports, json="for programs; - for standard output")
    add_redact_option(reports)
    add_user_code_options(parser)
    add_reading_options(parser)


def _run_energy(arguments: argparse.Namespace) -> int:
    from stepscope.diagnosis.view import View
    from stepscope.report.energy import energy_document, energy_json

    unreadable: list[Unreadable] = []
    traces = readable_traces(arguments, [arguments.path], unreadable)
    answer = energy_of(arguments, (View(trace, None, user_code_from(arguments)) for trace in traces))
    answer = redacted(arguments, answer, paths=[trace.path for trace in answer.traces])
    output.write_reports(
        arguments, lambda: energy_document(answer), top=arguments.top, json=lambda: energy_json(answer)
    )
    return 0


def energy_of(arguments: argparse.Namespace, views: Iterable[View]) -> EnergyAnswer:
    """The energy of all these traces together, as the options say.

    Raises:
        UsageError: the region is unknown, or a trace is a memory snapshot.
    """
    from stepscope.predict.cost.energy_parts import EnergyAnswer, grid_of

    grid = None if arguments.region is None else grid_of(arguments.region)
    traces = [_energy(arguments, view) for view in views]
    traces.sort(key=lambda each: (math.inf if each.rank is None else each.rank, each.path))
    return EnergyAnswer(tuple(traces), arguments.iterations, arguments.pue, grid)


def _energy(arguments: argparse.Namespace, view: View) -> TraceEnergy:
    from stepscope.diagnosis import diagnose_view
    from stepscope.predict.cost.energy import energy_of_trace
    from stepscope.predict.cost.energy_parts import PowerSettings
    from stepscope.trace.energy_records import record_beside

    metadata = view.trace.metadata
    if metadata.format == "torch_snapshot":
        raise UsageError(f"{metadata.path} is a memory snapshot, which holds no times")
    powers = PowerSettings(arguments.device_watts, arguments.idle_watts, arguments.cpu_watts)
    record = record_beside(metadata.path)
    return energy_of_trace(view, diagnose_view(view).findings, powers, record=record, sampled=_sampled(view))


def _sampled(view: View) -> tuple[SampledEnergy, ...]:
    from stepscope.predict.cost.energy import sampled_energy
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    place = Path(view.trace.metadata.path)
    files = [file for file in telemetry_files(place) if file != place]
    if not files:
        return ()
    try:
        telemetry = read_telemetry(files)
    except UsageError:
        return ()
    return tuple(sampled_energy(telemetry, view.trace.metadata.origin_unix_ns, view.span, view.step_count))


ENERGY: Final = Command(
    "energy",
    "What energy a step uses, where it goes, what it emits, and what each finding would save.",
    _prepare_energy_parser,
    _run_energy,
    """\
Measured if `stepscope run --energy` recorded the run, else from sampled power, else an estimate between bounds,
with its formula. docs/energy.md explains how, and what is not counted.

examples:
  stepscope energy RUN --region FRA                          of a run, and its CO2 in France
  stepscope energy trace.json --iterations 4e6               of a whole training
  stepscope energy trace.json --idle-watts 55 --cpu-watts 120 --pue 1.2
  stepscope energy trace.json --json - | jq .total.joules
""",
)
