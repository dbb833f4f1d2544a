"""How much of a file readers take before they refuse it; more is made to exhaust a machine, or must be asked for."""

from __future__ import annotations

import os
import re
from typing import Final

from stepscope.errors import NotATraceError, UsageError

VARIABLE: Final = "STEPSCOPE_LIMITS"
DEFAULTS: Final = {"rows": 100_000_000, "bytes": 64 * 2**30, "values": 200_000_000}
"""Rows of all tables, unpacked bytes of the file, values of a pickle. A trace of 2 GB has some 15 million rows."""
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_NOUNS: Final = {"rows": "events", "bytes": "unpacked bytes", "values": "values"}


class Budget:
    """What may still be taken of one kind in one file."""

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self._name = kind, name
        self.limit = self._left = limit(kind)

    def take(self, count: int) -> None:
        """Count so many more.

        Raises:
            NotATraceError: there are too many.
        """
        self._left -= count
        if self._left < 0:
            raise self.exceeded()

    def exceeded(self) -> NotATraceError:
        """What to say of a file that holds more."""
        return NotATraceError(
            f"{self._name} holds more than {self.limit:,} {_NOUNS[self._kind]}: "
            f"{VARIABLE}={self._kind}={2 * self.limit} in the environment allows more"
        )


def limit(kind: str) -> int:
    """The limit of a kind, by default or as the variable says: "rows=50M,bytes=100G".

    Raises:
        UsageError: the variable says something else.
    """
    found = dict(DEFAULTS)
    for word in filter(None, os.environ.get(VARIABLE, "").split(",")):
        match = re.fullmatch(r"\s*(\w+)=([0-9]{1,15})([KMG]?)\s*", word)
        if match is None or match[1] not in found:
            raise UsageError(f"{VARIABLE} holds {word!r}, where {', '.join(found)} take a number, such as rows=50M")
        found[match[1]] = int(match[2]) * _UNITS[match[3]]
    return found[kind]
