"""Real traces for tests of what is made of them: each is read once. That reading is exact, test_real_traces says."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from stepscope.readers import open_trace
from stepscope.trace import Trace
from stepscope.trace.cache import TraceCache


@lru_cache(maxsize=2)
def opened(path: Path) -> Trace:
    return open_trace(path, cache=TraceCache())
