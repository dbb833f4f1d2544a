"""Slices from their begins and ends, which stand in the file in any order: on a track, an end closes the last begin."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

UNKNOWN_NS: Final = -1
"""Duration of a slice whose end the file does not have."""


class Ends:
    """The begins and ends of a file's slices.

    Attributes:
        unmatched: ends that closed nothing.
        unclosed: begins without an end.
    """

    def __init__(self) -> None:
        self._times = array("q")
        self._tracks = array("q")
        self._numbers = array("q")
        self.count = 0
        self.unmatched = 0
        self.unclosed = 0

    def begin(self, track: int, time_ns: int) -> int:
        """A slice begins; its number."""
        number = self.count
        self.count += 1
        self._note(track, time_ns, number)
        return number

    def end(self, track: int, time_ns: int) -> None:
        """The last slice that began on this track ends."""
        self._note(track, time_ns, -1)

    def _note(self, track: int, time_ns: int, number: int) -> None:
        self._times.append(time_ns)
        self._tracks.append(track)
        self._numbers.append(number)

    def durations(self) -> npt.NDArray[np.int64]:
        """Of each slice by its number, UNKNOWN_NS without an end. Events of one time stand in the file's order."""
        times = np.frombuffer(self._times, np.int64)
        numbers = np.frombuffer(self._numbers, np.int64)
        tracks = np.frombuffer(self._tracks, np.int64)
        order = np.lexsort((np.arange(len(times)), times, tracks))
        result = np.full(self.count, UNKNOWN_NS, np.int64)
        stack: list[tuple[int, int]] = []
        durations: list[tuple[int, int]] = []
        current = -1
        for track, time, number in zip(
            tracks[order].tolist(), times[order].tolist(), numbers[order].tolist(), strict=True
        ):
            if track != current:
                current = track
                stack.clear()
            if number >= 0:
                stack.append((number, time))
            elif stack:
                began, begin_time = stack.pop()
                durations.append((began, time - begin_time))
            else:
                self.unmatched += 1
        if durations:
            closed, lengths = np.array(durations, np.int64).T
            result[closed] = lengths
        self.unclosed = int((result == UNKNOWN_NS).sum())
        return result
