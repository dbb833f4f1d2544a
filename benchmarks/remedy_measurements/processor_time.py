"""A clock that other programs on the machine do not disturb, for measurements on one core."""

from __future__ import annotations

PROCESSOR_TIME = """
if not torch.cuda.is_available():
    time.perf_counter_ns = time.process_time_ns  # one thread: what it takes but for waiting for a free core
"""
"""Begins a program whose steps are timed by what they take of a core; with a GPU the clock on the wall counts."""
