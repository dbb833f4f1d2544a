"""Where a training could run, how long it would take and what it would cost, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from stepscope.cost.machines import Machine, Plan
from stepscope.report.format import duration, printable, share
from stepscope.report.plan_words import (
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
from stepscope.report.tables import showing, table_lines
from stepscope.report.wrapping import filled


def plan_text(plan: Plan, *, width: int, top: int) -> str:
    """The whole plan as text; `top` machines of the long table, 0 for all."""
    parts: list[str] = []
    for sentence in (head_sentence(plan), *warning_sentences(plan), asked_sentence(plan)):
        parts += filled(sentence, width)
    for sentence in doubt_sentences(plan):
        parts += filled(sentence, width)
    parts.append("")
    for sentence in recommendation(plan):
        parts += filled(sentence, width)
    parts.append("")
    if plan.machines:
        parts += _tables(plan, width, top)
    for sentence in (samples_sentence(plan), *price_sentences(plan)):
        parts += filled(sentence, width)
    for sentence in (*left_out_sentences(plan), *basis_sentences(plan)):
        parts += filled(sentence, width)
    return "\n".join(parts).rstrip("\n") + "\n"


def plan_table(plan: Plan, machines: Sequence[Machine]) -> pl.DataFrame:
    """A row a machine: what it is, how long the work takes, what it costs, its price with its age, and what limits it.

    Columns of text, since the cells carry their bands.
    """
    columns = {
        "machine": [
            f"{devices_words(each)}, {printable(each.price.provider)} {printable(each.price.instance)}"
            for each in machines
        ],
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


def _tables(plan: Plan, width: int, top: int) -> Iterator[str]:
    front = plan.front
    yield f"Nothing is both cheaper and faster than {'this' if len(front) == 1 else 'these'}"
    yield from _table(plan, front, width)
    others = [machine for machine in plan.machines if not machine.on_front]
    shown = others[:top] if top else others
    if shown:
        yield ""
        yield "The others, the cheapest first"
        yield from _table(plan, shown, width)
        cut = showing(len(shown), len(others), "machines")
        if cut:
            yield f"  {cut}"
    yield ""


def _table(plan: Plan, machines: Sequence[Machine], width: int) -> Iterator[str]:
    yield from (f"  {line}" for line in table_lines(plan_table(plan, machines), width=width - 2, whole="--html"))
