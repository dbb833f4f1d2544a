"""Read Nsight Compute's measurements of each launch from `ncu --csv`, details page or raw page."""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import polars as pl

from stepscope.errors import NotATraceError
from stepscope.readers.source import ByteSource
from stepscope.trace.tables import rows_frame

MOST_LAUNCHES: Final = 1_000_000
_LONGEST_LINE: Final = 2**24
COUNTERS: Final[dict[str, tuple[str, ...]]] = {
    "sm_throughput": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "Compute (SM) Throughput",
        "Compute (SM) [%]",
        "SM [%]",
    ),
    "memory_throughput": (
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "Memory Throughput",
        "Memory [%]",
    ),
    "dram_throughput": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "DRAM Throughput",
    ),
    "achieved_occupancy": ("sm__warps_active.avg.pct_of_peak_sustained_active", "Achieved Occupancy"),
    "tensor_pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
}
"""Column -> metrics for it, in percent; the first one in the file is used."""
SCHEMA: Final = {
    "name": pl.String,
    "grid": pl.String,
    "block": pl.String,
    **dict.fromkeys(COUNTERS, pl.Float64),
}
_RANKS: Final = {metric: (column, rank) for column, metrics in COUNTERS.items() for rank, metric in enumerate(metrics)}
_PERCENT: Final = ("%", "")
_HEADER: Final = re.compile(r'^"?ID"?,.*"?Kernel Name"?', re.IGNORECASE)
_EXPORT: Final = "write one with ncu --csv --page raw, or ncu --import REPORT.ncu-rep --csv --page raw"


def read_ncu(path: str | Path) -> pl.DataFrame:
    """Return the launches measured by Nsight Compute, in order.

    Returns:
        name, grid and block ("x,y,z"), and the columns of COUNTERS as a share of the peak (0 to 1), null if not
        measured.

    Raises:
        NotATraceError: the file is not such a CSV, or has no launch.
        UnreadableTraceError: the file cannot be opened.
    """
    source = ByteSource(path)
    try:
        rows = csv.reader(_from_header(source))
        header = next(rows, None)
        if header is None:
            raise NotATraceError(f"{source.name} is no CSV of Nsight Compute (it has no line of columns): {_EXPORT}")
        is_long = "Metric Name" in header
        launches = _of_metrics(rows, header) if is_long else _of_columns(rows, header)
    except csv.Error as error:
        raise NotATraceError(
            f"{source.name} is no CSV of Nsight Compute that can be read ({error}): {_EXPORT}"
        ) from None
    finally:
        source.close()
    if not launches:
        raise NotATraceError(f"{source.name} is a CSV of Nsight Compute without a single kernel: {_EXPORT}")
    return rows_frame(launches, SCHEMA)


def _from_header(source: ByteSource) -> Iterator[str]:
    """Yield the lines from the CSV header on, without the output of the program and of ncu."""
    begun = False
    for line in _lines(source):
        begun = begun or _HEADER.match(line) is not None
        if begun and not line.startswith("=="):
            yield line


def _lines(source: ByteSource) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    rest = ""
    for block in source.blocks():
        *whole, rest = (rest + decoder.decode(block)).split("\n")
        yield from whole
        if len(rest) > _LONGEST_LINE:
            raise NotATraceError(
                f"{source.name} has a line of more than {_LONGEST_LINE >> 20} MiB, as no CSV of ncu has"
            )
    if rest:
        yield rest


Launch = list["str | float | None"]


def _of_metrics(rows: Iterator[list[str]], header: list[str]) -> list[Launch]:
    """The details page has a line for each metric of each launch."""
    place = {name: number for number, name in enumerate(header)}
    found: dict[tuple[str, str], tuple[Launch, dict[str, int]]] = {}
    for row in rows:
        if len(row) < len(header) - 6:  # the trailing rule columns may be missing
            continue
        cell = {name: row[number] if number < len(row) else "" for name, number in place.items()}
        key = (cell.get("Process ID", ""), cell["ID"])
        if key not in found:
            if len(found) >= MOST_LAUNCHES or not cell["ID"].strip():
                continue
            found[key] = _launch(cell), {}
        launch, ranks = found[key]
        if cell.get("Metric Unit", "") in _PERCENT:
            _set(launch, ranks, cell["Metric Name"], cell.get("Metric Value", ""))
    return [launch for launch, _ in found.values()]


def _of_columns(rows: Iterator[list[str]], header: list[str]) -> list[Launch]:
    """The raw page has a line for each launch, below a line with the units."""
    found: list[Launch] = []
    for row in rows:
        cell = dict(zip(header, row, strict=False))
        if not cell.get("ID", "").strip() or not cell.get("Kernel Name") or len(found) >= MOST_LAUNCHES:
            continue
        launch, ranks = _launch(cell), dict[str, int]()
        for name, value in cell.items():
            _set(launch, ranks, name, value)
        found.append(launch)
    return found


def _launch(cell: dict[str, str]) -> Launch:
    return [
        cell.get("Kernel Name", ""),
        _sizes(cell.get("Grid Size", "") or cell.get("launch__grid_dim", "")),
        _sizes(cell.get("Block Size", "") or cell.get("launch__block_dim", "")),
        *(None for _ in COUNTERS),
    ]


def _set(launch: Launch, ranks: dict[str, int], metric: str, value: str) -> None:
    known = _RANKS.get(metric.strip())
    if known is None:
        return
    column, rank = known
    number = _number(value)
    if number is not None and rank < ranks.get(column, len(_RANKS)):
        ranks[column] = rank
        launch[list(SCHEMA).index(column)] = number / 100


def _sizes(text: str) -> str | None:
    numbers = re.findall(r"\d{1,10}", text)
    return ",".join(numbers) if len(numbers) == 3 else None


def _number(text: str) -> float | None:
    """Parse a value such as "1,234.5"; None for "n/a" and for values that are not a share of a peak."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        return None
    return number if 0 <= number <= 1000 else None
