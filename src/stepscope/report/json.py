"""Write reports as JSON, schema 1: keys may be added, but none is ever removed.

msgspec writes the records of the analyses: times in integer nanoseconds, shares from 0 to 1, null for NaN and
infinities.
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
    """The report as indented UTF-8 text with one line break at the end; invisible characters are escaped."""
    encoded = msgspec.json.encode(report, enc_hook=_plain)
    return printable_json(msgspec.json.format(encoded, indent=2)) + b"\n"


def _plain(value: object) -> object:
    return value.rows(named=True) if isinstance(value, pl.DataFrame) else str(value)


def stamped(**content: Any) -> dict[str, Any]:
    """A report's keys, preceded by the number of the schema and the version."""
    return {"schema": SCHEMA, "stepscope": __version__, **content}


def fields(record: Any, *names: str) -> dict[str, Any]:
    """Attributes of a record by name; by default all its fields."""
    names = names or tuple(field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names}
