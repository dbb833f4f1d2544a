"""What machines with accelerators cost by the hour: data/prices.csv, and what the user imported.

A price is what someone published on a day, with the address it was read at; none is ever derived from another, and
where a provider names none it is absent. They change: whoever uses one says how old it is.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from importlib.resources import files
from typing import Final

from stepscope.cost.gpu_names import named_gpu

COLUMNS: Final = (
    "provider", "instance", "gpu", "gpu_memory_gb", "count", "vcpus", "memory_gib", "link", "region", "on_demand_usd_h",
    "spot_usd_h", "as_of", "source", "page",
)  # fmt: skip
OLD_DAYS: Final = 90
"""A price that is older is marked as old: providers change theirs a few times a year, spot prices daily."""


@dataclass(frozen=True, slots=True)
class Price:
    """One machine of a provider, in US dollars an hour without taxes, disks and traffic.

    Attributes:
        provider: in lower case, such as "aws".
        instance: what the provider calls the machine.
        gpu: what the source calls its accelerator.
        gpu_memory_gb: of one accelerator, where the source says.
        device: the row of `stepscope.devices` that it is; None where there is none, or several could be meant.
        count: accelerators in the machine.
        vcpus, memory_gib: of the machine.
        link: "NVLink" or "PCIe" between its accelerators, where the source says.
        region: None where the source names none.
        on_demand_usd_h: as long as it is wanted.
        spot_usd_h: for as long as nobody else wants it.
        as_of: the day on which this was the price.
        source: the address that it was read at, or the file it was imported from.
        page: the provider's own page, where the source names one.
    """

    provider: str
    instance: str
    gpu: str
    gpu_memory_gb: float | None
    device: str | None
    count: int
    vcpus: float | None
    memory_gib: float | None
    link: str | None
    region: str | None
    on_demand_usd_h: float | None
    spot_usd_h: float | None
    as_of: date
    source: str
    page: str | None = None

    def age_days(self, today: date) -> int:
        """Whole days since the price was seen; negative where it is dated in the future."""
        return (today - self.as_of).days

    def is_old(self, today: date) -> bool:
        """Whether it is older than OLD_DAYS."""
        return self.age_days(today) > OLD_DAYS

    def usd_h(self, *, spot: bool) -> float | None:
        """The one price or the other."""
        return self.spot_usd_h if spot else self.on_demand_usd_h


@lru_cache(maxsize=1)
def shipped_prices() -> tuple[Price, ...]:
    """The small table that comes with the package."""
    text = files("stepscope").joinpath("data/prices.csv").read_text(encoding="utf-8")
    return tuple(price_of(row) for row in csv.DictReader(text.splitlines()))


def price_of(row: Mapping[str, str | None]) -> Price:
    """A row of a file with the columns COLUMNS.

    Raises:
        ValueError, KeyError: it is no such row.
    """
    cells = {name: cell for name, cell in row.items() if isinstance(cell, str)}
    if len(cells) < len(row):  # what csv.DictReader makes of a row that is too short or too long
        raise ValueError("a row has more or fewer cells than columns")
    memory = _number(cells["gpu_memory_gb"])
    return Price(
        provider=cells["provider"],
        instance=cells["instance"],
        gpu=cells["gpu"],
        gpu_memory_gb=memory,
        device=named_gpu(cells["gpu"], memory_gb=memory, instance=cells["instance"]).device,
        count=int(cells["count"]),
        vcpus=_number(cells["vcpus"]),
        memory_gib=_number(cells["memory_gib"]),
        link=cells["link"] or None,
        region=cells["region"] or None,
        on_demand_usd_h=_number(cells["on_demand_usd_h"]),
        spot_usd_h=_number(cells["spot_usd_h"]),
        as_of=date.fromisoformat(cells["as_of"]),
        source=cells["source"],
        page=cells["page"] or None,
    )


def row_of(price: Price) -> list[str]:
    """The same price as the cells of COLUMNS."""
    values = [getattr(price, name) for name in COLUMNS]
    return ["" if value is None else repr(value) if isinstance(value, float) else str(value) for value in values]


def newest(prices: Iterable[Price]) -> list[Price]:
    """Of each machine in each region the price seen last; of two of one day the later one in `prices`."""
    best: dict[tuple[object, ...], Price] = {}
    for price in prices:
        key = (price.provider, price.instance, price.device or price.gpu, price.count, price.region)
        if key not in best or price.as_of >= best[key].as_of:
            best[key] = price
    return list(best.values())


def unpriced_devices(prices: Sequence[Price], names: Iterable[str]) -> list[str]:
    """Those of these devices that no price is known of, in their order."""
    priced = {price.device for price in prices}
    return [name for name in names if name not in priced]


def _number(text: str) -> float | None:
    number = float(text) if text else None
    if number is not None and not 0 <= number < math.inf:
        raise ValueError(f"{text} is no amount")
    return number
