"""A measured device as a row for the user's own devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from stepscope.capture.device_measurements import COPIES, SMALL_KERNEL, DeviceMeasurements, Figure
from stepscope.devices import DevicePeaks, find_device
from stepscope.devices.own import figures_of

_DIGITS: Final = 4
"""Of a measured figure; runs differ by more."""
_UNSTEADY: Final = 0.1
"""From this share of the median between the quartiles on, a figure says little."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The device as a trace would describe it."""

    name: str | None
    memory_bytes: int | None
    compute_capability: str | None
    multiprocessors: int | None


def known_device(measured: DeviceMeasurements) -> DevicePeaks | None:
    """The row of the table that is about the measured device."""
    if measured.is_cpu:
        return None
    return find_device(
        _Seen(measured.name, measured.memory_bytes, measured.compute_capability, measured.multiprocessors)
    )


def measured_row(measured: DeviceMeasurements, name: str | None = None) -> dict[str, Any]:
    """What was measured as a table of a TOML file, with the maker's figures where the device is in the table.

    Args:
        name: of the row; by default that of the table's row, which the measured one then replaces.
    """
    known = known_device(measured)
    row: dict[str, Any] = figures_of(known) if known is not None else {"vendor": measured.vendor}
    row["name"] = name or (known.name if known is not None else measured.name)
    if name is not None:
        row.pop("aliases", None)
    row["driver_names"] = [measured.name]
    described = {
        "capability": measured.compute_capability,
        "multiprocessors": measured.multiprocessors,
        "memory_gb": None if measured.memory_bytes is None else round(measured.memory_bytes / 1e9, 3),
        "cache_mib": None if measured.cache_bytes is None else round(measured.cache_bytes / 2**20, 3),
    }
    row = {key: value for key, value in described.items() if value} | {k: v for k, v in row.items() if v}
    row["measured_tflop_s"] = {kind: _rounded(figure.median / 1e12) for kind, figure in measured.rates.items()}
    on_device, *over_link = (measured.copies.get(way) for way in COPIES)
    if on_device is not None:
        row["measured_bandwidth_gb_s"] = _rounded(on_device.median / 1e9)
    if all(over_link):
        row["host_link_gb_s"] = _rounded(min(figure.median for figure in over_link if figure) / 1e9)
    if measured.kernel_ns is not None:
        row["launch_us"] = _rounded(measured.kernel_ns.median / 1e3)
    row["measured_source"] = f"stepscope devices measure, with torch {measured.torch_version}"
    return row


def measured_lines(measured: DeviceMeasurements) -> Iterator[str]:
    """Sentences: each figure with the spread of its runs and with what it was measured, and what could not be."""
    yield f"Measured on {measured.name}, with torch {measured.torch_version}:"
    for kind, figure in measured.rates.items():
        yield _line(f"{kind} products", figure, 1e12, "TFLOP/s" if kind != "int8" else "TOP/s")
    for way, figure in measured.copies.items():
        yield _line(way, figure, 1e9, "GB/s")
    if measured.kernel_ns is not None:
        yield _line(SMALL_KERNEL, measured.kernel_ns, 1e3, "us")
    if max((figure.spread for figure in _figures(measured)), default=0.0) > _UNSTEADY:
        yield "  The runs differ much: other programs used the machine. Measure again when it is idle."
    for what, why in measured.skipped.items():
        yield f"  {what}: not measured: {why}"


def _figures(measured: DeviceMeasurements) -> list[Figure]:
    kernel = [] if measured.kernel_ns is None else [measured.kernel_ns]
    return [*measured.rates.values(), *measured.copies.values(), *kernel]


def _line(what: str, figure: Figure, unit: float, name: str) -> str:
    value = f"{_rounded(figure.median / unit):,} {name}"
    return f"  {what}: {value}, the middle half of the runs within {figure.spread:.0%}; {figure.detail}"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
