"""`stepscope memory`: what memory was used for."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import add_reading_options, add_trace
from stepscope.commands.shared.reading import open_from, redacted
from stepscope.commands.shared.tables import add_table_options, write_table
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.analysis.memory import DeviceMemory
    from stepscope.trace import Trace

_ROWS: Final = 8


def _prepare_parser(parser: CommandParser) -> None:
    add_trace(parser, "a trace file, a memory snapshot, a run's name, or - for standard input")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="only this one: cpu, or a device's number (--by and --over-time: the largest)",
    )
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument(
        "--by",
        choices=("category", "line", "module", "operator"),
        help="a table instead: what was allocated, and alive at the peak",
    )
    detail.add_argument("--over-time", action="store_true", help="a table instead: the level after every event")
    add_table_options(parser)
    add_reading_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    import polars as pl

    from stepscope.analysis.memory import allocation_table, device_memories

    trace = open_from(arguments, arguments.trace)
    memories = _chosen(device_memories(trace), arguments.device)
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
        raise UsageError(f"this trace has no memory events of device {device!r}; it has some of {known}")
    return found


def _write_screen(trace: Trace, memories: tuple[DeviceMemory, ...], arguments: argparse.Namespace) -> None:
    from stepscope.analysis.memory import memory_summary
    from stepscope.report.memory import memory_document, memory_json

    given = "--sort" if arguments.sort is not None else None
    if arguments.format in ("csv", "parquet"):
        given = given or f"--format {arguments.format}"
    if given:
        raise UsageError(f"{given} goes with --by or --over-time, which print one table")
    summaries = [redacted(arguments, memory_summary(trace, memory)) for memory in memories]
    top = _ROWS if arguments.top is None else arguments.top
    output.write_document(arguments, lambda: memory_document(summaries), lambda: memory_json(summaries), top=top)


COMMAND: Final = Command(
    "memory",
    "What memory was used for: the peak and what was alive then, growth, fragmentation, the allocator.",
    _prepare_parser,
    _run,
    """\
TRACE is a trace that was recorded with allocations, or a snapshot of torch.cuda.memory._dump_snapshot.

examples:
  stepscope memory trace.json                                one screen for each device
  stepscope memory trace.json --by operator                  what operators allocate per call and step
  stepscope memory trace.json --by line --sort peak_bytes    who holds what at the peak
  stepscope memory snapshot.pickle --by category
  stepscope memory trace.json --over-time --format csv       allocated and reserved, event by event
  stepscope memory trace.json --format json | jq .devices    everything, for programs
""",
)
