"""What a device draws where nothing measured it: bounds from its power limit and what it draws without work.

    P = idle + (full - idle) x activity

The power of a machine grows about linearly with how busy it is (Fan, Weber and Barroso, "Power Provisioning for a
Warehouse-sized Computer", 2007). `full` is the maker's power limit, which a device keeps to on average. While a device
works its activity is at most 1, what Green Algorithms (Lannelongue, Grealey and Inouye, 2021) and the ML CO2 Impact
calculator (Lacoste and others, 2019) take for all of its time; and at least the share of the roofline that its work is
known to reach, 0 where nothing tells. The result is a range, and an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

from stepscope.devices import DevicePeaks
from stepscope.errors import UsageError

_SHOWN: Final = 0.005
"""A least activity below this reads like none."""
FORMULA: Final = "P = idle + (full - idle) x activity"
J_PER_NJ: Final = 1e-9
"""A watt for a nanosecond is a nanojoule."""


class Predicted(Protocol):
    """Anything that names the device that it is about, such as a `StepPrediction`."""

    @property
    def device(self) -> DevicePeaks: ...


@dataclass(frozen=True, slots=True)
class PowerRange:
    """What a device draws, watts.

    Attributes:
        device: its name.
        full_w: its power limit.
        idle_low_w, idle_high_w: without work; the same where it is known, else 0 and the power limit.
        least_activity: the least that it can be doing while it works, 0 to 1.
        source: where the figures come from, in words.
    """

    device: str
    full_w: float
    idle_low_w: float
    idle_high_w: float
    least_activity: float
    source: str

    @property
    def is_idle_known(self) -> bool:
        """Whether one figure is known of what it draws without work."""
        return self.idle_low_w == self.idle_high_w

    @property
    def busy_low_w(self) -> float:
        """The least that it can draw while it works."""
        return self.idle_low_w + (self.full_w - self.idle_low_w) * self.least_activity

    @property
    def formula(self) -> str:
        """The formula with its figures."""
        idle = f"{self.idle_low_w:g}" if self.is_idle_known else f"{self.idle_low_w:g} to {self.idle_high_w:g}"
        reached = (
            ""
            if self.least_activity < _SHOWN
            else ", at least the share of its peaks that its operators reach (docs/energy.md),"
        )
        return (
            f"{FORMULA}, with full = {self.full_w:g} W, idle = {idle} W, "
            f"activity {self.least_activity:.2g} to 1 while it works{reached} and 0 else"
        )

    def joules(self, busy_ns: float, idle_ns: float) -> tuple[float, float]:
        """The least and the most energy of so much work and so much rest."""
        least = self.busy_low_w * busy_ns + self.idle_low_w * idle_ns
        most = self.full_w * busy_ns + self.idle_high_w * idle_ns
        return least * J_PER_NJ, most * J_PER_NJ


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    """An estimate of the energy of one step, joules.

    Attributes:
        low_j, high_j: bounds.
        formula: how it was estimated, with the figures.
        source: where the figures come from.
    """

    low_j: float
    high_j: float
    formula: str
    source: str


def power_range(
    peaks: DevicePeaks | None,
    *,
    device_watts: float | None = None,
    idle_watts: float | None = None,
    least_activity: float = 0.0,
) -> PowerRange | None:
    """What this device draws; None where neither the table nor the user tells its power limit.

    Args:
        peaks: its row of the table.
        device_watts, idle_watts: the user's figures, in place of the table's.
        least_activity: what its work is known to reach at least, 0 to 1.

    Raises:
        UsageError: it would draw more without work than with it.
    """
    full = device_watts if device_watts is not None else None if peaks is None else peaks.power_w
    if full is None:
        return None
    idle = idle_watts if idle_watts is not None else None if peaks is None else peaks.idle_power_w
    if idle is not None and idle > full:
        raise UsageError(f"a device cannot draw more without work ({idle:g} W) than with it ({full:g} W)")
    name = "the device" if peaks is None else peaks.name
    told = [("full", "the user" if device_watts is not None else "the device table")]
    told += [("idle", "the user" if idle_watts is not None else "the device table")] if idle is not None else []
    source = ", ".join(f"{what} from {who}" for what, who in told)
    if idle is None:
        source += "; what it draws without work is not known, so anything up to its limit counts"
    low, high = (0.0, float(full)) if idle is None else (float(idle), float(idle))
    return PowerRange(name, float(full), low, high, min(max(least_activity, 0.0), 1.0), source)


def step_energy(
    device: DevicePeaks | Predicted, step_ns: float | None, busy_ns: float | None, *, least_activity: float = 0.0
) -> EnergyEstimate | None:
    """Estimate the energy that one device uses in one step.

    Args:
        device: the device, or a prediction for it.
        step_ns: how long the step takes.
        busy_ns: how long of it the device works; None where that is not known: anything is possible then.
        least_activity: what its work is known to reach at least of the device's peaks, 0 to 1.

    Returns:
        None where the step's time or the device's power limit is not known.
    """
    peaks = device if isinstance(device, DevicePeaks) else device.device
    power = power_range(peaks, least_activity=least_activity)
    if power is None or step_ns is None or not math.isfinite(step_ns) or step_ns < 0:
        return None
    known = busy_ns is not None and math.isfinite(busy_ns)
    busy = min(max(busy_ns or 0.0, 0.0), step_ns) if known else 0.0
    low, high = power.joules(busy, step_ns - busy)
    if not known:
        high = power.full_w * step_ns * J_PER_NJ
    return EnergyEstimate(low, high, power.formula, power.source)
