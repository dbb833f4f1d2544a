"""How well devices and host were used, as a few labelled figures: the same for text, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stepscope.analysis.engines import ENGINES, EngineUse
from stepscope.analysis.summary import DeviceUse, HostUse
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.report.format import duration, printable, share


@dataclass(frozen=True, slots=True)
class Glance:
    """One device or the host: a heading and rows of label, value and what it means."""

    heading: str
    rows: tuple[tuple[str, str, str], ...]


def glances(diagnosis: Diagnosis, devices: Sequence[str] | None = None) -> tuple[Glance, ...]:
    """Every device's summary and then the host's; none without a device, where the host's causes say as much.

    Args:
        devices: only these.
    """
    if not diagnosis.device_uses:
        return ()
    engines = {use.device: use for use in diagnosis.engine_uses if devices is None or use.device in devices}
    found = tuple(
        Glance(
            f"Device {printable(use.device)} at a glance", tuple(_device_rows(use, has_engines=use.device in engines))
        )
        for use in diagnosis.device_uses
        if devices is None or use.device in devices
    )
    found += tuple(
        Glance(f"Engines of device {printable(use.device)}", tuple(_engine_rows(use))) for use in engines.values()
    )
    if diagnosis.host_use is None or not diagnosis.host_use.window_ns:
        return found
    return (*found, Glance("The host at a glance", _host_rows(diagnosis.host_use)))


def _device_rows(use: DeviceUse, *, has_engines: bool) -> list[tuple[str, str, str]]:
    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    rows = [
        (
            "device ratio",
            share(use.device_ratio),
            f"the device worked {duration(use.busy_ns)} of {duration(use.window_ns)}",
        )
    ]
    if use.device_host_ratio is not None:
        what = f"the device's work over the host's ({duration(use.host_ns)}); below 1 the host has more to do"
        rows.append(("device to host", f"{use.device_host_ratio:.2f}", what))
    if use.host_overlap is not None:
        what = f"host and device worked at once for {duration(use.both_ns)}; 100 % if neither waits for the other"
        rows.append(("host overlap", share(use.host_overlap), what))
    if not has_engines:
        rows += _kind_rows(use)
    if use.low_precision_ratio is not None:
        rows.append(("low precision", share(use.low_precision_ratio), "of the matrix work runs in 16 or 8 bits"))
    return rows


def _kind_rows(use: DeviceUse) -> list[tuple[str, str, str]]:
    """What kinds of work the device's time went to."""

    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    rows = []
    together = f", {duration(use.both_engines_ns)} of it together with vector work" if use.both_engines_ns else ""
    rows.append(("matrix work", part(use.matrix_ns), f"matrix products, convolutions and attention{together}"))
    rows.append(("vector work", part(use.vector_only_ns), "all other computation, where no matrix work ran"))
    if use.communication_only_ns:
        rows.append(("communication", part(use.communication_only_ns), "between devices, where no computation ran"))
    rows.append(("copies", part(use.copy_only_ns), "of memory (DMA), where nothing else ran"))
    if use.other_ns:
        rows.append(("other work", part(use.other_ns), "setting memory, where nothing else ran"))
    rows.append(("idle", part(use.idle_ns), "no work at all"))
    return rows


def _engine_rows(use: EngineUse) -> list[tuple[str, str, str]]:
    """Shares of the window that add up to all of it: each moment is the first engine's that works in it."""

    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    rows = []
    for place, time in enumerate(use.engines):
        what = f"{duration(time.exposed_ns)}, {ENGINES[time.engine]}"
        if time.engine == "MME" and use.computing_together_ns:
            what += f"; {duration(use.computing_together_ns)} of it together with TPC"
        elif place and time.exposed_ns < time.busy_ns:
            what += f"; {duration(time.busy_ns - time.exposed_ns)} more behind other engines"
        rows.append((time.engine if not place else f"exposed {time.engine}", part(time.exposed_ns), what))
    rows.append(("idle", part(use.idle_ns), f"{duration(use.idle_ns)}, no engine at work"))
    return rows


def _host_rows(use: HostUse) -> tuple[tuple[str, str, str], ...]:
    def part(ns: int) -> str:
        return share(ns / max(use.window_ns, 1))

    return (
        ("building work", part(use.graph_build_ns), "operators, launches, the optimizer and Python"),
        ("loader", part(use.loader_ns), "waiting for data or loading it"),
        ("input copy", part(use.input_copy_ns), "copying data to the device"),
        ("compiling", part(use.compile_ns), "building graphs and kernels"),
        ("waiting", part(use.waiting_ns), "for the device"),
    )
