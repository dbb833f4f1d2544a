"""What if worker processes loaded the batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from stepscope.analysis.input_pipeline import Batches, batches
from stepscope.errors import UsageError
from stepscope.program_facts import ProgramFacts
from stepscope.trace.intervals import Times
from stepscope.whatif.arrays import concatenated
from stepscope.whatif.experiment import Change, Experiment
from stepscope.whatif.graph import Edges, Graph, Works
from stepscope.whatif.loader_calls import loader_calls

RECEIVED_NS: Final = 1_000_000
"""To receive a batch from a worker, where the trace has no workers of its own that show it."""
PREFETCHED: Final = 2
"""Batches that each worker may be ahead: the default of torch's DataLoader."""


def loader_workers(workers: int) -> Change:
    """So many worker processes load batches ahead; with 0 the main process loads them itself.

    Each worker loads one batch after the other, for as long as a batch took in the trace, and stays at most two batches
    ahead of the program. A call for a batch waits until its batch is there, and takes as long as receiving one.

    Raises:
        UsageError: a negative number; when applied to a trace without a data loader, or one that does not tell how long
            loading a batch takes.
    """
    if workers < 0:
        raise UsageError(f"there cannot be {workers} workers")

    def apply(experiment: Experiment, graph: Graph) -> Graph:
        calls = loader_calls(experiment.trace)
        if calls.is_empty():
            raise UsageError("the trace has no data loader that gives batches, so that no workers can be tried")
        stretches = graph.stretches
        start, length = calls["start_ns"].to_numpy(), calls["duration_ns"].to_numpy()
        lanes = calls["lane"].to_numpy().astype(np.int32)
        after = stretches.at(lanes, start + length)
        known = (after >= 0) & (stretches.start[np.maximum(after, 0)] == start + length)
        known &= stretches.previous[np.maximum(after, 0)] >= 0
        if not known.any():
            raise UsageError(
                "the trace does not show a thread that waits for its batches alone: no workers can be tried"
            )
        made = batches(_facts(experiment), " ".join(calls["name"].unique()))
        loading = _loading_ns(made, length)
        own = stretches.own_ns.copy()
        if workers == 0:
            own[after[known]] = loading[known]
            return replace(graph, stretches=replace(stretches, own_ns=own))
        received = int(np.median(length)) if made.workers else RECEIVED_NS
        own[after[known]] = np.minimum(received, np.minimum(length, loading)[known])
        busy = _slowed(loading, made, workers, experiment)
        return _with_batches(
            replace(graph, stretches=replace(stretches, own_ns=own)), after[known], start[known], busy[known], workers
        )

    return apply


def _facts(experiment: Experiment) -> ProgramFacts:
    return experiment.trace.metadata.program or ProgramFacts()


def _loading_ns(made: Batches, length: Times) -> Times:
    """How long each batch takes to load in one process."""
    if made.clock_ns is not None:
        return np.full(len(length), round(made.clock_ns), np.int64)
    if made.workers == 0:
        return length
    raise UsageError(
        "the trace does not tell how long a batch takes to load, as workers load them: record it with stepscope run"
    )


def _slowed(loading: Times, made: Batches, workers: int, experiment: Experiment) -> Times:
    """Loading times where there are fewer processors than workers."""
    program = experiment.trace.metadata.program
    usable = program.process.get("usable_processors") if program is not None else None
    if not isinstance(usable, int) or usable < 1 or made.processor_ns is None:
        return loading
    return np.maximum(loading, round(made.processor_ns * workers / usable))


def _with_batches(graph: Graph, after: Times, asked: Times, loading: Times, workers: int) -> Graph:
    """The graph with one work for each batch, on a queue for each worker, that the calls for batches wait for."""
    works, count = graph.works, len(graph.works.start)
    number = np.arange(len(after))
    before = number - workers * PREFETCHED
    queue = int(works.queue.max(initial=-1)) + 1 + number % workers
    stretches = graph.stretches
    # The first batches are on their way when the recording begins, one worker's after the other's.
    ready = asked[0] + number * loading[0] // workers - loading[0]
    source = np.where(before >= 0, stretches.previous[after[np.maximum(before, 0)]], -1)
    launched = np.where(before >= 0, asked[np.maximum(before, 0)], 0)
    start = np.where(before >= 0, launched, ready)
    start = np.minimum(start, asked)  # in the order of things a batch comes before the call that waits for it
    nothing = np.zeros(len(number), np.int64)
    added = Works(
        start,
        loading,
        queue,
        source,
        launched,
        nothing,
        np.where(number >= workers, count + number - workers, -1),
        nothing,
    )
    waits = Edges(count + number, after, nothing, nothing)
    return replace(
        graph,
        works=concatenated(works, added),
        host_waits=graph.host_waits.with_edges(waits),
        rendezvous=np.concatenate([graph.rendezvous, np.full(len(number), -1)]),
        unexplained_ns=np.concatenate([graph.unexplained_ns, nothing]),
        work_scale=np.concatenate([graph.work_scale, np.ones(len(number))]),
    )
