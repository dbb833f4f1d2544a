"""What accelerators can do at best, from their makers' figures: data/devices.csv, found by a trace's description.

Peaks are those of dense matrix products at the boost clock, by number type. A row is a device as software sees it: of
an MI250, which is two, one die.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Final, Protocol

from stepscope.errors import UsageError

NUMBER_TYPES: Final = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
USUAL_BEST_SHARE: Final = 0.85
"""Share of the peak that the best matrix products reach where nobody measured it for the device."""
_MEMORY_TOLERANCE: Final = 0.1
"""Devices report 1 to 7 % less or more memory than their names say (GB or GiB, reserved by error correction)."""


class Described(Protocol):
    """What a trace says about a device: as `stepscope.trace.model.Device`."""

    @property
    def name(self) -> str | None: ...
    @property
    def memory_bytes(self) -> int | None: ...
    @property
    def compute_capability(self) -> str | None: ...
    @property
    def multiprocessors(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """One accelerator; null where its maker does not say.

    Attributes:
        matches: pattern of the names that drivers give it.
        capability: compute capability, for AMD as PyTorch reports it.
        multiprocessors: or compute units.
        bandwidth_bytes_s: of its memory, bytes per second.
        cache_bytes: last-level cache of the whole device.
        flops_s: operations per second by number type, one of NUMBER_TYPES.
        power_w: what it may draw, watts.
        best_bf16_flops_s: the most that anyone measured for a bf16 matrix product.
        source: addresses of where the maker's figures stand, a space between them.
        vendor: its maker.
        architecture: the generation it belongs to, such as "Ampere"; devices of one are alike in how they work.
        sustained_flops_s: operations per second that large matrix products reached where someone measured, by number
            type.
        sustained_bandwidth_bytes_s: bytes per second that large copies in its memory reached where someone measured.
        launch_ns: the least time from one small kernel's start to the next one's, where someone measured.
        idle_power_w: what it draws without work, where someone measured.
        host_link_bytes_s: between host and device, one direction, bytes per second.
        peer_link_bytes_s: from one device of a machine to the others together, one direction, bytes per second; that of
            `host_link_bytes_s` where there is no other link.
        aliases: other names that users may type.
        measured_source: addresses of where measured figures stand.
    """

    name: str
    matches: str
    capability: str | None
    multiprocessors: int | None
    clock_mhz: int | None
    memory_bytes: int | None
    bandwidth_bytes_s: int
    cache_bytes: int | None
    flops_s: dict[str, float] = field(hash=False)
    power_w: int | None = None
    best_bf16_flops_s: float | None = None
    source: str = ""
    vendor: str = ""
    architecture: str = ""
    sustained_flops_s: dict[str, float] = field(default_factory=dict, hash=False)
    sustained_bandwidth_bytes_s: float | None = None
    launch_ns: float | None = None
    idle_power_w: float | None = None
    host_link_bytes_s: float | None = None
    peer_link_bytes_s: float | None = None
    aliases: tuple[str, ...] = ()
    measured_source: str = ""

    @property
    def best_share(self) -> float:
        """Share of the peak that the best matrix products really reach, 0 to 1."""
        peak = self.flops_s.get("bf16")
        if peak is None or self.best_bf16_flops_s is None:
            return USUAL_BEST_SHARE
        return self.best_bf16_flops_s / peak


@lru_cache(maxsize=1)
def device_table() -> tuple[DevicePeaks, ...]:
    """Every accelerator whose figures are known."""
    text = files("stepscope").joinpath("data/devices.csv").read_text(encoding="utf-8")
    return tuple(_row(values) for values in csv.DictReader(text.splitlines()))


def find_device(device: Described) -> DevicePeaks | None:
    """The row of a device that a trace describes: by its name, else by capability, units and memory together.

    None where nothing fits, or several rows that differ in what they can do.
    """
    if device.name:
        for row in device_table():
            if re.search(row.matches, device.name.strip(), re.IGNORECASE):
                return row
    alike = [row for row in device_table() if _is_alike(row, device)]
    return alike[0] if alike and all(_can(row) == _can(alike[0]) for row in alike) else None


def named_device(name: str) -> DevicePeaks:
    """The row of this name, case and punctuation aside: "H100-SXM", "a100 sxm4 80gb", or as its driver calls it.

    Raises:
        UsageError: no row has that name, or several could be meant; the message names those that come near.
    """
    wanted = _plain(name)
    exact = [
        row
        for row in device_table()
        if wanted in (_plain(known) for known in (row.name, *row.aliases))
        or re.search(row.matches, name, re.IGNORECASE)
    ]
    near = exact or [row for row in device_table() if wanted and wanted in _plain(row.name)]
    if len(near) == 1:
        return near[0]
    names = [row.name for row in near or device_table()]
    problem = "could be several devices" if near else "is no device that the table knows"
    raise UsageError(f"{name!r} {problem}: {', '.join(names)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _is_alike(row: DevicePeaks, device: Described) -> bool:
    if None in (row.capability, row.multiprocessors, row.memory_bytes, device.memory_bytes):
        return False
    assert row.memory_bytes is not None
    assert device.memory_bytes is not None
    return (row.capability, row.multiprocessors) == (device.compute_capability, device.multiprocessors) and (
        abs(device.memory_bytes / row.memory_bytes - 1) <= _MEMORY_TOLERANCE
    )


def _can(row: DevicePeaks) -> tuple[object, ...]:
    return row.bandwidth_bytes_s, row.cache_bytes, tuple(sorted(row.flops_s.items()))


def _row(values: dict[str, str]) -> DevicePeaks:
    memory, cache = _number(values["memory_gb"]), _number(values["cache_mib"])
    best = _number(values["best_bf16"])
    return DevicePeaks(
        name=values["name"],
        matches=values["matches"],
        capability=values["capability"] or None,
        multiprocessors=_whole(values["multiprocessors"]),
        clock_mhz=_whole(values["clock_mhz"]),
        memory_bytes=None if memory is None else int(memory * 1e9),
        bandwidth_bytes_s=int(float(values["bandwidth_gb_s"]) * 1e9),
        cache_bytes=None if cache is None else int(cache * 2**20),
        flops_s={kind: float(values[kind]) * 1e12 for kind in NUMBER_TYPES if values[kind]},
        power_w=_whole(values["power_w"]),
        best_bf16_flops_s=None if best is None else best * 1e12,
        source=values["source"],
        vendor=values["vendor"],
        architecture=values["architecture"],
        sustained_flops_s={
            kind: float(values[f"measured_{kind}"]) * 1e12 for kind in NUMBER_TYPES if values[f"measured_{kind}"]
        },
        sustained_bandwidth_bytes_s=_scaled(values["measured_bandwidth_gb_s"], 1e9),
        launch_ns=_scaled(values["launch_us"], 1e3),
        idle_power_w=_scaled(values["idle_w"], 1),
        host_link_bytes_s=_scaled(values["host_link_gb_s"], 1e9),
        peer_link_bytes_s=_scaled(values["peer_link_gb_s"], 1e9),
        aliases=tuple(name for name in values["aliases"].split("|") if name),
        measured_source=values["measured_source"],
    )


def _number(text: str) -> float | None:
    return float(text) if text else None


def _scaled(text: str, unit: float) -> float | None:
    return float(text) * unit if text else None


def _whole(text: str) -> int | None:
    return int(text) if text else None
