"""Prices as a table, each with its age."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import polars as pl

from stepscope.cost.prices import Price


def price_table(prices: Sequence[Price], today: date) -> pl.DataFrame:
    """A row a price, by provider, device and number of them; `old` from OLD_DAYS on.

    Columns: provider, instance, gpu, count, on_demand_usd_h, spot_usd_h, as_of, age_days, old, region, device, vcpus,
    memory_gib, link, source, page.
    """
    ordered = sorted(prices, key=lambda each: (each.provider, each.gpu, each.count, each.instance, each.region or ""))
    columns: dict[str, tuple[pl.DataType, list[object]]] = {
        "provider": (pl.String(), [each.provider for each in ordered]),
        "instance": (pl.String(), [each.instance for each in ordered]),
        "gpu": (pl.String(), [each.gpu for each in ordered]),
        "count": (pl.Int64(), [each.count for each in ordered]),
        "on_demand_usd_h": (pl.Float64(), [each.on_demand_usd_h for each in ordered]),
        "spot_usd_h": (pl.Float64(), [each.spot_usd_h for each in ordered]),
        "as_of": (pl.String(), [each.as_of.isoformat() for each in ordered]),
        "age_days": (pl.Int64(), [each.age_days(today) for each in ordered]),
        "old": (pl.Boolean(), [each.is_old(today) for each in ordered]),
        "region": (pl.String(), [each.region for each in ordered]),
        "source": (pl.String(), [each.source for each in ordered]),
        "device": (pl.String(), [each.device for each in ordered]),
        "gpu_memory_gb": (pl.Float64(), [each.gpu_memory_gb for each in ordered]),
        "vcpus": (pl.Float64(), [each.vcpus for each in ordered]),
        "memory_gib": (pl.Float64(), [each.memory_gib for each in ordered]),
        "link": (pl.String(), [each.link for each in ordered]),
        "page": (pl.String(), [each.page for each in ordered]),
    }
    return pl.DataFrame([pl.Series(name, values, dtype) for name, (dtype, values) in columns.items()])
