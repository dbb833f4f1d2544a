"""What a step's energy is and where it goes, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import polars as pl

from stepscope.analysis.causes import CAUSES
from stepscope.cost.carbon import grid_source
from stepscope.cost.energy_parts import DeviceEnergy, EnergyPart, HostEnergy, TraceEnergy, joules
from stepscope.cost.energy_total import EnergyAnswer, alike, counted_hosts
from stepscope.report.energy_format import electricity, energy, mass, number, power, shares
from stepscope.report.energy_sentences import grouped
from stepscope.report.format import count, duration, printable
from stepscope.report.tables import showing, table_lines
from stepscope.report.wrapping import filled

_BASES: Final = {
    "measured": "measured",
    "sampled": "from samples of its power",
    "estimate": "an estimate",
    "given": "from the power given",
    None: "not known",
}
_WIDE: Final = 100
_WORTH_COMPARING_KG: Final = 0.001
"""Less is hardly a metre by car."""


def energy_text(answer: EnergyAnswer, *, width: int, top: int) -> str:
    """The whole answer as text; `top` rows of each table, 0 for all."""
    lines: list[str] = []
    for trace in answer.traces:
        lines += [*_trace(trace, answer, width, top), ""]
    lines += _together(answer, width)
    return "\n".join(lines).rstrip("\n") + "\n"


def _trace(trace: TraceEnergy, answer: EnergyAnswer, width: int, top: int) -> Iterator[str]:
    yield from filled(f"{_name(trace)}: {length_sentence(trace)}.", width)
    for warning in trace.warnings:
        text = f"While reading: {count(warning.count)} x {printable(warning.kind)}: {printable(warning.detail)}."
        yield from filled(text, width)
    for sentence in device_sentences(trace.devices):
        yield from filled(sentence, width, "  ", "    ")
    for host in trace.hosts:
        yield from filled(host_sentence(host), width, "  ", "    ")
    for sentence in missing_sentences(trace):
        yield from filled(sentence, width, "  ", "    ")
    if not any(host.kind == "cpu" for host in counted_hosts(answer.traces)):
        yield from filled("Processors have no number; --cpu-watts gives their power.", width, "  ", "    ")
    for device in trace.devices:
        yield from _device_tables(device, trace, width, top)
    for host in trace.hosts:
        if host.parts:
            title = f"What the main thread did while the processors used {energy(joules((host.nanojoules,) * 2))}"
            yield from _table(title, part_table(host.parts, (host.nanojoules, host.nanojoules)), "causes", width, top)
    if trace.findings:
        yield from _table(
            "What the findings would save" + (f", in {count(answer.steps)} steps" if answer.steps > 1 else ""),
            _findings(trace, answer),
            "findings",
            width,
            top,
        )


def length_sentence(trace: TraceEnergy) -> str:
    """How long a step takes."""
    if not trace.stepped:
        return f"{duration(trace.step_ns)} recorded, without steps; it counts as one"
    how = "1 step" if trace.step_count == 1 else f"mean of {count(trace.step_count)}"
    return f"a step takes {duration(trace.step_ns)} ({how})"


def device_sentences(devices: Sequence[DeviceEnergy]) -> Iterator[str]:
    """One for each device; those of which nothing is known for the same reason share one."""
    for device in devices:
        if device.nanojoules is not None:
            yield device_sentence(device)
    for why in dict.fromkeys(device.how for device in devices if device.nanojoules is None):
        alike_ones = [device for device in devices if device.nanojoules is None and device.how == why]
        names = ", ".join(printable(device.device) for device in alike_ones)
        called = f" ({printable(alike_ones[0].name)})" if alike_ones[0].name else ""
        yield f"Device{'s' if len(alike_ones) > 1 else ''} {names}{called}: no number, because {printable(why)}."


def device_sentence(device: DeviceEnergy) -> str:
    """Such as "Device 0 (NVIDIA A100): 21.3 to 52.5 J a step, 122 to 300 W: an estimate; ..."."""
    name = f"Device {printable(device.device)}" + (f" ({printable(device.name)})" if device.name else "")
    assert device.nanojoules is not None
    amount = joules(device.nanojoules)
    watts = (amount[0] / max(device.step_ns, 1) * 1e9, amount[1] / max(device.step_ns, 1) * 1e9)
    sentence = f"{name}: {energy(amount)} a step, {power(watts)}: {_BASES[device.basis]}: {printable(device.how)}."
    if device.basis == "measured":
        sentence += f" Such a step takes {duration(device.step_ns)}."
    return sentence


def idle_sentence(device: DeviceEnergy) -> str:
    """How much of the energy went while the device did nothing; empty where that is not known."""
    if device.idle_share is None:
        return ""
    return f"Idle gaps used {shares(device.idle_share)} of the energy of device {printable(device.device)}."


def host_sentence(host: HostEnergy) -> str:
    """Such as "Processor 0: 8.1 J a step, 46.3 W: measured: ..."."""
    what = "Memory beside processor" if host.kind == "dram" else "Processor"
    name = f"{what} {printable(host.device)}" if host.device != "all" else "Processors"
    watts = host.nanojoules / max(host.step_ns, 1)
    amount = energy(joules((host.nanojoules, host.nanojoules)))
    sentence = f"{name}: {amount} a step, {power((watts, watts))}: {_BASES[host.basis]}: {printable(host.how)}."
    return f"{sentence} Such a step takes {duration(host.step_ns)}." if host.basis == "measured" else sentence


def missing_sentences(trace: TraceEnergy) -> Iterator[str]:
    """Every counter that gave no number, and why."""
    for lacks, reason in grouped(trace.missing):
        yield f"Not measured: {lacks}: {reason}."


def run_sentences(answer: EnergyAnswer) -> Iterator[str]:
    """All ranks' energy over the steps asked for, what it emits, and what else that much CO2 is."""
    total = answer.step_nanojoules
    if total is None:
        yield "Nothing is known of the energy."
        return
    steps = f"{count(answer.steps)} iterations" if answer.iterations is not None else _recorded(answer)
    amount = answer.of_run(total)
    building = f", with PUE {answer.pue:g}" if answer.pue != 1 else ""
    marked = " (an estimate)" if answer.is_estimate else ""
    ranks = f" of all {len(answer.traces)} ranks" if len(answer.traces) > 1 else ""
    yield f"{steps}{ranks} use {electricity(amount)}{building}{marked}."
    unknown = answer.unknown_devices
    if unknown:
        names = ", ".join(f"device {printable(each.device)}" for each in unknown)
        yield f"That is without {names}, of which nothing is known."
    kilograms = answer.kilograms(amount)
    if kilograms is None or answer.grid is None:
        yield "No CO2 is told without a place: --region FRA, --region US-CA, --region gcp:europe-west9."
    else:
        grid = answer.grid
        of = "" if grid.basis == "own" else f", the figure of {printable(grid.basis)}"
        year = f", {grid.year}" if grid.year else ""
        yield (
            f"In {printable(grid.name)} ({printable(grid.code)}) that emits {mass(kilograms)} of CO2 equivalents: "
            f"{grid.g_per_kwh:g} g per kWh ({grid_source()}{year}{of})."
        )
        same = [f"{number((low.value, high.value))} {low.unit}" for low, high in alike(kilograms)]
        if max(kilograms) >= _WORTH_COMPARING_KG:
            yield f"As much as {' or '.join(same)}."
    if answer.pue == 1:
        yield "Cooling and the like are not counted (PUE 1); --pue counts them."


def _recorded(answer: EnergyAnswer) -> str:
    if not answer.traces[0].stepped:
        return "What was recorded"
    return "The recorded step" if answer.steps == 1 else f"The {count(answer.steps)} recorded steps"


def _together(answer: EnergyAnswer, width: int) -> Iterator[str]:
    for sentence in run_sentences(answer):
        verb = sentence.replace(" use ", " uses ", 1) if sentence.startswith(("What was", "The recorded step ")) else ""
        yield from filled(verb or sentence, width)


def _device_tables(device: DeviceEnergy, trace: TraceEnergy, width: int, top: int) -> Iterator[str]:
    if device.nanojoules is None:
        return
    sentence = idle_sentence(device)
    if sentence:
        yield ""
        yield from filled(sentence, width)
    of = f" of device {printable(device.device)}" if len(trace.devices) > 1 else ""
    table = part_table(device.parts, device.nanojoules)
    yield from _table(f"Where the energy{of} goes, a step", table, "parts", width, 0)
    if device.operators and {part.name for part in device.operators} != {"(no operator)"}:
        busy = device.of_kind("busy")
        rows = part_table(device.operators, busy).drop("what", "meaning").rename({"cause": "operator"})
        yield from _table(f"The work's energy{of}, by operator", rows, "operators", width, top)


def part_table(parts: Sequence[EnergyPart], whole: tuple[int, int]) -> pl.DataFrame:
    """Columns what, cause, ns, energy, share, meaning."""
    rows = []
    for part in parts:
        of_each = [one / total for one, total in zip(part.nanojoules, whole, strict=True) if total]
        part_of = shares((min(of_each), max(of_each))) if of_each else ""
        meaning = CAUSES.get(part.name, "") if part.kind in ("idle", "host") else ""
        rows.append((part.kind, printable(part.name), part.ns, energy(joules(part.nanojoules)), part_of, meaning))
    schema = {
        "what": pl.String,
        "cause": pl.String,
        "ns": pl.Int64,
        "energy": pl.String,
        "of it": pl.String,
        "meaning": pl.String,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _findings(trace: TraceEnergy, answer: EnergyAnswer) -> pl.DataFrame:
    rows = []
    for each in trace.findings:
        run = answer.of_run(each.nanojoules)
        kilograms = answer.kilograms(run)
        rows.append(
            {
                "finding": printable(each.rule),
                "saves_ns": each.saving_ns,
                "a step": energy(joules(each.nanojoules)),
                "in all": electricity(run),
                **({"CO2": mass(kilograms)} if kilograms is not None else {}),
                "title": printable(each.title),
            }
        )
    return pl.DataFrame(rows)


def _table(title: str, frame: pl.DataFrame, things: str, width: int, top: int) -> Iterator[str]:
    if frame.is_empty():
        return
    if width < _WIDE:
        frame = frame.drop("meaning", "title", strict=False)
    cut = frame.head(top) if top else frame
    yield ""
    yield title
    yield from (f"  {line}" for line in table_lines(cut, width=width - 2))
    if showing(cut.height, frame.height, things):
        yield f"  {showing(cut.height, frame.height, things)}"


def _name(trace: TraceEnergy) -> str:
    name = printable(trace.path).replace("\\", "/").rsplit("/", 1)[-1]
    return name if trace.rank is None else f"{name} (rank {trace.rank})"
