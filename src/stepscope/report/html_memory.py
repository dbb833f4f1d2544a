"""Memory over time for the HTML report: what each category held, stacked, with steps, the peak and what is reserved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from markupsafe import Markup

from stepscope.analysis.memory_categories import CATEGORIES
from stepscope.analysis.memory_picture import MemoryPicture
from stepscope.report.format import cell, duration, printable, share, size
from stepscope.report.html_picture import View
from stepscope.report.tables import heading, showing

_WIDTH: Final = 1000
_HEIGHT: Final = 300
_MARKUP: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
_COLOURS: Final = {
    "before": 7,
    "parameter": 0,
    "optimizer_state": 6,
    "gradient": 1,
    "activation": 2,
    "input": 4,
    "temporary": 3,
    "unknown": 5,
    "allocated": 0,
}
"""Category -> which of the page's line colours; one category has one colour on every page."""


def memories_or_none(
    memories: Sequence[Sequence[MemoryPicture]] | None, length: int
) -> Sequence[Sequence[MemoryPicture]]:
    """The pictures of each of `length` ranks, none where there are none."""
    return [()] * length if memories is None else memories


def memory_view(picture: MemoryPicture) -> View:
    """What the template needs of one device."""
    top = _top(picture)
    whole = max(picture.end_ns - picture.start_ns, 1)
    name = "The host’s memory" if picture.device == "cpu" else f"Device {printable(picture.device)}"
    peak_x = 100 * (picture.peak_ns - picture.start_ns) / whole
    return {
        "name": name + (f" · {printable(picture.name)}" if picture.name else ""),
        "sentence": _sentence(picture),
        "bands": _drawn(picture, top),
        "reserved": None if picture.reserved is None else _line(picture, picture.reserved, top),
        "steps": [
            {"left": 100 * (start - picture.start_ns) / whole, "label": f"step {index}"}
            for index, start in picture.steps
        ],
        "peak": {"left": peak_x, "top": 100 * (1 - picture.peak_bytes / top)},
        "ticks": [size(top * part / 4) for part in range(4, -1, -1)],
        "begin": cell("start_ns", picture.start_ns),
        "end": cell("start_ns", picture.end_ns),
        "legend": [
            {"label": band.replace("_", " "), "colour": _COLOURS[band], "tip": CATEGORIES.get(band, "")}
            for band in picture.bands
        ],
        "data": _data(picture),
        "tables": [table for table in (_table(picture, "categories"), _table(picture, "lines")) if table["rows"]],
    }


def _sentence(picture: MemoryPicture) -> str:
    parts = [f"At most {size(picture.peak_bytes)} were allocated, at {cell('start_ns', picture.peak_ns)}"]
    if picture.reserved is not None:
        parts.append(f"{size(max(picture.reserved))} reserved")
    if picture.capacity_bytes and picture.device != "cpu":
        held = max(picture.reserved or (picture.peak_bytes,))
        parts.append(f"{share(held / picture.capacity_bytes)} of the device’s {size(picture.capacity_bytes)}")
    if picture.growth_bytes:
        parts.append(f"each step leaves {size(picture.growth_bytes)} behind")
    return "; ".join(parts) + "."


def _top(picture: MemoryPicture) -> int:
    """The level at the upper edge: above everything drawn, and the device's size where that is near."""
    highest = max(picture.peak_bytes, *(picture.reserved or (0,)), 1)
    capacity = picture.capacity_bytes
    if capacity and picture.device != "cpu" and highest <= capacity <= 2 * highest:
        return capacity
    unit = 1 << max((highest - 1).bit_length() - 3, 0)
    return -(-highest // unit) * unit


def _x(picture: MemoryPicture, time: int) -> str:
    return f"{_WIDTH * (time - picture.start_ns) / max(picture.end_ns - picture.start_ns, 1):.1f}"


def _y(value: float, top: int) -> str:
    return f"{_HEIGHT * (1 - min(value / top, 1)):.1f}"


def _drawn(picture: MemoryPicture, top: int) -> list[View]:
    """Each band as a closed path between the sum of those below and the sum with its own, in steps."""
    below = [0] * len(picture.times)
    result = []
    for band, values in picture.bands.items():
        above = [low + value for low, value in zip(below, values, strict=True)]
        path = _steps(picture, above, top) + _back(picture, below, top) + "Z"
        result.append({"path": path, "colour": _COLOURS[band]})
        below = above
    return result


def _line(picture: MemoryPicture, values: Sequence[int], top: int) -> str:
    return _steps(picture, values, top)


def _steps(picture: MemoryPicture, values: Sequence[int], top: int) -> str:
    """From left to right; each level holds until the next moment."""
    path = f"M{_x(picture, picture.times[0])} {_y(values[0], top)}"
    for (_, here), value in zip(pairwise(picture.times), values[1:], strict=True):
        path += f"H{_x(picture, here)}V{_y(value, top)}"
    return path + f"H{_x(picture, picture.end_ns)}"


def _back(picture: MemoryPicture, values: Sequence[int], top: int) -> str:
    """The same from right to left."""
    path = f"V{_y(values[-1], top)}"
    for here, value in zip(reversed(picture.times[1:]), reversed(values[:-1]), strict=True):
        path += f"H{_x(picture, here)}V{_y(value, top)}"
    return path + f"H{_x(picture, picture.times[0])}"


def _data(picture: MemoryPicture) -> Markup:
    """Values for the script that shows them beside the pointer."""
    seconds = [round((time - picture.start_ns) / 1e9, 9) for time in picture.times]
    lines = [[band.replace("_", " "), seconds, list(values), None] for band, values in picture.bands.items()]
    if picture.reserved is not None:
        lines.append(["reserved", seconds, list(picture.reserved), None])
    data = {"seconds": max(picture.end_ns - picture.start_ns, 1) / 1e9, "unit": "bytes", "lines": lines}
    return Markup(json.dumps(data, separators=(",", ":")).translate(_MARKUP))


def _table(picture: MemoryPicture, which: str) -> View:
    frame = picture.categories if which == "categories" else picture.lines
    columns = [
        {"heading": heading(name), "numeric": dtype.is_numeric() and name != "line"}
        for name, dtype in zip(frame.columns, frame.dtypes, strict=True)
    ]
    rows = [
        [
            {"text": cell(name, value), "value": value if column["numeric"] else None, "numeric": column["numeric"]}
            for (name, value), column in zip(row.items(), columns, strict=True)
        ]
        for row in frame.iter_rows(named=True)
    ]
    cut = (
        showing(frame.height, picture.line_count, "lines").replace(", --top 0 for all", "") if which == "lines" else ""
    )
    title = "Alive at the peak, by category" if which == "categories" else "Alive at the peak, by line"
    return {"title": title, "columns": columns, "rows": rows, "showing": cut}


def length_of(picture: MemoryPicture) -> str:
    """How long the drawn stretch is."""
    return duration(picture.end_ns - picture.start_ns)
