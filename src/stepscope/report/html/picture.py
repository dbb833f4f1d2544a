"""Prepare step pictures and the colours of causes for the HTML report's templates and script."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from markupsafe import Markup

from stepscope.analysis.flame import FlameGraph
from stepscope.analysis.host import CAUSES
from stepscope.analysis.module_paths import PHASES
from stepscope.analysis.picture import PathPiece, Shown, StepPicture
from stepscope.report.format import cell, count, duration, printable

View: TypeAlias = dict[str, Any]
"""Variables of a template."""

# Okabe and Ito's colour-blind safe palette; related causes share a colour, the second one hatched.
_ORANGE, _SKY, _GREEN, _YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
_BLUE, _VERMILLION, _PURPLE, _GREY = "#0072b2", "#d55e00", "#cc79a7", "#9aa0a6"
_BROWN: Final = "#8a5a44"
_COLOURS: Final[dict[str, tuple[str, bool]]] = {
    "input": (_ORANGE, False),
    "host_to_device_copy": (_ORANGE, True),
    "synchronisation": (_VERMILLION, False),
    "logging": (_VERMILLION, True),
    "compilation": (_PURPLE, False),
    "garbage_collection": (_PURPLE, True),
    "graph_tracing": (_BROWN, False),
    "step_marker": (_BROWN, True),
    "allocation": (_YELLOW, False),
    "checkpoint": (_YELLOW, True),
    "communication": (_BLUE, False),
    "dependency": (_BLUE, True),
    "dispatch": (_GREEN, False),
    "optimizer": (_GREEN, True),
    "python": (_SKY, False),
    "launch_latency": (_SKY, True),
    "untraced": (_GREY, False),
    "profiler_overhead": (_GREY, True),
    "once": ("#5f6670", False),
}
_OTHER_COLOUR: Final = ("#5f6670", True)
_COMPUTE: Final = "#9fb9d4"
_DEVICE_RESOURCES: Final[dict[str, tuple[str, str, str, bool]]] = {
    "compute": ("device: computation", "the device computed", _COMPUTE, False),
    "communication": ("communication", "data moved between ranks, or one waited for the others", _BLUE, False),
    "copy": ("device: copies", "memory was copied", "#e0d3ad", False),
    "launch_latency": ("launch latency", CAUSES["launch_latency"], _SKY, True),
    "wait": ("unexplained", CAUSES["unknown"], *_OTHER_COLOUR),
}
_MARKUP: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def picture_view(picture: StepPicture, *, scale_ns: int | None = None) -> View:
    """The picture's data for the page's script, its legend, and what it leaves out.

    Args:
        scale_ns: length of the time axis, if a longer step is drawn beside this one.
    """
    causes = sorted({gap.cause for gap in picture.gaps}, key=_cause_order)
    devices = {lane.device for lane in picture.lanes if lane.kind == "queue"} | {gap.device for gap in picture.gaps}
    resources, names = _resources(picture.path), _Numbering()
    data = {
        "start": picture.start_ns,
        "duration": picture.duration_ns,
        "lanes": [[each.label, each.kind, each.device, each.rows, each.around] for each in picture.lanes],
        "slices": [[s.lane, s.depth, s.start_ns, s.duration_ns, names[s.name], names[s.kind]] for s in picture.slices],
        "devices": sorted(devices),
        "gaps": [[g.device, g.start_ns, g.duration_ns, names[g.cause], names[g.trigger or ""]] for g in picture.gaps],
        "causes": {cause: cause_view(cause) for cause in causes},
    }
    if picture.path:
        data["path"] = [
            [p.start_ns, p.duration_ns, names[resource_key(p.kind, p.cause)], names[p.name]] for p in picture.path
        ]
        data["resources"] = resources
    data["names"] = list(names)
    if scale_ns is not None:
        data["scale"] = scale_ns
    return {
        "data": script_json(data),
        "legend": [cause_view(cause) for cause in causes],
        "path": list(resources.values()),
        "kinds": sorted({each.kind for each in picture.slices}),
        "length": duration(picture.duration_ns),
        "start": cell("start_ns", picture.start_ns),
        "reduced": _reduced(picture),
        "empty": not picture.lanes and not picture.gaps,
    }


def _reduced(picture: StepPicture) -> list[str]:
    kinds = (
        ("host slices", picture.host_slices),
        ("pieces of device work", picture.device_slices),
        ("pieces of the critical path", picture.path_pieces),
    )
    sentences = [
        f"showing {_of(shown, things)}, those of {duration(shown.shortest_ns)} and longer"
        for things, shown in kinds
        if shown.kept < shown.total
    ]
    lanes = (("host threads", picture.threads), ("queues", picture.queues))
    return sentences + [f"the busiest {_of(shown, things)}" for things, shown in lanes if shown.kept < shown.total]


def _of(shown: Shown, things: str) -> str:
    return f"{count(shown.kept)} of {count(shown.total)} {things}"


class _Numbering(dict[str, int]):
    """Interns words as numbers, so that a name that occurs a thousand times is written once."""

    def __missing__(self, word: str) -> int:
        self[word] = len(self)
        return self[word]


def script_json(data: object) -> Markup:
    """JSON for a script element: ASCII without <, > and &, so that nothing in it can end the element.

    Control and invisible characters are escaped.
    """
    return Markup(json.dumps(_harmless(data), separators=(",", ":")).translate(_MARKUP))


def _harmless(data: Any) -> Any:
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(key): _harmless(value) for key, value in data.items()}
    return [_harmless(each) for each in data] if isinstance(data, (list, tuple)) else data


def cause_view(cause: str) -> View:
    """A cause's label, meaning and colour."""
    colour, hatched = _COLOURS.get(cause, _OTHER_COLOUR)
    label = cause.replace("_", " ")
    ink = "#fff" if colour == _BLUE else "#111"
    return {"label": label, "meaning": CAUSES.get(cause, ""), "colour": colour, "hatched": hatched, "ink": ink}


def resource_key(kind: str, cause: str | None) -> str:
    """Key of a part of the critical path, such as "compute" or "host: input"."""
    return f"host: {cause or 'unknown'}" if kind == "host" else kind


def resource_view(kind: str, cause: str | None) -> View:
    """A resource's label, meaning and colour; host resources use the colours of causes, device ones those of work."""
    if kind == "host" and cause != "compute":
        view = cause_view(cause or "unknown")
        return {**view, "label": f"host: {view['label']}"}
    label, meaning, colour, hatched = _DEVICE_RESOURCES.get(kind, _DEVICE_RESOURCES["wait"])
    if kind == "host":
        label, meaning, colour, hatched = "host: compute", "operators computed", _COMPUTE, False
    return {"label": label, "meaning": meaning, "colour": colour, "hatched": hatched, "ink": "#111"}


def _resources(path: Sequence[PathPiece]) -> dict[str, View]:
    """The resources of a path by key, the longest first."""
    sums: dict[tuple[str, str | None], int] = {}
    for piece in path:
        key = (piece.kind, piece.cause if piece.kind == "host" else None)
        sums[key] = sums.get(key, 0) + piece.duration_ns
    order = sorted(sums, key=lambda key: (-sums[key], resource_key(*key)))
    return {resource_key(*key): resource_view(*key) for key in order}


def _cause_order(cause: str) -> tuple[int, str]:
    order = list(CAUSES)
    return (order.index(cause) if cause in CAUSES else len(order), cause)


KINDS: Final = ("line", "phase", "operator", "other")
_LINE: Final = re.compile(r".+:\d+ .+", re.DOTALL)
_OPERATOR: Final = re.compile(r"^[\w.]+::\w|Backward\d*$")


def flame_view(graph: FlameGraph) -> View:
    """The graph's data for the page's script, what its widths are, and what it leaves out."""
    names: dict[str, int] = {}
    frames = [[names.setdefault(frame.name, len(names)), frame.parent, frame.ns] for frame in graph.frames]
    data = {
        "total": graph.total_ns,
        "frames": frames,
        "names": list(names),
        "kinds": [KINDS.index(_kind(name)) for name in names],
    }
    return {
        "data": script_json(data),
        "total": duration(graph.total_ns),
        "basis": "device time" if graph.basis == "device" else "operators’ own time",
        "reduced": f"{count(graph.dropped)} smaller frames are left out" if graph.dropped else "",
        "kinds": [kind for kind in KINDS if any(_kind(name) == kind for name in names)],
    }


def _kind(name: str) -> str:
    if name in PHASES:
        return "phase"
    if _LINE.fullmatch(name):
        return "line"
    return "operator" if _OPERATOR.search(name) else "other"
