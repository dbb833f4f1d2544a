"""The answer to "why is this step slow": what reports show and the JSON report is made of."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import polars as pl

from stepscope.analysis.engines import EngineUse
from stepscope.analysis.summary import DeviceUse, HostUse
from stepscope.diagnosis.finding import Finding, NotAnswered
from stepscope.trace import Metadata, TraceWarning


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """How one device's window was spent; see `stepscope.analysis.device_time` for the definitions."""

    device: str
    name: str | None
    window_ns: int
    busy_ns: int
    idle_ns: int
    compute_ns: int
    communication_ns: int
    copy_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file among several, such as one rank's, that could not be read: the report is about the others.

    Attributes:
        path: of the file.
        reason: one sentence that names it and says what is wrong with it.
    """

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Together:
    """What a step would lose if the causes of several findings were gone at once, by one replay without all of them.

    Attributes:
        count: findings that it is about: those shown whose own saving was replayed.
        saving_ns_per_step: never more than the step.
        share: the same as a share of the step, 0 to 1.
        sum_share: the sum of the findings' own shares: above `share` where savings overlap, below it where one cause
            hides behind another.
    """

    count: int
    saving_ns_per_step: int
    share: float
    sum_share: float


@dataclass(frozen=True, slots=True)
class Afterwards:
    """A finding that saves hardly anything now, and something once the causes of those shown are gone.

    Attributes:
        saving_ns_per_step: what it saves then, beyond them; never more than the step.
        saving_share: the same as a share of the step as measured, 0 to 1.
    """

    rule: str
    title: str
    saving_ns_per_step: int
    saving_share: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything a report needs; tables are small (already cut to the top rows).

    Attributes:
        metadata: of the trace.
        warnings: of the trace.
        step_source: "annotation", "inferred" or "none".
        steps: columns index, start_ns, duration_ns, complete (bool: fully inside the recording).
        step_ns: the mean complete step's duration, from which savings are taken; where there are no steps, the length
            of the device's or the main thread's window.
        step_count: number of steps that `step_ns` and the savings are about; 1 where there are none.
        devices: one summary a device; empty for a trace without a device.
        idle: columns device, cause, trigger, ns, share (of the device's window); sums to idle_ns, device by device.
        host: columns cause, ns, share: how the main host thread's time went, by the same causes.
        operators: the top of `stepscope.analysis.operators.operator_table`.
        operator_count: how many rows the whole table has.
        kernels: the top of `stepscope.analysis.kernels.kernel_table`.
        kernel_count: how many rows the whole table has.
        findings: in order of saving, the largest first.
        hidden: number of findings below the share that is worth showing.
        not_answered: questions this trace leaves open.
        device_uses: how each device spent its window, at a glance.
        host_use: the same of the main host thread; None where none was recorded.
        engine_uses: of devices whose queues are engines, how each one's window divides among them.
        together: what the shown findings save together; None where fewer than two of them have a replayed saving.
        afterwards: findings that are not shown, and save more once the causes of those shown are gone.
        applied: what became of the remedies that were applied to the program as it started, a sentence each.
    """

    metadata: Metadata
    warnings: tuple[TraceWarning, ...]
    step_source: str
    steps: pl.DataFrame
    step_ns: int
    step_count: int
    devices: tuple[DeviceSummary, ...]
    idle: pl.DataFrame
    host: pl.DataFrame
    operators: pl.DataFrame
    operator_count: int
    kernels: pl.DataFrame
    kernel_count: int
    findings: tuple[Finding, ...]
    hidden: int
    not_answered: tuple[NotAnswered, ...]
    device_uses: tuple[DeviceUse, ...] = ()
    host_use: HostUse | None = None
    engine_uses: tuple[EngineUse, ...] = ()
    together: Together | None = None
    afterwards: tuple[Afterwards, ...] = ()
    applied: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(finding.title)}</td>"
            f"<td style='text-align:right'>{finding.saving_ns_per_step / 1e6:,.2f} ms</td>"
            f"<td style='text-align:right'>{finding.saving_share:.1%}</td>"
            f"<td>{escape(', '.join(f'{place.file}:{place.line}' for place in finding.where))}</td></tr>"
            for finding in self.findings
        )
        head = "<tr><th>finding</th><th>saves per step</th><th>share</th><th>where</th></tr>"
        return f"<b>step {self.step_ns / 1e6:,.2f} ms</b><table>{head}{rows}</table>"
