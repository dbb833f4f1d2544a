"""At what rates a device multiplies matrices: its peak, as far as its power carries it, and its bandwidth.

A device that draws more at its peak than it may lowers its clock within milliseconds: a P4 or T4 of 75 W runs half as
fast in long products as in short ones. Where the sustained rate is not known, it is what the power allows at the
operations per joule of the device's process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepscope.devices import DevicePeaks
from stepscope.predict.operations import Numbers

BEST_SHARE: Final = {"vector": 0.8, "tensor": 0.92}
"""Of the peak, what large products reach on devices whose power suffices, by unit."""
WARM_S: Final = {"vector": 1.5e-3, "tensor": 0.5e-3}
"""How long a product runs until half of what power takes from the peak is gone, seconds."""
FLOPS_PER_JOULE: Final = ((8.0, 53e9), (8.5, 132e9), (8.8, 88e9), (100.0, 189e9))
"""FP32 at full clock by process, up to a compute capability: 16 and 12 nm as the P4's and T4's long products tell;
N7 takes 0.4, 10 nm class (8N) 0.6 of the power of 16 nm, N5 class (4N) 0.7 of N7's, as their makers say."""
CACHE_BYTES_PER_CLOCK: Final = 8.0
"""Of the last-level cache for each multiprocessor, where that is more than the memory's bandwidth: on the L40S."""
USUAL_BANDWIDTH_SHARE: Final = 0.85
"""Of the peak bandwidth, what is sustained where nobody measured it."""
_TENSOR_TYPES: Final = ("tf32", "fp16", "bf16", "fp8", "int8")


def unit_of(device: DevicePeaks, kind: str) -> str | None:
    """Whether a device's "vector" or "tensor" units multiply numbers of this type; None where that is not known."""
    capability = capability_of(device)
    if device.vendor != "NVIDIA" or kind not in device.flops_s or capability is None or not device.multiprocessors:
        return None
    if kind in _TENSOR_TYPES and capability >= 7:
        return "tensor"
    return "vector" if kind in ("fp64", "fp32", "fp16") else None


def capability_of(device: DevicePeaks) -> float | None:
    """The compute capability as a number; None where it is none, as users may write what they like."""
    text = device.capability or ""
    return float(text) if re.fullmatch(r"[0-9]{1,2}\.[0-9]", text) else None


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one device and number type.

    Attributes:
        peak: operations per second at the boost clock.
        carried: share of the peak that its power carries for long, above 0.
        warm_s: after which half of the rest is gone.
        bandwidth: bytes per second that its memory sustains.
        cache_bandwidth: bytes per second of its last-level cache.
        cache_bytes: of its last-level cache.
        is_sustained: whether a sustained rate was measured.
    """

    peak: float
    carried: float
    warm_s: float
    bandwidth: float
    cache_bandwidth: float
    cache_bytes: float
    is_sustained: bool

    def arithmetic_s(self, flops: Numbers) -> Numbers:
        """Seconds of the arithmetic alone; the longer, the more power counts."""
        long = flops / (self.peak * self.carried)
        share = self.carried + (1 - self.carried) * self.warm_s / (long + self.warm_s)
        return flops / (self.peak * share)

    def traffic_s(self, bytes_: Numbers, weights: Numbers) -> Numbers:
        """Seconds of the traffic alone.

        Weights come from memory unless they are small beside the cache; the rest from the last-level cache if all fits.
        """
        size = max(self.cache_bytes, 1.0)
        return self._moved_s(weights, 1 - 12 * weights / size) + self._moved_s(
            bytes_ - weights, 5.5 - 5 * bytes_ / size
        )

    def _moved_s(self, bytes_: Numbers, cached: Numbers) -> Numbers:
        """Seconds for bytes of which a share, limited to 0 to 1, comes from the cache."""
        share = np.clip(cached, 0.0, 1.0)
        return bytes_ * (share / self.cache_bandwidth + (1 - share) / self.bandwidth)


def rates_of(device: DevicePeaks, kind: str) -> Rates:
    """The rates of a device that has a peak in this number type and whose unit is known."""
    unit = unit_of(device, kind)
    assert unit is not None
    peak = device.flops_s[kind]
    sustained = _sustained(device, kind, unit)
    if sustained:
        carried = sustained / peak / BEST_SHARE[unit]
    else:
        carried = _carried_by_power(device, peak) if unit == "vector" else 1.0
    bandwidth = device.sustained_bandwidth_bytes_s or device.bandwidth_bytes_s * USUAL_BANDWIDTH_SHARE
    clock = (device.clock_mhz or 0) * 1e6
    return Rates(
        peak=peak,
        carried=min(carried, 1.0),
        warm_s=WARM_S[unit],
        bandwidth=bandwidth,
        cache_bandwidth=max(bandwidth, CACHE_BYTES_PER_CLOCK * (device.multiprocessors or 0) * clock),
        cache_bytes=float(device.cache_bytes or 0),
        is_sustained=bool(sustained),
    )


def _sustained(device: DevicePeaks, kind: str, unit: str) -> float | None:
    """Operations per second that were measured; of another type on tensor cores where only that one was, its share."""
    kinds = (kind, "bf16", "fp16") if unit == "tensor" else (kind,)
    for other in kinds:
        if other in device.sustained_flops_s and other in device.flops_s:
            return device.sustained_flops_s[other] / device.flops_s[other] * device.flops_s[kind]
    return None


def _carried_by_power(device: DevicePeaks, peak: float) -> float:
    """Share of the FP32 peak that the power of the device allows; 1 where its power is not known."""
    if not device.power_w:
        return 1.0
    per_joule = next(rate for newest, rate in FLOPS_PER_JOULE if (capability_of(device) or 0.0) < newest)
    return device.power_w * per_joule / peak
