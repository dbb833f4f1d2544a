"""The compiled scanner and the Python readers make the same of every file: tables, metadata, warnings or refusal."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from stepscope.errors import StepscopeError
from stepscope.readers import kineto, open_trace, source
from stepscope.readers.kineto import events, scanned
from stepscope.trace.tables import SCHEMAS
from stepscope.trace.window import StepRange, Window
from tests.fuzz import seeds
from tests.fuzz.containers import changed, raw_bytes
from tests.property.documents import EVERY_KIND, small_pieces
from tests.property.event_runs import changed_run, check_run, runs
from tests.property.spellings import respelled
from tests.simulator import Machine, kineto_bytes
from tests.simulator.strategies import programs
from tests.tries import TIMES

pytestmark = pytest.mark.skipif(not scanned.is_built(), reason="the scanner was not built: there is no compiler")
TRIES = int(os.environ.get("STEPSCOPE_TRIES", "40"))
FIRST = int(os.environ.get("STEPSCOPE_FIRST", "0"))
"""Number of the first changed file, for other ones."""
LARGEST_BYTES = 1_000_000
"""Of a real trace: the numbers in larger ones are those of facts.json, says tests/golden/test_real_traces.py."""


class CountedScan:
    """The scanner, or one that accepts nothing; `accepted` counts the texts that it read."""

    def __init__(self, *, works: bool) -> None:
        self.accepted = 0
        self._works = works

    def __call__(self, text: bytes, *, exact: bool) -> scanned.Scan | None:
        found = scanned.scan(text, exact=exact) if self._works else None
        self.accepted += found is not None
        return found


def outcome(path: Path, scan: CountedScan, window: Window | None, steps: StepRange | None) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kineto, "scan", scan)
        try:
            trace = open_trace(path, window=window, steps=steps)
        except StepscopeError as error:
            return type(error), str(error)
        return trace.metadata, trace.warnings, {table: trace.table(table) for table in SCHEMAS}


def check_both(path: Path, *, window: Window | None = None, steps: StepRange | None = None) -> int:
    """Assert that both readers agree on a file, and return how many of its texts were scanned."""
    scan = CountedScan(works=True)
    fast = outcome(path, scan, window, steps)
    if scan.accepted:  # else all of it was read by the Python reader
        plain = outcome(path, CountedScan(works=False), window, steps)
        assert fast[:2] == plain[:2]
        if len(plain) == 3:
            assert [name for name in SCHEMAS if not fast[2][name].equals(plain[2][name])] == []
    return scan.accepted


def test_a_file_of_every_kind_of_event_is_scanned(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(EVERY_KIND.text)
    assert check_both(path)
    for end in (0, 1, 10**5, 10**6):
        check_both(path, window=Window(0, end))
    check_both(path, steps=StepRange(0, 1))


def changed_somehow(random: Random, text: bytes, name: str) -> bytes:
    how = random.random()
    if how < 0.6:
        return respelled(random, text)
    return raw_bytes(random, text) if how < 0.8 else changed(random, text, name)


@pytest.mark.slow
def test_changed_files_are_read_the_same(tmp_path: Path) -> None:
    texts = [next(iter(case.files.values())) for case in (*seeds.kineto(), *seeds.chrome())]
    path = tmp_path / "trace.json"
    scanned_files = 0
    for number in range(TRIES):
        random = Random(f"scanner {FIRST + number}")
        path.write_bytes(changed_somehow(random, random.choice(texts), path.name))
        window = Window(0, random.choice((1, 10**6))) if random.random() < 0.05 else None
        with small_pieces(random.random() < 0.4):
            try:
                scanned_files += check_both(path, window=window) > 0
            except AssertionError as error:
                raise AssertionError(f"input {FIRST + number}: {error}") from error
    assert scanned_files > TRIES / 4  # not all damage keeps the scanner from reading a file


EVENT = b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":2,"ts":%d.%03d,"dur":1}'
EVENTS = b",".join(EVENT % (number, number) for number in range(300))
LATER_AND_LATER = b",".join(EVENT % (10 ** (number // 20), number) for number in range(300))
WITH_STATE = (
    EVERY_KIND.text,
    b'{"traceEvents":[%b],"more":[%b],"distributedInfo":{"rank":3}}' % (EVENTS, EVENTS),
    b'{"traceEvents":[%b]}' % LATER_AND_LATER,
    b'{"traceEvents":[%b' % EVENTS,
)
"""Documents of which one piece tells how later ones are read."""


@pytest.mark.slow
def test_threads_make_no_difference(tmp_path: Path) -> None:
    texts = [next(iter(case.files.values())) for case in (*seeds.kineto(), *seeds.chrome())]
    path = tmp_path / "trace.json"
    for number in range(len(WITH_STATE) + TRIES // 2):
        random = Random(f"threads {FIRST + number}")
        changed_text = changed_somehow(random, random.choice(texts), path.name)
        path.write_bytes(WITH_STATE[number] if number < len(WITH_STATE) else changed_text)
        found = []
        for threads in (0, 1, 3):
            with small_pieces(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(source, "spare_threads", lambda threads=threads: threads)
                patch.setattr(events, "spare_threads", lambda threads=threads: threads)
                found.append(outcome(path, CountedScan(works=True), None, None))
        for other in found[1:]:
            assert found[0][:2] == other[:2], FIRST + number
            if len(other) == 3:
                assert [name for name in SCHEMAS if not found[0][2][name].equals(other[2][name])] == [], FIRST + number


@pytest.mark.slow
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(machine=programs())
def test_every_program_of_the_simulated_machine_is_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, machine: Machine
) -> None:
    path = tmp_path_factory.mktemp("scanner") / "trace.json"
    path.write_bytes(kineto_bytes(machine))
    assert check_both(path)


@pytest.mark.traces
@pytest.mark.slow
def test_real_traces_are_read_the_same(traces_folder: Path) -> None:
    files = [path for path in sorted(traces_folder.rglob("*.json*")) if path.stat().st_size < TIMES * LARGEST_BYTES]
    assert sum(check_both(path) for path in files) > len(files)


def xplane_outcome(path: Path, *, is_scanned: bool) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if not is_scanned:
            patch.setattr(scanned, "xplane_events", lambda data, roles: None)
        try:
            trace = open_trace(path)
        except StepscopeError as error:
            return type(error), str(error)
        return trace.metadata, trace.warnings, {table: trace.table(table) for table in SCHEMAS}


def check_profile(path: Path) -> None:
    fast, plain = (xplane_outcome(path, is_scanned=is_scanned) for is_scanned in (True, False))
    assert fast[:2] == plain[:2]
    if len(plain) == 3:
        assert [name for name in SCHEMAS if not fast[2][name].equals(plain[2][name])] == []


def test_runs_of_events_of_an_xla_profile_are_decoded_the_same() -> None:
    whole = list(runs([next(iter(case.files.values())) for case in seeds.xplane()]))
    random = Random(f"runs {FIRST}")
    accepted = sum(check_run(random, changed_run(random, random.choice(whole))) for _ in range(TRIES))
    assert all(check_run(random, run) for run in whole)
    assert accepted > TRIES / 4


@pytest.mark.slow
def test_changed_profiles_of_xla_are_read_the_same(tmp_path: Path) -> None:
    spaces = [next(iter(case.files.values())) for case in seeds.xplane()]
    path = tmp_path / "changed.xplane.pb"
    for number in range(TRIES):
        random = Random(f"profile {FIRST + number}")
        path.write_bytes(changed(random, random.choice(spaces), path.name))
        try:
            check_profile(path)
        except AssertionError as error:
            raise AssertionError(f"input {FIRST + number}: {error}") from error


@pytest.mark.traces
@pytest.mark.slow
def test_real_profiles_of_xla_are_read_the_same(traces_folder: Path) -> None:
    files = sorted(traces_folder.rglob("*.xplane.pb*"))
    assert files
    for path in files:
        check_profile(path)
