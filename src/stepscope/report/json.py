"""Reports for programs: schema 1, to which keys may be added and from which none is ever taken away.

The records are those of the analyses. msgspec writes them: times in integer nanoseconds, shares from 0 to 1, null for
numbers that JSON has no word for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import polars as pl

from stepscope import __version__
from stepscope.diagnosis.diagnosis import Diagnosis, Unreadable
from stepscope.diagnosis.finding import Finding
from stepscope.report.format import printable_json
from stepscope.report.trace_report import TraceReport

SCHEMA: Final = 1
_RATIOS: Final = ("device_ratio", "device_host_ratio", "low_precision_ratio", "host_overlap")


def json_bytes(report: dict[str, Any]) -> bytes:
    """The report as indented UTF-8 text, one line break at the end; what cannot be seen is escaped."""
    encoded = msgspec.json.encode(report, enc_hook=_plain)
    return printable_json(msgspec.json.format(encoded, indent=2)) + b"\n"


def _plain(value: object) -> object:
    return value.rows(named=True) if isinstance(value, pl.DataFrame) else str(value)


def stamped(**content: Any) -> dict[str, Any]:
    """A report's keys below the number of the schema and the version."""
    return {"schema": SCHEMA, "stepscope": __version__, **content}


def fields(record: Any, *names: str) -> dict[str, Any]:
    """Attributes of a record by name; by default all its fields."""
    names = names or tuple(field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names}


def json_reports(
    reports: Sequence[TraceReport], across: Sequence[Finding] = (), unreadable: Sequence[Unreadable] = ()
) -> dict[str, Any]:
    """The report of one trace, or of several as {"schema", "stepscope", "ranks": [a report each], "across_ranks"}.

    Args:
        across: findings about the ranks together.
        unreadable: files that there is no diagnosis of, as {"path", "reason"}.
    """
    found = [json_report(report) for report in reports]
    if len(found) == 1:
        return {**found[0], "unreadable": unreadable}
    return stamped(ranks=found, across_ranks=[_finding(finding) for finding in across], unreadable=unreadable)


def json_report(report: TraceReport) -> dict[str, Any]:
    """Everything in the report of one trace but what is drawn."""
    from stepscope.report.energy import trace_json

    diagnosis = report.diagnosis
    return stamped(
        trace=_trace(diagnosis),
        devices=diagnosis.devices,
        summary=_summary(diagnosis),
        steps={
            "source": diagnosis.step_source,
            "step_ns": diagnosis.step_ns,
            "count": diagnosis.step_count,
            "list": diagnosis.steps,
        },
        **fields(diagnosis, "idle", "host", "operators", "operator_count", "kernels", "kernel_count"),
        findings=[_finding(finding) for finding in diagnosis.findings],
        findings_hidden=diagnosis.hidden,
        **fields(diagnosis, "together", "afterwards", "not_answered"),
        **({"applied": diagnosis.applied} if diagnosis.applied else {}),
        **({} if report.energy is None else {"energy": trace_json(report.energy)}),
    )


def _trace(diagnosis: Diagnosis) -> dict[str, Any]:
    metadata = diagnosis.metadata
    names = ("path", "format", "events", "rank", "world_size", "origin_unix_ns", "host", "window")
    evidence = {"evidence": metadata.evidence} if metadata.evidence is not None else {}
    return {**fields(metadata, *names), "warnings": diagnosis.warnings, **evidence}


def _summary(diagnosis: Diagnosis) -> dict[str, Any]:
    """How well devices and host were used: their times, and the ratios that follow from them."""
    devices = [{**fields(use), **fields(use, *_RATIOS)} for use in diagnosis.device_uses]
    engines = {"engines": diagnosis.engine_uses} if diagnosis.engine_uses else {}
    return {"devices": devices, "host": diagnosis.host_use, **engines}


def _finding(finding: Finding) -> dict[str, Any]:
    names = ("rule", "title", "severity", "saving_ns_per_step", "saving_share", "saving_basis", "saving_from")
    return fields(finding, *names, "confidence", "ends_run_in_ns", "evidence", "where", "remedy")
