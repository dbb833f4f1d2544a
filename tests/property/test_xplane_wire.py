"""XLA's profiles byte by byte: many messages decoded at once are what one at a time gives; damage never goes far."""

from __future__ import annotations

import contextlib
import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.readers import open_trace
from stepscope.readers.xplane.content import PADDING, WireError, fields, varint, varints, words_at
from stepscope.readers.xplane.events import event_bounds, read_events
from tests.unit.xplanes import part
from tests.unit.xplanes import varint as encoded

NUMBERS = (
    st.integers(0, 2**64 - 1) | st.integers(0, 300) | st.sampled_from([2**7 - 1, 2**56 - 1, 2**56, 2**63, 2**64 - 1])
)
TIMES = st.integers(0, 2**61)
PROFILE = Path(__file__).resolve().parents[1] / "fixtures" / "jax_training_cpu.xplane.pb.gz"


def examples(count: int) -> settings:
    """So many examples, each with time enough, all in one folder."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(deadline=None, max_examples=count, suppress_health_check=slow)


@given(st.lists(NUMBERS, min_size=1, max_size=50))
def test_numbers_read_together_are_those_read_alone(numbers: list[int]) -> None:
    parts = [encoded(number) for number in numbers]
    data = np.frombuffer(b"".join(parts) + bytes(PADDING), np.uint8)
    at = np.cumsum([0, *map(len, parts[:-1])])

    values, lengths = varints(data, words_at(data), at)

    assert values.tolist() == numbers
    assert lengths.tolist() == [len(each) for each in parts]
    assert [varint(data.tobytes(), place) for place in at.tolist()] == [
        (number, place + len(each)) for number, place, each in zip(numbers, at.tolist(), parts, strict=True)
    ]


def test_a_number_that_does_not_end_has_no_length() -> None:
    data = np.frombuffer(b"\xff" * 11 + bytes(PADDING), np.uint8)

    assert varints(data, words_at(data), np.array([0]))[1].tolist() == [0]


@examples(100)
@given(
    st.lists(st.binary(max_size=300) | st.binary(min_size=20_000, max_size=20_010), max_size=40), st.binary(max_size=3)
)
def test_events_are_found_where_they_follow_each_other(bodies: list[bytes], behind: bytes) -> None:
    written = [part(4, body) for body in bodies]
    size = sum(map(len, written))
    tail = bytes(byte for byte in behind if byte != 0x22)
    data = np.frombuffer(b"".join(written) + tail + bytes(PADDING), np.uint8)

    starts, ends, end = event_bounds(data, size + len(tail))

    assert [data[start:stop].tobytes() for start, stop in zip(starts.tolist(), ends.tolist(), strict=True)] == bodies
    assert end == (size if bodies else 0)


def one_after_another(data: bytes) -> list[tuple[int, int]]:
    """Start and end of each event from the beginning on, found by going from one to the next."""
    found: list[tuple[int, int]] = []
    at = 0
    with contextlib.suppress(WireError):
        while data[at : at + 1] == b"\x22":
            length, start = varint(data, at + 1)
            if start + length > len(data):
                break
            at = start + length
            found.append((start, at))
    return found


@pytest.mark.parametrize("damaged", [0, 1, 30])
def test_events_of_many_blocks_are_those_that_follow_one_by_one(damaged: int) -> None:
    """Beyond a few KiB all blocks are followed at once, statistics look like events, and any byte may be wrong."""
    rng = random.Random(damaged)
    for _ in range(50):
        stats = [part(4, part(1, 34) + part(3, number)) for number in (34, 0x2222, 2**40)]
        events = [part(4, part(1, rng.randrange(300)) + b"".join(rng.choices(stats, k=rng.randrange(12))))]
        events += [part(4, part(1, rng.randrange(300)) + rng.choice(stats)) for _ in range(rng.randrange(3000))]
        events.insert(rng.randrange(len(events)), part(4, rng.randbytes(rng.choice([0, 130, 20_000]))))
        written = bytearray(b"".join(events))
        for _ in range(damaged):
            written[rng.randrange(len(written))] = rng.choice([0x22, 0, 0x80, 0xFF, rng.randrange(256)])
        del written[len(written) - rng.randrange(1, 12) :]
        data = np.frombuffer(bytes(written) + bytes(PADDING), np.uint8)

        starts, ends, end = event_bounds(data, len(written))

        expected = one_after_another(bytes(written))
        assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == expected
        assert end == (expected[-1][1] if expected else 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), TIMES, TIMES, st.lists(st.tuples(st.integers(1, 400), NUMBERS), max_size=4)),
        max_size=30,
    )
)
def test_events_have_the_fields_that_were_written(events: list[tuple[int, int, int, list[tuple[int, int]]]]) -> None:
    bodies = [
        part(1, name)
        + (part(2, offset) if offset else b"")
        + (part(3, duration) if duration else b"")
        + b"".join(part(4, part(1, number) + part(3, value)) for number, value in stats)
        for name, offset, duration, stats in events
    ]
    data = np.frombuffer(b"".join(part(4, body) for body in bodies) + bytes(PADDING), np.uint8)
    starts, ends, _ = event_bounds(data, len(data) - PADDING)
    roles = np.zeros(301, np.int64)
    roles[1:301] = 1 + np.arange(300) % 3
    damage: Counter[str] = Counter()

    batch = read_events(data, starts, ends, roles, damage)

    assert not damage
    assert batch.name.tolist() == [name for name, *_ in events]
    assert batch.start_ns.tolist() == [offset // 1000 for _, offset, _, _ in events]
    assert batch.duration_ns.tolist() == [
        (offset + duration) // 1000 - offset // 1000 for _, offset, duration, _ in events
    ]
    assert batch.lasts.tolist() == [duration > 0 for _, _, duration, _ in events]
    wanted = sorted(
        (event, int(roles[number]), value)
        for event, (*_, stats) in enumerate(events)
        for number, value in stats
        if number < len(roles)
    )
    found = batch.stats
    assert sorted(zip(found.event.tolist(), found.role.tolist(), found.number.tolist(), strict=True)) == wanted


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert sum(len(value) for _, _, value in fields(data) if isinstance(value, bytes)) <= len(data)


def is_read_or_refused(path: Path, data: bytes) -> bool:
    """Whether a trace came out, which keeps its promises; else the file was refused."""
    path.write_bytes(data)
    try:
        trace = open_trace(path)
    except StepscopeError:
        return False
    trace.check()
    return True


@examples(20)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_flipped_bytes_are_skipped_or_refused(tmp_path: Path, chance: random.Random, count: int) -> None:
    data = bytearray(gzip.decompress(PROFILE.read_bytes()))
    for _ in range(count):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)

    is_read_or_refused(tmp_path / "flipped.xplane.pb", bytes(data))


@examples(8)
@given(st.floats(0, 1))
def test_a_cut_file_is_read_as_far_as_it_goes_or_refused(tmp_path: Path, share: float) -> None:
    data = gzip.decompress(PROFILE.read_bytes())

    is_read_or_refused(tmp_path / "cut.xplane.pb", data[: max(1, int(len(data) * share))])


@examples(30)
@given(st.binary(max_size=400))
def test_random_bytes_behind_the_beginning_of_a_profile_are_refused_or_read(tmp_path: Path, data: bytes) -> None:
    name = part(2, "/host:CPU")
    assert not is_read_or_refused(tmp_path / "random.xplane.pb", part(1, name) + data) or data
    is_read_or_refused(tmp_path / "random.xplane.pb", part(1, name + data))
    is_read_or_refused(tmp_path / "random.xplane.pb", part(1, name + part(3, data)))


@pytest.mark.parametrize("packed", ["gz", "plain"])
def test_the_sample_is_read_packed_and_plain(tmp_path: Path, packed: str) -> None:
    data = PROFILE.read_bytes()
    assert is_read_or_refused(tmp_path / "sample", data if packed == "gz" else gzip.decompress(data))
