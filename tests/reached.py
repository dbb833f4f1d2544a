"""What kernels reached and could save, computed again from the tables' rows in plain Python, by formulas of its own.

Peaks are those of the table of devices; all else that an inefficient-kernel finding says of a kernel follows here from
shapes, types, durations and the rule's thresholds, without the analyses that the rule uses.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from stepscope.analysis.roofline import peaks_or_bounds
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.rules.inefficient_kernel import RULE
from stepscope.diagnosis.view import View
from tests.recount import Recount, Row

_TITLE: Final = re.compile(
    r"the [a-z -]+? (?P<name>\S+) of (?P<shapes>[\dx]+(?: and [\dx]+)*) reaches (?:at most )?(?P<share>[\d.]+)% of the "
    r"device's (?P<peak>arithmetic peak|memory bandwidth)"
)
_BYTES: Final = {"double": 8, "float": 4, "half": 2, "bfloat16": 2, "long": 8, "int": 4, "bool": 1, "long int": 8}
_PEAKS: Final = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16"}
_KINDS: Final = ("compute", "copy_on_device", "set")


def differences(finding: Finding, view: View) -> list[str]:
    """What a finding about an inefficient kernel says otherwise than the tables; [] for other rules."""
    return [*_differences(finding, view)] if finding.rule == RULE.id else []


def _differences(finding: Finding, view: View) -> Iterator[str]:
    title = _TITLE.match(finding.title)
    if title is None:
        yield f"not understood: {finding.title}"
        return
    figures = {figure.name: figure.value for figure in finding.evidence.figures}
    answers = [[*_compared(calls, figures, title, finding, view)] for calls in _calls(title, view)]
    if not any(answer == [] for answer in answers):
        yield from min(answers, key=len, default=["no such calls"])


def _calls(title: re.Match[str], view: View) -> Iterator[list[tuple[Row, list[Row]]]]:
    """The operators of one name and shapes with their kernels, for each set of types and values."""
    recount = Recount(view)
    works: dict[int, list[Row]] = defaultdict(list)
    for work in recount.work:
        if work["kind"] in _KINDS and work["launch"] is not None:
            works[recount.launches[work["launch"]]["operator"]].append(work)
    all_works = Counter(
        recount.launches[launch]["operator"] for launch in view.trace.device_work["launch"].drop_nulls()
    )
    groups: dict[tuple[str, str], list[tuple[Row, list[Row]]]] = defaultdict(list)
    for number, row in enumerate(view.trace.operators.rows(named=True)):
        if len(works[number]) < max(all_works[number], 1) or not row["input_shapes"]:
            continue
        if row["name"].removeprefix("aten::") == title["name"]:
            shown = ["x".join(map(str, each)) for each in json.loads(row["input_shapes"]) if each and len(each) > 1][:2]
            if shown == title["shapes"].split(" and ") and _is_long(works[number]):
                groups[row["input_shapes"], row["input_types"]].append((row, works[number]))
    yield from groups.values()


def _is_long(works: Sequence[Row]) -> bool:
    long = sum(work["duration_ns"] for work in works if work["duration_ns"] >= 10_000)
    return bool(long > 0.5 * sum(work["duration_ns"] for work in works))


def _compared(
    calls: list[tuple[Row, list[Row]]], figures: dict[str, float], title: re.Match[str], finding: Finding, view: View
) -> Iterator[str]:
    assert view.device is not None
    peaks = peaks_or_bounds(view.trace, view.device)
    assert peaks is not None
    flops, moved, kind = _work(calls[0][0])
    uses_tf32 = kind == "fp32" and any(
        "tf32" in work["name"] or "s1688" in work["name"] for _, all in calls for work in all
    )
    peak = peaks.flops_s["tf32" if uses_tf32 else kind] if flops else 1.0
    compute_ns, memory_ns = flops / peak * 1e9, moved / peaks.bandwidth_bytes_s * 1e9
    each_ns = [sum(work["duration_ns"] for work in works) for _, works in calls]
    total = sum(each_ns)
    limit = "arithmetic peak" if compute_ns > memory_ns else "memory bandwidth"
    if limit != title["peak"]:
        yield f"limited by {limit}"
    expected = {
        "share of the arithmetic peak": compute_ns * len(calls) / total,
        "share of the memory bandwidth": memory_ns * len(calls) / total,
        "TFLOP/s reached": flops * len(calls) / total / 1e3,
        "GB/s reached": moved * len(calls) / total,
        f"time on the device {view.per}": total // view.step_count,
        f"calls {view.per}": len(calls) / view.step_count,
    }
    for name, value in expected.items():
        if name in figures and abs(figures[name] - value) > 1e-6 * max(abs(value), 1e-9):
            yield f"{name}: {figures[name]}, counted again {value}"
    said = max(expected["share of the arithmetic peak"], expected["share of the memory bandwidth"])
    if abs(100 * said - float(title["share"])) > 0.51 * (1 if said >= 0.01 else 0.1):
        yield f"{title['share']}% instead of {said:.2%}"
    limits = RULE.limits(view)
    good = limits["attention" if "attention" in calls[0][0]["name"] else "arithmetic"] * peaks.best_share
    wanted_ns = max(compute_ns / good, memory_ns / limits["bandwidth"])
    above_ns = sum(max(ns - wanted_ns, 0.0) for ns in each_ns) / view.step_count
    if finding.saving_ns_per_step > 1.02 * above_ns + 1:
        yield f"saves {finding.saving_ns_per_step}, of {above_ns:.0f} above what good kernels take"
    if said >= 0.8 * (peaks.best_share if limit == "arithmetic peak" else 0.85):
        yield f"is close to what the device can do: {said:.0%}"


def _work(row: Row) -> tuple[int, int, str]:
    """Operations, bytes and number type of a call, from its inputs alone."""
    shapes = [each if isinstance(each, list) and all(isinstance(one, int) for one in each) else []
              for each in json.loads(row["input_shapes"])]  # fmt: skip
    types = [each.removeprefix("c10::").lower() for each in json.loads(row["input_types"])]
    values = json.loads(row["input_values"] or "[]")
    sizes = [prod(shape) * _BYTES.get(kind, 0) if shape else 0 for shape, kind in zip(shapes, types, strict=False)]
    name, first = row["name"].removeprefix("aten::").rstrip("_"), next(kind for kind in types if kind in _PEAKS)
    width, kind = _BYTES[first], _PEAKS[first]
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = (1, 2) if "add" in name else (0, 1)
        outputs = prod(shapes[left][:-1]) * shapes[right][-1]
        return 2 * outputs * shapes[left][-1], sum(sizes[: right + 1]) + outputs * width, kind
    if "convolution" in name:
        return (*_convolution(shapes, sizes, values, width), kind)
    if "attention" in name:
        return (*_attention(name, shapes, sizes, values), kind)
    if "moe" in name or "experts" in name:
        (tokens, _), up, down, (_, chosen) = shapes[:4]
        weights = prod(up[1:]) + prod(down[1:])
        return 2 * tokens * chosen * weights, 2 * sizes[0] + sizes[3] + chosen * weights * width, kind
    if name in ("native_layer_norm", "_softmax", "softmax", "_log_softmax"):
        return 0, 2 * sizes[0] + (sizes[2] + sizes[3] if "norm" in name else 0), kind
    longest = max(len(shape) for shape in shapes)
    padded = [[1] * (longest - len(shape)) + shape for shape in shapes if shape]
    widest = max(_BYTES[kind] for kind in types if kind in _PEAKS)
    return 0, sum(sizes) + prod(map(max, zip(*padded, strict=True))) * widest, kind


def _convolution(shapes: list[list[int]], sizes: list[int], values: list[str], width: int) -> tuple[int, int]:
    numbers = [[int(one) for one in re.findall(r"-?\d+", text)] for text in values]
    (batch, _, *image), weight = shapes[0], shapes[1]
    step, pad, gap = numbers[3:6]
    sides = zip(image, weight[2:], step, pad, gap, strict=True)
    if values[6] == "True":
        out = [(size - 1) * by - 2 * edge + apart * (side - 1) + 1 for size, side, by, edge, apart in sides]
        written = batch * weight[1] * int(values[8]) * prod(out) * width
        return 2 * batch * prod(image) * prod(weight), sizes[0] + sizes[1] + written
    out = [(size + 2 * edge - apart * (side - 1) - 1) // by + 1 for size, side, by, edge, apart in sides]
    return 2 * batch * prod(out) * prod(weight), sum(sizes[:3]) + batch * prod(out) * weight[0] * width


def _attention(name: str, shapes: list[list[int]], sizes: list[int], values: list[str]) -> tuple[int, int]:
    batch, queries, heads, size = shapes[0]
    keys, is_causal = shapes[1][1], values[8] == "True"
    if "scaled_dot_product" in name:
        heads, queries, keys = shapes[0][1], shapes[0][2], shapes[1][2]
        is_causal = values[4 if "flash" in name else 6 if "efficient" in name or "cudnn" in name else 5] == "True"
    pairs = sum(min(row + 1, keys) for row in range(queries)) if is_causal else queries * keys
    return 4 * batch * heads * pairs * size, sum(sizes[:3]) + sizes[0]
