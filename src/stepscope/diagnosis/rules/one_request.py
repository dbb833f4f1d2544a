"""# What it finds
A loop that generates for one request after the other: each prompt is computed and decoded to its end before the next
one begins. And an engine that forms batches itself, but never has more than a few requests at once, although the next
one begins as soon as one ends. Of any engine it says where iterations decode far fewer requests than they could.

# Why it costs time
To decode a token, the device reads all weights of the model, and the host launches all of its kernels. For a batch of
requests it does so once for all of them, so that several take hardly longer than one.

# How it is measured
Iterations of at least two generations, each with one request, that follow each other. The time to decode in all of them
is divided by the number of generations, at most by eight: as if they were decoded together, and an iteration took as
long as now. An assumption, good as long as reading the weights or launching kernels takes most of an iteration.

Of an engine that forms batches itself, the recorder's look at the model's last 512 calls counts: no call with more
requests than the threshold, most decoding calls with as many as any, at least twice as many prompts, and a prompt
begins within three usual calls of the end of an earlier one. Eight requests at once, or all that there were, are
assumed; what each further one costs is taken from the calls that read prompts.

The limit of a batch is the largest size for which a graph was captured, or else the largest batch that the recording
shows, if at least eight iterations decode. That is a note: whether more requests waited, the trace does not show.

# Known false positives
A program that answers one user at a time, who waits for each answer before asking again. Of other
engines that serve nothing is counted as saved: their batches depend on the requests that arrive.

# What to do
Give the loop several prompts at once, padded on the left to one length where they differ, or let a serving engine form
the batches.

# Reference
Pope et al., "Efficiently Scaling Transformer Inference" (2022): the cost of a token by batch size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.diagnosis.finding import Interval, Location
from stepscope.diagnosis.lines.costs import settings_at
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View
from stepscope.whatif.changes import scaled_pieces

_MOST: Final = 8
"""Most generations that are taken to be decoded together in the time of one."""
_TOGETHER: Final = InServing(
    "Generate for several prompts at once.",
    "batch",
    "tokens = pad_on_the_left(prompts)      # (requests, longest prompt), with a mask\n"
    "for _ in range(new_tokens):\n    ...                                # each pass adds a token to every request",
)


_ENGINE: Final = InServing(
    "Give the engine all requests that are there, and let it decode more of them together.",
    "batch",
    "engine.add_requests(prompts)      # all that are there, before the first answer is awaited",
)
_FULLER: Final = InServing(
    "If requests wait, let the engine hold more of them at once: the weights are read once for all. If they do not, "
    "fewer or smaller devices serve them as fast.",
    "batch",
    "batch = tokenizer(prompts, return_tensors='pt', padding=True)      # new ones in the places of those that ended",
)
_LIMITS: Final = ("max_requests_per_batch=", "max_num_seqs=", "max_running_requests=", "max_batch_size=")
"""Options of engines that limit how many requests they decode together."""
_FEWEST: Final = 8
"""Fewest decoding iterations whose batches are compared."""
_CALLS: Final = 16
_MOSTLY: Final = 0.5
_AT_ONCE: Final = 3


def check(view: View, limits: Limits) -> Answers:
    if view.engine.batches:
        yield from _few_at_once(view, int(limits["requests"]))
    yield from _emptier_than_they_could_be(view, limits)
    if not view.serves or view.engine.ranges or view.engine.reserves or view.engine.batches:
        return
    rows = view.begin_in_span(view.iterations).sort("start_ns")
    rows = rows.with_columns(generation=(pl.col("phase") == "prefill").fill_null(False).cum_sum())
    rows = rows.filter(pl.col("generation") > 0)
    if rows.is_empty() or not (rows["requests"] == 1).all() or rows["requests"].null_count():
        return
    decodes = rows.filter(pl.col("phase") == "decode")
    count = decodes["generation"].n_unique()
    if count < 2:
        return
    total = int(decodes["duration_ns"].sum())
    starts = rows.group_by("generation").agg(pl.col("start_ns").min(), ns=pl.col("duration_ns").sum())
    yield Found(
        f"{count:,} generations of one request each follow one another: decoding takes {view.percent(total)} of the "
        f"{view.period}",
        total * (1 - 1 / min(count, _MOST)),
        basis="time to decode, but for one in so many generations that a batch decodes together; an assumption",
        confidence="low",
        figures=[
            Figure("generations", count, "count"),
            view.share_figure("in decoding", total),
            Figure("tokens decoded one by one", decodes.height, "count"),
            Figure("time of such a token", total // decodes.height, "ns"),
        ],
        intervals=[
            Interval(start, ns, "one generation")
            for start, ns in starts.sort("start_ns").head(3).select("start_ns", "ns").iter_rows()
        ],
        remedy=_TOGETHER.remedy(view),
        where=view.locations(_with_phase(view, decodes)),
        for_every_framework=True,
    )


def _emptier_than_they_could_be(view: View, limits: Limits) -> Answers:
    if view.serving is None or not view.serves:
        return
    decodes = view.begin_in_span(view.iteration_costs.filter(pl.col("phase") == "decode", pl.col("requests") > 0))
    if decodes.height < _FEWEST:
        return
    requests = decodes["requests"]
    typical, most = round(float(requests.median() or 0)), int(requests.max() or 0)  # type: ignore[arg-type]
    is_speculative = bool((decodes["tokens"] > decodes["requests"]).any())  # then sizes may count tokens
    captured = max(view.serving.captured_sizes, default=0) if not is_speculative else 0
    limit = max(captured, most)
    held = float(requests.sum()) / (limit * decodes.height)
    if held > limits["occupancy"] or limit <= limits["requests"]:
        return
    of = "the largest size for which a graph was captured" if captured >= most else "the largest batch seen"
    yield Found(
        f"iterations decode {typical:,} request{'' if typical == 1 else 's'} at the median and {most:,} at the most: "
        f"on average {held:.0%} of {of}",
        0,
        basis="no saving: the trace does not show whether more requests waited",
        confidence="high",
        severity="note",
        figures=[
            limits.figure("occupancy", held),
            Figure(of, limit, "count", limits["requests"]),
            Figure("requests in an iteration that decodes, median", typical, "count"),
            Figure("most requests in such an iteration", most, "count"),
            Figure("decoding iterations", decodes.height, "count"),
            *_times(view, decodes, typical, most),
        ],
        remedy=_FULLER.remedy(view),
        where=settings_at(view, *_LIMITS),
        for_every_framework=True,
    )


def _times(view: View, decodes: pl.DataFrame, typical: int, most: int) -> list[Figure]:
    """What iterations with the typical batch and with the largest one take, where both are seen."""
    takes = "duration_ns" if view.device is None else "device_ns"
    times = {
        name: decodes.filter(pl.col("requests") == requests)[takes]
        for name, requests in (("median", typical), ("largest", most))
    }
    if typical == most or any(each.is_empty() for each in times.values()):
        return []
    what = "time of an iteration" if view.device is None else "work of the device in an iteration"
    return [
        Figure(f"{what} with the {name} batch", round(each.median() or 0), "ns")  # type: ignore[arg-type]
        for name, each in times.items()
    ]


def _few_at_once(view: View, few: int) -> Answers:
    facts = view.program.model_calls
    if facts is None or not view.serves or len(facts.calls) < _CALLS:
        return
    start, requests, begun, tokens = (np.array(column, np.int64) for column in zip(*facts.calls, strict=True))
    length = np.diff(start)
    requests, begun, tokens = requests[:-1], begun[:-1], tokens[:-1]
    decodes, most, prompts = tokens == requests, int(requests.max()), int(begun.sum())
    together = min(prompts, _MOST)
    if most > few or together < 2 * most or not decodes.any() or decodes.all():
        return
    usual = float(np.median(length[decodes]))
    if (requests[decodes] == most).mean() < _MOSTLY or np.median(length[:-1][begun[1:] > 0]) > _AT_ONCE * usual:
        return
    more = tokens > most
    each = max(float(np.median((length[more] - usual) / (tokens[more] - most))), 0.0)
    left = min((usual + each * (together - most)) / usual * most / together, 1.0)
    total = float(length[decodes].sum() / max(length.sum(), 1)) * view.length_ns
    waiting = tuple(Location(place.file, place.line, place.function, 1.0, exact_line=True)
                    for place in view.program.waiting)  # fmt: skip
    yield Found(
        f"the engine never has more than {most:,} request{'' if most == 1 else 's'} at once, though {prompts:,} follow "
        f"one another: decoding takes {view.percent(total)} of the {view.period}",
        total * (1 - left),
        basis="time to decode, if as many requests as assumed were decoded together and each further one cost what a "
        "token of a prompt does",
        confidence="medium",
        figures=[
            Figure("most requests in a call of the model", most, "count", few),
            Figure("prompts that were begun", prompts, "count"),
            view.share_figure("in decoding", total),
            Figure("time of a decoding call", int(usual), "ns"),
            Figure("time that a further token adds", int(each), "ns"),
            Figure("requests that are assumed at once", together, "count"),
        ],
        remedy=_ENGINE.remedy(view),
        where=(*settings_at(view, *_LIMITS), *waiting),
        change=scaled_pieces(view.host_pieces, left * total / view.length_ns + 1 - total / view.length_ns),
        for_every_framework=True,
    )


def _with_phase(view: View, decodes: pl.DataFrame) -> pl.DataFrame:
    """The host's pieces inside these iterations."""
    spans = decodes.select(begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns")).sort("begin")
    pieces = view.host_pieces.sort("start_ns")
    found = pieces.join_asof(spans, left_on="start_ns", right_on="begin", strategy="backward")
    return found.filter(pl.col("start_ns") < pl.col("until"))


RULE: Final = Rule(
    id="one-request",
    title="Requests are generated one after the other",
    thresholds={
        "share": Threshold(0.05, "share", "share of the {period} that a batch would save"),
        "requests": Threshold(4, "count", "requests at once that are few for an engine that forms batches"),
        "occupancy": Threshold(0.4, "share", "share of the largest batch that iterations decode on average"),
    },
    check=check,
    rivals=("loop-in-step",),
)
