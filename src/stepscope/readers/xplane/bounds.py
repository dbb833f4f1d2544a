"""Where the events of a line begin and end.

Each event says how long it is, so that where it begins is known only once the one before is. Many places of the bytes
are therefore followed at once: in each block one that hops from event to event, for all blocks together. Where these
chains do not meet, all places that could be a beginning are found, and the true ones by following sixteen at a step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from stepscope.readers.xplane.wire import Bytes, Positions, Values, WireError, varint

EVENT_TAG: Final = 0x22
_STEPS: Final = 16
_BLOCK_BYTES: Final = 2048
_WINDOW_BYTES: Final = 64
"""Of each block, where its first event is looked for: most are shorter."""
_CHECKS: Final = 3
_SETTLING: Final = 8
"""Hops after which a chain that began within an event, at its statistics, has left it."""
_ROUND: Final = 8
_MOST_ROUNDS: Final = 200
"""For a block of the shortest events; where blocks are without a beginning, chains would be far longer."""


def _hops() -> Positions:
    """By the two bytes behind an event's tag, as one number, the bytes up to the next event; 0 for long events."""
    number = np.arange(2**16)
    first, second = number & 0xFF, number >> 8
    longer = np.where(second < 0x80, ((first & 0x7F) | second << 7) + 3, 0)
    hops: Positions = np.where(first < 0x80, first + 2, longer)
    return hops


_HOPS: Final = _hops()


def event_bounds(data: Bytes, size: int) -> tuple[Positions, Positions, int]:
    """Where the events lie that follow each other from the data's beginning: their starts and ends, and what is behind.

    Args:
        data: with PADDING behind its `size` bytes.
    """
    if not size or data[0] != EVENT_TAG:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, 0
    return _in_lockstep(data, size) or _one_by_one(data, size)


def _in_lockstep(data: Bytes, size: int) -> tuple[Positions, Positions, int] | None:
    """The events of data that has ordinary ones only, all blocks at once; None where the blocks' chains do not meet."""
    behind: Values = np.ndarray((size + 2,), "<u2", buffer=data.data, offset=1, strides=(1,))
    starts = _block_starts(data, behind, size)
    begin = _follow(behind, starts, np.append(starts[1:], size), size)
    if begin is None:
        return None
    is_event = data.take(begin) == EVENT_TAG
    if not is_event.all():  # the events end here, or a chain went astray
        begin = begin[: int(np.argmin(is_event)) + 1]
    last = int(begin[-1])
    hop = int(_HOPS[behind[last]])
    end = last + hop
    if not is_event.all() or end > size:
        end = last
    elif hop == 0:
        return None
    ends = np.append(begin[1:], end)
    if end == last:
        begin, ends = begin[:-1], ends[:-1]
    if not len(begin):
        return None
    return begin + 2 + (data.take(begin + 1) >= 0x80), ends, end


def _block_starts(data: Bytes, behind: Values, size: int) -> Positions:
    """Places that begin an event, nearly surely: the first of the data, and one near the beginning of each block."""
    blocks = (size - _WINDOW_BYTES) // _BLOCK_BYTES
    if blocks < 2:
        return np.zeros(1, np.int64)
    windows = data[: blocks * _BLOCK_BYTES].reshape(blocks, _BLOCK_BYTES)[1:, :_WINDOW_BYTES]
    block, place = np.nonzero(windows == EVENT_TAG)
    at = (block + 1) * _BLOCK_BYTES + place
    for _ in range(_CHECKS):
        at = np.minimum(at + _HOPS.take(behind[at]), size)
        goes_on = data.take(at) == EVENT_TAG
        block, at = block[goes_on], at[goes_on]
    at = at[np.append(True, block[1:] != block[:-1])[: len(block)]]
    for _ in range(_SETTLING):
        at = np.minimum(at + _HOPS.take(behind[at]), size)
    at = at[(at < size) & (data.take(at) == EVENT_TAG)]
    at = at[np.append(True, at[1:] > np.maximum.accumulate(at)[:-1])[: len(at)]]
    return np.append(0, at)


def _follow(behind: Values, starts: Positions, limits: Positions, size: int) -> Positions | None:
    """All places that are reached from the starts by hops, each up to its limit; None if one limit is not met soon.

    Args:
        behind: for each place the two bytes behind it.
        size: the last limit, which need not be met.
    """
    rounds: list[tuple[Positions, Positions]] = []
    chain, at, limit = np.arange(len(starts)), starts, limits
    while len(at):
        reached = np.empty((_ROUND + 1, len(at)), np.int64)
        reached[0] = at
        for before, after in pairwise(reached):
            np.add(before, _HOPS.take(behind[before]), out=after)
            np.minimum(after, size, out=after)
        at = reached[-1]
        if len(rounds) == _MOST_ROUNDS or ((at == reached[-2]) & (at < limit)).any():
            return None
        rounds.append((chain, reached))
        going = at < limit
        if not going.all():
            chain, at, limit = chain[going], at[going], limit[going]
    places = np.full((len(starts), len(rounds) * _ROUND + 1), size)
    for number, (chain, reached) in enumerate(rounds):
        places[chain, number * _ROUND : (number + 1) * _ROUND + 1] = reached.T
    inside = places < limits[:, None]
    met = places[np.arange(len(starts)), inside.sum(axis=1)] == limits
    return places[inside] if met[:-1].all() else None


def _one_by_one(data: Bytes, size: int) -> tuple[Positions, Positions, int]:
    """The events of any data: all places that could begin one, and of them those that are reached."""
    begin = np.flatnonzero(data[:size] == EVENT_TAG)
    first, second = (data[begin + number].astype(np.int64) for number in (1, 2))
    length = np.where(first < 0x80, first, (first & 0x7F) | (second & 0x7F) << 7)
    head = np.where(first < 0x80, 2, 3)
    longer = np.flatnonzero((first >= 0x80) & (second >= 0x80))
    for row in longer.tolist():
        try:
            number, behind = varint(data[begin[row] + 1 : begin[row] + 6].tobytes(), 0)
        except WireError:
            number, behind = size, 1
        length[row], head[row] = number, behind + 1
    follows = begin + head + length
    inside = follows <= size
    begin, follows, head = begin[inside], follows[inside], head[inside]
    if not len(begin) or begin[0] != 0:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, 0
    chain = _chain(begin, follows, size)
    return begin[chain] + head[chain], follows[chain], int(follows[chain[-1]])


def _chain(begin: Positions, follows: Positions, size: int) -> Positions:
    """Which of the places that could begin an event are reached from the first one."""
    count = len(begin)
    number = np.full(size + 1, count, np.int64)
    number[begin] = np.arange(count)
    following = np.append(number[follows], count)
    leap = following
    for _ in range(4):  # sixteen at a step
        leap = leap[leap]
    anchors, item, at = [], leap.item, 0
    while at != count:
        anchors.append(at)
        at = item(at)
    reached = np.empty((_STEPS, len(anchors)), np.int64)
    reached[0] = anchors
    for step in range(1, _STEPS):
        reached[step] = following[reached[step - 1]]
    chain = reached.T.ravel()
    result: Positions = chain[chain != count]
    return result
