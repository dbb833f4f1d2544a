"""The history of runs for programs: schema 1, to which keys may be added and from which none is ever taken away."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import msgspec

from stepscope import __version__
from stepscope.compare.history import History, RunSeries
from stepscope.report.format import printable_json

SCHEMA: Final = 1


def history_json(history: History) -> bytes:
    """Everything in the history: times in nanoseconds, shares from 0 to 1, what is not known is null."""
    content = {
        "schema": SCHEMA,
        "stepscope": __version__,
        "series": [_series(series) for series in history.series],
        "left_out": [dataclasses.asdict(run) for run in history.left_out],
    }
    return printable_json(msgspec.json.format(msgspec.json.encode(_plain(content)), indent=2)) + b"\n"


def _series(series: RunSeries) -> dict[str, Any]:
    content = dataclasses.asdict(series)
    for change, kept in zip(content["changes"], series.changes, strict=True):
        change["run"] = series.runs[kept.position].name
        change["differences"] = [
            {"name": name, "before": before or None, "after": after or None} for name, before, after in kept.differences
        ]
    return content


def _plain(value: Any) -> Any:
    """Without what JSON has no word for."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
