"""What limits the steps on another device: what most of the critical path of their replay consists of.

    host               its own work, and launches on their way to the device
    input              waits for batches, and copies of them to the device
    communication      waits for other ranks, and data on the way between them
    compute            device work whose arithmetic takes longer than its traffic, at the target's peaks
    memory bandwidth   other device work

The side of a work is told by its operator's arithmetic and traffic (Williams, Waterman and Patterson, 2009), see
`work_kinds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import polars as pl

from stepscope.analysis.idle import idle_time
from stepscope.predict.step_replay import ReplayedStep
from stepscope.predict.work_kinds import Labels
from stepscope.whatif.critical_path import critical_path
from stepscope.whatif.experiment import Experiment

LIMITS: Final = ("compute", "memory bandwidth", "host", "input", "communication")
Parts: TypeAlias = dict[tuple[str, str], float]
"""Nanoseconds by limit and cause."""

_GROUP: Final = {
    "compute": "device", "memory bandwidth": "device", "host": "host", "input": "host",
    "communication": "communication", "unknown": "unknown",
}  # fmt: skip
ON_HOST: Final = {"input": "input", "host_to_device_copy": "input", "communication": "communication"}
"""Causes on the host that are limits of their own."""
_OPEN: Final = ("unknown", "dependency", "untraced", "synchronisation")
"""Causes of idle time that leave open what was waited for."""
_HIDDEN: Final = ("copy_in", "copy_out", "copy_on_device", "communication")
_OF_WORK: Final = {"communication": "communication", "copy_in": "input", "copy_out": "host"}


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits a step.

    Attributes:
        name: one of LIMITS.
        share: of the critical path, 0 to 1.
        cause: of a limit on the host, the cause that most of its time has; None for others.
    """

    name: str
    share: float
    cause: str | None = None


def limit_of(experiment: Experiment, step: ReplayedStep, sides: Labels) -> Limit | None:
    """What limits a step; None where that is what the trace does not show.

    First it is decided between the host, the device and communication; on the host then for the input if nothing else
    of the host's takes as long, and on the device for the longer side.

    Args:
        step: as it was replayed, or else by its length and the device's busy time alone.
        sides: "compute" or "memory bandwidth" for each row of `device_work`.
    """
    if step.replay is None:
        return _without_replay(experiment, step, sides)
    path = critical_path(experiment, step.replay)
    return _largest(_parts(experiment, path, sides), max(int(path["duration_ns"].sum()), 1))


def _largest(parts: Parts, total_ns: float) -> Limit | None:
    """The limit among parts of a step, by name and cause."""
    groups: dict[str, float] = {}
    for (name, _), ns in parts.items():
        groups[_GROUP[name]] = groups.get(_GROUP[name], 0.0) + ns
    if not groups:
        return None
    group = max(sorted(groups), key=lambda name: groups[name])
    inside = {key: ns for key, ns in parts.items() if _GROUP[key[0]] == group}
    if group == "host":
        name, cause = max(sorted(inside), key=lambda key: inside[key])
        share = sum(ns for key, ns in inside.items() if key[0] == name) / total_ns
        return Limit(name, share, cause if name == "host" else None)
    if group == "unknown":
        return None
    sums = {name: sum(ns for key, ns in inside.items() if key[0] == name) for name, _ in inside}
    name = max(sorted(sums), key=lambda name: sums[name])
    return Limit(name, sums[name] / total_ns)


def _parts(experiment: Experiment, path: pl.DataFrame, sides: Labels) -> Parts:
    """What the critical path consists of: nanoseconds by limit, and by cause where the limit is the host's."""
    kinds = experiment.trace.device_work["kind"].to_list()
    parts: Parts = {}
    for ns, kind, cause, table, row in path.select("duration_ns", "kind", "cause", "table", "row").iter_rows():
        if kind == "host":
            key = ON_HOST.get(cause, "host"), str(cause or "untraced")
        elif kind == "launch_latency":
            key = "host", "launch_latency"
        elif kind == "wait":
            key = "unknown", ""
        elif table == "device_work":
            key = _OF_WORK.get(kinds[row], str(sides[row])), ""
        else:
            key = "communication", ""
        parts[key] = parts.get(key, 0.0) + ns
    return parts


def _without_replay(experiment: Experiment, step: ReplayedStep, sides: Labels) -> Limit | None:
    """From the time in which the device works, by side, and its idle time as measured, by cause."""
    parts: Parts = {}
    works = experiment.works
    durations = experiment.graph.works.duration[works] * step.factors[works]
    kinds = experiment.trace.device_work["kind"].to_numpy()[works]
    names = np.array([_OF_WORK.get(kind, str(side)) for kind, side in zip(kinds, sides[works], strict=True)], np.str_)
    # What usually goes on beside computation counts where computation is not most of it.
    own = np.isin(kinds, _HIDDEN, invert=True)
    own = own | (durations[own].sum() <= 0.5 * durations.sum())
    for name in np.unique(names[own]).tolist():
        share = durations[own & (names == name)].sum() / max(float(durations[own].sum()), 1.0)
        parts[name, ""] = step.device_ns * share
    idle_ns = max(step.step_ns - step.device_ns, 0.0)
    for cause, share in _idle_causes(experiment).items():
        unknown = cause in _OPEN
        parts["unknown" if unknown else ON_HOST.get(cause, "host"), cause] = idle_ns * share
    return _largest(parts, step.step_ns)


def _idle_causes(experiment: Experiment) -> dict[str, float]:
    """Share of the device's idle time in the steps by cause."""
    idle = idle_time(experiment.trace, window=experiment.span, activity=experiment.activity)
    idle = idle.filter(pl.col("device") == experiment.device)
    sums = idle.group_by("cause").agg(pl.col("duration_ns").sum())
    total = max(int(sums["duration_ns"].sum()), 1)
    return {cause: ns / total for cause, ns in sums.iter_rows()}
