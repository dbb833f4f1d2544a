#!/usr/bin/env python3
"""Make src/stepscope/data/carbon_intensity.csv from the data files of an installed codecarbon.

    pip install codecarbon==3.3.2
    python scripts/make_carbon_table.py

Needs only the standard library and codecarbon's files; nothing is asked of the network.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parent.parent / "src/stepscope/data/carbon_intensity.csv"
GRAMS_PER_POUND = 453.59237
PROVINCES = {
    "alberta": "AB",
    "british columbia": "BC",
    "manitoba": "MB",
    "new brunswick": "NB",
    "newfoundland and labrador": "NL",
    "northwest territories": "NT",
    "nova scotia": "NS",
    "nunavut": "NU",
    "ontario": "ON",
    "prince edward island": "PE",
    "quebec": "QC",
    "saskatchewan": "SK",
    "yukon": "YT",
}
# What codecarbon counts of a province's mix, kg of CO2 equivalents per kWh; the other sources count as zero.
PROVINCE_SOURCES = {"coal": 0.995725971, "petroleum": 0.8166885263, "naturalGas": 0.7438415916}
# Regions of providers that codecarbon has no figure of, by the country or state in which the provider says they are:
# https://docs.aws.amazon.com/global-infrastructure/latest/regions/aws-regions.html
# https://learn.microsoft.com/en-us/azure/reliability/regions-list
PLACES = {
    "aws": {
        "af-south-1": "ZAF", "ap-east-1": "HKG", "ap-northeast-1": "JPN", "ap-northeast-2": "KOR",
        "ap-northeast-3": "JPN", "ap-south-1": "IND", "ap-south-2": "IND", "ap-southeast-1": "SGP",
        "ap-southeast-2": "AUS", "ap-southeast-3": "IDN", "ap-southeast-4": "AUS", "ap-southeast-5": "MYS",
        "ap-southeast-7": "THA", "ca-central-1": "CA-QC", "ca-west-1": "CA-AB", "eu-central-1": "DEU",
        "eu-central-2": "CHE", "eu-north-1": "SE3", "eu-south-1": "ITA", "eu-south-2": "ESP", "eu-west-1": "IRL",
        "eu-west-2": "GBR", "eu-west-3": "FRA", "il-central-1": "ISR", "me-central-1": "ARE", "me-south-1": "BHR",
        "mx-central-1": "MEX", "sa-east-1": "BRA", "us-east-1": "US-VA", "us-east-2": "US-OH", "us-west-1": "US-CA",
        "us-west-2": "US-OR",
    },
    "azure": {
        "australiacentral": "AUS", "australiaeast": "AUS", "australiasoutheast": "AUS", "brazilsouth": "BRA",
        "canadacentral": "CA-ON", "canadaeast": "CA-QC", "centralindia": "IND", "centralus": "US-IA",
        "eastasia": "HKG", "eastus": "US-VA", "eastus2": "US-VA", "francecentral": "FRA", "francesouth": "FRA",
        "germanynorth": "DEU", "germanywestcentral": "DEU", "israelcentral": "ISR", "italynorth": "ITA",
        "japaneast": "JPN", "japanwest": "JPN", "koreacentral": "KOR", "koreasouth": "KOR", "mexicocentral": "MEX",
        "newzealandnorth": "NZL", "northcentralus": "US-IL", "northeurope": "IRL", "norwayeast": "NO1",
        "norwaywest": "NO2", "polandcentral": "POL", "qatarcentral": "QAT", "southafricanorth": "ZAF",
        "southcentralus": "US-TX", "southeastasia": "SGP", "southindia": "IND", "spaincentral": "ESP",
        "swedencentral": "SE3", "switzerlandnorth": "CHE", "switzerlandwest": "CHE", "uaenorth": "ARE",
        "uksouth": "GBR", "ukwest": "GBR", "westcentralus": "US-WY", "westeurope": "NLD", "westindia": "IND",
        "westus": "US-CA", "westus2": "US-WA", "westus3": "US-AZ",
    },
}  # fmt: skip


class Row(NamedTuple):
    """A place and what a kilowatt-hour from its grid emits."""

    kind: str  # country, region (a part of a country) or cloud
    code: str
    name: str
    country: str  # three-letter code
    g_per_kwh: float
    basis: str  # whose figure it is: its own, or that of the place it stands in
    year: str


def main() -> None:
    version = distribution("codecarbon").version
    spec = find_spec("codecarbon")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("codecarbon is not installed: pip install codecarbon")
    rows = list(table(Path(spec.submodule_search_locations[0], "data")))
    TARGET.write_text(header(version) + content(rows), encoding="utf-8")
    print(f"{TARGET.name}: {len(rows)} places from codecarbon {version}")


def table(data: Path) -> Iterator[Row]:
    """Every place, countries first."""
    private = data / "private_infra"
    grids = [
        *countries(_json(private / "global_energy_mix.json")),
        *states(_json(private / "2023/usa_emissions.json")),
        *provinces(_json(private / "2023/canada_energy_mix.json")),
        *zones(_json(private / "2023/china_provincial_emissions.json"), {"CN": "CHN"}),
        *zones(_json(private / "nordic_emissions.json"), {"SE": "SWE", "NO": "NOR"}),
    ]
    yield from grids
    yield from google(data / "cloud/impact.csv")
    yield from other_clouds({row.code: row for row in grids})


def countries(mixes: dict[str, Any]) -> Iterator[Row]:
    """Where codecarbon has the intensity itself; what it would compute from a mix or a world average is left out.

    So is a country of which it says 0: no electricity emits nothing over its life, the figure was rounded away.
    """
    for code, mix in sorted(mixes.items()):
        if mix.get("carbon_intensity"):
            yield Row("country", code, mix["country_name"], code, mix["carbon_intensity"], "own", str(mix["year"]))


def states(emissions: dict[str, Any]) -> Iterator[Row]:
    """Of the United States, from pounds per megawatt-hour."""
    year = str(emissions["_source"]["year"])
    for name, state in sorted(emissions.items()):
        if not name.startswith("_") and name != "usa":
            grams = round(state["emissions"] * GRAMS_PER_POUND / 1000, 3)
            yield Row("region", f"US-{state['regionCode']}", _title(name), "USA", grams, "own", year)


def provinces(mixes: dict[str, Any]) -> Iterator[Row]:
    """Of Canada, from the mix as codecarbon counts it."""
    for name, mix in sorted(mixes.items()):
        kilograms = sum(share * mix[source] / mix["total"] for source, share in PROVINCE_SOURCES.items())
        yield Row("region", f"CA-{PROVINCES[name]}", _title(name), "CAN", round(kilograms * 1000, 3), "own", "2023")


def zones(emissions: dict[str, Any], countries_of: dict[str, str]) -> Iterator[Row]:
    """Provinces and bidding zones that have a figure of their own."""
    for code, zone in sorted(emissions["data"].items()):
        country = countries_of.get(code[:2])
        if country is not None:
            name = zone["description"]
            yield Row("region", code, name, country, zone["emission_factor"], "own", str(zone["year"]))


def google(path: Path) -> Iterator[Row]:
    """Regions of Google Cloud, by its own figures."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line in sorted(csv.DictReader(file), key=lambda line: line["region"]):
            code = f"{line['provider']}:{line['region'].replace('me-cenrtal1', 'me-central1')}"
            name = f"{line['city']}, {line['country_name']}"
            yield Row("cloud", code, name, line["countryIsoCode"], float(line["impact"]), "own", "")


def other_clouds(grids: dict[str, Row]) -> Iterator[Row]:
    """Regions that have no figure of their own, by that of the country, state or zone in which they are."""
    for provider, places in PLACES.items():
        for region, place in sorted(places.items()):
            if place in grids:
                grid = grids[place]
                code = f"{provider}:{region}"
                yield Row("cloud", code, grid.name, grid.country, grid.g_per_kwh, place, grid.year)


def header(version: str) -> str:
    """Where the figures come from; lines that begin with # are no rows."""
    return (
        "# Grams of CO2 equivalents per kilowatt-hour of electricity. Made by scripts/make_carbon_table.py.\n"
        f"# Source: codecarbon {version}, https://github.com/mlco2/codecarbon (MIT licence,\n"
        "# Copyright (c) 2019 Mila, BCG Gamma, CometML, Haverford College, Copyright (c) 2023 Code Carbon NGO).\n"
        "# basis: own, or the place whose figure a region of a provider that publishes none is given.\n"
    )


def content(rows: list[Row]) -> str:
    """The table as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows([f"{value:g}" if isinstance(value, float) else value for value in row] for row in rows)
    return buffer.getvalue()


def _title(name: str) -> str:
    return name.title().replace(" Of ", " of ").replace(" And ", " and ")


def _json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    main()
