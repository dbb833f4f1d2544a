"""# What it finds
Debugging aids that were left on: autograd's anomaly detection, blocking launches, deterministic filling.

# Why it costs time
Anomaly detection records a Python traceback for each operator of the forward pass and checks every gradient for NaN.
With `CUDA_LAUNCH_BLOCKING=1` the host waits for each kernel, so nothing overlaps. Deterministic algorithms fill every
new tensor before it is used.

# How it is measured
Anomaly detection: the NaN checks are in the trace directly below the autograd engine's nodes; the cost of the
tracebacks is the extra time of operators that create nodes over the same operators elsewhere. Blocking launches: most
launch calls end after their kernel; without blocking, a step would take the host's remaining time, or the device's work
if that is longer. Deterministic filling: the `aten::fill_` inside `aten::empty`.

# Known false positives
Anomaly detection: an operator looks slowed down if its calls that create nodes work on larger tensors than its other
calls.

# What to do
Turn them off once the bug is found.

# Reference
PyTorch: torch.autograd.set_detect_anomaly, torch.utils.deterministic.fill_uninitialized_memory; CUDA environment
variables.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_host_time, scaled_operators, together

_ENGINE: Final = r"^autograd::engine::evaluate_function"
_CHECKS: Final = ("aten::isnan", "aten::any", "aten::is_nonzero", "aten::item")
_LAUNCH_CALL: Final = r"^(?:cuda|hip|cu)\w*Launch\w*Kernel"
_LAUNCH_NS: Final = 10_000
"""Upper limit for a launch that does not wait."""


def check(view: View, limits: Limits) -> Answers:
    yield from _anomaly(view, limits)
    yield from _blocking(view, limits)
    yield from _filling(view)


def _anomaly(view: View, limits: Limits) -> Answers:
    nodes = view.operators.filter(pl.col("name").str.contains(_ENGINE))["row"].to_numpy()
    if not len(nodes):
        return
    parent = pl.col("parent").cast(pl.Int64)
    checks = view.operators.filter(pl.col("name").is_in(_CHECKS) & parent.is_in(nodes.tolist()))
    searched = checks["parent"].n_unique() / len(nodes)
    most = limits["checked"]
    if checks.is_empty() or searched < most:
        return
    searching = view.cost_ns(rows_of(checks))
    makers, excess = _slowed(view)
    cost = searching + int(excess.sum())
    if not limits.reached(cost):
        return
    slices = np.concatenate([view.slices_of_operators(makers), view.slices_of_operators(rows_of(checks))])
    weights = np.concatenate([excess, np.maximum(checks["duration_ns"].to_numpy(), 1)])
    yield Found(
        f"autograd's anomaly detection is on and takes {view.percent(cost)} of the {view.period}",
        cost,
        basis="checks for NaN, and what node-making operators take longer than the same operators elsewhere",
        confidence="medium",
        figures=[
            Figure("autograd nodes searched for NaN", searched, "share", most),
            view.ns_per_step("searching for NaN,", searching),
            view.ns_per_step("tracebacks of the forward pass,", int(excess.sum())),
        ],
        remedy=Remedy(
            "Turn anomaly detection off; turn it on for a few steps when a NaN has to be found.",
            "torch.autograd.set_detect_anomaly(False)      # or remove the call, and detect_anomaly()",
            apply=("no-debug",),
        ),
        where=view.locations_of(slices, weights),
        change=together(scaled_operators(rows_of(checks), 0.0), _without_excess(view, makers, excess)),
    )


def _slowed(view: View) -> tuple[Rows, Rows]:
    """Forward operators that made autograd nodes, and each one's extra time over the usual time for its name.

    If all calls of a name make nodes, the median extra time of the other names is used.
    """
    operators = view.operators.with_columns(own=view.operator_costs["host_self_ns"].gather(view.operators["row"]))
    caused = view.backward_source
    makers = np.unique(caused[rows_of(operators)])
    makers = makers[makers >= 0]
    is_maker = pl.col("row").is_in(makers.tolist())
    usual = operators.filter(~is_maker).group_by("name").agg(usual=pl.col("own").median())
    made = operators.filter(is_maker).join(usual, on="name", how="left", maintain_order="left")
    excess = pl.col("own") - pl.col("usual")
    typical = made.select(excess.median()).item()
    made = made.with_columns(excess=pl.coalesce(excess, pl.min_horizontal(pl.lit(typical), "own")).clip(lower_bound=0))
    return rows_of(made), made["excess"].fill_null(0).cast(pl.Int64).to_numpy()


def _without_excess(view: View, rows: Rows, excess: Rows) -> Change:
    """Shorten each of these operators on the host by its extra time, nanoseconds."""
    operators = view.trace.operators
    lanes, starts = operators["lane"].to_numpy()[rows], operators["start_ns"].to_numpy()[rows]
    durations = operators["duration_ns"].to_numpy()[rows]
    return scaled_host_time(lanes, starts, starts + durations, 1 - excess / np.maximum(durations, 1))


def _blocking(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    calls = view.trace.launches.with_row_index("launch").filter(pl.col("name").str.contains(_LAUNCH_CALL))
    pairs = view.work.filter(pl.col("kind") == "compute").join(
        calls.select("launch", call_start="start_ns", call_ns="duration_ns"), on="launch", how="inner"
    )
    long = pairs.filter(pl.col("duration_ns") > _LAUNCH_NS)
    waits = pl.col("call_start") + pl.col("call_ns") >= pl.col("start_ns") + pl.col("duration_ns")
    waiting = pairs.filter(waits)
    most = limits["checked"]
    share_of_long = long.filter(waits).height / long.height if long.height else 0.0
    if not share_of_long or share_of_long < most or waiting.height < most * pairs.height:
        return
    blocked = int(waiting.select((pl.col("call_ns") - _LAUNCH_NS).clip(lower_bound=0).sum()).item())
    busy = int(view.work["duration_ns"].sum())
    cost = view.length_ns - max(view.length_ns - blocked, min(busy, view.length_ns))
    if not limits.reached(cost):
        return
    named = next((name for name in view.program.environment if name.endswith("_LAUNCH_BLOCKING")), None)
    yield Found(
        f"the host waits for each kernel it launches{f' ({named})' if named else ''}, "
        f"which costs {view.percent(cost)} of the {view.period}",
        cost,
        basis=f"the {view.period}, less the longer of the host's time outside waiting launches and the device's work",
        confidence="medium" if named else "low",
        figures=[
            Figure("launches that end after their kernel", share_of_long, "share", most),
            view.ns_per_step("time in waiting launches", blocked),
        ],
        remedy=Remedy(
            "Do not set the variable; it only serves to find the operator that failed.",
            f"unset {named or 'CUDA_LAUNCH_BLOCKING'}",
        ),
        where=view.at_launches(waiting, "call_ns"),
        change=_launches_that_return(view, waiting["launch"].to_numpy()),
    )


def _launches_that_return(view: View, launches: Rows) -> Change:
    """Shorten these calls to the time of a launch that does not wait."""
    calls = view.trace.launches[np.unique(launches)]
    starts, durations = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
    factors = np.minimum(_LAUNCH_NS / np.maximum(durations, 1), 1.0)
    return scaled_host_time(calls["lane"].to_numpy(), starts, starts + durations, factors)


def _filling(view: View) -> Answers:
    fills = view.operators.filter((pl.col("name") == "aten::fill_") & pl.col("parent").is_not_null())
    around = view.trace.operators["name"].gather(fills["parent"])
    fills = fills.filter(around.str.contains(r"^aten::(?:empty|resize)"))
    rows = rows_of(fills)
    cost = view.cost_ns(rows)
    yield Found(
        f"deterministic algorithms fill every new tensor, which takes {view.percent(cost)} of the {view.period}",
        cost,
        basis="time to fill tensors that are written anyway",
        confidence="medium",
        figures=[view.count_per_step("tensors filled", fills.height)],
        remedy=Remedy(
            "Keep the deterministic algorithms if you need them, and leave out the filling: it only makes reads of "
            "uninitialised memory repeatable.",
            "torch.utils.deterministic.fill_uninitialized_memory = False",
        ),
        where=view.at_operators(rows),
        change=scaled_operators(rows, 0.0),
    )


RULE: Final = Rule(
    id="debug-mode",
    title="A debugging aid is on",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} that the aid costs"),
        "checked": Threshold(0.5, "share", "autograd nodes searched for NaN, or launches that wait for their kernel"),
    },
    check=check,
    needs=("operators",),
)
