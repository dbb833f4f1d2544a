"""What a profile is: typed tables, time, intervals; save and open. No file format is known here."""

from stepscope.trace.model import Metadata, Trace, TraceWarning
from stepscope.trace.window import Window

__all__ = ["Metadata", "Trace", "TraceWarning", "Window"]
