"""Commands that compute one table from a trace and write it: `stepscope steps`, `idle` and so on; and what rules
there are and what they mean: `rules` and `explain`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_device_option,
    add_output_option,
    add_raw_option,
    add_reading_options,
    add_redact_option,
    add_top_option,
    add_trace,
    add_user_code_options,
    column_names,
    suggestion,
    user_code_from,
)
from stepscope.commands.shared.reading import open_from, redacted
from stepscope.errors import UsageError
from stepscope.report.format import count

if TYPE_CHECKING:
    import polars as pl

    from stepscope.diagnosis.rule import Rule
    from stepscope.report.tables import TableFormat
    from stepscope.trace import Trace

FORMATS: Final = ("table", "csv", "json", "parquet")
_ROWS: Final = 20
_ROWS_ON_SCREEN: Final = 1_000
"""Most rows of CSV or JSON on a terminal without --top."""


def add_table_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the table")
    group.add_argument("--sort", metavar="COLUMN", help="sort by this column: the largest numbers first, text from A")
    group.add_argument("--ascending", action="store_true", help="sort the smallest numbers first")
    add_top_option(
        group, f"rows, 0 for all (default: {_ROWS} in a table, {_ROWS_ON_SCREEN:,} of CSV or JSON on a terminal)"
    )
    group.add_argument("--format", choices=FORMATS, help="default: table, or by the ending of --output")
    add_output_option(group)
    add_raw_option(group)
    add_redact_option(group)


def write_table(frame: pl.DataFrame, arguments: argparse.Namespace, things: str, *, rows: int = _ROWS) -> None:
    """Sort, cut, redact and write a table as the options say.

    Args:
        things: what the rows are called, for "showing 20 of 431 operators".
        rows: rows of a printed table without --top; 0 for all.
    """
    from stepscope.report.tables import showing, table_bytes

    table_format = _format(arguments)
    on_screen = arguments.output == "-" and sys.stdout.isatty()
    total = frame.height
    if arguments.sort is not None:
        frame = _sorted(frame, arguments.sort, ascending=arguments.ascending)
    if arguments.top is not None:
        rows = arguments.top
    elif table_format != "table" and rows:
        rows = _ROWS_ON_SCREEN if on_screen else 0
    frame = redacted(arguments, frame.head(rows) if rows else frame)
    cut = showing(frame.height, total, things)
    if table_format != "table" or arguments.output != "-":
        if cut and on_screen:
            output.say(cut)
        output.write_output(arguments.output, table_bytes(frame, table_format, raw=arguments.raw))
    elif frame.is_empty():
        output.print_text(f"There are no {things} in this trace.\n")
    else:
        text = table_bytes(frame, "table", width=output.width()).decode()
        output.print_text(f"{text}{cut}\n" if cut else text)


def check_columns(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise `UsageError` at the first name that is not a column."""
    for name in names:
        if name not in known:
            guess = suggestion(name, known)
            raise UsageError(f"there is no column {name!r}{guess}; the columns are {', '.join(known)}")


def _format(arguments: argparse.Namespace) -> TableFormat:
    ending = Path(arguments.output).suffix.removeprefix(".")
    chosen = arguments.format or (ending if ending in FORMATS else "table")
    if chosen == "parquet" and arguments.output == "-" and sys.stdout.isatty():
        raise UsageError("Parquet cannot be shown on a terminal; name a file with --output")
    return cast("TableFormat", chosen)


def _sorted(frame: pl.DataFrame, column: str, *, ascending: bool) -> pl.DataFrame:
    check_columns((column,), frame.columns)
    if frame.schema[column].is_nested():
        raise UsageError(f"the column {column!r} holds lists, which have no order")
    descending = frame.schema[column].is_numeric() and not ascending
    return frame.sort(column, descending=descending, nulls_last=True, maintain_order=True)


MOST_DEVICES: Final = 16
"""Number of devices whose duty cycle is shown."""


TableOf: TypeAlias = "Callable[[Trace, argparse.Namespace], tuple[pl.DataFrame, str]]"
"""From a trace and the command's options to the table and the name of its rows."""


@dataclass(frozen=True, slots=True)
class TableCommand(Command):
    """A command that prints the one table that `table` makes."""

    table: TableOf = field(kw_only=True)


def _table_command(
    name: str,
    help: str,
    table: TableOf,
    examples: str,
    add_options: Callable[[CommandParser], None] = lambda _: None,
    instead: Callable[[Trace, argparse.Namespace], str] = lambda *_: "",
) -> TableCommand:
    """Make the command.

    Args:
        instead: what is printed on a terminal instead of the table; "" for the table.
    """

    def prepare_parser(parser: CommandParser) -> None:
        add_trace(parser)
        add_options(parser)
        add_table_options(parser)
        add_reading_options(parser)

    def run(arguments: argparse.Namespace) -> int:
        trace = open_from(arguments, arguments.trace)
        sentence = "" if arguments.format or arguments.output != "-" else instead(trace, arguments)
        if sentence:
            output.print_text(sentence)
        else:
            frame, things = table(trace, arguments)
            write_table(frame, arguments, things)
        return 0

    return TableCommand(name, help, prepare_parser, run, f"examples:\n{examples}", only_reads=True, table=table)


def _add_grouping(parser: argparse._ActionsContainer, default: str, help: str) -> None:
    columns = column_names(default)
    parser.add_argument("--group-by", metavar="COLUMNS", type=column_names, default=columns, help=help)


def _steps(trace: Trace, arguments: argparse.Namespace) -> tuple[pl.DataFrame, str]:
    import polars as pl

    from stepscope.analysis.device_time import step_busy_shares
    from stepscope.analysis.steps import step_table

    steps = step_table(trace)
    busy = step_busy_shares(trace, steps)
    busy = busy.select(busy.columns[:MOST_DEVICES])
    return pl.concat([steps, busy], how="horizontal") if busy.width else steps, "steps"


STEPS: Final = _table_command(
    "steps",
    "A table of the steps: their durations, and how much of each the devices worked.",
    _steps,
    """\
  stepscope steps trace.json
  stepscope steps trace.json --sort duration_ns --top 5      the slowest ones
""",
)


def _add_idle_options(parser: CommandParser) -> None:
    detail = parser.add_mutually_exclusive_group()
    detail.add_argument("--pieces", action="store_true", help="one row for each piece of idle time")
    _add_grouping(
        detail,
        "device,cause,trigger",
        "one row for each value of these columns of --pieces (default: device,cause,trigger)",
    )


def _no_device(trace: Trace, arguments: argparse.Namespace) -> str:
    if not trace.device_work.is_empty():
        return ""
    return "No device was recorded, so none was idle; stepscope diagnose says where the host's time went.\n"


def _idle(trace: Trace, arguments: argparse.Namespace) -> tuple[pl.DataFrame, str]:
    from stepscope.analysis.idle import idle_time

    pieces = idle_time(trace)
    if arguments.pieces:
        return pieces, "pieces of idle time"
    return _grouped(pieces, arguments.group_by), "causes of idle time"


def _grouped(pieces: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Group by the columns, then sum: count, ns, idle_share (of all idle time); the largest first."""
    import polars as pl

    check_columns(columns, pieces.columns)
    sums = pieces.group_by(columns).agg(pl.len().alias("count"), pl.col("duration_ns").sum().alias("ns"))
    total = max(int(sums["ns"].sum()), 1)
    return sums.with_columns(idle_share=pl.col("ns") / total).sort(
        "ns", *columns, descending=[True] + [False] * len(columns)
    )


IDLE: Final = _table_command(
    "idle",
    "A table of the devices' idle time and its causes.",
    _idle,
    """\
  stepscope idle trace.json                                  by cause and trigger
  stepscope idle trace.json --pieces --sort duration_ns      the longest waits, one by one
  stepscope idle trace.json --group-by cause,lane
""",
    _add_idle_options,
    _no_device,
)


def _add_operator_options(parser: CommandParser) -> None:
    _add_grouping(parser, "name", "one row for each value of these columns, such as name,input_shapes (default: name)")
    add_user_code_options(parser)


def _operators(trace: Trace, arguments: argparse.Namespace) -> tuple[pl.DataFrame, str]:
    from stepscope.analysis.operators import operator_table

    user_code = user_code_from(arguments)
    return operator_table(trace, group_by=arguments.group_by, user_code=user_code), "operators"


OPERATORS: Final = _table_command(
    "operators",
    "A table of the framework's operators and their time on host and device.",
    _operators,
    """\
  stepscope operators trace.json
  stepscope operators trace.json --group-by name,input_shapes --top 50
  stepscope operators trace.json --output operators.csv
""",
    _add_operator_options,
)


def _input(trace: Trace, arguments: argparse.Namespace) -> tuple[pl.DataFrame, str]:
    from stepscope.analysis.input_pipeline import input_table

    return input_table(trace), "functions of an input pipeline"


INPUT: Final = _table_command(
    "input",
    "The functions that load the data: items, transforms, collate, in the process and in its workers.",
    _input,
    """\
  stepscope input trace.json                     the costliest first
  stepscope input trace.json --sort total_ns     with the functions that they call
  stepscope input trace.json --output input.csv
""",
)


def _add_kernel_options(parser: CommandParser) -> None:
    _add_grouping(parser, "name", "one row for each value of these columns, such as name,queue (default: name)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--launches", action="store_true", help="show launches instead: queue depth, delays")
    instead.add_argument(
        "--ncu",
        metavar="FILE",
        help="hardware counters of these kernels, as ncu --csv writes them: throughput, occupancy, tensor pipe",
    )


def _kernels(trace: Trace, arguments: argparse.Namespace) -> tuple[pl.DataFrame, str]:
    if arguments.launches:
        from stepscope.analysis.operators import launch_table

        return launch_table(trace), "devices"
    from stepscope.analysis.operators import kernel_table

    table = kernel_table(trace, group_by=arguments.group_by)
    return table if arguments.ncu is None else _with_counters(table, trace, arguments), "kernels"


def _with_counters(table: pl.DataFrame, trace: Trace, arguments: argparse.Namespace) -> pl.DataFrame:
    """Add Nsight Compute's measurements to the table, and say how many matched a kernel."""
    from stepscope.analysis.operators import join_counters, with_counters
    from stepscope.readers.side_files import read_ncu

    joined = join_counters(trace, read_ncu(arguments.ncu))
    found = f"{count(joined.matched)} of {count(trace.device_work.height)} works have counters of {arguments.ncu}"
    if joined.ambiguous:
        found += (
            f"; for {count(joined.ambiguous)} the kernel was measured another number of times than it ran, so no "
            "measurement can be assigned"
        )
    if joined.lost:
        found += f"; {count(joined.lost)} of {count(joined.measured)} measurements are of kernels this trace lacks"
    output.say(found)
    return with_counters(table, trace, joined, group_by=arguments.group_by)


KERNELS: Final = _table_command(
    "kernels",
    "A table of the kernels and copies that ran on the devices.",
    _kernels,
    """\
  stepscope kernels trace.json
  stepscope kernels trace.json --group-by name,queue
  stepscope kernels trace.json --launches                    queue depth, launch delays, kernels shorter than a launch
  stepscope kernels trace.json --ncu counters.csv            beside what Nsight Compute measured: ncu --csv --page raw
  stepscope kernels trace.json --format json | jq '.[0]'
""",
    _add_kernel_options,
)


def _add_roofline_options(parser: CommandParser) -> None:
    add_device_option(parser)
    parser.add_argument(
        "--tensor-cores",
        action="store_true",
        help="show the operators that tensor cores can speed up instead, and whether they used them",
    )


def _roofline(trace: Trace, arguments: argparse.Namespace) -> tuple[pl.DataFrame, str]:
    from stepscope.analysis.conversions import tensor_core_table
    from stepscope.analysis.roofline import roofline_table, with_graphs

    if not arguments.tensor_cores:
        return with_graphs(roofline_table(trace, bounds=True), trace), "operators with work on a device"
    columns = ["operator", "input_shapes", "precision", "used", "calls", "device_ns", "share", "kernel"]
    table = tensor_core_table(trace)
    rest = [name for name in table.columns if name not in columns]
    return table.select(*columns, *rest), "operators that tensor cores can speed up"


ROOFLINE: Final = _table_command(
    "roofline",
    "A table of the operators by shape: TFLOP/s and GB/s that they reached, as a share of the device's peak.",
    _roofline,
    """\
  stepscope roofline trace.json
  stepscope roofline trace.json --sort share --ascending     the least efficient first
  stepscope roofline trace.json --device MI300X              peaks for a trace that names no device
  stepscope roofline trace.json --tensor-cores               which operators could use tensor cores, and which did
""",
    _add_roofline_options,
)


_SCALES: Final = {"%": 0.01, "ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def rule_named(name: str) -> Rule:
    """The rule with this id.

    Raises:
        UsageError: no rule has it.
    """
    from stepscope.diagnosis.rules import RULES

    rules = {rule.id: rule for rule in RULES}
    if name not in rules:
        raise UsageError(f"there is no rule {name!r}{suggestion(name, rules)} (stepscope rules lists them)")
    return rules[name]


def parsed_setting(text: str) -> tuple[str, float]:
    """Parse "rule.threshold=5%" into ("rule.threshold", value); units: %, ns, us, ms, s, KiB, MiB, GiB.

    Raises:
        UsageError: no such rule or threshold, or no number.
    """
    match = re.fullmatch(r"\s*([\w-]+)\.(\w+)\s*=\s*(-?\d{1,15}(?:\.\d{1,9})?(?:e-?\d{1,2})?)\s*([A-Za-z%]*)\s*", text)
    if match is None or (match[4] and match[4] not in _SCALES):
        raise UsageError(f"{text!r} sets no threshold: write RULE.THRESHOLD=VALUE, such as input-bound.share=10%")
    thresholds = rule_named(match[1]).thresholds
    if match[2] not in thresholds:
        guess = suggestion(match[2], thresholds) or f"; it has {', '.join(thresholds) or 'none'}"
        raise UsageError(f"the rule {match[1]} has no threshold {match[2]!r}{guess}")
    return f"{match[1]}.{match[2]}", float(match[3]) * _SCALES.get(match[4], 1)


def _list(arguments: argparse.Namespace) -> int:
    import polars as pl

    from stepscope.diagnosis.rules import RULES

    rows = [(rule.id, rule.title) for rule in RULES]
    frame = pl.DataFrame(rows, schema={"rule": pl.String, "title": pl.String}, orient="row")
    write_table(frame, arguments, "rules", rows=0)
    return 0


def _prepare_explain(parser: CommandParser) -> None:
    parser.add_argument("rule", metavar="RULE", help="a rule, as findings and `stepscope rules` name them")


def _explain(arguments: argparse.Namespace) -> int:
    from stepscope.diagnosis.rule import rule_page

    output.print_text(rule_page(rule_named(arguments.rule)))
    return 0


RULES: Final = Command(
    "rules",
    "A list of everything stepscope looks for.",
    add_table_options,
    _list,
    """\
examples:
  stepscope rules
  stepscope explain input-bound                              what one of them means
  stepscope diagnose trace.json --rule input-bound           only that one
""",
)


EXPLAIN: Final = Command(
    "explain",
    "What a finding means, how it is measured, when it is wrong and what to do.",
    _prepare_explain,
    _explain,
    """\
examples:
  stepscope rules                                            all of them
  stepscope explain input-bound
""",
)
