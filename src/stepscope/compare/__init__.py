"""Two runs side by side: which is faster, whether that is real, and where the difference comes from."""

from stepscope.compare.comparison import Comparison, Side, compare_sides, compare_traces
from stepscope.compare.record import SideSummary
from stepscope.compare.statistics import SampleComparison, compare_samples

__all__ = [
    "Comparison",
    "SampleComparison",
    "Side",
    "SideSummary",
    "compare_samples",
    "compare_sides",
    "compare_traces",
]
