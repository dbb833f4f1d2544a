"""Everything a report says about one trace: the diagnosis, the drawings of a page, and measurements."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from stepscope.analysis.flame import FlameGraph
from stepscope.analysis.memory import MemoryPicture
from stepscope.analysis.picture import StepPicture
from stepscope.analysis.telemetry import TelemetryPicture
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.ranks import RankRecord
from stepscope.errors import UsageError
from stepscope.predict.cost.energy_parts import TraceEnergy
from stepscope.report.format import printable
from stepscope.trace import Trace, Window

if TYPE_CHECKING:
    from stepscope.diagnosis.view import View


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The report of one trace.

    Attributes:
        picture: a typical step.
        telemetry: what the program logged and sampled.
        flame: time by the user's code.
        memory: memory over time, one picture per device.
        rank: record for comparing the ranks of a job; None for a single trace.
        energy: what the run measured.
    """

    diagnosis: Diagnosis
    picture: StepPicture | None = None
    telemetry: TelemetryPicture | None = None
    flame: FlameGraph | None = None
    memory: tuple[MemoryPicture, ...] = ()
    rank: RankRecord | None = None
    energy: TraceEnergy | None = None

    @property
    def order(self) -> tuple[float, str]:
        """Sort key among the reports of several traces."""
        rank = self.diagnosis.metadata.rank
        return (float("inf") if rank is None else rank, self.diagnosis.metadata.path)

    def by_device(self) -> TraceReport:
        """The same report, which shows each device's window from its first to its last work."""
        return replace(self, diagnosis=replace(self.diagnosis, by_device=True))


def trace_report(
    view: View, *, rules: Sequence[str] | None, top: int, minimum_share: float, is_drawn: bool
) -> TraceReport:
    """Build the report of the trace in `view`; the report keeps no reference to the trace's tables.

    Args:
        top: rows of operators and kernels, 0 for all.
        is_drawn: include what only a page shows.
    """
    from stepscope.diagnosis import diagnose_view
    from stepscope.diagnosis.ranks import rank_record
    from stepscope.record.apply.flags import applied_beside

    trace = view.trace
    diagnosis = diagnose_view(view, rules=rules, top=top, minimum_share=minimum_share)
    report = TraceReport(
        replace(diagnosis, applied=applied_beside(trace.metadata.path)),
        rank=rank_record(trace, view) if (trace.metadata.world_size or 1) > 1 else None,
        energy=_energy(view, diagnosis),
    )
    return _drawn(report, view) if is_drawn else report


def _drawn(report: TraceReport, view: View) -> TraceReport:
    from stepscope.analysis.flame import flame_graph
    from stepscope.analysis.memory import memory_pictures

    return replace(
        report,
        picture=_picture(view, report.diagnosis),
        telemetry=_telemetry(view.trace),
        flame=flame_graph(view.trace, view.attribution),
        memory=memory_pictures(view.trace, activity=view.activity),
    )


def _energy(view: View, diagnosis: Diagnosis) -> TraceEnergy | None:
    """The measured energy of the steps; None if the run did not measure energy."""
    from stepscope.trace.energy_records import record_beside

    record = record_beside(view.trace.metadata.path)
    if record is None:
        return None
    from stepscope.predict.cost.energy import energy_of_trace
    from stepscope.predict.cost.energy_parts import PowerSettings

    return energy_of_trace(view, diagnosis.findings, PowerSettings(), record=record)


def _picture(view: View, diagnosis: Diagnosis) -> StepPicture:
    """A picture of the step nearest to the typical one, or of the whole trace without steps."""
    from stepscope.analysis.picture import step_picture
    from stepscope.whatif.critical_path import critical_path

    steps = diagnosis.steps.filter(pl.col("complete")) if diagnosis.steps["complete"].any() else diagnosis.steps
    if steps.height:
        distance = (pl.col("duration_ns") - diagnosis.step_ns).abs()
        start, length = steps.sort(distance).select("start_ns", "duration_ns").row(0)
        window = Window(start, start + max(length, 1))
    else:
        window = _whole(view.trace)
    return step_picture(view.trace, window, view.idle, path=critical_path(view.experiment))


def _telemetry(trace: Trace) -> TelemetryPicture | None:
    from stepscope.analysis.telemetry import telemetry_picture
    from stepscope.trace.telemetry import read_telemetry, telemetry_files

    path = Path(trace.metadata.path)
    files = [file for file in telemetry_files(path) if file != path]  # Nsight Systems exports share the suffix
    try:
        telemetry = read_telemetry(files)
    except UsageError as error:
        print(f"stepscope: {printable(str(error))}", file=sys.stderr)
        return None
    window, origin = _whole(trace), trace.metadata.origin_unix_ns
    recorded = None if origin is None else (origin + window.start_ns, origin + window.end_ns)
    return telemetry_picture(telemetry, recorded)


def _whole(trace: Trace) -> Window:
    """From the start of the first device work (or operator) to the end of the last one."""
    for table in (trace.device_work, trace.operators):
        if table.height:
            first = int(table["start_ns"].to_numpy().min())
            last = int((table["start_ns"] + table["duration_ns"]).to_numpy().max())
            return Window(first, max(last, first + 1))
    return Window(0, 1)
