"""What torch.compile compiled, and the guards that failed before it compiled anew: as torch itself keeps it."""

from __future__ import annotations

import sys
from typing import Any, Final

from stepscope.capture import guard
from stepscope.program_facts import CompilationFacts

_LONGEST_REASON: Final = 2_000


def compilations() -> tuple[CompilationFacts, ...]:
    """The latest compilations of this process, the earliest first; torch keeps 64. Empty where nothing was compiled."""
    module = sys.modules.get("torch._dynamo.utils")
    kept = getattr(module, "get_compilation_metrics", None)
    found = []
    for metrics in kept() if kept is not None else ():
        with guard.attempt():
            if metrics.co_name:  # a backward pass that is compiled later has none
                found.append(_compilation(metrics))
    return tuple(found)


def _compilation(metrics: Any) -> CompilationFacts:
    reason = getattr(metrics, "recompile_reason", None)
    start, duration = getattr(metrics, "start_time_us", None), getattr(metrics, "duration_us", None)
    return CompilationFacts(
        function=str(metrics.co_name),
        file=metrics.co_filename,
        line=metrics.co_firstlineno,
        reason=str(reason)[:_LONGEST_REASON] if reason else None,
        start_unix_ns=int(start) * 1000 if start is not None else None,
        duration_ns=int(duration) * 1000 if duration is not None else None,
    )
