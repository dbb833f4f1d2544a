"""Telemetry as CSV: every sample in `samples.csv`, what could not be had in `missing.csv`."""

from __future__ import annotations

from pathlib import Path

from stepscope.trace.telemetry import Telemetry

NAME = "csv"


def export(telemetry: Telemetry, folder: Path) -> list[Path]:
    """Write both files; null is empty, NaN is "NaN", infinities are "inf" and "-inf".

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, table in (("samples.csv", telemetry.samples), ("missing.csv", telemetry.missing)):
        paths.append(folder / name)
        table.write_csv(paths[-1])
    return paths
