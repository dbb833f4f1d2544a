"""# What it finds
Steps in which the host cannot launch work as fast as the device finishes it.

# Why it costs time
Each operator costs the host some microseconds of Python, dispatching and launching. If the device needs less time than
that for the work itself, it idles between kernels, however fast it is.

# How it is measured
Idle time before work that was launched late: the time in which the launching thread was dispatching operators or
running Python between them, and the time from such a late launch to the start of its work.

# Known false positives
Recording stacks and shapes slows the host: a step that is slightly launch-bound under the profiler may not be so
without it. Other rules report idle time of the optimizer, copies and data loading.

# What to do
Launch less often. Where every step launches the same kernels on inputs of the same shapes, and the host waits for
nothing in between, the step can be captured as a graph and launched at once. Otherwise `torch.compile` fuses operators
into fewer kernels, and larger batches give each launch more to do. The finding says which of these the trace allows,
and whether code is already compiled or launched as graphs.

# Reference
PyTorch, "Accelerating PyTorch with CUDA Graphs"; TraceLens counts kernels under 10 us as short.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import polars as pl

from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Remedy, Rule, Threshold, View
from stepscope.trace.window import Times
from stepscope.whatif.changes import scaled_pieces

_LATE: Final = ("dispatch", "python", "graph_tracing", "step_marker")

_AS_A_GRAPH: Final = (
    'model = torch.compile(model, mode="reduce-overhead")   # CUDA graphs: one launch for many kernels\n'
    "from stepscope.remedies import capture_step            # or the whole step, optimizer included, in one launch\n"
    "step = capture_step(step)                              # step(batch): zero_grad, forward, backward, optimizer.step"
)
_FORWARD_AS_A_GRAPH: Final = (
    'model = torch.compile(model, mode="reduce-overhead")   # CUDA graphs: one launch for many kernels\n'
    "from stepscope.remedies import capture_step            # or the whole call in one launch\n"
    "model = capture_step(model)"
)
_GRAPH: Final = Remedy(
    "All steps launch the same kernels, and nothing waits inside them: compile the model so that they are launched as "
    "a graph, or raise the batch size.",
    _AS_A_GRAPH,
    ("compile=reduce-overhead",),
)
_UNKNOWN: Final = Remedy(
    "Launch fewer, larger pieces of work: compile the model, so that a step is launched as a graph, or raise the batch "
    "size.",
    _AS_A_GRAPH,
    ("compile=reduce-overhead",),
)
_COMPILE: Final = Remedy(
    "Launch fewer, larger kernels: compile the model, which fuses operators, or raise the batch size. A graph needs "
    "equal steps in which nothing waits: {hindrance}.",
    'model = torch.compile(model)                           # later, with equal shapes: mode="reduce-overhead"',
    apply=("compile",),
)
_COMPILED: Final = Remedy(
    "The code is compiled already: let it be launched as a graph, and raise the batch size.",
    'model = torch.compile(model, mode="reduce-overhead")   # CUDA graphs of the compiled kernels',
    apply=("compile=reduce-overhead",),
)
_GRAPHED: Final = Remedy(
    "Much is launched as graphs already: record more of the step in one graph, and raise the batch size.",
    "# record the whole step in one graph instead of one for each part\n"
    "from stepscope.remedies import capture_step\n"
    "step = capture_step(step)",
)
_LOOP_AS_A_GRAPH: Final = (
    "from stepscope.remedies import capture_step            # one pass of the model in one launch\n"
    "model = capture_step(model)                            # inputs of one shape: a cache of fixed size"
)
GRAPHS: Final = InServing(
    "Run iterations as CUDA graphs, which are launched at once; without them, serve more requests in each iteration.",
    "graphs",
    _LOOP_AS_A_GRAPH,
)
WIDER_GRAPHS: Final = InServing(
    "Only part of it runs as CUDA graphs: capture graphs for all batches that occur, and let them hold more.",
    "graph_sizes",
    _LOOP_AS_A_GRAPH,
)
_COMPILED_KERNEL: Final = r"^triton_|^triton__|^Cijk_.*_torch_compile|CompiledFxGraph"
_MANY: Final = 0.5
_PYTHON: Final = Remedy(
    "Most of it is Python between operators: move what does not depend on the batch out of the step, do the rest with "
    "tensor operators, or let a background thread prepare it while the device works.",
    "stepscope operators TRACE --group-by stack    # which functions; --window shows one of the gaps",
)


def check(view: View, limits: Limits) -> Answers:
    if view.device is None:
        return
    mine = late_pieces(view)
    cost = int(mine["duration_ns"].sum())
    if not limits.reached(cost):
        return
    launched = view.work.filter(pl.col("launch").is_not_null())
    launches = launched["launch"].n_unique() / view.step_count
    calls = view.trace.launches[launched["launch"].unique()]
    number = f"{launches:,.0f}" if launches >= 100 else f"{launches:.3g}"
    many = "1 launch" if launches == 1 else f"{number} launches"
    dispatch, python = (
        view.share(int(mine.filter(pl.col("cause") == cause)["duration_ns"].sum())) for cause in ("dispatch", "python")
    )
    by_line = pl.col("cause").is_in(_LATE) & pl.col("lane").is_in(list(view.activity.line_timelines))
    blamed = mine.filter((pl.col("slice") >= 0) | by_line)
    yield Found(
        f"for {view.percent(cost)} of the {view.period} the device waits for launches: {many} {view.a_step}, "
        f"and the host is too slow for them",
        cost,
        basis="idle time before work that the host launched late",
        confidence="medium",  # only a trial shows what a graph or a compiler gains
        figures=[
            Figure(f"launches {view.per}", launches, "count"),
            view.count_per_step("kernels", view.work.filter(pl.col("kind") == "compute").height),
            Figure("median length of the device's work", _median(view.work["duration_ns"]), "ns"),
            Figure("median length of a launch call", _median(calls["duration_ns"]), "ns"),
            Figure("lost while dispatching operators", dispatch, "share"),
            Figure("lost to Python between operators", python, "share"),
        ],
        intervals=view.longest(mine, "late launch"),
        remedy=_remedy(view, launched, calls, in_python=python > dispatch),
        where=view.locations(blamed) if blamed.height else (),
        change=scaled_pieces(on_launching_thread(view, mine), 0.0),
    )


def late_pieces(view: View) -> pl.DataFrame:
    """Idle pieces of the device before work that the host launched late, and the latency of those launches."""
    # Before the first work and after the last, the host is not late: late-first-launch covers what comes before.
    first = int(view.work["start_ns"].to_numpy().min(initial=view.window.end_ns))
    later = (pl.col("start_ns") >= first) & (pl.col("launch").is_not_null() | pl.col("lane").is_null())
    pieces = view.pieces.filter(later).select("gap", "start_ns", "duration_ns", "cause", "lane", "slice", "launch")
    host = pieces.filter(pl.col("lane").is_not_null())
    mostly_late = (
        host.group_by("gap")
        .agg(late=pl.col("duration_ns").filter(pl.col("cause").is_in(_LATE)).sum(), host=pl.col("duration_ns").sum())
        .filter(pl.col("late") * 2 > pl.col("host"))
    )
    latency = pieces.filter(pl.col("cause") == "launch_latency").join(mostly_late, on="gap", how="semi")
    return pl.concat([pieces.filter(pl.col("cause").is_in(_LATE)), latency])


def on_launching_thread(view: View, pieces: pl.DataFrame) -> pl.DataFrame:
    """The pieces with launch latency as time of the launching thread, whose call is running then."""
    lanes = view.trace.launches["lane"].gather(pieces["launch"])
    return pieces.with_columns(lane=pl.coalesce("lane", lanes))


def _remedy(view: View, launched: pl.DataFrame, calls: pl.DataFrame, *, in_python: bool) -> Remedy:
    if view.serves:
        are_graphs = bool(calls.height and (calls["kind"] == "graph_launch").any())
        return (WIDER_GRAPHS if are_graphs else GRAPHS).remedy(view)
    return _PYTHON if in_python else _without_training_words(view, _fewer_launches(view, launched, calls))


def _without_training_words(view: View, remedy: Remedy) -> Remedy:
    """The remedy, without words about training where nothing is trained."""
    return remedy if view.trains else replace(remedy, code=remedy.code.replace(_AS_A_GRAPH, _FORWARD_AS_A_GRAPH))


def _fewer_launches(view: View, launched: pl.DataFrame, calls: pl.DataFrame) -> Remedy:
    graphs = calls.select((pl.col("kind") == "graph_launch").sum()).item() if calls.height else 0
    if graphs and launched.filter(pl.col("launch").is_duplicated()).height >= _MANY * launched.height:
        return _GRAPHED
    if launched["name"].str.contains(_COMPILED_KERNEL).sum() >= _MANY * launched.height:
        return _COMPILED
    if view.complete_steps.height < 2:
        return _UNKNOWN
    hindrance = _hindrance(view, launched)
    return replace(_COMPILE, text=_COMPILE.text.format(hindrance=hindrance)) if hindrance is not None else _GRAPH


def _hindrance(view: View, launched: pl.DataFrame) -> str | None:
    """What prevents capturing the steps as a graph; None if the trace shows nothing."""
    begins = view.complete_steps["start_ns"].to_numpy()
    ends = begins + view.complete_steps["duration_ns"].to_numpy()
    times, names = launched["launch_start_ns"].to_numpy(), launched["name"]
    kernels = [
        names.filter(pl.Series((times >= begin) & (times < end))).to_list()
        for begin, end in zip(begins, ends, strict=True)
    ]
    if any(each != kernels[0] for each in kernels[1:]):
        return "here steps launch different kernels"
    if _varies(view, begins, ends):
        return "here input shapes differ from step to step"
    if _waits_inside(view, begins, ends, times):
        return "here the host waits for the device inside the step"
    return None


def _varies(view: View, begins: Times, ends: Times) -> bool:
    """Whether the operators' input shapes differ between steps."""
    operators = view.operators.filter(pl.col("input_shapes").is_not_null() & pl.col("parent").is_null())
    start = operators["start_ns"].to_numpy()
    shapes = [
        operators["input_shapes"].filter(pl.Series((start >= begin) & (start < end))).sort().to_list()
        for begin, end in zip(begins, ends, strict=True)
    ]
    return any(each != shapes[0] for each in shapes[1:])


def _waits_inside(view: View, begins: Times, ends: Times, times: Times) -> bool:
    """Whether in most steps the host waits between the first launch and the last."""
    copied = view.work.filter(pl.col("kind") == "copy_out")["launch"].drop_nulls()
    calls = view.trace.launches.with_row_index("launch")
    waits = calls.filter((pl.col("kind") == "synchronise") | pl.col("launch").is_in(copied.implode()))["start_ns"]
    launched = [times[(times >= begin) & (times < end)] for begin, end in zip(begins, ends, strict=True)]
    waiting = [
        waits.is_between(int(each.min()), int(each.max()), closed="none").any() for each in launched if each.size
    ]
    return sum(waiting) > _MANY * len(begins)


def _median(durations: pl.Series) -> float:
    return float(durations.median() or 0)  # type: ignore[arg-type]


RULE: Final = Rule(
    id="launch-bound",
    title="The host launches work too slowly",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost to late launches")},
    check=check,
    remedies={
        "jax": Remedy(
            "Let one compiled function do more: the whole step, in training with its optimizer, or several of them.",
            "train_step = jax.jit(train_step, donate_argnums=0)\n"
            "state, losses = jax.lax.scan(train_step, state, batches)   # several steps in one call",
        ),
        "torch_xla": Remedy(
            "Trace less in each step: compile the step once, and let one graph hold all of it.",
            "@torch_xla.compile\ndef train_step(batch):\n"
            "    ...                         # forward, backward and optimizer",
        ),
        "hpu": Remedy(
            "Launch recorded graphs instead of single operators, or compile the model.",
            "import habana_frameworks.torch as ht\n"
            "model = ht.hpu.wrap_in_hpu_graph(model)                         # inference\n"
            'model = torch.compile(model, backend="hpu_backend")              # training without lazy mode\n'
            "from stepscope.remedies import capture_step\n"
            "model = capture_step(model)                                     # whichever suits the mode, training too",
        ),
    },
)
