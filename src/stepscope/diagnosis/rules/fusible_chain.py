"""# What it finds
Chains of short element-wise operators, written one by one, that one fused function could replace.

# Why it costs time
Each operator of `0.5 * x * (1 + torch.tanh(...))` reads a whole tensor and writes a whole new one, and autograd keeps
most of them for the backward pass, which reads and writes as much again. A fused function reads its input once and
writes its result once; intermediate values stay in registers.

# How it is measured
A chain is a run of outermost operators on one thread, each taking a tensor of the chain's current shape, with no
other operator between them; chains with the same operator names are counted together. If the source is known, the
chain's lines must name at least half of its operators: what a library runs in one call is not reported. The cost
covers the operators, their backward operators, and without a device the Python time between them. What a fused
function would still need is subtracted: the time to read its inputs and write its result, at the rate at which the
chain's own additions and multiplications moved data, and the computing time of exp, tanh and similar functions, once
for the forward and once for the backward pass. On a CPU, calling a compiled function takes 15 us, 100 us with its
backward pass.

# Known false positives
A chain whose intermediate results are needed elsewhere saves less. Code that a compiler has already fused runs other
operators and is not reported.

# What to do
Use the framework's function for it (`F.gelu`, `F.layer_norm`, `F.log_softmax`, ...), or compile the function that holds
the chain.

# Reference
MindStudio's advisor looks for 2 to 10 operators that repeat 5 times; TraceLens drops fusions that save less than 2 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NamedTuple

import numpy as np

from stepscope.analysis.host import CAUSE_CODES
from stepscope.analysis.patterns import Chain, chains
from stepscope.analysis.work import ARITHMETIC, PLAIN, REDUCTIONS
from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Change, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View
from stepscope.diagnosis.rules._operators import called_from_python, length_ns, pauses, scaled_with_pauses, working_ns
from stepscope.diagnosis.rules.loop_in_step import rows_of_loops
from stepscope.trace.nesting import at
from stepscope.whatif.changes import scaled_host_time, scaled_slices, scaled_work_of, together

_EXCLUDED: Final = ("optimizer", "input", "checkpoint", "logging", "profiler_overhead")
_SHORTEST: Final = 2
_COMPILED_NS: Final = 15_000
_COMPILED_BOTH_NS: Final = 100_000
"""Time to call a compiled function on a CPU, forward, and with its backward pass, measured with empty tensors."""


class _Fused(NamedTuple):
    """A function that replaces a chain: its name for titles, and how to use it."""

    what: str
    remedy: Remedy


def _function(name: str, code: str) -> _Fused:
    return _Fused(f"{name}()", Remedy(f"Call {name}(), which does all of it in one kernel.", code))


_GELU_TANH: Final = _function("F.gelu", 'y = torch.nn.functional.gelu(x, approximate="tanh")')
_GELU: Final = _function("F.gelu", "y = torch.nn.functional.gelu(x)")
_SILU: Final = _function("F.silu", "y = torch.nn.functional.silu(x)      # instead of x * torch.sigmoid(x)")
_BATCH_NORM: Final = _function(
    "F.batch_norm", "self.norm = torch.nn.BatchNorm1d(features)   # or BatchNorm2d for images"
)
_RMS_NORM: Final = _function(
    "F.rms_norm", "y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)   # or nn.RMSNorm"
)
_RMS_NORM_COMPILED: Final = _Fused(
    "one compiled function",
    Remedy(
        "Compile the function that holds the normalisation; F.rms_norm() is not fused on a CPU.",
        "@torch.compile                # F.rms_norm() runs the same operators on a CPU\ndef rms_norm(x, weight): ...",
    ),
)
_SOFTMAX: Final = _function("torch.softmax", "y = torch.softmax(x, dim=-1)")
_LOG_SOFTMAX: Final = _function(
    "F.log_softmax", "y = torch.nn.functional.log_softmax(x, dim=-1)   # with nll_loss: cross_entropy(x, target)"
)
_DROPOUT: Final = _function("F.dropout", "y = torch.nn.functional.dropout(x, p, training=self.training)")
_OPTIMIZER: Final = _Fused(
    "an optimizer with fused=True",
    Remedy(
        "Let an optimizer of torch.optim update all parameters in one fused call.",
        "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)\noptimizer.step()",
    ),
)
_COMPILE: Final = Remedy(
    "Compile the function that holds these operators: the compiler makes one kernel of them.",
    "@torch.compile                # on the function at the line above\ndef function(x, ...): ...",
)


def _fused_function(view: View, chain: Chain) -> _Fused | None:
    """The function that computes what this chain does; None if no such function is known."""
    names = set(chain.names)
    if _updates_parameters(chain):
        return _OPTIMIZER
    if "softmax" in names and "log" in names:
        return _LOG_SOFTMAX
    if "exp" in names and "sum" in names and "div" in names:
        return _LOG_SOFTMAX if "log" in names else _SOFTMAX
    if "logsumexp" in names and "sub" in names:
        return _LOG_SOFTMAX
    if names & {"rand_like", "bernoulli"} and names & {"mul", "div"}:
        return _DROPOUT
    normalisation = _normalisation(chain)
    if normalisation is _RMS_NORM and view.device is None:
        return _RMS_NORM_COMPILED
    return normalisation or _activation(chain)


def _updates_parameters(chain: Chain) -> bool:
    """Whether the chain is Adam: a running average's square root, and parameters overwritten with a quotient."""
    changed = {name for name, in_place in zip(chain.names, chain.in_place, strict=True) if in_place}
    return "sqrt" in chain.names and bool(changed & {"addcdiv", "sub", "add"}) and bool(changed & {"mul", "lerp"})


def _normalisation(chain: Chain) -> _Fused | None:
    names = set(chain.names)
    root = names & {"sqrt", "rsqrt", "std", "pow"} and names & {"div", "mul", "rsqrt"}
    averages = names & {"mean", "var", "var_mean"}
    if not root or not averages or not names & {"sqrt", "rsqrt", "std"}:
        return None
    if "sub" not in names:
        return _RMS_NORM if "mean" in names and names & {"pow", "square", "mul"} else None
    averaged = _averaged(chain)
    return _layer_norm(averaged) if averaged else _BATCH_NORM


def _layer_norm(averaged: str) -> _Fused:
    return _function(
        "F.layer_norm", f"y = torch.nn.functional.layer_norm(x, {averaged}, weight, bias, eps)   # or nn.LayerNorm"
    )


def _averaged(chain: Chain) -> str:
    """Code for the lengths of the last dimensions that are averaged over to subtract; empty if other dimensions are."""
    for name, moved in zip(chain.names, chain.traffic, strict=True):
        small, large = min(moved.inputs, key=prod, default=()), moved.output
        if name == "sub" and small and prod(small) < prod(large):
            kept = [place for place, length in enumerate(small, len(large) - len(small)) if length == large[place]]
            averaged = len(large) - len(kept)
            return f"x.shape[-{averaged}:]" if averaged and kept == list(range(len(kept))) else ""
    return "x.shape"  # minus a number: the average of all


def _activation(chain: Chain) -> _Fused | None:
    names = chain.names
    if "erf" in names and names.count("mul") + names.count("div") >= 2:
        return _GELU
    bend = names.index("tanh") if "tanh" in names else 0
    cubed = names[:bend].count("mul") + names[:bend].count("pow") >= 2 and "add" in names[:bend]
    if cubed and {"add", "mul"} <= set(names[bend:]):
        return _GELU_TANH
    after = names[names.index("sigmoid") + 1 :] if "sigmoid" in names else ()
    return _SILU if after and after[0] == "mul" else None


@dataclass(frozen=True, slots=True)
class _Cost:
    """Cost of one kind of chain over the span, and what a fused function would still take; nanoseconds.

    `working_ns` is the part of the remaining time spent on the calculation itself, which now takes `worked_ns` with a
    device, or the whole cost without one.
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
    kinds: defaultdict[tuple[object, ...], list[Chain]] = defaultdict(list)
    for chain in _chains(view):
        kinds[(chain.names, chain.place)].append(chain)
    for same in _merged(view, kinds):
        yield from _weighed(view, limits, same)


def rows_of_named_functions(view: View) -> Rows:
    """The operators of chains that a single named function replaces."""
    found = _chains(view)
    return np.array([row for chain in found if _fused_function(view, chain) for row in chain.operators], np.int64)


def _chains(view: View) -> list[Chain]:
    """Chains that the program's own statements contain, as far as their source is known."""
    made = {each.file: each.names for each in view.program.operations}
    wholes = {(each.file, each.line) for each in view.program.functions}  # functions without known lines
    return [
        chain for chain in chains(view.trace, _candidates(view), _SHORTEST) if _is_written(view, chain, made, wholes)
    ]


def _is_written(view: View, chain: Chain, made: Mapping[str, tuple[str, ...]], wholes: set[tuple[str, int]]) -> bool:
    """Whether the chain's lines name its operators: if most are missing, a library that they call runs them."""
    numbers = np.unique(at(view.attribution.place, view.slices_of_operators(np.array(chain.operators, np.int64))))
    places = [view.attribution.places[number] for number in numbers.tolist() if number >= 0]
    named: set[str] = set()
    for place in places:
        known = made.get(place.file, ())
        if not place.exact_line or not 0 < place.line <= len(known) or (place.file, place.line) in wholes:
            return True
        named.update(known[place.line - 1].split())
    operators = {_WRITTEN.get(name, name) for name in chain.names}
    return not places or len(operators & named) >= _MOST * len(operators)


_WRITTEN: Final = {"rsub": "sub", "square": "pow", "var_mean": "var"}
"""Operators that the source may name otherwise."""
_MOST: Final = 0.5
"""Share of a chain's operators that its lines name if the program wrote them."""


def _candidates(view: View) -> Rows:
    """Operators that the program called itself, in order of time, outside the optimizer, the loader and loops."""
    rows = called_from_python(view)
    causes = view.activity.cause_of(view.slices_of_operators(rows))
    keep = ~np.isin(causes, [CAUSE_CODES[cause] for cause in _EXCLUDED]) & ~np.isin(rows, rows_of_loops(view))
    return rows[keep]


def _merged(view: View, kinds: dict[tuple[object, ...], list[Chain]]) -> list[list[Chain]]:
    """Merge kinds of chains that the same named function replaces in the same function of the user's code."""
    merged: defaultdict[tuple[object, ...], list[Chain]] = defaultdict(list)
    for key, same in kinds.items():
        function = _fused_function(view, same[0])
        merged[key if function is None else (function, same[0].place)].extend(same)
    return list(merged.values())


def _weighed(view: View, limits: Limits, same: Sequence[Chain]) -> Answers:
    function = _fused_function(view, same[0])
    repetitions = len(same) / view.step_count
    minimum, shortest = limits["repetitions"], limits["operators"]
    if function is None and (repetitions < minimum or min(len(same[0].names), 2 * len(set(same[0].names))) < shortest):
        return
    forward = np.array([row for chain in same for row in chain.operators], np.int64)
    backward = view.backward_of(forward)
    cost = _cost(view, same, forward, backward)
    if view.device is None and function in (None, _RMS_NORM_COMPILED):
        called = len(same) * (_COMPILED_BOTH_NS if len(backward) else _COMPILED_NS)
        cost = replace(cost, remaining_ns=min(cost.remaining_ns + called, cost.total_ns))
    if not limits.reached(cost.saved_ns):
        return
    remaining = cost.remaining_ns / cost.total_ns
    yield Found(
        _title(view, same, repetitions, function),
        cost.saved_ns,
        basis=("forward and backward" if len(backward) else "the operators' time")
        + f", without the {remaining:.0%} that a fused function would still take",
        confidence="medium",
        figures=[
            Figure(f"chains {view.per}", repetitions, "count", minimum if function is None else None),
            Figure("operators in a chain", len(same[0].names), "count", shortest if function is None else None),
            view.ns_per_step("forward operators", cost.forward_ns),
            view.ns_per_step("backward operators", cost.backward_ns),
            Figure(
                "numbers read and written by a chain", sum(each.elements_moved for each in same) // len(same), "count"
            ),
            Figure("share of the time that a fused function would still take", remaining, "share"),
            Figure("by a fused function", sum(each.elements_moved_fused for each in same) // len(same), "count"),
        ],
        intervals=(_interval(view, max(same, key=lambda chain: chain.elements_moved)),),
        remedy=function.remedy if function is not None else _COMPILE,
        where=view.at_operators(forward),
        change=_fused(view, same, np.concatenate([forward, backward]), cost),
    )


def _fused(view: View, same: Sequence[Chain], rows: Rows, cost: _Cost) -> Change:
    """Replace each chain by one call: one launch on the host, and on a device the remaining time of its work."""
    between = pauses(view, *(np.array(chain.operators, np.int64) for chain in same))
    if view.device is None:
        return scaled_with_pauses(rows, [between], 1 - cost.saved_ns / cost.total_ns)
    once = len(same) / sum(len(chain.names) for chain in same)
    return together(
        scaled_work_of(rows, min(cost.working_ns / max(cost.worked_ns, 1), 1.0)),
        scaled_slices(view.slices_of_operators(rows), once),
        scaled_host_time(*between, once),
    )


def _title(view: View, same: Sequence[Chain], repetitions: float, function: _Fused | None) -> str:
    names = list(dict.fromkeys(same[0].names))
    listed = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    times = f"once {view.a_step}" if round(repetitions, 1) == 1 else f"{repetitions:,.3g} times {view.a_step}"
    what = function.what if function is not None else "one fused kernel"
    return f"{len(same[0].names)} operators one after the other ({listed}), {times}: {what} does it at once"


def _interval(view: View, chain: Chain) -> Interval:
    start, duration = view.trace.operators["start_ns"], view.trace.operators["duration_ns"]
    begin, last = int(start[chain.operators[0]]), chain.operators[-1]
    return Interval(begin, int(start[last] + duration[last]) - begin, f"{len(chain.names)} operators in a chain")


def _cost(view: View, same: Sequence[Chain], forward: Rows, backward: Rows) -> _Cost:
    forward_ns, backward_ns = view.cost_ns(forward), view.cost_ns(backward)
    between = length_ns(view, pauses(view, *(np.array(chain.operators, np.int64) for chain in same)))
    working = working_ns(view)
    rate = _ns_per_element(same, working)
    calculating = streaming = 0.0
    for chain in same:
        for name, row, moved in zip(chain.names, chain.operators, chain.traffic, strict=True):
            if name in ARITHMETIC:
                calculating += max(working[row] - rate * moved.elements, 0.0)
        # An average reads its input once before the result is used. The backward pass also reads the gradient.
        moved_once = chain.elements_moved_fused + (0 if REDUCTIONS.isdisjoint(chain.names) else chain.elements)
        streaming += rate * (2 * moved_once + chain.elements if len(backward) else moved_once)
    calculating *= 2 if len(backward) else 1
    count = sum(len(chain.names) for chain in same)
    worked = int(working[view.outermost(forward)].sum() + working[backward].sum())
    waiting = forward_ns + backward_ns - worked if view.device else between
    # One launch, or one line of Python, remains for each chain.
    rest = max(waiting, 0) * len(same) / count
    left = calculating + streaming
    return _Cost(forward_ns, backward_ns, between, int(left + rest), int(left), worked)


def _ns_per_element(same: Sequence[Chain], working: Rows) -> float:
    """Time per number read or written by the chains' plain operators, or by all of them if none are plain."""
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
    title="Element-wise operators run one by one where one fused function would do",
    thresholds={
        "share": Threshold(0.02, "share", "share of the {period} that fusing would save"),
        "repetitions": Threshold(5, "count", "chains of a kind in a step, where no named function replaces them"),
        "operators": Threshold(3, "count", "operators in a chain, where no named function replaces them"),
    },
    check=check,
    needs=("operators", "shapes"),
)
