"""Report devices and prices, with the source of each figure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Final

import polars as pl

from stepscope.machine.devices import NUMBER_TYPES, DevicePeaks
from stepscope.predict.cost.prices import Price
from stepscope.report.document import Document, Facts, Section

_NUMBERS: Final = ("on_demand_usd_h", "spot_usd_h", "gpu_memory_gb", "vcpus", "memory_gib")
_PRICE_COLUMNS: Final = (
    "provider",
    "instance",
    "gpu",
    "count",
    "on_demand_usd_h",
    "spot_usd_h",
    "as_of",
    "age_days",
    "old",
    "region",
    "source",
    "device",
    "gpu_memory_gb",
    "vcpus",
    "memory_gib",
    "link",
    "page",
)


def device_document(row: DevicePeaks) -> Document:
    """Report every known figure of a device with its unit, then the sources."""
    made = ", ".join(filter(None, (row.vendor, row.architecture)))
    figures = {
        "also called": ", ".join(row.aliases),
        "memory": _amount(row.memory_bytes, 1e9, "GB"),
        "bandwidth": _with_measured(row.bandwidth_bytes_s, row.sustained_bandwidth_bytes_s, 1e9, "GB/s"),
        **{
            kind: _with_measured(row.flops_s.get(kind), row.sustained_flops_s.get(kind), 1e12, _unit(kind))
            for kind in NUMBER_TYPES
        },
        "best bf16": _best(row),
        "power": _amount(row.power_w, 1, "W at most"),
        "idle": _amount(row.idle_power_w, 1, "W"),
        "small kernel": _amount(row.launch_ns, 1e3, "us from one to the next"),
        "host link": _amount(row.host_link_bytes_s, 1e9, "GB/s each way"),
        "peer link": _amount(row.peer_link_bytes_s, 1e9, "GB/s each way"),
        "units": _amount(row.multiprocessors, 1, ""),
        "clock": _amount(row.clock_mhz, 1, "MHz"),
        "cache": _amount(row.cache_bytes, 2**20, "MiB"),
        "capability": row.capability or "",
    }
    sources = [
        (label if place == 0 else "", address)
        for label, source in (("source", row.source), ("measured", row.measured_source))
        for place, address in enumerate(_addresses(source))
    ]
    known = tuple((label, value) for label, value in (*figures.items(), *sources) if value)
    return Document(row.name, (Section(f"{row.name} ({made})" if made else row.name, (Facts(known),)),))


def _addresses(source: str) -> list[str]:
    """Split a source into its web addresses; any other text stays whole."""
    words = source.split()
    return words if words and all(word.startswith("https://") for word in words) else [source]


def _unit(kind: str) -> str:
    return "TOP/s" if kind == "int8" else "TFLOP/s"


def _best(row: DevicePeaks) -> str:
    """The highest rate measured for any matrix product, if large products reach less on average."""
    best = row.best_bf16_flops_s
    is_more = best is not None and best > row.sustained_flops_s.get("bf16", 0.0)
    return _amount(best, 1e12, "TFLOP/s measured for any product") if is_more else ""


def _with_measured(peak: float | None, measured: float | None, unit: float, name: str) -> str:
    if peak is None:
        return _amount(measured, unit, f"{name} measured")
    if measured is None or measured == peak:
        return _amount(peak, unit, name)
    return f"{_amount(peak, unit, name)}; {_amount(measured, unit, name)} measured ({measured / peak:.0%})"


def _amount(value: float | None, unit: float, name: str) -> str:
    return "" if value is None else f"{value / unit:,.6g} {name}".rstrip()


def price_table(prices: Sequence[Price], today: date) -> pl.DataFrame:
    """One row per price, sorted by provider, device and device count; `old` is set from OLD_DAYS on.

    Columns: provider, instance, gpu, count, on_demand_usd_h, spot_usd_h, as_of, age_days, old, region, device, vcpus,
    memory_gib, link, source, page.
    """
    ordered = sorted(prices, key=lambda each: (each.provider, each.gpu, each.count, each.instance, each.region or ""))
    rows = [
        {
            **{name: getattr(each, name) for name in _PRICE_COLUMNS if hasattr(each, name)},
            "as_of": each.as_of.isoformat(),
            "age_days": each.age_days(today),
            "old": each.is_old(today),
        }
        for each in ordered
    ]
    other = {"count": pl.Int64, "age_days": pl.Int64, "old": pl.Boolean}
    types = {name: other.get(name, pl.Float64 if name in _NUMBERS else pl.String) for name in _PRICE_COLUMNS}
    return pl.DataFrame(rows, schema=types, orient="row")
