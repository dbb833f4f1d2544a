"""# What it finds
Prompts that stop requests which are being decoded: iterations over prompts that last many times as long as it takes to
decode a token.

# Why it costs time
While an engine computes a long prompt, all other requests wait: one of their tokens takes as long as the prompt. The
device does useful work, so nothing is lost in total, but users see the text stop, and the slowest tokens define the
latency that is promised.

# How it is measured
The time from the start of a decoding iteration to the next one, with the iterations over prompts between them (or the
iteration itself, if it decodes and computes prompts at once), compared with the median between decoding iterations
without any. Only where more requests are decoded afterwards than had their prompts computed, so that some waited.

# Known false positives
Work in batches, where nobody waits for single tokens.

# What to do
Let the engine divide prompts into pieces and compute a piece together with the tokens of other requests, at most so
many tokens in one iteration. A smaller limit gives steadier tokens, and a later first token. Where both matter, other
devices can compute the prompts.

# Reference
Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024).
"""

from __future__ import annotations

from typing import Final

import polars as pl

from stepscope.diagnosis.finding import Interval
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View

_FEWEST: Final = 2
"""Fewest undisturbed times between decoding iterations that show what is usual."""
_CHUNKED: Final = InServing(
    "Divide prompts into pieces that are computed together with other requests' tokens, with a limit of tokens for "
    "each iteration.",
    "chunked_prefill",
    "for piece in prompt.split(512, dim=1):      # a piece, then a token of each other request, then the next piece\n"
    "    cache = model(piece, past_key_values=cache).past_key_values",
)


def check(view: View, limits: Limits) -> Answers:
    if not view.serves:
        return
    times = _times_between(view.iterations)
    usual = times.filter(pl.col("prompts") == 0)["ns"]
    if usual.len() < _FEWEST:
        return
    median = int(usual.median() or 0)  # type: ignore[arg-type]
    least = limits["times"]
    stalls = times.filter(pl.col("prompts") > 0, pl.col("waited"), pl.col("ns") >= least * median)
    late = int((stalls["ns"] - median).sum()) / max(int(times["ns"].sum()), 1)
    if stalls.is_empty() or late < limits["share"]:
        return
    longest = stalls.sort("ns", descending=True)
    worst = int(longest["ns"][0])
    many = "1 time" if stalls.height == 1 else f"{stalls.height:,} times"
    yield Found(
        f"{many}, requests that are being decoded wait for other requests' prompts: up to {worst / 1e6:.3g} ms for a "
        f"token that usually takes {median / 1e6:.3g} ms",
        0,
        basis="no time is lost in total, but tokens come late",
        confidence="high",
        severity="note",
        figures=[
            Figure("times that tokens waited for prompts", stalls.height, "count"),
            Figure("longest time from a token to the next", worst, "ns", least * median),
            Figure("usual time from a token to the next", median, "ns"),
            limits.figure("share", late),
            *_tokens(longest),
        ],
        intervals=[Interval(start, ns, "tokens wait for a prompt") for start, ns in _shown(longest)],
        remedy=_CHUNKED.remedy(view),
    )


def _shown(longest: pl.DataFrame) -> list[tuple[int, int]]:
    return longest.head(3).select("start_ns", "ns").rows()


def _tokens(longest: pl.DataFrame) -> list[Figure]:
    tokens = longest["tokens"][0]
    return [] if tokens is None else [Figure("tokens of prompts and others in the longest", int(tokens), "count")]


def _times_between(iterations: pl.DataFrame) -> pl.DataFrame:
    """From each decoding iteration's start to the next one's.

    Columns start_ns, ns, prompts (iterations with prompts among them), tokens (of those; null if unknown) and waited
    (whether some requests were decoded before as well as after; null if unknown).
    """
    rows = iterations.sort("start_ns").filter(pl.col("phase").is_not_null())
    has_prompt = pl.col("phase").is_in(["prefill", "mixed"])
    prefill = pl.col("phase") == "prefill"
    requests, tokens = pl.col("requests"), pl.col("tokens").filter(has_prompt)
    groups = rows.with_columns(place=pl.col("phase").is_in(["decode", "mixed"]).cum_sum()).filter(pl.col("place") > 0)
    groups = groups.group_by("place", maintain_order=True).agg(
        start_ns=pl.col("start_ns").first(),
        requests=requests.first(),
        prompts=has_prompt.sum(),
        tokens=pl.when(tokens.null_count() == 0).then(tokens.sum()),
        new=pl.when(requests.filter(prefill).null_count() == 0).then(requests.filter(prefill).sum()),
        in_one=(pl.col("phase") == "mixed").any(),  # such an iteration decodes requests by definition
    )
    ns = pl.col("start_ns").shift(-1) - pl.col("start_ns")
    waited = pl.col("in_one") | (pl.col("requests").shift(-1) > pl.col("new"))
    return groups.with_columns(ns=ns, waited=waited).filter(pl.col("ns").is_not_null())


RULE: Final = Rule(
    id="prefill-stall",
    title="Prompts stop the requests that are being decoded",
    thresholds={
        "share": Threshold(0.05, "share", "share of the decoding time by which tokens come late"),
        "times": Threshold(3, "count", "times as long as usual from a token to the next that are late"),
    },
    check=check,
)
