"""Telemetry as CSV: every sample in `samples.csv`, what could not be had in `missing.csv`."""

from __future__ import annotations

from pathlib import Path

from stepscope.trace.csv_text import csv_text
from stepscope.trace.telemetry import Telemetry

NAME = "csv"


def export(telemetry: Telemetry, folder: Path, *, raw: bool = False) -> list[Path]:
    """Write both files; null is empty, NaN is "NaN", infinities are "inf" and "-inf".

    Args:
        raw: keep text that a spreadsheet takes for a formula, as `csv_text` does.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, table in (("samples.csv", telemetry.samples), ("missing.csv", telemetry.missing)):
        paths.append(folder / name)
        paths[-1].write_bytes(csv_text(table, raw=raw))
    return paths
