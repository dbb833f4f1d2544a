"""What the recorded steps would take on several devices, for a terminal and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl

from stepscope.predict.links import Link
from stepscope.predict.scaling import ScaledStep
from stepscope.report.format import duration, printable
from stepscope.report.tables import table_lines
from stepscope.report.wrapping import filled

_EXACT: Final = 0.0005
"""A band that is narrower than this share of the step is not shown."""
_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    "devices": pl.Int64,
    "step": pl.String,
    "throughput": pl.String,
    "samples_per_s": pl.Float64,
    "efficiency_share": pl.Float64,
    "communication": pl.String,
    "exposed": pl.String,
    "stragglers": pl.String,
}


def scaling_text(device: str, link: Link | None, steps: Sequence[ScaledStep], *, width: int) -> str:
    """A table of the numbers of devices, what its columns mean, and what was not counted.

    Args:
        device: what they are, such as "H100-SXM"; "" where that is not known.
    """
    return "\n".join(_lines(device, link, steps, width)) + "\n"


def scaling_json(device: str, link: Link | None, steps: Sequence[ScaledStep]) -> dict[str, Any]:
    """The same as plain values: times in nanoseconds, shares from 0 to 1, null for what is not known."""
    return {
        "device": device or None,
        "link": None if link is None else _link(link),
        "steps": [dataclasses.asdict(each) for each in steps],
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "bandwidth_bytes_s": link.bandwidth_bytes_s,
        "fitted": link.fitted,
        "error": link.error,
        "source": link.source,
    }


def _lines(device: str, link: Link | None, steps: Sequence[ScaledStep], width: int) -> Iterator[str]:
    what = f"on several {printable(device)}" if device else "on several devices"
    name = "" if link is None else "the recorded link" if link.fitted else printable(link.name)
    over = "" if link is None else f" over {name} ({link.bandwidth_bytes_s / 1e9:.4g} GB/s)"
    yield f"What a step would take {what}{over}, each with a batch as large as the recorded one"
    first = steps[0]
    rows = [
        {
            "devices": each.devices,
            "step": _step(each),
            "throughput": f"{each.devices * each.efficiency:.2f} x",
            "samples_per_s": each.samples_per_s,
            "efficiency_share": each.efficiency,
            "communication": duration(each.communication_ns),
            "exposed": duration(each.exposed_ns),
            "stragglers": duration(each.straggler_ns),
        }
        for each in steps
    ]
    table = pl.DataFrame(rows, schema=_COLUMNS)
    if first.samples_per_s is None:
        table = table.drop("samples_per_s")
    if not any(each.straggler_ns for each in steps):
        table = table.drop("stragglers")
    yield from ("  " + line for line in table_lines(table, width=width - 2))
    meaning = (
        "efficiency: of as many times one device's throughput; communication: all messages of a step; exposed: by how "
        "much they make it longer"
    )
    if first.recorded_ranks > 1:
        meaning += ", with waiting for late ranks and slower computation beside them: it can exceed communication"
    if "stragglers" in table.columns:
        meaning += "; stragglers: waiting for the slowest device, as the recorded steps vary"
    yield from filled(meaning, width, "  ", "  ")
    for note in dict.fromkeys(note for each in steps for note in each.notes):
        yield from filled(f"Note: {printable(note)}.", width, "", "  ")


def _step(step: ScaledStep) -> str:
    whole = duration(step.step_ns)
    if step.high_ns - step.low_ns < _EXACT * step.step_ns:
        return whole
    low, high = duration(step.low_ns), duration(step.high_ns)
    number, unit = low.split(" ")
    return f"{whole} ({number if high.endswith(' ' + unit) else low} to {high})"
