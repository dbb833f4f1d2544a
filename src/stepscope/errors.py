"""Every error that stepscope raises on purpose.

    StepscopeError                 a user's mistake or a bad file: one sentence, exit code 2
    ├── UsageError                 an option, a selection or a query that cannot be carried out
    │   └── NoStepMarksError       steps were asked for, and nothing in the trace marks any
    ├── TraceError                 the trace cannot be used
    │   ├── NotATraceError         the file is something else, or nothing; the message says what it is
    │   ├── UnreadableTraceError   the file cannot be opened or holds no readable event
    │   ├── TooLargeError          the file asks for more than reading one may cost; the message names the option
    │   └── InconsistentTraceError the tables contradict each other (raised by Trace.check)
    ├── AgentError                 the agent of a process cannot be started or reached, or refuses
    ├── RunFolderError             a run's folder, or a file in it, cannot be made or written
    └── CacheError                 the cache, or the folder for temporary files, cannot be read or written

Anything else that comes out of the package is a bug: a command ends with exit code 70 and a report to send.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "AgentError",
    "CacheError",
    "InconsistentTraceError",
    "NoStepMarksError",
    "NotATraceError",
    "RunFolderError",
    "StepscopeError",
    "TooLargeError",
    "TraceError",
    "UnreadableTraceError",
    "UsageError",
]


_LONGEST: Final = 1_000


class StepscopeError(Exception):
    """Base of the tree above; the message is one sentence for the user, however long the names in it are."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) <= _LONGEST:
            return text
        return f"{text[: _LONGEST // 2]}... ({len(text) - _LONGEST:,} characters left out) ...{text[-_LONGEST // 2 :]}"


class UsageError(StepscopeError):
    """An option, a selection or a query that cannot be carried out."""


class NoStepMarksError(UsageError):
    """Steps were asked for, and nothing in the trace marks any; they may still follow from what repeats."""


class TraceError(StepscopeError):
    """The trace cannot be used."""


class NotATraceError(TraceError):
    """The file is something else than a trace, or nothing; the message says what was found."""


class UnreadableTraceError(TraceError):
    """The file cannot be opened, or nothing in it could be read."""


class TooLargeError(TraceError):
    """The file asks for more bytes, rows, time or memory than reading one may cost."""


class InconsistentTraceError(TraceError):
    """The tables of a trace contradict each other."""


class CacheError(StepscopeError):
    """The cache, or the folder for temporary files, cannot be read or written."""


class RunFolderError(StepscopeError):
    """A run's folder, or a file in it, cannot be made or written: the disk is full, or not ours to write."""


class AgentError(StepscopeError):
    """The agent of a process cannot be started or reached, or refuses what is asked of it."""
