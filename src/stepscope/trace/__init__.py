"""What a profile is: typed tables, time, intervals; save and open. No file format is known here.

A name is imported when it is first used: programs that are recorded need facts and names from here, and no Polars.
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
