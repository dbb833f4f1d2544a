"""# What it finds
Speculative decoding that costs more than it brings, or whose drafts are mostly rejected: tokens are drafted for each
request and checked by the model at once, and few of them are what the model would have chosen.

# Why it costs time
Each iteration drafts tokens, and the model checks them beside the one that it would compute anyway. Only tokens up to
the first wrong one count. Drafting the rest is lost, and for a full batch also checking it, since the device then has
no arithmetic to spare.

# How it is measured
Ranges in which an engine drafts, or its functions that do, with the device's work launched in them (without a device,
their time). Tokens that an iteration checks come from its range, as do the tokens that its requests have before it, or
of one request alone from the shapes of its attention. Between two decoding iterations of the same number of requests,
in which none came or went, they grow by the tokens that were accepted and the one that each request always gains. The
time of drafting is charged by the share of drafted tokens that were rejected. Drafting pays if each request gains more
tokens in an iteration than drafting and checking take together, measured in the time of checking alone: decoding
without drafts takes about as long as checking. If a request gains less than 0.75 of what would pay, the difference is
charged if that is more. At least three iterations must show it.

# Known false positives
One request that ends while another begins between two iterations changes the counted tokens a little. Texts that are
harder to guess than usual in the recorded seconds.

# What to do
Draft fewer tokens, use a draft model that was trained for this model and these texts, or draft none: for large batches
engines can turn drafting off.

# Reference
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); vLLM, "Speculative decoding";
SGLang, "Speculative decoding".
"""

from __future__ import annotations

from typing import Final

import numpy as np
import polars as pl

from stepscope.analysis.serving import drafting_ranges, tokens_gained, verifies, work_launched_in
from stepscope.diagnosis.finding import NotAnswered
from stepscope.diagnosis.lines.costs import settings_at
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View
from stepscope.whatif import Change
from stepscope.whatif.changes import scaled_host_time, scaled_work, together

_FEWEST: Final = 3
"""Fewest iterations that show how many tokens were accepted."""
_CLEARLY: Final = 0.75
"""A request gains less than this share of what would pay: decoding alone may take a little longer than checking."""
_FEWER: Final = InServing(
    "Draft fewer tokens at once, with a draft model that fits this model and these texts, or draft none.",
    "speculation",
    "model.generate(**batch)      # without assistant_model, or with a smaller num_assistant_tokens",
)


def check(view: View, limits: Limits) -> Answers:
    if not view.serves:
        return
    decodes = view.begin_in_span(view.iteration_costs.filter(pl.col("phase") == "decode"))
    checked = decodes.filter(pl.col("tokens") > pl.col("requests"))
    drafts = view.begin_in_span(drafting_ranges(view.trace))
    if checked.is_empty() and drafts.is_empty():
        return
    known = tokens_gained(decodes).filter(pl.col("tokens") > pl.col("requests"))
    work = work_launched_in(view.trace, drafts)
    drafting = _taken(view, drafts, work)
    if known.height < _FEWEST:
        if limits.reached(drafting) or (drafts.is_empty() and verifies(view.trace)):
            yield _UNKNOWN
        return
    requests, drafted = int(known["requests"].sum()), int((known["tokens"] - known["requests"]).sum())
    accepted = int(known["gained"].sum()) - requests
    rejected = 1 - accepted / drafted
    figures = [
        limits.figure("rejected", rejected),
        Figure("drafted tokens of a request that an iteration checks", round(drafted / requests, 2), "count"),
        Figure("of them accepted", round(accepted / requests, 2), "count"),
        Figure("decoding iterations that show it", known.height, "count"),
    ]
    is_mostly_rejected = rejected >= limits["rejected"]
    if drafting:
        iterations, draft_ns, check_ns = _periods(view, decodes, drafts)
        pays_from = 1 + draft_ns / max(check_ns, 1)
        gained = 1 + accepted / requests
        lost = 1 - (gained - 1) / max(pays_from - 1, 1e-9) if gained < _CLEARLY * pays_from else 0.0
        if not (is_mostly_rejected or lost > 0):
            return
        share = max(lost, rejected if is_mostly_rejected else 0.0)
        takes = f"drafting takes {view.percent(drafting)} of the {view.period}"
        title = f"{rejected:.0%} of the drafted tokens are rejected, and {takes}"
        if not is_mostly_rejected:
            title = f"{takes}, more than the accepted tokens bring"
        yield Found(
            title + (": decoding without drafts would be faster" if lost > 0 else ""),
            drafting * share,
            basis="time of drafting beyond what decoding the accepted tokens one by one would take"
            if share > rejected
            else "time of drafting, by the share of drafted tokens that are rejected",
            confidence="medium",
            share_at=1,
            figures=[
                *figures,
                view.share_figure("in drafting", drafting),
                Figure("time of drafting for an iteration", draft_ns // iterations, "ns"),
                Figure("time of an iteration that checks", check_ns // iterations, "ns"),
                Figure(
                    "tokens that a request must gain in an iteration for drafting to pay", round(pays_from, 2), "count"
                ),
            ],
            remedy=_FEWER.remedy(view),
            where=settings_at(view, *_OPTIONS),
            change=_less_drafting(view, drafts, work, 1 - share),
            for_every_framework=True,
        )
    elif is_mostly_rejected:
        yield Found(
            f"{rejected:.0%} of the drafted tokens are rejected",
            0,
            basis="no saving: the trace does not show how long drafting takes",
            confidence="high",
            severity="note",
            figures=figures,
            remedy=_FEWER.remedy(view),
            where=settings_at(view, *_OPTIONS),
        )


_OPTIONS: Final = ("assistant_model=", "prompt_lookup_num_tokens=", "speculative_config=", "speculative_algorithm=")
"""What a program sets to let an engine draft tokens."""
_UNKNOWN: Final = NotAnswered(
    "How many drafted tokens are accepted, and does drafting pay?",
    "the trace does not show, or in too few iterations, how long drafting takes, how many tokens are checked, or how "
    "many tokens the requests have before and after",
    "read the mean accepted length in the engine's log or metrics; vLLM marks drafting with "
    "VLLM_CUSTOM_SCOPES_FOR_PROFILING=1",
)


def _taken(view: View, ranges: pl.DataFrame, work: pl.DataFrame) -> int:
    """Time of the device's work that was launched in ranges; without a device, of the ranges."""
    return int((ranges if view.device is None else work)["duration_ns"].sum())


def _periods(view: View, decodes: pl.DataFrame, drafts: pl.DataFrame) -> tuple[int, int, int]:
    """Decoding iterations before the last one, the time of drafting until that begins, and of what else they do."""
    begin, end = int(decodes["start_ns"][0]), int(decodes["start_ns"][-1])
    drafts = drafts.filter(pl.col("start_ns").is_between(begin, end, closed="left"))
    decodes = decodes.filter(pl.col("start_ns") < end)
    work, all_work = (work_launched_in(view.trace, each) for each in (drafts, decodes))
    inside = all_work.filter(pl.col("row").is_in(work["row"].implode()))
    if view.device is None:
        starts, ends = decodes["start_ns"].to_numpy(), (decodes["start_ns"] + decodes["duration_ns"]).to_numpy()
        at = drafts["start_ns"].to_numpy()
        is_inside = np.searchsorted(starts, at, side="right") > np.searchsorted(ends, at, side="right")
        inside = drafts.filter(pl.Series(is_inside))
    checking = _taken(view, decodes, all_work) - int(inside["duration_ns"].sum())
    return decodes.height, _taken(view, drafts, work), checking


def _less_drafting(view: View, drafts: pl.DataFrame, work: pl.DataFrame, factor: float) -> Change:
    starts = drafts["start_ns"].to_numpy()
    lanes, ends = drafts["lane"].to_numpy().astype(np.int32), starts + drafts["duration_ns"].to_numpy()
    on_host = scaled_host_time(lanes, starts, ends, factor)
    if view.device is None:
        return on_host
    return together(on_host, scaled_work(work["row"].to_numpy().astype(np.int64), factor))


RULE: Final = Rule(
    id="rejected-drafts",
    title="Speculative decoding costs more than it brings",
    thresholds={
        "share": Threshold(0.03, "share", "share of the {period} lost to drafting"),
        "rejected": Threshold(0.5, "share", "share of the drafted tokens that are rejected"),
    },
    check=check,
)
