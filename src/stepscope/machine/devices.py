"""What accelerators can do, found by what a trace or a user calls them."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from stepscope.errors import UsageError
from stepscope.machine.own_devices import (
    NUMBER_TYPES,
    USUAL_BEST_SHARE,
    Described,
    DevicePeaks,
    plain,
    read_devices,
    users_files,
)

__all__ = [
    "NUMBER_TYPES",
    "USUAL_BEST_SHARE",
    "Described",
    "DevicePeaks",
    "device_table",
    "find_device",
    "forget_devices",
    "named_device",
]


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


_MEMORY_TOLERANCE: Final = 0.05
"""Devices report up to 5 % less or more memory than their makers say, some of it reserved for error correction."""
_GIB: Final = 2**30 / 1e9
"""What makers call a GB is a GiB on many devices."""
_NAMED_AT_MOST: Final = 8
_LONGEST_NAME: Final = 200
_ALIKE: Final = 0.5


def find_device(device: Described) -> DevicePeaks | None:
    """The row of a device that a trace describes: by its name, else by capability, units and memory together.

    None where nothing fits, or several rows that differ in what they can do.
    """
    if device.name:
        for row in device_table():
            if row.matches and re.search(row.matches, device.name.strip(), re.IGNORECASE):
                return row
    alike = [row for row in device_table() if _is_alike(row, device)]
    return alike[0] if alike and all(_can(row) == _can(alike[0]) for row in alike) else None


def named_device(name: str) -> DevicePeaks:
    """The row of this name, case and punctuation aside: "H100-SXM", "a100 sxm4 80gb", or as its driver calls it.

    A name that fits none wholly may be a part of one, or parts: "A100 80GB" is several devices.

    Raises:
        UsageError: no row has that name, or several could be meant; the message names those that come near.
    """
    rows, wanted = device_table(), plain(name[:_LONGEST_NAME])
    if not wanted:
        raise UsageError("the name of a device is empty (stepscope devices lists them)")
    meant = (
        [row for row in rows if wanted in map(plain, _names(row))]
        or [row for row in rows if row.matches and re.search(row.matches, name[:_LONGEST_NAME], re.IGNORECASE)]
        or [row for row in rows if plain(row.name).startswith(wanted)]
        or [row for row in rows if wanted in plain(row.name)]
        or [row for row in rows if all(plain(part) in plain(row.name) for part in re.findall(r"[A-Za-z0-9]+", name))]
    )
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise UsageError(f"{name!r} could be several devices: {_listed([row.name for row in meant])}")
    near = _near(wanted, rows)
    guess = f"; did you mean {', '.join([*near[:-2], ' or '.join(near[-2:])])}?" if near else ""
    raise UsageError(f"{name!r} is no device that the table knows{guess} (stepscope devices lists them)")


def _names(row: DevicePeaks) -> tuple[str, ...]:
    """What a row may be called, "MI250" for "MI250 (one of two dies)" among them."""
    return (row.name, re.sub(r" \(.*\)$", "", row.name), *row.aliases)


def _near(wanted: str, rows: Sequence[DevicePeaks]) -> list[str]:
    """Names of rows that look like the wanted one, the likest first."""
    called = {plain(name): row.name for row in reversed(rows) for name in _names(row)}
    found = difflib.get_close_matches(wanted, list(called), n=_NAMED_AT_MOST, cutoff=_ALIKE)
    return list(dict.fromkeys(called[name] for name in found))[:3]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _is_alike(row: DevicePeaks, device: Described) -> bool:
    if None in (row.capability, row.multiprocessors, row.memory_bytes, device.memory_bytes):
        return False
    assert row.memory_bytes is not None
    assert device.memory_bytes is not None
    ratio = device.memory_bytes / row.memory_bytes
    return (row.capability, row.multiprocessors) == (device.compute_capability, device.multiprocessors) and (
        min(abs(ratio - 1), abs(ratio / _GIB - 1)) <= _MEMORY_TOLERANCE
    )


def _can(row: DevicePeaks) -> tuple[object, ...]:
    return row.bandwidth_bytes_s, row.cache_bytes, tuple(sorted(row.flops_s.items()))
