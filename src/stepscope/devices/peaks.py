"""What one accelerator can do.

Peaks are those of dense matrix products at the boost clock, by number type. A row is a device as software sees it: of
an MI250, which is two, one die.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Protocol

NUMBER_TYPES: Final = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
USUAL_BEST_SHARE: Final = 0.85
"""Share of the peak that the best matrix products reach where nobody measured it for the device."""


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


def plain(name: str) -> str:
    """A name without case and punctuation, for comparing."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
