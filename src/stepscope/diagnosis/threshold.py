"""A number that a rule compares with, which the user can set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """Default, unit and meaning of one threshold.

    Attributes:
        unit: "share" (0 to 1), "ns", "bytes" or "count".
    """

    value: float
    unit: str
    meaning: str
