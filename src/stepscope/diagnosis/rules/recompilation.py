"""# What it finds
Code that is recompiled repeatedly while training runs.

# Why it costs time
A graph is compiled for the shapes and types it saw. A new shape, a changed Python value or a new branch compiles
another graph, which takes as long as hundreds of steps while the device idles.

# How it is measured
Idle time (without a device: the main thread's time) while the launching thread was compiling, seen as frames and events
of the compilers of torch._dynamo, Inductor, Triton, XLA and Habana. Compilations are counted by step. The trace does
not show how long the device had been idle before its first work; compilations there count as much as the others.

If stepscope recorded the program, torch itself reports which guard failed before each compilation: the tensor dimension
that varied, or the Python number that the code had been compiled for (from torch.compile's log, or from what torch kept
in memory). A function that was compiled as often as torch's
limit allows (8 times, unless the program set another limit) is not compiled again but runs operator by operator; the
rule reports this as a note. Compilations of stepscope's own functions are left out of the reasons.

Files beside the trace (`--xla-metrics`, `--xla-debug-log`, `--gaudi-metrics`) add the compilations of the whole run and
the lines that triggered them. The rule reports a note if they show graphs compiled in more than half of the steps after
the first ten, or a graph that took longer than 300 s to compile or 30 s to run, and the trace shows no cost: these are
the limits of torch_xla's own analysis.

# Known false positives
A recording of the first steps shows compilation that never happens again; the finding says how many steps compiled.

# What to do
Pad inputs to few shapes, mark dynamic dimensions, and pass numbers that change as tensors instead of Python numbers.

# Reference
PyTorch, "Dealing with recompilations" (`TORCH_LOGS=recompiles`); PyTorch/XLA, metrics_analysis.cc.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.host import CAUSE_CODES
from stepscope.diagnosis.finding import Location, NotAnswered
from stepscope.diagnosis.rule import (
    Answers,
    Figure,
    Found,
    Limits,
    Remedy,
    Rule,
    Threshold,
    View,
    note_from_files,
    tally_figures,
)
from stepscope.trace.metadata import WARM_UP_STEPS
from stepscope.trace.program_facts import CompilationFacts
from stepscope.trace.window import Times
from stepscope.whatif.changes import without_cause

_SIZE: Final = re.compile(r"tensor '(.{1,200}?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)")
_PROPERTY: Final = re.compile(
    r"tensor '(.{1,200}?)' (dtype|device|stride|requires_grad|dispatch key set|rank|Tensor) ?(?:mismatch|set mismatch)"
)
_EQUAL: Final = re.compile(r"^(?:\d+/\d+: )?(.{1,200}?) (?:==|is) (.{1,60}?)(?:\s{2,}|\n|$)")
_OWN_FILE: Final = re.compile(r"/stepscope/(capture|record)/")
_MOST_VALUES: Final = 4


@dataclass(frozen=True, slots=True)
class VaryingGuard:
    """A guard that made a function compile repeatedly.

    Attributes:
        count: compilations that it caused.
        what: what varied, worded to follow "because".
        remedy: what prevents these compilations.
    """

    function: str
    file: str | None
    line: int | None
    count: int
    what: str
    remedy: Remedy


def varying_guards(compilations: Sequence[CompilationFacts]) -> list[VaryingGuard]:
    """Guards that failed, the most frequent first.

    Ignores the first compilation of a function and stepscope's own functions.
    """
    found: defaultdict[tuple[str, str | None, int | None, str, str], list[str]] = defaultdict(list)
    for fact in compilations:
        if fact.reason and not (fact.file and _OWN_FILE.search(fact.file)):
            kind, name, values = _read(fact.reason)
            found[fact.function, fact.file, fact.line, kind, name].extend(values)
    guards = [
        VaryingGuard(function, file, line, max(len(values) // 2, 1), _what(kind, name, values), _remedy(kind, name))
        for (function, file, line, kind, name), values in found.items()
    ]
    return sorted(guards, key=lambda guard: -guard.count)


def _read(reason: str) -> tuple[str, str, list[str]]:
    """The kind of guard, its subject, and its values: the expected one and, if known, the actual one."""
    if size := _SIZE.search(reason):
        return "size", f"{size[1]}, {size[2]}", [size[3], size[4]]
    if other := _PROPERTY.search(reason):
        return "property", f"{other[2]} of {other[1]}", ["", ""]
    if equal := _EQUAL.search(reason):
        return "constant", equal[1].strip(), [equal[2].strip(), ""]
    return "other", reason.splitlines()[0][:120].strip(), ["", ""]


def _what(kind: str, name: str, values: Sequence[str]) -> str:
    seen = list(dict.fromkeys(value for value in values if value))
    listed = ", ".join(seen[:_MOST_VALUES]) + (", ..." if len(seen) > _MOST_VALUES else "")
    if kind == "size":
        tensor, _, dimension = name.rpartition(", ")
        return f"dimension {dimension} of {tensor} varies ({listed})"
    if kind == "constant":
        return f"{name} is a constant of the compiled code and changes ({listed})"
    if kind == "property":
        return f"the {name} changes"
    return f"a guard failed: {name}"


def _remedy(kind: str, name: str) -> Remedy:
    if kind == "size":
        tensor, _, dimension = name.rpartition(", ")
        return Remedy(
            "Mark the dimension as dynamic, or pad it to few sizes.",
            f"torch._dynamo.mark_dynamic({tensor}, {dimension})     # before the compiled call\n"
            "# or for all dimensions: torch.compile(..., dynamic=True)\n"
            "# or pad:\n"
            "from stepscope.remedies import PadCollate\n"
            "loader = DataLoader(dataset, ..., collate_fn=PadCollate(lengths=(64, 128, 256)))",
        )
    if kind == "constant":
        return Remedy(
            "Keep the number in a tensor, so that compiled code reads it instead of being made for it.",
            f"{name} = torch.tensor({name})     # once; then {name}.add_(1) instead of {name} += 1\n"
            "from stepscope.remedies import LoopConstants\n"
            "for value in LoopConstants(values, device=device):     # where it runs through known numbers\n"
            "    ...",
        )
    return Remedy(
        "Give compiled code the same kind of input each time.",
        "# TORCH_LOGS=recompiles names the guard and the line of each compilation",
    )


_KEEP_GRAPHS: Final = Remedy(
    "See what changes from step to step, then pad to few shapes and keep Python numbers that change out of the graph.",
    "PT_XLA_DEBUG_LEVEL=2 python train.py        # PyTorch/XLA: names the line that made a new graph\n"
    "PT_HPU_METRICS_FILE=metrics.json PT_HPU_METRICS_DUMP_TRIGGERS=process_exit,mark_step python train.py    # Gaudi",
)
_SMALLER_GRAPHS: Final = Remedy(
    "Mark the ends of steps, so that each graph holds one step, and keep loops of many rounds out of it.",
    "torch_xla.sync()                            # PyTorch/XLA; htcore.mark_step() on Intel Gaudi\n"
    "from stepscope.remedies import mark_step    # or what is right on either, and nothing elsewhere\n"
    "mark_step()",
)
_REGION: Final = r"^Torch-Compiled Region|^CompiledFunction$"


def check(view: View, limits: Limits) -> Answers:
    varying = varying_guards(_known(view))
    full = _at_limit(view, limits, varying)
    pieces = view.pieces_of("compilation")
    cost = int(pieces["duration_ns"].sum())
    if not limits.reached(cost):
        yield from _reported(view, limits)
        for guard in full:
            yield _note(view, limits, guard)
        yield from _open_question(view)
        return
    count, steps = _compilations(view)
    # A function that is no longer compiled is the reason only if there is no other.
    worst = next((guard for guard in varying if guard not in full), varying[0] if varying else None)
    shapes = _shapes_of_regions(view)
    yield Found(
        f"{view.percent(cost)} of the time goes to compiling code: {count} "
        f"{'compilation' if count == 1 else 'compilations'}"
        + (f" in {steps} of {view.step_count} steps" if view.complete_steps.height else "")
        + (f", because {worst.what}" if worst is not None else ""),
        cost,
        basis="idle time of the device while the launching thread was compiling"
        if view.device is not None
        else "time of the main thread inside compilers",
        confidence="high" if steps > 1 else "medium",
        figures=[
            Figure("compilations", count, "count"),
            Figure("steps that compiled", steps, "count"),
            *(Figure(f"compilations because {guard.what}", guard.count, "count") for guard in varying[:3]),
            *([Figure("different input shapes of compiled code", shapes, "count")] if shapes > 1 else []),
            *tally_figures("compilations of graphs", view.run_counts.compilations),
        ],
        intervals=view.longest(pieces, "compiling"),
        remedy=worst.remedy
        if worst is not None
        else Remedy(
            "See what changes with TORCH_LOGS=recompiles, then pad to few shapes or mark the dimension dynamic.",
            "torch._dynamo.mark_dynamic(batch, 1)\n"
            "# or pad:\n"
            "from stepscope.remedies import PadCollate\n"
            "loader = DataLoader(dataset, ..., collate_fn=PadCollate(lengths=(64, 128, 256)))",
        ),
        where=_place(worst) or view.at_triggers(view.run_counts.compile_triggers) or view.locations(pieces),
        change=without_cause("compilation"),
    )
    for guard in full:
        if guard is not worst:
            yield _note(view, limits, guard)


def _known(view: View) -> tuple[CompilationFacts, ...]:
    """The compilations of the whole run by torch.compile's log, else the latest that the recorder saw."""
    logged = view.run_counts.compiled
    if not logged:
        return view.program.compilations
    return tuple(
        CompilationFacts(function=each.function, file=each.file, line=each.line, reason=each.reason) for each in logged
    )


def _at_limit(view: View, limits: Limits, varying: Sequence[VaryingGuard]) -> list[VaryingGuard]:
    """Guards of functions that were compiled as often as torch allows, one for each function."""
    limit = _limit(view, limits)
    totals = Counter((fact.function, fact.file, fact.line) for fact in _known(view))
    # More compilations than this mean that the program set a different limit.
    found = {
        (guard.function, guard.file, guard.line): guard
        for guard in reversed(varying)
        if totals[guard.function, guard.file, guard.line] == limit > 0
    }
    return list(found.values())


def _limit(view: View, limits: Limits) -> float:
    own = view.program.torch.get("recompile_limit")
    return float(own) if isinstance(own, int) and own > 0 else limits["limit"]


def _note(view: View, limits: Limits, guard: VaryingGuard) -> Found:
    count = sum(fact.function == guard.function and fact.line == guard.line for fact in _known(view))
    return Found(
        f"{guard.function}() was compiled {count} times, because {guard.what}; torch has stopped compiling it and runs "
        "it operator by operator",
        0,
        basis="no saving: what compiled code would take is not in the trace",
        confidence="medium",
        figures=[Figure(f"compilations of {guard.function}()", count, "count", _limit(view, limits))],
        remedy=guard.remedy,
        where=_place(guard),
        severity="note",
    )


def _reported(view: View, limits: Limits) -> Iterator[Found]:
    """Compilation that the files beside the trace report but that has no cost in the trace."""
    counts = view.run_counts
    compilations, executions = counts.compilations, counts.executions
    figures = tally_figures("compilations of graphs", compilations)
    known = {
        "steps in the whole run": counts.steps,
        f"compilations after the first {WARM_UP_STEPS} steps": counts.late_compilations,
        "steps to warm up": WARM_UP_STEPS,
    }
    figures += [Figure(name, number, "count") for name, number in known.items() if number is not None]
    where = view.at_triggers(counts.compile_triggers)
    if counts.compiles_too_often and compilations is not None:
        what = f"Graphs were compiled {compilations.count:,} times in {counts.steps:,} steps of the whole run"
        if counts.late_compilations is not None:
            what += f", {counts.late_compilations:,} of them after the first {WARM_UP_STEPS}"
        yield note_from_files(what, figures, _KEEP_GRAPHS, where)
    longest = limits["longest_compilation"]
    if compilations is not None and (compilations.longest_ns or 0) > longest:
        figure = Figure("longest of the compilations of graphs", compilations.longest_ns or 0, "ns", longest)
        yield note_from_files("One graph took very long to compile", [figure], _SMALLER_GRAPHS, where)
    longest = limits["longest_execution"]
    if executions is not None and (executions.longest_ns or 0) > longest:
        figure = Figure("longest of the executions of graphs", executions.longest_ns or 0, "ns", longest)
        yield note_from_files("One graph took very long to run", [figure], _SMALLER_GRAPHS)


def _open_question(view: View) -> Iterator[NotAnswered]:
    """Whether compilation continues, if a file counts graphs but not steps."""
    compilations = view.run_counts.compilations
    if compilations is not None and compilations.count >= 2 and view.run_counts.steps is None:
        yield NotAnswered(
            "Are graphs still compiled once training runs steadily?",
            f"A file beside the trace counts {compilations.count:,} compilations in the whole run, not in which steps.",
            "record steps that are not the first, or set PT_HPU_METRICS_DUMP_TRIGGERS=process_exit,mark_step on Gaudi",
        )


def _place(guard: VaryingGuard | None) -> tuple[Location, ...]:
    if guard is None or guard.file is None or guard.line is None:
        return ()
    return (Location(guard.file, guard.line, guard.function),)


def _shapes_of_regions(view: View) -> int:
    """Number of different input shapes with which compiled code started in the span."""
    parents = view.trace.operators["name"].gather(view.operators["parent"])
    inside = view.operators.filter(
        parents.str.contains(_REGION).fill_null(False) & pl.col("input_shapes").is_not_null()
    )
    first = inside.group_by("parent", maintain_order=True).agg(pl.col("name", "input_shapes").first())
    return first.select("name", "input_shapes").n_unique()


def _compiling(view: View) -> tuple[Times, Times]:
    """Begins and ends of the outermost compiling slices that begin in the span.

    What other threads compile while the main thread waits in its compiler is part of the same compilation.
    """
    activity = view.activity
    compiling = activity.cause == CAUSE_CODES["compilation"]
    around = activity.around
    outermost = compiling & ~((around >= 0) & compiling[np.maximum(around, 0)])
    starts, ends = activity.start[outermost], activity.end[outermost]
    on_main = activity.lane[outermost] == view.lane
    main = np.sort(starts[on_main]), np.sort(ends[on_main])
    before = np.searchsorted(main[0], starts, side="right") - 1
    parts = ~on_main & (before >= 0) & (ends <= np.append(main[1], -1)[before])
    inside = (starts >= view.span.start_ns) & (starts < view.span.end_ns) & ~parts
    return starts[inside], ends[inside]


def _compilations(view: View) -> tuple[int, int]:
    """Outermost compiling slices in the span, and the number of steps they start in."""
    starts, _ = _compiling(view)
    bounds = view.complete_steps["start_ns"].to_numpy()
    steps = len(np.unique(np.searchsorted(bounds, starts, side="right"))) if len(bounds) else min(len(starts), 1)
    return len(starts), steps


RULE: Final = Rule(
    id="recompilation",
    title="Code is compiled during the steps",
    thresholds={
        "share": Threshold(0.01, "share", "share of the time lost to compiling"),
        "limit": Threshold(8, "count", "compilations of one function after which torch runs it uncompiled"),
        "longest_compilation": Threshold(300_000_000_000, "ns", "one graph's compilation, by a file beside the trace"),
        "longest_execution": Threshold(30_000_000_000, "ns", "one graph's execution, by a file beside the trace"),
    },
    check=check,
    remedies={
        "jax": Remedy(
            "See what changes from call to call, pad to few shapes, and keep what was compiled between runs.",
            'jax.config.update("jax_explain_cache_misses", True)      # says why something is compiled\n'
            'jax.config.update("jax_compilation_cache_dir", "/path/to/cache")\n'
            "length = -(-length // 64) * 64                            # pad: few different shapes",
        ),
        "torch_xla": Remedy(
            "See what makes a new graph, pad to few shapes, and keep what was compiled between runs.",
            "PT_XLA_DEBUG_LEVEL=2 python train.py                 # names the line that made a new graph, and why\n"
            'torch_xla.runtime.initialize_cache("/path/to/cache")   # before anything is computed\n'
            "length = -(-length // 64) * 64                       # pad: few different shapes",
        ),
        "hpu": Remedy(
            "See what changes, pad or bucket inputs to few shapes, let the bridge do so, and keep recipes between "
            "runs.",
            "PT_HPU_METRICS_FILE=metrics.json PT_HPU_METRICS_DUMP_TRIGGERS=process_exit,mark_step python train.py\n"
            "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES=1 python train.py            # buckets and pads by itself\n"
            "PT_HPU_RECIPE_CACHE_CONFIG=/path/to/cache,false,4096 python train.py\n"
            "length = -(-length // 64) * 64                                  # pad: few different shapes\n"
            "from stepscope.remedies import LoopConstants, mark_step\n"
            "mark_step()                                                     # around a part whose shapes change\n"
            "for value in LoopConstants(values, device=device):             # not steps[i]: each i is another graph\n"
            "    ...",
        ),
    },
)
