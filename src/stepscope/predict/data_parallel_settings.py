"""Recommended settings of DistributedDataParallel from a recording of ranks, each with its measured reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import collectives
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.predict.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Gradients, buckets_of, gradients_of
from stepscope.predict.exchanges import RecordedExchange, recorded_exchange
from stepscope.predict.limits import FASTEST, Link
from stepscope.remedies.settings import DataParallelSettings
from stepscope.trace import Trace
from stepscope.trace.program_facts import DataParallelFacts
from stepscope.whatif import Experiment

WORTH: Final = 0.01  # share of the step that a bucket size must hide beyond torch's own to be recommended
MOST_OFF: Final = 0.5  # median relative deviation from the fitted latency and bandwidth above which the fit is useless
SEVERAL: Final = 2
"""Ratio of the largest to the smallest message needed to separate latency from bandwidth."""
COPY: Final = "torch.distributed.ddp.reducer::copy_bucket_to_grad"
SEARCH: Final = "torch.distributed.ddp.reducer::search_unused_parameters"
_OF_PYTORCH: Final = r"^DistributedDataParallel\.forward|^torch::autograd::AccumulateGrad$|ddp\.reducer::"
HOW_TO_RECORD: Final = (
    "record some steps of training on several ranks, such as stepscope run torchrun --nproc-per-node 2 train.py"
)


SIZES_MB: Final = (1, 2, 4, 8, 15, 25, 50, 75, 100, 150, 200, 300, 500)  # bucket sizes to try, MiB


@dataclass(frozen=True, slots=True)
class BucketSize:
    """Effect of a bucket size on the mean step."""

    megabytes: int | None  # MiB; None for torch's own: 1 for the first bucket and 25 for the others
    messages: float  # buckets per step
    communication_ns: float  # total time of their messages
    exposed_ns: float  # the part left after the end of the backward pass


def bucket_sizes(
    experiment: Experiment, gradients: Gradients, link: Link, ranks: int, sizes: Sequence[int] = SIZES_MB
) -> tuple[BucketSize, ...]:
    """Replay torch's own bucket sizes, then each of these."""
    there = on_device(experiment, gradients)
    return tuple(_size(there, link, ranks, megabytes) for megabytes in (None, *sizes))


def _size(gradients: Gradients, link: Link, ranks: int, megabytes: int | None) -> BucketSize:
    limit = BUCKET_BYTES if megabytes is None else megabytes << 20
    first = FIRST_BUCKET_BYTES if megabytes is None else limit
    buckets = buckets_of(gradients, bucket_bytes=limit, first_bytes=first)
    transfers = np.array([link.transfer_ns("all_reduce", size, ranks) for size in buckets.bytes.tolist()])
    steps = np.unique(buckets.step)
    exposed = 0.0
    for step in steps:
        chosen = buckets.step == step
        ready, end = buckets.ready[chosen], float("-inf")
        for moment, transfer in zip(ready.tolist(), transfers[chosen].tolist(), strict=True):
            end = max(moment, end) + transfer
        exposed += end - float(np.max(ready))
    return BucketSize(megabytes, len(transfers) / len(steps), float(transfers.sum()) / len(steps), exposed / len(steps))


def on_device(experiment: Experiment, gradients: Gradients) -> Gradients:
    """Gradients with the times when the device has computed them: when all previously launched work is done.

    Without a device or launches the host's times stay.
    """
    if experiment.device is None:
        return gradients
    calls = experiment.trace.launches.select(launched="start_ns").with_row_index("launch")
    work = experiment.trace.device_work.filter((pl.col("device") == experiment.device) & (pl.col("kind") == "compute"))
    work = work.join(calls, on="launch", how="inner").sort("launched")
    if work.is_empty():
        return gradients
    ends = np.maximum.accumulate((work["start_ns"] + work["duration_ns"]).to_numpy())
    before = np.searchsorted(work["launched"].to_numpy(), gradients.time, side="right") - 1
    time = np.where(before >= 0, np.maximum(ends[np.maximum(before, 0)], gradients.time), gradients.time)
    return replace(gradients, time=time)


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason for one setting."""

    setting: str
    value: float | bool | None  # recommended value; None to leave it to torch
    why: str  # the measurement, in a sentence
    known: bool = True  # whether the recording shows it; otherwise `why` says what is missing


@dataclass(frozen=True, slots=True)
class SettingsFromTrace:
    """Settings derived from a recording.

    Attributes:
        sizes: bucket sizes that were tried, torch's own first; empty where the recording does not show it.
        latency_ns, bandwidth_bytes_s: latency of a message among these ranks and bandwidth of each rank's link, if they
            could be fitted.
    """

    settings: DataParallelSettings
    reasons: tuple[Reason, ...]  # one per setting
    sizes: tuple[BucketSize, ...]
    step_ns: int  # mean recorded step
    ranks: int | None = None  # ranks that exchanged the recorded messages; None where the trace does not show it
    recorded_ranks: int = 1  # how many of these ranks have a trace
    latency_ns: float | None = None
    bandwidth_bytes_s: float | None = None


def data_parallel_settings(view: View, others: Sequence[Experiment] = ()) -> SettingsFromTrace:
    """Derive the settings for the program whose rank was recorded.

    Args:
        view: view of one rank's trace.
        others: the same steps on other ranks, which separate transfers from waiting.

    Raises:
        UsageError: the trace has no communication between ranks, or not of DistributedDataParallel; or `others` are
            not other ranks of the same run.
    """
    facts = next((each for each in view.program.data_parallel if each.kind == "DistributedDataParallel"), None)
    if facts is None:
        _check_trace(view)
    for other in others:
        _check_other(view.trace, other.trace)
    exchange = recorded_exchange(view.experiment, others)
    try:
        gradients: Gradients | None = gradients_of(view.experiment)
    except UsageError:
        gradients = None
    sizes, bucket = _bucket(view, exchange, None if gradients is None or gradients.at_once else gradients, facts)
    reasons = (bucket, _views(view, facts), *_unused(view, facts, gradients))
    views, static, unused = (None if each.value is None else bool(each.value) for each in reasons[1:])
    link = exchange.link if exchange is not None else None
    return SettingsFromTrace(
        DataParallelSettings(
            bucket_cap_mb=None if bucket.value is None else float(bucket.value),
            gradient_as_bucket_view=views,
            static_graph=static,
            find_unused_parameters=unused,
        ),
        reasons,
        sizes,
        view.step_ns,
        None if exchange is None else exchange.ranks,
        1 + len(others),
        link.transfer_ns("all_reduce", 0, exchange.ranks) if link is not None and exchange is not None else None,
        None if link is None else link.bandwidth_bytes_s,
    )


def _check_trace(view: View) -> None:
    if collectives(view.trace).is_empty():
        raise UsageError(f"the trace has no communication between ranks to derive settings from: {HOW_TO_RECORD}")
    names = pl.concat([view.trace.operators["name"], view.trace.annotations["name"]])
    if not names.str.contains(_OF_PYTORCH).any():
        raise UsageError("the trace has communication, but none by DistributedDataParallel, whose settings these are")


def _check_other(trace: Trace, other: Trace) -> None:
    ours, theirs = trace.metadata, other.metadata
    same = ours.rank is not None and ours.rank == theirs.rank
    if same or ours.world_size != theirs.world_size or collectives(other).is_empty():
        raise UsageError(f"{theirs.path} is not another rank of the run of {ours.path}: name ranks of one run")


def _bucket(
    view: View, exchange: RecordedExchange | None, gradients: Gradients | None, facts: DataParallelFacts | None
) -> tuple[tuple[BucketSize, ...], Reason]:
    """Choose the size with the least exposed communication, if the gain is worth a recommendation."""
    why = _why_no_bucket(exchange, gradients)
    if why or exchange is None or gradients is None or exchange.link is None:
        return (), Reason("bucket_cap_mb", None, why, known=False)
    link = exchange.link
    # Smaller messages may show a latency that the recorded ones do not.
    smallest = _recorded_bytes(exchange)[0]
    tried = [each for each in SIZES_MB if link.has_latency or each << 20 >= smallest]
    sizes = bucket_sizes(view.experiment, gradients, link, exchange.ranks, tried)
    own, best = sizes[0], min(sizes, key=lambda each: each.exposed_ns)
    worth = WORTH * view.step_ns
    near = [each for each in sizes[1:] if each.exposed_ns <= best.exposed_ns + worth / 10 and each.megabytes]
    size = min(near, key=lambda each: abs(np.log((each.megabytes or 1) / (BUCKET_BYTES >> 20))), default=own)
    if own.exposed_ns - size.exposed_ns <= worth:
        size = own
    return sizes, Reason("bucket_cap_mb", size.megabytes, _why_size(sizes, size, facts))


def _why_no_bucket(exchange: RecordedExchange | None, gradients: Gradients | None) -> str:
    """Why the recording cannot recommend a bucket size; "" if it can."""
    if exchange is None:
        return "the recording does not show which collectives of several ranks its steps had"
    if gradients is None:
        return "the recording does not show the size of each gradient and when it is ready: record shapes"
    link = exchange.link
    if link is None:
        return "the recording does not show the size of the messages: record shapes"
    smallest, largest = _recorded_bytes(exchange)
    if not link.has_latency and largest < SEVERAL * smallest:
        return (
            "the recorded messages do not show the fixed cost of each: record some steps with another "
            "bucket_cap_mb, so that there are messages of several sizes"
        )
    if link.error > MOST_OFF or link.bandwidth_bytes_s >= FASTEST:
        return (
            "what the recorded messages took does not follow from their sizes, as where ranks wait for each other or "
            "for processors, or messages wait in a queue: record every rank, on a machine that does nothing else, with "
            "larger buckets"
        )
    return ""


def _recorded_bytes(exchange: RecordedExchange) -> tuple[int, int]:
    known = exchange.table.filter(pl.col("kind") == "all_reduce")["bytes"].drop_nulls().to_numpy()
    return int(known.min(initial=np.iinfo(np.int64).max)), int(known.max(initial=0))


def _why_size(sizes: tuple[BucketSize, ...], size: BucketSize, facts: DataParallelFacts | None) -> str:
    own, worst = sizes[0], max(sizes, key=lambda each: each.exposed_ns)
    if size is own:
        why = (
            f"torch's own buckets leave {_ms(own)} of {_ms(own, whole=True)} of messages exposed, and no other size "
            f"more than {WORTH:.0%} of the step less; the worst tried, {worst.megabytes or 25} MiB, leaves {_ms(worst)}"
        )
    else:
        why = (
            f"buckets of {size.megabytes} MiB leave {_ms(size)} of {_ms(size, whole=True)} of messages exposed in "
            f"{size.messages:.0f} messages; torch's own leave {_ms(own)} in {own.messages:.0f}"
        )
    recorded = facts.bucket_bytes if facts is not None else None
    if recorded and recorded != BUCKET_BYTES and (size.megabytes or 0) << 20 != recorded:
        why += f". The recorded buckets had {recorded / 2**20:g} MiB"
    return why


def _ms(size: BucketSize, *, whole: bool = False) -> str:
    return f"{(size.communication_ns if whole else size.exposed_ns) / 1e6:.2f} ms"


def _views(view: View, facts: DataParallelFacts | None) -> Reason:
    name = "gradient_as_bucket_view"
    if facts is not None and facts.gradient_as_bucket_view:
        return Reason(name, True, "the recorded program has it on already")
    copies = view.operators.filter(pl.col("name") == COPY)
    if copies.is_empty():
        why = "no copy of gradients out of buckets was recorded; older versions of torch do not record them"
        return Reason(name, None, why, known=facts is not None)
    cost = view.cost_ns(copies["row"].to_numpy())
    held = facts.gradient_bytes if facts is not None else None
    memory = f", and {held / 1e6:,.1f} MB of gradients are held twice" if held else ", and gradients are held twice"
    why = (
        f"{copies.height / view.step_count:,.0f} gradients a step are copied out of their buckets, "
        f"{view.share(cost):.1%} of the step{memory}"
    )
    return Reason(name, True, why)


def _unused(view: View, facts: DataParallelFacts | None, gradients: Gradients | None) -> tuple[Reason, Reason]:
    """Whether the graph is the same in all steps, and whether unused parameters must be searched for."""
    names = view.operators["name"]
    marks = bool((names == SEARCH).any()) if names.is_in([SEARCH, COPY]).any() else None
    looks = facts.find_unused_parameters if facts is not None else marks
    without = facts.unused_parameters if facts is not None else None
    if facts is not None and facts.static_graph:
        why = "the recorded program says that its graph stays the same"
        return _static(True, why), _search(False, f"{why}, so no search is needed")
    if looks is None:
        why = "the recording does not say whether the program searches for unused parameters: record with stepscope run"
        return _static(None, why, known=False), _search(None, why, known=False)
    if not looks:
        why = "the program does not search for unused parameters"
        return _static(None, f"{why}: it would save nothing"), _search(False, f"{why} already")
    if without is None:
        why = "the recording does not say which parameters got no gradient: record with stepscope run"
        return _static(None, why, known=False), _search(None, why, known=False)
    if without == 0:
        why = "every step searches for them, and every parameter had a gradient"
        return _static(None, "without a search for unused parameters it saves nothing"), _search(False, why)
    return _some_unused(without, gradients)


_static: Final = partial(Reason, "static_graph")
_search: Final = partial(Reason, "find_unused_parameters")


def _some_unused(without: int, gradients: Gradients | None) -> tuple[Reason, Reason]:
    some = f"{without:,} parameters got no gradient" if without > 1 else "1 parameter got no gradient"
    if gradients is None or gradients.at_once:
        why = f"{some}, and it is unknown whether these are the same in every step: record shapes"
        return _static(False, why), _search(True, why)
    by_step = [sorted(gradients.bytes[gradients.step == each].tolist()) for each in np.unique(gradients.step)]
    if any(each != by_step[0] for each in by_step):
        why = f"{some}, and the recorded steps had different gradients"
        return _static(False, why), _search(True, why)
    if len(by_step) < 2:
        why = f"{some}; one recorded step does not show whether others are the same"
        return _static(None, why, known=False), _search(True, why)
    why = (
        f"{some}, and all {len(by_step)} recorded steps had the same gradients: torch then notes what is unused in "
        "the first step. Only where no step differs"
    )
    return _static(True, why), _search(False, "static_graph makes the search unnecessary")
