"""Readers turn the files of each profiler into traces: one module or folder per format, opened through `open_trace`."""

from stepscope.readers.opening import READERS, open_trace, trace_files

__all__ = ["READERS", "open_trace", "trace_files"]
