"""A stretch of a trace, and how a user writes one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from stepscope.errors import UsageError

_UNITS_NS: Final = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "": 1_000_000_000}
_TIME = re.compile(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*(ns|us|ms|s|)\s*")


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open stretch [start_ns, end_ns) in nanoseconds from the start of the trace."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Length in nanoseconds."""
        return self.end_ns - self.start_ns

    @classmethod
    def parse(cls, text: str) -> Window:
        """A window from "2s:4s", "150ms:", ":1.5s"; a number without unit is seconds, an open end is unbounded.

        Raises:
            UsageError: the text is no window, or is empty.
        """
        first, colon, last = text.partition(":")
        if not colon:
            raise UsageError(f"a window is START:END, such as 2s:4s or 150ms:, not {text!r}")
        window = cls(_time_ns(first, 0, text), _time_ns(last, 2**62, text))
        if window.duration_ns <= 0:
            raise UsageError(f"the window {text!r} ends before it begins")
        return window


def _time_ns(text: str, default: int, whole: str) -> int:
    if not text.strip():
        return default
    match = _TIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} in the window {whole!r} is no time: write a number with ns, us, ms or s")
    return min(int(Decimal(match[1]) * _UNITS_NS[match[2]]), 2**62)


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps first to last, both included, by the numbers their annotations carry."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> StepRange:
        """A range from "3", "3:5", "3:" or ":5".

        Raises:
            UsageError: the text is no range of steps, or is empty.
        """
        match = re.fullmatch(r"\s*(\d{0,18})\s*(?:(:)\s*(\d{0,18})\s*)?", text)
        if match is None or not (match[1] or match[3]):
            raise UsageError(f"steps are FIRST:LAST, such as 3:5, or one number, not {text!r}")
        first = int(match[1]) if match[1] else 0
        last = int(match[3]) if match[3] else (2**62 if match[2] else first)
        if last < first:
            raise UsageError(f"the steps {text!r} end before they begin")
        return cls(first, last)
