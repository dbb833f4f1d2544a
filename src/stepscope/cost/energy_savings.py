"""What the findings' savings are in energy.

    energy = P_idle x time that the step loses + (P_busy - P_idle) x work that the device no longer does

An idle nanosecond that goes saves idle power, a busy one busy power. How much less the device works without a finding's
cause comes from the replay that its saving comes from; without one, none or all of the time could have been work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.cost.energy_parts import FindingEnergy, Powers
from stepscope.diagnosis.finding import Finding
from stepscope.diagnosis.view import View
from stepscope.trace.intervals import union
from stepscope.trace.nesting import Rows
from stepscope.whatif.replay import Replay


def savings_of(
    view: View, findings: Sequence[Finding], powers: Sequence[Powers], host_w: float
) -> tuple[FindingEnergy, ...]:
    """Of each finding that saves time.

    Args:
        powers: of `view.device`, every pair that is possible; empty where none is known.
        host_w: of processors and memory, which a shorter step keeps busy for less time.
    """
    return tuple(_savings(view, findings, powers, host_w)) if powers or host_w else ()


def _savings(
    view: View, findings: Sequence[Finding], powers: Sequence[Powers], host_w: float
) -> Iterator[FindingEnergy]:
    for finding in findings:
        if finding.saving_ns_per_step > 0:
            busy = _busy_ns(view, finding) if powers else (0, 0)
            saved = [
                each.idle_w * finding.saving_ns_per_step + (each.busy_w - each.idle_w) * work
                for each in powers
                for work in busy
            ]
            host = host_w * finding.saving_ns_per_step
            least, most = (min(saved), max(saved)) if saved else (0.0, 0.0)
            yield FindingEnergy(
                finding.rule, finding.title, finding.saving_ns_per_step, busy, (round(least + host), round(most + host))
            )


def _busy_ns(view: View, finding: Finding) -> tuple[int, int]:
    """How much less of a step the device works without the cause: the least and the most."""
    saving = finding.saving_ns_per_step
    if finding.change is None:
        return 0, saving
    experiment = view.experiment
    before = _working_ns(experiment.measured, experiment.works)
    after = _working_ns(experiment.run(finding.change(experiment, experiment.graph)).replay, experiment.works)
    less = max(before - after, 0) // experiment.step_count
    return less, less


def _working_ns(replay: Replay, works: Rows) -> int:
    return union(replay.work_start[works], replay.work_end[works]).total_ns
