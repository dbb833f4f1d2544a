"""Report what training would take and cost on every machine with a known price."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

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
from stepscope.report.html.page import View
from stepscope.report.words.plan import (
    asked_sentence,
    asked_time,
    basis_sentences,
    cost_band,
    devices_words,
    doubt_sentences,
    head_sentence,
    hours_band,
    left_out_sentences,
    machine_name,
    money,
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


_ROOM: Final = 0.06
"""Share of the plot's width and height left free beyond the outermost points."""
_NAME_WIDTH: Final = 20.0
_NAME_HEIGHT: Final = 5.0
"""Percent of the plot's height that a name takes."""
_STEPS: Final = (1, 2, 5)
_MANY: Final = 150
"""Beyond this many points, all are drawn smaller."""
_MOST_TICKS: Final = 9


class _Scale:
    """A logarithmic axis from below the least value to above the largest."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = math.log10(min(values)), math.log10(max(values))
        room = max((high - low) * _ROOM, 0.1)
        self.low, self.high = low - room, high + room

    def at(self, value: float) -> float:
        """Percent of the way from the axis's beginning to its end."""
        return min(max(100 * (math.log10(value) - self.low) / (self.high - self.low), 0.0), 100.0)

    def ticks(self, marks: Sequence[tuple[float, str]]) -> list[View]:
        """The marks within the axis, at most _MOST_TICKS of them."""
        inside = [mark for mark in marks if self.low <= math.log10(mark[0]) <= self.high]
        each = -(-len(inside) // _MOST_TICKS)
        return [{"at": self.at(value), "text": text} for value, text in inside[:: max(each, 1)]]


def _time_marks() -> list[tuple[float, str]]:
    marks = [(step * 10.0**power / 3600, f"{step * 10.0**power:g} s") for power in range(-6, 2) for step in _STEPS]
    marks += [(minutes / 60, f"{minutes} min") for minutes in (1, 2, 5, 10, 20, 30)]
    marks += [(float(hours), f"{hours} h") for hours in (1, 2, 5, 10)]
    days = [step * 10**power for power in range(13) for step in _STEPS]
    return [*marks, *((24.0 * each, "1 day" if each == 1 else f"{each:,} days") for each in days)]


def _money_marks() -> list[tuple[float, str]]:
    return [(step * 10.0**power, money(step * 10.0**power)) for power in range(-9, 16) for step in _STEPS]


def plan_view(plan: Plan) -> View:
    """Plot every machine by time and cost."""
    request = plan.request
    hours = [each.hours for each in plan.machines] + [request.deadline_h] * (request.deadline_h is not None)
    costs = [each.usd for each in plan.machines] + [request.budget_usd] * (request.budget_usd is not None)
    across, up = _Scale([value for value in hours if value]), _Scale([value for value in costs if value])
    front = sorted(plan.front, key=lambda each: each.hours)
    corners = list(_staircase([(across.at(each.hours), 100 - up.at(each.usd)) for each in front]))
    return {
        "many": len(plan.machines) > _MANY,
        "across": across.ticks(_time_marks()),
        "up": up.ticks(_money_marks()),
        "front": " ".join(f"{x:.3f},{y:.3f}" for x, y in corners),
        "dots": _named(
            [_dot(each, plan, across, up) for each in sorted(plan.machines, key=lambda each: each.on_front)]
        ),
        "deadline": None
        if request.deadline_h is None
        else {"at": across.at(request.deadline_h), "text": f"deadline {asked_time(request.deadline_h)}"},
        "budget": None
        if request.budget_usd is None
        else {"at": up.at(request.budget_usd), "text": f"budget {money(request.budget_usd)}"},
    }


def _named(dots: list[View]) -> list[View]:
    """Drop the names of dots off the Pareto front and of those without room for one; modifies `dots`."""
    placed: list[tuple[float, float]] = []
    for dot in reversed(dots):
        place = (dot["left"], dot["bottom"])
        crowded = any(abs(place[0] - x) < _NAME_WIDTH and abs(place[1] - y) < _NAME_HEIGHT for x, y in placed)
        if not dot["front"] or crowded:
            dot["name"] = ""
            continue
        placed.append(place)
    return dots


def _staircase(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The Pareto front as a staircase: from each point to the next, first across and then down."""
    for number, (x, y) in enumerate(points):
        if number:
            yield x, points[number - 1][1]
        yield x, y


def _dot(machine: Machine, plan: Plan, across: _Scale, up: _Scale) -> View:
    left, right = across.at(machine.hours_low), across.at(machine.hours_high)
    low, high = up.at(machine.usd_low), up.at(machine.usd_high)
    lines = [
        machine_name(machine),
        hours_band(machine),
        cost_band(machine),
        f"{price_words(machine, plan)} since it was seen",
    ]
    lines += [f"limit: {machine.limit}"] if machine.limit else []
    return {
        "left": across.at(machine.hours),
        "bottom": up.at(machine.usd),
        "reach_left": left,
        "reach_width": right - left,
        "reach_bottom": low,
        "reach_height": high - low,
        "front": machine.on_front,
        "meets": plan.meets(machine),
        "name": f"{machine.price.provider} {devices_words(machine)}",
        "about": "\n".join(lines),
    }
