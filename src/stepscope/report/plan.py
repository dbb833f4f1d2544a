"""Report what training would take and cost on every machine with a known price."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import polars as pl

from stepscope.predict.cost.plan import Machine, Plan, Refused
from stepscope.predict.cost.prices import OLD_DAYS
from stepscope.report.document import (
    Block,
    Document,
    Drawing,
    Items,
    Section,
    Table,
    fields,
    section_if,
    sentences,
    stamped,
    texts,
)
from stepscope.report.format import count, dollars, duration, file_name, share, size, warning_sentence
from stepscope.report.html import TemplateVariables
from stepscope.report.predict import missing_section


def plan_document(plan: Plan) -> Document:
    """Report the recommendation, the plot of time against cost, and a table of the machines."""
    asked = asked_sentence(plan), samples_sentence(plan)
    head = texts(head_sentence(plan), *warning_sentences(plan), *filter(None, asked), style="muted")
    advice = Section("", texts(*doubt_sentences(plan), *recommendation(plan)), style="advice", is_quiet=True)
    basis = (*price_sentences(plan), *left_out_sentences(plan), *basis_sentences(plan))
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
        *missing_section(plan.recorded.unreadable),
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
    """One row per machine: name, training time, cost, price and its date, and what limits it.

    Columns are text, since the cells carry their bands.
    """
    columns = {
        "machine": [f"{devices_words(each)}, {each.price.provider} {each.price.instance}" for each in machines],
        "time": [hours_band(each) for each in machines],
        "cost": [cost_band(each) for each in machines],
        "price/h, its date": [price_words(each, plan) for each in machines],
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
        "price seen on": [each.price.as_of.isoformat() for each in machines],
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
        sentences=sentences(plan_document(plan)),
        machines=[_machine(each, plan) for each in plan.machines],
        left_out=plan.refused,
        **fields(plan, "without_price", "notes"),
        unreadable=recorded.unreadable,
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
        **fields(prediction, "fits", "knowledge"),
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

    def ticks(self, marks: Sequence[tuple[float, str]]) -> list[TemplateVariables]:
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


def plan_view(plan: Plan) -> TemplateVariables:
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


def _named(dots: list[TemplateVariables]) -> list[TemplateVariables]:
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


def _dot(machine: Machine, plan: Plan, across: _Scale, up: _Scale) -> TemplateVariables:
    left, right = across.at(machine.hours_low), across.at(machine.hours_high)
    low, high = up.at(machine.usd_low), up.at(machine.usd_high)
    lines = [
        machine_name(machine),
        hours_band(machine),
        cost_band(machine),
        price_words(machine, plan),
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


_EXACT: Final = 0.005
"""A band narrower than this share of its middle is not shown."""
_FASTER: Final = 1.15
"""Least speed ratio at which a machine is called faster."""
_TWICE: Final = 2.0
_DAYS_FROM_HOURS: Final = 100.0
_MOST_NAMES: Final = 12


def machine_name(machine: Machine) -> str:
    """Name a machine, such as "8 x H100-SXM at aws (p5.48xlarge)"."""
    price = machine.price
    return f"{devices_words(machine)} at {price.provider} ({price.instance})"


def devices_words(machine: Machine) -> str:
    """Name a machine's devices, such as "8 x H100-SXM"."""
    return f"{count(machine.price.count)} x {machine.prediction.device.name}"


def hours_words(hours: float, *, like: float | None = None) -> str:
    """Format a time as "42 min", "12.3 h" or "5.1 days", in the unit that suits `like` (by default the time itself)."""
    unit = hours if like is None else like
    if unit < 1 / 60:
        return f"{hours * 3600:.2g} s"
    if unit < 1:
        return f"{hours * 60:.0f} min"
    if unit < _DAYS_FROM_HOURS:
        return f"{hours:.1f} h"
    days = hours / 24
    return f"{days:,.1f} days" if days < 1000 else f"{days:,.0f} days"


def money(usd: float) -> str:
    """Format a cost like `dollars`, from a hundred on without cents."""
    return f"${usd:,.0f}" if usd >= 99.995 else dollars(usd)


def hours_band(machine: Machine) -> str:
    """The time with its band, such as "12.3 h (10.1 to 15.0 h)"."""
    return _with_band(
        machine.hours, machine.hours_low, machine.hours_high, lambda hours: hours_words(hours, like=machine.hours_high)
    )


def cost_band(machine: Machine) -> str:
    """The cost with its band, such as "$45.30 ($38.20 to $52.10)"."""
    return _with_band(machine.usd, machine.usd_low, machine.usd_high, money)


def range_words(values: tuple[float, float] | None, unit: str) -> str:
    """An estimate's bounds, such as "1.2 to 3.4 kWh"; empty for None."""
    if values is None:
        return ""
    low, high = (_number(value) for value in values)
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def price_words(machine: Machine, plan: Plan) -> str:
    """The hourly price and the day it was seen, such as "$0.18, 2026-11-16" or "$4.21, 2025-03-06: check it"."""
    date = machine.price.as_of.isoformat()
    return f"{dollars(machine.usd_h)}, {date}{': check it' if machine.price.is_old(plan.today) else ''}"


def seen_words(machine: Machine, plan: Plan) -> str:
    """Say when a machine's price was seen: "by a price of 2026-11-16 (13 days old)"."""
    days = machine.price.age_days(plan.today)
    age = "today's" if days <= 0 else "1 day old" if days == 1 else f"{count(days)} days old"
    return f"by a price of {machine.price.as_of.isoformat()} ({age})"


def asked_time(hours: float) -> str:
    """Format a deadline as the user gave it, such as "48 h" or "90 min"."""
    return f"{hours:g} h" if hours >= 2 or hours == int(hours) else f"{hours * 60:g} min"


def asked_sentence(plan: Plan) -> str:
    """Say what is to be trained, and what an iteration is."""
    times_of = f"{count(plan.request.iterations)} iterations"
    stepped = plan.recorded.stepped
    whole = (
        f"{times_of} of {'the recorded step' if stepped else 'the whole recording, since nothing marks steps in it'}"
    )
    if plan.recorded_devices > 1:
        whole += f" on {count(plan.recorded_devices)} devices"
    samples = ""
    if plan.recorded_samples is not None:
        total = plan.request.iterations * plan.recorded_devices * plan.recorded_samples
        each_device = "1 sample" if plan.recorded_samples == 1 else f"{count(plan.recorded_samples)} samples"
        samples = f" ({each_device} a device, {count(total)} in all)"
    if plan.batch_factor != 1 and plan.batch is not None:
        samples += f", now with {count(plan.batch)} samples a device and step"
    limits = []
    if plan.request.deadline_h is not None:
        limits.append(f"within {asked_time(plan.request.deadline_h)}")
    if plan.request.budget_usd is not None:
        limits.append(f"for at most {money(plan.request.budget_usd)}")
    wanted = f", {' and '.join(limits)}" if limits else ""
    return f"{whole}{samples}{wanted}, at {'spot' if plan.request.spot else 'on-demand'} prices."


def samples_sentence(plan: Plan) -> str:
    """Say what running on several devices means for the samples."""
    if all(machine.price.count == plan.recorded_devices for machine in plan.machines):
        return ""
    if not any(machine.scaled is not None for machine in plan.machines):
        return (
            "Several devices share no step: each does whole ones, with a batch as large as the recorded one, and holds "
            "the whole model. So there are fewer steps for each, and none is shorter (stepscope serving predicts "
            "layers that devices share)."
        )
    return (
        "Several devices share a step by data parallelism: each works on a batch as large as the recorded one, and "
        "gradients are exchanged. The same number of samples takes fewer, longer steps. What so much larger a global "
        "batch does to the training is not counted."
    )


def recommendation(plan: Plan) -> list[str]:
    """Recommend a machine first, then what costs more for less time, and what limits them."""
    if not plan.machines:
        return ["No machine has both a known price and a prediction: see below what was left out."]
    fitting = [machine for machine in plan.machines if plan.meets(machine)]
    sentences = _best(plan, fitting) if fitting else list(_nearest(plan))
    return [*sentences, *_host_sentence(plan), *_energy_sentence(fitting or list(plan.machines))]


def _best(plan: Plan, fitting: list[Machine]) -> list[str]:
    best = fitting[0]  # the cheapest first
    limits = _limits(plan)
    cheapest = f"The cheapest{f' {limits}' if limits else ''} is {machine_name(best)}"
    sentences = [f"{cheapest}: {hours_band(best)} for {cost_band(best)}, {seen_words(best, plan)}."]
    sentences += _risk(plan, best)
    faster = [machine for machine in fitting if machine.on_front and best.hours / machine.hours >= _FASTER]
    for machine in faster[:1]:
        sentences.append(_faster(machine, best, plan))
    if len(faster) > 1 and faster[0].hours / faster[-1].hours >= _FASTER:
        sentences.append(_faster(faster[-1], best, plan))
    return sentences


def _faster(machine: Machine, best: Machine, plan: Plan) -> str:
    more = machine.usd / best.usd - 1
    price = (
        "for the same money"
        if more < 0.001
        else f"for {more:.0%} more"
        if more < 1
        else f"for {times(more + 1)} the money"
    )
    return (
        f"{times(best.hours / machine.hours)} as fast {price}: {machine_name(machine)}, "
        f"{hours_words(machine.hours)} for {money(machine.usd)}, {seen_words(machine, plan)}."
    )


def times(ratio: float) -> str:
    """Format a ratio as "2.1 times"."""
    return f"{ratio:.1f} times" if ratio < 100 else f"{ratio:,.0f} times"


def _limits(plan: Plan) -> str:
    deadline, budget = plan.request.deadline_h, plan.request.budget_usd
    words = [f"within {asked_time(deadline)}"] if deadline is not None else []
    words += [f"for at most {money(budget)}"] if budget is not None else []
    return " and ".join(words)


def _risk(plan: Plan, machine: Machine) -> Iterator[str]:
    deadline, budget = plan.request.deadline_h, plan.request.budget_usd
    if deadline is not None and machine.hours_high > deadline:
        yield f"Not certain: its time may reach {hours_words(machine.hours_high)}, past the deadline."
    if budget is not None and machine.usd_high > budget:
        yield f"Not certain: its cost may reach {money(machine.usd_high)}, over the budget."


def _nearest(plan: Plan) -> Iterator[str]:
    """No machine meets both limits: say which comes nearest to either."""
    deadline, budget = plan.request.deadline_h, plan.request.budget_usd
    yield f"No machine does it {_limits(plan)}."
    affordable = [each for each in plan.machines if budget is None or each.usd <= budget]
    timely = [each for each in plan.machines if deadline is None or each.hours <= deadline]
    if deadline is not None:
        fastest = min(affordable or plan.machines, key=lambda each: (each.hours, each.usd))
        lead = "The fastest within the budget is" if affordable and budget is not None else "The fastest is"
        ratio = fastest.hours / deadline
        over = f"{share(ratio - 1)} too long" if ratio < _TWICE else f"{times(ratio)} as long as asked for"
        took = f"{hours_band(fastest)} for {money(fastest.usd)}, {seen_words(fastest, plan)}"
        yield f"{lead} {machine_name(fastest)}: {took}; {over}."
    if budget is not None:
        cheapest = min(timely or plan.machines, key=lambda each: (each.usd, each.hours))
        lead = "The cheapest within the deadline is" if timely and deadline is not None else "The cheapest is"
        ratio = cheapest.usd / budget
        over = f"{share(ratio - 1)} over the budget" if ratio < _TWICE else f"{times(ratio)} the budget"
        took = f"{hours_words(cheapest.hours)} for {cost_band(cheapest)}, {seen_words(cheapest, plan)}"
        yield f"{lead} {machine_name(cheapest)}: {took}; {over}."


def _host_sentence(plan: Plan) -> Iterator[str]:
    limited = list(
        dict.fromkeys(machine.prediction.device.name for machine in plan.machines if machine.is_limited_by_host)
    )
    if not limited:
        return
    causes = {machine.limit for machine in plan.machines if machine.is_limited_by_host}
    what = "waiting for batches" if causes == {"input"} else "the host"
    alone = len({machine.prediction.device.name for machine in plan.machines}) == len(limited)
    where = "all of these devices" if alone and len(limited) > 1 else _names(limited)
    yield (
        f"On {where} {what} limits the step: a faster device does not pay off. stepscope diagnose shows what to "
        "change first."
    )
    if any(machine.is_limited_by_host and machine.price.count > 1 for machine in plan.machines):
        yield "It is assumed that a machine's processors do the host's part for several devices as fast as for one."


def _energy_sentence(machines: list[Machine]) -> Iterator[str]:
    known = [machine for machine in machines if machine.kwh is not None]
    if len(known) < 2:
        return
    least = min(known, key=lambda each: (each.kwh or (0.0, 0.0))[::-1])
    bounds = least.kwh or (0.0, 0.0)
    words = f"at most {range_words((bounds[1], bounds[1]), 'kWh')}" if not bounds[0] else range_words(bounds, "kWh")
    yield f"The least energy (an estimate, for the accelerators alone): {machine_name(least)}, {words}."


def price_sentences(plan: Plan) -> Iterator[str]:
    """Caveats about the prices."""
    old = [machine for machine in plan.machines if machine.price.is_old(plan.today)]
    if old:
        these = (
            f"{count(len(old))} of {count(len(plan.machines))} prices are" if len(plan.machines) > 1 else "The price is"
        )
        yield (
            f"{these} more than {OLD_DAYS} days old, marked as old: look them up before relying on them, or import "
            "newer ones (stepscope prices import)."
        )
    if plan.request.spot:
        yield (
            "Spot machines can be taken back at any time, and their prices change daily. Interruptions, and work that "
            "is done again after one, are not counted."
        )
    yield "Prices are without taxes, disks and traffic."


def left_out_sentences(plan: Plan) -> Iterator[str]:
    """Which machines have no plan, by reason, and which devices have no price."""
    reasons: dict[str, list[Refused]] = {}
    for each in plan.refused:
        reasons.setdefault(each.reason, []).append(each)
    for reason, refused in reasons.items():
        number = sum(each.machines for each in refused)
        machines = "1 machine" if number == 1 else f"{count(number)} machines"
        whats = [each.what for each in refused if each.what]
        yield f"Left out: {machines}{f' ({_names(whats)})' if whats else ''}: {reason}."
    if plan.without_price:
        yield f"No price is known for {_names(list(plan.without_price))}."


def basis_sentences(plan: Plan) -> Iterator[str]:
    """Say what the predictions rest on."""
    recorded = plan.recorded
    if recorded.memory.bytes is not None:
        least = "at least " if recorded.memory.at_least else ""
        yield f"The step needs {least}{size(recorded.memory.bytes)} of a device's memory."
    elif recorded.memory.note:
        yield f"What fits is unknown: {recorded.memory.note}."
    for note in plan.notes:
        yield f"{(note[:1].upper() + note[1:])}."


def doubt_sentences(plan: Plan) -> Iterator[str]:
    """Say why the plan is less certain than it reads; printed above the recommendation."""
    why = plan.recorded.why_not
    if why is not None:
        yield f"Not certain: {why}, so the steps are not replayed and the bands are wide."


def warning_sentences(plan: Plan) -> Iterator[str]:
    yield from (f"While reading: {warning_sentence(warning)}." for warning in plan.recorded.warnings)


def head_sentence(plan: Plan) -> str:
    """Name the trace, and say how long a step took on the recorded device."""
    recorded = plan.recorded
    on = f" on {recorded.device}" if recorded.device else " on the CPU" if recorded.from_shapes else ""
    what = "a step takes" if recorded.stepped else "the recording takes"
    return f"{file_name(recorded.path)}: {what} {duration(recorded.measured_ns)}{on}."


def _with_band(middle: float, low: float, high: float, write: Callable[[float], str]) -> str:
    text, first, last = write(middle), write(low), write(high)
    if high - low < _EXACT * middle or first == last:
        return text
    number, space, unit = first.partition(" ")
    return f"{text} ({number if space and last.endswith(f' {unit}') else first} to {last})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _names(names: list[str]) -> str:
    shown = names[:_MOST_NAMES]
    rest = len(names) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {'1 other' if rest == 1 else f'{count(rest)} others'}"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
