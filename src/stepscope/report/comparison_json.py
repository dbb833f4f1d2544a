"""A comparison for programs: schema 1, to which keys may be added and from which none is ever taken away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import polars as pl

from stepscope import __version__
from stepscope.compare.comparison import Comparison, SideSummary
from stepscope.report.comparison_sentences import advice, where_sentences
from stepscope.report.comparison_text import verdict_sentence
from stepscope.report.format import printable_json

SCHEMA: Final = 1
TABLES: Final = ("causes", "lines", "operators", "kernels", "modules", "communication", "memory", "settings")
"""The tables of a comparison, by the names that they have as attributes and as keys."""


def comparison_report(comparisons: Sequence[Comparison], *, top: int = 0) -> dict[str, Any]:
    """Everything in the comparisons as plain values: times in nanoseconds, shares from 0 to 1, no NaN.

    Args:
        top: rows of each table, 0 for all. Causes and settings are never cut.
    """
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "comparisons": [_comparison(comparison, top) for comparison in comparisons],
    }


def comparison_bytes(report: dict[str, Any]) -> bytes:
    """The report as indented UTF-8 text, one line break at the end; what cannot be seen is escaped."""
    return printable_json(msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2)) + b"\n"


def _comparison(comparison: Comparison, top: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "verdict": comparison.samples.verdict,
        "sentences": [verdict_sentence(comparison.samples), *where_sentences(comparison), *advice(comparison)],
        "samples": {**_fields(comparison.samples), "is_unprofiled": comparison.is_unprofiled},
        "basis": comparison.basis,
        "difference_ns": comparison.difference_ns,
        "notes": list(comparison.notes),
        "energies": [_fields(each) for each in comparison.energies],
    }
    for name in TABLES:
        table: pl.DataFrame = getattr(comparison, name)
        cut = table if not top or name in ("causes", "settings") else table.head(top)
        report[name] = cut.rows(named=True)
        report[f"{name}_count"] = table.height
    return report


def _side(side: SideSummary) -> dict[str, Any]:
    names = ("name", "paths", "ranks", "runs", "basis", "devices", "step_source", "step_count", "total_ns", "step_ns")
    return {
        **{name: getattr(side, name) for name in names},
        "left_out": [_fields(step) for step in side.left_out],
        "warnings": [_fields(warning) for warning in side.warnings],
    }


def _fields(thing: Any) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in type(thing).__dataclass_fields__}
