"""Whether a diagnosis found what was planted, and how much of what it promised came true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

ALARM: Final = 0.05
"""Share of the step from which a finding on a clean twin is a false alarm."""

Findings = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """What stepscope said about a program and its clean twin.

    Attributes:
        name, rule: of the program, and of the rule that should come first.
        first: the rule that came first on the faulty twin; None where there was no finding.
        line: whether the first finding's first place is a line that is marked as the fault's; None where no
            line is the right one.
        promised_share: what the expected rule promised, as a share of the recorded step; None where it was silent.
        promised_ns: the same in nanoseconds of the recorded step.
        alarms: findings on the clean twin above ALARM: rule, share of the step, title.
        fault_ns, clean_ns: a step of either twin without a profiler; None where it was not timed.
        saves_time: False where the fault costs memory alone.
        peers: what other tools say of the faulty twin, by their names.
        times_ns: all timings of either twin, of which the least count.
    """

    name: str
    rule: str
    first: str | None
    line: bool | None
    promised_share: float | None
    promised_ns: int | None
    alarms: tuple[tuple[str, float, str], ...]
    fault_ns: float | None = None
    clean_ns: float | None = None
    saves_time: bool = True
    peers: dict[str, str] = field(default_factory=dict)
    times_ns: dict[str, list[float]] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether the planted fault was the first finding."""
        return self.first == self.rule

    @property
    def real_ns(self) -> float | None:
        """What the step really lost when the fault was removed."""
        if self.fault_ns is None or self.clean_ns is None:
            return None
        return self.fault_ns - self.clean_ns

    @property
    def real_share(self) -> float | None:
        """The same as a share of the faulty step."""
        return None if self.real_ns is None or not self.fault_ns else self.real_ns / self.fault_ns

    @property
    def error(self) -> float | None:
        """How far the promised share of the step is from the real one, relative to it."""
        if not self.saves_time or self.promised_share is None or not self.real_share or self.real_share <= 0:
            return None
        return abs(self.promised_share - self.real_share) / self.real_share


def line_of(finding: dict[str, Any] | None) -> tuple[str, int] | None:
    """File and line of a finding's first place."""
    if finding is None or not finding["where"]:
        return None
    place = finding["where"][0]
    return place["file"], place["line"]


def promised(findings: Findings, rule: str) -> tuple[float, int] | None:
    """What a rule's findings promise together: share of the step, and nanoseconds; None where it is silent."""
    own = [finding for finding in findings if finding["rule"] == rule]
    if not own:
        return None
    return sum(finding["saving_share"] for finding in own), sum(finding["saving_ns_per_step"] for finding in own)


def alarms(findings: Findings) -> tuple[tuple[str, float, str], ...]:
    """Findings of a clean twin that would send its user searching."""
    return tuple(
        (finding["rule"], finding["saving_share"], finding["title"])
        for finding in findings
        if finding["saving_share"] > ALARM
    )
