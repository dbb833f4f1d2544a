"""# What it finds
The same few operators run very many times in a row within a step.

# Why it costs time
A Python loop over tokens, samples, heads, experts or time steps calls operators on one small piece at a time. Each call
costs Python, dispatch and launch time, and its backward pass often allocates and fills a full-size tensor for one
piece's gradient. One call over the whole tensor does the same work once.

# How it is measured
A loop is a short body of outermost operators that repeats without interruption on one thread within a step, outside the
optimizer and the data loader; the backward operators that it caused belong to it. A stack of equal layers repeats too
but is not a loop: its repetitions run in different modules, or there are as many gradients as if each repetition had
its own parameters. Loops inside a library do not count either: those whose repetitions a library function contains, or
whose operators are torch's data parallelism at work. It is a loop if one `cat` or `stack` joins the results, if an
index counts up, if nothing in it has parameters, or if its repetitions share them. A body of more than 24 operators
counts only if the results are joined, or if the model has fewer parameters than such repetitions need.

The cost is the thread's time in the operators and between them; with a device, the device's time for what they launched
plus its idle time before it. The time of the same work in one call is subtracted: matrix products and element-wise
operators at the best rate in the trace, other operators without the overhead of a call. Slicing and its backward pass
are no longer needed. All repetitions but one are counted as saved, or all but one for each turn of an outer loop.

Repetitions that need the previous one's result are not reported: the recorder reads from the source which names a
loop's body reads before it binds them anew. Where the source is unknown, a body that chooses from its result (`argmax`,
`multinomial`) counts as such a loop. A recurrence that a recurrent layer could run is reported all the same.

Longer bodies are found by their calls: a module that is called on one sample (a first dimension of 1, or no batch
dimension) in each of at least three repetitions of a loop of the recorded source, none of which needs another one's
result or runs backward by itself.

# Known false positives
Without recorded source, loops that are inherently sequential. Without input shapes the estimate of the remaining work
is too low.

# What to do
Batch the loop: reshape so that the repeated dimension becomes part of one operator's input. Replace a loop over time
steps by `nn.RNN`, `nn.LSTM` or `nn.GRU`.

# Reference
PyTorch's ForLoopIndexingPattern (removed in 2026) looked for ten repeated aten::select.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np

from stepscope.analysis.host import TABLES
from stepscope.analysis.loops import SHORT_BODY, Loop, LoopSigns, SignsOfLoops, loops
from stepscope.analysis.module_paths import BACKWARD_NAME
from stepscope.analysis.work import VIEWS, base_name
from stepscope.diagnosis.finding import Interval, Location
from stepscope.diagnosis.lines.costs import lines_at, lines_that_call
from stepscope.diagnosis.lines.graphs import inside_calls
from stepscope.diagnosis.lines.repeats import CHOOSING, Dependencies, OneByOneCalls, dependencies, one_by_one_calls
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._operators import (
    engine_pauses,
    is_update,
    length_ns,
    pauses,
    reported_elsewhere,
    scaled_with_pauses,
    work_left,
)
from stepscope.diagnosis.rules.buffer_broadcast import buffer_broadcasts
from stepscope.diagnosis.view import once
from stepscope.whatif.changes import scaled_stretches, together

_SLICING_NODE: Final = r"(Select|Slice|Narrow|Unbind|Split|SplitWithSizes|Index|IndexSelect|Chunk)Backward\d*$"
_SLICING: Final = ("select", "slice", "narrow", "index", "unbind", "chunk", "split")
_DATA_PARALLEL: Final = r"torch(?:\.|::)distributed\b|c10d::|record_param_comms$"
"""Names that torch's data parallelism gives its own work."""
_REPEATING: Final = ("deepcopy", "step")
"""Library functions that loop over tensors by themselves, and of which other rules tell."""
_COVERED: Final = 0.5
"""Least part of a loop's operators in other loops that makes it one of them."""
_OF_CELLS: Final = ("linear", "addmm", "mm", "matmul", "tanh", "sigmoid", "relu")
_GATES_OF_LSTM: Final = 3
_GROUPED: Final = frozenset({"mean", "sum", "max", "amax", "min", "amin", "logsumexp", "prod"})
"""Operators that reduce the rows which an index has chosen."""
_RECURRENT: Final = frozenset({"tanh", "sigmoid"})
_CELLS: Final = frozenset(
    {"rnn_tanh_cell", "rnn_relu_cell", "gru_cell", "lstm_cell", "rnn_tanh", "rnn_relu", "gru", "lstm"}
)
_NOT_IN_CELLS: Final = frozenset({"mean", "sum", "pow", "softmax", "log_softmax", "layer_norm", "embedding"})
"""Operators that no recurrent layer of the framework has."""


def check(view: View, limits: Limits) -> Answers:
    kinds: defaultdict[tuple[str, ...], list[tuple[Loop, LoopSigns]]] = defaultdict(list)
    for loop, seen in _loops(view)[0]:
        # Group equal bodies, whichever operator a run happens to begin with.
        turns = (loop.body[turn:] + loop.body[:turn] for turn in range(len(loop.body)))
        kinds[min(turns)].append((loop, seen))
    for same in _merged(view, list(kinds.values())):
        yield from _weighed(view, limits, same)
    batched = rows_of_loops(view)
    for each in one_by_one_calls(view):
        yield from _one_by_one(view, limits, each, batched)


def _merged(view: View, kinds: list[list[tuple[Loop, LoopSigns]]]) -> list[list[tuple[Loop, LoopSigns]]]:
    """Join kinds in one function and with one remedy if the operators of one are all among those of the other."""
    merged: dict[tuple[object, ...], list[list[tuple[Loop, LoopSigns]]]] = {}
    for same in sorted(kinds, key=lambda same: -len(set(same[0][0].body))):
        body, where = set(same[0][0].body), view.at_operators(np.concatenate([loop.operators for loop, _ in same]))
        key = (where[0].file, where[0].function, _remedy(same[0][0].body, same[0][1]).text) if where else (id(same),)
        around = next((other for other in merged.setdefault(key, []) if body <= set(other[0][0].body)), None)
        if around is None:
            merged[key].append(list(same))
        else:
            around.extend(same)
    return [same for each in merged.values() for same in each]


def rows_of_loops(view: View) -> Rows:
    """Rows of `operators` in loops of any cost; parameter updates are left out."""
    mine, elsewhere = _loops(view)
    parts = [loop.operators for loop, _ in mine] + [loop.operators for loop in elsewhere if not is_update(loop)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@once
def _loops(view: View) -> tuple[list[tuple[Loop, LoopSigns]], list[Loop]]:
    limits = RULE.limits(view)
    many = max(int(limits["repetitions"]), 2)
    few = max(min(int(limits["clear_repetitions"]), many), 2)
    parameters = view.program.model.parameters if view.program.model else None
    evidence = SignsOfLoops(view.trace, view.activity, view.step_count, parameters)
    carries = dependencies(view)
    found = loops(view.trace, view.activity, view.span, few, view.steps["start_ns"].to_numpy())
    elsewhere = reported_elsewhere(found)
    broadcasts = rows_of(buffer_broadcasts(view))
    repeating = lines_that_call(view, *_REPEATING)
    mine: list[tuple[Loop, LoopSigns]] = []
    dependent: list[tuple[Loop, LoopSigns]] = []
    for loop in found:
        if any(loop is other for other in elsewhere) or _is_in_library(view, loop, broadcasts):
            continue
        if repeating and _places(view, loop) <= repeating:
            continue
        seen = evidence.of(loop)
        is_certain = len(loop.body) <= SHORT_BODY or seen.is_collected or seen.shares_parameters
        if is_certain and seen.is_loop and (loop.repetitions >= many or seen.is_clear):
            (mine if _can_be_batched(loop, carries) else dependent).append((loop, seen))
    long = [loop for loop, _ in [*mine, *dependent] if len(loop.body) > SHORT_BODY]
    inside = [any(other is not loop and loop.operators[0] in other.operators for other in long) for loop, _ in mine]
    return [each for each, is_inside in zip(mine, inside, strict=True) if not is_inside], elsewhere


def _places(view: View, loop: Loop) -> set[tuple[str, int]]:
    return {(place.file, place.line) for place in view.at_operators(loop.operators)}


def _is_in_library(view: View, loop: Loop, broadcasts: Rows) -> bool:
    """Whether a library repeats these operators: in its own function, by its names, or to broadcast buffers."""
    ends = loop.operators[[0, -1]]
    if np.isin(ends, broadcasts).all() or any(re.match(_DATA_PARALLEL, name) for name in loop.body):
        return True
    around, last = (_frames_around(view, int(slice_)) for slice_ in view.slices_of_operators(ends))
    files = (view.trace.frames["file"][row] for row in around if row in set(last))
    common = next((file for file in files if file is not None), None)
    return common is not None and common not in view.user_code


def _frames_around(view: View, slice_: int) -> list[int]:
    """Rows in `frames` of the frames around a slice, innermost first."""
    activity, found = view.activity, []
    while slice_ >= 0:
        if activity.table[slice_] == TABLES.index("frames"):
            found.append(int(activity.row[slice_]))
        slice_ = int(activity.around[slice_])
    return found


def _can_be_batched(loop: Loop, carries: Dependencies) -> bool:
    """Whether no repetition needs another one's result; a plain recurrence has layers of its own."""
    carried = carries.carried(loop) or ()
    chooses = any(base_name(name) in CHOOSING for name in loop.body)
    in_objects = any("." in name.removeprefix("self.") for name in carried)
    return not carried or (_is_recurrence(loop.body) and not chooses and not in_objects)


def _weighed(view: View, limits: Limits, same: list[tuple[Loop, LoopSigns]]) -> Answers:
    runs = [loop for loop, _ in same]
    carries = dependencies(view)
    left_over = sum(carries.runs(loop) for loop in runs)
    forward = np.concatenate([loop.operators for loop in runs])
    backward = view.backward_of(forward)
    rows = np.concatenate([forward, backward])
    repetitions = sum(loop.repetitions for loop in runs)
    between = [pauses(view, *(loop.operators for loop in runs)), engine_pauses(view, backward)]
    cost = view.cost_ns(rows) + sum(length_ns(view, each) for each in between)
    if not limits.reached(cost):
        return
    left = min(_left_ns(view, forward, backward) + _left_in_cells_ns(view, runs[0].body, forward, backward), cost)
    saved = (cost - left) * max(repetitions - left_over, 0) // repetitions
    if not limits.reached(saved):
        return
    basis = "all repetitions but one" + (", forward and backward" if len(backward) else "")
    if (share_left := f"{left / cost:.0%}") != "0%":
        basis += f", without the {share_left} that the same work takes at once"
    largest = max(runs, key=lambda loop: loop.repetitions)
    per_step = repetitions / view.step_count
    often = f"up to {largest.repetitions:,} times in a row, {per_step:,.0f} times {view.a_step}"
    if largest.repetitions == per_step:
        often = f"{largest.repetitions:,} times in a row {view.each_step}"
    clear = same[0][1].is_clear
    minimum = limits["clear_repetitions" if clear else "repetitions"]
    allocated = int(view.operator_costs["bytes_allocated"].to_numpy()[view.inside(rows)].sum())
    is_long = len(runs[0].body) > SHORT_BODY
    body = f"{len(runs[0].body)} operators" if is_long else ", ".join(dict.fromkeys(runs[0].body))
    begins = np.concatenate([loop.operators[:: len(loop.body)] for loop in runs]) if is_long else forward
    # A long body spans several called functions; its place is the call, or the first of them.
    where = view.at_operators(begins)
    yield Found(
        f"{body} {'run' if len(runs[0].body) > 1 else 'runs'} {often}: a loop that one batched call replaces",
        saved,
        basis=basis,
        confidence="medium",
        weighed_ns=cost,
        share_at=2,
        figures=[
            Figure("repetitions in a row", largest.repetitions, "count", minimum),
            Figure(f"repetitions {view.per}", per_step, "count"),
            Figure("operators in a repetition", len(runs[0].body), "count"),
            Figure("share of the time that the same work takes at once", left / cost, "share"),
            view.count_per_step("backward calls", len(backward)),
            Figure("bytes allocated per repetition", allocated // repetitions, "bytes"),
            view.bytes_per_step("bytes allocated", allocated),
        ],
        intervals=(_interval(view, largest),),
        remedy=_of_growing(view, where) or _remedy(runs[0].body, same[0][1]),
        where=where,
        change=scaled_with_pauses(rows, between, 1 - saved / cost),
    )


def _one_by_one(view: View, limits: Limits, found: OneByOneCalls, batched: Rows) -> Answers:
    """A model called on one sample after another, unless such a loop was found by its operators."""
    repeated = found.repetitions
    lanes, starts = repeated["lane"].to_numpy(), repeated["start_ns"].to_numpy()
    ends = starts + repeated["duration_ns"].to_numpy()
    forward = view.outermost(inside_calls(view, repeated))
    if np.isin(forward, batched).mean() > _COVERED:
        return
    backward = view.backward_of(forward)
    between = engine_pauses(view, backward)
    rows = np.concatenate([forward, backward])
    cost = view.cost_ns(rows) + length_ns(view, between)
    if view.device is None:
        cost += int((ends - starts).sum()) - view.cost_ns(forward)
    left = min(_left_ns(view, forward, backward), cost)
    saved = (cost - left) * (repeated.height - found.runs) // repeated.height
    if not limits.reached(saved):
        return
    yield Found(
        f"{found.module} is called on one sample after another, {repeated.height / view.step_count:,.0f} times "
        f"{view.a_step}, in a loop that needs no earlier result: call it on all of them at once",
        saved,
        basis="all repetitions but one, without the time that their operators' work takes at the trace's best rates",
        confidence="medium",
        weighed_ns=cost,
        figures=[
            view.count_per_step("repetitions", repeated.height),
            view.count_per_step("calls of the module", found.calls.height),
            Figure("share of the time that the same work takes at once", left / cost, "share"),
        ],
        remedy=Remedy(
            "Put the samples into one batch, padded to one length where they differ (with a mask), and call it once. "
            "The same holds for generate() and for pipelines: give them the list, with a batch size.",
            "outputs = model(torch.stack(samples))      # instead of [model(sample[None]) for sample in samples]\n"
            "batch = tokenizer(texts, padding=True, return_tensors='pt')      # texts of different lengths\n"
            "outputs = model.generate(**batch)          # decoders that generate are padded on the left",
        ),
        where=lines_at(view, repeated),
        change=together(
            scaled_stretches(lanes, starts, ends, 1 - saved / cost),
            scaled_with_pauses(backward, [between], 1 - saved / cost),
        ),
    )


def _left_ns(view: View, forward: Rows, backward: Rows) -> int:
    """Time of the loop's work in a single call."""
    work = work_left(view)
    operators = view.trace.operators
    names = operators["name"]
    needed = backward[~names.gather(backward).str.contains(_SLICING_NODE).to_numpy()]
    parents = names.gather(operators["parent"])
    called = (
        parents.str.contains(BACKWARD_NAME)
        & ~parents.str.starts_with("autograd::")
        & ~names.str.contains(BACKWARD_NAME)
    )
    inner = np.flatnonzero(view.inside(needed) & called.fill_null(False).to_numpy())
    return int(work.ns(forward) + work.ns(inner))


def _left_in_cells_ns(view: View, body: tuple[str, ...], forward: Rows, backward: Rows) -> int:
    """Time that a recurrent layer still needs for the cells among these operators, beyond `_left_ns`.

    It runs the cells one after the other; without a device also the backward pass's nodes of each. Only of an LSTM
    there is one operator for the whole sequence on a CPU.
    """
    names = view.trace.operators["name"].gather(forward)
    is_lstm = [base_name(name) for name in body].count("sigmoid") >= _GATES_OF_LSTM
    if _is_recurrence(body) and not is_lstm and view.device is None:
        cells = forward[names.str.contains(rf"::(?:{'|'.join(_OF_CELLS)})_?$|_cell$").to_numpy()]
    else:
        cells = forward[names.str.ends_with("_cell").to_numpy()]
    if not len(cells):
        return 0
    nodes = view.backward_of(cells)
    whole = view.cost_ns(np.concatenate([cells, nodes])) + length_ns(view, engine_pauses(view, backward))
    return max(whole - _left_ns(view, cells, nodes), 0)


def _is_recurrence(body: tuple[str, ...]) -> bool:
    names = {base_name(name) for name in body}
    if not names.isdisjoint(_CELLS):
        # Each cell reads the next part of a sequence; after anything else it may read what was computed of its result.
        before = [base_name(body[place - 1]) for place, name in enumerate(body) if base_name(name) in _CELLS]
        return all(name in VIEWS or name in _SLICING for name in before)
    products = not names.isdisjoint({"linear", "addmm", "mm", "matmul"})
    return products and not _RECURRENT.isdisjoint(names) and names.isdisjoint(_NOT_IN_CELLS)


def _interval(view: View, loop: Loop) -> Interval:
    operators = view.trace.operators
    begin = operators["start_ns"][int(loop.operators[0])]
    last = int(loop.operators[-1])
    end = operators["start_ns"][last] + operators["duration_ns"][last]
    return Interval(begin, end - begin, f"{loop.repetitions} repetitions")


def _of_growing(view: View, where: tuple[Location, ...]) -> Remedy | None:
    """The remedy if the loop's costliest line reads ever longer slices, by its source; else None."""
    slices = (each for each in view.program.works if each.kind == "growing")
    mine = [
        each for each in slices if where and each.file == where[0].file and each.first <= where[0].line <= each.last
    ]
    if not mine:
        return None
    return Remedy(
        f"Each repetition reads a longer slice of {mine[0].name or 'a tensor'}: one cumulative operator gives all "
        "results.",
        "sums = torch.cumsum(values, 0)              # instead of values[: i + 1].sum() for each i\n"
        "# likewise torch.cummax, torch.cumprod, torch.logcumsumexp; from the end with values.flip(0)",
    )


def _remedy(body: tuple[str, ...], seen: LoopSigns) -> Remedy:
    names = [base_name(name) for name in body]
    if _is_recurrence(body):
        return Remedy(
            "A loop over time steps: use the framework's recurrent layer, which runs it without Python.",
            "self.rnn = torch.nn.RNN(inputs, hidden, batch_first=True)   # or LSTM, GRU\n"
            "outputs, last = self.rnn(sequence)                          # instead of a loop over sequence[:, t]",
        )
    if len(body) > SHORT_BODY or (seen.has_parameters and (seen.shares_parameters or seen.own_modules is False)):
        return Remedy(
            "A model is called for one piece after the other: put the pieces into one batch, and call it once.",
            "outputs = model(inputs)     # instead of torch.cat([model(piece.unsqueeze(0)) for piece in inputs])",
        )
    if any("cross_entropy" in name or "nll_loss" in name for name in names):
        return Remedy(
            "Compute the loss over all positions at once instead of one by one.",
            "# instead of: sum(cross_entropy(logits[:, i], targets[:, i]) for i in range(length)) / length\n"
            "loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())",
            apply=("batched-loss",),
        )
    if seen.chooses_rows and seen.has_parameters:
        return Remedy(
            "A loop over experts: hold their weights in one tensor and apply them with one batched product.",
            "# weight: (experts, inputs, outputs); rows sorted by expert, padded to equal counts\n"
            "outputs = torch.bmm(rows.view(experts, -1, inputs), weight)",
        )
    if seen.has_parameters and seen.is_collected:
        return Remedy(
            "Equal layers on one input, such as heads: hold their weights in one layer, and split its result.",
            "self.qkv = torch.nn.Linear(width, 3 * width)          # instead of one Linear for each head\n"
            "q, k, v = self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)",
        )
    if "index" in names and not {"eq", "ne", "bitwise_not", "logical_not"}.isdisjoint(names):
        return Remedy(
            "The loop compares one row with all others, and takes those that are alike: compute all pairs at once, and "
            "mask those that do not count.",
            "same = labels[:, None] == labels\n"
            "scores = torch.cdist(rows, rows)                        # or rows @ rows.T\n"
            "farthest = scores.masked_fill(~same, -torch.inf).amax(1)   # instead of scores[i][same[i]].max() for each",
        )
    if "index" in names and not _GROUPED.isdisjoint(names):
        return Remedy(
            "The loop reduces one group of rows at a time, such as the neighbours of a node: gather the rows of all "
            "groups at once, and reduce them by the number of their group.",
            "# row: indices of all groups' rows, joined; group: the number of each one's group; both made once\n"
            "sums = x.new_zeros(groups, x.shape[1]).index_add_(0, group, x[row])\n"
            "means = sums / counts[:, None]         # or scatter_reduce(..., reduce='amax') for a maximum",
        )
    if any(name.startswith(_SLICING) for name in names):
        return Remedy(
            "The loop takes one slice of a tensor at a time: apply the operators to the whole tensor, with the loop's "
            "dimension as a batch dimension.",
            "result = function(tensor)            # or torch.vmap(function)(tensor), instead of a loop over tensor[i]",
        )
    if all(name.endswith("_") for name in body):
        return Remedy(
            "The loop changes one tensor of a list after the other: use the torch._foreach_ form of the operators.",
            "torch._foreach_mul_(tensors, factor)   # instead of: for tensor in tensors: tensor.mul_(factor)",
        )
    return Remedy(
        "Collect the loop's inputs in one tensor and call the operators once, or use their torch._foreach_ forms.",
        "result = function(torch.stack(pieces))   # instead of [function(piece) for piece in pieces]",
    )


RULE: Final = Rule(
    id="loop-in-step",
    title="A Python loop runs small operators many times",
    thresholds={
        "repetitions": Threshold(32, "count", "repetitions in a row that make a loop"),
        "clear_repetitions": Threshold(
            8,
            "count",
            "repetitions in a row of what is clearly a loop: an index counts up, or the results are collected",
        ),
        "share": Threshold(0.02, "share", "share of the {period} that the loop costs"),
    },
    check=check,
    needs=("operators",),
)
