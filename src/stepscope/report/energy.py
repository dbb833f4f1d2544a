"""Report the energy of a step, where it goes, and the power limit at which a program needs least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.predict.cost.energy_parts import (
    DeviceEnergy,
    EnergyAnswer,
    EnergyPart,
    HostEnergy,
    TraceEnergy,
    alike,
    counted_hosts,
    grid_source,
    joules,
)
from stepscope.report.document import Block, Document, Items, Section, Table, fields, sentences, stamped, texts
from stepscope.report.format import change_words, count, duration, file_name, warning_sentence
from stepscope.trace.energy_records import Counter, EnergyRecord, MissingCounter

if TYPE_CHECKING:
    from stepscope.record.energy import LimitRun

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
    """Three significant digits, never in scientific notation."""
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
    """Say once for each counter what it measured, or why it gave no number."""
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
    """Group missing counters by reason, as ("processors, memory", reason)."""
    by_reason: dict[str, list[str]] = {}
    for lack in dict.fromkeys(missing):
        what = ALL_WORDS[lack.kind] if lack.device is None else f"{WORDS[lack.kind]} {lack.device}"
        by_reason.setdefault(lack.reason, []).append(what)
    for reason, whats in by_reason.items():
        yield ", ".join(whats), reason


def counter_name(counter: Counter) -> str:
    """Name a counter, such as "device 0 (NVIDIA A100)"."""
    named = f" ({counter.name})" if counter.kind == "gpu" and counter.name else ""
    return f"{WORDS[counter.kind]} {counter.device}{named}"


_BASES: Final = {
    "measured": "measured",
    "sampled": "from samples of its power",
    "estimate": "an estimate",
    "given": "from the power given",
    None: "not known",
}
_WORTH_COMPARING_KG: Final = 0.001
"""Smaller amounts of CO2 equal a few metres by car, not worth comparing."""


def energy_document(answer: EnergyAnswer) -> Document:
    """Report the energy of every trace, where it goes, and what the whole run uses."""
    blocks = [block for trace in answer.traces for block in _trace(trace, answer)]
    return Document("energy", (*blocks, Section("", texts(*run_sentences(answer)), is_quiet=True)))


def _trace(trace: TraceEnergy, answer: EnergyAnswer) -> Iterator[Block]:
    rank = "" if trace.rank is None else f" (rank {trace.rank})"
    head = f"{file_name(trace.path)}{rank}: {length_sentence(trace)}."
    warnings = [f"While reading: {warning_sentence(warning)}." for warning in trace.warnings]
    sentences = [*device_sentences(trace.devices), *map(host_sentence, trace.hosts), *missing_sentences(trace)]
    if not any(host.kind == "cpu" for host in counted_hosts(answer.traces)):
        sentences.append("Processors have no number; --cpu-watts gives their power.")
    yield Section("", (*texts(head, *warnings), Items(tuple(sentences))), is_quiet=True)
    for device in trace.devices:
        yield from _device_tables(device, trace)
    for host in trace.hosts:
        if host.parts:
            title = f"What the main thread did while the processors used {energy(joules((host.nanojoules,) * 2))}"
            yield _section(title, part_table(host.parts, (host.nanojoules, host.nanojoules)), "causes")
    if trace.findings:
        steps = f", in {count(answer.steps)} steps" if answer.steps > 1 else ""
        yield _section(f"What the findings would save{steps}", _findings(trace, answer), "findings")


def _section(title: str, frame: pl.DataFrame, things: str = "") -> Section:
    return Section(title, (Table(frame, things, wide_only=("meaning", "title")),))


def length_sentence(trace: TraceEnergy) -> str:
    if not trace.stepped:
        return f"{duration(trace.step_ns)} recorded, without steps; it counts as one"
    how = "1 step" if trace.step_count == 1 else f"mean of {count(trace.step_count)}"
    return f"a step takes {duration(trace.step_ns)} ({how})"


def device_sentences(devices: Sequence[DeviceEnergy]) -> Iterator[str]:
    """Yield one sentence per device; devices with no energy for the same reason share one."""
    for device in devices:
        if device.nanojoules is not None:
            yield device_sentence(device)
    for why in dict.fromkeys(device.how for device in devices if device.nanojoules is None):
        alike_ones = [device for device in devices if device.nanojoules is None and device.how == why]
        names = ", ".join(device.device for device in alike_ones)
        called = f" ({alike_ones[0].name})" if alike_ones[0].name else ""
        yield f"Device{'s' if len(alike_ones) > 1 else ''} {names}{called}: no number, because {why}."


def device_sentence(device: DeviceEnergy) -> str:
    """Describe one device: "Device 0 (NVIDIA A100): 21.3 to 52.5 J a step, 122 to 300 W: an estimate; ..."."""
    name = f"Device {device.device}" + (f" ({device.name})" if device.name else "")
    assert device.nanojoules is not None
    amount = joules(device.nanojoules)
    watts = (amount[0] / max(device.step_ns, 1) * 1e9, amount[1] / max(device.step_ns, 1) * 1e9)
    sentence = f"{name}: {energy(amount)} a step, {power(watts)}: {_BASES[device.basis]}: {device.how}."
    if device.basis == "measured":
        sentence += f" Such a step takes {duration(device.step_ns)}."
    return sentence


def idle_sentence(device: DeviceEnergy) -> str:
    """Say how much energy went to idle time; empty if unknown."""
    if device.idle_share is None:
        return ""
    return f"Idle gaps used {shares(device.idle_share)} of the energy of device {device.device}."


def host_sentence(host: HostEnergy) -> str:
    """Describe one host counter: "Processor 0: 8.1 J a step, 46.3 W: measured: ..."."""
    what = "Memory beside processor" if host.kind == "dram" else "Processor"
    name = f"{what} {host.device}" if host.device != "all" else "Processors"
    watts = host.nanojoules / max(host.step_ns, 1)
    amount = energy(joules((host.nanojoules, host.nanojoules)))
    sentence = f"{name}: {amount} a step, {power((watts, watts))}: {_BASES[host.basis]}: {host.how}."
    return f"{sentence} Such a step takes {duration(host.step_ns)}." if host.basis == "measured" else sentence


def missing_sentences(trace: TraceEnergy) -> Iterator[str]:
    """Say for every counter without a number why it has none."""
    for lacks, reason in grouped(trace.missing):
        yield f"Not measured: {lacks}: {reason}."


def run_sentences(answer: EnergyAnswer) -> Iterator[str]:
    """Report the energy of all ranks over the requested steps, the CO2 it emits, and comparisons for that amount."""
    total = answer.step_nanojoules
    if total is None:
        yield "The energy is unknown."
        return
    steps = f"{count(answer.steps)} iterations" if answer.iterations is not None else _recorded(answer)
    amount = answer.of_run(total)
    building = f", with PUE {answer.pue:g}" if answer.pue != 1 else ""
    marked = " (an estimate)" if answer.is_estimate else ""
    ranks = f" of all {len(answer.traces)} ranks" if len(answer.traces) > 1 else ""
    use = "uses" if steps.startswith(("What was", "The recorded step")) and not ranks else "use"
    yield f"{steps}{ranks} {use} {electricity(amount)}{building}{marked}."
    unknown = answer.unknown_devices
    if unknown:
        names = ", ".join(f"device {each.device}" for each in unknown)
        yield f"This excludes {names}, for which there is no number."
    kilograms = answer.kilograms(amount)
    if kilograms is None or answer.grid is None:
        yield "CO2 needs a place: --region FRA, --region US-CA, --region gcp:europe-west9."
    else:
        grid = answer.grid
        of = "" if grid.basis == "own" else f", the figure of {grid.basis}"
        year = f", {grid.year}" if grid.year else ""
        yield (
            f"In {grid.name} ({grid.code}) that emits {mass(kilograms)} of CO2 equivalents: "
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


def _device_tables(device: DeviceEnergy, trace: TraceEnergy) -> Iterator[Block]:
    if device.nanojoules is None:
        return
    yield from (Section("", (each,), is_quiet=True) for each in texts(idle_sentence(device)))
    of = f" of device {device.device}" if len(trace.devices) > 1 else ""
    if device.parts:
        yield _section(f"Where the energy{of} goes, per step", part_table(device.parts, device.nanojoules))
    if device.operators and {part.name for part in device.operators} != {"(no operator)"}:
        rows = part_table(device.operators, device.of_kind("busy")).drop("what", "meaning")
        yield _section(f"The work's energy{of}, by operator", rows.rename({"cause": "operator"}), "operators")


def part_table(parts: Sequence[EnergyPart], whole: tuple[int, int]) -> pl.DataFrame:
    """Columns what, cause, ns, energy, share, meaning."""
    rows = []
    for part in parts:
        of_each = [one / total for one, total in zip(part.nanojoules, whole, strict=True) if total]
        part_of = shares((min(of_each), max(of_each))) if of_each else ""
        meaning = CAUSES.get(part.name, "") if part.kind in ("idle", "host") else ""
        rows.append((part.kind, part.name, part.ns, energy(joules(part.nanojoules)), part_of, meaning))
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
                "finding": each.rule,
                "saves_ns": each.saving_ns,
                "a step": energy(joules(each.nanojoules)),
                "in all": electricity(run),
                **({"CO2": mass(kilograms)} if kilograms is not None else {}),
                "title": each.title,
            }
        )
    return pl.DataFrame(rows)


def section_sentences(found: TraceEnergy) -> Iterator[str]:
    """Say what was measured, how much of it idle gaps used, and what could not be measured."""
    for device in found.devices:
        if device.basis == "measured" and device.nanojoules is not None:
            amount = joules(device.nanojoules)
            watts = amount[0] / max(device.step_ns, 1) * 1e9
            idle = device.idle_share
            gaps = f", {shares(idle)} of it in idle gaps" if idle is not None else ""
            uses = f"uses {energy(amount)} a step ({power((watts, watts))}){gaps}"
            yield f"Device {device.device} {uses}; measured without the profiler."
    for host in found.hosts:
        if host.basis == "measured":
            amount = joules((host.nanojoules, host.nanojoules))
            watts = amount[0] / max(host.step_ns, 1) * 1e9
            what = f"{WORDS[host.kind].capitalize()} {host.device}"
            yield f"{what} uses {energy(amount)} a step ({power((watts, watts))}), other programs included."
    for lacks, reason in grouped(found.missing):
        yield f"Not measured: {lacks}: {reason}."
    yield "stepscope energy shows where it goes, what it emits and what the findings would save."


def measured_section(found: TraceEnergy) -> Section:
    return Section("Energy", (Items(tuple(section_sentences(found))),))


def limits_document(runs: Sequence[LimitRun]) -> Document:
    """Compare a program at several power limits: time cost, energy saved, and the limit that needs least."""
    return Document("power limits", (Table(_limit_table(runs)), *texts(*_limit_sentences(runs))))


def _limit_table(runs: Sequence[LimitRun]) -> pl.DataFrame:
    first = _highest(runs)
    rows = []
    for run in runs:
        time = energy_change = ""
        if first is not None and run is not first and run.step_ns and run.joules and first.step_ns and first.joules:
            time = change_words(run.step_ns / first.step_ns - 1)
            energy_change = change_words(run.joules / first.joules - 1)
        used = "not measured" if run.joules is None else energy((run.joules, run.joules))
        rows.append((f"{run.limit_w:g} W", run.step_ns, time, used, energy_change, run.exit_code))
    schema = {
        "limit": pl.String,
        "step_ns": pl.Float64,
        "time": pl.String,
        "energy a step": pl.String,
        "energy": pl.String,
        "exit_code": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


def _limit_sentences(runs: Sequence[LimitRun]) -> Iterator[str]:
    most = _highest(runs)
    if most is None or most.step_ns is None or most.joules is None:
        yield "Nothing was measured, so the best limit is unknown."
        return
    least = min((run for run in runs if run.joules is not None), key=lambda run: run.joules or 0)
    if least is most:
        yield f"The highest limit, {most.limit_w:g} W, needs the least energy."
    elif least.step_ns is not None and least.joules is not None:
        time = change_words(least.step_ns / most.step_ns - 1)
        saved = change_words(least.joules / most.joules - 1)
        yield f"{least.limit_w:g} W needs the least energy: {saved} than {most.limit_w:g} W, with {time} time."


def _highest(runs: Sequence[LimitRun]) -> LimitRun | None:
    """The highest limit with a measurement, which is the baseline for the others."""
    return max((run for run in runs if run.step_ns and run.joules), key=lambda run: run.limit_w, default=None)


def energy_json(answer: EnergyAnswer) -> dict[str, Any]:
    """Energy in joules, nanoseconds, watts, kilograms and shares (0 to 1); docs/energy.md describes the keys."""
    total = answer.step_nanojoules
    run = None if total is None else answer.of_run(total)
    kilograms = None if run is None else answer.kilograms(run)
    same = [] if kilograms is None else alike(kilograms)
    return stamped(
        traces=[trace_json(trace) for trace in answer.traces],
        total={
            "joules": None if total is None else joules(total),
            "is_estimate": answer.is_estimate,
            "unknown_devices": [each.device for each in answer.unknown_devices],
        },
        run={
            "iterations": answer.steps,
            "asked": answer.iterations is not None,
            "pue": answer.pue,
            "joules": run,
            "kwh": None if run is None else [each / 3.6e6 for each in run],
            "kilograms": kilograms,
            "equivalences": [
                {"value": [low.value, high.value], "unit": low.unit, "source": low.source} for low, high in same
            ],
        },
        sentences=sentences(energy_document(answer)),
        carbon=None if answer.grid is None else {**fields(answer.grid), "source": grid_source()},
    )


def trace_json(trace: TraceEnergy) -> dict[str, Any]:
    return {
        **fields(trace, "path", "format", "rank", "step_ns", "step_count", "stepped", "missing", "warnings"),
        "devices": [_device_json(each) for each in trace.devices],
        "hosts": [
            {
                **fields(each, "kind", "device", "basis", "how", "step_ns", "window_joules"),
                "joules": joules((each.nanojoules, each.nanojoules))[0],
                "parts": _parts_json(each.parts),
            }
            for each in trace.hosts
        ],
        "findings": [
            {**fields(each, "rule", "title", "saving_ns", "busy_ns"), "joules": joules(each.nanojoules)}
            for each in trace.findings
        ],
    }


def _device_json(device: DeviceEnergy) -> dict[str, Any]:
    powers = device.powers or ()
    return {
        **fields(device, "device", "name", "basis", "how", "step_ns", "idle_share", "window_joules"),
        "joules": None if device.nanojoules is None else joules(device.nanojoules),
        "idle_watts": [each.idle_w for each in powers] or None,
        "busy_watts": [each.busy_w for each in powers] or None,
        "parts": _parts_json(device.parts),
        "operators": _parts_json(device.operators),
    }


def _parts_json(parts: Sequence[EnergyPart]) -> list[dict[str, Any]]:
    return [{**fields(each, "kind", "name", "ns"), "joules": joules(each.nanojoules)} for each in parts]
