"""# What it finds
Calls that make the host wait for the device, after which the device waits for the host.

# Why it costs time
A host that runs ahead of the device keeps its queues full. `.item()`, a copy to the host, `nonzero`, printing a tensor
or `torch.cuda.synchronize()` make it stop until the device has finished all work. When the host continues, the queues
are empty, and the device is idle until new work arrives.

# How it is measured
Each synchronising call costs the host as much of its lead as it waited. The call is charged with the device's idle time
up to the next such call, as far as the host was late: at most as long as the call waited, and without host work that
another rule reports (loading data, copying to the device, logging, compiling). Each call is of one kind: printing or
logging a tensor, a value read between the backward pass and the optimizer's step (GradScaler, clipping, checks of
norms) or by the optimizer, `.item()`, indexing with a mask, other sizes that depend on values, copies,
`torch.cuda.synchronize()`, or waiting for a queue or an event.

If the host waits or copies while the device is idle for a reason that the trace does not show, the rule names that call
and its place in a note without a saving: what ends the wait was not recorded, so no replay shows the step without it.

Files beside the trace (`--xla-metrics`, `--xla-debug-log`) count how often values were read from the device in the
whole run, and on which lines. If that is more than once in two steps and the trace shows no cost, the rule reports a
note.

Without a device there is nothing to wait for. Calls that would wait for a GPU are then counted, and if steps contain
some, the rule reports a note that claims no saving. Calls by the optimizer and the data loader are ignored.

# Known false positives
A value may be needed: generating a token needs the one before. Then the best possible is fewer, later or asynchronous
waits. Without a device the trace does not show which tensors would be on a GPU; reading a tensor that stays on the CPU
never waits.

# What to do
Keep values on the device: accumulate losses as tensors and read them every hundred steps; copy with `non_blocking=True`
into pinned memory and read the values later; use masks instead of boolean indexing.

# Reference
PyTorch performance tuning guide, "Avoid unnecessary CPU-GPU synchronization"; nsys-ai reports synchronisation of 2 % or
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.host import CAUSE_CODES, covered_by
from stepscope.diagnosis.rule import (
    Answers,
    Figure,
    Found,
    InServing,
    Limits,
    Remedy,
    Rule,
    Threshold,
    View,
    note_from_files,
    rows_of,
    tally_figures,
)
from stepscope.diagnosis.rules._waits import BACKWARD_NODE, KINDS, Kind, every_steps, kinds_of, reads_of_reducer
from stepscope.trace.nesting import Rows
from stepscope.whatif.changes import without_waits

_ON_CPU: Final = (
    ("item", "^aten::(item|is_nonzero)$"),
    ("shape", "^aten::(nonzero|masked_select|_unique2|unique_consecutive)$"),
)
"""Kinds that are visible without a device, and the operators that show them."""
_REPORTED_ELSEWHERE: Final = (
    "input", "host_to_device_copy", "compilation", "checkpoint", "logging", "garbage_collection", "allocation",
    "communication", "profiler_overhead",
)  # fmt: skip
"""Causes of idle time after a wait that other rules charge."""
_WAITING: Final = ("synchronise", "copy")
_RECORD_MORE: Final = Remedy(
    "Find out what this call waits for: record every process that uses the device, and begin some steps earlier. If "
    "the host does not need the result there, let the call return at once.",
    "# a copy that the host does not wait for\n"
    "pinned = values.pin_memory()\n"
    "on_device = pinned.to(device, non_blocking=True)",
)
_ACCESS: Final = "trying to access tensor value"
"""Cause that PyTorch/XLA reports for a graph that ran early because the program read a value."""
_NUMBERS_BYTES: Final = 64
_OF_NUMBERS: Final = Kind(
    "a copy of single numbers to the device",
    Remedy(
        "Make the numbers on the device, before the loop where they do not change, or leave them Python numbers.",
        "scale = torch.full((), value, device=device)       # instead of torch.tensor(value).to(device)\n"
        "result = tensor * value                            # a Python number needs no copy",
    ),
)
"""Copies too small to be a batch; pinned memory would not help."""
_FREQUENT: Final = 0.01
"""Share of the step that waits may cost at the advised frequency."""
_FRAMEWORKS_OWN: Final = ("optimizer", "input", "checkpoint", "profiler_overhead")
"""Causes whose synchronising calls are the framework's, mostly on values that are on the CPU anyway."""


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        yield from _calls_without_device(view, limits)
        yield from _reported(view)
        return
    waits = charged_waits(view)
    found = []
    for kind in KINDS:
        calls = waits.filter(pl.col("kind") == kind)
        cost = int(calls["charged_ns"].sum())
        if limits.reached(cost):
            found.append(_found(view, kind, calls, cost))
    yield from found or _reported(view)
    yield from _unexplained(view, limits)


def _unexplained(view: View, limits: Limits) -> Iterator[Found]:
    """Calls in which the host waits while the device is idle for a reason that the trace does not show."""
    idle = covered_by(view.pieces_of("unknown"))
    calls = view.trace.launches.with_row_index("launch").filter(pl.col("kind").is_in(_WAITING))
    starts = calls["start_ns"].to_numpy()
    overlaps = idle.overlap_of(starts, starts + calls["duration_ns"].to_numpy())
    calls = calls.with_columns(idle_ns=pl.Series(overlaps, dtype=pl.Int64)).filter(pl.col("idle_ns") > 0)
    for (name,), same in calls.group_by("name", maintain_order=True):
        cost = idle.overlap_ns(covered_by(same))
        if limits.reached(cost, "unexplained"):
            yield _of_unknown_reason(view, limits, str(name), same, cost)


def _of_unknown_reason(view: View, limits: Limits, name: str, calls: pl.DataFrame, cost: int) -> Found:
    return Found(
        f"for {view.percent(cost)} of the {view.period} the host waits in {name} while the device is idle; the trace "
        "does not show what for",
        0,
        basis="no saving: what ends the wait was not recorded, so no replay shows the step without it; it may be work "
        "of another stream or process, or inside a graph",
        confidence="low",
        figures=[
            limits.figure("unexplained", view.share(cost)),
            view.count_per_step("such calls", calls.height),
            Figure("the longest of them", int(calls["duration_ns"].to_numpy().max()), "ns"),
        ],
        intervals=view.longest(calls.select("start_ns", "duration_ns"), name),
        remedy=_RECORD_MORE,
        where=view.at_launches(calls, "idle_ns"),
        severity="note",
        for_every_framework=True,
    )


def _reported(view: View) -> Iterator[Found]:
    """Reads of values from the device that only the files beside the trace report."""
    counts = view.run_counts
    reads, accesses = counts.transfers_out, [each for each in counts.execute_triggers if _ACCESS in each.cause]
    if counts.reads_too_often and reads is not None:
        single = f", {counts.scalar_reads:,} of them single values" if counts.scalar_reads else ""
        figures = [Figure("steps in the whole run", counts.steps or 0, "count")]
        title = f"Values are read from the device {reads.count:,} times in {counts.steps:,} steps of the run{single}"
    elif accesses:
        times = sum(each.count for each in accesses)
        figures = [Figure("reads that end graphs in the whole run", times, "count")]
        title = f"Reading values ends graphs early: {times:,} times in the whole run"
    else:
        return
    remedy = KINDS["item"].told_for(view, every=100).remedy
    yield note_from_files(title, [*_read_figures(view), *figures], remedy, view.at_triggers(accesses))


def _read_figures(view: View) -> tuple[Figure, ...]:
    scalars = view.run_counts.scalar_reads
    single = () if scalars is None else (Figure("reads of single values in the whole run", scalars, "count"),)
    return (*tally_figures("reads from the device", view.run_counts.transfers_out), *single)


def _calls_without_device(view: View, limits: Limits) -> Iterator[Found]:
    """Calls that would wait for a GPU, in a program that ran without one."""
    for kind, pattern in _ON_CPU:
        rows = _calls_on_cpu(view, pattern)
        if len(rows) and len(rows) / view.step_count >= limits["calls"]:
            yield _note(view, limits, kind, rows)


def _calls_on_cpu(view: View, pattern: str) -> Rows:
    """Rows in `operators` of the program's own matching calls in the span."""
    operators = view.trace.operators.with_row_index("row")
    parents = view.trace.operators["name"].gather(operators["parent"])
    found = operators.filter(
        pl.col("name").str.contains(pattern)
        & ~parents.str.contains(pattern).fill_null(False)  # is_nonzero() calls item()
        & ~parents.str.starts_with(BACKWARD_NODE).fill_null(False)
    )
    rows = np.setdiff1d(rows_of(view.begin_in_span(found)), reads_of_reducer(view))
    causes = view.activity.cause_of(view.activity.around[view.slices_of_operators(rows)])
    frameworks = np.isin(causes, [CAUSE_CODES[cause] for cause in _FRAMEWORKS_OWN])
    in_optimizer = np.flatnonzero(causes == CAUSE_CODES["optimizer"])
    if in_optimizer.size:
        frameworks[in_optimizer[_in_closure(view, rows[in_optimizer])]] = False
    return rows[~frameworks]


def _in_closure(view: View, rows: Rows) -> npt.NDArray[np.bool_]:
    """Which operators inside an optimizer's step belong to a closure.

    Their places in the user's code differ from the update's, which comes last. Lightning, for one, runs the whole
    training step inside the optimizer's.
    """
    steps = view.trace.annotations.filter(pl.col("name").str.starts_with("Optimizer.step#"))
    ends = steps.select("lane", end_ns=pl.col("start_ns") + pl.col("duration_ns")).sort("end_ns")
    operators = view.trace.operators.with_row_index("row").select("row", "lane", "start_ns").sort("start_ns")
    before_end = ends.join_asof(operators, left_on="end_ns", right_on="start_ns", by="lane", check_sortedness=False)
    last = before_end["row"].drop_nulls()
    updates = set(_user_places(view, last.to_numpy().astype(np.int64)))
    return np.array([place is not None and place not in updates for place in _user_places(view, rows)], np.bool_)


def _user_places(view: View, rows: Rows) -> list[tuple[object, ...] | None]:
    """Where in the user's code each operator was called: the line, else the function, None if neither is known."""
    lines = view.trace.operators.select("source_file", "source_line")[rows]
    frames = view.activity.user_frame[view.slices_of_operators(rows)]
    functions = view.trace.frames["name"].gather(pl.Series(frames).replace(-1, None))
    return [
        (file, line) if line is not None else (function,) if function is not None else None
        for (file, line), function in zip(lines.iter_rows(), functions, strict=True)
    ]


def _note(view: View, limits: Limits, key: str, rows: Rows) -> Found:
    kind = KINDS[key].told_for(view)
    per_step = len(rows) / view.step_count
    inside_ns = int(view.trace.operators["duration_ns"].to_numpy()[rows].sum())
    times = f"once {view.a_step}" if per_step == 1 else f"{per_step:,.3g} times {view.a_step}"
    return Found(
        f"{kind.what} is called {times}: it waits for nothing on a CPU, but would drain the queues on a GPU",
        0,
        basis="no saving on this CPU; on a GPU the host would wait until all work before the call is done",
        confidence="high",
        figures=[
            Figure(f"calls {view.per}", per_step, "count", limits["calls"]),
            view.ns_per_step("time inside the calls", inside_ns),
        ],
        remedy=kind.remedy,
        is_tried=False,
        where=view.at_operators(rows),
        severity="note",
    )


def charged_waits(view: View) -> pl.DataFrame:
    """The synchronising calls with the idle time charged to each: columns launch, charged_ns, duration_ns, kind."""
    late = view.pieces.filter(
        pl.col("trigger_launch").is_not_null()
        & pl.col("lane").is_not_null()
        & ~pl.col("cause").is_in(_REPORTED_ELSEWHERE)
    )
    sums = late.group_by(launch="trigger_launch").agg(late_ns=pl.col("duration_ns").sum())
    calls = view.trace.launches.with_row_index("launch").select("launch", "start_ns", "duration_ns", "operator", "name")
    joined = sums.join(calls, on="launch", how="inner").sort("start_ns")
    return joined.with_columns(charged_ns=pl.min_horizontal("late_ns", "duration_ns"), kind=kinds_of(view, joined))


def _found(view: View, key: str, calls: pl.DataFrame, cost: int) -> Found:
    every = every_steps(cost, view.length_ns, _FREQUENT)
    kind = _OF_NUMBERS if key == "copy_in" and _copies_numbers(view, calls) else KINDS[key].told_for(view, every)
    per_step = calls.height / view.step_count
    times = "once" if per_step == 1 else f"{per_step:,.3g} times"
    return Found(
        f"{kind.what} makes the host wait {times} {view.a_step}, and the device is idle afterwards"
        if per_step >= 1
        else f"{kind.what} makes the host wait, and the device is idle afterwards",
        cost,
        basis="idle time after each wait in which the host was late, at most as long as the wait, without what other "
        "findings explain",
        confidence="medium",
        figures=[
            Figure(f"waits {view.per}", per_step, "count"),
            view.ns_per_step("time the host waited", int(calls["duration_ns"].sum())),
            Figure("idle time after one wait", cost // calls.height, "ns"),
            Figure("steps between two waits at which they cost too little to matter", every, "count"),
            *_read_figures(view),
        ],
        intervals=view.longest(
            view.pieces.join(calls, left_on="trigger_launch", right_on="launch", how="semi"), f"idle after {kind.what}"
        ),
        remedy=kind.remedy,
        where=view.at_launches(calls, "charged_ns"),
        change=without_waits(_waits_of_kind(view, key, calls["launch"].to_numpy().astype(np.int64))),
    )


def _copies_numbers(view: View, calls: pl.DataFrame) -> bool:
    """Whether the device copies that these calls wait for (found by their operators) are a few bytes each."""
    operators = view.trace.launches["operator"]
    copies = view.work.filter((pl.col("kind") == "copy_in") & pl.col("launch").is_not_null())
    mine = operators.gather(copies["launch"]).is_in(calls["operator"].drop_nulls().implode()).fill_null(False)
    sizes = copies.filter(mine)["bytes"].drop_nulls()
    return bool(sizes.len()) and bool((sizes <= _NUMBERS_BYTES).all())


def _waits_of_kind(view: View, key: str, charged: Rows) -> Rows:
    """Rows in `launches` of all waits of this kind in the span, including those that made nothing late."""
    stretches, waits = view.experiment.graph.stretches, view.experiment.graph.host_waits
    rows = np.union1d(stretches.launch[waits.target], charged)
    calls = view.trace.launches.with_row_index("launch").select("launch", "start_ns", "operator", "name")
    calls = view.begin_in_span(calls[rows[rows >= 0]])
    mine: Rows = calls.filter(kinds_of(view, calls) == key)["launch"].to_numpy().astype(np.int64)
    return mine


RULE: Final = Rule(
    id="host-synchronisation",
    title="The host waits for the device and falls behind",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} lost after these waits"),
        "unexplained": Threshold(
            0.05,
            "share",
            "share of the {period} in which the device is idle without a visible reason during such a call",
        ),
        "calls": Threshold(0.5, "count", "calls a step that would wait for a GPU, in a trace without a device"),
    },
    check=check,
    replaces=("launch-bound",),
    remedies={
        "jax": Remedy(
            "float(loss), print(loss), numpy.asarray() and block_until_ready() wait for the device: keep values there "
            "and read them rarely.",
            "running_loss = running_loss + loss          # stays on the device\n"
            "if step % 100 == 0:\n    print(float(running_loss) / 100)",
        ),
        "torch_xla": Remedy(
            "loss.item(), print(loss) and conditions on tensors end the graph and wait for the device: read values "
            "after the step, and rarely.",
            "if step % 100 == 0:\n    xm.add_step_closure(lambda loss: print(loss.item()), args=(loss,))",
        ),
        "hpu": Remedy(
            "loss.item(), print(loss) and .cpu() end the graph and wait for the device: keep values there and read "
            "them rarely.",
            "running_loss += loss.detach()               # stays on the device\n"
            "if step % 100 == 0:\n    print(running_loss.item() / 100)",
        ),
    },
    serving=InServing(
        "Keep the new tokens on the device for the next iteration, and read those of all requests at once, one "
        "iteration later.",
        "overlap",
        "tokens = logits[:, -1].argmax(-1)                           # all requests, on the device\n"
        'host = tokens.to("cpu", non_blocking=True)                  # read it when the next iteration is launched',
    ),
)
