"""Findings of costly-line about autograd graphs: run again, differentiated needlessly, unused, or recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Location
from stepscope.diagnosis.lines.costs import lines_at, settings_at
from stepscope.diagnosis.lines.graphs import (
    UnusedGraph,
    inside_calls,
    needless_backward,
    recomputation,
    repeated_backward,
    unused_graphs,
)
from stepscope.diagnosis.rule import Figure, Found, Remedy, Rows, View
from stepscope.diagnosis.rules._operators import engine_pauses, length_ns, scaled_with_pauses
from stepscope.whatif.changes import scaled_host_time, scaled_stretches, together

NODE_NS: Final = 1_500
"""Time to make an autograd node, keep its inputs and free it, measured with PyTorch 2.13 on a CPU."""
MEMORY_SHARE: Final = 0.6
"""Largest share of memory in use without checkpointing that still leaves enough free."""


def graph_findings(view: View) -> Iterator[Found]:
    for found in (_again(view), *_needless(view), _recomputed(view), *_unused(view)):
        if found is not None:
            yield found


def _again(view: View) -> Found | None:
    repeats = repeated_backward(view)
    if repeats is None:
        return None
    between = [engine_pauses(view, repeats.again)]
    cost = view.cost_ns(repeats.again) + sum(length_ns(view, each) for each in between)
    every = max(view.cost_ns(np.union1d(repeats.nodes, repeats.again)), cost)
    return Found(
        f"the same graph is run backward {repeats.times} times {view.a_step}: {view.percent(cost)} of the "
        f"{view.period} goes to the runs after the first",
        cost,
        basis="all runs of a node but its first, with the gradients that are accumulated after them",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            Figure("most runs of one node in a step", repeats.times, "count"),
            view.ns_per_step("time of repeated nodes", cost),
            view.ns_per_step("time of all nodes", every),
        ],
        where=_callers(view, repeats.again),
        remedy=Remedy(
            "Add the losses up and run the graph backward once: the gradients of the sum are the sum of the gradients.",
            "total = torch.stack(losses).sum()\n"
            "total.backward()                     # instead of: for loss in losses: loss.backward(retain_graph=True)",
        ),
        change=scaled_with_pauses(repeats.again, between, 0.0),
    )


def _needless(view: View) -> Iterator[Found]:
    for needless in needless_backward(view):
        facts = needless.facts
        between = [engine_pauses(view, needless.nodes)]
        cost = view.cost_ns(needless.nodes) + sum(length_ns(view, each) for each in between)
        cost += view.cost_ns(needless.halves) // 2
        part = _common_path(facts.modules) if facts.modules else f"{facts.parameters:,} parameters"
        why = "which are cleared before an optimizer uses them" if facts.is_cleared else "which no optimizer updates"
        yield Found(
            f"{view.percent(cost)} of the {view.period} goes to gradients of {part}, {why}",
            cost,
            basis="the nodes that lead only to these gradients, and half of the products that also lead to others",
            confidence="medium",
            figures=[
                view.share_figure("that this takes", cost),
                Figure("modules whose gradients nothing uses", len(facts.modules), "count"),
                Figure("parameters in them", facts.parameters, "count"),
                Figure("bytes of these gradients", facts.bytes, "bytes"),
                view.count_per_step("autograd nodes that are run for them", len(needless.nodes)),
                view.count_per_step("products that are half for them", len(needless.halves)),
            ],
            where=lines_at(view, needless.calls) or view.at_operators(needless.forward),
            remedy=_DETACH if facts.is_cleared else _FREEZE,
            change=together(
                scaled_with_pauses(needless.nodes, between, 0.0), scaled_with_pauses(needless.halves, [], 0.5)
            ),
        )


_DETACH: Final = Remedy(
    "Detach what this part hands on, or compute it without a graph, where its gradients are not wanted.",
    "judged = critic(made.detach())            # instead of critic(made), in the loss that trains the critic\n"
    "with torch.no_grad():                     # or where nothing else differentiates it\n"
    "    made = generator(noise)",
)
_FREEZE: Final = Remedy(
    "Switch these parameters' gradients off, or compute what only needs their values without a graph.",
    "model.backbone.requires_grad_(False)      # once, before the optimizer is made\n"
    "with torch.no_grad():                     # or around a part that is not trained, such as a teacher\n"
    "    features = self.backbone(inputs)      # or features.detach()",
)


def _common_path(modules: tuple[str, ...]) -> str:
    """The innermost module around all of these, or their number if there is none."""
    common = []
    for names in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    if len(modules) > 1 and len(common) == 1:
        return f"{len(modules)} modules of {common[0]}"
    return ".".join(common) if common else f"{len(modules)} modules"


def _unused(view: View) -> Iterator[Found]:
    kernel_ns = sum(step.thread_system_ns or 0 for step in view.program.steps)
    share = kernel_ns / max(sum(step.duration_ns for step in view.program.steps), 1)
    allocated = view.operator_costs["bytes_allocated"].to_numpy()
    everything = int(allocated[view.operators["row"].to_numpy()].clip(0).sum())
    for graph in unused_graphs(view):
        mine = int(allocated[inside_calls(view, graph.calls)].clip(0).sum())
        taken = int(graph.calls["duration_ns"].sum())
        nodes = 0 if view.trains else NODE_NS * int(graph.calls["made"].sum())
        cost = min(share * view.length_ns * mine / max(everything, 1) + nodes, taken)
        yield _unused_graph(view, graph, cost, mine)


def _unused_graph(view: View, graph: UnusedGraph, cost: float, allocated: int) -> Found:
    taken = int(graph.calls["duration_ns"].sum())
    starts = graph.calls["start_ns"].to_numpy()
    ends = starts + graph.calls["duration_ns"].to_numpy()
    lanes = graph.calls["lane"].to_numpy()
    return Found(
        f"{view.percent(taken)} of the {view.period} goes to calls of {graph.module} that record a graph "
        "which nothing runs backward",
        cost,
        basis="the kernel's time in the steps, by the share of their memory that these calls allocate"
        + ("" if view.trains else ", and the time to make and free a node"),
        confidence="low",
        weighed_ns=taken,
        figures=[
            view.count_per_step("calls", graph.calls.height),
            view.share_figure("in these calls", taken),
            view.count_per_step("autograd nodes that are made", int(graph.calls["made"].sum())),
            Figure("of them run backward", 0, "count"),
            view.bytes_per_step("bytes allocated in them", allocated),
        ],
        where=lines_at(view, graph.calls),
        remedy=Remedy(
            "If only the values are needed, as in an evaluation, compute them without a graph; if nothing uses them, "
            "leave the call out.",
            "with torch.no_grad():                # or @torch.no_grad() above the function\n"
            "    outputs = model(inputs)",
        )
        if view.trains
        else Remedy(
            "Nothing is trained here: turn gradients off for all of it. A cache of keys and values then keeps no graph "
            "of earlier tokens alive, either.",
            "@torch.inference_mode()             # above the function that answers, or as a block around its calls\n"
            "def answer(prompt): ...\n"
            "model.requires_grad_(False)         # or once, for all calls of the model",
        ),
        change=scaled_host_time(lanes, starts, ends, 1 - cost / max(taken, 1)) if view.device is None else None,
    )


_CHECKPOINTING: Final = (
    "gradient_checkpointing_enable", "checkpoint", "checkpoint_sequential", "set_grad_checkpointing",
    "enable_gradient_checkpointing", "apply_activation_checkpointing", "checkpoint_wrapper",
)  # fmt: skip


def _recomputed(view: View) -> Found | None:
    again = recomputation(view)
    if again is None or again.peak_bytes + again.bytes > MEMORY_SHARE * again.capacity_bytes:
        return None
    starts = again.stretches["start_ns"].to_numpy()
    ends = starts + again.stretches["duration_ns"].to_numpy()
    lanes = again.stretches["lane"].to_numpy()
    cost = int((ends - starts).sum()) if view.device is None else view.cost_ns(again.rows)
    share = (again.peak_bytes + again.bytes) / again.capacity_bytes
    return Found(
        f"activation checkpointing takes {view.percent(cost)} of the {view.period}, although there is memory to keep "
        "the activations",
        cost,
        basis="the forward operators inside the backward pass, from the first to the last of each part",
        confidence="medium",
        figures=[
            view.share_figure("that this takes", cost),
            view.count_per_step("parts that are computed again", again.stretches.height),
            Figure("bytes that these operators allocate in a step", again.bytes, "bytes"),
            Figure("memory at the peak", again.peak_bytes, "bytes"),
            Figure("memory there is", again.capacity_bytes, "bytes"),
            Figure("share of the memory in use if all of it is kept", share, "share", MEMORY_SHARE),
        ],
        where=(*settings_at(view, *_CHECKPOINTING), *(lines_at(view, again.calls) or view.at_operators(again.rows))),
        remedy=Remedy(
            "Keep the activations: switch activation checkpointing off, or use it for fewer layers.",
            "x = block(x)                              # instead of checkpoint(block, x)\n"
            "model.gradient_checkpointing_disable()    # in Transformers",
        ),
        change=scaled_stretches(lanes, starts, ends, 0.0),
    )


def _callers(view: View, rows: Rows) -> tuple[Location, ...]:
    """The main thread's lines while these operators ran, on whichever thread."""
    times = view.trace.operators.select("start_ns", "duration_ns")[rows]
    return lines_at(view, times.with_columns(lane=pl.lit(view.lane, pl.Int32)))
