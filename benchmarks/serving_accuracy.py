"""How near the times of serving come to published measurements, beside the first prediction and the roofline.

    python benchmarks/serving_accuracy.py [--cases] [--by source|device|weights|devices|batch|prompt] [--write]

The cases are in `serving_cases.csv`, their models in `serving_models.json` (Hugging Face's configurations, as far as
they matter), and where they are from in `serving_sources.csv`. A source is for development or for the test, as a whole:
mechanisms were chosen by the former alone. `first_ms` was predicted before a source's measurements were looked at, or
for the older ones before the sources were divided.

What a source's engine does otherwise than today's is there too, by its code or its makers' word: TurboMind's first
token ends the decoding of the prompts' last tokens (`LlamaBatch::ContextDecode`); TensorRT-LLM 0.5 reads the cache once
for each query head (https://github.com/NVIDIA/TensorRT-LLM/issues/407); and these and FasterTransformer sum by the
communication library (`ftNcclAllReduceSum`; the builds of TensorRT-LLM's page lack `--use_custom_all_reduce`).

A total is what a whole batch takes; `tokens` is the time of a thousand tokens at the highest throughput, with as many
requests as fit where the source does not say how many. `roofline` is the least time at the datasheet's peaks, without
links.

--cases     every case with its error in percent
--write     the tables of docs/serving.md anew
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

import numpy as np  # noqa: E402

from stepscope.machine.devices import named_device  # noqa: E402
from stepscope.predict.limits import link_of  # noqa: E402
from stepscope.predict.model_shape import ModelShape, model_of  # noqa: E402
from stepscope.predict.serving import PassTime, ServingPrediction, ServingRequest, serving_prediction  # noqa: E402

SETS = ("development", "test")
PHASES = {
    "prefill": "first token",
    "decode": "each further token",
    "total": "whole batches",
    "tokens": "highest throughput",
}
HEAD: Final[tuple[str, ...]] = ("", "measured", "first", "now", "bias", "spread", "roofline", "in range")
PAGE = HERE.parent / "docs" / "serving.md"
WRITTEN = {"source": "{}", "weights": "{}", "devices": "devices: {}", "prompt": "tokens of a prompt: {}"}
PROMPTS = ("128", "2048", "5000")  # of most cases
COLUMNS = ("source", "device", "weights", "devices", "batch", "prompt")
MOST_AT_ONCE: Final = 2048
"""Requests at once where as many as fit are served: the engine's own limit (TensorRT-LLM's default)."""


class Error(NamedTuple):
    """One measured time; errors are (predicted - measured) / measured."""

    case: dict[str, str]
    set: str
    phase: str
    measured_ms: float
    first: float
    error: float
    roofline: float
    is_inside: bool  # whether the range holds it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--by", choices=COLUMNS)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    errors = list(_errors())
    if arguments.cases:
        for each in errors:
            case = each.case
            what = f"{case['batch']} x {case['prompt']}+{case['output']} on {case['devices']}"
            print(
                f"{case['source']:24} {case['model']:14} {case['device']:16} {case['weights']} {what:20} {each.phase:8}"
                f"{each.measured_ms:10.1f} ms {each.first:+7.1%} {each.error:+7.1%} {each.roofline:+7.1%}"
                f" {'' if each.is_inside else 'outside'}"
            )
    if arguments.write:
        _write(errors)
    for row in _rows_of(errors, arguments.by):
        print(row[0].ljust(32) + "".join(cell.rjust(10) for cell in row[1:]))
    return 0


def _write(errors: list[Error]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    split: list[tuple[str, ...]] = [HEAD]
    for by in WRITTEN:
        rows = _rows_of([each for each in errors if by != "prompt" or each.case[by] in PROMPTS], by)
        for name in SETS:
            begin = next(place for place, row in enumerate(rows) if row[0] == f"{name}, all")
            for row in takewhile(lambda row: row[0].startswith("  "), rows[begin + 1 :]):
                split.append((f"{name}: {WRITTEN[by].format(row[0].strip())}", *row[1:]))
    for mark, rows in (("accuracy", _rows_of(errors, None)), ("split", split)):
        lines = [f"| {' | '.join(row)} |" for row in rows]
        table = "\n".join([lines[0].replace("|  |", "| |"), "|---" + "|---:" * (len(HEAD) - 1) + "|", *lines[1:]])
        text = re.sub(rf"(<!-- {mark} -->\n).*?(\n<!-- /{mark} -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


def _errors() -> Iterator[Error]:
    models = json.loads((HERE / "serving_models.json").read_text(encoding="utf-8"))
    sources = {row["source"]: row for row in _rows("serving_sources.csv")}
    for case in _rows("serving_cases.csv"):
        source, measured = sources[case["source"]], float(case["measured_ms"])
        found = _prediction(case, source, model_of(models[case["model"]], case["model"]))
        decodings = 1 if source["first_token"] == "pass and decoding" else 0
        ns, low, high, roofline = _measured_part(found, case["phase"], decodings)
        yield Error(
            case,
            source["set"],
            case["phase"],
            measured,
            float(case["first_ms"]) / measured - 1,
            ns / 1e6 / measured - 1,
            roofline / 1e6 / measured - 1,
            low / 1e6 <= measured <= high / 1e6,
        )


def _rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _prediction(case: dict[str, str], source: dict[str, str], model: ModelShape) -> ServingPrediction:
    device = named_device(case["device"])
    numbers = {name: int(case[name]) for name in ("prompt", "output", "devices")}
    request = ServingRequest(**numbers, weights=case["weights"], cache=case["cache"])
    link = link_of(device)
    if link is not None and source["sums_by"] == "library":
        link = replace(link, hardware="")  # as one that was given: without the engines' own sums
    if case["batch"] == "most":
        most = serving_prediction(model, request, device).most_requests or 1
        request = replace(request, batch=min(most, MOST_AT_ONCE))
    else:
        request = replace(request, batch=int(case["batch"]))
    found = serving_prediction(model, request, device, link)
    if source["cache_read_by"] == "each query head" and model.heads > model.kv_heads:
        grown = (request.output - 1) / 2
        as_much = round(model.heads / model.kv_heads * (request.prompt + grown) - grown)
        return replace(found, decode=serving_prediction(model, replace(request, prompt=as_much), device, link).decode)
    return found


def _measured_part(found: ServingPrediction, phase: str, decodings: int) -> tuple[float, float, float, float]:
    """Expected time, its range and the roofline of what was measured.

    Args:
        decodings: that end with the first token, beside the pass over the prompts.
    """
    first, then = found.prefill, found.decode
    if first is None or then is None:
        raise SystemExit(f"nothing is predicted on {found.device.name}: {'; '.join(found.notes) or 'it does not fit'}")
    if phase == "prefill":
        return _sum(first, then, 1, decodings)
    if phase == "decode":
        return _sum(first, then, 0, 1)
    whole = _sum(first, then, 1, found.request.output - 1 + decodings)
    if phase == "total":
        return whole
    scale = 1e12 / (found.tokens_per_s or np.nan) / whole[0]
    return whole[0] * scale, whole[1] * scale, whole[2] * scale, whole[3] * scale


def _sum(first: PassTime, then: PassTime, prompts: int, decodings: int) -> tuple[float, float, float, float]:
    return (
        prompts * first.ns + decodings * then.ns,
        prompts * first.low_ns + decodings * then.low_ns,
        prompts * first.high_ns + decodings * then.high_ns,
        prompts * first.roofline_ns + decodings * then.roofline_ns,
    )


def _rows_of(errors: list[Error], by: str | None) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [HEAD]
    for name in SETS:
        of_set = [each for each in errors if each.set == name]
        for phase in (*PHASES, "all"):
            chosen = [each for each in of_set if phase in (each.phase, "all")]
            if not chosen:
                continue
            rows.append((f"{name}, {PHASES.get(phase, phase)}", *_cells(chosen)))
            parts: dict[str, list[Error]] = {}
            for each in chosen if by else ():
                parts.setdefault(each.case[by or ""], []).append(each)
            rows += [(f"  {value}", *_cells(parts[value])) for value in sorted(parts, key=_number_first)]
    return rows


def _number_first(value: str) -> tuple[float, str]:
    return (float(value) if value.isdigit() else np.inf, value)


def _cells(errors: list[Error]) -> tuple[str, ...]:
    """The number of cases; percent off at first and now, the mean and its deviation; the roofline's; in the range."""
    first, off, roof = (
        100 * np.array([getattr(each, name) for each in errors]) for name in ("first", "error", "roofline")
    )
    inside = np.mean([each.is_inside for each in errors])
    return (
        str(len(errors)),
        *(f"{abs(each).mean():.1f}" for each in (first, off)),
        f"{off.mean():+.1f}",
        f"{off.std():.1f}",
        f"{abs(roof).mean():.1f}",
        f"{100 * inside:.0f} %",
    )


if __name__ == "__main__":
    raise SystemExit(main())
