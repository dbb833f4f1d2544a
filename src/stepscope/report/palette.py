"""The one palette: the colours of causes, of work and slices, and of memory, in the terminal and on every page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from colorsys import rgb_to_hsv
from functools import cache
from typing import Any, Final, TypeAlias

from stepscope.analysis.host import CAUSES

Look: TypeAlias = dict[str, Any]
"""label, meaning, colour, and whether it is hatched."""

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
_MEMORY: Final = {
    "before": _GREY,
    "parameter": _BLUE,
    "optimizer_state": _BROWN,
    "gradient": _ORANGE,
    "activation": _GREEN,
    "input": _PURPLE,
    "temporary": _VERMILLION,
    "unknown": _OTHER_COLOUR[0],
    "allocated": _BLUE,
}
"""Category of memory -> its colour."""
_SERIES: Final = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _VERMILLION, _BROWN, _YELLOW)
_CUBE: Final = (0, 95, 135, 175, 215, 255)
"""Brightness of each step of a terminal's 6 x 6 x 6 colours, which begin at number 16."""
_HUE: Final = 1500
"""Weight of a turn of the hue against a distance in red, green and blue."""


def cause_look(cause: str) -> Look:
    colour, hatched = _COLOURS.get(cause, _OTHER_COLOUR)
    return _look(cause.replace("_", " "), CAUSES.get(cause, ""), colour, hatched)


def cause_palette() -> dict[str, Look]:
    """Every cause by its name, and "compute" of host time."""
    computing = _look("computing", "operators computed", _COMPUTE, False)
    return {**{cause: cause_look(cause) for cause in CAUSES}, "compute": computing}


def kind_palette() -> dict[str, Look]:
    """Every kind of slice, of device work and of pieces of the critical path by its name."""
    path = {kind: _look(*look) for kind, look in _DEVICE_RESOURCES.items()}
    slices = {
        kind: _look(kind.replace("_", " "), meaning, colour, False) for kind, (meaning, colour) in _SLICES.items()
    }
    return {**path, **slices}


def memory_look(category: str, meaning: str = "") -> Look:
    return _look(category.replace("_", " "), meaning, _MEMORY[category], category == "unknown")


def series_palette() -> list[str]:
    """Colours of lines that stand beside each other, the most important first."""
    return list(_SERIES)


def series_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each of several names, such as lines; "" stands for all others."""
    named = [name for name in names if name]
    return {"": _GREY, **{name: _SERIES[place % len(_SERIES)] for place, name in enumerate(named)}}


@cache
def terminal_bar(cause: str) -> tuple[str, str]:
    """The sign that a cause's bar is made of in a terminal with colours, and its SGR sequence, of 256 colours."""
    look = cause_palette().get(cause) or cause_look(cause)
    wanted = [int(look["colour"][place : place + 2], 16) for place in (1, 3, 5)]
    number = min(range(len(_CUBE) ** 3), key=lambda number: _unlike(_channels(number), wanted))
    return "▒" if look["hatched"] else "█", f"38;5;{16 + number}"


def _channels(number: int) -> list[int]:
    return [_CUBE[number // 36], _CUBE[number // 6 % 6], _CUBE[number % 6]]


def _unlike(one: Sequence[int], other: Sequence[int]) -> float:
    """How far apart two colours are; their hues count most, since causes are told apart by them."""
    hues = [rgb_to_hsv(*(channel / 255 for channel in each)) for each in (one, other)]
    turn = abs(hues[0][0] - hues[1][0])
    return math.dist(one, other) + _HUE * min(turn, 1 - turn) * min(hues[0][1], hues[1][1])


def _look(label: str, meaning: str, colour: str, hatched: bool) -> Look:
    return {"label": label, "meaning": meaning, "colour": colour, "hatched": hatched}
