"""The table of devices: what is shipped, and the user's own before it."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from stepscope.devices.own import read_devices, users_files
from stepscope.devices.peaks import NUMBER_TYPES, DevicePeaks, plain


def device_table() -> tuple[DevicePeaks, ...]:
    """Every accelerator whose figures are known, the user's own first; one of these replaces a shipped one of its name.

    Raises:
        UsageError: a file of the user's devices cannot be used.
    """
    return _with(users_files())


def forget_devices() -> None:
    """Read the user's files anew when the table is next asked for: they have changed."""
    _with.cache_clear()


@lru_cache(maxsize=4)
def _with(paths: tuple[Path, ...]) -> tuple[DevicePeaks, ...]:
    own: dict[str, DevicePeaks] = {}
    drivers = {plain(row.name): row.matches for row in _shipped()}
    for path in paths:  # what is named for this run goes before what is kept
        for row in read_devices(path):
            # What replaces a shipped row is still what drivers call that.
            matches = "|".join(filter(None, (row.matches, drivers.get(plain(row.name)))))
            own.setdefault(plain(row.name), replace(row, matches=matches))
    return (*own.values(), *(row for row in _shipped() if plain(row.name) not in own))


@lru_cache(maxsize=1)
def _shipped() -> tuple[DevicePeaks, ...]:
    text = files("stepscope").joinpath("data/devices.csv").read_text(encoding="utf-8")
    return tuple(_row(values) for values in csv.DictReader(text.splitlines()))


def _row(values: dict[str, str]) -> DevicePeaks:
    memory, cache = _scaled(values["memory_gb"], 1e9), _scaled(values["cache_mib"], 2**20)
    return DevicePeaks(
        name=values["name"],
        matches=values["matches"],
        capability=values["capability"] or None,
        multiprocessors=_whole(values["multiprocessors"]),
        clock_mhz=_whole(values["clock_mhz"]),
        memory_bytes=None if memory is None else int(memory),
        bandwidth_bytes_s=int(float(values["bandwidth_gb_s"]) * 1e9),
        cache_bytes=None if cache is None else int(cache),
        flops_s=_rates(values, ""),
        power_w=_whole(values["power_w"]),
        best_bf16_flops_s=_scaled(values["best_bf16"], 1e12),
        source=values["source"],
        vendor=values["vendor"],
        architecture=values["architecture"],
        sustained_flops_s=_rates(values, "measured_"),
        sustained_bandwidth_bytes_s=_scaled(values["measured_bandwidth_gb_s"], 1e9),
        launch_ns=_scaled(values["launch_us"], 1e3),
        idle_power_w=_scaled(values["idle_w"], 1),
        host_link_bytes_s=_scaled(values["host_link_gb_s"], 1e9),
        peer_link_bytes_s=_scaled(values["peer_link_gb_s"], 1e9),
        aliases=tuple(name for name in values["aliases"].split("|") if name),
        measured_source=values["measured_source"],
    )


def _rates(values: dict[str, str], prefix: str) -> dict[str, float]:
    """Operations per second by number type, from columns of tera-operations per second."""
    return {kind: float(values[prefix + kind]) * 1e12 for kind in NUMBER_TYPES if values[prefix + kind]}


def _scaled(text: str, unit: float) -> float | None:
    return float(text) * unit if text else None


def _whole(text: str) -> int | None:
    return int(text) if text else None
