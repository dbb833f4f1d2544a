"""# What it finds
Chains of short element-wise operators, written one by one, that one fused function could do at once.

# Why it costs time
Each operator of `0.5 * x * (1 + torch.tanh(...))` reads a whole tensor and writes a whole new one, and autograd keeps
most of them for the backward pass, which does the same again. A fused function reads its input once and writes its
result once; what lies between never leaves the processor's registers.

# How it is measured
Outermost operators that follow each other on a thread, each taking a tensor of the shape that the chain made so far,
with no other operator between; chains of equal names are counted together. Their cost is that of the operators, of
the backward operators that they caused, and without a device of the Python time between them. What a fused function
would still need is taken off: the time to read its inputs and write its result, at the rate at which the chain's own
additions and multiplications moved data, and the time that exp, tanh and their like calculate, once for the
forward and once for the backward pass.

# Known false positives
A chain whose intermediate results are needed elsewhere saves less. Code that a compiler has fused already runs other
operators, and is not found.

# What to do
Use the function that the framework has for it (`F.gelu`, `F.layer_norm`, `F.log_softmax`, ...), or compile the function
that holds the chain.

# Reference
MindStudio's advisor looks for 2 to 10 operators repeated 5 times; TraceLens drops fusions that save less than 2 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from stepscope.analysis.host import CAUSE_CODES
from stepscope.analysis.patterns import Chain, chains
from stepscope.analysis.work import ARITHMETIC, PLAIN, REDUCTIONS
from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Rule, Threshold, View
from stepscope.diagnosis.rules._operators import (
    FusedFunction,
    called_from_python,
    fused_function,
    pauses_ns,
    pauses_of_all,
    scaled_with_pauses,
    working_ns,
)
from stepscope.diagnosis.rules.loop_in_step import rows_of_loops
from stepscope.trace.nesting import Rows
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_host_time, scaled_slices, scaled_work_of, together

_EXCLUDED: Final = ("optimizer", "input", "checkpoint", "logging", "profiler_overhead")
_SHORTEST: Final = 2


@dataclass(frozen=True, slots=True)
class _Cost:
    """What chains of one kind cost over the span, and what of it a fused function would still take; nanoseconds.

    Of what remains, `working_ns` is the calculation itself; it was `worked_ns` with a device, all of it without one.
    """

    forward_ns: int
    backward_ns: int
    pauses_ns: int
    remaining_ns: int
    working_ns: int
    worked_ns: int

    @property
    def total_ns(self) -> int:
        return self.forward_ns + self.backward_ns + self.pauses_ns

    @property
    def saved_ns(self) -> int:
        return max(self.total_ns - self.remaining_ns, 0)


def check(view: View, limits: Limits) -> Answers:
    """Group the chains by what they do, and weigh each group."""
    kinds: defaultdict[tuple[object, ...], list[Chain]] = defaultdict(list)
    for chain in chains(view.trace, _candidates(view), _SHORTEST):
        kinds[(chain.names, chain.place)].append(chain)
    for same in _merged(view, kinds):
        yield from _weighed(view, limits, same)


def rows_of_named_functions(view: View) -> Rows:
    """The operators of chains that one named function replaces."""
    on_device = view.device is not None
    named = [
        chain.operators
        for chain in chains(view.trace, _candidates(view), _SHORTEST)
        if fused_function(chain, on_device=on_device) is not None
    ]
    return np.array([row for rows in named for row in rows], np.int64)


def _candidates(view: View) -> Rows:
    """Operators that the program called itself, in order of time, outside the optimizer, the loader and loops."""
    rows = called_from_python(view)
    causes = view.activity.cause_of(view.slices_of_operators(rows))
    keep = ~np.isin(causes, [CAUSE_CODES[cause] for cause in _EXCLUDED]) & ~np.isin(rows, rows_of_loops(view))
    return rows[keep]


def _merged(view: View, kinds: dict[tuple[object, ...], list[Chain]]) -> list[list[Chain]]:
    """Kinds that one named function replaces in one function of the user's are told together."""
    merged: defaultdict[tuple[object, ...], list[Chain]] = defaultdict(list)
    for key, same in kinds.items():
        function = fused_function(same[0], on_device=view.device is not None)
        merged[key if function is None else (function, same[0].place)].extend(same)
    return list(merged.values())


def _weighed(view: View, limits: Limits, same: Sequence[Chain]) -> Answers:
    function = fused_function(same[0], on_device=view.device is not None)
    repetitions = len(same) / view.step_count
    minimum = limits["repetitions"]
    shortest = limits["operators"]
    if function is None and (repetitions < minimum or min(len(same[0].names), 2 * len(set(same[0].names))) < shortest):
        return
    forward = np.array([row for chain in same for row in chain.operators], np.int64)
    backward = view.backward_of(forward)
    cost = _cost(view, same, forward, backward)
    if not limits.reached(cost.saved_ns):
        return
    remaining = cost.remaining_ns / cost.total_ns
    yield Found(
        _title(same, repetitions, function),
        cost.saved_ns,
        basis=f"forward and backward, without the {remaining:.0%} that a fused function would still take"
        if len(backward)
        else f"the operators' time without the {remaining:.0%} that a fused function would still take",
        confidence="medium",
        figures=[
            Figure(f"chains {view.per}", repetitions, "count", minimum if function is None else None),
            Figure("operators in a chain", len(same[0].names), "count", shortest if function is None else None),
            view.ns_per_step("forward operators", cost.forward_ns),
            view.ns_per_step("backward operators", cost.backward_ns),
            Figure("numbers read and written by a chain", _mean([each.elements_moved for each in same]), "count"),
            Figure("by a fused function", _mean([each.elements_moved_fused for each in same]), "count"),
        ],
        intervals=(_interval(view, max(same, key=lambda chain: chain.elements_moved)),),
        remedy=(function or _COMPILE).remedy,
        where=view.at_operators(forward),
        change=_fused(view, same, np.concatenate([forward, backward]), cost),
    )


def _fused(view: View, same: Sequence[Chain], rows: Rows, cost: _Cost) -> Change:
    """One call instead of each chain: on a device it still takes what its work does, the host launches once."""
    between = pauses_of_all(view, [np.array(chain.operators, np.int64) for chain in same])
    if view.device is None:
        return scaled_with_pauses(rows, [between], 1 - cost.saved_ns / cost.total_ns)
    once = len(same) / sum(len(chain.names) for chain in same)
    return together(
        scaled_work_of(rows, min(cost.working_ns / max(cost.worked_ns, 1), 1.0)),
        scaled_slices(view.slices_of_operators(rows), once),
        scaled_host_time(*between, once),
    )


_COMPILE: Final = FusedFunction(
    "torch.compile",
    "one compiled function",
    "Compile the function that holds these operators: the compiler makes one kernel of them.",
    "@torch.compile                # on the function at the line above\ndef function(x, ...): ...",
)


def _title(same: Sequence[Chain], repetitions: float, function: FusedFunction | None) -> str:
    names = list(dict.fromkeys(same[0].names))
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    times = "once a step" if round(repetitions, 1) == 1 else f"{repetitions:,.3g} times a step"
    what = function.what if function is not None else "one fused kernel"
    return f"{len(same[0].names)} operators one after the other ({listed}), {times}: {what} does it at once"


def _mean(values: Sequence[int]) -> int:
    return sum(values) // len(values)


def _interval(view: View, chain: Chain) -> Interval:
    start, duration = view.trace.operators["start_ns"], view.trace.operators["duration_ns"]
    begin, last = int(start[chain.operators[0]]), chain.operators[-1]
    return Interval(begin, int(start[last] + duration[last]) - begin, f"{len(chain.names)} operators in a chain")


def _cost(view: View, same: Sequence[Chain], forward: Rows, backward: Rows) -> _Cost:
    forward_ns, backward_ns = view.cost_ns(forward), view.cost_ns(backward)
    between = sum(pauses_ns(view, np.array(chain.operators, np.int64)) for chain in same)
    working = working_ns(view)
    rate = _ns_per_element(same, working)
    calculating = 0.0
    streaming = 0.0
    for chain in same:
        for name, row, moved in zip(chain.names, chain.operators, chain.traffic, strict=True):
            if name in ARITHMETIC:
                calculating += max(working[row] - rate * moved.elements, 0.0)
        # An average must be known before it is used: its input is read twice. The backward pass reads the gradient too.
        moved_once = chain.elements_moved_fused + (0 if REDUCTIONS.isdisjoint(chain.names) else chain.elements)
        streaming += rate * (2 * moved_once + chain.elements if len(backward) else moved_once)
    calculating *= 2 if len(backward) else 1
    count = sum(len(chain.names) for chain in same)
    worked = _sum_working(view, working, forward, backward)
    waiting = forward_ns + backward_ns - worked if view.device else between
    # One launch, or one line of Python, stays of each chain's.
    rest = max(waiting, 0) * len(same) / count
    left = calculating + streaming
    return _Cost(forward_ns, backward_ns, between, int(left + rest), int(left), worked)


def _sum_working(view: View, working: Rows, forward: Rows, backward: Rows) -> int:
    return int(working[view.outermost(forward)].sum() + working[backward].sum())


def _ns_per_element(same: Sequence[Chain], working: Rows) -> float:
    """What the chains' plain operators, or where there are none all of them, took to read or write one number."""
    full = max(chain.elements for chain in same)
    for kinds in (PLAIN, PLAIN | REDUCTIONS | ARITHMETIC):
        rates = [
            working[row] / moved.elements
            for chain in same
            for name, row, moved in zip(chain.names, chain.operators, chain.traffic, strict=True)
            if name in kinds and 2 * moved.elements >= full
        ]
        if rates:
            return float(np.median(rates))
    return 0.0


RULE: Final = Rule(
    id="fusible-chain",
    title="Element-wise operators are run one by one that one fused function would do",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} that fusing would save"),
        "repetitions": Threshold(5, "count", "chains of a kind in a step, where no named function replaces them"),
        "operators": Threshold(3, "count", "operators in a chain, where no named function replaces them"),
    },
    check=check,
    needs=("operators", "shapes"),
)
