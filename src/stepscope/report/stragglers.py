"""Report what slow workers, stages and micro-batches cost a job: text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from stepscope.analysis.stragglers import Cause, Stragglers, Worker
from stepscope.report.document import Block, Document, Items, Section, Table, Text, stamped
from stepscope.report.format import duration, file_name, share

_TELLING: Final = 0.25
"""Share of the lost time that a cause must explain to be told."""
_NOTEWORTHY: Final = 1.02
"""Slowdown from which a step has stragglers."""
_NAMES: Final[dict[Cause, str]] = {
    "workers": "the slowest workers",
    "last_stage": "the last pipeline stage",
    "sequences": "micro-batches of unequal sequences",
    "micro_batches": "micro-batches of unequal length",
    "garbage_collection": "Python's garbage collection",
}


def causes_told(found: Stragglers) -> list[Cause]:
    """The causes that explain a good part of the lost time, the largest first; none if hardly any is lost."""
    if found.slowdown < _NOTEWORTHY:
        return []
    return [cause for cause, part in found.shares.items() if part >= _TELLING]


def headline(found: Stragglers) -> str:
    """How much longer a step takes than it would, and why, in one sentence."""
    step, usual = duration(round(found.step_s * 1e9)), duration(round(found.usual_s * 1e9))
    if found.slowdown < _NOTEWORTHY:
        return (
            f"A step takes {step}, about as long as if every operation lasted as long as others of its type ({usual})."
        )
    told = causes_told(found)
    why = "; no single cause explains a good part of it"
    if told:
        is_one = told[0] == "workers" and len(found.slowest) == 1
        why = f": {'one slow worker' if is_one else _NAMES[told[0]]}"
    return (
        f"A step takes {step}, {found.slowdown:.2f} times the {usual} that it would take if every operation lasted as "
        f"long as others of its type{why}."
    )


def stragglers_document(path: str, found: Stragglers) -> Document:
    """The report of a job's log of operations."""
    blocks: list[Block] = [
        Section(file_name(path), (Text(headline(found), "headline"),), style="summary", is_quiet=True)
    ]
    told = [_told(cause, found) for cause in causes_told(found)]
    if told:
        blocks.append(Section("Why, and what to change", (Items(tuple(told)),)))
    shares = pl.DataFrame(
        [
            (_NAMES[cause], min(max(part, 0.0), 1.0), round(part * (found.step_s - found.usual_s) * 1e9))
            for cause, part in found.shares.items()
        ],
        schema={"if_only_these_were_as_usual": pl.String, "of_the_lost_time_share": pl.Float64, "saved_ns": pl.Int64},
        orient="row",
    )
    blocks.append(Section("What a step would save", (Table(shares, "causes"),)))
    workers = pl.DataFrame([_row(each) for each in found.workers], schema=_WORKERS, orient="row")
    workers = workers.drop([] if (workers["rank"] >= 0).any() else ["rank"])
    blocks.append(Section("Workers, the slowest first", (Table(workers, "workers"),)))
    types = pl.DataFrame(
        list(found.types.items()), schema={"operation": pl.String, "slowdown": pl.Float64}, orient="row"
    )
    blocks.append(Section("Types of operations, if only these lasted as they did", (Table(types, "types"),)))
    blocks.append(Section("How it was found", (Items(tuple(_basis(found))),)))
    return Document(file_name(path), tuple(blocks), whole="--json -")


_WORKERS: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "dp_rank": pl.Int64,
    "stage": pl.Int64,
    "slowdown": pl.Float64,
    "computes_times_its_peers": pl.Float64,
}


def _row(worker: Worker) -> tuple[int, int, int, float, float]:
    return worker.rank, worker.dp_rank, worker.stage, worker.slowdown, worker.compute_ratio


def _name(worker: Worker) -> str:
    place = f"data-parallel rank {worker.dp_rank}, stage {worker.stage}"
    return f"rank {worker.rank} ({place})" if worker.rank >= 0 else place


def _slow(worker: Worker, found: Stragglers) -> str:
    if not any(each.stage == worker.stage and each is not worker for each in found.workers):
        return f"{_name(worker)}, the only worker of its stage"
    return (
        f"{_name(worker)}, whose computations take {worker.compute_ratio:.2f} times those of the stage's other workers"
    )


def _told(cause: Cause, found: Stragglers) -> str:
    part = f"{share(min(found.shares[cause], 1.0))} of the lost time"
    if cause == "workers":
        slow = ", ".join(_slow(each, found) for each in found.slowest)
        return (
            f"{part}: {slow}. Compare clocks, temperatures, memory errors and other processes on that machine, and "
            "replace it if nothing else runs there."
        )
    if cause == "last_stage":
        return (
            f"{part}: the last pipeline stage, whose micro-batches compute {found.stage_ratio:.2f} times as long as "
            "those of the other stages. Give it fewer layers: the loss and the output layer count as well."
        )
    if cause == "sequences":
        return (
            f"{part}: micro-batches differ ({share(found.spread)} of their mean forward time), forward and backward "
            f"alike (correlation {found.correlation or 0:.2f}), as sequences of different lengths do. Fill "
            "micro-batches by the cost of their sequences, which grows with the square of the length, not by number."
        )
    if cause == "micro_batches":
        return (
            f"{part}: computations of one worker differ from one micro-batch to the next ({share(found.spread)} of "
            "their mean), forward and backward unlike. Look into what else runs on the machines."
        )
    return (
        f"{part}: Python's garbage collection, at different times on different workers. Collect on all of them at the "
        "same steps: gc.disable(), and gc.collect() every few hundred steps."
    )


def _basis(found: Stragglers) -> Iterator[str]:
    yield (
        f"{found.steps} steps were replayed with the logged durations, of exchanges the part after all participants "
        "had come, and with the mean of each type of computation and the median of each type of exchange."
    )
    delay = duration(round(abs(found.delay_s) * 1e9))
    if found.delay_s >= 0:
        yield (
            f"The replayed step is {delay} shorter than the logged one, because of work that was not logged, such as "
            "loading data."
        )
    else:
        yield f"The replayed step is {delay} longer than the logged one, in which operations of a worker overlap."
    yield "A worker's slowdown is the smaller of its data-parallel rank's and its stage's, each replayed alone."


def stragglers_json(path: str, found: Stragglers) -> dict[str, Any]:
    """The report of a job's log of operations; times of a mean step in nanoseconds."""
    return stamped(
        job={
            "path": path,
            "headline": headline(found),
            "steps": found.steps,
            "step_ns": round(found.step_s * 1e9),
            "usual_ns": round(found.usual_s * 1e9),
            "not_logged_ns": round(found.delay_s * 1e9),
            "slowdown": found.slowdown,
            "causes": causes_told(found),
            "shares": found.shares,
            "slowest": [(each.dp_rank, each.stage) for each in found.slowest],
            "workers": found.workers,
            "types": found.types,
            "correlation": found.correlation,
            "last_stage_ratio": found.stage_ratio,
            "spread": found.spread,
        }
    )
