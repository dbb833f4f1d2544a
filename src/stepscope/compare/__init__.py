"""Two runs side by side: which is faster, whether that is real, and where the difference comes from."""

from stepscope.compare.statistics import SampleComparison, compare_samples

__all__ = ["SampleComparison", "compare_samples"]
