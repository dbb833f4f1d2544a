"""The steps of a job of many ranks, replayed from what is kept of each: what a change on some saves for all.

A rank works on its own, meets others in collectives, and waits there. Of each collective three moments count: the rank
is ready for it, it begins (once the one before in its group has ended), and the rank's own work goes on when it has
ended, if the rank waited. A collective ends on every rank of its group when the last has begun it and the transfer is
done. What a rank does between these moments takes as long in a replay as in the recording, less what a change saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.analysis.matching import RankCollectives, participants
from stepscope.threads import cached_property
from stepscope.trace.nesting import Rows
from stepscope.trace.window import IntervalSet, Times
from stepscope.whatif.graph import previous_in

Floats = npt.NDArray[np.float64]
_NEVER: Final = np.iinfo(np.int64).min // 4
TRANSFER: Final = "transfer"
"""The cause of the parts of the critical path in which data moves after the last rank has come."""
BEGIN: Final = "begin"
"""The cause of the part in which the rank that the others wait for had not begun the recorded steps."""


@dataclass(frozen=True, slots=True)
class RankTimes:
    """One rank's own work and its collectives, on its own clock.

    Attributes:
        kept: its collectives, and what the rank did before each of them.
        waits: for each of them lead_ns, from when the rank was ready for it to its start, and wait_ns, for how long
            before its end the rank did nothing else.
        cause_ns: by cause, the idle or host time of all steps.
        start_ns, end_ns: of the measured steps.
        steps: how many these are.
    """

    name: str
    kept: RankCollectives
    waits: pl.DataFrame
    cause_ns: Mapping[str, int]
    start_ns: int
    end_ns: int
    steps: int


@dataclass(frozen=True, slots=True)
class Saved:
    """What a change saves on one rank, as its own trace tells.

    Attributes:
        collectives: for each before_ns, what is saved of the rank's own work before it, cumulated; transfer_scale, the
            factor on its transfer; most_ns, how much earlier the rank can be there, whatever the others do: other work
            may take the place of its waits; null where that is unknown.
        end_ns: what is saved of all its own work.
        most_ns: how much earlier its steps can end.
    """

    collectives: pl.DataFrame
    end_ns: int
    most_ns: int | None = None

    def with_saved(self, other: Saved) -> Saved:
        """Both savings of a rank."""
        columns = {
            "before_ns": self.collectives["before_ns"] + other.collectives["before_ns"],
            "transfer_scale": self.collectives["transfer_scale"] * other.collectives["transfer_scale"],
            "most_ns": self.collectives["most_ns"] + other.collectives["most_ns"],
        }
        most = None if self.most_ns is None or other.most_ns is None else self.most_ns + other.most_ns
        return Saved(pl.DataFrame(columns), self.end_ns + other.end_ns, most)

    @classmethod
    def of(cls, before_ns: Times, end_ns: int, transfer_scale: float = 1.0) -> Saved:
        """A saving of own work, with one factor on all transfers."""
        columns = {"before_ns": before_ns, "transfer_scale": np.full(len(before_ns), transfer_scale)}
        return cls(pl.DataFrame(columns).with_columns(most_ns=pl.lit(None, pl.Int64)), end_ns)


@dataclass(frozen=True)
class JobTimes:
    """When collectives begin and end, and each rank's steps; on the first rank's clock.

    Attributes:
        start, end: of each rank's collectives, one rank after another.
        rank_end: when each rank's steps have ended.
        raised: which collectives' ends their ranks waited for.
        queued: which collectives began when the one before in their group had ended.
    """

    start: Times
    end: Times
    rank_end: Times
    raised: npt.NDArray[np.bool_]
    queued: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankProspect:
    name: str  # rank, such as "rank 3", or its file
    measured_step_ns: float  # as recorded
    step_ns: float  # with the changes, each rank waiting for the others in collectives
    alone_step_ns: float  # with the changes on this rank only


@dataclass(frozen=True, slots=True)
class JobProspect:
    """A step of the job with changes: that of the rank that takes longest.

    Attributes:
        measured_step_ns: as recorded.
        step_ns: with the changes.
        last, last_then: the rank that takes longest, of several the one that they wait for most, as recorded and with
            the changes.
        ranks: each rank's step.
        changed: how many ranks the changes fit.
        error_share: how far the replay without a change is from the recorded step.
    """

    measured_step_ns: float
    step_ns: float
    last: str
    last_then: str
    ranks: tuple[RankProspect, ...]
    changed: int
    error_share: float

    @property
    def saving_share(self) -> float:
        return 1 - self.step_ns / self.measured_step_ns if self.measured_step_ns else 0.0


_ALIKE: Final = 0.001
"""Share of a step by which ranks that take longest differ at most."""
_MOST_ALONE: Final = 16
"""Ranks of which each is also changed alone; of more, only those that the others wait for."""

PATH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "step": pl.Int64,  # that of the collective in which the part ends; of the last one for what follows
    "rank": pl.Int64,  # place of the rank that the others wait for; of a transfer, the rank that came last
    "cause": pl.String,  # of idle or host time, "busy", TRANSFER or BEGIN
    "start_ns": pl.Int64,  # of the piece that the part belongs to, on the first rank's clock
    "ns": pl.Int64,
}


class _Piece(NamedTuple):
    """A part of the critical path: on a rank, between two collectives, or within one after its last rank has come."""

    place: int
    start: int
    end: int
    since: int  # the collective that the rank waited for before, -1 for none
    until: int  # the collective that it then begins, -1 for none


class Job:
    """The ranks of a job, joined by the collectives in which they meet.

    Where a collective ended on one rank before another began, it joins nothing: each rank's lasts as long as it did.

    Args:
        matched: of `matched_collectives` of the ranks.
        is_open: which of these have members that are missing: their transfers may be waits for those, and no change
            makes them shorter.

    Attributes:
        joined: which ranks meet others; only these make the job's step.
    """

    def __init__(
        self, ranks: Sequence[RankTimes], matched: pl.DataFrame, *, is_open: npt.NDArray[np.bool_] | None = None
    ) -> None:
        self.is_open = np.zeros(max(matched.height, 1), np.bool_) if is_open is None else is_open
        self.ranks = tuple(ranks)
        self._counts = [rank.kept.table.height for rank in ranks]
        self.first = np.cumsum([0, *self._counts])
        self.rank = np.repeat(np.arange(len(ranks)), self._counts)
        self.table = pl.concat(
            [rank.kept.table.select("step", "kind", pl.col("group").fill_null(""), "bytes", "start_ns", "duration_ns")
             .hstack(rank.waits)
             for rank in ranks], how="vertical_relaxed",
        )  # fmt: skip
        taken = participants(matched)
        self._row = self.first[taken["rank"].to_numpy()] + taken["row"].to_numpy()
        self._clocks = self._fitted(taken["shift_ns"].to_numpy())
        start = self._local("start_ns")
        end = start + self._local("duration_ns")
        self.start = self._aligned(self.rank, start)
        self.end = np.maximum(self._aligned(self.rank, end), self.start + 1)
        self.meeting = self._meetings(taken["exchange"].to_numpy().astype(np.int64))
        met = self.meeting >= 0
        self.joined = np.array([bool(met[self._of(place)].any()) for place in range(len(ranks))])
        self._prepare()
        self.schedule = self._schedule()

    @cached_property
    def measured(self) -> JobTimes:
        """The replay without a change, which gives the recorded times."""
        return self.replay({})

    @property
    def recorded_ns(self) -> float:
        """The mean step of the rank whose steps took longest, as recorded."""
        return max((self.ranks[place].end_ns - self.ranks[place].start_ns) / self.ranks[place].steps
                   for place in np.flatnonzero(self.joined))  # fmt: skip

    @property
    def steps(self) -> int:
        return max(self.ranks[place].steps for place in np.flatnonzero(self.joined))

    def step_ns(self, done: JobTimes) -> Floats:
        """Each rank's mean step in a replay."""
        begins = np.array([self._at(place, rank.start_ns) for place, rank in enumerate(self.ranks)])
        means: Floats = (done.rank_end - begins) / np.array([rank.steps for rank in self.ranks])
        return means

    def saving_ns(self, saved: Mapping[int, Saved]) -> float:
        """How much shorter the job's step is, which ends when the last rank's does."""
        return self._longest(self.measured) - self._longest(self.replay(saved))

    def prospect(self, saved: Mapping[int, Saved]) -> JobProspect:
        """The job's step, and each rank's, with these savings of all ranks and of one alone."""
        done = self.replay(saved)
        measured, then = self.step_ns(self.measured), self.step_ns(done)
        alone = measured.copy()
        path = set(self.critical_path()["rank"].to_list())
        for place, each in saved.items():
            if len(self.ranks) <= _MOST_ALONE or place in path:
                alone[place] = self.step_ns(self.replay({place: each}))[place]
        names = [rank.name for rank in self.ranks]
        figures = zip(names, *(values.tolist() for values in (measured, then, alone)), strict=True)
        return JobProspect(
            measured_step_ns=self._longest(self.measured),
            step_ns=self._longest(done),
            last=names[self.last(self.measured)],
            last_then=names[self.last(done)],
            ranks=tuple(RankProspect(*each) for each in figures),
            changed=len(saved),
            error_share=self.error_share,
        )

    def spread(self, place: int, ns: int) -> Saved:
        """A saving of a rank's own work that is spread evenly over it."""
        begin, own = self._at(place, self.ranks[place].start_ns), self._own_ready[self._of(place)]
        whole = max(int(self._own_end[place]) - begin, 1)
        before = np.rint((own - begin).clip(0, whole) * (ns / whole)).astype(np.int64)
        return Saved.of(before, ns)

    def without_transfers(self, place: int) -> Saved:
        """What is saved if the collectives of a rank took no time once all have come."""
        return Saved.of(np.zeros(self._counts[place], np.int64), 0, 0.0)

    def _of(self, place: int) -> slice:
        """Where a rank's collectives are among those of all."""
        return slice(int(self.first[place]), int(self.first[place + 1]))

    @property
    def error_share(self) -> float:
        """How far the replay without a change is from the recorded step, as a share of it."""
        return abs(self._longest(self.measured) - self.recorded_ns) / max(self.recorded_ns, 1)

    def _longest(self, done: JobTimes) -> float:
        """The job's step: that of the rank whose steps take longest."""
        return float(self.step_ns(done)[self.joined].max())

    def _local(self, name: str) -> Times:
        values: Times = self.table[name].to_numpy()
        return values

    def _fitted(self, shift: Times) -> tuple[Times, Times, Floats]:
        """Of each rank's clock a moment, what to add there to be on the first one's, and how this changes with time."""
        begin, drift = np.zeros(len(self.ranks), np.int64), np.zeros(len(self.ranks))
        add = np.array([rank.kept.clock_ns for rank in self.ranks], np.int64)
        order = np.argsort(self._row)
        rows, shift, start = self._row[order], shift[order], self._local("start_ns")
        bounds = np.searchsorted(rows, self.first)
        known = bounds[1:] > bounds[:-1]
        first, last = bounds[:-1][known], bounds[1:][known] - 1
        begin[known], length = start[rows[first]], start[rows[last]] - start[rows[first]]
        add[known] -= shift[first]
        drift[known] = (shift[first] - shift[last]) / np.maximum(length, 1)
        return begin, add, drift

    def _aligned(self, rank: Rows, times: Times) -> Times:
        """Times of each rank's clock on the first one's."""
        begin, add, drift = (values[rank] for values in self._clocks)
        aligned: Times = times + add + np.rint(drift * (times - begin)).astype(np.int64)
        return aligned

    def _at(self, place: int, time: int) -> int:
        return int(self._aligned(np.array([place]), np.array([time]))[0])

    def _meetings(self, exchange: Times) -> Times:
        """The number of the exchange that each collective is a part of, -1 for none."""
        meeting = np.full(len(self.rank), -1)
        if len(exchange):
            last = np.full(int(exchange.max()) + 1, _NEVER)
            np.maximum.at(last, exchange, self.start[self._row])
            is_apart = np.zeros(len(last), np.bool_)
            is_apart[exchange[self.end[self._row] <= last[exchange]]] = True
            meeting[self._row] = np.where(is_apart[exchange], -1, exchange)
        return meeting

    def _prepare(self) -> None:
        """Set what a replay needs: own times, moments of waiting, the collective before, and the transfers."""
        count = len(self.rank)
        lead, wait = self._local("lead_ns"), self._local("wait_ns")
        met = np.maximum(self.meeting, 0)
        last = np.full(int(met.max(initial=0)) + 1, _NEVER)
        np.maximum.at(last, met[self.meeting >= 0], self.start[self.meeting >= 0])
        self.transfer = self.end - np.where(self.meeting >= 0, last[met], self.start)
        ready = self.start - np.maximum(lead, 0)
        self._own_ready, self._own_after, self._after = (np.zeros(count, np.int64) for _ in range(3))
        self._ready, self._before = ready, np.full(count, -1)
        groups = self.table["group"].rank("dense").to_numpy()
        self._own_end = np.zeros(len(self.ranks), np.int64)
        residual = np.zeros(count, np.int64)
        for place, rank in enumerate(self.ranks):
            mine = self._of(place)
            end, begins = self.end[mine], self.end[mine] - wait[mine]
            blocks = _disjoint(begins[wait[mine] > 0], end[wait[mine] > 0])
            finish = self._at(place, rank.end_ns)
            free = np.sort(end[wait[mine] > 0])
            following = np.searchsorted(free, end)
            after = np.append(free, max(finish, int(end.max(initial=finish))))[following]
            self._after[mine] = after
            self._own_after[mine] = after - blocks.covered_until(after)
            self._own_ready[mine] = ready[mine] - blocks.covered_until(ready[mine])
            self._own_end[place] = finish - blocks.covered_until(np.array([finish]))[0]
            before = _previous(groups[mine], self.start[mine], ready[mine], end)
            self._before[mine] = np.where(before >= 0, before + self.first[place], -1)
            known = self._own_ready[mine] + _ended(blocks, ready[mine])
            freed = np.where(before >= 0, end[np.maximum(before, 0)], _NEVER)
            residual[mine] = self.start[mine] - np.maximum(known, freed)
        self._residual = residual

    def _schedule(self) -> list[tuple[Rows, Rows]]:
        """Which collectives begin, and which are waited for, at the same place of an order that keeps dependencies."""
        while True:
            found, stuck = self._ordered()
            if not len(stuck):
                return found
            self.meeting = np.where(np.isin(self.meeting, self.meeting[stuck]), -1, self.meeting)
            self._prepare()

    def _ordered(self) -> tuple[list[tuple[Rows, Rows]], Rows]:
        """The order, and the collectives that contradict it, if any."""
        count = len(self.rank)
        time = np.concatenate([self._ready, self._after])
        begins = np.concatenate([np.ones(count, np.int8), np.zeros(count, np.int8)])
        own = np.tile(self.rank, 2)
        events = np.lexsort((begins, time, own))
        self.position = np.empty(2 * count, np.int64)
        self.position[events] = np.arange(2 * count)
        at, last = 2 * self.first[:-1], 2 * self.first[1:]
        missing = np.bincount(self.meeting[self.meeting >= 0], minlength=int(self.meeting.max(initial=0)) + 1)
        begun = np.zeros(count, np.bool_)
        order: list[tuple[Rows, Rows]] = []
        active = np.flatnonzero(at < last)
        while len(active):
            event = events[at[active]]
            index = event % max(count, 1)
            is_begin = event < count
            waits_for = np.where(is_begin, self._before[index], index)
            meets = self.meeting[np.maximum(waits_for, 0)]
            free = (waits_for < 0) | np.where(meets >= 0, missing[np.maximum(meets, 0)] == 0, begun[waits_for])
            if not free.any():
                return order, waits_for
            start, end = index[free & is_begin], index[free & ~is_begin]
            order.append((start, end))
            begun[start] = True
            met = self.meeting[start]
            np.subtract.at(missing, met[met >= 0], 1)
            at[active[free]] += 1
            active = active[at[active] < last[active]]
        return order, np.zeros(0, np.int64)

    def replay(self, saved: Mapping[int, Saved]) -> JobTimes:
        """Compute when everything happens with these savings, by the place of the rank."""
        count, ranks = len(self.rank), len(self.ranks)
        ready, after, finish = self._own_ready.copy(), self._own_after.copy(), self._own_end.copy()
        soonest, soonest_end = np.full(count, _NEVER), np.full(ranks, _NEVER)
        for place, each in saved.items():
            mine = self._of(place)
            before_ns, kept = each.collectives["before_ns"].to_numpy(), self._counts[place]
            end_ns = each.end_ns if kept >= len(before_ns) else int(before_ns[kept])  # the end of what is kept
            before_ns = before_ns[:kept]
            ready[mine] -= before_ns
            order = np.argsort(self._ready[mine], kind="stable")
            passed = np.searchsorted(self._ready[mine][order], self._after[mine], side="left")
            later = np.minimum.accumulate(np.append(before_ns[order], end_ns)[::-1])[::-1]
            after[mine] -= np.minimum(np.append(0, before_ns[order])[passed], later[passed])
            finish[place] -= end_ns
            most = each.collectives["most_ns"].cast(pl.Float64).to_numpy()[: self._counts[place]]
            known = ~np.isnan(most)
            soonest[mine][known] = self.start[mine][known] - most[known].astype(np.int64)
            if each.most_ns is not None and kept == each.collectives.height:
                soonest_end[place] = self._at(place, self.ranks[place].end_ns) - each.most_ns
        transfer = np.rint(self.transfer * self._scales(saved)).astype(np.int64)
        start, end, held = (np.zeros(count, np.int64) for _ in range(3))
        blocked = np.zeros(ranks, np.int64)
        queued = np.zeros(count, np.bool_)
        last = np.full(int(self.meeting.max(initial=0)) + 1, _NEVER)

        def ends(rows: Rows) -> Times:
            meets = self.meeting[rows]
            found: Times = np.where(meets >= 0, last[np.maximum(meets, 0)], start[rows]) + transfer[rows]
            return found

        for begin, wait in self.schedule:
            if len(wait):
                end[wait] = ends(wait)
                held[wait] = end[wait] - after[wait]
                of = self.rank[wait]
                held[wait] = np.where(held[wait] > blocked[of], held[wait], _NEVER)
                blocked[of] = np.maximum(blocked[of], held[wait])
            if len(begin):
                own = ready[begin] + blocked[self.rank[begin]]
                before = self._before[begin]
                free = np.where(before >= 0, ends(np.maximum(before, 0)), _NEVER)
                queued[begin] = free > own
                start[begin] = np.maximum(np.maximum(own, free) + self._residual[begin], soonest[begin])
                meets = self.meeting[begin]
                np.maximum.at(last, meets[meets >= 0], start[begin][meets >= 0])
        return JobTimes(start, end, np.maximum(finish + blocked, soonest_end), held > _NEVER, queued)

    def _scales(self, saved: Mapping[int, Saved]) -> Floats:
        """The factor on each transfer: the smallest that a rank of its meeting tells."""
        scale = np.ones(len(self.rank))
        for place, each in saved.items():
            mine = self._of(place)
            scale[mine] = each.collectives["transfer_scale"].to_numpy()[: self._counts[place]]
        met = self.meeting >= 0
        if met.any() and (scale != 1).any():
            least = np.full(int(self.meeting.max()) + 1, np.inf)
            np.minimum.at(least, self.meeting[met], scale[met])
            scale[met] = np.where(self.is_open[self.meeting[met]], 1, least[self.meeting[met]])
        return scale

    def last(self, done: JobTimes) -> int:
        """The place of the rank whose steps take longest; of several, the one that they wait for most."""
        steps = self.step_ns(done)
        longest = np.flatnonzero(self.joined & (steps >= (1 - _ALIKE) * self._longest(done)))
        if len(longest) == 1:
            return int(longest[0])
        path = self.critical_path(done)
        waited = np.bincount(path["rank"].to_numpy(), path["ns"].to_numpy(), minlength=len(steps))
        return int(longest[waited[longest].argmax()])

    def critical_path(self, done: JobTimes | None = None) -> pl.DataFrame:
        """What the job's steps wait for, as recorded by default: it goes to the rank that comes last in a collective.

        Returns:
            Columns as in PATH_SCHEMA, in order of time; their sum is the time of the rank whose steps took longest.
        """
        done, pieces = done or self.measured, []
        took = self.step_ns(done) * np.array([rank.steps for rank in self.ranks])
        place = int(np.argmax(np.where(self.joined, took, 0)))
        upto, row, before = int(done.rank_end[place]), -1, 2 * int(self.first[place + 1])
        waited: dict[int, tuple[Rows, Rows]] = {}
        lasts = self._last_of_meetings(done)
        begin = self._at(place, self.ranks[place].start_ns)
        while True:
            if place not in waited:
                waited[place] = self._waited(done, place)
            positions, rows = waited[place]
            found = int(np.searchsorted(positions, before)) - 1
            collective = int(rows[found]) if found >= 0 else -1
            if row >= 0 and done.queued[row]:
                collective = int(self._before[row])
            since = int(done.end[collective]) if collective >= 0 else begin
            pieces.append(_Piece(place, max(min(since, upto), begin), upto, collective, row))
            if collective < 0 or since <= begin:
                break
            last = int(lasts[self.meeting[collective]]) if self.meeting[collective] >= 0 else collective
            pieces.append(_Piece(int(self.rank[last]), max(int(done.start[last]), begin), since, last, last))
            place, row, upto = int(self.rank[last]), last, int(done.start[last])
            before = int(self.position[last])
            if upto <= begin:
                break
        return self._told(pieces[::-1])

    def _waited(self, done: JobTimes, place: int) -> tuple[Rows, Rows]:
        """The collectives that a rank waited for, in order, and their positions in the order of events."""
        mine = np.flatnonzero(done.raised[self._of(place)]) + self.first[place]
        positions = self.position[mine + len(self.rank)]
        order = np.argsort(positions)
        return positions[order], mine[order]

    def _last_of_meetings(self, done: JobTimes) -> Rows:
        """The collective of the rank that comes last, for each meeting."""
        met = np.flatnonzero(self.meeting >= 0)
        order = met[np.argsort(done.start[met], kind="stable")]
        last = np.full(int(self.meeting.max(initial=0)) + 1, -1)
        last[self.meeting[order]] = order
        return last

    def _told(self, pieces: Sequence[_Piece]) -> pl.DataFrame:
        steps, rows = self._local("step"), []
        for place, start, end, since, until in pieces:
            step = int(steps[until if until >= 0 else since])
            if since == until >= 0:
                rows.append((step, place, TRANSFER, start, end - start))
                continue
            began = min(max(self._at(place, self.ranks[place].start_ns), start), end) if since < 0 else start
            rows.append((step, place, BEGIN, start, began - start))
            left = end - began
            for cause, ns in self._causes(place, start, until if until >= 0 else None):
                part = min(ns, left)
                rows.append((step, place, cause, start, part))
                left -= part
            rows.append((step, place, "busy", start, left))
        table = pl.DataFrame(rows, schema=PATH_SCHEMA, orient="row").filter(pl.col("ns") > 0)
        keys = ["step", "rank", "cause", "start_ns"]
        return table.group_by(keys, maintain_order=True).agg(pl.col("ns").sum())

    def _causes(self, place: int, start: int, row: int | None) -> list[tuple[str, int]]:
        """What a rank did from a moment until it reached a collective, or until its steps' end."""
        rank, begin = self.ranks[place], int(self.first[place])
        if rank.kept.before is None:
            return []
        causes = rank.kept.before.select(pl.exclude("begin_ns", "works"))
        if row is None:  # what no collective follows
            known = causes.sum().row(0, named=True) if causes.height else {}
            sums = {name: ns - (known.get(name) or 0) for name, ns in rank.cause_ns.items()}
        else:
            since = int(np.searchsorted(self.start[begin : row + 1], start, side="right"))
            sums = causes.slice(since, row + 1 - begin - since).sum().row(0, named=True)
        found = [(name, ns or 0) for name, ns in sums.items() if name != "busy"]
        return sorted((each for each in found if each[1] > 0), key=lambda each: (-each[1], each[0]))


def _disjoint(starts: Times, ends: Times) -> IntervalSet:
    """Intervals that do not overlap, by cutting each where the one that ended before it did."""
    order = np.argsort(ends, kind="stable")
    starts, ends = starts[order], ends[order]
    starts = np.maximum(starts, np.append(_NEVER, ends[:-1]))
    some = ends > starts
    return IntervalSet(starts[some], ends[some])


def _ended(blocks: IntervalSet, times: Times) -> Times:
    """The length of the intervals that have ended at each moment."""
    lengths = np.append(0, np.cumsum(blocks.ends - blocks.starts))
    found: Times = lengths[np.searchsorted(blocks.ends, times, side="right")]
    return found


def _previous(group: Rows, start: Times, ready: Times, end: Times) -> Rows:
    """The collective before each in its group that it may have waited for, else -1."""
    before = previous_in(group, start, end)
    place = np.maximum(before, 0)
    return np.where((before >= 0) & (end[place] <= start) & (ready[place] <= ready), before, -1)
