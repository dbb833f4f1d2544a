"""Comparison of runs: which is faster, whether the difference is significant, and where it comes from."""

from stepscope.compare.comparison import Comparison, Side, compare_sides, compare_traces
from stepscope.compare.statistics import SampleComparison, compare_samples
from stepscope.compare.trace_record import SideSummary

__all__ = [
    "Comparison",
    "SampleComparison",
    "Side",
    "SideSummary",
    "compare_samples",
    "compare_sides",
    "compare_traces",
]
