"""What a diagnosis says of energy, where the run measured it: sentences, and for a page a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import polars as pl

from stepscope.cost.energy_parts import TraceEnergy, joules
from stepscope.report.energy_format import energy, power, shares
from stepscope.report.energy_sentences import WORDS, grouped
from stepscope.report.energy_text import part_table
from stepscope.report.format import printable
from stepscope.report.html_picture import View
from stepscope.report.html_table import table_view

_One = TypeVar("_One")


def section_sentences(found: TraceEnergy | None) -> Iterator[str]:
    """What was measured, what idle gaps used of it, and what could not be measured; nothing for a run without it."""
    if found is None:
        return
    for device in found.devices:
        if device.basis == "measured" and device.nanojoules is not None:
            amount = joules(device.nanojoules)
            watts = amount[0] / max(device.step_ns, 1) * 1e9
            idle = device.idle_share
            gaps = f", {shares(idle)} of it in idle gaps" if idle is not None else ""
            uses = f"uses {energy(amount)} a step ({power((watts, watts))}){gaps}"
            yield f"Device {printable(device.device)} {uses}; measured outside of the profiler."
    for host in found.hosts:
        if host.basis == "measured":
            amount = joules((host.nanojoules, host.nanojoules))
            watts = amount[0] / max(host.step_ns, 1) * 1e9
            what = f"{WORDS[host.kind].capitalize()} {printable(host.device)}"
            yield f"{what} uses {energy(amount)} a step ({power((watts, watts))}), other programs included."
    for lacks, reason in grouped(found.missing):
        yield f"Not measured: {lacks}: {reason}."
    yield "stepscope energy tells where it goes, what it emits and what the findings would save."


def energy_view(found: TraceEnergy | None) -> View | None:
    """For the page: the sentences, and the parts of each measured device in a table."""
    if found is None:
        return None
    tables = [
        (f"Where the energy of device {printable(device.device)} goes", part_table(device.parts, device.nanojoules))
        for device in found.devices
        if device.basis == "measured" and device.nanojoules is not None
    ]
    return {
        "sentences": list(section_sentences(found)),
        "tables": [{"title": title, **table_view(_without_empty(frame))} for title, frame in tables],
    }


def each_or_none(given: Sequence[_One | None], count: int) -> Sequence[_One | None]:
    """One for each of so many diagnoses; nothing given means None for each.

    Raises:
        ValueError: there is another number of them.
    """
    if given and len(given) != count:
        raise ValueError(f"{count} diagnoses, and {len(given)} energies")
    return given or [None] * count


def _without_empty(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.drop("meaning") if (frame["meaning"] == "").all() else frame
