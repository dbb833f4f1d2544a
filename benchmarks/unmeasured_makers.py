"""How far operators' predicted times are off in public traces, and datasheets for makers who were never measured.

    OMP_NUM_THREADS=1 python benchmarks/unmeasured_makers.py FOLDER

FOLDER holds traces. First each kind of work is compared with what it took, on the devices that were recorded. The
models learned from NVIDIA's devices only, so every device of another maker was left out. Of each of its traces the
operators of known work are grouped by kind, and a group's factor is its measured time over the predicted one. Nine of
ten groups lie between the factors that are printed next (each trace weighs the same, each group by its time);
`stepscope.predict.operations.UNMEASURED` has them. Then each trace is left out: do the groups of the others hold what
all its operators took? Then recordings of one program on devices of two makers predict each other, for several shares
of the recorded kernels' band. Last, recordings of one program with several batch sizes predict each other.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]

from stepscope.analysis.roofline import device_peaks  # noqa: E402
from stepscope.errors import StepscopeError  # noqa: E402
from stepscope.machine.devices import DevicePeaks, is_nvidia, named_device  # noqa: E402
from stepscope.predict import work_times  # noqa: E402
from stepscope.predict.operation_times import operation_times  # noqa: E402
from stepscope.predict.operations import UNMEASURED, types_on  # noqa: E402
from stepscope.predict.prediction import StepPredictor  # noqa: E402
from stepscope.predict.trace_operations import CalledOperations  # noqa: E402
from stepscope.readers import open_trace  # noqa: E402
from stepscope.whatif.experiment import Experiment  # noqa: E402

ENDS: Final = (0.05, 0.95)
SHORT_NS: Final = 20_000.0
FEWEST: Final = 5
PAIRS: Final = (
    ("kineto/h100_qwen_chat.json.gz", "second/mi300x_qwen_chat.json.gz"),
    ("second/h100_timesformer.json.gz", "second/mi300x_timesformer.json.gz"),
)
SHARES: Final = (0.01, 0.25, 0.5, 0.7, 1.0, 1.4, 100.0)
SWEEP: Final = "second/a100_particle_bs{}.json.gz"
BATCHES: Final = (16, 128, 256, 512)
TESTS: Final = "second/"
"""The traces that no constant of a kernel was chosen by."""
SHORTEST_NS: Final = 20_000.0
"""Of one kind in a trace; less is not worth a mean."""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Left:
    """The operators of known work of one trace: nanoseconds by kind, measured, predicted, and how far calls are off."""

    name: str
    device: DevicePeaks
    kinds: list[str]
    measured: Numbers
    predicted: Numbers
    low: Numbers
    high: Numbers
    off: Numbers
    products: Numbers  # measured over predicted of each matrix product that is no short one

    @property
    def together(self) -> float:
        return float(self.measured.sum() / self.predicted.sum())


def left_out(folder: Path) -> list[Left]:
    """The traces of devices of other makers that show shapes."""
    return [one for one in predicted_operators(folder) if not is_nvidia(one.device)]


def predicted_operators(folder: Path) -> list[Left]:
    """The traces that show shapes, by the models that come with the package."""
    return [found for path in trace_paths(folder) if (found := _left(path, folder)) is not None]


def trace_paths(folder: Path) -> list[Path]:
    """Every trace of a program in the folder, the first rank's of a job whose files lie together."""
    paths = sorted(path for path in folder.rglob("*.json.gz") if "stragglers" not in path.parts)
    jobs = {path.parent for path in paths if "rank" in path.parent.name}
    before = [None, *(path.parent for path in paths[:-1])]
    return [path for path, last in zip(paths, before, strict=True) if path.parent not in jobs or path.parent != last]


def _left(path: Path, folder: Path) -> Left | None:
    try:
        trace = open_trace(path)
    except StepscopeError:
        return None
    works = trace.device_work
    device = device_peaks(trace, str(works["device"].drop_nulls().first() or "")) if works.height else None
    if device is None or trace.operators.is_empty():
        return None
    calls = CalledOperations(trace)
    times = operation_times(types_on(calls.operations, device), device)
    predicted = times.ns
    of = calls.of_work
    ns = works["duration_ns"].fill_null(0).to_numpy().astype(np.float64)
    measured = np.bincount(of[of >= 0], ns[of >= 0], len(predicted)).astype(np.float64)
    known = (measured > 0) & np.isfinite(predicted) & calls.known
    kinds = sorted(set(calls.operations.kind[known].tolist()))
    sums = np.zeros((5, len(kinds)))
    for place, kind in enumerate(kinds):
        mine = known & (calls.operations.kind == kind)
        off = np.abs(predicted[mine] - measured[mine])
        columns = (measured[mine], predicted[mine], times.low_ns[mine], times.high_ns[mine], off)
        sums[:, place] = [float(column.sum()) for column in columns]
    long = known & (calls.operations.kind == "matrix") & (predicted > SHORT_NS)
    products = measured[long] / predicted[long]
    if not kinds:
        return None
    return Left(str(path.relative_to(folder)), device, kinds, sums[0], sums[1], sums[2], sums[3], sums[4], products)


def _print_kinds(traces: list[Left]) -> None:
    """Mean error of each kind's time over traces: of those by which constants were chosen, and of the others."""
    for chosen, words in ((True, "constants were chosen by these"), (False, "these had no part in them")):
        print(f"traces: {words}\nkind | traces | mean error, % | mean bias, %\n---|---:|---:|---:")
        mine = [one for one in traces if (not one.name.startswith(TESTS)) is chosen]
        for kind in sorted({kind for one in mine for kind in one.kinds}):
            places = [(one, one.kinds.index(kind)) for one in mine if kind in one.kinds]
            places = [(one, at) for one, at in places if one.measured[at] > SHORTEST_NS]
            if places:
                off = np.mean([one.off[at] / one.measured[at] for one, at in places])
                bias = np.mean([one.predicted[at] / one.measured[at] - 1 for one, at in places])
                print(f"{kind} | {len(places)} | {100 * off:.0f} | {100 * bias:+.0f}")
        print()


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
    every = predicted_operators(folder)
    _print_kinds(every)
    traces = [one for one in every if not is_nvidia(one.device)]
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
    medians = [float(np.median(each.products)) for each in traces if len(each.products) >= FEWEST]
    print(f"products: {np.median(medians):.2f} times the prediction, the median of {len(medians)} traces' medians")
    print(f"{held} of {len(traces)} held\n\nfrom | to | device ms measured | predicted | low | high")
    for pair in PAIRS:
        for source, target in (pair, pair[::-1]):
            _transfer(folder / source, folder / target)
    _print_shares(folder)
    _print_batches(folder)


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


def _print_shares(folder: Path) -> None:
    """Error of each pair's device work, either way, by how much recorded kernels count: one chooses for the other."""
    recorded = [[Experiment(open_trace(folder / name)) for name in pair] for pair in PAIRS]
    used = work_times.RECORDED_SHARE
    print(
        f"\nshare of the recorded band (in use: {used}) | errors of {PAIRS[0][0]} and back | of {PAIRS[1][0]} and back"
    )
    for share in SHARES:
        work_times.RECORDED_SHARE = share  # type: ignore[misc]
        cells = []
        for pair in recorded:
            off = [_off(source, target) for source, target in (pair, pair[::-1])]
            cells.append(" and ".join(f"{100 * one:+.0f} %" for one in off))
        print(f"{share:g} | {' | '.join(cells)}")
    work_times.RECORDED_SHARE = used  # type: ignore[misc]


def _off(source: Experiment, target: Experiment) -> float:
    device = device_peaks(target.trace, target.device or "")
    assert device is not None
    predicted = float(np.nansum(work_times.work_times(source.trace, device).ns[source.works]))
    return predicted / float(target.trace.device_work["duration_ns"].to_numpy()[target.works].sum()) - 1


def _print_batches(folder: Path) -> None:
    sizes = {batch: Experiment(open_trace(folder / SWEEP.format(batch))) for batch in BATCHES}
    took = {batch: StepPredictor(one).replays.measured_device_ns for batch, one in sizes.items()}
    print("\nbatch | recorded with | device ms measured | predicted | off")
    for source, target in permutations(BATCHES, 2):
        predictor = StepPredictor(sizes[source], batch=target, recorded_batch=source)
        device = predictor.recorded_device
        ns = None if device is None else predictor.on(device).device_ns
        if ns is not None:
            off = 100 * (ns / took[target] - 1)
            print(f"{target} | {source} | {took[target] / 1e6:.1f} | {ns / 1e6:.1f} | {off:+.0f} %")


if __name__ == "__main__":
    main()
