"""The flame graph as the HTML report's templates and script need it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from markupsafe import Markup

from stepscope.analysis.flame import FlameGraph
from stepscope.analysis.phases import PHASES
from stepscope.report.format import count, duration, printable

View: TypeAlias = dict[str, Any]
"""What a template fills in."""

KINDS: Final = ("line", "phase", "operator", "other")
_LINE: Final = re.compile(r".+:\d+ .+", re.DOTALL)
_OPERATOR: Final = re.compile(r"^[\w.]+::\w|Backward\d*$")
_MARKUP: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def flame_view(graph: FlameGraph) -> View:
    """The graph's data for the page's script, what its widths are, and what it leaves out."""
    names: dict[str, int] = {}
    frames = [[names.setdefault(frame.name, len(names)), frame.parent, frame.ns] for frame in graph.frames]
    data = {
        "total": graph.total_ns,
        "frames": frames,
        "names": [printable(name) for name in names],
        "kinds": [KINDS.index(_kind(name)) for name in names],
    }
    # ASCII without <, > and &, so that nothing in it can end the script element.
    encoded = Markup(json.dumps(data, separators=(",", ":")).translate(_MARKUP))
    return {
        "data": encoded,
        "total": duration(graph.total_ns),
        "basis": "device time" if graph.basis == "device" else "operators’ own time",
        "reduced": f"{count(graph.dropped)} smaller frames are left out" if graph.dropped else "",
        "kinds": [kind for kind in KINDS if any(_kind(name) == kind for name in names)],
    }


def graphs_or_none(graphs: Sequence[FlameGraph | None] | None, number: int) -> Sequence[FlameGraph | None]:
    """One graph, or None, for each of the ranks."""
    return [None] * number if graphs is None else graphs


def _kind(name: str) -> str:
    if name in PHASES:
        return "phase"
    if _LINE.fullmatch(name):
        return "line"
    return "operator" if _OPERATOR.search(name) else "other"
