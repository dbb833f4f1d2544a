"""# What it finds
Costly work in the user's code that no other rule explains, with evidence that it can be avoided: a graph that runs
backward several times, gradients that no optimizer uses, activations that are recomputed although memory is ample, a
graph that never runs backward, a sequence that is computed from its beginning for each new position, a product or a
distance by broadcasting, a merged low-rank weight, a lookup by a one-hot table, a convolution by `unfold`, a product
with a tensor of mostly zeros, two products in the costlier order, a sort for its first elements, a tensor that is
copied for each part added to it, one small operator for each of many tensors, a deep copy in each step, and results or
operators' inputs that are the same in each step or repeatedly within one.

# Why it costs time
The program repeats work, does work that nothing uses, or runs many operators where one would do.

# How it is measured
Each kind of evidence has its own figures and its own estimate of what remains.

- A graph runs backward again if one of its nodes runs more than once in a step. All runs but the first are counted.
  Graphs whose backward pass is itself differentiated are left out.
- Gradients are needless if nothing uses them. Before `stepscope run` records, it reads the autograd graph of each
  backward pass of a step, and notes the optimizers' steps and the calls of `zero_grad` after it. A parameter's gradient
  is needless if no optimizer that steps has the parameter, or if it is cleared before its optimizer steps. The nodes
  that lead only to such gradients are counted, and half the time of products with one unused gradient out of two.
  Ignored are passes without any used gradient, parameters that the program changes itself, and recordings whose passes
  differ in their number of nodes from the pass that was read.
- Activations are recomputed if layers run inside nodes of the backward pass, as in activation checkpointing. This is
  reported if memory is ample: the peak plus all memory that these operators allocate in a step, which is more than the
  activations need, must stay below 60 % of the device's memory.
- A graph is unused if a module call makes autograd nodes in every step and none of them runs. The operating system's
  time in the step (mapping memory) is counted, by the share of the step's memory that these calls allocate: without a
  graph, each operator reuses the memory of the one before. In a program that trains nothing, 1.5 microseconds for each
  node are added.
- A prefix is recomputed if a module is called at least 8 times in a step and the inputs of its operators with
  parameters grow by the same amount from call to call, or if a program that does not train calls it once in each step
  and the inputs grow from step to step. Sequences of fixed length (a window, or room for later positions) count if one
  position of each is chosen after each call (argmax, multinomial) and the loop in the source reads the previous call's
  result. With a cache, each operator would take only the new positions' share of its time, but no less than the
  shortest operators of these calls. The first call of a step is needed.
- A product by broadcasting is an elementwise product of two tensors that are each repeated along a dimension of the
  other, and whose result is only summed. A matrix product is assumed to need as long for the same result as the trace's
  own matrix products need for as many operations.
- A weight is merged if the product of two matrices, whose common size is at most a quarter of the others, is added to a
  matrix that multiplies inputs next. A lookup is a product of a matrix with a one-hot table (`one_hot`, `scatter_` of a
  number, a comparison with the classes) of at least 32 classes. A product with all patches of images (`unfold`) is a
  convolution. Two matrix products one right after the other are in the wrong order if the other order takes less than
  half the operations. A sort is too much if a slice of at most an eighth is used next; finding the largest elements is
  assumed to take four passes. Rows that are gathered for each edge of a graph, and added up by its target, need one
  pass in a sparse product. Of a layer on rows that are repeated and joined with others, its parts on the rows
  themselves remain, and their sum. What replaces them (three times, if it also runs backward) is assumed to run at the
  best rate of the trace's own products and elementwise operators.
- A tensor is of mostly zeros if at most 3 % of its elements are not zero: before `stepscope run` records, it counts
  them once for each line in inputs of products that need no gradient. A sparse product is assumed to take ten times as
  long for each multiplication as the trace's dense ones.
- A tensor is extended part by part if, at least 8 times in a step, a line's `cat` takes the result of the one before.
  What one `cat` of all parts copies remains.
- One tensor after the other means that a line itself, not the optimizer or another library that it calls, runs
  elementwise operators on at least 8 tensors of different shapes in a step. One operator for the same elements is
  assumed to run at the best rate of the trace's own elementwise operators.
- A deep copy counts where a line that each step runs calls `deepcopy`, with the lines of the library below it.
- A result is the same if hashes say so. Before `stepscope run` records, it examines two steps: results and variables of
  the user's functions, and results of modules that they call, are hashed when the function ends; for tensors above 1
  MiB, evenly spaced elements and the sum of all are hashed. Only the first 64 calls of a function in a step are
  examined. This takes at most a second of hashing, keeps only the hashes, and is left out of the step times. If nothing
  at all changes from step to step, the program repeats one step for a measurement, and nothing is reported.
- An operator has the same inputs in each step if two further steps before the recording call it at the same place with
  the same numbers and shapes; its tensors come from other such calls, or are older and have not changed since; and no
  random number and no later change is involved. Lines of only such calls are counted whole; on other lines, the
  operators of such calls are counted, found by their names. Programs that use torch.compile are not examined.

The finding is shown only if other findings do not explain its saving: the steps are replayed with their changes, and
only what this one saves beyond them counts.

# Known false positives
Gradients that are needed for each loss separately. A module whose output is used as a constant target. A result that
was equal in the two examined steps but changes later, as with a schedule.

# What to do
Follow the finding: the change depends on the evidence.

# Reference
PyTorch documentation, "Autograd mechanics" (locally disabling gradient computation) and "Performance Tuning Guide".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from stepscope.analysis.attribution import SourcePlace
from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.algebra import (
    Appended,
    Broadcast,
    OneByOne,
    SparseProduct,
    appended,
    broadcast_sums,
    detours,
    one_by_one,
    sparse_products,
)  # fmt: skip
from stepscope.diagnosis.lines.costs import LineCosts, line_costs, lines_at, lines_that_call
from stepscope.diagnosis.lines.graphs import (
    inside_calls,
)
from stepscope.diagnosis.lines.repeats import Prefix, recomputed_prefixes
from stepscope.diagnosis.lines.values import ConstantLines, EqualLines, constant_lines, equal_calls, equal_lines
from stepscope.diagnosis.rule import Answers, Figure, Found, Limits, Remedy, Rows, Rule, Threshold, View
from stepscope.diagnosis.rules._costly_graphs import graph_findings
from stepscope.diagnosis.rules._operators import (
    WorkLeft,
    called_from_python,
    engine_pauses,
    length_ns,
    pauses,
    scaled_with_pauses,
    work_left,
)
from stepscope.whatif.changes import scaled_stretches, scaled_work_of, together


def check(view: View, limits: Limits) -> Answers:
    graphs = graph_findings(view)
    for found in (*graphs, *_prefixes(view), *_algebra(view), *_copies(view), *_equal_calls(view), *_equal_lines(view)):
        if found is not None and limits.reached(found.cost_ns if found.weighed_ns is None else found.weighed_ns):
            yield found


def _prefixes(view: View) -> Iterator[Found]:
    for prefix in recomputed_prefixes(view):
        cost = view.cost_ns(prefix.rows)
        duration = view.trace.operators["duration_ns"].to_numpy()[prefix.rows].astype(np.float64)
        saved = cost * float(1 - (prefix.left * duration).sum() / max(duration.sum(), 1.0))
        yield _prefix(view, prefix, saved)


def _prefix(view: View, prefix: Prefix, saved: float) -> Found:
    sizes = prefix.calls["size"].to_numpy()
    per_step = prefix.calls.height / view.step_count
    often = f"{per_step:,.0f} times" if per_step > 1 else "once"
    return Found(
        f"{prefix.module} computes a sequence from its beginning for each new position, {often} {view.a_step}: a cache "
        f"of keys and values, or of the last state, saves {view.percent(saved)}",
        saved,
        basis="each operator by the part of its input that is new, but no less than the shortest operators take",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", saved),
            view.count_per_step("calls", prefix.calls.height),
            Figure("elements of its inputs in a step's first call", int(sizes[0]), "count"),
            Figure("elements of its inputs in the last call", int(sizes[-1]), "count"),
        ],
        where=lines_at(view, prefix.calls),
        remedy=Remedy(
            "Keep the keys and values (or the state) of the positions that are done, and call the model for the new "
            "position alone. Do not batch this loop: each call needs the result of the one before.",
            "outputs = model(tokens[:, -1:], past_key_values=cache, use_cache=True)\ncache = outputs.past_key_values",
        ),
        change=scaled_work_of(prefix.rows, prefix.left),
    )


def _algebra(view: View) -> Iterator[Found]:
    called = called_from_python(view)
    work = work_left(view)
    for sums in broadcast_sums(view, called):
        yield _broadcast(view, work, sums)
    for line in one_by_one(view, called, line_costs(view).runs):
        found = _one_by_one(view, work, line)
        if found is not None:
            yield found
    yield from _detours(view, work, called)
    for product in sparse_products(view, called):
        yield _sparse(view, work, product)
    for each in appended(view, called):
        yield _appended(view, each)


def _broadcast(view: View, work: WorkLeft, sums: Broadcast) -> Found:
    backward = view.backward_of(sums.rows)
    rows = np.concatenate([sums.rows, backward])
    cost = view.cost_ns(rows)
    left = min(work.product_ns(sums.operations * (3 if len(backward) else 1)), cost)
    place = view.attribution.places[sums.place]
    better = "a matrix product" if sums.kind == "product" else "torch.cdist or a matrix product"
    code = (
        "scores = a @ b.transpose(-1, -2)     # instead of (a.unsqueeze(-2) * b.unsqueeze(-3)).sum(-1)"
        if sums.kind == "product"
        else "distances = torch.cdist(a, b).square()   # instead of (a.unsqueeze(-2) - b.unsqueeze(-3)).pow(2).sum(-1)"
    )
    return Found(
        f"{view.percent(cost)} of the {view.period} goes to a {sums.kind} by broadcasting and a sum, which "
        f"{better} computes without the {sums.bytes / 2**20:,.1f} MiB between them",
        cost - left,
        basis="the operators, forward and backward, less the time of as many operations in the trace's matrix products",
        confidence="medium" if work.product_ns(1) else "low",
        figures=[
            view.share_figure("that this takes", cost),
            view.ns_per_step("time of these operators", cost),
            view.ns_per_step("time of the same operations in matrix products", left),
            Figure("bytes of the result before the sum", sums.bytes, "bytes"),
        ],
        where=_at(place),
        remedy=Remedy(f"Compute it by {better}.", code),
        change=scaled_with_pauses(rows, [], left / max(cost, 1)),
    )


def _at(place: SourcePlace) -> tuple[Location, ...]:
    return (Location(place.file, place.line, place.function, 1.0, place.exact_line),)


_DETOURS: Final = {
    "merged": (
        "merging a low-rank product into a weight, which two thin products",
        Remedy(
            "Multiply the inputs by the thin matrices, one after the other, and add the result.",
            "y = x @ weight + (x @ a) @ b             # instead of x @ (weight + a @ b)",
        ),
    ),
    "unfold": (
        "a convolution by unfold and a matrix product, which F.conv2d",
        Remedy(
            "Call the convolution with the same weights: it copies no patches of the images.",
            "y = torch.nn.functional.conv2d(x, weight, bias, padding=1)   # instead of weight @ unfold(x, 3)",
        ),
    ),
    "order": (
        "two products in an order that takes more than twice the operations, which the other order",
        Remedy(
            "Multiply the two last factors first (or the two first, if the last were): the result is the same.",
            "y = a @ (b @ c)                          # instead of (a @ b) @ c\n"
            "y = torch.linalg.multi_dot([a, b, c])    # finds the best order for matrices without a batch",
        ),
    ),
    "messages": (
        "rows gathered for each edge and added up by target, which a sparse product",
        Remedy(
            "Make a sparse matrix of the edges once, with their weights as its values, and multiply by it: no message "
            "is written out.",
            "edges = torch.stack([targets, sources])\n"
            "adjacency = torch.sparse_coo_tensor(edges, weights, (nodes, nodes)).coalesce().to_sparse_csr()\n"
            "sums = adjacency @ x       # instead of zeros.index_add(0, targets, weights[:, None] * x[sources])",
        ),
    ),
    "tiled": (
        "a layer on rows that are repeated and joined with others, which the layer's parts on the rows themselves",
        Remedy(
            "Apply the layer's part for each of them before it is repeated, and add the results: they broadcast.",
            "first, second = layer.weight.split([a.shape[-1], b.shape[-1]], dim=1)\n"
            "y = (a @ first.T)[:, None] + (b @ second.T)[None] + layer.bias\n"
            "# instead of layer(torch.cat([a[:, None].repeat(1, n, 1), b[None].repeat(m, 1, 1)], dim=-1))",
        ),
    ),
    "sorted": (
        "a whole sort, of which only the beginning is used, and which topk",
        Remedy(
            "Ask for the largest (or smallest) elements only.",
            "values, indices = scores.topk(k, dim=1)  # instead of scores.argsort(dim=1, descending=True)[:, :k]",
        ),
    ),
    "one-hot": (
        "a one-hot table times a matrix, which a lookup",
        Remedy(
            "Take the rows by their index.",
            "rows = torch.nn.functional.embedding(indices, table)   # instead of one_hot(indices, n).float() @ table",
        ),
    ),
}


def _detours(view: View, work: WorkLeft, called: Rows) -> Iterator[Found]:
    for detour in detours(view, called):
        backward = view.backward_of(detour.rows)
        rows = np.concatenate([detour.rows, backward])
        passes, cost = 3 if len(backward) else 1, view.cost_ns(rows)
        left = passes * (work.product_ns(detour.operations) + work.elementwise_ns(detour.elements))
        if left >= cost or (detour.operations and not work.product_ns(1)):
            continue
        what, remedy = _DETOURS[detour.kind]
        place = view.attribution.places[detour.place]
        yield Found(
            f"{view.percent(cost)} of the {view.period} goes to {what} would replace",
            cost - left,
            basis="the operators, forward and backward, less the time of what takes their place at the trace's rates",
            confidence="medium",
            figures=[
                view.share_figure("that this takes", cost),
                view.ns_per_step("time of these operators", cost),
                view.ns_per_step("time of what takes their place", left),
                view.count_per_step("operations of the products that take their place", detour.operations),
                view.count_per_step("elements that are moved instead", detour.elements),
            ],
            where=_at(place),
            remedy=remedy,
            change=scaled_with_pauses(rows, [], left / max(cost, 1)),
        )


def _sparse(view: View, work: WorkLeft, product: SparseProduct) -> Found:
    backward = view.backward_of(product.rows)
    rows = np.concatenate([product.rows, backward])
    cost, facts = view.cost_ns(rows), product.facts
    passes, gradients = (2, product.weight) if len(backward) else (1, 0)
    left = passes * (work.product_ns(product.operations) + work.elementwise_ns(product.elements))
    left = min(round(left + work.elementwise_ns(gradients)), cost)
    whole = math.prod(facts.shape)
    is_lookup = facts.nonzero * facts.shape[-1] == whole
    return Found(
        f"{view.percent(cost)} of the {view.period} goes to products with a tensor of {whole:,} elements, of "
        f"which {1 - facts.nonzero / whole:.1%} are zeros",
        cost - left,
        basis="the operators, forward and backward, less the time of products with what is not zero, at a tenth of the "
        "rate of the trace's dense products",
        confidence="medium" if work.product_ns(1) else "low",
        figures=[
            view.share_figure("that this takes", cost),
            Figure("share of the tensor's elements that are zeros", 1 - facts.nonzero / whole, "share"),
            Figure("elements of the tensor", whole, "count"),
            Figure("elements that are not zero", facts.nonzero, "count"),
            view.ns_per_step("time of these operators", cost),
            view.ns_per_step("time of the same products without the zeros", left),
        ],
        where=view.at_operators(product.rows),
        remedy=Remedy(
            "One number in each row is not zero: look up the rows by their index instead of multiplying.",
            "rows = torch.nn.functional.embedding(indices, table)   # or nn.Embedding, nn.EmbeddingBag, table[indices]",
        )
        if is_lookup
        else Remedy(
            "Keep the indices of what is not zero, and leave the zeros out: a sparse matrix, an index_add over the "
            "pairs, or an EmbeddingBag for counts of words.",
            "adjacency = adjacency.to_sparse_csr()                  # once; adjacency @ x stays as it is\n"
            "sums = torch.zeros_like(x).index_add_(0, target, x[source])        # or by pairs (source, target)\n"
            "bag = torch.nn.functional.embedding_bag(words, table, offsets, mode='sum')",
        ),
        change=scaled_with_pauses(rows, [], left / max(cost, 1)),
    )


def _appended(view: View, found: Appended) -> Found:
    backward = view.backward_of(found.rows)
    rows = np.concatenate([found.rows, backward])
    cost, place = view.cost_ns(rows), view.attribution.places[found.place]
    return Found(
        f"{view.percent(cost)} of the {view.period} goes to extending a tensor part by part, "
        f"{len(found.rows) / view.step_count:,.0f} times {view.a_step}: each time all of it is copied",
        cost * (1 - found.left),
        basis="the operators, forward and backward, less the part of their elements that is copied once",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            view.count_per_step("concatenations", len(found.rows)),
            Figure("part of the elements that one concatenation copies", found.left, "share"),
        ],
        where=_at(place),
        remedy=Remedy(
            "Collect the parts in a list and join them once after the loop, or write them into a tensor of the final "
            "size.",
            "parts.append(part)                       # in the loop, instead of result = torch.cat([result, part])\n"
            "result = torch.cat(parts)                # once, after it; torch.stack for parts without that dimension",
        ),
        change=scaled_with_pauses(rows, [], found.left),
    )


def _copies(view: View) -> Iterator[Found]:
    """Lines that make a deep copy in each step."""
    copying = lines_that_call(view, "deepcopy")
    if not copying or not view.complete_steps.height:
        return
    costs = line_costs(view)
    lines = [line for line in costs.lines if (line.place.file, line.place.line) in copying and line.in_most_steps]
    numbers = np.array([line.number for line in lines], np.int64)
    cost = sum(line.ns for line in lines)
    if cost:
        yield Found(
            f"{view.percent(cost)} of the {view.period} goes to deep copies, made {view.each_step}",
            cost,
            basis="the time of the lines that copy",
            confidence="medium",
            figures=[
                view.share_figure("that this takes", cost),
                Figure("lines that copy", len(lines), "count"),
            ],
            where=costs.locations(numbers),
            remedy=Remedy(
                "Do not copy in each step: decide before the weights change, or copy every so many steps. Where the "
                "copy is needed each time, copy into tensors that were made once.",
                "if torch.isfinite(loss):                       # instead of going back to a copy afterwards\n"
                "    loss.backward()\n"
                "    optimizer.step()\n"
                "torch._foreach_copy_(kept, current)            # kept: tensors that were made once, before the loop",
            ),
            change=costs.scaled(numbers, 0.0),
        )


def _one_by_one(view: View, work: WorkLeft, line: OneByOne) -> Found | None:
    backward = view.backward_of(line.rows)
    rows = np.concatenate([line.rows, backward])
    between = [pauses(view, line.rows), engine_pauses(view, backward)]
    cost = view.cost_ns(rows) + sum(length_ns(view, each) for each in between)
    left = min(work.elementwise_ns(3 * line.elements) * view.step_count, cost)
    place = line.place
    if line.is_penalty:
        remedy = Remedy(
            "Replace a penalty on squared parameters with the optimizer's weight_decay, other sums over them with one "
            "operator over all.",
            "optimizer = torch.optim.SGD(parameters, lr, weight_decay=2 * strength)      # for strength * sum(p ** 2)\n"
            "penalty = torch.stack(torch._foreach_norm(list(model.parameters()))).square().sum()   # or in the loss",
        )
    else:
        remedy = Remedy(
            "Update all tensors by one operator over their list, in place, or do it only every few steps.",
            "torch._foreach_lerp_(averages, parameters, 1 - decay)     # instead of a loop over them\n"
            "averaged = torch.optim.swa_utils.AveragedModel(model,\n"
            "    multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))",
        )
    return Found(
        f"{view.percent(cost)} of the {view.period} goes to operators on {line.tensors:,} tensors, one after another",
        cost - left,
        basis="the operators and the time between them, less the time of as many elements in one operator",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            view.count_per_step("tensors", line.tensors * view.step_count),
            view.count_per_step("operators", len(line.rows)),
            view.count_per_step("backward operators", len(backward)),
            Figure("elements of these tensors", line.elements, "count"),
        ],
        where=_at(place),
        remedy=remedy,
        change=scaled_with_pauses(rows, between, left / max(cost, 1)),
    )


_KEEP: Final = Remedy(
    "Its value does not depend on the step: compute it once before the loop and keep it.",
    'self.register_buffer("kept", compute(...), persistent=False)     # in __init__, instead of in forward\n'
    "kept = compute(...)                                               # or before the loop over steps",
)
_CACHE: Final = Remedy(
    "Compute it once for equal inputs and use the result again.",
    "features = self.encoder(inputs)          # once\nfirst, second = self.first(features), self.second(features)",
)


def _equal_calls(view: View) -> Iterator[Found]:
    for equal in equal_calls(view):
        starts = equal.calls["start_ns"].to_numpy()
        ends = starts + equal.calls["duration_ns"].to_numpy()
        lanes = equal.calls["lane"].to_numpy()
        rows = view.outermost(inside_calls(view, equal.calls))
        backward = view.backward_of(rows)
        between = engine_pauses(view, backward)
        cost = view.cost_ns(np.concatenate([rows, backward])) + length_ns(view, between)
        if view.device is None:
            cost = int((ends - starts).sum()) + view.cost_ns(backward) + length_ns(view, between)
        said = f"{equal.in_step:,} results {view.a_step}, only {equal.distinct:,} of them distinct"
        if equal.is_constant:
            said = "the same result in each step"
        yield Found(
            f"{equal.module} computes {said}: {view.percent(cost)} of the {view.period} can be left out",
            cost,
            basis="its calls with known results, forward and backward; the results of two steps before "
            "the recording were compared",
            confidence="medium",
            figures=[
                view.share_figure("that this takes", cost),
                Figure("calls in a step", equal.in_step, "count"),
                Figure("different results among them", equal.distinct, "count"),
            ],
            where=lines_at(view, equal.calls),
            remedy=_KEEP if equal.is_constant else _CACHE,
            change=together(scaled_stretches(lanes, starts, ends, 0.0), scaled_with_pauses(backward, [between], 0.0)),
        )


def _equal_lines(view: View) -> Iterator[Found]:
    if not view.program.values and not view.program.constants:
        return
    costs = line_costs(view)
    known = np.zeros(0, np.int64)
    for constant in constant_lines(view, costs):
        known = np.concatenate([known, constant.places])
        yield _constant_lines(view, costs, constant)
    for equal in equal_lines(view, costs):
        found = _equal_line(view, costs, replace(equal, numbers=np.setdiff1d(equal.numbers, known)))
        if found is not None:
            yield found


def _equal_line(view: View, costs: LineCosts, equal: EqualLines) -> Found | None:
    wanted = set(equal.numbers.tolist())
    left = 0.0 if equal.is_constant else equal.distinct / equal.calls
    cost = sum(line.ns for line in costs.lines if line.number in wanted) * (1 - left)
    if not cost:
        return None
    often = (
        "is the same in each step"
        if equal.is_constant
        else f"has {equal.distinct:,} different values in {equal.calls:,} calls {view.a_step}"
    )
    return Found(
        f"{equal.what} {often}: {view.percent(cost)} of the {view.period} goes to computing it again",
        cost,
        basis="the time of its lines; the values of two steps before the recording were compared",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            Figure("values in a step", equal.calls, "count"),
            Figure("different ones among them", equal.distinct, "count"),
        ],
        where=costs.locations(equal.numbers),
        remedy=_KEEP if equal.is_constant else _CACHE,
        change=costs.scaled(equal.numbers, left),
    )


def _constant_lines(view: View, costs: LineCosts, constant: ConstantLines) -> Found:
    whole = set(constant.numbers.tolist())
    cost = sum(line.ns for line in costs.lines if line.number in whole) + view.cost_ns(constant.rows)
    inside = f"in {constant.function}()" if constant.function.isidentifier() else "outside of functions"
    return Found(
        f"{view.percent(cost)} of the {view.period} goes to operators {inside} that have the same "
        f"inputs {view.each_step}",
        cost,
        basis="lines all of whose operators have the same inputs, and such operators of other lines; the calls of two "
        "steps before the recording were compared",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            Figure("calls of torch's functions with the same inputs in a step", constant.calls, "count"),
            Figure("lines that make them", len(constant.places), "count"),
        ],
        where=costs.locations(constant.places),
        remedy=_KEEP,
        change=together(costs.scaled(constant.numbers, 0.0), scaled_with_pauses(constant.rows, [], 0.0)),
    )


RULE: Final = Rule(
    id="costly-line",
    title="A costly line does work that can be avoided",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} that the change would save")},
    check=check,
    needs=("operators",),
    beneath=1,
)
