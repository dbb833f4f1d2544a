"""The definitions of Perfetto's messages, from the `perfetto` package; imported only where such a file is at hand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepscope.errors import UsageError

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace


def trace_message() -> type[Trace]:
    """The message that a Perfetto file is.

    Raises:
        UsageError: the package, or a protobuf new enough for it, is not installed.
    """
    try:
        messages = import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    except _unusable() as error:
        raise UsageError(
            "Perfetto traces need the packages perfetto and protobuf in versions that belong together "
            f"({str(error).partition('. ')[0]}): pip install --upgrade perfetto protobuf"
        ) from error
    found: type[Trace] = messages.Trace
    return found


def _unusable() -> tuple[type[Exception], ...]:
    """What is raised without the package, and by definitions that were made for a newer protobuf."""
    try:
        version = import_module("google.protobuf.runtime_version")
    except ImportError:
        return (ImportError, TypeError)
    return (ImportError, TypeError, version.VersionError)
