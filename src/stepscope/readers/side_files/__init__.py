"""Files that a run leaves beside its trace: counts and logs of the framework, read as `stepscope.trace.evidence`."""

from stepscope.readers.side_files.gaudi import rank_in_name, read_fallback_log, read_gaudi_metrics
from stepscope.readers.side_files.xla import read_xla_debug_log, read_xla_metrics

__all__ = ["rank_in_name", "read_fallback_log", "read_gaudi_metrics", "read_xla_debug_log", "read_xla_metrics"]
