"""Part 4: what remedies gain on real workloads, applied from outside, and what tune finds."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any, Final

from benchmarks.gpu_campaign.plan import At
from tests.zoo import measure

FLAGS: Final = {
    "gpt2": ("bf16", "tf32", "compile"),
    "resnet50": ("channels-last", "bf16"),
    "encoder": ("bf16",),
    "unet": ("channels-last", "bf16"),
    "dlrm": ("workers=4", "pin-memory,non-blocking"),
}
"""By workload: what is applied, each by itself, the most telling first."""
_LABELS: Final = "BCDEFG"


def program(at: At, name: str) -> list[str]:
    """The words that start a workload; it runs until what measures it has enough."""
    words = ["-m", "benchmarks.gpu_campaign.workloads", name, "--device", at.device, "--steps", "100000"]
    return [*words, *["--tiny"] * at.is_dry]


def gains(at: At, name: str) -> dict[str, Any]:
    """By what was applied: the step beside the unchanged one, by `stepscope bench`, with its 95 % interval."""
    flags = FLAGS[name][: 1 if at.is_dry else None]
    file = at.work / "bench.json"
    command = shlex.join([sys.executable, *program(at, name)])
    words = [sys.executable, "-m", "stepscope", "bench", *[command] * (1 + len(flags))]
    for label, flag in zip(_LABELS, flags, strict=False):
        words += ["--apply", f"{label}={flag}"]
    effort = ["--steps", "3", "--rounds", "2"] if at.is_dry else ["--steps", "30", "--rounds", "2"]
    measure.output_of([*words, *effort, "--budget", f"{max(at.seconds - 20, 5):.0f}s", "--json", str(file)], at.work)
    said = json.loads(file.read_text(encoding="utf-8"))
    runs = [run for command in said["commands"] for run in command["runs"]]
    found: dict[str, Any] = {"clock": sorted({run["clock"] for run in runs}), "gains": {}}
    for flag, comparison, command in zip(flags, said["comparisons"], said["commands"][1:], strict=True):
        found["gains"][flag] = {
            **{key: comparison[key] for key in ("before_ns", "after_ns", "change_low", "change_high")},
            "applied": [outcome for run in command["runs"][:1] for outcome in run["applied"]],
        }
    return found


def tuned(at: At, name: str) -> dict[str, Any]:
    """What `stepscope tune` keeps within four minutes."""
    file = at.work / "tune.json"
    effort = ["--budget", "1s", "--steps", "3", "--only", "garbage-at-steps"] if at.is_dry else ["--budget", "4m"]
    words = [sys.executable, "-m", "stepscope", "tune", *effort, "--folder", str(at.work / "studies")]
    measure.output_of([*words, "--json", str(file), *program(at, name)], at.work)
    said = json.loads(file.read_text(encoding="utf-8"))

    def told(trial: dict[str, Any]) -> dict[str, Any]:  # without machine and folders
        return {key: trial[key] for key in ("configuration", "outcome", "reason", "measured")}

    trials = [told(each) for each in said["trials"]]
    proof = told(said["proof"]) if said["proof"] else None
    return {"outcome": said["outcome"], "best": said["best"], "proof": proof, "trials": trials}
