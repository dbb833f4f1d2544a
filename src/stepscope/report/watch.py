"""What `stepscope watch` shows of a job: a line for each recording, a record for programs and the page, and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from stepscope.compare.watching import (
    MEMORIES,
    Alert,
    History,
    ThresholdAlert,
    cost_share,
    failures,
    growth_per_hour,
    idle_ns,
    step_ns,
)
from stepscope.record.watch_log import AlertEvent, Watched
from stepscope.report.document import stamped
from stepscope.report.format import change_words, duration, printable, share, size
from stepscope.report.tables import Family, metrics_text

_CAUSES_IN_LINE: Final = 2
_NOTEWORTHY: Final = 0.01
_SECOND_NS: Final = 1e9


def line_of(history: History) -> str:
    """The latest recording in one line, such as "2026-03-01 10:05  step 312.4 ms  idle 34.0 % (input 21.0 %)"."""
    latest = history[-1]
    moment = clock(latest.unix_s)
    if latest.problem is not None:
        return f"{moment}  {printable(latest.problem)}"
    return "  ".join([moment, *figures(history), *([printable(latest.finding)] if latest.finding else [])])


def figures(history: History) -> Iterator[str]:
    """What is known of the latest recording, in a few words each."""
    latest = history[-1]
    step = step_ns(latest)
    if step is not None:
        yield f"step {duration(step)}" + ("" if latest.step_ns is not None else " while recorded")
    causes = _largest(latest)
    idle = idle_ns(latest)
    if idle is not None and latest.recorded_step_ns:
        yield f"idle {share(idle / latest.recorded_step_ns)}" + (f" ({', '.join(causes)})" if causes else "")
    elif causes:
        yield ", ".join(causes)
    if (
        latest.communication_ns
        and latest.recorded_step_ns
        and (idle is not None or "communication" not in latest.causes)
    ):
        yield f"communication {share(latest.communication_ns / latest.recorded_step_ns)}"
    if latest.late_rank is not None and latest.wait_ns:
        yield f"ranks wait {duration(latest.wait_ns)}, most for {printable(latest.late_rank)}"
    for name, memory in MEMORIES.items():
        now = memory(latest)
        if now is not None:
            growth = growth_per_hour(history, memory)
            yield f"{name} {size(now)}" + ("" if growth is None else f" ({_signed(growth)}/h)")
    cost = cost_share(history)
    if cost is not None:
        yield f"watching costs {share(cost)}"


def clock(unix_s: float) -> str:
    """A moment in the user's time zone, to the second."""
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def _largest(recording: Watched) -> list[str]:
    """The largest causes of the step, with their shares of it; communication has a figure of its own."""
    whole = recording.recorded_step_ns or 0.0
    causes = sorted(recording.causes.items(), key=lambda item: (item[0] == "communication", -item[1]))[:_CAUSES_IN_LINE]
    return [
        f"{name.replace('_', ' ')} {share(ns / whole)}" for name, ns in causes if whole and ns / whole > _NOTEWORTHY
    ]


def _signed(growth: float) -> str:
    return f"{'-' if growth < 0 else '+'}{size(abs(growth))}"


def recording_json(history: History) -> dict[str, Any]:
    """The latest recording for programs, one document of `stepscope watch --json`."""
    return stamped(
        recording=msgspec.to_builtins(history[-1]),
        cost_share=cost_share(history),
        growth_bytes_per_hour={
            name.replace(" ", "_"): growth_per_hour(history, memory) for name, memory in MEMORIES.items()
        },
    )


_SIDES: Final = {">": "above", ">=": "at least", "<": "below", "<=": "at most"}
_SAID: Final = {
    "step_ms": "a step takes {}",
    "recorded_step_ms": "a recorded step takes {}",
    "idle_percent": "the device is idle for {} of the step",
    "communication_percent": "a rank only communicates for {} of the step",
    "wait_ms": "a rank waits {} a step for the last one",
    "memory_gib": "the largest process has {} of memory",
    "device_memory_gib": "{} of device memory is allocated",
    "memory_gib_per_hour": "memory grows by {} an hour",
    "device_memory_gib_per_hour": "device memory grows by {} an hour",
    "cost_percent": "watching costs {} of the time",
    "failures": "{} in a row failed",
}


def _said(metric: str, value: float) -> str:
    """A metric's value in words, such as "a step takes 133.7 ms"."""
    family, _, cause = metric.partition(".")
    words = f"{cause.replace('_', ' ')} takes {{}} of the step" if cause else _SAID[family]
    return words.format(_amount(metric, value))


def _amount(metric: str, value: float) -> str:
    """A metric's value with its unit."""
    name = metric.partition(".")[0]
    if name.endswith("_ms"):
        return duration(value * 1e6)
    if name.endswith("_percent"):
        return share(value / 100)
    if "_gib" in name:
        return size(value * 2**30) if value >= 0 else f"-{size(-value * 2**30)}"
    return f"{value:g} recording{'s' * (value != 1)}"


def alert_sentence(alert: Alert, event: AlertEvent, history: History) -> str:
    """An event in words, such as "my-run: a step takes 133.7 ms, above 40.0 ms, in 2 recordings in a row"."""
    said = f"{history[-1].job}: {_said(alert.metric, event.value)}"
    growth = f"; most of the growth is {event.growth.replace('_', ' ')}" if event.growth else ""
    if isinstance(alert, ThresholdAlert):
        if event.state == "firing" and alert.metric == "failures":
            return f"{said}: {history[-1].problem}"
        level = f"{_SIDES[alert.compare]} {_amount(alert.metric, alert.limit)}"
        if event.state == "recovered":
            return f"{said}, no longer {level}"
        row = f", in {alert.times} recordings in a row" if alert.times > 1 else ""
        return f"{said}, {level}{row}{growth}"
    before = event.before or 0.0
    change = change_words(event.value / before - 1) if before else "changed"
    end = ", as before the change" if event.state == "recovered" else growth
    return f"{said} instead of {_amount(alert.metric, before)}, {change}{end}"


def alert_json(job: str, unix_s: float, event: AlertEvent) -> dict[str, Any]:
    """An alert as a webhook and a command get it."""
    return stamped(job=job, unix_s=unix_s, **msgspec.to_builtins(event))


def page_json(jobs: Mapping[str, float], shown: str, history: Sequence[Watched]) -> dict[str, Any]:
    """The view of the page: all jobs with their latest time, and one's recordings, the latest in words."""
    whole = [each for each in history if each.problem is None]
    lines = [line_of(each) for each in (whole, history) if each]
    return {
        "jobs": [{"name": name, "unix_s": unix_s} for name, unix_s in jobs.items()],
        "shown": shown,
        "lines": list(dict.fromkeys(lines)),
        "basis": whole[-1].basis if whole else "device",
        "recordings": [msgspec.to_builtins(each) for each in history],
    }


def metrics(job: str, history: Sequence[Watched], firing: Mapping[str, bool]) -> bytes:
    """OpenMetrics text about a job's latest recording.

    Args:
        firing: by alert, whether it fires.
    """
    families = [
        up := Family("stepscope_watch_up", "Whether the latest recording of the job succeeded."),
        failed := Family("stepscope_watch_failures", "Recordings in a row that failed."),
        last := Family("stepscope_watch_last_recording_timestamp_seconds", "Time of the latest recording.", "seconds"),
        step := Family("stepscope_watch_step_seconds", "Mean step, unrecorded or while recorded.", "seconds"),
        causes := Family("stepscope_watch_cause_seconds", "Time per recorded step by cause.", "seconds"),
        communication := Family(
            "stepscope_watch_communication_seconds", "Time per step in which a rank only communicates.", "seconds"
        ),
        wait := Family("stepscope_watch_wait_seconds", "Mean wait of the ranks for the last one, per step.", "seconds"),
        memory := Family("stepscope_watch_memory_bytes", "Memory of the largest process, and on its devices.", "bytes"),
        cost := Family("stepscope_watch_cost_ratio", "Time that the recordings took, of the job's time.", "ratio"),
        alerts := Family("stepscope_watch_alert_firing", "Whether an alert fires."),
    ]
    for alert, fires in firing.items():
        alerts.add(int(fires), alert=alert)
    if history:
        up.add(int(history[-1].problem is None))
        failed.add(failures(history))
    latest = next((each for each in reversed(history) if each.problem is None), None)
    if latest is not None:
        last.add(latest.unix_s)
        for name, ns in (("unrecorded", latest.step_ns), ("recorded", latest.recorded_step_ns)):
            if ns is not None:
                step.add(ns / _SECOND_NS, steps=name)
        for cause, ns in latest.causes.items():
            causes.add(ns / _SECOND_NS, cause=cause, of=latest.basis)
        if latest.communication_ns is not None:
            communication.add(latest.communication_ns / _SECOND_NS)
        if latest.wait_ns is not None:
            wait.add(latest.wait_ns / _SECOND_NS, late_rank=latest.late_rank)
        for name, amount in (("process", latest.memory_bytes), ("device", latest.device_bytes)):
            if amount is not None:
                memory.add(amount, of=name)
        if (paid := cost_share(history)) is not None:
            cost.add(paid)
    return metrics_text(families, {"job": job})
