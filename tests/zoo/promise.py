"""What a diagnosis promises for a planted fault: by replaying the step without it, and by adding up durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import stepscope
from stepscope.diagnosis.diagnosis import diagnose, rule_by_id
from stepscope.diagnosis.finding import Confidence, Finding
from stepscope.diagnosis.rank_summary import RankRecord, rank_record
from stepscope.diagnosis.ranks import across_ranks
from stepscope.diagnosis.rule import Rule
from stepscope.diagnosis.view import View
from stepscope.trace import Trace
from stepscope.whatif import Change
from stepscope.whatif.changes import together

CONFIDENCES: Final[tuple[Confidence, ...]] = ("high", "medium", "low")
SMALLEST: Final = 0.01
"""Share of the step from which a diagnosis shows a finding."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What the findings of one or several rules promise together, as shares of the recorded step, 0 to 1.

    Attributes:
        share: of several findings what one replay without all their causes gives; where a replay promises nothing, the
            sum of what they cost, at most the step.
        saving_from: how it was obtained.
        attributed_share: what the same findings cost, added up, at most the step: the promise without a replay.
        findings: how many there are.
        confidence: the lowest of theirs.
    """

    share: float
    saving_from: Literal["replayed", "attributed"]
    attributed_share: float
    findings: int
    confidence: Confidence


class AttributedView(View):
    """A trace as the rules see it, whose findings save what they cost: nothing is replayed."""

    def saving_ns(self, cost_ns: float, change: Change | None) -> tuple[int, Change | None]:
        """What a step loses with the cost, without a change."""
        return super().saving_ns(cost_ns, None)


def promise(traces: Sequence[Path], rules: Sequence[str]) -> Promise | None:
    """What these rules promise for a recording; None where they find nothing.

    Args:
        traces: of its ranks. What they say together counts, or else the rank that promises most: they wait for one
            another, so that what one of them loses all lose.
        rules: identifiers; of several the findings are replayed together.
    """
    found: list[Promise] = []
    records: list[RankRecord] = []
    for path in traces:
        trace = stepscope.open_trace(path)
        one = _of_trace(trace, rules)
        if one is not None:
            found.append(one)
        if len(traces) > 1:
            records.append(rank_record(View(trace)))
    across = [finding for finding in across_ranks(records) if finding.rule in rules] if records else []
    if across:
        share = _added(across)
        found.append(Promise(share, "attributed", share, len(across), _lowest(across)))
    return max(found, key=lambda one: one.share, default=None)


def _of_trace(trace: Trace, rules: Sequence[str]) -> Promise | None:
    findings = [one for one in diagnose(trace, minimum_share=0.0).findings if one.rule in rules and _shown(one)]
    if not findings:
        return None
    attributed = _attributed(trace, [rule_by_id(rule) for rule in dict.fromkeys(one.rule for one in findings)])
    changes = [one.change for one in findings if one.change is not None]
    if len(changes) < len(findings):
        return Promise(_added(findings), "attributed", attributed, len(findings), _lowest(findings))
    if len(changes) == 1:
        return Promise(findings[0].saving_share, "replayed", attributed, 1, findings[0].confidence)
    view = View(trace)
    share = view.saved_ns(together(*changes)) / view.step_ns
    return Promise(share, "replayed", attributed, len(findings), _lowest(findings))


def _shown(finding: Finding) -> bool:
    return finding.saving_share >= SMALLEST and finding.severity != "note"


def _attributed(trace: Trace, rules: Sequence[Rule]) -> float:
    view = AttributedView(trace)
    return _added([one for rule in rules for one in rule.ask(view).findings if one.severity != "note"])


def _lowest(findings: Sequence[Finding]) -> Confidence:
    return max((one.confidence for one in findings), key=CONFIDENCES.index)


def _added(findings: Sequence[Finding]) -> float:
    return min(sum(one.saving_share for one in findings), 1.0)
