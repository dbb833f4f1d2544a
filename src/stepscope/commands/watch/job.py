"""A watched job: its recordings, each summarised, kept and judged by the alerts."""

from __future__ import annotations

import argparse
import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.record.attach import agents_of, fetched, in_all, run_of
from stepscope.commands.shared.options import record_options, user_code_from
from stepscope.commands.shared.reading import encodable
from stepscope.errors import AgentError, StepscopeError, UsageError
from stepscope.report.format import duration, share, span

if TYPE_CHECKING:
    from stepscope.compare.watching import Alert
    from stepscope.diagnosis.rank_summary import RankSummary
    from stepscope.record.agent.client import AgentClient, Started
    from stepscope.record.agent.protocol import AgentFile
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.watch_log import Watched, WatchLog
    from stepscope.trace import Trace

_LEARN_S: Final = 30.0
"""How long steps are counted before the first recording, to know the job's pace."""
_AGAIN_S: Final = 60.0
"""After a failure the next try comes earlier."""
_END_S: Final = 10.0
"""How long a run may take to end after its agent."""
_POLL_S: Final = 0.25
_NOTABLY: Final = 1.05
_FEW: Final = 10
_MOST_MEMORY: Final = 1 << 60
_SAVING_S: Final = 600.0
"""For a process to write its trace."""
_LONGEST_PROBLEM: Final = 2000
_TRACE_NAME: Final = re.compile(r"trace-[\w.-]+")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Count:
    """How far a job was at a moment.

    Attributes:
        at_s: of the monotonic clock.
        processes: which processes answered.
        memory: what the processes said of their memory.
    """

    at_s: float
    step: int
    processes: tuple[tuple[Any, Any], ...]
    memory: tuple[dict[str, Any], ...]

    def step_s_since(self, other: Count) -> float | None:
        """Mean step since another count; None if no step ended, or the job was restarted."""
        if self.processes != other.processes or self.step <= other.step:
            return None
        return (self.at_s - other.at_s) / (self.step - other.step)

    def largest(self, name: str) -> int | None:
        """Of what the processes said, as far as it can be true."""
        known = (each.get(name) for each in self.memory)
        return max((each for each in known if isinstance(each, int) and 0 <= each < _MOST_MEMORY), default=None)


class Watch:
    """One watched job.

    Args:
        tell: called with sentences for the user.

    Attributes:
        history: its latest recordings, earlier watches' too.
    """

    def __init__(self, arguments: argparse.Namespace, alerts: Sequence[Alert], log: WatchLog, tell: Tell) -> None:
        from stepscope.compare.watching import RECENT

        self.arguments, self.alerts, self.tell = arguments, alerts, tell
        self.job: str = encodable(arguments.name or _job_name(arguments.targets))
        self.every_s: float = arguments.every
        self.ended = threading.Event()
        self._log = log
        self._last: Count | None = None
        self._has_begun = self._has_told_end = False
        self._agents: list[AgentFile] = []  # of the processes that answered last, those on this machine
        self._traces: tuple[str, ...] = ()
        self._answered_s = time.monotonic()
        self.history = log.of(self.job, last=RECENT)
        for count in range(len(self.history)):  # alerts go on from where they were
            for alert in alerts:
                alert.seen(self.history[: count + 1])

    def record(self) -> Watched | None:
        """Record the job once, and keep what was found, a problem too; None if the job has ended.

        Raises UsageError if the very first time shows that the targets are a mistake.
        """
        from stepscope.record.watch_log import Watched

        begun_s, self._traces = time.time(), ()
        try:
            found = self._recorded(begun_s)
            self._answered_s = time.monotonic()
        except Exception as error:
            if isinstance(error, UsageError) and not self._has_begun:
                raise
            problem = encodable(str(error)[:_LONGEST_PROBLEM]) if isinstance(error, StepscopeError) else _bug(error)
            if isinstance(error, AgentError):
                end = self._end(error)
                if end == "" or (end is not None and self._has_told_end):
                    return None
                self._has_told_end = end is not None
                problem = end or self._gone() or problem
            found = Watched(job=self.job, unix_s=begun_s, problem=problem, traces=self._traces)
            self._last = None
        self._has_begun = True
        self.history = [*self.history, found]
        self.history[-1] = found = self._with_events(found)
        self._keep(found)
        return found

    @property
    def is_lost(self) -> bool:
        """Whether nobody has answered for as long as the watch is patient."""
        return time.monotonic() - self._answered_s >= float(self.arguments.patience)

    @property
    def pause_s(self) -> float:
        """From the begin of the latest recording to that of the next."""
        return min(self.every_s, _AGAIN_S) if self.history and self.history[-1].problem is not None else self.every_s

    def _recorded(self, begun_s: float) -> Watched:
        from stepscope.record.agent.client import cancel_all, start_together
        from stepscope.record.agent.protocol import CaptureOrder
        from stepscope.record.watch_log import Watched

        clients = agents_of(self.arguments, self.arguments.targets)
        before = self._known_pace(clients)
        order = CaptureOrder(
            steps=self.arguments.steps, timeout_s=self.arguments.timeout, options=record_options(self.arguments)
        )
        started = start_together(clients, order)
        longest_s = (self.arguments.steps + 1) * self.arguments.timeout + _SAVING_S
        ended = in_all(started, lambda client, state: client.wait(state.id, longest_s))
        if late := [client.name for client, state in ended if not state.ended]:
            cancel_all(started)
            raise AgentError(f"{', '.join(late)}: the recording has not ended within {longest_s:.0f} s")
        problems = [f"{client.name}: {state.problem}" for client, state in ended if state.problem]
        done = [(client, state) for client, state in ended if state.files]
        if not done:
            raise AgentError("; ".join(problems))
        for problem in problems:
            self.tell(problem)
        traces = self._fetched(done)
        self._traces = tuple(str(trace.absolute()) for trace in traces)
        values = summary_of(traces, self.arguments)
        after = _counted(clients)
        pace_s = None if self._last is None else before.step_s_since(self._last)
        self._last = after
        self._agents = _agents_here(after.processes)
        paid_s = None if pace_s is None else (after.at_s - before.at_s) - (after.step - before.step) * pace_s
        return Watched(
            job=self.job,
            unix_s=begun_s,
            first_step=done[0][1].first_step,
            ranks=len(done),
            step_ns=None if pace_s is None else pace_s * 1e9,
            memory_bytes=after.largest("process_bytes"),
            device_bytes=after.largest("device_bytes"),
            cost_s=paid_s if after.processes == before.processes else None,
            interval_s=self.every_s,
            traces=self._traces,
            **values,
        )

    def _known_pace(self, clients: Sequence[AgentClient]) -> Count:
        """Count the steps; if the job's pace is unknown, after waiting for some of its steps."""
        now = _counted(clients)
        if self._last is not None and now.processes != self._last.processes:
            self.tell(f"{self.job} was restarted: step {now.step} has begun")
            self._last = None
        if self._last is None or now.step_s_since(self._last) is None:  # no step between two recordings
            self._last = now
            self.ended.wait(min(self.every_s, _LEARN_S))
            now = _counted(clients)
        return now

    def _fetched(self, done: Started) -> list[Path]:
        from stepscope.files import private_folder
        from stepscope.record.run_folder import data_folder

        places = [client.trace_in_run(state) for client, state in done]
        if all(places):
            return [place for place in places if place is not None]
        folder = private_folder(data_folder() / "watch" / re.sub(r"[^\w.-]", "_", self.job)[:100])
        return fetched(folder, done)

    def _with_events(self, found: Watched) -> Watched:
        import msgspec

        from stepscope.report.watch import alert_sentence

        events = [(alert, event) for alert in self.alerts if (event := alert.seen(self.history)) is not None]
        said = (
            msgspec.structs.replace(event, sentence=alert_sentence(alert, event, self.history))
            for alert, event in events
        )
        return msgspec.structs.replace(found, events=tuple(said))

    def _keep(self, found: Watched) -> None:
        """Write the recording, and remove the traces of all but the latest and those with an alert."""
        import msgspec

        from stepscope.compare.watching import RECENT

        changed = [found]
        kept: list[Watched] = [each for each in self.history[-RECENT:] if each.traces]
        with_alert = [each for each in kept if any(event.state == "firing" for event in each.events)]
        stay = {each.unix_s for each in (*kept[-self.arguments.keep :], *with_alert[-self.arguments.keep :])}
        for place, each in enumerate(self.history):
            if each.traces and each.unix_s not in stay:
                for trace in map(Path, each.traces):
                    _remove(trace)
                self.history[place] = msgspec.structs.replace(each, traces=())
                changed.append(self.history[place])
        self.history = self.history[-RECENT:]
        try:
            self._log.put(*changed)
        except UsageError as error:  # a full disk, for example
            self.tell(str(error))
        self._space_out()

    def _space_out(self) -> None:
        """Record less often where recordings cost the job more than they may."""
        known = [each.cost_s for each in self.history[-_FEW:] if each.cost_s is not None]
        least_s = sum(known) / len(known) / self.arguments.most_cost if known else 0.0
        wanted_s = max(self.arguments.every, least_s)
        if wanted_s > self.every_s * _NOTABLY:
            most = self.arguments.most_cost
            self.tell(
                f"a recording takes {duration(least_s * most * 1e9)} from {self.job}: the next ones come every "
                f"{span(wanted_s)}, so that they cost at most {share(most)}"
            )
        self.every_s = wanted_s

    def _end(self, error: AgentError) -> str | None:
        """How the watched runs ended, "" without an error; None if they have not, or it is not known.

        A run ends a while after its agent, as it is analysed before.
        """
        from stepscope.record.agent.client import RefusedError

        runs = self._runs()
        until = time.monotonic() + (0 if isinstance(error, RefusedError) or not self._has_begun else _END_S)
        while runs:
            with contextlib.suppress(StepscopeError):
                manifests = [run.manifest() for run in runs]
                if all(each.ended_unix_s is not None for each in manifests):
                    failed = next((each.exit_code for each in manifests if each.exit_code), None)
                    is_late = failed is not None and self._has_begun
                    return f"{self.job} has ended with exit code {failed}" if is_late else ""
            if time.monotonic() > until or self._gone() or self.ended.wait(_POLL_S):
                return None
        return None

    def _runs(self) -> list[RunFolder]:
        """The folders of the watched runs; none where a target has none."""
        from stepscope.record.run_folder import RunFolder

        with contextlib.suppress(StepscopeError):
            runs = [run_of(target) for target in self.arguments.targets]
            if all(runs):
                return [run for run in runs if run is not None]
            places = {each.run for each in self._agents}
            return [RunFolder.open(place) for place in places if place]
        return []

    def _gone(self) -> str:
        """That processes are gone, where they are known to be, on this machine; "" else."""
        gone = [each.pid for each in self._agents if each.is_gone]
        if not gone:
            return ""
        numbers = ", ".join(map(str, gone[:_FEW]))
        is_one = len(gone) == 1
        how = "was killed or has crashed" if self._runs() else "has ended, was killed or has crashed"
        return f"{self.job} {how}: its process{'' if is_one else 'es'} {numbers} {'is' if is_one else 'are'} gone"


def _agents_here(processes: Sequence[tuple[Any, Any]]) -> list[AgentFile]:
    from stepscope.record.agent.protocol import agents_in, user_agents

    return [each for each in agents_in(user_agents()) if each.is_here and (each.host, each.pid) in processes]


def _job_name(targets: Sequence[str]) -> str:
    runs = [run_of(target) for target in targets]
    return ",".join(run.name if run is not None else target for run, target in zip(runs, targets, strict=True))


def _bug(error: Exception) -> str:
    from stepscope.fault_report import kept_sentence

    return kept_sentence(error, "watch", "a recording of a watched job")


def _counted(clients: Sequence[AgentClient]) -> Count:
    """Ask all processes at once how far they are. Raises AgentError if one does not answer."""
    from stepscope.record.agent.client import for_each

    asked_s = time.monotonic()
    found = for_each(clients, lambda client: client.status())
    return Count(
        (asked_s + time.monotonic()) / 2,
        max(int(status["step"]) for status in found),
        tuple((status.get("host"), status.get("pid")) for status in found),
        tuple(each for status in found if isinstance(each := status.get("memory"), dict)),
    )


def _remove(trace: Path) -> None:
    """Remove a trace that an earlier recording made, with its companion files."""
    if _TRACE_NAME.fullmatch(trace.name):
        for file in [trace, *trace.parent.glob(f"{trace.name}.*")]:
            with contextlib.suppress(OSError):
                file.unlink()


def summary_of(traces: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """What `Watched` keeps of the traces of all ranks. Raises TraceError if one cannot be read."""
    import polars as pl

    from stepscope.analysis.matching import matched_collectives
    from stepscope.diagnosis import diagnose_view
    from stepscope.diagnosis.rank_groups import exchanges
    from stepscope.diagnosis.rank_summary import rank_summary
    from stepscope.diagnosis.ranks import across_ranks
    from stepscope.diagnosis.view import View
    from stepscope.readers import open_trace

    def viewed(path: str | Path) -> View:
        trace: Trace = open_trace(path, cache=None)
        return View(trace, user_code=user_code_from(arguments))

    def summarised(path: Path) -> tuple[RankSummary, bool]:
        view = viewed(path)
        return rank_summary(view), view.device is not None

    found = sorted((summarised(trace) for trace in traces), key=lambda each: each[0].order)
    records = [summary.record for summary, _ in found]
    count = len(records)
    matched = matched_collectives([record.collectives for record in records])
    late = None
    if not matched.is_empty():
        late_ns = matched.group_by("last").agg(ns=pl.col("late_ns").sum()).sort("ns", "last", descending=[True, False])
        late = records[late_ns["last"][0]]
    slowest = late or max(records, key=lambda record: record.step_ns)
    findings = [*across_ranks(records, matched), *diagnose_view(viewed(slowest.path)).findings]
    names = dict.fromkeys(name for record in records for name in record.causes)
    return {
        "steps": min(record.steps for record in records),
        "recorded_step_ns": sum(record.step_ns for record in records) / count,
        "basis": "device" if any(on_device for _, on_device in found) else "host",
        "causes": {name: sum(record.causes.get(name, 0) for record in records) / count for name in names},
        "communication_ns": sum(record.exposed_ns for record in records) / count,
        "late_rank": None if late is None else late.name,
        "wait_ns": None if late is None else float(exchanges(records, matched).table["wait_ns"].sum()),
        "finding": findings[0].title if findings else None,
    }
