"""Where the energy of a step goes: by device, by cause of idle time, by kind of work, and what each finding would save.

A device draws one power while it works and another while it does not, so that an idle nanosecond costs idle power and a
busy one busy power, whatever runs. Measured energy is divided in proportion to these powers, estimated energy follows
from them. docs/energy.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.device_time import device_time
from stepscope.analysis.idle import idle_time
from stepscope.analysis.roofline import device_peaks, roofline_table
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.view import View
from stepscope.predict.cost.energy_parts import (
    J_PER_NJ,
    KINDS,
    NO_OPERATOR,
    DeviceEnergy,
    EnergyPart,
    FindingEnergy,
    HostEnergy,
    Pair,
    PowerRange,
    Powers,
    PowerSettings,
    SampledEnergy,
    TraceEnergy,
    power_range,
    shared,
)
from stepscope.trace import Window
from stepscope.trace.energy_records import Counter, EnergyRecord
from stepscope.trace.telemetry import Telemetry
from stepscope.trace.window import union


def savings_of(
    view: View, findings: Sequence[Finding], powers: Sequence[Powers], host_w: float
) -> Iterator[FindingEnergy]:
    """Energy saved by each finding that saves time.

    Args:
        powers: every possible pair for `view.device`; empty where unknown.
        host_w: power of processors and memory, which a shorter step keeps busy for less time.
    """
    for finding in findings if powers or host_w else ():
        saving = finding.saving_ns_per_step
        if saving > 0:
            busy = _busy_ns(view, finding) if powers else (0, 0)
            saved = [each.idle_w * saving + (each.busy_w - each.idle_w) * work for each in powers for work in busy]
            least, most = (end(saved, default=0.0) + host_w * saving for end in (min, max))
            yield FindingEnergy(finding.rule, finding.title, saving, busy, (round(least), round(most)))


def _busy_ns(view: View, finding: Finding) -> tuple[int, int]:
    """Least and most device work per step that goes away with the cause, nanoseconds."""
    if finding.change is None:
        return 0, finding.saving_ns_per_step
    experiment, works = view.experiment, view.experiment.works
    changed = experiment.run(finding.change(experiment, experiment.graph)).replay
    replays = (experiment.measured, changed)
    before, after = (union(each.work_start[works], each.work_end[works]).total_ns for each in replays)
    less = max(before - after, 0) // experiment.step_count
    return less, less


_METHODS: Final = {"counter": "the device's counter of energy", "power samples": "samples of the device's power"}


def energy_of_trace(
    view: View,
    findings: Sequence[Finding],
    settings: PowerSettings,
    *,
    record: EnergyRecord | None = None,
    sampled: Sequence[SampledEnergy] = (),
) -> TraceEnergy:
    """Energy of a trace's steps: measured by its run, else from samples, else estimated.

    Args:
        findings: findings whose savings are converted to energy.
        record: counters measured in the run of this trace.
        sampled: device energy from the run's telemetry.
    """
    names = view.trace.working_devices
    devices = tuple(_device(view, name, view.window, settings, record, sampled) for name in names)
    hosts = tuple(_hosts(view, settings, record))
    powers = next((one.powers for one in devices if one.device == view.device), None)
    host_w = sum(host.nanojoules / host.step_ns for host in hosts)
    return TraceEnergy(
        path=view.trace.metadata.path,
        format=view.trace.metadata.format,
        rank=view.trace.metadata.rank,
        step_ns=view.step_ns,
        step_count=view.step_count,
        stepped=view.complete_steps.height > 0,
        devices=devices,
        hosts=hosts,
        missing=() if record is None else tuple(dict.fromkeys(record.missing)),
        findings=tuple(savings_of(view, findings, powers or (), host_w)),
        warnings=view.trace.warnings,
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Time of a device in the steps, nanoseconds: idle by cause and busy by kind; together they make up the span."""

    idle: dict[str, int]
    busy: dict[str, int]

    def of_a_step(self, step_ns: int) -> tuple[int, int]:
        idle, busy = sum(self.idle.values()), sum(self.busy.values())
        idle_ns = step_ns * idle // max(idle + busy, 1)
        return idle_ns, step_ns - idle_ns if busy else 0


def _device(
    view: View,
    name: str,
    window: Window,
    settings: PowerSettings,
    record: EnergyRecord | None,
    sampled: Sequence[SampledEnergy],
) -> DeviceEnergy:
    called = next((one.name for one in view.trace.metadata.devices if one.device == name), None)
    time = _times(view, name, window)
    least, memory = _known_work(view, name, window, time)
    power = power_range(
        device_peaks(view.trace, name),
        device_watts=settings.device_watts,
        idle_watts=settings.idle_watts,
        least_activity=least,
        memory_share=memory,
    )
    found = next((one for one in sampled if one.device == name), None)
    energy = _measured(record, _counter_of(record, name, view), name, called)
    if energy is None and found is not None and found.step_joules is not None:
        total = round(found.step_joules / J_PER_NJ)
        energy = DeviceEnergy(name, called, "sampled", found.how, view.step_ns, (total, total))
    if energy is None:
        energy = _to_estimate(name, called, view.step_ns, power, found)
    if energy.nanojoules is None:
        return energy
    if energy.basis == "estimate" and power:
        powers = Powers(power.idle_low_w, power.busy_low_w), Powers(power.idle_high_w, power.busy_high_w)
    else:
        powers = _divided(time, energy, power)
    return _with_parts(view, energy, time, powers)


def _measured(
    record: EnergyRecord | None, counter: Counter | None, name: str, called: str | None
) -> DeviceEnergy | None:
    if record is None or counter is None:
        return None
    step_joules, step_ns = record.step_joules(counter.key), record.step_ns
    if step_joules is None or step_ns is None:
        return None
    total = round(step_joules / J_PER_NJ)
    how = f"{_METHODS[counter.method]}, over {record.steps} steps without the profiler"
    windows = tuple(record.window_joules(counter.key))
    return DeviceEnergy(
        name,
        called or counter.name,
        "measured",
        how,
        round(step_ns),
        (total, total),
        window_joules=windows,
        identity=counter.identity,
    )


def _to_estimate(
    name: str, called: str | None, step_ns: int, power: PowerRange | None, sampled: SampledEnergy | None
) -> DeviceEnergy:
    unsampled = f"; {sampled.how}" if sampled is not None else ""
    if power is not None:
        return DeviceEnergy(name, called, "estimate", f"{power.formula} ({power.source}){unsampled}", step_ns, (0, 0))
    why = f"the power limit of {called} is unknown" if called else "the trace does not say what device it is"
    return DeviceEnergy(name, called, None, f"{why}; --device-watts gives its power limit{unsampled}", step_ns)


def _times(view: View, device: str, window: Window) -> _Times:
    pieces = idle_time(view.trace, window=window, activity=view.activity).filter(pl.col("device") == device)
    sums = pieces.group_by("cause").agg(pl.col("duration_ns").sum())
    sums = sums.sort(["duration_ns", "cause"], descending=[True, False])
    row = device_time(view.trace, window=window).row(by_predicate=pl.col("device") == device, named=True)
    # A copy beside communication, with no computation, is exposed as both: it counts as communication.
    communication = row["exposed_communication_ns"]
    copies = min(row["exposed_copy_ns"], row["busy_ns"] - communication)
    busy = dict(zip(KINDS, (row["busy_ns"] - communication - copies, communication, copies), strict=True))
    return _Times(dict(sums.iter_rows()), {kind: ns for kind, ns in busy.items() if ns})


def _known_work(view: View, device: str, window: Window, time: _Times) -> tuple[float, float]:
    """Least activity of the device over its busy time, and how much of its work memory limits; both 0 to 1.

    Operators that arithmetic limits are active by the share of the peak that they reach; unknown ones count as 0. So do
    those that memory limits: the memory can be busy at a small part of the power. Arithmetic in them adds to that of
    the memory, so that they count less by the share of the peak that it reaches (docs/energy.md).
    """
    busy_ns = sum(time.busy.values())
    if not busy_ns:
        return 0.0, 0.0
    table = roofline_table(view.trace, window=window).filter(pl.col("device") == device, pl.col("share").is_not_null())
    products = table.filter(pl.col("limit") == "compute")
    reached = (products["device_ns"] * products["share"].clip(0, 1)).sum()
    other = table.filter(pl.col("limit") == "memory")
    moving = (other["device_ns"] * (1 - other["compute_share"].fill_null(0).clip(0, 1))).sum()
    return min(float(reached or 0.0) / busy_ns, 1.0), min(float(moving or 0.0) / busy_ns, 1.0)


def _divided(time: _Times, energy: DeviceEnergy, power: PowerRange | None) -> tuple[Powers, Powers]:
    """Split measured energy into powers: idle time at idle power, or at the mean if that is less; the rest is busy."""
    assert energy.nanojoules is not None
    total = energy.nanojoules[0]
    idle_ns, busy_ns = time.of_a_step(energy.step_ns)
    mean_w = total / max(energy.step_ns, 1)
    bounds = (power.idle_low_w, power.idle_high_w) if power is not None else (0.0, mean_w)
    idle = [min(watts, mean_w) if busy_ns else mean_w for watts in bounds]
    least, most = (Powers(watts, (total - watts * idle_ns) / busy_ns if busy_ns else 0.0) for watts in idle)
    return least, most


def _with_parts(view: View, energy: DeviceEnergy, time: _Times, powers: tuple[Powers, Powers]) -> DeviceEnergy:
    """Add idle parts by cause and busy parts by kind: an estimate is their sum, a measured total is divided."""
    idle_ns, busy_ns = time.of_a_step(energy.step_ns)
    idle = round(powers[0].idle_w * idle_ns), round(powers[1].idle_w * idle_ns)
    busy = round(powers[0].busy_w * busy_ns), round(powers[1].busy_w * busy_ns)
    if energy.basis != "estimate" and energy.nanojoules is not None:
        total = energy.nanojoules[0]
        idle = (min(idle[0], total), min(idle[1], total)) if busy_ns else (total, total)
        busy = (total - idle[0], total - idle[1])
    parts = (*_parts("idle", time.idle, idle_ns, idle), *_parts("busy", time.busy, busy_ns, busy))
    operators: tuple[EnergyPart, ...] = ()
    if energy.device == view.device:
        operators = tuple(_parts("operator", _operators(view), busy_ns, busy))
    total_pair = idle[0] + busy[0], idle[1] + busy[1]
    how = energy.how
    if energy.basis != "estimate" and powers[0].idle_w == powers[1].idle_w:
        how += f"; idle time counts {powers[0].idle_w:.4g} W, the rest is the work's"
    elif energy.basis != "estimate":
        how += "; its idle power is unknown (--idle-watts gives it), so the part of idle time has bounds"
    return replace(energy, how=how, nanojoules=total_pair, parts=parts, operators=operators, powers=powers)


def _parts(kind: str, weights: dict[str, int], ns: int, nanojoules: Pair) -> Iterator[EnergyPart]:
    sizes = list(weights.values())
    rows = zip(shared(ns, sizes), shared(nanojoules[0], sizes), shared(nanojoules[1], sizes), strict=True)
    for name, (length, first, second) in zip(weights, rows, strict=True):
        yield EnergyPart(kind, name, length, (first, second))


def _operators(view: View) -> dict[str, int]:
    launching = view.trace.launches.select("operator").with_row_index("launch")
    named = view.trace.operators.select(operator_name="name").with_row_index("operator")
    work = view.work.join(launching, on="launch", how="left").join(named, on="operator", how="left")
    sums = (
        work.group_by(pl.col("operator_name").fill_null(NO_OPERATOR))
        .agg(pl.col("duration_ns").sum())
        .filter(pl.col("duration_ns") > 0)
        .sort(["duration_ns", "operator_name"], descending=[True, False])
    )
    return dict(sums.iter_rows())


def _counter_of(record: EnergyRecord | None, device: str, view: View) -> Counter | None:
    """Counter of the trace's device; a single counter matches a single device whatever their indices."""
    gpus = [counter for counter in record.counters if counter.kind == "gpu"] if record is not None else []
    alone = len(gpus) == 1 and view.trace.device_work["device"].n_unique() == 1
    return next((counter for counter in gpus if counter.device == device or alone), None)


def _hosts(view: View, settings: PowerSettings, record: EnergyRecord | None) -> list[HostEnergy]:
    hosts = [] if record is None else list(_measured_hosts(view, record))
    if settings.cpu_watts is not None and not any(host.kind == "cpu" for host in hosts):
        total = round(settings.cpu_watts * view.step_ns)
        how = f"{settings.cpu_watts:g} W, as given, for the whole step"
        parts = tuple(_host_parts(view, view.step_ns, total))
        hosts.append(HostEnergy("cpu", "all", "given", how, view.step_ns, total, parts, identity="given"))
    return hosts


def _measured_hosts(view: View, record: EnergyRecord) -> Iterator[HostEnergy]:
    how = f"RAPL's counter for the whole machine, over {record.steps} steps without the profiler"
    for counter in record.counters:
        step_joules = record.step_joules(counter.key)
        if counter.kind != "gpu" and record.step_ns is not None and step_joules is not None:
            total, step_ns = round(step_joules / J_PER_NJ), round(record.step_ns)
            parts = tuple(_host_parts(view, step_ns, total)) if counter.kind == "cpu" else ()
            windows = tuple(record.window_joules(counter.key))
            identity = f"{record.machine} {counter.key}" if record.machine else None
            yield HostEnergy(counter.kind, counter.device, "measured", how, step_ns, total, parts, windows, identity)


def _host_parts(view: View, step_ns: int, total: int) -> Iterator[EnergyPart]:
    """Main-thread time by cause at one power, for steps without an accelerator."""
    if view.device is None:
        pieces = view.host_pieces.group_by("cause").agg(pl.col("duration_ns").sum())
        pieces = pieces.filter(pl.col("duration_ns") > 0).sort(["duration_ns", "cause"], descending=[True, False])
        yield from _parts("host", dict(pieces.iter_rows()), step_ns, (total, total))


FEWEST_SAMPLES: Final = 3  # fewest samples in the steps for an estimate
_SERIES: Final = {"energy_j": "its counter of energy, sampled", "power_w": "its power, sampled"}


def sampled_energy(
    telemetry: Telemetry, origin_unix_ns: int | None, window: Window, step_count: int
) -> tuple[SampledEnergy, ...]:
    """Joules per step of every device whose power or energy was sampled, or why the samples do not suffice.

    Args:
        origin_unix_ns: wall-clock time at the trace's time 0, nanoseconds.
        window: from the start of the first step to the end of the last.
    """
    wanted = pl.col("name").is_in(list(_SERIES)) & (pl.col("source") == "device") & pl.col("value").is_finite()
    samples = telemetry.samples.filter(wanted & pl.col("device").is_not_null())
    if origin_unix_ns is None or samples.is_empty():
        return ()
    start, end = origin_unix_ns + window.start_ns, origin_unix_ns + window.end_ns
    return tuple(_devices(samples, start, end, step_count))


def _devices(samples: pl.DataFrame, start: int, end: int, step_count: int) -> Iterator[SampledEnergy]:
    for (device,), rows in samples.sort("unix_ns").group_by("device", maintain_order=True):
        found = [_integrated(rows.filter(pl.col("name") == name), name, start, end) for name in _SERIES]
        told = next((each for each in found if each is not None), None)
        if told is None:
            inside = rows.filter(pl.col("unix_ns").is_between(start, end))["unix_ns"].n_unique()
            seconds = (end - start) / 1e9
            few = f"its power was sampled {inside} times in the {seconds:.3g} s of the steps, which is too few"
            yield SampledEnergy(str(device), None, few)
        else:
            joules, number, name = told
            yield SampledEnergy(str(device), joules / step_count, f"{_SERIES[name]} {number} times during the steps")


def _integrated(rows: pl.DataFrame, name: str, start: int, end: int) -> tuple[float, int, str] | None:
    """Joules between two times, sample count and series; None with too few samples, or none on either side."""
    rows = rows.unique("unix_ns", keep="last", maintain_order=True)
    times, values = rows["unix_ns"].to_numpy(), rows["value"].to_numpy()
    inside = (times >= start) & (times <= end)
    if inside.sum() < FEWEST_SAMPLES or times[0] > start or times[-1] < end:
        return None
    first, last = np.interp([start, end], times, values)
    if name == "energy_j":
        return (float(last - first), int(inside.sum()), name) if last > first else None
    moments, watts = np.r_[start, times[inside], end], np.r_[first, values[inside], last]
    joules = float(np.sum(np.diff(moments) / 1e9 * (watts[1:] + watts[:-1]) / 2))
    return (joules, int(inside.sum()), name) if joules > 0 else None
