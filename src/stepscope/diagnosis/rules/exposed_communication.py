"""# What it finds
Collectives between ranks that do not overlap with computation.

# Why it costs time
While gradients or activations are sent and nothing computes, every device of the group waits. Data-parallel training
can send the gradients of late layers while early layers are still computing theirs.

# How it is measured
Time when the device communicates and does not compute, plus idle time while the launching thread waited for other
ranks. The collective is identified by the operator or mark that called it, and only otherwise by the kernel's name:
NCCL's kernels that send and receive also exchange all to all, and gather.

# Known false positives
A rank that arrives early waits inside the collective for the slowest one. The straggler is then the cause, not the
network, which one rank's trace alone cannot show.

# What to do
Begin collectives before work that does not need them (`async_op=True`), and send less. Gradients:
DistributedDataParallel buckets that overlap with the backward pass (`bucket_cap_mb`,
`gradient_as_bucket_view=True`), accumulate gradients without synchronising (`no_sync()`), or send bf16 gradients.
Sharded parameters: FSDP's prefetch, and parameters kept after the forward pass. All-to-all: embeddings one batch ahead,
experts beside the shared expert or the other half of the batch. Buffers: `broadcast_buffers=False`.
Where a model that serves is divided among ranks, each layer sends small messages that the next one needs: use the
engine's own all-reduce, fused with what follows it, or fewer ranks.

# Reference
TraceLens reports exposed communication from 5 %, PyTorch's TensorBoard plugin from 10 %.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.communication import collectives, exposed_intervals_on_host, exposed_on_host
from stepscope.diagnosis.finding import Location, NotAnswered
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Remedy, Rule, Threshold, View, rows_of
from stepscope.diagnosis.rules._device import size_in_words
from stepscope.whatif import Change
from stepscope.whatif.changes import overlapped, scaled_cause, scaled_host_time, scaled_pieces, together

_WORDS: Final = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all", "broadcast": "broadcast", "reduce": "reduce", "send_receive": "sends and receives",
    "barrier": "barrier",
}  # fmt: skip
_MOST: Final = 0.5
_ANY: Final = Remedy(
    "Begin collectives before work that does not need their data, wait only where it is used, and send less.",
    "request = dist.all_gather_into_tensor(gathered, part, async_op=True)      # or the collective that it is\n"
    "result = compute_what_needs_no_transfer()\n"
    "request.wait()",
)
_ALL_TO_ALL: Final = Remedy(
    "Ranks exchange all to all while nothing computes: begin the exchange before work that does not need it, send "
    "16-bit numbers, and spread the work so that all ranks come to it at the same time.",
    "request = dist.all_to_all_single(received, sent, async_op=True)\n"
    "result = compute_what_needs_no_exchange()      # such as the dense layers, or the next batch's indices\n"
    "request.wait()",
)
_BETWEEN_TWO: Final = Remedy(
    "Ranks send to each other while nothing computes: begin transfers before the work that does not need them, and "
    "wait only where their data is used.",
    "requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)])\n"
    "result = compute_what_needs_no_transfer()\n"
    "for request in requests:\n    request.wait()",
)


_EMBEDDINGS: Final = Remedy(
    "Ranks exchange embeddings all to all while nothing computes: fetch the next batch's indices and rows while the "
    "dense layers compute, shard tables so that all ranks look up as much, and send 16-bit numbers.",
    "from torchrec.distributed.train_pipeline import TrainPipelineSparseDist\n"
    "pipeline = TrainPipelineSparseDist(model, optimizer, device)      # exchanges one batch ahead\n"
    "pipeline.progress(batches)\n"
    "from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry\n"
    "codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))      # for the sharders",
)
_EXPERTS: Final = Remedy(
    "Ranks exchange tokens for their experts all to all while nothing computes: compute the shared expert, or another "
    "half of the batch, meanwhile; keep experts evenly loaded, and experts of a token on few ranks.",
    "request = dist.all_to_all_single(received, tokens, async_op=True)      # or DeepEP's dispatch and combine\n"
    "shared = shared_expert(hidden)\n"
    "request.wait()",
)
_SHARDED: Final = Remedy(
    "Let FSDP gather the parameters of the next layers while this one computes, and keep them after the forward pass "
    "if the memory allows.",
    "fully_shard(layer, reshard_after_forward=False)      # no second gather in the backward pass; takes memory\n"
    "layer.set_modules_to_forward_prefetch([next_layer])   # FSDP2\n"
    "model = FullyShardedDataParallel(model, forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE,\n"
    "                                 sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)   # FSDP1",
)
_BUFFERS: Final = Remedy(
    "Do not broadcast the model's buffers in each forward pass, unless ranks need the same running statistics.",
    "model = DistributedDataParallel(model, broadcast_buffers=False)",
)
_SIGNS: Final = (
    ({"all_to_all"}, r"(?i)torchrec|fbgemm|embedding|sparse_data_dist", _EMBEDDINGS),
    ({"all_to_all"}, r"(?i)expert|(?:^|\W)moe(?:\W|$)|deep_?ep|token_dispatch", _EXPERTS),
    ({"all_to_all"}, "", _ALL_TO_ALL),
    ({"send_receive"}, "", _BETWEEN_TWO),
    ({"all_gather", "reduce_scatter"}, r"(?i)fsdp|FullySharded", _SHARDED),
    ({"broadcast"}, r"DistributedDataParallel\.forward", _BUFFERS),
)
"""Kinds of collectives, a name in the trace that shows what they are for, and what to do then; the first that holds."""


def check(view: View, limits: Limits) -> Answers:
    exposed = view.exposed_ns(("communication",)) if view.device is not None else 0
    waiting = view.pieces_of("communication")
    on_host = exposed_on_host(view.trace, view.span) if view.device is None else 0
    cost = exposed + max(int(waiting["duration_ns"].sum()), on_host)
    if not limits.reached(cost):
        return
    work, where = _collectives(view)
    total = int(work["duration_ns"].sum())
    kind, part = _largest_kind(work)
    most = f", most of it {_WORDS[kind]}" if kind in _WORDS and part > _MOST else ""
    message, ranks = _typical_message(view, work, kind) if view.serves else (0, 0)
    if most and message:
        most += f" of {size_in_words(message)} each"
    yield Found(
        f"{view.percent(cost)} of the {view.period} goes to communication that no computation overlaps{most}",
        cost,
        basis="time when the device only communicates, plus idle time spent waiting for other ranks"
        if view.device is not None
        else "time in which collectives run on the host and no operator computes",
        confidence="medium",
        figures=[
            Figure(f"communication in all {view.per}", total // view.step_count, "ns"),
            Figure("share of it that is exposed", min((exposed or on_host) / total, 1.0) if total else 0.0, "share"),
            view.count_per_step("collectives", work.height),
            *([Figure(f"share of the communication in {_WORDS[kind]}", part, "share")] if kind in _WORDS else []),
            *([Figure(f"message of {_WORDS.get(kind, kind)}, median", message, "bytes")] if message else []),
            *([Figure("ranks that exchange", ranks, "count")] if ranks else []),
        ],
        intervals=view.longest(work, "collective"),
        remedy=_remedy(view, kind),
        where=where,
        change=_overlapped(view, work, waiting),
    )
    if (view.trace.metadata.world_size or 1) >= 2:
        yield NotAnswered(
            "Do ranks wait for a slow one inside the collectives, or for the network?",
            "one rank's trace does not show when the others arrived",
            "record every rank of the same steps, and diagnose their traces together: stepscope diagnose FOLDER",
        )


def _collectives(view: View) -> tuple[pl.DataFrame, tuple[Location, ...]]:
    """The span's collectives with start_ns and duration_ns, and where they are called."""
    if view.device is None:
        found = collectives(view.trace, window=view.span)
        return found, view.at_operators(rows_of(found), found["duration_ns"].to_numpy())
    work = view.work.filter(pl.col("kind") == "communication")
    kinds = collectives(view.trace, device=view.device).select(
        "row", "ranks", collective_kind="kind", message_bytes="bytes"
    )
    work = (
        work.drop("kind")
        .with_columns(pl.col("row").cast(pl.Int64))
        .join(kinds, on="row", how="left", maintain_order="left")
    )
    return work.rename({"collective_kind": "kind"}), view.at_launches(work)


def _largest_kind(work: pl.DataFrame) -> tuple[str, float]:
    """The kind of collective that takes most time, and its share of all of them; "" and 0 if there is none."""
    sums = work.group_by("kind").agg(ns=pl.col("duration_ns").sum()).sort(["ns", "kind"], descending=[True, False])
    total = int(sums["ns"].sum())
    return (str(sums["kind"][0]), int(sums["ns"][0]) / total) if total else ("", 0.0)


def _typical_message(view: View, work: pl.DataFrame, kind: str) -> tuple[int, int]:
    """Median size of this kind's messages, and the ranks that exchange them; 0 where unknown."""
    mine = work.filter(pl.col("kind") == kind)
    sizes = mine["message_bytes" if view.device is not None else "bytes"].drop_nulls()
    ranks = mine["ranks"].drop_nulls().max() or view.trace.metadata.world_size or 0
    return round(sizes.median() or 0), int(ranks)  # type: ignore[arg-type]


def _overlapped(view: View, work: pl.DataFrame, waiting: pl.DataFrame) -> Change:
    """Leave only the part of the collectives' time that overlaps with computation."""
    if view.device is None:  # other threads than the waiting one may record no cause for the wait
        exposed = exposed_intervals_on_host(view.trace, view.span)
        lanes = np.array(list(view.activity.timelines), np.int32)
        starts, ends = np.tile(exposed.starts, len(lanes)), np.tile(exposed.ends, len(lanes))
        waits = scaled_host_time(np.repeat(lanes, len(exposed.starts)), starts, ends, 0.0)
        return together(waits, scaled_cause("communication", 0.0))
    return together(overlapped(rows_of(work)), scaled_pieces(waiting, 0.0))


def _is_named(view: View, sign: str) -> bool:
    """Whether an operator, an annotation or a frame has such a name."""
    tables = (view.trace.operators, view.trace.annotations, view.trace.frames)
    return any(bool(table["name"].unique().str.contains(sign).any()) for table in tables)


def _remedy(view: View, kind: str) -> Remedy:
    """Remedy for the costliest kind of collective, without settings already in use."""
    for kinds, sign, remedy in _SIGNS:
        if kind in kinds and (not sign or _is_named(view, sign)):
            return remedy
    if kind not in ("all_reduce", "reduce") or not view.trains:
        return _ANY
    facts = next(iter(view.program.data_parallel), None)
    has_views = facts is not None and facts.gradient_as_bucket_view
    views = "" if has_views else ", gradient_as_bucket_view=True"
    return Remedy(
        "Overlap gradients' communication with the backward pass, and send less, or less often.",
        "# which of these settings suit this program: stepscope data-parallel RUN\n"
        f"model = DistributedDataParallel(model, bucket_cap_mb=50{views}, static_graph=True)\n"
        "with model.no_sync():                                # all but the last of several small batches\n"
        "    loss(model(batch)).backward()\n"
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)   # half the bytes",
    )


RULE: Final = Rule(
    id="exposed-communication",
    title="Communication between ranks is not overlapped",
    thresholds={"share": Threshold(0.05, "share", "share of the {period} lost to communication")},
    check=check,
    remedies={
        "jax": Remedy(
            "Let XLA run collectives while it computes, and exchange less, or less often.",
            "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true python train.py  # GPUs; TPUs do so by default",
        ),
    },
    serving=InServing(
        "Let the engine's own all-reduce exchange what layers compute, fused with the normalisation behind it, or "
        "divide the model among fewer devices.",
        "all_reduce",
        "dist.all_reduce(hidden)      # fewer ranks, and one message for what several layers' parts send",
    ),
)
