"""The data model of a profile: typed tables, time and intervals, saving and opening; independent of file formats.

Names are imported on first use, because recorded programs need facts and names from here but not Polars.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.trace.metadata import Metadata, TraceWarning
    from stepscope.trace.model import Trace
    from stepscope.trace.window import Window

_HOMES = {"Metadata": "metadata", "Trace": "model", "TraceWarning": "metadata", "Window": "window"}

__all__ = ["Metadata", "Trace", "TraceWarning", "Window"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
