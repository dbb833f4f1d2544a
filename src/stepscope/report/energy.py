"""What a step's energy is and where it goes, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.predict.cost.carbon import grid_source
from stepscope.predict.cost.energy_parts import (
    DeviceEnergy,
    EnergyAnswer,
    EnergyPart,
    HostEnergy,
    TraceEnergy,
    alike,
    counted_hosts,
    joules,
)
from stepscope.report.format import count, duration, filled, printable
from stepscope.report.html.picture import View, table_view
from stepscope.report.tables import showing, table_lines
from stepscope.trace.energy_records import Counter, EnergyRecord, MissingCounter

_JOULES: Final = ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"))
_WATT_HOURS: Final = ((3.6e9, "MWh"), (3.6e6, "kWh"), (3.6e3, "Wh"), (3.6, "mWh"), (3.6e-3, "uWh"))
_KILOGRAMS: Final = ((1e3, "t"), (1.0, "kg"), (1e-3, "g"), (1e-6, "mg"), (1e-9, "ug"))
_SAME: Final = 1e-6

Units = tuple[tuple[float, str], ...]


def energy(joules: tuple[float, float]) -> str:
    """Joules as "21.3 J", "812 mJ" or "21.3 to 52.5 J"."""
    return _bounds(joules, _JOULES)


def electricity(joules: tuple[float, float]) -> str:
    """Joules as what an electricity meter counts: "1.2 kWh", "340 to 820 Wh"."""
    return _bounds(joules, _WATT_HOURS)


def mass(kilograms: tuple[float, float]) -> str:
    """Kilograms as "1.2 kg", "340 to 820 g"."""
    return _bounds(kilograms, _KILOGRAMS)


def power(watts: tuple[float, float]) -> str:
    """Watts as "122 W" or "122 to 300 W"."""
    return _bounds(watts, ((1.0, "W"),))


def number(values: tuple[float, float]) -> str:
    """Two numbers as "3.98" or "3.98 to 5.2"."""
    return _bounds(values, ((1.0, ""),)).rstrip()


def shares(values: tuple[float, float]) -> str:
    """Shares from 0 to 1 as "31.2 %" or "5.0 to 31.2 %"."""
    low, high = (f"{value * 100:.1f}" for value in values)
    return f"{high} %" if low == high else f"{low} to {high} %"


def _bounds(values: tuple[float, float], units: Units) -> str:
    low, high = min(values), max(values)
    scale, word = next((unit for unit in units if high >= unit[0] * 0.9995), units[-1])
    if high - low <= _SAME * abs(high):
        return f"{_digits(high / scale)} {word}"
    if 0 < low < scale / 100:
        return f"{_bounds((low, low), units)} to {_digits(high / scale)} {word}"
    first, second = _digits(low / scale), _digits(high / scale)
    return f"{second} {word}" if first == second else f"{first} to {second} {word}"


def _digits(value: float) -> str:
    """Three digits, never in powers of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    places = 2 if abs(value) < 10 else 1
    text = f"{value:.{places}f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return f"{value:.6f}".rstrip("0").rstrip(".") if "e" in text else text


WORDS: Final = {"gpu": "device", "cpu": "processor", "dram": "memory beside processor"}
ALL_WORDS: Final = {"gpu": "devices", "cpu": "processors", "dram": "memory"}


def measured_sentences(records: Sequence[EnergyRecord]) -> Iterator[str]:
    """What each counter measured, every one once, and which gave no number and why."""
    seen: set[str] = set()
    for record in records:
        for counter in record.counters:
            joules = record.step_joules(counter.key)
            identity = counter.identity or f"{record.machine} {counter.key}"
            if joules is not None and identity not in seen:
                seen.add(identity)
                yield (
                    f"energy of {counter_name(counter)}: {energy((joules, joules))} a step, measured over "
                    f"{count(record.steps)} steps after the recording"
                )
    for lacks, reason in grouped([lack for record in records for lack in record.missing]):
        yield f"energy not measured of {lacks}: {reason}"


def grouped(missing: Sequence[MissingCounter]) -> Iterator[tuple[str, str]]:
    """What could not be measured for one reason, as "processors, memory", and the reason."""
    by_reason: dict[str, list[str]] = {}
    for lack in dict.fromkeys(missing):
        what = ALL_WORDS[lack.kind] if lack.device is None else f"{WORDS[lack.kind]} {printable(lack.device)}"
        by_reason.setdefault(lack.reason, []).append(what)
    for reason, whats in by_reason.items():
        yield ", ".join(whats), printable(reason)


def counter_name(counter: Counter) -> str:
    """Such as "device 0 (NVIDIA A100)"."""
    named = f" ({printable(counter.name)})" if counter.kind == "gpu" and counter.name else ""
    return f"{WORDS[counter.kind]} {printable(counter.device)}{named}"


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
