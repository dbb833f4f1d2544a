"""A step's energy for programs: schema 1, to which keys may be added. docs/energy.md describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from stepscope import __version__
from stepscope.predict.cost.carbon import grid_source
from stepscope.predict.cost.energy_parts import (
    J_PER_NJ,
    DeviceEnergy,
    EnergyAnswer,
    EnergyPart,
    HostEnergy,
    Pair,
    TraceEnergy,
    alike,
)

SCHEMA: Final = 1


def energy_json(answer: EnergyAnswer) -> dict[str, Any]:
    """Everything in an answer as plain values: joules, nanoseconds, watts, kilograms, shares from 0 to 1."""
    total = answer.step_nanojoules
    run = None if total is None else answer.of_run(total)
    kilograms = None if run is None else answer.kilograms(run)
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "traces": [trace_json(trace) for trace in answer.traces],
        "total": {
            "joules": None if total is None else _pair(total),
            "is_estimate": answer.is_estimate,
            "unknown_devices": [each.device for each in answer.unknown_devices],
        },
        "run": {
            "iterations": answer.steps,
            "asked": answer.iterations is not None,
            "pue": answer.pue,
            "joules": run,
            "kwh": None if run is None else [each / 3.6e6 for each in run],
            "kilograms": kilograms,
            "equivalences": []
            if kilograms is None
            else [
                {"value": [low.value, high.value], "unit": low.unit, "source": low.source}
                for low, high in alike(kilograms)
            ],
        },
        "carbon": None if answer.grid is None else {**dataclasses.asdict(answer.grid), "source": grid_source()},
    }


def trace_json(trace: TraceEnergy) -> dict[str, Any]:
    """The energy of one trace."""
    return {
        "path": trace.path,
        "format": trace.format,
        "rank": trace.rank,
        "step_ns": trace.step_ns,
        "step_count": trace.step_count,
        "stepped": trace.stepped,
        "devices": [_device(each) for each in trace.devices],
        "hosts": [_host(each) for each in trace.hosts],
        "missing": [dataclasses.asdict(each) for each in trace.missing],
        "findings": [
            {
                "rule": each.rule,
                "title": each.title,
                "saving_ns": each.saving_ns,
                "busy_ns": list(each.busy_ns),
                "joules": _pair(each.nanojoules),
            }
            for each in trace.findings
        ],
        "warnings": [dataclasses.asdict(each) for each in trace.warnings],
    }


def _device(device: DeviceEnergy) -> dict[str, Any]:
    powers = device.powers or ()
    return {
        "device": device.device,
        "name": device.name,
        "basis": device.basis,
        "how": device.how,
        "step_ns": device.step_ns,
        "joules": None if device.nanojoules is None else _pair(device.nanojoules),
        "idle_watts": [each.idle_w for each in powers] or None,
        "busy_watts": [each.busy_w for each in powers] or None,
        "idle_share": device.idle_share,
        "parts": _parts(device.parts),
        "operators": _parts(device.operators),
        "window_joules": list(device.window_joules),
    }


def _host(host: HostEnergy) -> dict[str, Any]:
    return {
        "kind": host.kind,
        "device": host.device,
        "basis": host.basis,
        "how": host.how,
        "step_ns": host.step_ns,
        "joules": host.nanojoules * J_PER_NJ,
        "parts": _parts(host.parts),
        "window_joules": list(host.window_joules),
    }


def _parts(parts: Sequence[EnergyPart]) -> list[dict[str, Any]]:
    return [{"kind": each.kind, "name": each.name, "ns": each.ns, "joules": _pair(each.nanojoules)} for each in parts]


def _pair(nanojoules: Pair) -> list[float]:
    return [each * J_PER_NJ for each in nanojoules]
