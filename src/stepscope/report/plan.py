"""Report what training would take and cost on every machine with a known price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from stepscope.predict.cost.plan import Machine, Plan
from stepscope.report.document import (
    Block,
    Document,
    Drawing,
    Items,
    Section,
    Table,
    fields,
    section_if,
    stamped,
    texts,
)
from stepscope.report.format import duration, file_name, share
from stepscope.report.html.charts import plan_view
from stepscope.report.words.plan import (
    asked_sentence,
    basis_sentences,
    cost_band,
    devices_words,
    doubt_sentences,
    head_sentence,
    hours_band,
    left_out_sentences,
    price_sentences,
    price_words,
    range_words,
    recommendation,
    samples_sentence,
    warning_sentences,
)


def plan_document(plan: Plan) -> Document:
    """Report the recommendation, the plot of time against cost, and a table of the machines."""
    head = texts(head_sentence(plan), *warning_sentences(plan), asked_sentence(plan), style="muted")
    advice = Section("", texts(*doubt_sentences(plan), *recommendation(plan)), style="advice", is_quiet=True)
    basis = (samples_sentence(plan), *price_sentences(plan), *left_out_sentences(plan), *basis_sentences(plan))
    blocks = (
        Section(
            "What the training would take, and cost",
            (*head, advice),
            id="advice",
            link="What to take",
            style="summary",
            is_quiet=True,
        ),
        *(_machines(plan) if plan.machines else ()),
        Section(
            "What this rests on",
            (Items(tuple(filter(None, basis)), "said muted"),),
            id="basis",
            link="What this rests on",
        ),
    )
    return Document(f"plan for {file_name(plan.recorded.path)}", blocks, "--html")


def _machines(plan: Plan) -> Iterator[Block]:
    drawing = Drawing("plan", plan_view(plan))
    yield Section("Time and cost of each machine", (drawing,), id="chart", link="Time and cost", only="page")
    yield Section("Machines", (Table(plan_frame(plan)),), id="machines", link="Machines", only="page")
    these = "this" if len(plan.front) == 1 else "these"
    front = Table(plan_table(plan, plan.front))
    yield Section(f"Nothing is both cheaper and faster than {these}", (front,), only="off page")
    others = [machine for machine in plan.machines if not machine.on_front]
    tables = (Table(plan_table(plan, others), "machines"),) if others else ()
    yield from section_if("The others, the cheapest first", *tables, only="off page")


def plan_table(plan: Plan, machines: Sequence[Machine]) -> pl.DataFrame:
    """One row per machine: name, training time, cost, price and its age, and what limits it.

    Columns are text, since the cells carry their bands.
    """
    columns = {
        "machine": [f"{devices_words(each)}, {each.price.provider} {each.price.instance}" for each in machines],
        "time": [hours_band(each) for each in machines],
        "cost": [cost_band(each) for each in machines],
        "price/h, its age": [price_words(each, plan) for each in machines],
        "limit": [each.limit or "unknown" for each in machines],
        "step": [duration(each.step_ns) for each in machines],
        "of ideal": ["" if each.scaled is None else share(each.scaled.efficiency) for each in machines],
        "energy (estimate)": [range_words(each.kwh, "kWh") for each in machines],
        "CO2 (estimate)": [range_words(each.kilograms, "kg") for each in machines],
        "region": [each.price.region or "" for each in machines],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return pl.DataFrame(kept, schema=dict.fromkeys(kept, pl.String))


def plan_frame(plan: Plan) -> pl.DataFrame:
    """One row per machine with numeric columns to sort by, the cheapest first."""
    machines = plan.machines
    columns: dict[str, list[object]] = {
        "machine": [f"{each.price.provider} {each.price.instance}" for each in machines],
        "devices": [devices_words(each) for each in machines],
        "hours": [each.hours for each in machines],
        "band of time": [_band(hours_band(each)) for each in machines],
        "cost_usd": [each.usd for each in machines],
        "band of cost": [_band(cost_band(each)) for each in machines],
        "price_usd_h": [each.usd_h for each in machines],
        "days since seen": [each.price.age_days(plan.today) for each in machines],
        "old": [each.price.is_old(plan.today) for each in machines],
        "limit": [each.limit for each in machines],
        "step_ns": [each.step_ns for each in machines],
        "of ideal_share": [None if each.scaled is None else each.scaled.efficiency for each in machines],
        "energy (estimate)": [range_words(each.kwh, "kWh") for each in machines],
        "CO2 (estimate)": [range_words(each.kilograms, "kg") for each in machines],
        "region": [each.price.region for each in machines],
        "source": [each.price.source for each in machines],
    }
    kept = {name: cells for name, cells in columns.items() if any(cell not in (None, "") for cell in cells)}
    return pl.DataFrame(kept, strict=False)


def _band(text: str) -> str:
    return text.partition(" (")[2].removesuffix(")")


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: times in nanoseconds and hours, US dollars, null if unknown."""
    recorded, request = plan.recorded, plan.request
    return stamped(
        trace={
            **fields(recorded, "path", "format", "device", "why_not", "warnings"),
            "step_ns": recorded.measured_ns,
            "steps": recorded.step_count if recorded.stepped else 0,
            "devices": plan.recorded_devices,
            "batch_size": plan.recorded_batch,
            "memory_bytes": recorded.memory.bytes,
        },
        asked={
            **fields(request, "iterations", "spot", "deadline_h", "budget_usd"),
            "gpus": None if request.counts is None else list(request.counts),
            "link": None if request.link is None else request.link.name,
            "precision": recorded.precision,
            "batch_size": plan.batch,
        },
        today=plan.today.isoformat(),
        recommendation=recommendation(plan),
        machines=[_machine(each, plan) for each in plan.machines],
        left_out=plan.refused,
        **fields(plan, "without_price", "notes"),
    )


def _machine(machine: Machine, plan: Plan) -> dict[str, Any]:
    price, prediction, scaled = machine.price, machine.prediction, machine.scaled
    names = ("hours", "hours_low", "hours_high", "usd", "usd_low", "usd_high", "usd_h")
    scaling = ("efficiency", "communication_ns", "exposed_ns", "straggler_ns")
    return {
        **fields(price, "provider", "instance", "region"),
        "device": prediction.device.name,
        "devices": price.count,
        "on_front": machine.on_front,
        "meets": plan.meets(machine),
        **fields(machine, *names, "steps", "step_ns", "step_low_ns", "step_high_ns", "limit"),
        "price_as_of": price.as_of.isoformat(),
        "price_age_days": price.age_days(plan.today),
        "price_is_old": price.is_old(plan.today),
        "price_source": price.source,
        "fits": prediction.fits,
        "scaling": None if scaled is None else fields(scaled, *scaling),
        "estimated_kwh": machine.kwh,
        "estimated_kg_co2": machine.kilograms,
        "notes": [*prediction.notes, *(scaled.notes if scaled is not None else ())],
    }
