"""What a watched job's recordings say: metrics by name, and alerts when one passes a threshold or changes.

    step_ms > 300                     fires after two recordings in a row above it
    idle_percent.input >= 20 for 3    after three
    failures >= 1 for 1               at once
    step_ms changes 10%               the level of the metric changed by a tenth or more, beyond chance

An alert fires once, and recovers once as many recordings in a row are back on the other side by a twentieth of the
threshold. A change is a place that optimal partitioning proposes (`stepscope.compare.history`) and that the recordings
on its two sides confirm; it recovers with a change back. What came before it no longer counts, nor do recordings of
a process's first hundred steps.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from stepscope.compare.history import CONFIDENCE, proposed_places
from stepscope.compare.statistics import compare_samples
from stepscope.errors import UsageError
from stepscope.record.watch_log import AlertEvent, Watched

RECENT: Final = 200
"""Recordings that an alert or a trend looks back at."""
DEFAULT_FOR: Final = 2
_BAND: Final = 0.05
_LEAST_CHANGE: Final = 0.05
_RESAMPLES: Final = 999
_LOOKED_BACK: Final = 10
"""Recordings before a threshold was passed to which those past it are compared."""
_WARM_UP_STEPS: Final = 100
"""Changes are not judged by recordings that begin in these first steps of a process."""
_FEWEST_BEFORE: Final = 5
"""Recordings that make a level."""
_MS: Final = 1e6
_GIB: Final = 2**30
_HOUR_S: Final = 3600.0
_FEWEST_FOR_GROWTH: Final = 4
_LEAST_SPAN_S: Final = 1800.0

History = Sequence[Watched]
"""Recordings of one job, the latest last; at least one."""


def step_ns(recording: Watched) -> float | None:
    """The step without the profiler, or in the first recording of a job, with it."""
    return recording.step_ns if recording.step_ns is not None else recording.recorded_step_ns


def failures(history: History) -> int:
    """Recordings in a row that failed, up to the latest."""
    return next((count for count, each in enumerate(reversed(history)) if each.problem is None), len(history))


def cost_share(history: History) -> float | None:
    """Time that the recordings took from the job, as a share of its time; None while unknown."""
    known = [(each.cost_s, each.interval_s) for each in history if each.cost_s is not None and each.interval_s]
    if not known:
        return None
    return max(sum(cost for cost, _ in known), 0.0) / sum(interval for _, interval in known)


def growth_per_hour(history: History, memory: Callable[[Watched], int | None]) -> float | None:
    """Median slope (Theil and Sen) of a memory, in bytes per hour; None before four recordings and half an hour.

    A step number below the one before it means that the job was restarted: what came before does not count.
    """
    history = [each for each in history if each.first_step is not None]
    steps = [each.first_step or 0 for each in history]
    restarts = [place for place, (before, now) in enumerate(pairwise(steps), 1) if now < before]
    history = history[restarts[-1] if restarts else 0 :]
    points = [(each.unix_s, value) for each in history if (value := memory(each)) is not None]
    if len(points) < _FEWEST_FOR_GROWTH or points[-1][0] - points[0][0] < _LEAST_SPAN_S:
        return None
    times, values = np.array(points, np.float64).T
    later, earlier = np.tril_indices(len(times), -1)
    return float(np.median((values[later] - values[earlier]) / (times[later] - times[earlier]))) * _HOUR_S


def _of_latest(value: Callable[[Watched], float | None], scale: float) -> Callable[[History], float | None]:
    def read(history: History) -> float | None:
        found = value(history[-1])
        return None if found is None else found / scale

    return read


def _percent_of_step(value: Callable[[Watched], float | None]) -> Callable[[History], float | None]:
    """Shares are of the recorded step, in which they were measured."""

    def read(history: History) -> float | None:
        found, whole = value(history[-1]), history[-1].recorded_step_ns
        return None if found is None or not whole else 100 * found / whole

    return read


def idle_ns(recording: Watched) -> float | None:
    """Idle time of the device per step; None without a device."""
    return sum(recording.causes.values()) if recording.basis == "device" and recording.causes else None


MEMORIES: Final[dict[str, Callable[[Watched], int | None]]] = {
    "memory": lambda each: each.memory_bytes,
    "device memory": lambda each: each.device_bytes,
}


def _growth(name: str) -> Callable[[History], float | None]:
    def read(history: History) -> float | None:
        found = growth_per_hour(history, MEMORIES[name])
        return None if found is None else found / _GIB

    return read


def _cost_percent(history: History) -> float | None:
    found = cost_share(history)
    return None if found is None else 100 * found


METRICS: Final[dict[str, Callable[[History], float | None]]] = {
    "step_ms": _of_latest(step_ns, _MS),
    "recorded_step_ms": _of_latest(lambda each: each.recorded_step_ns, _MS),
    "idle_percent": _percent_of_step(idle_ns),
    "communication_percent": _percent_of_step(lambda each: each.communication_ns),
    "wait_ms": _of_latest(lambda each: each.wait_ns, _MS),
    "memory_gib": _of_latest(MEMORIES["memory"], _GIB),
    "device_memory_gib": _of_latest(MEMORIES["device memory"], _GIB),
    "memory_gib_per_hour": _growth("memory"),
    "device_memory_gib_per_hour": _growth("device memory"),
    "cost_percent": _cost_percent,
    "failures": lambda history: float(failures(history)),
}
"""Metrics that alerts name: the value of the latest recording, None if unknown."""
CAUSE_METRIC: Final = "idle_percent"
"""Followed by "." and a cause it is that part, without a device of the main thread's time."""

_COMPARE: Final = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_NUMBER: Final = r"(-?\d{1,12}(?:\.\d{1,9})?)"
_THRESHOLD: Final = re.compile(rf"([a-z_.]+)\s*(>=|<=|>|<)\s*{_NUMBER}(?:\s+for\s+(\d{{1,3}}))?", re.ASCII)
_CHANGES: Final = re.compile(r"([a-z_.]+)\s+changes(?:\s+(\d{1,3}(?:\.\d{1,3})?)\s*%)?", re.ASCII)


@dataclass
class Alert:
    """One alert and its state.

    Attributes:
        text: as the user wrote it.
    """

    text: str
    metric: str
    value: Callable[[History], float | None]
    is_firing: bool = field(default=False, init=False)

    def seen(self, history: History) -> AlertEvent | None:
        """Take note of the latest recording; return the event, without its sentence, if the alert began or ended."""
        value = self.value(history)
        event = None if value is None else self._event(value, history)
        if event is not None:
            self.is_firing = event.state == "firing"
        return event

    def _event(self, value: float, history: History) -> AlertEvent | None:
        raise NotImplementedError


@dataclass
class ThresholdAlert(Alert):
    compare: str
    limit: float
    times: int
    _streak: int = field(default=0, init=False)

    def _event(self, value: float, history: History) -> AlertEvent | None:
        is_past = _COMPARE[self.compare]
        if self.is_firing:
            band = _BAND * abs(self.limit) * (-1 if self.compare[0] == ">" else 1)
            is_other = not is_past(value, self.limit + band)
        else:
            is_other = is_past(value, self.limit)
        self._streak = self._streak + 1 if is_other else 0
        if self._streak < self.times:
            return None
        self._streak, growth = 0, None
        if self.is_firing:
            return AlertEvent(self.text, "recovered", value, self.limit)
        if self.metric in _LONGER and self.compare[0] == ">":
            whole = [each for each in history if each.problem is None]
            growth = largest_growth(whole[-_LOOKED_BACK - self.times : -self.times], whole[-self.times :])
        return AlertEvent(self.text, "firing", value, self.limit, growth=growth)


@dataclass
class ChangeAlert(Alert):
    least: float
    _seen: deque[tuple[float, Watched]] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    _before: float | None = field(default=None, init=False)  # the level before the change that fires

    def _event(self, value: float, history: History) -> AlertEvent | None:
        latest = history[-1]
        if (latest.first_step or 0) < _WARM_UP_STEPS or (self.metric == "step_ms" and latest.step_ns is None):
            return None  # as the job warms up, or while it is recorded, its steps take longer
        self._seen.append((value, latest))
        values = [value for value, _ in self._seen]
        *earlier, place = [0, *(proposed_places(values) if min(values) > 0 else [])]
        if not earlier or place - earlier[-1] < _FEWEST_BEFORE:
            return None
        sides = values[earlier[-1] : place], values[place:]
        found = compare_samples([sides[0]], [sides[1]], confidence=CONFIDENCE, resamples=_RESAMPLES)
        if not found.is_shown or found.change is None or abs(found.change) < self.least:
            return None
        recordings = [each for _, each in self._seen]
        growth = None
        if found.change > 0 and self.metric in _LONGER:
            growth = largest_growth(recordings[earlier[-1] : place], recordings[place:])
        self._seen = deque(list(self._seen)[place:], maxlen=RECENT)
        before, after = (float(np.mean(side)) for side in sides)
        is_back = self._before is not None and abs(after / self._before - 1) < self.least
        self._before = None if is_back else before
        return AlertEvent(self.text, "recovered" if is_back else "firing", after, before=before, growth=growth)


def largest_growth(before: History, after: History) -> str | None:
    """The cause that most of the growth of the recorded step is; None where none is."""
    was, now = ([each for each in side if each.causes and each.recorded_step_ns] for side in (before, after))
    if not was or not now:
        return None
    growth: defaultdict[str, float] = defaultdict(float)
    whole = 0.0
    for side, weight in ((now, 1 / len(now)), (was, -1 / len(was))):
        for each in side:
            whole += weight * (each.recorded_step_ns or 0.0)
            for cause, ns in each.causes.items():
                growth[cause] += weight * ns
    most = max(growth, key=lambda cause: growth[cause])
    return most if whole > 0 and growth[most] > whole / 2 else None


_LONGER: Final = frozenset({"step_ms", "recorded_step_ms"})


def parsed_alert(text: str) -> Alert:
    """Parse an alert; the module's text has the grammar. Raises UsageError if it is not one."""
    words = text.strip()
    if match := _THRESHOLD.fullmatch(words):
        times = int(match[4]) if match[4] else DEFAULT_FOR
        if times < 1:
            raise UsageError(f"{text!r}: an alert is for 1 recording or more")
        return ThresholdAlert(words, match[1], _metric(match[1]), match[2], float(match[3]), times)
    if match := _CHANGES.fullmatch(words):
        least = float(match[2]) / 100 if match[2] else _LEAST_CHANGE
        return ChangeAlert(words, match[1], _metric(match[1]), least)
    raise UsageError(f"{text!r} is not an alert: write one such as 'step_ms > 300' or 'step_ms changes 10%'")


def _metric(name: str) -> Callable[[History], float | None]:
    from stepscope.analysis.host import CAUSES

    family, _, cause = name.partition(".")
    if family == CAUSE_METRIC and cause in (*CAUSES, "compute"):
        return _percent_of_step(lambda each: each.causes.get(cause, 0.0) if each.causes else None)
    if name in METRICS:
        return METRICS[name]
    if family == CAUSE_METRIC:
        raise UsageError(f"there is no cause {cause!r}; the causes are {', '.join(CAUSES)} and compute")
    raise UsageError(f"there is no metric {name!r}; the metrics are {', '.join(METRICS)} and {CAUSE_METRIC}.CAUSE")
