"""The report for programs: schema 1, to which keys may be added and from which none is ever taken away."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import polars as pl

from stepscope import __version__
from stepscope.cost.energy_parts import TraceEnergy
from stepscope.diagnosis.diagnosis import Diagnosis, Unreadable
from stepscope.diagnosis.finding import Finding
from stepscope.report.energy_json import trace_json
from stepscope.report.energy_section import each_or_none
from stepscope.report.format import printable_json

SCHEMA: Final = 1


def json_reports(
    diagnoses: Sequence[Diagnosis],
    across: Sequence[Finding] = (),
    unreadable: Sequence[Unreadable] = (),
    energies: Sequence[TraceEnergy | None] = (),
) -> dict[str, Any]:
    """The report of one trace, or of several as {"schema", "stepscope", "ranks": [a report each], "across_ranks"}.

    Args:
        across: findings about the ranks together.
        unreadable: files that there is no diagnosis of, as {"path", "reason"}.
        energies: what each rank's run measured of its energy; none where it measured none.
    """
    measured = each_or_none(energies, len(diagnoses))
    reports = [json_report(diagnosis, energy) for diagnosis, energy in zip(diagnoses, measured, strict=True)]
    without = [_plain(each) for each in unreadable]
    if len(diagnoses) == 1:
        return {**reports[0], "unreadable": without}
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "ranks": reports,
        "across_ranks": [_finding(finding) for finding in across],
        "unreadable": without,
    }


def json_report(diagnosis: Diagnosis, energy: TraceEnergy | None = None) -> dict[str, Any]:
    """Everything in a diagnosis as plain values: times in integer nanoseconds, shares from 0 to 1, no NaN."""
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "trace": _trace(diagnosis),
        "devices": [_plain(device) for device in diagnosis.devices],
        "summary": _summary(diagnosis),
        "steps": {
            "source": diagnosis.step_source,
            "step_ns": diagnosis.step_ns,
            "count": diagnosis.step_count,
            "list": _rows(diagnosis.steps),
        },
        "idle": _rows(diagnosis.idle),
        "host": _rows(diagnosis.host),
        "operators": _rows(diagnosis.operators),
        "operator_count": diagnosis.operator_count,
        "kernels": _rows(diagnosis.kernels),
        "kernel_count": diagnosis.kernel_count,
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "findings_hidden": diagnosis.hidden,
        "together": _plain(diagnosis.together),
        "afterwards": [_plain(each) for each in diagnosis.afterwards],
        "not_answered": [_plain(question) for question in diagnosis.not_answered],
        **({"applied": list(diagnosis.applied)} if diagnosis.applied else {}),
        **({} if energy is None else {"energy": trace_json(energy)}),
    }


def json_bytes(report: dict[str, Any]) -> bytes:
    """The report as indented UTF-8 text, one line break at the end; what cannot be seen is escaped."""
    return printable_json(msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2)) + b"\n"


def _trace(diagnosis: Diagnosis) -> dict[str, Any]:
    metadata = diagnosis.metadata
    return {
        "path": metadata.path,
        "format": metadata.format,
        "events": metadata.events,
        "rank": metadata.rank,
        "world_size": metadata.world_size,
        "origin_unix_ns": metadata.origin_unix_ns,
        "host": metadata.host,
        "window": _plain(metadata.window),
        "warnings": [_plain(warning) for warning in diagnosis.warnings],
        **({"evidence": _plain(metadata.evidence)} if metadata.evidence is not None else {}),
    }


def _summary(diagnosis: Diagnosis) -> dict[str, Any]:
    """How well devices and host were used: their times, and the ratios that follow from them."""
    ratios = ("device_ratio", "device_host_ratio", "low_precision_ratio", "host_overlap")
    devices = [
        {**_plain(use), **{name: _plain(getattr(use, name)) for name in ratios}} for use in diagnosis.device_uses
    ]
    engines = {"engines": [_plain(use) for use in diagnosis.engine_uses]} if diagnosis.engine_uses else {}
    return {"devices": devices, "host": _plain(diagnosis.host_use), **engines}


def _finding(finding: Finding) -> dict[str, Any]:
    keys = (
        "rule",
        "title",
        "severity",
        "saving_ns_per_step",
        "saving_share",
        "saving_basis",
        "saving_from",
        "confidence",
    )
    report = {key: _plain(getattr(finding, key)) for key in keys}
    report["ends_run_in_ns"] = finding.ends_run_in_ns
    report["evidence"] = _plain(finding.evidence)
    report["where"] = _plain(finding.where)
    report["remedy"] = _plain(finding.remedy)
    return report


def _rows(frame: pl.DataFrame) -> list[Any]:
    return [_plain(row) for row in frame.iter_rows(named=True)]


def _plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists, and null for numbers that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
