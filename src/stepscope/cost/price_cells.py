"""Cells of price lists: names, amounts and days, with what is no such thing refused in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Any, Final

PROVIDER: Final = re.compile(r"[a-z0-9][a-z0-9 ._-]{0,39}")
_LARGEST_USD_H: Final = 100_000.0
_LONGEST_NAME: Final = 100
_MOST_GPUS: Final = 10_000
_ZONE: Final = re.compile(r"(.+-[a-z]+\d)-[a-z]")


class BadRowError(Exception):
    """Why a row cannot be used."""


def text_in(row: Mapping[str, Any], key: str, what: str, *, longest: int = _LONGEST_NAME) -> str:
    """A name, empty where there is none; refused where it could be taken for a formula or a terminal's command."""
    text = str(row.get(key) or "").strip()
    if len(text) > longest:
        raise BadRowError(f"a name of the {what} that is longer than {longest} characters")
    if not text.isprintable():
        raise BadRowError(f"a name of the {what} with characters that cannot be seen")
    if text[:1] in ("=", "+", "-", "@"):
        raise BadRowError(f"a name of the {what} that begins like a formula")
    return text


def provider_in(value: Any) -> str:
    """A provider's name in lower case."""
    lower = str(value or "").strip().lower()
    if not PROVIDER.fullmatch(lower):
        raise BadRowError("no usable name of a provider")
    return lower


def region_of(zone: str) -> str:
    """The region of a zone such as us-central1-a; a region stays."""
    match = _ZONE.fullmatch(zone)
    return match[1] if match else zone


def amount_in(value: str | None, what: str) -> float | None:
    """A number that is not negative; None where there is none."""
    text = (value or "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}(?:\.\d{0,20})?", text):
        raise BadRowError(f"{what} that is no amount")
    return float(text) or None


def usd_in(value: str | None) -> float | None:
    """A price of an hour; None where there is none."""
    text = (value or "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}(?:\.\d{0,20})?(?:[eE]-?\d{1,2})?", text):
        raise BadRowError("a price that is no amount")
    usd = float(text)
    if not 0 < usd <= _LARGEST_USD_H:
        raise BadRowError("a price of nothing" if not usd else f"a price above {_LARGEST_USD_H:,.0f} USD an hour")
    return usd


def count_in(value: str | None) -> int:
    """How many accelerators; lists write 8 as 8.0."""
    text = (value or "").strip()
    if not re.fullmatch(r"\d{1,6}(?:\.0*)?", text) or not 0 < float(text) <= _MOST_GPUS:
        raise BadRowError("a count of accelerators that is no whole number from 1 on")
    return int(float(text))


def day_in(value: str | None) -> date | None:
    """A day such as 2026-11-01; None where there is none."""
    try:
        return date.fromisoformat((value or "").strip()) if value else None
    except ValueError as error:
        raise BadRowError("a date that is none") from error


def memory_in(info: str | None) -> float | None:
    """Of one GPU, in GiB, from SkyPilot's GpuInfo; never evaluated, although it looks like Python."""
    match = re.search(r"'SizeInMiB': ?(\d{1,9})", (info or "")[:10_000])
    return int(match[1]) / 1024 if match else None
