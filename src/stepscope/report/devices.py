"""One device of the table as text: its figures, and where they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import Final

import polars as pl

from stepscope.machine.devices import NUMBER_TYPES, DevicePeaks
from stepscope.predict.cost.prices import Price
from stepscope.report.format import printable

_LABEL: Final = 14


def device_lines(row: DevicePeaks) -> Iterator[str]:
    """Every figure that is known, with its unit; then the sources."""
    made = ", ".join(filter(None, (row.vendor, row.architecture)))
    yield printable(f"{row.name} ({made})" if made else row.name)
    yield from _figures(
        (
            ("also called", ", ".join(row.aliases)),
            ("memory", _amount(row.memory_bytes, 1e9, "GB")),
            ("bandwidth", _with_measured(row.bandwidth_bytes_s, row.sustained_bandwidth_bytes_s, 1e9, "GB/s")),
            *(
                (kind, _with_measured(row.flops_s.get(kind), row.sustained_flops_s.get(kind), 1e12, _unit(kind)))
                for kind in NUMBER_TYPES
            ),
            ("best bf16", _best(row)),
            ("power", _amount(row.power_w, 1, "W at most")),
            ("idle", _amount(row.idle_power_w, 1, "W")),
            ("small kernel", _amount(row.launch_ns, 1e3, "us from one to the next")),
            ("host link", _amount(row.host_link_bytes_s, 1e9, "GB/s each way")),
            ("peer link", _amount(row.peer_link_bytes_s, 1e9, "GB/s each way")),
            ("units", _amount(row.multiprocessors, 1, "")),
            ("clock", _amount(row.clock_mhz, 1, "MHz")),
            ("cache", _amount(row.cache_bytes, 2**20, "MiB")),
            ("capability", row.capability or ""),
        )
    )
    yield ""
    for label, source in (("source", row.source), ("measured", row.measured_source)):
        yield from _figures((label if place == 0 else "", one) for place, one in enumerate(_addresses(source)))


def _figures(figures: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, value in figures:
        if value:
            yield printable(f"  {label:<{_LABEL}}{value}".rstrip())


def _addresses(source: str) -> list[str]:
    """Web addresses one by one; anything else as it is."""
    words = source.split()
    return words if words and all(word.startswith("https://") for word in words) else [source]


def _unit(kind: str) -> str:
    return "TOP/s" if kind == "int8" else "TFLOP/s"


def _best(row: DevicePeaks) -> str:
    """The most that was measured for any product, where large ones on the whole reach less."""
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
