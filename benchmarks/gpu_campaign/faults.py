"""Part 3: planted faults on the device: recorded, diagnosed, and timed by the device's events without a profiler."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_campaign.plan import At, NotHere
from stepscope.commands import main
from tests.zoo import measure, registry, verdict
from tests.zoo.gpu.registry import BEFORE_RECORDING, WARM_UP, fault
from tests.zoo.verdict import Findings

TWINS = ("fault", "clean")


def planted(at: At, name: str) -> dict[str, Any]:
    """Judge a program of tests/zoo/gpu: a row of the accuracy table."""
    one = fault(name)
    if at.device.startswith("cuda") and one.capability > (0, 0):
        import torch

        if torch.cuda.get_device_capability(at.device) < one.capability:
            raise NotHere(f"the twin needs compute capability {'.'.join(map(str, one.capability))}")
    timed = 2 if at.is_dry else 20
    warm_up = WARM_UP + timed + BEFORE_RECORDING
    options = ("--warmup", str(warm_up), "--exit-after", *(("--steps", "2") if at.is_dry else ()))
    found, times = {}, {}
    for twin in TWINS:
        file = at.work / f"{twin}-times.json"
        words = ["-m", "tests.zoo.gpu", name, f"--{twin}", "--device", at.device, *["--tiny"] * at.is_dry]
        words += ["--timed", str(timed), "--times", str(file), "--steps", str(warm_up + 12)]
        run = measure.record_words(words, twin, at.work, options)
        keep(at, run, twin)
        found[twin] = diagnosed(at, run)
        times[twin] = statistics.median(json.loads(file.read_text(encoding="utf-8")))

    def names_the_line(file: str, line: int) -> bool:
        return (Path(file).name, line) in one.lines

    judged = row(found, times, one.rules, names_the_line if one.has_place else None)
    if one.is_note:
        judged["is_first"] = any(each["rule"] in one.rules for each in found["fault"])
    return judged


def of_the_zoo(at: At, name: str) -> dict[str, Any]:
    """Judge a program of tests/zoo whose tensors are on the device."""
    program = registry.program(name)
    more = ["--device", at.device, *(["--steps", "15"] if at.is_dry else [])]
    found, times = {}, {}
    for twin in TWINS:
        run = measure.record(program, twin, at.work, more)
        keep(at, run, twin)
        found[twin] = diagnosed(at, run)
    timings = {twin: functools.partial(measure.step_ns, program, twin, more) for twin in TWINS}
    times = {twin: min(taken) for twin, taken in measure.in_turns(timings, 1).items()}
    return row(found, times, (program.rule,), program.names_the_line if program.has_place else None)


def row(
    found: dict[str, Findings],
    times: dict[str, float],
    rules: tuple[str, ...],
    names_the_line: Callable[[str, int], bool] | None,
) -> dict[str, Any]:
    """What was planted beside what was said; shares are of the step."""
    first = found["fault"][0] if found["fault"] else None
    place = verdict.line_of(first)
    rule = first["rule"] if first is not None else None
    promised = [verdict.promised(found["fault"], each) for each in rules]
    return {
        "rules": list(rules),
        "first": rule,
        "is_first": rule in rules if rules else None,
        "line_named": None if names_the_line is None else place is not None and names_the_line(*place),
        "promised_share": next((each[0] for each in promised if each is not None), None),
        "gained_share": 1 - times["clean"] / times["fault"],
        "fault_ns": times["fault"],
        "clean_ns": times["clean"],
        "said": [[each["rule"], round(each["saving_share"], 4), each["title"]] for each in found["fault"][:4]],
        "alarms": [list(each) for each in verdict.alarms(found["clean"])],
    }


def diagnosed(at: At, run: Path) -> Findings:
    """What stepscope finds in a run, in this process, which saves the start of another."""
    file = at.work / "report.json"
    with contextlib.redirect_stdout(None):
        code = main(["diagnose", str(run), "--json", str(file), "--no-cache"])
    if code:
        raise RuntimeError(f"stepscope diagnose ended with {code}")
    return measure.findings([json.loads(file.read_text(encoding="utf-8"))])


def keep(at: At, run: Path, name: str) -> None:
    """Carry the run's trace away, and what the recorder knows beside it."""
    for trace in sorted(run.glob("rank0/trace-*.json.gz"))[:1]:
        for file in (trace, trace.with_name(f"{trace.name}.lines")):
            if file.exists():
                shutil.copyfile(file, at.keep / file.name.replace(trace.name, f"trace-{name}.json.gz"))
