"""# What it finds
Prompts that begin like an earlier one, and whose beginning is computed again.

# Why it costs time
The keys and values of a token depend on the tokens before it alone. Prompts that begin with the same instructions,
examples or document, or with the earlier turns of the same conversation, have the same keys and values there: computing
them once is enough.

# How it is measured
From the first calls of the model on, stepscope looks at the tokens with which its outermost module is called, and keeps
a number for each block of 16 tokens together with all before it. Tokens count as repeated if they lie in blocks at a
row's beginning with which a row of an earlier call began, too. Padding is left out by the mask, and several prompts in
one row are told apart by their positions. Tokens on a device are not read. The time of operators on many positions at
once (prefill) is scaled by the share of tokens that is left; matrices of positions by positions as well, because the
remaining positions still attend to all.

# Known false positives
A benchmark that sends the same prompts again and again, whose users would not.

# What to do
Let the engine share what requests have in common, or compute the beginning once and give each request a copy of its
cache.

# Reference
Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (2024), on RadixAttention.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stepscope.diagnosis.lines.costs import settings_at
from stepscope.diagnosis.rule import Answers, Figure, Found, InServing, Limits, Rule, Threshold, View
from stepscope.diagnosis.rules.padding_waste import growing_with_positions
from stepscope.whatif.changes import scaled_work_of

_OPTIONS: Final = ("allow_block_sharing=", "enable_prefix_caching=", "disable_radix_cache=True", "enable_block_reuse=")
"""Options of engines that decide whether requests share what they begin with."""


def check(view: View, limits: Limits) -> Answers:
    prompts = view.program.prompts
    if prompts is None or view.trains or not prompts.repeated_tokens:
        return
    share = prompts.repeated_tokens / max(prompts.tokens, 1)
    if share < limits["repeated"]:
        return
    rows = np.unique(np.concatenate(growing_with_positions(view)))
    saved = view.cost_ns(rows) * share
    if not limits.reached(saved):
        return
    yield Found(
        f"{share:.0%} of the prompts' tokens are computed again, although an earlier prompt began with the same",
        saved,
        basis="the operators on many positions at once, by the share of tokens that an earlier call computed",
        confidence="medium",
        share_at=1,
        figures=[
            Figure("share of the prompts' tokens that repeat a beginning", share, "share", limits["repeated"]),
            Figure("calls with prompts that were looked at", prompts.calls, "count"),
            Figure("tokens of prompts in them", prompts.tokens, "count"),
            Figure("of them in beginnings that repeat", prompts.repeated_tokens, "count"),
        ],
        remedy=_SHARE.remedy(view),
        where=(*settings_at(view, *_OPTIONS), *view.at_operators(view.outermost(rows))),
        change=scaled_work_of(view.outermost(rows), 1 - share),
    )


_SHARE: Final = InServing(
    "Keep the keys and values of what prompts have in common: engines do so if they may share blocks of the cache; "
    "otherwise compute it once and copy its cache for each request.",
    "prefix",
    "kept = DynamicCache(config=model.config)\n"
    "model(instructions, past_key_values=kept, logits_to_keep=1)              # once\n"
    "model.generate(prompt, past_key_values=copy.deepcopy(kept))              # for each request",
)

RULE: Final = Rule(
    id="repeated-prefix",
    title="Prompts' common beginning is computed again",
    thresholds={
        "repeated": Threshold(0.1, "share", "share of the prompts' tokens that repeat a beginning"),
        "share": Threshold(0.03, "share", "share of the {period} that computing it once would save"),
    },
    check=check,
    needs=("operators", "shapes", "types"),
)
