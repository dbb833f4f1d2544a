"""Phrases that several reports share: changes with their intervals, warnings, file names."""

from __future__ import annotations

from typing import Final

from stepscope.report.format import count, share
from stepscope.trace import TraceWarning

_MANY_TIMES: Final = 9.0
"""From this change on, a time is given as a multiple of the other."""


def file_name(path: str) -> str:
    """The last part of a path on any operating system."""
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def warning_sentence(warning: TraceWarning) -> str:
    """Say what was skipped or repaired while reading."""
    return f"{count(warning.count)} x {warning.kind}: {warning.detail}"


def change_words(change: float) -> str:
    """A change as "21.8 % less", "3.0 % more" or "the same"."""
    if change == 0:
        return "the same"
    return f"{share(abs(change))} {'more' if change > 0 else 'less'}"


def interval_words(low: float, high: float) -> str:
    """An interval of changes: "20.1 % to 23.4 % less", "2.1 % less to 2.9 % more", "5.0 % less to 12 times as long"."""
    if high <= 0:
        return f"{share(-high)} to {share(-low)} less"
    most = f"{share(high)} more" if high < _MANY_TIMES else f"{count(round(1 + high))} times as long"
    if low >= 0:
        least = share(low) if high < _MANY_TIMES else f"{share(low)} more"
        return f"{least} to {most}"
    return f"{share(-low)} less to {most}"


def share_of(confidence: float) -> str:
    """A confidence as "95 %"."""
    return f"{count(round(confidence * 100, 2))} %"
