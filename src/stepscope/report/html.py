"""Render documents as one HTML file that works offline; names from traces are always text, never markup.

Three measures make a hostile name harmless: autoescaping, JSON without HTML's special characters, and a content
security policy that lets the page run only its own script (by hash) and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import polars as pl
from markupsafe import Markup

from stepscope.analysis.host import CAUSES
from stepscope.analysis.picture import PathPiece, Shown, StepPicture
from stepscope.report import document as doc
from stepscope.report.format import cell, count, duration, printable, share
from stepscope.report.tables import heading, showing

if TYPE_CHECKING:
    from jinja2 import Environment

TemplateVariables: TypeAlias = dict[str, Any]
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
_COMPUTE, _COPY = "#9fb9d4", "#e0d3ad"
_DEVICE_RESOURCES: Final[dict[str, tuple[str, str, str, bool]]] = {
    "compute": ("device: computation", "the device computed", _COMPUTE, False),
    "communication": ("communication", "data moved between ranks, or a rank waited for the others", _BLUE, False),
    "copy": ("device: copies", "memory was copied", _COPY, False),
    "launch_latency": ("launch latency", CAUSES["launch_latency"], _SKY, True),
    "wait": ("unexplained", CAUSES["unknown"], *_OTHER_COLOUR),
}
_SLICES: Final[dict[str, tuple[str, str]]] = {
    "annotation": ("a range that the program or its framework named", "#c9bce8"),
    "module": ("a call of a module of the network", "#b9d3c9"),
    "frame": ("a Python function", "#ccd8e5"),
    "operator": ("an operator of the framework", "#9db8d6"),
    "launch": ("a call of the device's runtime", "#6f96c2"),
    "line": ("a line of your code", "#d7c3b0"),
    "compute": ("the device computed", _COMPUTE),
    "communication": ("data moved between ranks, or a rank waited for the others", "#5fa3d9"),
    "copy": ("memory was copied", _COPY),
    "copy_in": ("memory was copied to the device", _COPY),
    "copy_out": ("memory was copied from the device", "#d3bd7d"),
    "copy_on_device": ("memory was copied within the device", "#c9c2ab"),
    "set": ("memory was filled with a value", "#d5dae0"),
    "other": ("other work", "#c3c9d1"),
    "memory": ("memory over time", "#7a9cc6"),
    "counter": ("a counter over time", "#8fb3a5"),
}
"""Kind of slice or of work -> its meaning and colour."""
_MARKUP: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def picture_view(picture: StepPicture, *, scale_ns: int | None = None) -> TemplateVariables:
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
    return Markup(json.dumps(_printable(data), separators=(",", ":")).translate(_MARKUP))


def _printable(data: Any) -> Any:
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(key): _printable(value) for key, value in data.items()}
    return [_printable(each) for each in data] if isinstance(data, (list, tuple)) else data


def cause_view(cause: str) -> TemplateVariables:
    """A cause's label, meaning and colour."""
    colour, hatched = _COLOURS.get(cause, _OTHER_COLOUR)
    label = cause.replace("_", " ")
    ink = "#fff" if colour == _BLUE else "#111"
    return {"label": label, "meaning": CAUSES.get(cause, ""), "colour": colour, "hatched": hatched, "ink": ink}


def cause_palette() -> dict[str, TemplateVariables]:
    """Every cause by its name, and "compute" of host time."""
    return {**{cause: cause_view(cause) for cause in CAUSES}, "compute": resource_view("host", "compute")}


def kind_palette() -> dict[str, TemplateVariables]:
    """Every kind of slice, of device work and of pieces of the critical path by its name."""
    path = {kind: resource_view(kind, None) for kind in _DEVICE_RESOURCES}
    slices = {
        kind: {"label": kind.replace("_", " "), "meaning": meaning, "colour": colour, "hatched": False, "ink": "#111"}
        for kind, (meaning, colour) in _SLICES.items()
    }
    return {**path, **slices}


def resource_key(kind: str, cause: str | None) -> str:
    """Key of a part of the critical path, such as "compute" or "host: input"."""
    return f"host: {cause or 'unknown'}" if kind == "host" else kind


def resource_view(kind: str, cause: str | None) -> TemplateVariables:
    """A resource's label, meaning and colour; host resources use the colours of causes, device ones those of work."""
    if kind == "host" and cause != "compute":
        view = cause_view(cause or "unknown")
        return {**view, "label": f"host: {view['label']}"}
    label, meaning, colour, hatched = _DEVICE_RESOURCES.get(kind, _DEVICE_RESOURCES["wait"])
    if kind == "host":
        label, meaning, colour, hatched = "host: compute", "operators computed", _COMPUTE, False
    return {"label": label, "meaning": meaning, "colour": colour, "hatched": hatched, "ink": "#111"}


def _resources(path: Sequence[PathPiece]) -> dict[str, TemplateVariables]:
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


_SCRIPTS: Final = ("picture.js", "telemetry.js", "sweep.js", "report.js")
_STYLES: Final = {
    "telemetry": ("telemetry.css",),
    "changes": ("compare.css",),
    "steps_beside": ("compare.css",),
    "plan": ("plan.css",),
    "history": ("history.css",),
    "sweep": ("sweep.css",),
    "effects": ("sweep.css",),
}
"""Drawing -> the style sheets that it needs."""
_BUSY: Final = {"colour": "var(--busy)", "ink": "var(--ink)", "hatched": False}


def html_of(document: doc.Document, *, top: int = 0) -> bytes:
    """Render the document as one page; `top` rows of each table, 0 for all."""
    script = "".join(_template_text(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn = {each.template for each in _every(document.blocks) if isinstance(each, doc.Drawing)}
    styles = dict.fromkeys(style for name, needed in _STYLES.items() if name in drawn for style in needed)
    pieces = (
        _environment()
        .get_template("page.html.j2")
        .generate(
            title=document.title,
            links=list(_links(document.blocks)),
            blocks=_rendered(document.blocks, 2, top),
            styles=["report.css", *styles],
            script=Markup(script),
            script_hash=f"sha256-{digest}",
        )
    )
    page = io.BytesIO()
    page.writelines(piece.encode("utf-8", "backslashreplace") for piece in pieces)
    return page.getvalue()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # slow to import, and only pages need it

    environment = Environment(
        loader=FunctionLoader(_template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.tests["verbatim"] = lambda value: isinstance(value, doc.Verbatim)
    environment.filters["share"] = share
    environment.filters["duration"] = duration
    environment.filters["moment"] = partial(cell, "start_ns")
    environment.filters["expanded"] = partial(str.expandtabs, tabsize=4)
    return environment


def _harmless(value: Any) -> Any:
    """Escape control and invisible characters in strings; line ends stay."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(map(printable, value.split("\n")))


def _template_text(name: str) -> str:
    return files("stepscope.report").joinpath("templates").joinpath(name).read_text("utf-8")


def _every(blocks: Sequence[doc.Block]) -> Iterator[doc.Block]:
    for block in blocks:
        yield block
        if isinstance(block, (doc.Section, doc.Group)):
            yield from _every(block.blocks)


def _links(blocks: Sequence[doc.Block]) -> Iterator[tuple[str, str]]:
    """The page's navigation: its groups, or its sections if it has none."""
    groups = [block for block in blocks if isinstance(block, doc.Group)]
    if len(groups) > 1:
        yield from ((group.id, group.title) for group in groups)
    else:
        blocks = groups[0].blocks if groups else blocks
        yield from ((each.id, each.link) for each in blocks if isinstance(each, doc.Section) and each.link)


def _rendered(blocks: Sequence[doc.Block], level: int, top: int) -> Iterator[Markup]:
    has_links = sum(isinstance(block, doc.Group) for block in blocks) > 1
    for block in blocks:
        if doc.is_printed(block, "page", "off text"):
            yield _block(block, level, top, has_links)


def _joined(blocks: Sequence[doc.Block], level: int, top: int) -> Markup:
    return Markup("").join(_rendered(blocks, level, top))


def _block(block: doc.Block, level: int, top: int, has_links: bool) -> Markup:
    macros: Any = _environment().get_template("blocks.html.j2").module
    match block:
        case doc.Section():
            own = 1 if "summary" in block.style else level
            found = macros.section(block, _joined(block.blocks, level + 1, top), own, is_card=level == 2)
        case doc.Group():
            found = macros.group(
                block, _joined(block.blocks, level, top), list(_links(block.blocks)) if has_links else []
            )
        case doc.Table():
            cut = block.frame.head(top) if top and block.things else block.frame
            left_out = showing(cut.height, block.height, block.things) if block.things else ""
            found = macros.table(table_view(cut), left_out)
        case doc.Causes():
            found = macros.causes(_causes(block), block.of)
        case doc.Drawing():
            drawing: Any = _environment().get_template(f"{block.template}.html.j2").module
            found = drawing.draw(block.view)
        case _:
            found = getattr(macros, type(block).__name__.lower())(block)
    return Markup(found)


def table_view(frame: pl.DataFrame) -> TemplateVariables:
    """Columns and rows for the macro `table`."""
    numeric = [dtype.is_numeric() and name != "line" for name, dtype in frame.schema.items()]
    columns = [
        {"heading": heading(name), "numeric": is_number} for name, is_number in zip(frame.columns, numeric, strict=True)
    ]
    rows = [
        [
            {"text": cell(name, value), "value": value if is_number else None, "numeric": is_number}
            for (name, value), is_number in zip(row.items(), numeric, strict=True)
        ]
        for row in frame.iter_rows(named=True)
    ]
    return {"columns": columns, "rows": rows}


def _causes(block: doc.Causes) -> TemplateVariables:
    whole = max(block.window_ns, 1)
    rows = [
        {
            **cause_view(each.cause),
            **({**_BUSY, "meaning": "the host was computing"} if each.cause == "compute" else {}),
            "time": duration(each.ns),
            "share": share(each.share),
            "width": 100 * each.ns / whole,
            "after": [f"{duration(ns)} after {trigger}" for trigger, ns in each.after],
        }
        for each in block.causes
    ]
    busy = {**_BUSY, "label": "busy", "width": 100 * block.busy_ns / whole, "time": duration(block.busy_ns)}
    return {"name": block.name, "rows": rows, "segments": [*([busy] if block.busy_ns > 0 else []), *rows]}
