"""Format tables as text, CSV, JSON and Parquet; write every table of a trace as files, and a diagnosis as OpenMetrics.

Each table has its row numbers as the column `row`, so that references to rows (`parent`, `operator`, `launch`,
`source`, `target`) can be joined; `trace.json` holds the metadata and the warnings.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
import polars as pl
from rich.cells import cell_len, set_cell_size

from stepscope import __version__
from stepscope.report.format import cell, filled, printable, printable_json
from stepscope.trace import Trace
from stepscope.trace.model import disk_errors
from stepscope.trace.tables import SCHEMAS, csv_text

if TYPE_CHECKING:
    from stepscope.diagnosis.diagnosis import Diagnosis

TableFormat: TypeAlias = Literal["table", "csv", "json", "parquet"]
PART_ROWS: Final = 100_000

_GAP: Final = 2
_NARROWEST_TEXT: Final = 28
_TOLD_BY_THE_END: Final = ("line", "file", "source_file")
"""Columns of paths, shortened at the beginning to keep the file name and line."""


def table_bytes(frame: pl.DataFrame, table_format: TableFormat, *, width: int = 120, raw: bool = False) -> bytes:
    """Format the table, in UTF-8 unless the format is binary.

    CSV and JSON hold the exact values; NaN is empty in CSV and null in JSON, and nested values are JSON in CSV.

    Args:
        raw: keep text in CSV that a spreadsheet would read as a formula, as `csv_text` does.
    """
    match table_format:
        case "csv":
            return csv_text(_flat(frame), raw=raw)
        case "json":
            rows = b",\n".join(msgspec.json.encode(row, enc_hook=str) for row in frame.iter_rows(named=True))
            return printable_json(b"[\n" + rows + b"\n]\n") if rows else b"[]\n"
        case "parquet":
            buffer = io.BytesIO()
            frame.write_parquet(buffer)
            return buffer.getvalue()
        case "table":
            return ("\n".join(table_lines(frame, width=width)) + "\n").encode()


def table_lines(frame: pl.DataFrame, *, width: int, whole: str = "--format csv") -> list[str]:
    """The table as lines of text, the heading first: numbers right-aligned, long names cut with an ellipsis.

    Paths are cut at the beginning. Columns that do not fit are left out from the right, and the last lines say which.

    Args:
        whole: the option that shows all columns.
    """
    columns = [_Column(heading(name, frame.columns), frame[name]) for name in frame.columns]
    shown = _fitting(columns, width)
    lines = [
        (" " * _GAP).join(column.line(position) for column in shown).rstrip() for position in range(frame.height + 1)
    ]
    left_out = [column.name for column in columns[len(shown) :]]
    if left_out and frame.height == 1:  # one row reads better from top to bottom
        return _sideways(columns, width)
    if left_out:
        names = ", ".join(map(printable, left_out))
        lines += filled(f"(no room for {names}; a wider terminal or {whole} shows them)", width, following=" ")
    return lines


def showing(shown: int, total: int, things: str) -> str:
    """Say what was cut from a table and how to see it; empty if nothing was."""
    return "" if shown >= total else f"showing {shown:,} of {total:,} {things}, --top 0 for all"


def heading(column_name: str, among: Sequence[str] = ()) -> str:
    """A column's heading: its name without the unit, which its cells carry.

    With `among`, "_share" is dropped too, unless another of those columns has the same stem. A column whose heading
    would equal another column's name, as in a query with aliases, keeps its own name.
    """
    short = re.sub(r"_(ns|bytes)$", "", column_name)
    name = short.removesuffix("_share")
    if name != short and among and not {f"{name}_ns", f"{name}_bytes", name} & set(among):
        short = name
    short = "time" if column_name == "ns" else short
    return printable((column_name if short in among else short).replace("_", " "))


def _sideways(columns: Sequence[_Column], width: int) -> list[str]:
    names = max(cell_len(column.cells[0]) for column in columns)
    room = max(width - names - _GAP, 2)
    lines = []
    for column in columns:
        name, value = column.cells
        if cell_len(value) > room:
            value = set_cell_size(value, room - 1) + "…"
        lines.append(f"{set_cell_size(name, names)}{' ' * _GAP}{value}".rstrip())
    return lines


class _Column:
    def __init__(self, heading: str, values: pl.Series) -> None:
        name = self.name = values.name
        self.is_text = not (values.dtype.is_numeric() or values.dtype in (pl.Boolean, pl.Null))
        self.cells = [heading, *(cell(name, value) for value in values.to_list())]
        self.wanted = max(cell_len(text) for text in self.cells)
        self.width = self.wanted

    def line(self, position: int) -> str:
        text = self.cells[position]
        length = cell_len(text)
        if length > self.width and self.name in _TOLD_BY_THE_END and position:
            return "…" + set_cell_size(text[::-1], self.width - 1)[::-1]
        if length > self.width:
            return set_cell_size(text, self.width - 1) + "…"
        padding = " " * (self.width - length)
        return text + padding if self.is_text else padding + text


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The leftmost columns that fit, with their widths set: text columns shrink first, the widest most."""
    shown = list(columns)
    while len(shown) > 1 and _least_width(shown) > width:
        shown.pop()
    for column in shown:
        if column.is_text:
            column.width = min(column.wanted, max(width, 2))
    excess = sum(column.width for column in shown) + _GAP * (len(shown) - 1) - width
    while excess > 0:
        widest = max((column for column in shown if column.is_text), key=lambda column: column.width, default=None)
        if widest is None or widest.width <= 2:
            break
        widest.width -= 1
        excess -= 1
    return shown


def _least_width(columns: Sequence[_Column]) -> int:
    least = (min(column.wanted, _NARROWEST_TEXT) if column.is_text else column.wanted for column in columns)
    return sum(least) + _GAP * (len(columns) - 1)


def _flat(frame: pl.DataFrame) -> pl.DataFrame:
    nested = [
        pl.Series(
            name,
            [None if value is None else msgspec.json.encode(value).decode() for value in frame[name].to_list()],
            pl.String,
        )
        for name, dtype in frame.schema.items()
        if dtype.is_nested()
    ]
    floats = [pl.col(name).fill_nan(None) for name, dtype in frame.schema.items() if dtype.is_float()]
    return frame.with_columns(nested).with_columns(floats)


TEXT_ROWS: Final = 25_000
"""Rows that are text at a time; a row is ten times as long as text."""


def parts(rows: pl.LazyFrame, height: int) -> Iterator[pl.DataFrame]:
    """Yield the rows in batches of TEXT_ROWS, read by PART_ROWS, so that memory stays bounded."""
    for first in range(0, height, PART_ROWS):
        yield from rows.slice(first, PART_ROWS).collect().iter_slices(TEXT_ROWS)


def write_tables(trace: Trace, folder: Path, kind: str, *, raw: bool = False) -> None:
    """Write one file per table, such as `operators.csv`, and `trace.json` into an existing folder.

    Args:
        kind: "csv" or "parquet". In CSV null is empty, and an empty string is "".
        raw: keep text in CSV that a spreadsheet would read as a formula, as `csv_text` does.

    Raises:
        OSError: a file cannot be written.
    """
    about = {"metadata": trace.metadata, "warnings": trace.warnings}
    (folder / "trace.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n")
    with disk_errors():
        for table in SCHEMAS:
            path = folder / f"{table}.{kind}"
            if kind == "csv":
                _write_csv(trace, table, path, raw=raw)
            else:
                _write_parquet(trace, table, path)


def _write_csv(trace: Trace, table: str, path: Path, *, raw: bool) -> None:
    rows = trace.scan(table).with_row_index("row")
    height = trace.scan(table).select(pl.len()).collect().item()
    with path.open("wb") as file:
        file.write(csv_text(rows.head(0).collect(), raw=raw))
        for part in parts(rows, height):
            file.write(csv_text(part, raw=raw, header=False))


def _write_parquet(trace: Trace, table: str, path: Path) -> None:
    trace.scan(table).with_row_index("row").sink_parquet(path, compression="zstd")


_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
_SECOND_NS: Final = 1_000_000_000


@dataclass
class Family:
    """One metric: its samples by their labels."""

    name: str
    help: str
    unit: str = ""
    kind: str = "gauge"
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def add(self, value: float, **labels: str | None) -> None:
        self.samples.append(({name: text for name, text in labels.items() if text is not None}, value))

    def lines(self, shared: Mapping[str, str]) -> Iterator[str]:
        if not self.samples:
            return
        yield f"# TYPE {self.name} {self.kind}"
        if self.unit:
            yield f"# UNIT {self.name} {self.unit}"
        yield f"# HELP {self.name} {self.help.translate(_ESCAPES)}"
        suffix = {"info": "_info", "counter": "_total"}.get(self.kind, "")
        for labels, value in self.samples:
            told = ",".join(f'{name}="{_label(text)}"' for name, text in {**shared, **labels}.items())
            yield f"{self.name}{suffix}{{{told}}} {value!r}" if told else f"{self.name}{suffix} {value!r}"


def openmetrics(diagnosis: Diagnosis) -> bytes:
    """The figures of a diagnosis as OpenMetrics text, in UTF-8, ending in "# EOF".

    Times are in seconds, shares from 0 to 1. Every sample carries the rank if it is known. A figure that the trace
    does not provide has no sample.
    """
    rank = diagnosis.metadata.rank
    families = [_trace(diagnosis), *_steps(diagnosis), *_devices(diagnosis), *_idle(diagnosis), *_findings(diagnosis)]
    return metrics_text(families, {} if rank is None else {"rank": str(rank)})


def metrics_text(families: Iterable[Family], shared: Mapping[str, str]) -> bytes:
    """OpenMetrics text of these metrics; every sample has the shared labels."""
    lines = [line for family in families for line in family.lines(shared)]
    return ("\n".join([*lines, "# EOF"]) + "\n").encode("utf-8", "replace")


def _label(text: str) -> str:
    return printable(text).translate(_ESCAPES)


def _seconds(ns: int) -> float:
    return ns / _SECOND_NS


def _trace(diagnosis: Diagnosis) -> Family:
    metadata = diagnosis.metadata
    family = Family("stepscope_trace", "The trace that the figures describe.", kind="info")
    family.add(1, path=metadata.path, format=metadata.format, host=metadata.host, stepscope=__version__)
    return family


def _steps(diagnosis: Diagnosis) -> Iterator[Family]:
    duration = Family("stepscope_step_duration_seconds", "Mean duration of the complete steps.", "seconds")
    steps = Family("stepscope_steps", "Complete steps that the figures describe.")
    if diagnosis.step_source != "none":
        duration.add(_seconds(diagnosis.step_ns), source=diagnosis.step_source)
        steps.add(diagnosis.step_count, source=diagnosis.step_source)
    warnings = Family("stepscope_trace_warnings", "What was skipped or repaired while reading the trace, by kind.")
    counts = Counter[str]()
    for warning in diagnosis.warnings:
        counts[warning.kind] += warning.count
    for kind, count in counts.items():
        warnings.add(count, kind=kind)
    yield from (duration, steps, warnings)


def _devices(diagnosis: Diagnosis) -> Iterator[Family]:
    window = Family("stepscope_device_window_seconds", "Length of the device's window.", "seconds")
    busy = Family("stepscope_device_busy_ratio", "Share of the window in which the device worked.", "ratio")
    work = Family(
        "stepscope_device_activity_seconds",
        "Time of the window with that activity; exposed: with nothing else.",
        "seconds",
    )
    for device in diagnosis.devices:
        window.add(_seconds(device.window_ns), device=device.device, name=device.name)
        if device.window_ns:
            busy.add(device.busy_ns / device.window_ns, device=device.device)
        activities = {
            "busy": device.busy_ns,
            "idle": device.idle_ns,
            "compute": device.compute_ns,
            "communication": device.communication_ns,
            "copy": device.copy_ns,
            "exposed_communication": device.exposed_communication_ns,
            "exposed_copy": device.exposed_copy_ns,
        }
        for activity, ns in activities.items():
            work.add(_seconds(ns), device=device.device, activity=activity)
    yield from (window, busy, work)


def _idle(diagnosis: Diagnosis) -> Iterator[Family]:
    idle = Family("stepscope_idle_seconds", "Idle time of the device's window, by cause.", "seconds")
    causes = diagnosis.idle.group_by("device", "cause", maintain_order=True).agg(pl.col("ns").sum())
    for device, cause, ns in causes.iter_rows():
        idle.add(_seconds(ns), device=device, cause=cause)
    host = Family("stepscope_host_seconds", "Time of the main host thread, by cause.", "seconds")
    for cause, ns in diagnosis.host.group_by("cause", maintain_order=True).agg(pl.col("ns").sum()).iter_rows():
        host.add(_seconds(ns), cause=cause)
    yield from (idle, host)


def _findings(diagnosis: Diagnosis) -> Iterator[Family]:
    """Titles hold figures that change from run to run: in a family of their own, savings keep stable labels."""
    told = Family("stepscope_finding", "What was found; nth numbers a rule's findings.", kind="info")
    saving = Family("stepscope_finding_saving_seconds", "What a step would lose without the cause.", "seconds")
    ratio = Family("stepscope_finding_saving_ratio", "The same as a share of the step.", "ratio")
    seen = Counter[str]()
    for finding in diagnosis.findings:
        seen[finding.rule] += 1
        labels = {"rule": finding.rule, "nth": str(seen[finding.rule])}
        told.add(1, **labels, severity=finding.severity, confidence=finding.confidence, title=finding.title)
        saving.add(_seconds(finding.saving_ns_per_step), **labels)
        ratio.add(finding.saving_share, **labels)
    together = Family(
        "stepscope_findings_together_saving_seconds", "What a step would lose without all of their causes.", "seconds"
    )
    if diagnosis.together is not None:
        together.add(_seconds(diagnosis.together.saving_ns_per_step))
    open_questions = Family("stepscope_questions_not_answered", "Questions that the trace leaves open.")
    open_questions.add(len(diagnosis.not_answered))
    yield from (told, saving, ratio, together, open_questions)
