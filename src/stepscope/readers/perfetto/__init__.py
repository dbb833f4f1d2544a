"""Perfetto traces: protobuf packets of track events."""

from stepscope.readers.perfetto.packets import recognises
from stepscope.readers.perfetto.reader import read

NAME = "perfetto"
__all__ = ["NAME", "read", "recognises"]
