"""Carbon of electricity: places, kilograms and what they are compared with."""

from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.predict.cost.energy_parts import emitted_kg, equivalences, grid_of, grid_source, grids


def test_the_table_names_its_source() -> None:
    assert grid_source() == "codecarbon 3.3.2"
    assert {grid.kind for grid in grids()} == {"country", "region", "cloud"}
    assert len([grid for grid in grids() if grid.kind == "country"]) == 212
    assert len({grid.code for grid in grids()}) == len(grids())
    assert all(0 < grid.g_per_kwh < 1500 for grid in grids())


@pytest.mark.parametrize(
    ("place", "code", "grams"),
    [
        ("FRA", "FRA", 56.039),
        ("fra", "FRA", 56.039),
        ("France", "FRA", 56.039),
        ("US-CA", "US-CA", 179.064),
        ("california", "US-CA", 179.064),
        ("CA-QC", "CA-QC", 3.937),
        ("SE3", "SE3", 27.0),
        ("aws:eu-west-3", "aws:eu-west-3", 56.039),
        ("gcp:europe-west9", "gcp:europe-west9", 34.0),
    ],
)
def test_a_place(place: str, code: str, grams: float) -> None:
    grid = grid_of(place)

    assert (grid.code, grid.g_per_kwh) == (code, grams)


def test_a_cloud_region_without_a_figure_has_that_of_its_country() -> None:
    assert grid_of("aws:eu-west-3").basis == "FRA"
    assert grid_of("gcp:europe-west9").basis == "own"


def test_every_borrowed_figure_is_that_of_its_place() -> None:
    figures = {grid.code: grid.g_per_kwh for grid in grids()}

    assert [grid for grid in grids() if grid.basis != "own" and figures[grid.basis] != grid.g_per_kwh] == []


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("Georgia", r"several places: GEO \(Georgia\), US-GA \(Georgia\)"),
        ("Germny", r"not a country or region .*: DEU \(Germany\)"),
        ("eu-west-3", r"aws:eu-west-3"),
        ("", "give a country as three letters"),
        ("\x1b[31m", "not a country or region"),
        ("nowhere at all", "give a country as three letters"),
    ],
)
def test_a_place_that_is_none(place: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        grid_of(place)


def test_a_kilowatt_hour_emits_kilograms_not_tonnes() -> None:
    assert emitted_kg(3.6e6, grid_of("FRA")) == pytest.approx(0.056039)
    assert emitted_kg(0.0, grid_of("FRA")) == 0.0


def test_a_kilogram_is_some_kilometres_by_car() -> None:
    # 8,887 g a gallon at 22.0 miles a gallon is 404 g a mile, 251 g a kilometre; over 3.785 l it is 2,348 g a litre.
    car, petrol = equivalences(1.0)

    assert (car.unit, car.value) == ("km by an average US car", pytest.approx(3.98397, rel=1e-5))
    assert (petrol.unit, petrol.value) == ("litres of petrol burned", pytest.approx(0.42595, rel=1e-4))
