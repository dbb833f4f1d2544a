"""A plan for programs: schema 1, to which keys may be added."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from stepscope import __version__
from stepscope.cost.machines import Machine, Plan
from stepscope.report.plan_words import recommendation

SCHEMA: Final = 1


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything in a plan as plain values: times in nanoseconds and hours, US dollars, null for what is not known."""
    recorded, request = plan.recorded, plan.request
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "trace": {
            "path": recorded.path,
            "format": recorded.format,
            "step_ns": recorded.measured_ns,
            "steps": recorded.step_count if recorded.stepped else 0,
            "device": recorded.device,
            "devices": plan.recorded_devices,
            "batch_size": plan.recorded_batch,
            "why_not": recorded.why_not,
            "memory_bytes": recorded.memory.bytes,
            "warnings": [dataclasses.asdict(each) for each in recorded.warnings],
        },
        "asked": {
            "iterations": request.iterations,
            "gpus": None if request.counts is None else list(request.counts),
            "spot": request.spot,
            "deadline_h": request.deadline_h,
            "budget_usd": request.budget_usd,
            "link": None if request.link is None else request.link.name,
            "precision": recorded.precision,
            "batch_size": plan.batch,
        },
        "today": plan.today.isoformat(),
        "recommendation": recommendation(plan),
        "machines": [_machine(each, plan) for each in plan.machines],
        "left_out": [dataclasses.asdict(each) for each in plan.refused],
        "without_price": list(plan.without_price),
        "notes": list(plan.notes),
    }


def _machine(machine: Machine, plan: Plan) -> dict[str, Any]:
    price, prediction, scaled = machine.price, machine.prediction, machine.scaled
    return {
        "provider": price.provider,
        "instance": price.instance,
        "region": price.region,
        "device": prediction.device.name,
        "devices": price.count,
        "on_front": machine.on_front,
        "meets": plan.meets(machine),
        "hours": machine.hours,
        "hours_low": machine.hours_low,
        "hours_high": machine.hours_high,
        "usd": machine.usd,
        "usd_low": machine.usd_low,
        "usd_high": machine.usd_high,
        "usd_h": machine.usd_h,
        "price_as_of": price.as_of.isoformat(),
        "price_age_days": price.age_days(plan.today),
        "price_is_old": price.is_old(plan.today),
        "price_source": price.source,
        "steps": machine.steps,
        "step_ns": machine.step_ns,
        "step_low_ns": machine.step_low_ns,
        "step_high_ns": machine.step_high_ns,
        "limit": machine.limit,
        "fits": prediction.fits,
        "scaling": None
        if scaled is None
        else {
            "efficiency": scaled.efficiency,
            "communication_ns": scaled.communication_ns,
            "exposed_ns": scaled.exposed_ns,
            "straggler_ns": scaled.straggler_ns,
        },
        "estimated_kwh": None if machine.kwh is None else list(machine.kwh),
        "estimated_kg_co2": None if machine.kilograms is None else list(machine.kilograms),
        "notes": [*prediction.notes, *(scaled.notes if scaled is not None else ())],
    }
