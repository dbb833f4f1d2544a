"""Format energy, mass and power, each a number or a (lower, upper) range."""

from __future__ import annotations

from typing import Final

_JOULES: Final = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"))
_WATT_HOURS: Final = ((3.6e9, "MWh"), (3.6e6, "kWh"), (3.6e3, "Wh"), (3.6, "mWh"), (3.6e-3, "uWh"))
_KILOGRAMS: Final = ((1e3, "t"), (1.0, "kg"), (1e-3, "g"), (1e-6, "mg"), (1e-9, "ug"))
_SAME: Final = 1e-6

Units = tuple[tuple[float, str], ...]


def energy(joules: tuple[float, float]) -> str:
    """Joules as "21.3 J", "812 mJ" or "21.3 to 52.5 J"."""
    return _bounds(joules, _JOULES)


def electricity(joules: tuple[float, float]) -> str:
    """Joules as what an electricity meter counts: "1.2 kWh", "340 to 820 Wh"."""
    return _bounds(joules, _WATT_HOURS)


def mass(kilograms: tuple[float, float]) -> str:
    """Kilograms as "1.2 kg", "340 to 820 g"."""
    return _bounds(kilograms, _KILOGRAMS)


def power(watts: tuple[float, float]) -> str:
    """Watts as "122 W" or "122 to 300 W"."""
    return _bounds(watts, ((1.0, "W"),))


def number(values: tuple[float, float]) -> str:
    """Two numbers as "3.98" or "3.98 to 5.2"."""
    return _bounds(values, ((1.0, ""),)).rstrip()


def shares(values: tuple[float, float]) -> str:
    """Shares from 0 to 1 as "31.2 %" or "5.0 to 31.2 %"."""
    low, high = (f"{value * 100:.1f}" for value in values)
    return f"{high} %" if low == high else f"{low} to {high} %"


def _bounds(values: tuple[float, float], units: Units) -> str:
    low, high = min(values), max(values)
    scale, word = next((unit for unit in units if high >= unit[0] * 0.9995), units[-1])
    if high - low <= _SAME * abs(high):
        return f"{_digits(high / scale)} {word}"
    if 0 < low < scale / 100:
        return f"{_bounds((low, low), units)} to {_digits(high / scale)} {word}"
    first, second = _digits(low / scale), _digits(high / scale)
    return f"{second} {word}" if first == second else f"{first} to {second} {word}"


def _digits(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    places = 2 if abs(value) < 10 else 1
    text = f"{value:.{places}f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return f"{value:.6f}".rstrip("0").rstrip(".") if "e" in text else text


WORDS: Final = {"gpu": "device", "cpu": "processor", "dram": "memory beside processor"}
ALL_WORDS: Final = {"gpu": "devices", "cpu": "processors", "dram": "memory"}
