"""`stepscope export`: a trace and its results in the formats of other tools; `stepscope query`: SQL over its tables."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope import guard
from stepscope.commands.read.tables import add_table_options, write_table
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    TRACE,
    Command,
    CommandParser,
    add_raw_option,
    add_reading_options,
    add_redact_option,
    add_trace,
    add_user_code_options,
    file_to_write,
    number,
    suggestion,
    user_code_from,
)
from stepscope.commands.shared.reading import open_from, redacted, redactor_of
from stepscope.errors import UsageError

if TYPE_CHECKING:
    import polars as pl

    from stepscope.report.redaction import Redactor
    from stepscope.trace import Trace

FORMATS: Final = {
    "timeline": "everything with idle time by cause and the critical path, for the Perfetto UI (the default)",
    "chrome": "the trace itself, as PyTorch's profiler writes it",
    "perfetto": "the trace itself, as Perfetto writes it",
    "speedscope": "flame graphs of the device's time by your lines and of each thread",
    "folded": "the device's time as folded stacks",
    "tensorboard": "a log folder for TensorBoard with xprof",
    "csv": "one file per table",
    "parquet": "one file per table",
    "openmetrics": "figures for Prometheus",
}
_TABLES: Final = ("csv", "parquet")
_NEEDS_SLICES: Final = ("timeline", "speedscope", "folded", "tensorboard")


def _prepare_export_parser(parser: CommandParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help=TRACE)  # required: a trace alone must not be the output
    parser.add_argument(
        "output",
        metavar="OUT",
        type=file_to_write,
        help="the file to write, or - for standard output; a folder for tensorboard, csv and parquet",
    )
    formats = "; ".join(f"{name}: {what}" for name, what in FORMATS.items())
    parser.add_argument("--format", choices=tuple(FORMATS), default="timeline", help=formats)
    add_raw_option(parser)
    add_redact_option(parser)
    add_user_code_options(parser)
    add_reading_options(parser)


def _run_export(arguments: argparse.Namespace) -> int:
    if arguments.output == "-" and arguments.format in (*_TABLES, "tensorboard"):
        raise UsageError(f"--format {arguments.format} writes a folder, which cannot go to standard output")
    trace = open_from(arguments, arguments.trace)
    if arguments.format in _NEEDS_SLICES and not has_slices(trace):
        raise UsageError(
            f"{trace.metadata.path} has nothing to draw: no operator, call, frame, annotation or device work"
        )
    if arguments.format in _TABLES:
        from stepscope.report.tables import write_tables

        shown = redacted(arguments, trace)
        output.write_folder(
            arguments.output, lambda folder: write_tables(shown, folder, arguments.format, raw=arguments.raw)
        )
    elif arguments.format == "tensorboard":
        _write_log_folder(redacted(arguments, trace), arguments.output)
    else:
        output.write_output(arguments.output, _pieces(trace, arguments))
    return 0


def has_slices(trace: Trace) -> bool:
    from stepscope.trace.tables import SLICE_TABLES

    return any(not trace.scan(table).head(1).collect().is_empty() for table in SLICE_TABLES)


def _pieces(trace: Trace, arguments: argparse.Namespace) -> Iterator[bytes]:
    """The pieces of a one-file format, analysed before redaction, since paths decide which code is the user's."""
    shown = partial(redacted, arguments)
    user_code = user_code_from(arguments)
    match arguments.format:
        case "timeline":
            from stepscope.analysis.idle import idle_time
            from stepscope.analysis.step_view import StepView
            from stepscope.report.exports.chrome import timeline
            from stepscope.whatif import Experiment
            from stepscope.whatif.critical_path import critical_path

            path = critical_path(Experiment(StepView(trace, user_code=user_code)))
            return timeline(shown(trace), idle=shown(idle_time(trace)), path=shown(path))
        case "chrome":
            from stepscope.report.exports.chrome import chrome

            return chrome(shown(trace))
        case "perfetto":
            from stepscope.report.exports.protobuf import perfetto

            return perfetto(shown(trace))
        case "openmetrics":
            from stepscope.diagnosis import diagnose
            from stepscope.report.tables import openmetrics

            return iter((openmetrics(shown(diagnose(trace, user_code=user_code))),))
        case _:
            from stepscope.analysis.attribution import attribute
            from stepscope.analysis.flame import folded, speedscope

            attribution = shown(attribute(trace, user_code=user_code))
            return (speedscope if arguments.format == "speedscope" else folded)(attribution.trace, attribution)


def _write_log_folder(trace: Trace, target: str) -> None:
    """Write the run into a TensorBoard log folder, which may hold other runs."""
    from stepscope.report.exports.protobuf import xspace

    run = _plain_name(re.sub(r"(\.[A-Za-z]\w{0,8}){1,3}$", "", Path(trace.metadata.path).name)) or "trace"
    host = _plain_name(trace.metadata.host or "") or "localhost"

    def fill(folder: Path) -> None:
        with (folder / f"{host}.xplane.pb").open("wb") as file:
            file.writelines(xspace(trace))

    place = Path(target) / "plugins" / "profile" / run
    if not os.path.isdir(target):

        def fill_all(folder: Path) -> None:
            inside = folder / place.relative_to(target)
            inside.mkdir(parents=True)
            fill(inside)

        output.write_folder(target, fill_all)
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    output.write_folder(str(place), fill)


def _plain_name(text: str) -> str:
    """A file name that is valid on every system."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:100]


EXPORT: Final = Command(
    "export",
    "Write the trace for Perfetto, TensorBoard, speedscope or Prometheus, or as tables.",
    _prepare_export_parser,
    _run_export,
    """\
examples:
  stepscope export trace.json annotated.json                 then open it at https://ui.perfetto.dev
  stepscope export trace.json one.json --steps 5             only one step
  stepscope export trace.json flame.speedscope.json --format speedscope     then open it at https://speedscope.app
  stepscope export trace.json - --format folded | flamegraph.pl --countname ns > flame.svg
  stepscope export profile.sqlite kineto.json --format chrome               for tools that read PyTorch's traces
  stepscope export trace.json logs --format tensorboard      then: tensorboard --logdir logs (with xprof installed)
  stepscope export trace.json tables --format parquet        one file per table
  stepscope export trace.json step.prom --format openmetrics
""",
)


DEFAULT_TIMEOUT_S: Final = 60.0
_STATEMENTS: Final = re.compile(r"[\s(]*(select|with|from|values|show)\b", re.IGNORECASE)
# Comments may separate the name and the parenthesis; false matches are refused too.
_TABLE_FUNCTION: Final = re.compile(
    r"""\b(read_\w+)["`\]]?(?:\s|--[^\n]*\n|\#[^\n]*\n|/\*.*?\*/)*\(""", re.IGNORECASE | re.DOTALL
)
_SCAN: Final = re.compile(r"^.*\bSCAN\b.*$", re.MULTILINE)


def _prepare_query_parser(parser: CommandParser) -> None:
    parser.late = "sql"
    add_trace(parser)
    parser.add_argument("sql", metavar="SQL", nargs="?", help="a query; without one, the tables and columns are listed")
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=number("is not a number of seconds", most=1e7),
        default=DEFAULT_TIMEOUT_S,
        help=f"abandon the query after this time, 0 never (default: {DEFAULT_TIMEOUT_S:g})",
    )
    add_table_options(parser)
    add_reading_options(parser)


def _run_query(arguments: argparse.Namespace) -> int:
    if arguments.sql is None and " " in arguments.trace.strip() and not Path(arguments.trace).exists():
        arguments.trace, arguments.sql = "latest", arguments.trace  # a query of the latest run
    trace = open_from(arguments, arguments.trace)
    if arguments.sql is not None:
        redactor = redactor_of(arguments) if arguments.redact else None
        write_table(_answer(trace, arguments.sql, arguments.timeout or None, redactor), arguments, "rows")
    elif arguments.format or arguments.output != "-":
        write_table(_tables(trace), arguments, "tables")
    else:
        output.print_text("\n".join(_listing(_tables(trace), output.width())) + "\n")
    return 0


def _answer(trace: Trace, sql: str, timeout_s: float | None, redactor: Redactor | None) -> pl.DataFrame:
    """The result of a query over the trace's tables, each with its row numbers as `row`.

    Args:
        timeout_s: seconds the query may take; None for no limit.
        redactor: redacts the tables before the query, since the columns of a result do not show what they hold.

    Raises:
        UsageError: the query is wrong, times out, or does more than read these tables.
    """
    import polars as pl

    from stepscope.trace.tables import SCHEMAS

    _refuse_more_than_reading(sql)
    derived = derived_tables()
    named = {name for name in (*SCHEMAS, *derived) if re.search(rf"\b{name}\b", sql, re.IGNORECASE)}
    shown = trace if redactor is None else redactor.redact(trace)
    tables = {name: (shown if name in named else trace).scan(name).with_row_index("row") for name in SCHEMAS}
    for name, (make, schema) in derived.items():
        frame = make(trace) if name in named else pl.DataFrame(schema=dict(schema))
        tables[name] = (frame if redactor is None else redactor.redact(frame)).lazy().with_row_index("row")
    try:
        with pl.SQLContext(tables, eager=False) as context:
            plan = context.execute(sql)
            _refuse_other_files(plan, tables)
            return _collected(plan, timeout_s)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise UsageError(f"the query cannot be answered: {_sentence(str(error), tables)}") from error


def _collected(plan: pl.LazyFrame, timeout_s: float | None) -> pl.DataFrame:
    """Collect the plan in a daemon thread, since Polars cannot be interrupted within one."""
    collected: Future[pl.DataFrame] = Future()

    def collect() -> None:
        with guard.attempt() as collecting:  # Polars' panics are not derived from Exception
            collected.set_result(plan.collect())
        if collecting.error is not None:
            collected.set_exception(collecting.error)

    threading.Thread(target=collect, name="stepscope query", daemon=True).start()
    try:
        return collected.result(timeout_s)
    except TimeoutError:
        raise UsageError(
            f"the query took longer than {timeout_s:g} s and was abandoned; --timeout SECONDS gives it more time, 0 any"
        ) from None


def _refuse_more_than_reading(sql: str) -> None:
    if not _STATEMENTS.match(sql):
        raise UsageError("a query must begin with select, with or show; a trace is never changed")
    function = _TABLE_FUNCTION.search(sql)
    if function is not None:
        raise UsageError(f"{function[1]}() reads other files; a query sees only the tables of its trace")


def _refuse_other_files(plan: pl.LazyFrame, tables: dict[str, pl.LazyFrame]) -> None:
    """Second guard, after the check of the query's text: refuse a plan that scans more than the trace's tables."""
    own = {scan for table in tables.values() for scan in _scans(table)}
    if not _scans(plan) <= own:
        raise UsageError("the query reads other files; it may see only the tables of its trace")


def _scans(plan: pl.LazyFrame) -> set[str]:
    return {line.strip() for line in _SCAN.findall(plan.explain(optimized=False))}


def _sentence(message: str, tables: dict[str, pl.LazyFrame]) -> str:
    """The first line of Polars' message, with a suggestion for an unknown table or column."""
    first = message.strip().splitlines()[0] if message.strip() else "no reason given"
    table = re.search(r"relation '(.+?)' was not found", first)
    if table is not None:
        return f"there is no table {table[1]!r}" + (
            suggestion(table[1], tables) or f"; the tables are {', '.join(tables)}"
        )
    column = re.search(r'unable to find column "(.+?)"', first) or re.fullmatch(r'"?([\w.]+)"?', first)
    if column is not None:
        known = {name for table in tables.values() for name in table.collect_schema().names()}
        holders = [name for name, table in tables.items() if column[1] in table.collect_schema().names()]
        if holders:
            return f"{column[1]!r} is not a column of the tables in the query, but of {' and '.join(holders)}"
        return f"there is no column {column[1]!r}{suggestion(column[1], known)}"
    return first


def _listing(tables: pl.DataFrame, width: int) -> Iterator[str]:
    for name, rows, columns in tables.iter_rows():
        size = "made when a query names it" if rows is None else output.counted(rows, "row")
        yield f"{name}: {size}"
        yield textwrap.fill(", ".join(columns), width, initial_indent="    ", subsequent_indent="    ")


def _tables(trace: Trace) -> pl.DataFrame:
    """Columns table, rows, columns; the trace's own tables first, then derived ones."""
    import polars as pl

    from stepscope.trace.tables import SCHEMAS

    derived = derived_tables()
    rows = [
        (name, trace.scan(name).select(pl.len()).collect().item(), ["row", *schema]) for name, schema in SCHEMAS.items()
    ]
    rows += [(name, None, ["row", *schema]) for name, (_, schema) in derived.items()]  # computed when named
    return pl.DataFrame(rows, schema=["table", "rows", "columns"], orient="row")


def derived_tables() -> dict[str, tuple[Callable[[Trace], pl.DataFrame], Mapping[str, type[pl.DataType]]]]:
    """Name -> the function that makes the table from a trace, and its columns.

    `operator_costs` and `operator_places` have the rows of `operators`, `work_places` those of `device_work`.
    """
    from stepscope.analysis.attribution import ATTRIBUTION_SCHEMA, operator_places, work_places
    from stepscope.analysis.conversions import TENSOR_CORE_TABLE, tensor_core_table
    from stepscope.analysis.device_time import DEVICE_TIME_SCHEMA, QUEUE_TIME_SCHEMA, device_time, queue_time
    from stepscope.analysis.host import HOST_SCHEMA, host_time
    from stepscope.analysis.idle import IDLE_SCHEMA, idle_time
    from stepscope.analysis.operators import COST_SCHEMA, LAUNCH_SCHEMA, launch_table, operator_costs
    from stepscope.analysis.roofline import TABLE_SCHEMA, roofline_table
    from stepscope.analysis.serving import ITERATION_SCHEMA, iteration_table
    from stepscope.analysis.steps import STEP_SCHEMA, step_table

    return {
        "steps": (step_table, STEP_SCHEMA),
        "iterations": (iteration_table, ITERATION_SCHEMA),
        "idle": (idle_time, IDLE_SCHEMA),
        "host_time": (host_time, HOST_SCHEMA),
        "device_time": (device_time, DEVICE_TIME_SCHEMA),
        "queue_time": (queue_time, QUEUE_TIME_SCHEMA),
        "launch_statistics": (launch_table, LAUNCH_SCHEMA),
        "operator_costs": (operator_costs, COST_SCHEMA),
        "roofline": (roofline_table, TABLE_SCHEMA),
        "tensor_cores": (tensor_core_table, TENSOR_CORE_TABLE),
        "operator_places": (operator_places, ATTRIBUTION_SCHEMA),
        "work_places": (work_places, ATTRIBUTION_SCHEMA),
    }


QUERY: Final = Command(
    "query",
    "Query the tables of a trace in SQL; without a query, list them.",
    _prepare_query_parser,
    _run_query,
    """\
Every table has a column `row`, which other tables' parent, launch and operator columns refer to.
Times are nanoseconds from the start of the trace. The trace itself is never changed.

examples:
  stepscope query trace.json
  stepscope query trace.json "select name, count(*) as calls from operators group by name order by calls desc"
  stepscope query trace.json "select cause, sum(duration_ns) as ns from idle group by cause order by ns desc"
  stepscope query trace.json "select w.name, l.name as launch from device_work w join launches l on w.launch = l.row"
""",
)
