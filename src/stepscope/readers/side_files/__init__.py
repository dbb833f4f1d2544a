"""Files that a run writes beside its trace: framework counters and logs, and measurements by Nsight Compute."""

from stepscope.readers.side_files.framework_logs import (
    rank_in_name,
    read_fallback_log,
    read_gaudi_metrics,
    read_xla_debug_log,
    read_xla_metrics,
)

__all__ = ["rank_in_name", "read_fallback_log", "read_gaudi_metrics", "read_xla_debug_log", "read_xla_metrics"]
