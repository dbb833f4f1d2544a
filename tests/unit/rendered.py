"""Reports of diagnoses in every form, for tests of what stands in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.report.diagnosis import TraceReport, diagnosis_document, json_reports
from stepscope.report.document import json_bytes
from stepscope.report.text import markdown_of, text_of
from tests.published_schema import wrong_in


def reports_of(diagnoses: Sequence[Diagnosis], **parts: Sequence[Any]) -> list[TraceReport]:
    """A report for each diagnosis; `parts` are its other attributes, one of each for every diagnosis."""
    rows = [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)] or [{} for _ in diagnoses]
    return [TraceReport(diagnosis, **row) for diagnosis, row in zip(diagnoses, rows, strict=True)]


def text_reports(
    diagnoses: Sequence[Diagnosis],
    *,
    width: int,
    top: int,
    colour: bool = False,
    every: bool = False,
    energies: Sequence[Any] = (),
    **about: Any,
) -> str:
    reports = reports_of(diagnoses, **({"energy": energies} if energies else {}))
    return text_of(diagnosis_document(reports, every=every, **about), width=width, colour=colour, top=top)


def text_report(diagnosis: Diagnosis, *, width: int, top: int, colour: bool = False) -> str:
    return text_reports([diagnosis], width=width, colour=colour, top=top)


def markdown_reports(diagnoses: Sequence[Diagnosis], *, top: int, energies: Sequence[Any] = (), **about: Any) -> str:
    reports = reports_of(diagnoses, **({"energy": energies} if energies else {}))
    return markdown_of(diagnosis_document(reports, **about), top=top)


def markdown_report(diagnosis: Diagnosis, *, top: int) -> str:
    return markdown_reports([diagnosis], top=top)


def json_of(diagnoses: Sequence[Diagnosis], *arguments: Any, energies: Sequence[Any] = (), **about: Any) -> Any:
    """What a program reads of the reports."""
    reports = reports_of(diagnoses, **({"energy": energies} if energies else {}))
    return written(json_reports(reports, *arguments, **about))


def json_report(diagnosis: Diagnosis) -> Any:
    """The same of one, without the list of files that could not be read."""
    report = json_of([diagnosis])
    assert report.pop("unreadable") == []
    return report


def written(report: dict[str, Any]) -> Any:
    """What a program reads of a report, which is as the published schema says."""
    document = json.loads(json_bytes(report))
    wrong = wrong_in(document)
    assert wrong == [], wrong
    return document


_RENEW = bool(os.environ.get("STEPSCOPE_RENEW"))  # before the tests take such variables away
PAGES = Path(__file__).parent.parent / "golden" / "pages"


def golden(name: str, text: str) -> str:
    """The page that is kept under a name; with STEPSCOPE_RENEW=1 it becomes this text."""
    page = PAGES / name
    if _RENEW:
        page.write_text(text, encoding="utf-8")
    return page.read_text(encoding="utf-8")


def documents_in(page: str) -> dict[str, Any]:
    """What a report file has embedded, by its address."""
    found = re.search(r'<script type="application/json" id="stepscope-documents">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    documents: dict[str, Any] = json.loads(found[1])
    return documents
