"""Report devices and prices with the source of each figure, and what the recorded steps would take on other devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any, Final

import polars as pl

from stepscope.diagnosis.finding import Unreadable
from stepscope.machine.devices import NUMBER_TYPES, DevicePeaks, with_measured_shares
from stepscope.predict.cost.prices import Price
from stepscope.predict.limits import Link
from stepscope.predict.prediction import PredictedSteps, StepPrediction
from stepscope.predict.ranges import HELD
from stepscope.predict.scaling import ScaledStep
from stepscope.predict.work_times import KNOWLEDGE
from stepscope.report.document import (
    Block,
    Document,
    Facts,
    Items,
    Section,
    Table,
    fields,
    section_if,
    sentences,
    stamped,
    texts,
)
from stepscope.report.format import count, duration, file_name, share, size, warning_sentence
from stepscope.report.words import unreadable_heading, unreadable_sentences

_MOST_WARNINGS: Final = 5
_EXACT: Final = 0.0005
"""A band narrower than this share of the step is not shown."""


def predict_document(answer: PredictedSteps, scaled: Sequence[Block] = (), *, top: int = 0) -> Document:
    """Report the predicted step on each device, what limits it, and what the prediction rests on.

    Args:
        scaled: sections about several devices.
        top: devices to show, 0 for all.
    """
    total = len(answer.predictions)
    answer = dataclasses.replace(answer, predictions=answer.predictions[: top or total])
    blocks = (
        Section("", texts(*_head(answer)), is_quiet=True),
        *(_times(answer, total) if any(each.step_ns is not None for each in answer.predictions) else ()),
        *_served(answer),
        *section_if("", *_items(_sentences(answer)), is_quiet=True),
        *_basis(answer),
        *section_if("", *_items(_notes(answer)), is_quiet=True),
        *scaled,
        *missing_section(answer.unreadable),
    )
    return Document("prediction", blocks)


_SLOWED: Final = 0.9
"""What an unrecorded step takes of a recorded one, at most, if recording is said to have lengthened it."""


def missing_section(unreadable: Sequence[Unreadable]) -> Iterator[Section]:
    """Which other ranks are missing, and why."""
    items = _items(iter(unreadable_sentences(unreadable)))
    yield from section_if(unreadable_heading(unreadable), *items, id="unreadable")


def _items(sentences: Iterator[str]) -> tuple[Items, ...]:
    found = tuple(sentences)
    return (Items(found),) if found else ()


def step_text(prediction: StepPrediction) -> str:
    """Format a predicted step as "41.0 ms (36.2 to 47.1 ms)"; empty if no time is given."""
    if prediction.step_ns is None or prediction.low_ns is None or prediction.high_ns is None:
        return ""
    return range_text(prediction.step_ns, prediction.low_ns, prediction.high_ns)


def range_text(ns: float, low_ns: float, high_ns: float) -> str:
    """Format a time with its range as "41.0 ms (36.2 to 47.1 ms)", or alone if the range is too narrow to show."""
    if high_ns - low_ns < _EXACT * ns:
        return duration(ns)
    time, low, high = duration(ns), duration(low_ns), duration(high_ns)
    return time if low == time == high else f"{time} ({_range(low, high)})"


def _range(low: str, high: str) -> str:
    """Two times with units; a common unit is written once."""
    number, unit = low.split(" ")
    return f"{number if high.endswith(' ' + unit) else low} to {high}"


def prediction_sentence(prediction: StepPrediction, answer: PredictedSteps) -> str:
    """Say what limits the steps on a device, and what helps."""
    if prediction.fits is False:
        return _does_not_fit(prediction)
    if prediction.step_ns is None:
        return prediction.notes[-1] if prediction.notes else "no step time is given"
    return _idle([] if prediction.busy_share is None else [1 - prediction.busy_share], answer) + _what_helps(prediction)


def _idle(shares: list[float], answer: PredictedSteps) -> str:
    """Format the idle share of the step, such as "idle for 1.0 % to 2.0 % of the step: "."""
    if not shares:
        return ""
    low, high = share(min(shares)), share(max(shares))
    return f"idle for {low if low == high else f'{low} to {high}'} of {_whole(answer)}: "


def _what_helps(prediction: StepPrediction) -> str:
    match prediction.limit:
        case "host" if prediction.limit_cause == "untraced":
            return "for most of it nothing was recorded on the host: that time stays as it was, whatever it is"
        case "host":
            most = f", most of it {prediction.limit_cause}" if prediction.limit_cause else ""
            return (
                f"the host limits it{most}; a faster device does not help. stepscope diagnose shows why; stepscope "
                "whatif --graphs, what one launch a step would save"
            )
        case "input":
            return "loading batches limits it; a faster device does not help. stepscope diagnose shows what loads them"
        case "communication":
            return "communication limits it. stepscope whatif --overlap communication shows what hiding it would save"
        case "compute":
            return "arithmetic limits it. --precision tries another number type"
        case "memory bandwidth":
            return "memory bandwidth limits it. stepscope diagnose shows how to move less data"
    return "what limits it is not in the trace"


_NAMED: Final = 5  # devices that a sentence names though they are all there are


def _sentences(answer: PredictedSteps) -> Iterator[str]:
    """One sentence per device; devices with the same sentence share one."""
    groups: dict[str, list[StepPrediction]] = {}
    for each in answer.predictions:
        alike = each.step_ns is not None and each.fits is not False
        groups.setdefault(_what_helps(each) if alike else _without_time(each), []).append(each)
    for what, alike_ones in groups.items():
        is_all = len(alike_ones) == len(answer.predictions) > _NAMED
        names = "All of them" if is_all else ", ".join(each.device.name for each in alike_ones)
        if len(alike_ones) == 1 or alike_ones[0].step_ns is None or alike_ones[0].fits is False:
            sentence = prediction_sentence(alike_ones[0], answer) if len(alike_ones) == 1 else what
        else:
            idle = [1 - each.busy_share for each in alike_ones if each.busy_share is not None]
            sentence = _idle(idle, answer) + what
        yield f"{names}: {sentence}."


def _without_time(prediction: StepPrediction) -> str:
    """Why no time is given, phrased so that devices with the same reason can share the sentence."""
    if prediction.fits is False:
        return _does_not_fit(prediction)
    return _on_any(prediction.notes[-1], prediction) if prediction.notes else ""


def _on_any(note: str, prediction: StepPrediction) -> str:
    return note.replace(f"the {prediction.device.name}", "the device").replace(prediction.device.name, "the device")


def _does_not_fit(prediction: StepPrediction) -> str:
    has, needs = prediction.device.memory_bytes or 0, prediction.memory_bytes or 0
    return f"does not fit: it needs {size(needs)}; of the device's {size(has)} a tenth stays free for the runtime"


def _whole(answer: PredictedSteps) -> str:
    return "the step" if answer.stepped else "the recording"


def _head(answer: PredictedSteps) -> Iterator[str]:
    on = f" on {answer.device}" if answer.device else ""
    if answer.stepped:
        steps = "1 step" if answer.step_count == 1 else f"mean of {count(answer.step_count)}"
        took = f"a step takes {duration(answer.measured_ns)}{on} ({steps})"
    else:
        took = f"{duration(answer.measured_ns)} recorded{on}, without steps"
    busy = "; no device's work was recorded"
    if answer.busy_share is not None:
        busy = f"; the device works {share(answer.busy_share)} of it"
    if answer.steady_ns is not None:
        busy += f"; without what predictions leave out, {duration(answer.steady_ns)}"
    yield f"{file_name(answer.path)}: {took}{busy}."
    if answer.unrecorded_ns and answer.unrecorded_ns < _SLOWED * answer.measured_ns:
        yield (
            f"Recording lengthened these steps: others of the same run take {duration(answer.unrecorded_ns)}. The "
            "times below hold that, and show too large a gain where it is in the device's waits."
        )
    if answer.devices > 1:
        yield f"The trace shows {count(answer.devices)} devices; the busiest counts."
    if answer.why_not is not None:
        doubt = f"Not certain: {answer.why_not}."
        if any(each.step_ns is not None for each in answer.predictions):
            doubt += (
                " So the steps are not replayed: a time is what follows if the device's idle time stays as it is, and "
                "its range reaches to where host and device overlap completely."
            )
        yield doubt
    yield from (f"While reading: {warning_sentence(warning)}." for warning in answer.warnings[:_MOST_WARNINGS])
    if len(answer.warnings) > _MOST_WARNINGS:
        yield f"While reading: {count(len(answer.warnings) - _MOST_WARNINGS)} more; stepscope diagnose names them."


def _times(answer: PredictedSteps, total: int) -> Iterator[Section]:
    how = f" in {answer.precision}" if answer.precision else ""
    if answer.batch != answer.recorded_batch:
        how += f" with {count(answer.batch or 0)} samples instead of {count(answer.recorded_batch or 0)}"
    range_words = "and between which bounds" if _has_bounds(answer) else f"and its {100 * HELD:.0f} % range"
    table = pl.DataFrame([_row(each) for each in answer.predictions], schema=_COLUMNS)
    unsaid = {name for name in ("samples_per_s", "fits_memory") if table[name].null_count() == table.height}
    if any(each.phases for each in answer.predictions):
        unsaid.add("samples_per_s")  # a server's batch is tokens
    table = table.drop(unsaid)
    by_host = any(each.limit == "host" and each.device.name != answer.device for each in answer.predictions)
    meaning = texts(_OF_THE_HOST if by_host and not _has_bounds(answer) else "")
    yield Section(f"What {_whole(answer)} would take{how}, {range_words}", (Table(table, "devices", total), *meaning))


_OF_THE_HOST: Final = (
    "Where the host limits, the range is what the recorded host takes another time. The trace does not say how much "
    "faster or slower another host is; --host-factor takes a guess."
)


def _has_bounds(answer: PredictedSteps) -> bool:
    """Whether ranges are from one extreme to the other, which no share of steps is known for."""
    return answer.why_not is not None or answer.from_shapes


def _row(prediction: StepPrediction) -> dict[str, Any]:
    row = {"device": prediction.device.name, "step": _step_cell(prediction), "fits_memory": prediction.fits}
    if prediction.fits is False:
        return row
    speed_up = None if prediction.speed_up is None else f"{prediction.speed_up:.2f} x"
    return {**row, "speed_up": speed_up, **fields(prediction, "samples_per_s", "busy_share", "limit")}


_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    "device": pl.String,
    "step": pl.String,
    "speed_up": pl.String,
    "samples_per_s": pl.Float64,
    "busy_share": pl.Float64,
    "limit": pl.String,
    "fits_memory": pl.Boolean,
}


def _step_cell(prediction: StepPrediction) -> str:
    if prediction.fits is False:
        return "does not fit"
    return step_text(prediction) or "not given"


_OF_PHASE: Final = {"prefill": "prefill, to the first token", "decode": "decoding, for each token"}


def _served(answer: PredictedSteps) -> Iterator[Section]:
    """The iterations of a recorded server, as recorded and on each device."""
    known = [each for each in answer.predictions if each.phases and each.fits is not False]
    if not known:
        return
    rows = [
        {
            "iteration": _OF_PHASE.get(phase.phase, phase.phase),
            "device": "as recorded",
            **fields(phase, "count", "requests", "tokens"),
            "time": duration(phase.measured_ns),
            "device_works": duration(phase.measured_device_ns),
        }
        for phase in known[0].phases
    ]
    for each in known:
        for phase in each.phases:
            what = _OF_PHASE.get(phase.phase, phase.phase)
            time = range_text(phase.ns, phase.low_ns, phase.high_ns)
            rows.append(
                {"iteration": what, "device": each.device.name, "time": time, "device_works": duration(phase.device_ns)}
            )
    table = pl.DataFrame(rows, schema=_PHASE_COLUMNS)
    if len(known[0].phases) > 1:
        table = table.sort(pl.col("iteration").rank("dense", descending=True), maintain_order=True)
    yield Section(
        "What an iteration of the server would take", (Table(table, "iterations"), *texts(*_of_graphs(known[0])))
    )


def _of_graphs(prediction: StepPrediction) -> Iterator[str]:
    for phase in prediction.phases:
        if phase.graph_share:
            what = _OF_PHASE.get(phase.phase, phase.phase)
            yield f"{what}: {share(phase.graph_share)} of the device's work is in captured graphs, without gaps"


_PHASE_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    "iteration": pl.String,
    "device": pl.String,
    "count": pl.Int64,
    "requests": pl.Float64,
    "tokens": pl.Float64,
    "time": pl.String,
    "device_works": pl.String,
}


def _basis(answer: PredictedSteps) -> Iterator[Section]:
    """Share of device time by what its prediction rests on."""
    names = [
        name for name in dict.fromkeys(KNOWLEDGE.values()) if any(name in each.knowledge for each in answer.predictions)
    ]
    if not names:
        return
    groups: dict[tuple[tuple[str, str], ...], list[StepPrediction]] = {}
    for each in answer.predictions:
        groups.setdefault(tuple((name, share(part)) for name, part in each.knowledge.items()), []).append(each)
    rows = [
        {"device": ", ".join(each.device.name for each in alike)}
        | {f"{name}_share": part for name, part in alike[0].knowledge.items()}
        for alike in groups.values()
    ]
    schema = {"device": pl.String} | {f"{name}_share": pl.Float64 for name in names}
    whose = "operators'" if answer.from_shapes else "device's"
    title = f"What that rests on: share of the {whose} measured time by what was known"
    yield Section(title, (Table(pl.DataFrame(rows, schema=schema)),))


def _notes(answer: PredictedSteps) -> Iterator[str]:
    """What was assumed or refused; once if it holds for every device."""
    found: dict[str, list[str]] = {}
    for each in answer.predictions:
        notes = each.notes[:-1] if each.step_ns is None else each.notes  # the last one says why there is no time
        for note in dict.fromkeys(notes):
            found.setdefault(_on_any(note, each), []).append(each.device.name)
    for note, devices in found.items():
        whom = "" if len(devices) == len(answer.predictions) else f"{', '.join(devices)}: "
        yield f"Note: {whom}{note}."
    memory = answer.memory
    if memory.bytes is None:
        yield f"Note: what fits is unknown: {memory.note}."
    else:
        least = "at least " if memory.at_least else ""
        yield f"Memory: {least}{size(memory.bytes)}, {memory.note}."


def predict_json(answer: PredictedSteps) -> dict[str, Any]:
    names = ("device", "devices", "busy_share", "from_shapes", "why_not", "precision", "batch", "recorded_batch")
    return stamped(
        trace=fields(answer, "path", "format", "warnings"),
        steps={"source": "recorded" if answer.stepped else "none", "count": answer.step_count},
        step_ns=answer.measured_ns,
        steady_step_ns=answer.measured_ns if answer.steady_ns is None else answer.steady_ns,
        **fields(answer, *names, "memory"),
        range_holds=None if _has_bounds(answer) else HELD,
        predictions=[_prediction(each) for each in answer.predictions],
        sentences=sentences(predict_document(answer)),
        unreadable=answer.unreadable,
    )


def _prediction(prediction: StepPrediction) -> dict[str, Any]:
    times = ("step_ns", "low_ns", "high_ns", "speed_up", "samples_per_s", "device_ns", "busy_share", "host_ns")
    return {
        "device": prediction.device.name,
        **fields(prediction, *times, "limit", "limit_share", "limit_cause", "memory_bytes"),
        "device_memory_bytes": prediction.device.memory_bytes,
        **fields(prediction, "fits", "notes", "phases"),
        "knowledge": prediction.knowledge,
        "bases": dict(prediction.bases),
    }


_TEXT_COLUMNS: Final[dict[str, type[pl.DataType]]] = {
    "devices": pl.Int64,
    "step": pl.String,
    "throughput": pl.String,
    "samples_per_s": pl.Float64,
    "efficiency_share": pl.Float64,
    "communication": pl.String,
    "exposed": pl.String,
    "stragglers": pl.String,
}


def scaling_json(device: str, link: Link | None, steps: Sequence[ScaledStep]) -> dict[str, Any]:
    """The scaled steps as JSON values: times in nanoseconds, shares from 0 to 1, null if unknown."""
    names = ("name", "bandwidth_bytes_s", "fitted", "error", "source")
    return {"device": device or None, "link": None if link is None else fields(link, *names), "steps": steps}


def scaling_section(device: str, link: Link | None, steps: Sequence[ScaledStep]) -> Section:
    """A table of steps by device count, what its columns mean, and what was not counted.

    Args:
        device: the device's name, such as "H100-SXM"; "" if unknown.
    """
    what = f"on several {device}" if device else "on several devices"
    name = "" if link is None else "the recorded link" if link.fitted else link.name
    over = "" if link is None else f" over {name} ({link.bandwidth_bytes_s / 1e9:.4g} GB/s)"
    table = pl.DataFrame([_scaled_row(each) for each in steps], schema=_TEXT_COLUMNS)
    if steps[0].samples_per_s is None:
        table = table.drop("samples_per_s")
    if not any(each.straggler_ns for each in steps):
        table = table.drop("stragglers")
    meaning = (
        "efficiency: throughput as a share of that many times one device's; communication: all messages of a step; "
        "exposed: how much longer they make it"
    )
    if steps[0].recorded_ranks > 1:
        meaning += ", with waiting for late ranks and slower computation beside them: it can exceed communication"
    if "stragglers" in table.columns:
        meaning += "; stragglers: waiting for the slowest device, as the recorded steps vary"
    notes = [f"Note: {note}." for note in dict.fromkeys(note for each in steps for note in each.notes)]
    title = f"What a step would take {what}{over}, each with a batch as large as the recorded one"
    return Section(title, (Table(table), *texts(meaning, *notes)))


def _scaled_row(step: ScaledStep) -> dict[str, Any]:
    return {
        "devices": step.devices,
        "step": range_text(step.step_ns, step.low_ns, step.high_ns),
        "throughput": f"{step.devices * step.efficiency:.2f} x",
        "samples_per_s": step.samples_per_s,
        "efficiency_share": step.efficiency,
        "communication": duration(step.communication_ns),
        "exposed": duration(step.exposed_ns),
        "stragglers": duration(step.straggler_ns),
    }


_NUMBERS: Final = ("on_demand_usd_h", "spot_usd_h", "gpu_memory_gb", "vcpus", "memory_gib")
_PRICE_COLUMNS: Final = (
    "provider",
    "instance",
    "gpu",
    "count",
    "on_demand_usd_h",
    "spot_usd_h",
    "as_of",
    "age_days",
    "old",
    "region",
    "source",
    "device",
    "gpu_memory_gb",
    "vcpus",
    "memory_gib",
    "link",
    "page",
)


def device_document(row: DevicePeaks) -> Document:
    """Report every known figure of a device with its unit, then the sources."""
    made = ", ".join(filter(None, (row.vendor, row.architecture)))
    chip = with_measured_shares(row)
    figures = {
        "also called": ", ".join(row.aliases),
        "memory": _amount(row.memory_bytes, 1e9, "GB"),
        "bandwidth": _with_measured(row.bandwidth_bytes_s, row.sustained_bandwidth_bytes_s, 1e9, "GB/s"),
        **{
            kind: _with_measured(
                row.flops_s.get(kind),
                row.sustained_flops_s.get(kind),
                1e12,
                _unit(kind),
                chip.sustained_flops_s.get(kind),
            )
            for kind in NUMBER_TYPES
        },
        "best bf16": _best(row),
        "power": _amount(row.power_w, 1, "W at most"),
        "idle": _idle_power(row),
        "memory-bound": _amount(row.memory_power_w, 1, "W at most"),
        "small kernel": _amount(row.launch_ns, 1e3, "us from one to the next"),
        "host link": _amount(row.host_link_bytes_s, 1e9, "GB/s each way"),
        "peer link": _amount(row.peer_link_bytes_s, 1e9, "GB/s each way"),
        "units": _amount(row.multiprocessors, 1, ""),
        "clock": _amount(row.clock_mhz, 1, "MHz"),
        "cache": _amount(row.cache_bytes, 2**20, "MiB"),
        "capability": row.capability or "",
    }
    sources = [
        (label if place == 0 else "", address)
        for label, source in (("source", row.source), ("measured", row.measured_source), ("powers", row.power_source))
        for place, address in enumerate(_addresses(source))
    ]
    known = tuple((label, value) for label, value in (*figures.items(), *sources) if value)
    return Document(row.name, (Section(f"{row.name} ({made})" if made else row.name, (Facts(known),)),))


def _idle_power(row: DevicePeaks) -> str:
    least, most = row.idle_power_w, row.idle_high_power_w
    if least is None:
        return "" if most is None else f"{most:g} W at most"
    return f"{least:g} W" if most is None else f"{least:g} to {most:g} W"


def _addresses(source: str) -> list[str]:
    """Split a source into its web addresses; any other text stays whole."""
    words = source.split()
    return words if words and all(word.startswith("https://") for word in words) else [source]


def _unit(kind: str) -> str:
    return "TOP/s" if kind == "int8" else "TFLOP/s"


def _best(row: DevicePeaks) -> str:
    """The highest rate measured for any matrix product, if large products reach less on average."""
    best = row.best_bf16_flops_s
    is_more = best is not None and best > row.sustained_flops_s.get("bf16", 0.0)
    return _amount(best, 1e12, "TFLOP/s measured for any product") if is_more else ""


def _with_measured(
    peak: float | None, measured: float | None, unit: float, name: str, of_chip: float | None = None
) -> str:
    """A peak with what was measured, or else with what it would be as on others of the chip."""
    if peak is None:
        return _amount(measured, unit, f"{name} measured")
    if measured is None and of_chip is not None:
        return f"{_amount(peak, unit, name)}; {of_chip / peak:.0%} in predictions, as others of the chip reach"
    if measured is None or measured == peak:
        return _amount(peak, unit, name)
    return f"{_amount(peak, unit, name)}; {_amount(measured, unit, name)} measured ({measured / peak:.0%})"


def _amount(value: float | None, unit: float, name: str) -> str:
    return "" if value is None else f"{value / unit:,.6g} {name}".rstrip()


def price_table(prices: Sequence[Price], today: date) -> pl.DataFrame:
    """One row per price, sorted by provider, device and device count; `old` is set from OLD_DAYS on.

    Columns: provider, instance, gpu, count, on_demand_usd_h, spot_usd_h, as_of, age_days, old, region, device, vcpus,
    memory_gib, link, source, page.
    """
    ordered = sorted(prices, key=lambda each: (each.provider, each.gpu, each.count, each.instance, each.region or ""))
    rows = [
        {
            **{name: getattr(each, name) for name in _PRICE_COLUMNS if hasattr(each, name)},
            "as_of": each.as_of.isoformat(),
            "age_days": each.age_days(today),
            "old": each.is_old(today),
        }
        for each in ordered
    ]
    other = {"count": pl.Int64, "age_days": pl.Int64, "old": pl.Boolean}
    types = {name: other.get(name, pl.Float64 if name in _NUMBERS else pl.String) for name in _PRICE_COLUMNS}
    return pl.DataFrame(rows, schema=types, orient="row")
