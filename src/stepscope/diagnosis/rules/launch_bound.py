"""# What it finds
The host cannot launch work as fast as the device finishes it.

# Why it costs time
Each operator costs the host some microseconds of Python, dispatching and launching. When the device needs less for
the work itself, it idles between kernels however fast it is.

# How it is measured
Idle time before work that was launched late: the pieces in which the launching thread was dispatching operators or
running Python between them, and the time from such a late launch to the start of its work.

# Known false positives
Recording stacks and shapes slows the host; a step that is launch-bound by a few percent only under the profiler is
none without it. Idle time that belongs to the optimizer, to copies or to loading data is told by other rules.

# What to do
Launch less often: `torch.compile` fuses operators, `mode="reduce-overhead"` or CUDA graphs launch a step at once,
larger batches give each launch more to do.

# Reference
PyTorch, "Accelerating PyTorch with CUDA Graphs"; TraceLens counts kernels under 10 us as short.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Evidence, Figure, Remedy, RuleResult
from stepscope.diagnosis.threshold import Threshold
from stepscope.diagnosis.view import View

ID: Final = "launch-bound"
TITLE: Final = "The host launches work too slowly"
THRESHOLDS: Final = {"share": Threshold(0.05, "share", "share of the step lost to late launches")}

_LATE: Final = ("dispatch", "python")

_DISPATCH: Final = Remedy(
    "Launch fewer, larger pieces of work: compile the model, so that a step is launched as a graph, or raise the batch "
    "size.",
    'model = torch.compile(model, mode="reduce-overhead")   # CUDA graphs: one launch for many kernels',
)
_PYTHON: Final = Remedy(
    "Most of it is Python between operators: move what does not depend on the batch out of the step, do the rest with "
    "tensor operators, or let a background thread prepare it while the device works.",
    "stepscope operators TRACE --group-by stack    # which functions; --window shows one of the gaps",
)


def check(view: View) -> RuleResult:
    """Sum the late pieces, and the launch latency of gaps in which the host was late throughout."""
    if view.device is None:
        return RuleResult()
    pieces = view.pieces.select("gap", "start_ns", "duration_ns", "cause", "lane", "slice")
    host = pieces.filter(pl.col("lane").is_not_null())
    mostly_late = (
        host.group_by("gap")
        .agg(late=pl.col("duration_ns").filter(pl.col("cause").is_in(_LATE)).sum(), host=pl.col("duration_ns").sum())
        .filter(pl.col("late") * 2 > pl.col("host"))
    )
    latency = pieces.filter(pl.col("cause") == "launch_latency").join(mostly_late, on="gap", how="semi")
    mine = pl.concat([pieces.filter(pl.col("cause").is_in(_LATE)), latency])
    cost = int(mine["duration_ns"].sum())
    limit = view.threshold(ID, THRESHOLDS, "share")
    if cost == 0 or view.share(cost) < limit:
        return RuleResult()
    launches = view.work.filter(pl.col("launch").is_not_null())["launch"].n_unique() / view.step_count
    many = "1 launch" if round(launches) == 1 else f"{launches:,.0f} launches"
    blamed = mine.filter(pl.col("slice") >= 0)
    finding = view.finding(
        ID,
        f"{view.share(cost):.0%} of the step the device waits for launches: {many} a step, "
        f"and the host is too slow for them",
        cost,
        basis="idle time before work that the host launched late",
        confidence="high",
        evidence=Evidence(
            (
                Figure("share of the step lost to late launches", view.share(cost), "share", limit),
                Figure("launches per step", launches, "count"),
                Figure("median length of the device's work", _median(view.work["duration_ns"]), "ns"),
                Figure("lost while dispatching operators", _share(view, mine, "dispatch"), "share"),
                Figure("lost to Python between operators", _share(view, mine, "python"), "share"),
            ),
            view.longest(mine, "late launch"),
        ),
        remedy=_PYTHON if _share(view, mine, "python") > _share(view, mine, "dispatch") else _DISPATCH,
        where=view.locations(blamed) if blamed.height else (),
    )
    return RuleResult((finding,))


def _share(view: View, pieces: pl.DataFrame, cause: str) -> float:
    return view.share(int(pieces.filter(pl.col("cause") == cause)["duration_ns"].sum()))


def _median(durations: pl.Series) -> float:
    return float(durations.median() or 0)  # type: ignore[arg-type]
