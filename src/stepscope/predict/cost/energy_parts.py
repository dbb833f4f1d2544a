"""Energy of a step: devices, processors and memory, the parts that it is made of, and the carbon that it emits.

data/carbon_intensity.csv has codecarbon's figures; scripts/make_carbon_table.py makes it, docs/energy.md names the
sources and limits. Everything here is in kilograms.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks, device_table, is_nvidia
from stepscope.trace import TraceWarning
from stepscope.trace.energy_records import MissingCounter

_SHOWN: Final = 0.005  # a smaller least activity is not mentioned
FORMULA: Final = "P = idle + (full - idle) x activity"
J_PER_NJ: Final = 1e-9  # a watt for a nanosecond is a nanojoule


@dataclass(frozen=True, slots=True)
class PowerRange:
    """Bounds on a device's power, watts."""

    device: str
    full_w: float  # power limit
    idle_low_w: float
    idle_high_w: float  # idle_low_w, idle_high_w: without work; 0 and the power limit where nothing is known
    least_activity: float  # least activity while it works, 0 to 1
    source: str  # sources of the figures, in words
    memory_share: float = 0.0  # of its work, what memory limits, less the share of the peak that this reaches, 0 to 1
    memory_w: float | None = None  # most that such work was measured to draw

    @property
    def busy_low_w(self) -> float:
        """Least power that the device can draw while it works."""
        return self.idle_low_w + (self.full_w - self.idle_low_w) * self.least_activity

    @property
    def busy_high_w(self) -> float:
        """Most power that the device can draw while it works."""
        if self.memory_w is None:
            return self.full_w
        return max(self.full_w - (self.full_w - self.memory_w) * self.memory_share, self.busy_low_w)

    @property
    def formula(self) -> str:
        """Describe the formula with its figures."""
        low, high = f"{self.idle_low_w:.3g}", f"{self.idle_high_w:.3g}"
        idle = low if low == high else f"{low} to {high}"
        reached = ", at least the share of the peak that its products reach (docs/energy.md),"
        activity = f"{self.least_activity:.2g} to 1 while it works{reached if self.least_activity >= _SHOWN else ''}"
        typical = ""
        if self.memory_w is not None and self.memory_share >= _SHOWN:
            typical = f"; for {self.memory_share:.0%} of its work, which memory limits, at most {self.memory_w:g} W"
        return f"{FORMULA}, with full = {self.full_w:g} W, idle = {idle} W, activity {activity} and 0 else{typical}"

    def joules(self, busy_ns: float, idle_ns: float) -> tuple[float, float]:
        """Least and most joules of so much busy and idle time."""
        least = self.busy_low_w * busy_ns + self.idle_low_w * idle_ns
        most = self.busy_high_w * busy_ns + self.idle_high_w * idle_ns
        return least * J_PER_NJ, most * J_PER_NJ


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    """Estimated energy of one step, joules."""

    low_j: float
    high_j: float  # low_j, high_j: bounds
    formula: str  # how it was estimated, with the figures
    source: str  # sources of the figures


CONTEXT_W: Final = 66.0
"""The most that a program which only holds an NVIDIA device adds to its power (arXiv:2605.23918: 26 to 66 W)."""


def power_range(
    peaks: DevicePeaks | None,
    *,
    device_watts: float | None = None,
    idle_watts: float | None = None,
    least_activity: float = 0.0,
    memory_share: float = 0.0,
) -> PowerRange | None:
    """Bounds on a device's power; None where neither the table nor the user gives its power limit.

    Args:
        peaks: the device's row in the table.
        device_watts, idle_watts: the user's figures, in place of the table's.
        least_activity: known lower bound on its activity while it works, 0 to 1.
        memory_share: as in `PowerRange`.

    Raises:
        UsageError: its idle power is above its power limit.
    """
    table = None if peaks is None else peaks.power_w
    full = table if device_watts is None else device_watts
    if full is None:
        return None
    if idle_watts is not None and idle_watts > full:
        raise UsageError(f"a device cannot draw more power idle ({idle_watts:g} W) than at work ({full:g} W)")
    source = f"full from {'the device table' if device_watts is None else 'the user'}"
    low, high, what = _idle(peaks, idle_watts, float(full))
    memory_w = peaks.memory_power_w if peaks is not None and device_watts is None else None
    if memory_w is not None and memory_share >= _SHOWN:
        what += ", work that memory limits as measured elsewhere"
    name = "the device" if peaks is None else peaks.name
    least, share = (min(max(each, 0.0), 1.0) for each in (least_activity, memory_share))
    return PowerRange(name, float(full), low, high, least, source + what, share, memory_w)


def _idle(peaks: DevicePeaks | None, given: float | None, full: float) -> tuple[float, float, str]:
    """Least and most power without work, and where it is from."""
    if given is not None:
        return float(given), float(given), ", idle from the user"
    if peaks is None:
        return 0.0, full, "; its idle power is unknown and may be anything up to the limit"
    known, least, most = _idle_of(peaks)
    typical = _typical_idle()
    if not known:
        what = f", idle typical of devices in the table: {typical[0]:.0%} to {typical[1]:.0%} of the limit"
        return typical[0] * full, typical[1] * full, what
    if not least:
        what = f", idle at most as in the device table, at least {typical[0]:.0%} of the limit as of other devices"
        return min(typical[0] * full, most, full), min(most, full), what
    return min(least, full), min(most, full), ", idle from the device table"


def _idle_of(row: DevicePeaks) -> tuple[bool, float, float]:
    """Whether a device's idle power was measured; the least and the most of it, with a program that holds it."""
    least, most = row.idle_power_w, row.idle_high_power_w
    if most is None:
        most = (least or 0.0) + (CONTEXT_W if is_nvidia(row) else 0.0)
    return least is not None or row.idle_high_power_w is not None, least or 0.0, most


def _typical_idle() -> tuple[float, float]:
    """Least and most idle power of the table's devices, as a share of their limit."""
    rows = [(row.power_w, *_idle_of(row)) for row in device_table() if row.power_w]
    low = [least / full for full, known, least, _ in rows if known and least]
    high = [most / full for full, known, _, most in rows if known]
    return min(low, default=0.0), min(max(high, default=1.0), 1.0)


def step_energy(
    device: DevicePeaks, step_ns: float | None, busy_ns: float | None, *, least_activity: float = 0.0
) -> EnergyEstimate | None:
    """Estimate the energy that one device uses in one step.

    Args:
        busy_ns: time per step in which the device works; None where unknown, which allows anything from 0 to all of it.
        least_activity: known lower bound on its activity, as a share of the device's peaks, 0 to 1.

    Returns:
        None where the step's time or the device's power limit is unknown.
    """
    power = power_range(device, least_activity=least_activity)
    if power is None or step_ns is None or not math.isfinite(step_ns) or step_ns < 0:
        return None
    known = busy_ns is not None and math.isfinite(busy_ns)
    busy = min(max(busy_ns or 0.0, 0.0), step_ns) if known else 0.0
    low, high = power.joules(busy, step_ns - busy)
    return EnergyEstimate(low, high if known else power.full_w * step_ns * J_PER_NJ, power.formula, power.source)


Basis: TypeAlias = Literal["measured", "sampled", "estimate", "given"]
"""Source of an energy: a counter, telemetry samples, a formula, or a power that the user gave."""
Pair: TypeAlias = tuple[int, int]

NO_OPERATOR: Final = "(no operator)"
KINDS: Final = ("computation", "communication", "copies")


@dataclass(frozen=True, slots=True)
class PowerSettings:
    """Hardware figures given by the user; None where not given."""

    device_watts: float | None = None
    idle_watts: float | None = None
    cpu_watts: float | None = None  # all processors together, whichever rank they work for


@dataclass(frozen=True, slots=True)
class EnergyPart:
    kind: (
        str  # "idle" (by cause), "busy" (by kind of work), "operator" (the busy part by operator) or "host" (by cause)
    )
    name: str  # cause, kind or operator
    ns: int  # time per step
    nanojoules: Pair  # per step; see the module docstring


@dataclass(frozen=True, slots=True)
class Powers:
    """Power of a device without work and with it, watts."""

    idle_w: float
    busy_w: float


@dataclass(frozen=True, slots=True)
class FindingEnergy:
    rule: str
    title: str
    saving_ns: int  # per step
    busy_ns: Pair  # device work per step that would go away, nanoseconds: least and most
    nanojoules: Pair  # per step, least and most


@dataclass(frozen=True, slots=True)
class DeviceEnergy:
    """Energy of one device per step.

    Attributes:
        parts: idle by cause and busy by kind; they add up to `nanojoules`, each bound on its own.
    """

    device: str
    name: str | None  # device, name: as in the trace
    basis: Basis | None  # source of the total; None where there is no number
    how: str  # counter or formula and the sources of its figures; or why there is no number
    step_ns: int  # length of the step that the energy is for
    nanojoules: Pair | None = None  # per step; None where there is no number
    parts: tuple[EnergyPart, ...] = ()
    operators: tuple[EnergyPart, ...] = ()  # the busy parts by operator, the costliest first
    window_joules: tuple[float, ...] = ()  # measured joules per step of each window
    identity: str | None = None  # identifies the hardware across ranks; None where unknown
    powers: tuple[Powers, Powers] | None = None

    def of_kind(self, kind: str) -> Pair:
        selected = [part.nanojoules for part in self.parts if part.kind == kind]
        return sum(pair[0] for pair in selected), sum(pair[1] for pair in selected)

    @property
    def idle_share(self) -> tuple[float, float] | None:
        """Least and most share of idle time in the device's energy, 0 to 1; None without a number."""
        if self.nanojoules is None or self.powers is None or not all(self.nanojoules):
            return None
        idle = self.of_kind("idle")
        if self.basis != "estimate":
            shares = [part / whole for part, whole in zip(idle, self.nanojoules, strict=True)]
            return min(shares), max(shares)
        busy_ns = sum(part.ns for part in self.parts if part.kind == "busy")
        least, most = self.powers
        # In one extreme the work draws the most, in the other the least, but never less than the idle power.
        slow = max(least.busy_w, most.idle_w) * busy_ns
        return idle[0] / max(idle[0] + most.busy_w * busy_ns, 1), idle[1] / max(idle[1] + slow, 1)


@dataclass(frozen=True, slots=True)
class HostEnergy:
    """Energy of processors or memory per step, for the whole machine, whatever else ran on it."""

    kind: str  # "cpu" or "dram"
    device: str  # index of the package, or "all"
    basis: Basis
    how: str
    step_ns: int
    nanojoules: int
    parts: tuple[EnergyPart, ...] = ()
    window_joules: tuple[float, ...] = ()
    identity: str | None = None


@dataclass(frozen=True, slots=True)
class TraceEnergy:
    path: str
    format: str
    rank: int | None
    step_ns: int  # mean step in the trace, recorded with the profiler
    step_count: int
    stepped: bool  # whether the trace has steps; otherwise the whole recording counts as one
    devices: tuple[DeviceEnergy, ...]
    hosts: tuple[HostEnergy, ...]
    missing: tuple[MissingCounter, ...] = ()  # counters without a number, and why
    findings: tuple[FindingEnergy, ...] = ()  # energy saved by each finding, in the order of the findings
    warnings: tuple[TraceWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledEnergy:
    """Energy of a device's steps from telemetry samples: joules per step, or why there is none."""

    device: str
    step_joules: float | None
    how: str


def joules(nanojoules: Pair) -> tuple[float, float]:
    """Convert a pair of nanojoules to the least and the most joules."""
    return min(nanojoules) * J_PER_NJ, max(nanojoules) * J_PER_NJ


def shared(total: int, weights: Sequence[int]) -> list[int]:
    """Divide a total by weights into whole parts that add up to it; an empty list without weights."""
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    ends = [total * sum_so_far // whole for sum_so_far in itertools.accumulate(weights)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


_Part = TypeVar("_Part", DeviceEnergy, HostEnergy)


@dataclass(frozen=True, slots=True)
class EnergyAnswer:
    """Energy of one trace, or of several ranks that take the same steps."""

    traces: tuple[TraceEnergy, ...]  # by rank
    iterations: int | None = None  # number of steps that the user asks about; None for those recorded
    pue: float = 1.0  # power usage effectiveness: the data centre's power over its computers' power
    grid: Grid | None = None  # source of the electricity; None where the user did not say

    @property
    def step_nanojoules(self) -> Pair | None:
        """Energy of a step over all devices, processors and memory with a number, each once; None without any."""
        pairs = [each.nanojoules for each in counted_devices(self.traces) if each.nanojoules is not None]
        pairs += [(each.nanojoules, each.nanojoules) for each in counted_hosts(self.traces)]
        if not pairs:
            return None
        ordered = [(min(pair), max(pair)) for pair in pairs]
        return sum(pair[0] for pair in ordered), sum(pair[1] for pair in ordered)

    @property
    def unknown_devices(self) -> tuple[DeviceEnergy, ...]:
        """Devices without a number, which are missing from every sum."""
        return tuple(each for each in counted_devices(self.traces) if each.nanojoules is None)

    @property
    def is_estimate(self) -> bool:
        """Whether any part of the energy was not measured."""
        bases = {each.basis for each in counted_devices(self.traces)}
        bases |= {each.basis for each in counted_hosts(self.traces)}
        return bool(bases & {"estimate", "given"})

    @property
    def steps(self) -> int:
        """Number of steps that `of_run` covers."""
        return self.iterations if self.iterations is not None else self.traces[0].step_count

    def of_run(self, step_nanojoules: Pair) -> tuple[float, float]:
        """Least and most joules over all steps, including the data centre's share."""
        low, high = joules(step_nanojoules)
        return low * self.steps * self.pue, high * self.steps * self.pue

    def kilograms(self, run_joules: tuple[float, float]) -> tuple[float, float] | None:
        """Least and most kilograms of CO2 equivalents; None where no grid is chosen."""
        if self.grid is None:
            return None
        return emitted_kg(run_joules[0], self.grid), emitted_kg(run_joules[1], self.grid)


def alike(kilograms: tuple[float, float]) -> Iterator[tuple[Equivalence, Equivalence]]:
    """Express the least and the most of an amount of CO2 as each equivalence."""
    yield from zip(equivalences(kilograms[0]), equivalences(kilograms[1]), strict=True)


def counted_devices(traces: Sequence[TraceEnergy]) -> list[DeviceEnergy]:
    """Every device once; one that several ranks measured counts with the first of them."""
    return _once([each for trace in traces for each in trace.devices])


def counted_hosts(traces: Sequence[TraceEnergy]) -> list[HostEnergy]:
    """Every processor and memory once; a power given by the user counts where no rank measured its processors."""
    found = _once([each for trace in traces for each in trace.hosts])
    measured = any(each.kind == "cpu" and each.basis == "measured" for each in found)
    return [each for each in found if not measured or each.kind != "cpu" or each.basis == "measured"]


def _once(parts: list[_Part]) -> list[_Part]:
    seen: set[str] = set()
    kept = []
    for part in parts:
        if part.identity is None or part.identity not in seen:
            kept.append(part)
        seen |= {part.identity} if part.identity is not None else set()
    return kept


J_PER_KWH: Final = 3.6e6
PETROL_G_PER_GALLON: Final = 8_887.0
"""CO2 of a US gallon of petrol burned. Source: EPA-420-F-23-014, after 75 FR 25324 (2010)."""
CAR_MILES_PER_GALLON: Final = 22.0
"""Fuel economy of the average passenger vehicle in the United States. Source: EPA-420-F-23-014."""
KM_PER_MILE: Final = 1.609344
LITRES_PER_GALLON: Final = 3.785411784
_NEAR: Final = 6


@dataclass(frozen=True, slots=True)
class Grid:
    """A place and the carbon intensity of its electricity.

    Attributes:
        code: a country's three letters (ISO 3166-1), a region's code (ISO 3166-2) or bidding zone, or a cloud provider
            and its region: "FRA", "US-CA", "SE3", "aws:eu-west-3".
    """

    kind: str  # "country", "region" (a part of a country) or "cloud"
    code: str
    name: str
    country: str  # three letters
    g_per_kwh: float  # grams of CO2 equivalents per kilowatt-hour, a yearly mean
    basis: str  # "own", or the code of the place whose figure is used, for cloud regions without their own
    year: str  # year of the figure; empty where its source does not say


@dataclass(frozen=True, slots=True)
class Equivalence:
    """An amount of CO2 expressed as something else: `value` times `unit`."""

    value: float
    unit: str
    source: str


@lru_cache(maxsize=1)
def grids() -> tuple[Grid, ...]:
    """Every place with a known carbon intensity."""
    lines = [line for line in _table().splitlines() if not line.startswith("#")]
    return tuple(msgspec.convert(row, Grid, strict=False) for row in csv.DictReader(lines))


def _table() -> str:
    return files("stepscope").joinpath("data/carbon_intensity.csv").read_text(encoding="utf-8")


def grid_source() -> str:
    """Source and version of the carbon intensities."""
    found = re.search(r"Source: (codecarbon [\w.]+)", _table())
    return found[1] if found else "codecarbon"


def grid_of(place: str) -> Grid:
    """Find the place with this code or name, ignoring case and punctuation: "FRA", "france", "US-CA", "aws:eu-west-3".

    Raises:
        UsageError: no place has that name, or several do; the message names similar ones.
    """
    wanted = _plain(place)
    by_code = [grid for grid in grids() if _plain(grid.code) == wanted]
    found = by_code or [grid for grid in grids() if grid.kind != "cloud" and _plain(grid.name) == wanted]
    if len(found) == 1 and wanted:
        return found[0]
    problem = "could be several places" if found and wanted else "is not a country or region with known electricity"
    near = found if found and wanted else _near(wanted)
    hint = f": {', '.join(f'{grid.code} ({grid.name})' for grid in near)}" if near else ""
    raise UsageError(
        f"{place!r} {problem}{hint or '; give a country as three letters (FRA), a state (US-CA) or gcp:europe-west9'}"
    )


def emitted_kg(joules: float, grid: Grid) -> float:
    """Kilograms of CO2 equivalents emitted for this much energy from the grid."""
    return joules / J_PER_KWH * grid.g_per_kwh / 1000


def equivalences(kilograms: float) -> tuple[Equivalence, ...]:
    """An amount of CO2 as kilometres by car and as litres of petrol."""
    grams = kilograms * 1000
    car_g_per_km = PETROL_G_PER_GALLON / CAR_MILES_PER_GALLON / KM_PER_MILE
    return (
        Equivalence(grams / car_g_per_km, "km by an average US car", "EPA-420-F-23-014"),
        Equivalence(grams / (PETROL_G_PER_GALLON / LITRES_PER_GALLON), "litres of petrol burned", "EPA-420-F-23-014"),
    )


def _near(wanted: str) -> list[Grid]:
    if not wanted:
        return []
    table = grids()
    begin = [grid for grid in table if _plain(grid.code).startswith(wanted) or _plain(grid.name).startswith(wanted)]
    inside = [grid for grid in table if wanted in _plain(grid.code) or wanted in _plain(grid.name)]
    words = {_plain(word): grid for grid in reversed(table) for word in (grid.code, grid.name)}
    alike = [words[word] for word in difflib.get_close_matches(wanted, list(words), n=_NEAR, cutoff=0.7)]
    return list(dict.fromkeys([*begin, *inside, *alike]))[:_NEAR]


def _plain(text: str) -> str:
    return re.sub(r"[\W_]", "", text.casefold())
