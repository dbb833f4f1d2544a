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
_BEYOND: Final = 1.01
"""Share of the lost time from which it is told that a cause's own is larger than all."""
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
    saved = saved_ns(found)
    lost = max((found.step_s - found.usual_s) * 1e9, 1.0)
    shares = pl.DataFrame(
        [(_NAMES[cause], ns / lost, duration(ns) if ns else "nothing") for cause, ns in saved.items()],
        schema={"if_only_these_were_as_usual": pl.String, "of_the_lost_time_share": pl.Float64, "saved": pl.String},
        orient="row",
    )
    blocks.append(Section("What a step would save", (Table(shares, "causes"),)))
    workers = pl.DataFrame([_row(each) for each in found.workers], schema=_WORKERS, orient="row")
    workers = workers.drop([] if (workers["rank"] >= 0).any() else ["rank"])
    blocks.append(Section("Workers, the slowest first", (Table(workers, "workers"),)))
    types = pl.DataFrame(
        [(name, f"{slowdown:.3f}") for name, slowdown in found.types.items()],
        schema={"operation": pl.String, "slowdown": pl.String},
        orient="row",
    )
    blocks.append(Section("Types of operations, if only these lasted as they did", (Table(types, "types"),)))
    blocks.append(Section("How it was found", (Items(tuple(_basis(found))),)))
    return Document(file_name(path), tuple(blocks), whole="--json -")


_WORKERS: Final[dict[str, type[pl.DataType]]] = {
    "rank": pl.Int64,
    "dp_rank": pl.Int64,
    "stage": pl.Int64,
    "slowdown": pl.String,
    "computes_times_its_peers": pl.String,
}


def _row(worker: Worker) -> tuple[int, int, int, str, str]:
    return worker.rank, worker.dp_rank, worker.stage, f"{worker.slowdown:.3f}", f"{worker.compute_ratio:.3f}"


def saved_ns(found: Stragglers) -> dict[Cause, int]:
    """What a step saves if only a cause's operations are as usual: nothing at least, and at most what is lost."""
    lost = max(round((found.step_s - found.usual_s) * 1e9), 0)
    return {cause: round(min(max(part, 0.0), 1.0) * lost) for cause, part in found.shares.items()}


def gpus_of_row(found: Stragglers) -> int | None:
    """GPUs for which a worker stands, by the distance of the logged ranks; None where it is unknown or one."""
    ranks = sorted(each.rank for each in found.workers)
    apart = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return apart if apart > 1 and ranks == [place * apart for place in range(len(ranks))] else None


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
    part = f"{share(min(found.shares[cause], 1.0))} of the lost time ({duration(saved_ns(found)[cause])} a step)"
    if cause == "workers":
        slow = ", ".join(_slow(each, found) for each in found.slowest)
        return (
            f"{part}: {slow}. Check that machine: compare its clocks, temperatures, memory errors and other processes "
            "with those of the others."
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
    for cause, part in found.shares.items():
        if part >= _BEYOND:
            alone = duration(round(part * (found.step_s - found.usual_s) * 1e9))
            yield (
                f"With only {_NAMES[cause]} as usual the replayed step is {alone} shorter, more than is lost, as other "
                "operations are faster than usual: what is beyond the lost time does not count as saved."
            )
    apart = gpus_of_row(found)
    if apart is not None:
        yield (
            f"The logged ranks are {apart} apart, so that each of the {len(found.workers)} rows stands for {apart} "
            f"GPUs, {apart * len(found.workers)} in all."
        )
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
            "saved_ns": saved_ns(found),
            "gpus_of_worker": gpus_of_row(found),
            "slowest": [(each.dp_rank, each.stage) for each in found.slowest],
            "workers": found.workers,
            "types": found.types,
            "correlation": found.correlation,
            "last_stage_ratio": found.stage_ratio,
            "spread": found.spread,
        }
    )
