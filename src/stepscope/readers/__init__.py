"""From files to traces: one module a format, and the door to all of them."""

from stepscope.readers.opening import READERS, open_trace, trace_files

__all__ = ["READERS", "open_trace", "trace_files"]
