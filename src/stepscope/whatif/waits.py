"""One rank's part in its job: how its own work depends on its collectives, and what a change does to both."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.communication import collectives, exposed_intervals_on_host, kind_of
from stepscope.analysis.step_view import StepView
from stepscope.trace import Trace
from stepscope.trace.window import IntervalSet, Times, union
from stepscope.whatif.experiment import Experiment
from stepscope.whatif.graph import Replay
from stepscope.whatif.job import Saved

Mask = npt.NDArray[np.bool_]
_GONE: Final = 0.1
"""What is left of a collective's time, at most, where a change removes it."""


def collective_waits(view: StepView) -> pl.DataFrame:
    """Of each collective of the steps, in order of time: what links it to the rank's own work.

    A collective of a device waits, besides for the one before it, until it was launched and the work launched before it
    was done. The rank waits for its end where no other work runs before, unless the host launches the next work later
    without having waited.

    Returns:
        Columns of `collectives`, lead_ns (from when the rank was ready to the start) and wait_ns (for how long before
        the end it did nothing else).
    """
    found = collectives(view.trace, device=view.device, window=view.window)
    start = found["start_ns"].to_numpy()
    end = start + found["duration_ns"].to_numpy()
    on_device = bool(found["on_device"].any())
    if on_device:
        work = view.trace.device_work.filter((pl.col("device") == view.device).fill_null(False))
        launched = _launched(view.trace, work["launch"])
        own = work["kind"].to_numpy() != "communication"
        alone = _alone(view, work, own)
        launches = found["launch"].cast(pl.Int64).fill_null(-1)
        ready = _ready(start, _launched(view.trace, launches), work.filter(own), launched[own])
    else:
        alone, ready = exposed_intervals_on_host(view.trace, view.window), start
    wait = _waits(alone, end)
    if on_device:
        begun = work["start_ns"].to_numpy()[own]
        wait = np.minimum(wait, _held(view.trace, end, begun, launched[own]))
    return found.with_columns(lead_ns=start - ready, wait_ns=wait)


def _launched(trace: Trace, launches: pl.Series) -> Times:
    """When each was launched; before everything where unknown."""
    rows = launches.cast(pl.Int64).fill_null(-1).to_numpy()
    starts = np.append(trace.launches["start_ns"].to_numpy(), np.iinfo(np.int64).min // 4)
    found: Times = starts[rows]
    return found


def _alone(view: StepView, work: pl.DataFrame, own: Mask) -> IntervalSet:
    """When the device works on collectives only, or is idle for them."""
    starts, ends = work["start_ns"].to_numpy(), (work["start_ns"] + work["duration_ns"]).to_numpy()
    idle = view.idle_in_steps.filter(
        (pl.col("cause") == "communication") & (pl.col("device") == view.device).fill_null(False)
    )
    first, last = idle["start_ns"].to_numpy(), (idle["start_ns"] + idle["duration_ns"]).to_numpy()
    window = view.window
    waiting = union(np.append(starts[~own], first), np.append(ends[~own], last))
    others = waiting.complement(window.start_ns, window.end_ns)
    busy = union(np.append(starts[own], others.starts), np.append(ends[own], others.ends))
    return busy.complement(window.start_ns, window.end_ns)


def _ready(start: Times, launched: Times, work: pl.DataFrame, when: Times) -> Times:
    """When each collective could have begun, if nothing before it in its own queue had kept it."""
    order = np.argsort(when, kind="stable")
    ends = np.maximum.accumulate((work["start_ns"] + work["duration_ns"]).to_numpy()[order])
    before = np.searchsorted(when[order], launched, side="right")
    done = np.append(np.iinfo(np.int64).min // 4, ends)[before]
    known = launched > np.iinfo(np.int64).min // 4
    ready: Times = np.where(known, np.minimum(np.maximum(launched, done), start), start)
    return ready


def _waits(alone: IntervalSet, end: Times) -> Times:
    """How long before each end nothing else was done, since the end before it."""
    if not len(alone.starts) or not len(end):
        return np.zeros(len(end), np.int64)
    place = np.maximum(np.searchsorted(alone.starts, end, side="left") - 1, 0)
    inside = (alone.starts[place] < end) & (end <= alone.ends[place])
    order = np.sort(end)
    before = np.searchsorted(order, end, side="left") - 1
    since = np.maximum(alone.starts[place], np.where(before >= 0, order[before], alone.starts[place]))
    return np.where(inside, end - since, 0)


def _held(trace: Trace, end: Times, begun: Times, launched: Times) -> Times:
    """How long before each end the next work had been launched: no bound where the host first waited for the device."""
    order = np.argsort(begun, kind="stable")
    following = np.searchsorted(begun[order], end, side="left")
    ready = np.append(launched[order], np.iinfo(np.int64).max)[following]
    calls = trace.launches.filter(pl.col("kind") == "synchronise")
    waiting = union(calls["start_ns"].to_numpy(), (calls["start_ns"] + calls["duration_ns"]).to_numpy())
    waited = waiting.overlap_of(end - 1, end + 1) > 0
    return np.where(ready < end, end - ready, np.where(waited, np.iinfo(np.int64).max, 0))


def saved_between(experiment: Experiment, met: pl.DataFrame, before: Replay, after: Replay) -> Saved:
    """What a change saves of a rank's own work, by a replay of its trace alone without and with it.

    Args:
        met: of `collective_waits`.
    """
    starts, ends = zip(*(_moments(experiment, met, done) for done in (before, after)), strict=True)
    lasted, lasts = ends[0] - starts[0], ends[1] - starts[1]
    less = np.clip(lasted - lasts, 0, met["wait_ns"].to_numpy())  # of waiting, which is no work of its own
    start = met["start_ns"].to_numpy()
    end = start + met["duration_ns"].to_numpy()
    order = np.argsort(end, kind="stable")
    done = np.searchsorted(end[order], start - met["lead_ns"].to_numpy(), side="right")
    earlier, waited = starts[0] - starts[1], np.append(0, np.cumsum(less[order]))[done]
    scale = np.where(lasted > 0, lasts / np.maximum(lasted, 1), 1.0)
    is_gone = (less > 0) & (scale < _GONE)
    after_gone = np.append(0, np.cumsum(is_gone[order]))[done] > 0
    whole = experiment.length_ns(before) - experiment.length_ns(after)
    columns = {"before_ns": _own(earlier, waited), "transfer_scale": scale, "most_ns": earlier}
    table = pl.DataFrame(columns).with_columns(pl.when(pl.Series(after_gone)).then("most_ns").alias("most_ns"))
    return Saved(table, int(_own(np.array(whole), less.sum())), whole if is_gone.any() else None)


def _own(earlier: Times, waited: Times) -> Times:
    """What is saved besides waiting: nothing where other work took the place of the wait."""
    return np.where(earlier >= 0, np.maximum(earlier - waited, 0), earlier - waited)


def _moments(experiment: Experiment, met: pl.DataFrame, done: Replay) -> tuple[Times, Times]:
    """When each collective begins and ends in a replay."""
    rows = met["row"].to_numpy()
    if met["on_device"].any():
        return done.work_start[rows], done.work_end[rows]
    lanes = experiment.trace.operators["lane"].to_numpy()[rows].astype(np.int32)
    starts, length = met["start_ns"].to_numpy(), met["duration_ns"].to_numpy()
    begins = done.host_times(lanes, starts)
    ends = begins + length
    graph, first = experiment.graph, experiment.trace.device_work.height
    kinds = np.array([kind_of(name) for name in experiment.trace.annotations["name"].gather(graph.on_host)])
    measured = graph.works.start[first : first + len(kinds)] + graph.works.duration[first : first + len(kinds)]
    replayed = done.work_end[first : first + len(kinds)]
    for kind in np.unique(kinds).tolist():  # a collective lasts until the backend's work has ended
        order = np.argsort(measured[kinds == kind], kind="stable")
        its, place = measured[kinds == kind][order], np.searchsorted(measured[kinds == kind][order], starts + length)
        found = (place < len(its)) & (its[np.minimum(place, len(its) - 1)] == starts + length)
        found &= (met["kind"] == kind).to_numpy()
        ends[found] = replayed[kinds == kind][order][place[found]]
    return begins, ends
