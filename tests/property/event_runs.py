"""Runs of events of XLA's profiles, whole and damaged, for the compiled scanner beside the Python reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import numpy as np

from stepscope.readers.kineto import scanned
from stepscope.readers.xplane.content import PADDING, fields
from stepscope.readers.xplane.events import Batch, batch_of, event_bounds, read_events
from tests.fuzz.containers import raw_bytes
from tests.fuzz.messages import changed_message
from tests.unit.xplanes import part

EVENTS = 4
MOST_BYTES = 20_000


def runs(spaces: list[bytes]) -> Iterator[bytes]:
    """The events of each line of some profiles, up to MOST_BYTES of each."""
    for space in spaces:
        planes = [value for number, _, value in fields(space) if number == 1 and isinstance(value, bytes)]
        lines = [value for plane in planes for number, _, value in fields(plane) if number == 3]
        for line in lines:
            assert isinstance(line, bytes)
            events = [value for number, _, value in fields(line) if number == EVENTS]
            run = b"".join(part(EVENTS, event) for event in events)
            if run:
                yield run[:MOST_BYTES]


def changed_run(random: Random, run: bytes) -> bytes:
    """The run with something wrong in it, cut off, or as it is."""
    chance = random.random()
    if chance < 0.1:
        return run
    if chance < 0.4:
        return run[: random.randrange(len(run))]
    return raw_bytes(random, run) if chance < 0.7 else changed_message(random, run)


def check_run(random: Random, run: bytes) -> bool:
    """Assert that the scanner gives what the Python reader gives, and return whether it accepted the run."""
    roles = np.array([random.choice((0, 0, random.randrange(1, 20))) for _ in range(random.choice((1, 40, 400)))])
    found = scanned.xplane_events(run, roles.astype(np.int64).tobytes())
    if found is None or not found[0]:
        return False
    data = np.frombuffer(run + bytes(PADDING), np.uint8)
    starts, ends, behind = event_bounds(data, len(run))
    damage: Counter[str] = Counter()
    expected = _columns(read_events(data, starts, ends, roles, damage))
    assert found[0] == behind
    assert not damage
    assert _columns(batch_of(run, found)) == expected
    return True


def _columns(batch: Batch) -> list[list[int]]:
    stats = batch.stats
    order = np.argsort(stats.event, kind="stable")
    columns = [getattr(stats, name)[order] for name in ("role", "event", "tag", "number", "content")]
    return [each.tolist() for each in (batch.name, batch.start_ns, batch.duration_ns, batch.lasts, *columns)]
