"""Which track of a Perfetto trace each row stands on.

A lane has one track for each of its tables; slices that overlap without one being inside the other stand on further
tracks, since a track's slices are properly nested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from stepscope.trace import Trace
from stepscope.trace.nesting import parents
from stepscope.trace.tables import SLICE_TABLES

_MEMORY: Final = "memory"
_TRIED: Final = 64
"""Layers that a slice is tried on before it gets a new one, which bounds the time where everything overlaps."""


class Tracks:
    """Numbers of tracks, from 1 on.

    Attributes:
        counters: (lane, name, series) -> the counter's track.
    """

    OWN: Final = 1

    def __init__(self, trace: Trace) -> None:
        self._next = Tracks.OWN + 1
        self._lanes = [self.fresh() for _ in range(trace.lanes.height)]
        self._named: list[tuple[int, int, str]] = []
        self._rows = {table: self._of_table(trace, table) for table in SLICE_TABLES}
        memory = trace.scan(_MEMORY).select("lane").unique().collect()["lane"].sort().to_list()
        self._memory = {lane: self._track(lane, _MEMORY) for lane in memory}
        counters = trace.scan("counters").select("lane", "name", "series").unique(maintain_order=True).collect()
        self.counters: dict[tuple[int, str | None, str | None], int] = {
            counter: self.fresh() for counter in counters.iter_rows()
        }

    def fresh(self) -> int:
        """A number that no track has yet."""
        self._next += 1
        return self._next - 1

    def of_lane(self, lane: int) -> int:
        """The track that a lane's other tracks stand below."""
        return self._lanes[lane]

    def of_rows(self, table: str, first: int, count: int) -> list[int]:
        """The tracks of some rows of a table of slices."""
        found: list[int] = self._rows[table][first : first + count].tolist()
        return found

    def of_memory(self, lane: int) -> int:
        """The track of a lane's allocations."""
        return self._memory[lane]

    def named(self) -> Iterator[tuple[int, int, str]]:
        """Track, lane and name of each track of slices and allocations."""
        yield from self._named

    def lanes(self) -> list[tuple[int, int]]:
        """Track and lane of each track of slices and allocations."""
        return [(track, lane) for track, lane, _ in self._named]

    def _track(self, lane: int, name: str) -> int:
        track = self.fresh()
        self._named.append((track, lane, name))
        return track

    def _of_table(self, trace: Trace, table: str) -> npt.NDArray[np.int64]:
        rows = trace.scan(table).select("lane", "start_ns", "duration_ns").collect()
        lanes, starts, durations = (rows[name].to_numpy() for name in ("lane", "start_ns", "duration_ns"))
        result = np.zeros(len(lanes), np.int64)
        for lane in np.unique(lanes).tolist():
            mine = np.flatnonzero(lanes == lane)
            layers = _layers(starts[mine], durations[mine])
            tracks = [
                self._track(lane, table if layer == 0 else f"{table} {layer + 1}") for layer in range(max(layers) + 1)
            ]
            result[mine] = np.array(tracks)[layers]
        return result


def _layers(starts: npt.NDArray[np.int64], durations: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each slice, in order of start, the first layer on which it partly overlaps none that stands there."""
    ends = starts + durations
    around = parents(np.zeros(len(starts), np.int32), starts, durations)
    inside = around >= 0
    result = np.zeros(len(starts), np.int64)
    if not (ends[inside] > ends[around[inside]]).any():
        return result
    layers: list[list[int]] = []  # the ends of what is open on each
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        number = next((number for number, layer in enumerate(layers[:_TRIED]) if _fits(layer, start, end)), len(layers))
        if number == len(layers):
            layers.append([])
        layers[number].append(end)
        result[row] = number
    return result


def _fits(layer: list[int], start: int, end: int) -> bool:
    """Whether a slice stands inside what is open on a layer, once what has ended is closed."""
    while layer and layer[-1] <= start:
        layer.pop()
    return not layer or end <= layer[-1]
