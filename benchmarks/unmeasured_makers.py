"""How far a datasheet's figures times a constant are off for makers whose devices were never measured for the models.

    OMP_NUM_THREADS=1 python benchmarks/unmeasured_makers.py FOLDER

FOLDER holds traces. The models learned from NVIDIA's devices only, so every device of another maker was left out. Of
each of its traces the operators of known work are grouped by kind, and a group's factor is its measured time over the
predicted one. Nine of ten groups lie between the factors that are printed first (each trace weighs the same, each group
by its time); `stepscope.predict.operations.UNMEASURED` has them. Then each trace is left out: do the groups of the
others hold what all its operators took? Last, recordings of one program on devices of two makers predict each other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

from stepscope.analysis.roofline import device_peaks  # noqa: E402
from stepscope.errors import StepscopeError  # noqa: E402
from stepscope.machine.devices import DevicePeaks, is_nvidia, named_device  # noqa: E402
from stepscope.predict.operation_times import operation_times  # noqa: E402
from stepscope.predict.operations import UNMEASURED, types_on  # noqa: E402
from stepscope.predict.prediction import StepPredictor  # noqa: E402
from stepscope.predict.trace_operations import CalledOperations  # noqa: E402
from stepscope.readers import open_trace  # noqa: E402
from stepscope.whatif.experiment import Experiment  # noqa: E402

ENDS: Final = (0.05, 0.95)
PAIRS: Final = (
    ("kineto/h100_qwen_chat.json.gz", "second/mi300x_qwen_chat.json.gz"),
    ("second/h100_timesformer.json.gz", "second/mi300x_timesformer.json.gz"),
)
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Left:
    """The operators of one trace: by kind, nanoseconds measured and predicted."""

    name: str
    device: DevicePeaks
    measured: Numbers
    predicted: Numbers

    @property
    def together(self) -> float:
        return float(self.measured.sum() / self.predicted.sum())


def left_out(folder: Path) -> list[Left]:
    """The traces of devices of other makers that show shapes."""
    paths = sorted(path for path in folder.rglob("*.json.gz") if "rank" not in path.name or "rank0" in path.name)
    return [found for path in paths if (found := _left(path, folder)) is not None]


def _left(path: Path, folder: Path) -> Left | None:
    try:
        trace = open_trace(path)
    except StepscopeError:
        return None
    works = trace.device_work
    device = device_peaks(trace, str(works["device"].drop_nulls().first() or "")) if works.height else None
    if device is None or is_nvidia(device) or trace.operators.is_empty():
        return None
    calls = CalledOperations(trace)
    predicted = operation_times(types_on(calls.operations, device), device).ns
    of = calls.of_work
    ns = works["duration_ns"].fill_null(0).to_numpy().astype(np.float64)
    measured = np.bincount(of[of >= 0], ns[of >= 0], len(predicted)).astype(np.float64)
    known = (measured > 0) & np.isfinite(predicted) & calls.known
    kinds = calls.operations.kind[known]
    sums = [
        (measured[known][kinds == kind].sum(), predicted[known][kinds == kind].sum())
        for kind in np.unique(kinds).tolist()
    ]
    if not sums:
        return None
    return Left(str(path.relative_to(folder)), device, *np.array(sums).T)


def ends_of(traces: list[Left]) -> tuple[float, float]:
    """The factors between which nine of ten groups lie."""
    factors = np.concatenate([each.measured / each.predicted for each in traces])
    weights = np.concatenate([each.measured / each.measured.sum() for each in traces])
    order = np.argsort(factors)
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = (factors[order][min(int(np.searchsorted(reached, end)), len(order) - 1)] for end in ENDS)
    return float(low), float(high)


def main() -> None:
    folder = Path(sys.argv[1])
    traces = left_out(folder)
    low, high = ends_of(traces)
    print(f"{len(traces)} traces, {sum(len(each.measured) for each in traces)} groups: {low:.2f} to {high:.2f}", end="")
    used = " to ".join(map(str, UNMEASURED["AMD"]))
    print(f" (in use: {used})\n\ntrace | device | measured over predicted | others' | held")
    held = 0
    for each in traces:
        low, high = ends_of([other for other in traces if other is not each])
        held += low <= each.together <= high
        inside = "yes" if low <= each.together <= high else "no"
        print(f"{each.name} | {each.device.name} | {each.together:.2f} | {low:.2f} to {high:.2f} | {inside}")
    print(f"{held} of {len(traces)} held\n\nfrom | to | device ms measured | predicted | low | high")
    for pair in PAIRS:
        for source, target in (pair, pair[::-1]):
            _transfer(folder / source, folder / target)


def _transfer(source: Path, target: Path) -> None:
    """Device work of one recording on the device of the other: all of it, busy or not."""
    there = Experiment(open_trace(target))
    device = device_peaks(there.trace, there.device or "")
    assert device is not None
    predictor = StepPredictor(Experiment(open_trace(source)))
    found = predictor.on(named_device(device.name))
    times, _ = predictor.times_on(device)
    works, steps = predictor.experiment.works, predictor.experiment.step_count
    low, high = (float(np.nansum(ns[works])) / steps for ns in (times.low_ns, times.high_ns))
    goal = StepPredictor(there).replays.measured_device_ns
    values = " | ".join("?" if ns is None else f"{ns / 1e6:.1f}" for ns in (goal, found.device_ns, low, high))
    print(f"{source.name} | {device.name} | {values}")


if __name__ == "__main__":
    main()
