"""What the recorded steps would take on other devices, for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl

from stepscope import __version__
from stepscope.predict.links import Link
from stepscope.predict.prediction import PredictedSteps, StepPrediction
from stepscope.predict.scaling import ScaledStep
from stepscope.report.format import count, duration, filled, printable, share, size
from stepscope.report.tables import showing, table_lines

_MOST_WARNINGS: Final = 5
_EXACT: Final = 0.0005
"""A band that is narrower than this share of the step is not shown."""


def predict_text(answer: PredictedSteps, *, width: int, top: int) -> str:
    """The whole answer as text; `top` devices, 0 for all."""
    shown = answer.predictions[:top] if top else answer.predictions
    parts = [*_head(answer, width)]
    if any(each.step_ns is not None for each in shown):
        parts += _table(answer, shown, width)
    parts += [
        *_sentences(answer, shown, width),
        "",
        *_basis(shown, width, from_shapes=answer.from_shapes),
        *_notes(answer, shown, width),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def step_text(prediction: StepPrediction) -> str:
    """Such as "41.0 ms (36.2 to 47.1 ms)"; empty where no time is given."""
    if prediction.step_ns is None or prediction.low_ns is None or prediction.high_ns is None:
        return ""
    step = duration(prediction.step_ns)
    if prediction.high_ns - prediction.low_ns < _EXACT * prediction.step_ns:
        return step
    low, high = duration(prediction.low_ns), duration(prediction.high_ns)
    if low == step == high:
        return step
    number, unit = low.split(" ")
    return f"{step} ({number if high.endswith(' ' + unit) else low} to {high})"


def prediction_sentence(prediction: StepPrediction, answer: PredictedSteps) -> str:
    """What happens on a device, and what helps."""
    if prediction.fits is False:
        return _does_not_fit(prediction)
    if prediction.step_ns is None:
        return prediction.notes[-1] if prediction.notes else "no step time is given"
    return _idle([] if prediction.busy_share is None else [1 - prediction.busy_share], answer) + _what_helps(prediction)


def _idle(shares: list[float], answer: PredictedSteps) -> str:
    """For which share of the step devices are idle, such as "idle for 1.0 % to 2.0 % of the step: "."""
    if not shares:
        return ""
    low, high = share(min(shares)), share(max(shares))
    return f"idle for {low if low == high else f'{low} to {high}'} of {_whole(answer)}: "


def _what_helps(prediction: StepPrediction) -> str:
    """What limits the steps, and where to read on."""
    match prediction.limit:
        case "host":
            most = f", most of it {printable(prediction.limit_cause)}" if prediction.limit_cause else ""
            return (
                f"the host limits it{most}, and is no faster there. stepscope diagnose tells why; stepscope whatif "
                "--graphs, what one launch a step would save"
            )
        case "input":
            return "batches limit it, which come no faster. stepscope diagnose tells what loads them"
        case "communication":
            return "communication limits it. stepscope whatif --overlap communication tells what hiding it would save"
        case "compute":
            return "arithmetic limits it. --precision asks for another number type"
        case "memory bandwidth":
            return "the bandwidth of memory limits it. stepscope diagnose tells what moves less of it"
    return "what limits it is not in the trace"


def _sentences(answer: PredictedSteps, shown: tuple[StepPrediction, ...], width: int) -> Iterator[str]:
    """What happens on each device; on several of which the same is true, once."""
    groups: dict[str, list[StepPrediction]] = {}
    for each in shown:
        alike = each.step_ns is not None and each.fits is not False
        groups.setdefault(_what_helps(each) if alike else _without_time(each), []).append(each)
    for what, alike_ones in groups.items():
        names = ", ".join(printable(each.device.name) for each in alike_ones)
        if len(alike_ones) == 1 or alike_ones[0].step_ns is None or alike_ones[0].fits is False:
            sentence = prediction_sentence(alike_ones[0], answer) if len(alike_ones) == 1 else what
        else:
            idle = [1 - each.busy_share for each in alike_ones if each.busy_share is not None]
            sentence = _idle(idle, answer) + what
        yield from filled(f"{names}: {sentence}.", width, "", "  ")


def _without_time(prediction: StepPrediction) -> str:
    """Why there is no time to choose, in words that hold for every device of which the same is true."""
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


def _head(answer: PredictedSteps, width: int) -> Iterator[str]:
    name = printable(answer.path).replace("\\", "/").rsplit("/", 1)[-1]
    on = f" on {printable(answer.device)}" if answer.device else ""
    if answer.stepped:
        steps = "1 step" if answer.step_count == 1 else f"mean of {count(answer.step_count)}"
        took = f"a step takes {duration(answer.measured_ns)}{on} ({steps})"
    else:
        took = f"{duration(answer.measured_ns)} recorded{on}, without steps"
    busy = "; no device's work was recorded"
    if answer.busy_share is not None:
        busy = f"; the device works {share(answer.busy_share)} of it"
    yield from filled(f"{name}: {took}{busy}.", width)
    if answer.devices > 1:
        yield from filled(f"The trace shows {count(answer.devices)} devices; the busiest counts.", width)
    if answer.why_not is not None:
        doubt = f"Not certain: {printable(answer.why_not)}."
        if any(each.step_ns is not None for each in answer.predictions):
            doubt += (
                " So the steps are not replayed: a time is what follows if the device's idle time stays as it is, and "
                "its range reaches to where host and device overlap completely."
            )
        yield from filled(doubt, width)
    for warning in answer.warnings[:_MOST_WARNINGS]:
        text = f"While reading: {count(warning.count)} x {printable(warning.kind)}: {printable(warning.detail)}."
        yield from filled(text, width)
    if len(answer.warnings) > _MOST_WARNINGS:
        yield f"While reading: {count(len(answer.warnings) - _MOST_WARNINGS)} more; stepscope diagnose names them."
    yield ""


def _table(answer: PredictedSteps, shown: tuple[StepPrediction, ...], width: int) -> Iterator[str]:
    how = f" in {answer.precision}" if answer.precision else ""
    if answer.batch != answer.recorded_batch:
        how += f" with {count(answer.batch or 0)} samples instead of {count(answer.recorded_batch or 0)}"
    bounds = answer.why_not is not None or answer.from_shapes
    range_words = "and between which bounds" if bounds else "and where nine of ten should lie"
    yield f"What {_whole(answer)} would take{how}, {range_words}"
    rows = [
        {
            "device": each.device.name,
            "step": _step_cell(each),
            "speed_up": None if each.fits is False or each.speed_up is None else f"{each.speed_up:.2f} x",
            "samples_per_s": None if each.fits is False else each.samples_per_s,
            "busy_share": None if each.fits is False else each.busy_share,
            "limit": None if each.fits is False else each.limit,
            "fits_memory": each.fits,
        }
        for each in shown
    ]
    table = pl.DataFrame(rows, schema=_COLUMNS)
    table = table.drop([name for name in ("samples_per_s", "fits_memory") if table[name].null_count() == table.height])
    yield from ("  " + line for line in table_lines(table, width=width - 2))
    cut = showing(len(shown), len(answer.predictions), "devices")
    if cut:
        yield f"  {cut}"
    yield ""


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


def _basis(shown: tuple[StepPrediction, ...], width: int, *, from_shapes: bool) -> Iterator[str]:
    """Which share of the device's time was predicted how."""
    names = list(dict.fromkeys(basis for each in shown for basis, _ in each.bases))
    if not names:
        return
    whose = "operators'" if from_shapes else "device's"
    yield f"What that rests on: share of the {whose} measured time by how it was predicted"
    groups: dict[tuple[tuple[str, str], ...], list[StepPrediction]] = {}
    for each in shown:
        groups.setdefault(tuple((basis, share(part)) for basis, part in each.bases), []).append(each)
    rows = [
        {"device": ", ".join(each.device.name for each in alike)}
        | {f"{basis}_share": part for basis, part in alike[0].bases}
        for alike in groups.values()
    ]
    schema = {"device": pl.String} | {f"{basis}_share": pl.Float64 for basis in names}
    yield from ("  " + line for line in table_lines(pl.DataFrame(rows, schema=schema), width=width - 2))
    yield ""


def _notes(answer: PredictedSteps, shown: tuple[StepPrediction, ...], width: int) -> Iterator[str]:
    """What was assumed or refused; once where it holds for every device."""
    found: dict[str, list[str]] = {}
    for each in shown:
        own = each.notes[:-1] if each.step_ns is None else each.notes  # the last says why there is no time
        for note in dict.fromkeys(own):
            found.setdefault(_on_any(note, each), []).append(each.device.name)
    for note, devices in found.items():
        whom = "" if len(devices) == len(shown) else f"{', '.join(map(printable, devices))}: "
        yield from filled(f"Note: {whom}{printable(note)}.", width, "", "  ")
    memory = answer.memory
    if memory.bytes is None:
        yield from filled(f"Note: {printable(memory.note)}, so that nothing tells what fits.", width, "", "  ")
    else:
        least = "at least " if memory.at_least else ""
        yield from filled(f"Memory: {least}{size(memory.bytes)}, {printable(memory.note)}.", width, "", "  ")


SCHEMA: Final = 1


def predict_json(answer: PredictedSteps) -> dict[str, Any]:
    """Everything in an answer as plain values: times in nanoseconds, shares from 0 to 1, null for what is not known."""
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "trace": {
            "path": answer.path,
            "format": answer.format,
            "warnings": [dataclasses.asdict(each) for each in answer.warnings],
        },
        "steps": {"source": "recorded" if answer.stepped else "none", "count": answer.step_count},
        "step_ns": answer.measured_ns,
        "device": answer.device,
        "devices": answer.devices,
        "busy_share": answer.busy_share,
        "from_shapes": answer.from_shapes,
        "why_not": answer.why_not,
        "precision": answer.precision,
        "batch": answer.batch,
        "recorded_batch": answer.recorded_batch,
        "memory": dataclasses.asdict(answer.memory),
        "predictions": [_prediction(each) for each in answer.predictions],
    }


def _prediction(prediction: StepPrediction) -> dict[str, Any]:
    return {
        "device": prediction.device.name,
        "step_ns": prediction.step_ns,
        "low_ns": prediction.low_ns,
        "high_ns": prediction.high_ns,
        "speed_up": prediction.speed_up,
        "samples_per_s": prediction.samples_per_s,
        "device_ns": prediction.device_ns,
        "busy_share": prediction.busy_share,
        "host_ns": prediction.host_ns,
        "limit": prediction.limit,
        "limit_share": prediction.limit_share,
        "limit_cause": prediction.limit_cause,
        "memory_bytes": prediction.memory_bytes,
        "device_memory_bytes": prediction.device.memory_bytes,
        "fits": prediction.fits,
        "bases": dict(prediction.bases),
        "notes": list(prediction.notes),
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


def scaling_text(device: str, link: Link | None, steps: Sequence[ScaledStep], *, width: int) -> str:
    """A table of the numbers of devices, what its columns mean, and what was not counted.

    Args:
        device: what they are, such as "H100-SXM"; "" where that is not known.
    """
    return "\n".join(_lines(device, link, steps, width)) + "\n"


def scaling_json(device: str, link: Link | None, steps: Sequence[ScaledStep]) -> dict[str, Any]:
    """The same as plain values: times in nanoseconds, shares from 0 to 1, null for what is not known."""
    return {
        "device": device or None,
        "link": None if link is None else _link(link),
        "steps": [dataclasses.asdict(each) for each in steps],
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "bandwidth_bytes_s": link.bandwidth_bytes_s,
        "fitted": link.fitted,
        "error": link.error,
        "source": link.source,
    }


def _lines(device: str, link: Link | None, steps: Sequence[ScaledStep], width: int) -> Iterator[str]:
    what = f"on several {printable(device)}" if device else "on several devices"
    name = "" if link is None else "the recorded link" if link.fitted else printable(link.name)
    over = "" if link is None else f" over {name} ({link.bandwidth_bytes_s / 1e9:.4g} GB/s)"
    yield f"What a step would take {what}{over}, each with a batch as large as the recorded one"
    first = steps[0]
    rows = [
        {
            "devices": each.devices,
            "step": _step(each),
            "throughput": f"{each.devices * each.efficiency:.2f} x",
            "samples_per_s": each.samples_per_s,
            "efficiency_share": each.efficiency,
            "communication": duration(each.communication_ns),
            "exposed": duration(each.exposed_ns),
            "stragglers": duration(each.straggler_ns),
        }
        for each in steps
    ]
    table = pl.DataFrame(rows, schema=_TEXT_COLUMNS)
    if first.samples_per_s is None:
        table = table.drop("samples_per_s")
    if not any(each.straggler_ns for each in steps):
        table = table.drop("stragglers")
    yield from ("  " + line for line in table_lines(table, width=width - 2))
    meaning = (
        "efficiency: of as many times one device's throughput; communication: all messages of a step; exposed: by how "
        "much they make it longer"
    )
    if first.recorded_ranks > 1:
        meaning += ", with waiting for late ranks and slower computation beside them: it can exceed communication"
    if "stragglers" in table.columns:
        meaning += "; stragglers: waiting for the slowest device, as the recorded steps vary"
    yield from filled(meaning, width, "  ", "  ")
    for note in dict.fromkeys(note for each in steps for note in each.notes):
        yield from filled(f"Note: {printable(note)}.", width, "", "  ")


def _step(step: ScaledStep) -> str:
    whole = duration(step.step_ns)
    if step.high_ns - step.low_ns < _EXACT * step.step_ns:
        return whole
    low, high = duration(step.low_ns), duration(step.high_ns)
    number, unit = low.split(" ")
    return f"{whole} ({number if high.endswith(' ' + unit) else low} to {high})"
