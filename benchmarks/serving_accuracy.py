"""How near the times of serving come to published measurements, beside the roofline.

    python benchmarks/serving_accuracy.py [--cases] [--by weights|device|engine|devices] [--markdown]

The cases are in `serving_cases.csv`, each with its source, and their models in `serving_models.json` (Hugging Face's
configurations, as far as they matter). They are for this comparison alone: no constant was chosen by them. A total is
what a whole batch takes, from its throughput; `roofline` is the least time at the datasheet's peaks, without links.

--cases     every case with its error in percent
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]

import numpy as np  # noqa: E402

from stepscope.machine.devices import named_device  # noqa: E402
from stepscope.predict.serving import ServingPrediction, ServingRequest, model_of, serving_prediction  # noqa: E402

PHASES = ("prefill", "decode", "total")


class Error(NamedTuple):
    """One measured time; errors are (predicted - measured) / measured."""

    case: dict[str, str]
    phase: str
    measured_ms: float
    error: float
    roofline_error: float
    is_inside: bool  # whether the range holds it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--by", choices=("weights", "device", "engine", "devices"))
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    errors = list(_errors())
    if arguments.cases:
        for each in errors:
            case = each.case
            what = f"{case['batch']} x {case['prompt']}+{case['output']} on {case['devices']}"
            print(
                f"{case['engine']:20} {case['model']:14} {case['device']:16} {case['weights']} {what:20} {each.phase:8}"
                f"{each.measured_ms:10.1f} ms {each.error:+7.1%} {each.roofline_error:+7.1%}"
                f" {'' if each.is_inside else 'outside'}"
            )
    print(_table(errors, arguments.by, markdown=arguments.markdown))
    return 0


def _errors() -> Iterator[Error]:
    models = json.loads((HERE / "serving_models.json").read_text(encoding="utf-8"))
    with (HERE / "serving_cases.csv").open(encoding="utf-8") as file:
        for case in csv.DictReader(file):
            numbers = {name: int(case[name]) for name in ("batch", "prompt", "output", "devices")}
            request = ServingRequest(**numbers, weights=case["weights"], cache=case["cache"])
            model = model_of(models[case["model"]], case["model"])
            found = serving_prediction(model, request, named_device(case["device"]))
            for phase in PHASES:
                if case[f"{phase}_ms"]:
                    measured = float(case[f"{phase}_ms"])
                    ns, low, high, roofline = _predicted(found, phase)
                    yield Error(
                        case,
                        phase,
                        measured,
                        ns / 1e6 / measured - 1,
                        roofline / 1e6 / measured - 1,
                        low / 1e6 <= measured <= high / 1e6,
                    )


def _predicted(found: ServingPrediction, phase: str) -> tuple[float, float, float, float]:
    first, then, total = found.prefill, found.decode, found.total
    if first is None or then is None or total is None:
        raise SystemExit(f"nothing is predicted on {found.device.name}: {'; '.join(found.notes) or 'it does not fit'}")
    if phase == "total":
        return *total, first.roofline_ns + (found.request.output - 1) * then.roofline_ns
    each = first if phase == "prefill" else then
    return each.ns, each.low_ns, each.high_ns, each.roofline_ns


def _table(errors: list[Error], by: str | None, *, markdown: bool) -> str:
    rows = [("", "cases", "error", "bias", "roofline", "in range")]
    for phase in (*PHASES, "all"):
        chosen = [each for each in errors if phase in (each.phase, "all")]
        rows.append((phase, *_cells(chosen)))
        for value in sorted({each.case[by] for each in chosen}) if by else ():
            rows.append((f"{phase}, {value}", *_cells([each for each in chosen if each.case[by] == value])))
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])
    return "\n".join(row[0].ljust(32) + "".join(cell.rjust(10) for cell in row[1:]) for row in rows)


def _cells(errors: list[Error]) -> tuple[str, ...]:
    """The number of cases, percent off, the mean, the roofline's percent off, and how many lie in the range."""
    off, roof = (100 * np.array([getattr(each, name) for each in errors]) for name in ("error", "roofline_error"))
    inside = np.mean([each.is_inside for each in errors])
    return str(len(errors)), f"{abs(off).mean():.1f}", f"{off.mean():+.1f}", f"{abs(roof).mean():.1f}", f"{inside:.0%}"


if __name__ == "__main__":
    raise SystemExit(main())
