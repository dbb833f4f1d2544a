"""What a step would take with changes, for programs: schema 1, to which keys may be added."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import polars as pl

from stepscope import __version__
from stepscope.whatif.answer import Answer, Prospect

SCHEMA: Final = 1


def whatif_json(answer: Answer) -> dict[str, Any]:
    """Everything in an answer as plain values: times in nanoseconds, shares from 0 to 1, no NaN."""
    measured = answer.measured
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "trace": {
            "path": measured.path,
            "format": measured.format,
            "warnings": [dataclasses.asdict(each) for each in measured.warnings],
        },
        "steps": {"source": "recorded" if measured.stepped else "none", "count": measured.step_count},
        "step_ns": measured.step_ns,
        "replayed_step_ns": measured.replayed_step_ns,
        "device": measured.device,
        "unexplained_share": measured.unexplained_share,
        "why_not": measured.why_not,
        "resources": _rows(measured.resources),
        "causes": None if answer.causes is None else _rows(answer.causes),
        "changes": [_prospect(each) for each in answer.alone],
        "together": None if answer.together is None else _prospect(answer.together),
        "ranks": [dataclasses.asdict(each) for each in answer.ranks],
        "resources_then": None if answer.resources is None else _rows(answer.resources),
        "critical_path": None if answer.path is None else _rows(answer.path),
        "slack": None if answer.slack is None else _rows(answer.slack),
        "curve": None if answer.curve is None else _rows(answer.curve),
    }


def _prospect(prospect: Prospect) -> dict[str, Any]:
    return {
        "change": prospect.name,
        "step_ns": prospect.step_ns,
        "saving_ns": prospect.saving_ns,
        "saving_share": prospect.saving_share,
    }


def _rows(frame: pl.DataFrame) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for row in frame.iter_rows(named=True)]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
