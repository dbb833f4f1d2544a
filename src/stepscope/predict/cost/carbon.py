"""Carbon intensity of electricity: grams of CO2 equivalents per kilowatt-hour by country or cloud region, offline.

data/carbon_intensity.csv has codecarbon's figures; scripts/make_carbon_table.py makes it, docs/energy.md names the
sources and limits. Everything here is in kilograms.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final

import msgspec

from stepscope.errors import UsageError

J_PER_KWH: Final = 3.6e6
PETROL_G_PER_GALLON: Final = 8_887.0
"""CO2 of a US gallon of petrol burned. Source: EPA-420-F-23-014, after 75 FR 25324 (2010)."""
CAR_MILES_PER_GALLON: Final = 22.0
"""Fuel economy of the average passenger vehicle in the United States. Source: EPA-420-F-23-014."""
KM_PER_MILE: Final = 1.609344
LITRES_PER_GALLON: Final = 3.785411784
_NEAR: Final = 6


@dataclass(frozen=True, slots=True)
class Grid:
    """A place and the carbon intensity of its electricity.

    Attributes:
        code: a country's three letters (ISO 3166-1), a region's code (ISO 3166-2) or bidding zone, or a cloud provider
            and its region: "FRA", "US-CA", "SE3", "aws:eu-west-3".
    """

    kind: str  # "country", "region" (a part of a country) or "cloud"
    code: str
    name: str
    country: str  # three letters
    g_per_kwh: float  # grams of CO2 equivalents per kilowatt-hour, a yearly mean
    basis: str  # "own", or the code of the place whose figure is used, for cloud regions without their own
    year: str  # year of the figure; empty where its source does not say


@dataclass(frozen=True, slots=True)
class Equivalence:
    """An amount of CO2 expressed as something else: `value` times `unit`."""

    value: float
    unit: str
    source: str


@lru_cache(maxsize=1)
def grids() -> tuple[Grid, ...]:
    """List every place with a known carbon intensity."""
    lines = [line for line in _table().splitlines() if not line.startswith("#")]
    return tuple(msgspec.convert(row, Grid, strict=False) for row in csv.DictReader(lines))


def _table() -> str:
    return files("stepscope").joinpath("data/carbon_intensity.csv").read_text(encoding="utf-8")


def grid_source() -> str:
    """Source and version of the carbon intensities."""
    found = re.search(r"Source: (codecarbon [\w.]+)", _table())
    return found[1] if found else "codecarbon"


def grid_of(place: str) -> Grid:
    """Find the place with this code or name, ignoring case and punctuation: "FRA", "france", "US-CA", "aws:eu-west-3".

    Raises:
        UsageError: no place has that name, or several do; the message names similar ones.
    """
    wanted = _plain(place)
    by_code = [grid for grid in grids() if _plain(grid.code) == wanted]
    found = by_code or [grid for grid in grids() if grid.kind != "cloud" and _plain(grid.name) == wanted]
    if len(found) == 1 and wanted:
        return found[0]
    problem = "could be several places" if found and wanted else "is no country or region whose electricity is known"
    near = found if found and wanted else _near(wanted)
    hint = f": {', '.join(f'{grid.code} ({grid.name})' for grid in near)}" if near else ""
    raise UsageError(
        f"{place!r} {problem}{hint or '; give a country as three letters (FRA), a state (US-CA) or gcp:europe-west9'}"
    )


def emitted_kg(joules: float, grid: Grid) -> float:
    """Kilograms of CO2 equivalents emitted for this much energy from the grid."""
    return joules / J_PER_KWH * grid.g_per_kwh / 1000


def equivalences(kilograms: float) -> tuple[Equivalence, ...]:
    """Express an amount of CO2 as kilometres by car and as litres of petrol."""
    grams = kilograms * 1000
    car_g_per_km = PETROL_G_PER_GALLON / CAR_MILES_PER_GALLON / KM_PER_MILE
    return (
        Equivalence(grams / car_g_per_km, "km by an average US car", "EPA-420-F-23-014"),
        Equivalence(grams / (PETROL_G_PER_GALLON / LITRES_PER_GALLON), "litres of petrol burned", "EPA-420-F-23-014"),
    )


def _near(wanted: str) -> list[Grid]:
    if not wanted:
        return []
    table = grids()
    begin = [grid for grid in table if _plain(grid.code).startswith(wanted) or _plain(grid.name).startswith(wanted)]
    inside = [grid for grid in table if wanted in _plain(grid.code) or wanted in _plain(grid.name)]
    words = {_plain(word): grid for grid in reversed(table) for word in (grid.code, grid.name)}
    alike = [words[word] for word in difflib.get_close_matches(wanted, list(words), n=_NEAR, cutoff=0.7)]
    return list(dict.fromkeys([*begin, *inside, *alike]))[:_NEAR]


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text.casefold())
