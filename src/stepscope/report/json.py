"""Reports for programs: schema 1, to which keys may be added and from which none is ever taken away.

The records are those of the analyses. msgspec writes them: times in integer nanoseconds, shares from 0 to 1, null for
numbers that JSON has no word for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import msgspec
import polars as pl

from stepscope import __version__
from stepscope.report.format import printable_json

SCHEMA: Final = 1


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
