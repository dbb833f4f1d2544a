"""# What it finds
Printing, progress bars, metrics or trackers that run in every step and take a noticeable part of it.

# Why it costs time
Printing a line, redrawing a bar, computing a metric or sending a value to a tracker costs the launching thread tens of
microseconds to milliseconds: formatting, a system call, a slow terminal or disk. Nobody reads a line for each step.
Metrics in plain Python read values one at a time. A value that must first come from the device also makes the host
wait, which `host-synchronisation` reports.

# How it is measured
Idle time of the device (without a device: the main thread's time) inside such calls, and in Python code on the same
lines, which prepares what is logged, unless the line itself runs modules, as when it prints what a trainer returns.
`stepscope run` names calls of `print`, `logging`, tqdm, TensorBoard, Weights & Biases, MLflow, rich and torchmetrics in
the trace; Python frames name those and scikit-learn's metrics, CSV writers and files. A line that reads many values
with `.item()` in a step counts as a measurement; if its function takes no part in the training, as with a metric, the
whole function counts. It does not count if each repetition of its loop needs the previous one's result, or if the
source makes tensors from such values. The finding says how often they run now, and every how many steps N they would
have to run to cost less than 1 % of the step. The saving assumes that they run every N steps. If the recorder timed a
step before it recorded, the overhead of recording each operator is subtracted: printing a tensor runs thousands of
operators.

# Known false positives
Output that is only collected in a file costs less than the same output on a terminal: record in the setting you care
about. Logging in fewer than half of the recorded steps is ignored, because a short recording does not show its period.

# What to do
Log every N steps, keep values on the device until then, give progress bars a `mininterval`, and send values to trackers
in batches.

# Reference
PyTorch performance tuning guide; Lightning's `log_every_n_steps` (50); XProf advises asynchronous logging.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import CAUSE_CODES, TABLES
from stepscope.diagnosis.lines.graphs import lines_that_run_modules
from stepscope.diagnosis.recording_costs import unrecorded_ns
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._waits import every_steps, outermost_logging, reads_of_reducer
from stepscope.whatif.changes import scaled_pieces

_PROGRESS_BAR: Final = "the progress bar"
_KINDS: Final[tuple[tuple[str, str, str], ...]] = (
    (r"^aten::item$", "reading values one by one for metrics", "history.append(metrics(output, target))"),
    (r"#file", "writing to a file", "file.write(line)"),
    (r"#print|function print>", "print", "print(step, loss.item())"),
    (r"#tqdm|tqdm/", _PROGRESS_BAR, "bar.set_postfix(loss=loss.item())"),
    (r"#rich|rich/", "rich", "console.print(step, loss.item())"),
    (r"#tensorboard|tensorboard/", "TensorBoard", 'writer.add_scalar("loss", loss.item(), step)'),
    (r"#wandb|wandb/", "Weights & Biases", 'run.log({"loss": loss.item()}, step=step)'),
    (r"#mlflow|mlflow/", "MLflow", 'mlflow.log_metric("loss", loss.item(), step)'),
    (r"#torchmetrics|torchmetrics/", "torchmetrics", "metric.update(prediction.detach(), target)"),
    (r"sklearn/", "scikit-learn's metrics", "score = accuracy_score(target.cpu(), prediction.cpu())"),
    (r"_csv", "the CSV writer", "writer.writerow([step, loss.item()])"),
    (r"#logging|logging/", "logging", 'logger.info("step %d: loss %.4f", step, loss.item())'),
)
_PREPARING: Final = ("python", "untraced", "synchronisation")
_OTHER: Final = ("writing to a file", "file.write(line)")


def check(view: View, limits: Limits) -> Answers:
    around = outermost_logging(view)
    reads, reading_lines = _reads(view, limits)
    calls = np.unique(np.append(around[(around >= 0) & (view.activity.lane == view.lane)], reads))
    start = view.activity.start[calls]
    calls = calls[(start >= view.span.start_ns) & (start < view.span.end_ns)]
    if not calls.size:
        return
    pieces = _pieces(view, view.pieces, around, calls, reading_lines)
    cost = unrecorded_ns(view, pieces)
    limit = limits["share"]
    if not limits.reached(cost):
        return
    logging_steps = view.steps_with(view.activity.start[calls]) / view.step_count
    if logging_steps < limits["steps"]:
        return
    every = every_steps(cost, view.length_ns, limit)
    saving = cost * (1 - 1 / every)
    per_step = calls.size / view.step_count
    kind, example = _kind(view, pieces)
    bar = kind == _PROGRESS_BAR
    rarely = (
        f"bar = every({every})(bar)" if bar else f"log_now = every({every})      # once; then: if log_now(step): ..."
    )
    times = f"{per_step:,.0f} times" if per_step >= 10 else f"{per_step:.3g} times"
    times = "once" if per_step == 1 else times
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to {kind}, called {times} {view.a_step}; "
        f"every {every} steps would do",
        saving,
        basis=f"time inside these calls and on their lines, less what remains of it when they run every {every} steps",
        confidence="high",
        weighed_ns=cost,
        figures=[
            Figure(f"calls {view.per}", per_step, "count"),
            Figure("time of one call", cost // calls.size, "ns"),
            Figure("share of the steps that log", logging_steps, "share", limits["steps"]),
            Figure("steps between two logs at which it costs too little to matter", every, "count"),
        ],
        intervals=view.longest(pieces, "logging"),
        remedy=Remedy(
            f"Log every {every} steps: then it costs less than {limit:.0%} of the step.",
            f"if step % {every} == 0:\n    {example}\n"
            "# or, also for functions and progress bars:\n"
            f"from stepscope.remedies import every\n{rarely}",
            (f"quiet-progress={every}",) if bar else (),
        ),
        where=view.locations(pieces),
        # host-synchronisation charges the waits inside these calls.
        change=scaled_pieces(
            _pieces(view, view.host_pieces, around, calls, reading_lines),
            1 - saving / int(pieces["duration_ns"].sum()),
        ),
    )


def _reads(view: View, limits: Limits) -> tuple[Rows, dict[str, int]]:
    """Slices that read values on lines that read many in each step, and one slice for each such line.

    If nothing in the function with such a line has a gradient, as in a metric, all its lines count that run no module.
    """
    if view.lane is None or not view.trains:  # what an inference program reads is its result
        return np.zeros(0, np.int64), {}
    place = pl.format("{}:{}", "source_file", "source_line")
    function = pl.format("{}:{}", "source_file", "source_function")
    operators = view.trace.operators.with_row_index("row").select(
        "row", "name", "lane", "start_ns", "parent", place=place, function=function
    )
    own = pl.col("parent").is_null()  # compiled code and anomaly detection read values themselves
    is_read = (pl.col("name") == "aten::item") & own & (pl.col("lane") == view.lane)
    items = view.begin_in_span(operators.filter(is_read))
    items = items.filter(pl.Series(~np.isin(rows_of(items), reads_of_reducer(view)), dtype=pl.Boolean))
    slices = view.slices_of_operators(rows_of(items))
    frameworks = [CAUSE_CODES[cause] for cause in ("optimizer", "input", "checkpoint", "profiler_overhead", "logging")]
    around = view.activity.around[slices] if len(slices) else slices
    items = items.with_columns(slice=pl.Series(slices, dtype=pl.Int64)).filter(
        pl.Series(~np.isin(view.activity.cause_of(around), frameworks), dtype=pl.Boolean)
    )
    items = items.drop_nulls("place").filter(pl.len().over("place") >= limits["reads"] * view.step_count)
    if items.is_empty():
        return np.zeros(0, np.int64), {}
    needed = {place for place in items["place"].unique() if _feeds_next(view, place) or not _measures(view, place)}
    items = items.filter(~pl.col("place").is_in(list(needed)))
    lines = dict(zip(items["place"], items["slice"], strict=True))
    source = view.backward_source
    trained = operators["function"].gather(source[source >= 0]).drop_nulls().unique()
    metrics = items.filter(~pl.col("function").is_in(trained.implode())).select("function", "slice").unique("function")
    whole = (
        view.trace.lines.select(
            place=pl.format("{}:{}", "file", "line"),
            function=pl.format("{}:{}", "file", "function"),
            runs=pl.Series(lines_that_run_modules(view)[: view.trace.lines.height]),
        )
        .group_by("place", "function")
        .agg(pl.col("runs").any())
        .filter(~pl.col("runs"))
    )
    for line, of in whole.join(metrics, on="function", how="inner").select("place", "slice").iter_rows():
        lines.setdefault(line, of)
    return items["slice"].to_numpy(), lines


def _feeds_next(view: View, place: str) -> bool:
    """Whether a line is in a loop whose repetitions need earlier results, as when each token chooses the next."""
    file, _, line = place.rpartition(":")
    around = [loop for loop in view.program.loops if loop.file == file and loop.first <= int(line) <= loop.last]
    innermost = min(around, key=lambda loop: loop.last - loop.first, default=None)
    return innermost is not None and bool(innermost.carried)


def _measures(view: View, place: str) -> bool:
    """Whether a line may only measure: the source makes no tensor from the values that it reads."""
    file, _, line = place.rpartition(":")
    if not any(each.file == file for each in view.program.operations):
        return True
    return any(each.file == file and each.first <= int(line) <= each.last for each in view.program.metrics)


def _pieces(view: View, pieces: pl.DataFrame, around: Rows, calls: Rows, reading_lines: dict[str, int]) -> pl.DataFrame:
    """The parts of the pieces that are logging; adds the column call, a slice.

    These are parts inside the calls, on lines that read values, and in Python on lines that log.
    """
    mine = pieces.filter(pl.col("lane") == view.lane)
    slices = mine["slice"].to_numpy()
    mine = mine.with_columns(call=pl.Series(np.where(slices >= 0, around[np.maximum(slices, 0)], -1)))
    inside = mine.filter(pl.col("call") >= 0)
    timeline = view.activity.line_timelines.get(-1 if view.lane is None else view.lane)
    if timeline is None:
        return inside
    others = mine.filter(pl.col("call") < 0)
    start = others["start_ns"].to_numpy()
    part, begins, ends, lines = timeline.cut(start, start + others["duration_ns"].to_numpy())
    places = view.trace.lines.select(place=pl.format("{}:{}", "file", "line"))["place"].to_list()
    logging = calls[around[calls] == calls]
    at = timeline.slices[np.searchsorted(timeline.times, view.activity.start[logging], side="right") - 1]
    call_at = {places[line]: call for line, call in zip(at.tolist(), logging.tolist(), strict=True) if line >= 0}
    prepares = others["cause"].is_in(_PREPARING).to_numpy()[part] & ~lines_that_run_modules(view)[np.maximum(lines, 0)]
    found = [
        reading_lines.get(places[line], call_at.get(places[line], -1) if preparing else -1) if line >= 0 else -1
        for line, preparing in zip(lines.tolist(), prepares.tolist(), strict=True)
    ]
    cut = others[part].with_columns(
        start_ns=pl.Series(begins), duration_ns=pl.Series(ends - begins), call=pl.Series(found, dtype=pl.Int64)
    )
    return pl.concat([inside, cut.filter(pl.col("call") >= 0)])


def _kind(view: View, pieces: pl.DataFrame) -> tuple[str, str]:
    """The costliest kind of logging, in words, and an example."""
    costs: Counter[tuple[str, str]] = Counter()
    activity = view.activity
    for call, ns in pieces.group_by("call").agg(pl.col("duration_ns").sum()).iter_rows():
        table = view.trace.table(TABLES[activity.table[call]])
        name = table["name"][int(activity.row[call])]
        found = next(((what, code) for pattern, what, code in _KINDS if re.search(pattern, name)), _OTHER)
        costs[found] += ns
    ranked = [kind for kind, _ in costs.most_common()]
    return ranked[0] if len(ranked) == 1 else (f"{ranked[0][0]} and {ranked[1][0]}", ranked[0][1])


RULE: Final = Rule(
    id="frequent-logging",
    title="Logging in every step takes a part of it",
    thresholds={
        "share": Threshold(0.01, "share", "share of the {period} spent on logging"),
        "reads": Threshold(8, "count", "values that a line reads with .item() in a step, from which it measures"),
        "steps": Threshold(0.5, "share", "share of the steps that log, below which the period is unknown"),
    },
    check=check,
)
