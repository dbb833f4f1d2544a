"""What goes along with a recorded program: telemetry for the whole run, quiet while its steps are recorded."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.record.run_process import BackgroundHelpers, RunOptions
from stepscope.record.telemetry.log import telemetry as start_telemetry
from stepscope.trace.telemetry import telemetry_files


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    state = random.getstate()
    yield
    random.setstate(state)
    gc.unfreeze()
    gc.enable()


def helpers(
    folder: Path, *, telemetry: bool = False, quiet: bool = False, seed: int | None = None
) -> BackgroundHelpers:
    return BackgroundHelpers(folder, RunOptions(quiet=quiet, seed=seed), telemetry=telemetry)


def test_without_options_nothing_is_done(tmp_path: Path) -> None:
    alone = helpers(tmp_path)
    alone.begin()
    alone.recording_begins()
    assert (gc.isenabled(), alone.said, list(tmp_path.iterdir())) == (True, [], [])


def test_telemetry_is_kept_in_the_folder_of_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(
        "stepscope.record.telemetry.log.telemetry",
        lambda folder, rank: started.append(start_telemetry(folder, rank=rank)) or started[-1],
    )
    with_telemetry = helpers(tmp_path, telemetry=True)
    with_telemetry.begin()
    with_telemetry.begin()
    started[0].close()
    assert len(started) == 1
    assert [path.parent for path in telemetry_files(tmp_path)] == [tmp_path / "rank0" / "telemetry"]


def test_garbage_waits_while_steps_are_recorded(tmp_path: Path) -> None:
    quiet = helpers(tmp_path, quiet=True)
    quiet.begin()
    before = (gc.isenabled(), os.cpu_count())
    quiet.recording_begins()
    during = gc.isenabled()
    quiet.recording_ends()
    assert (before[0], during, gc.isenabled()) == (True, False, True)
    assert any("garbage collection" in sentence for sentence in quiet.said)


def test_a_seed_makes_runs_equal(tmp_path: Path) -> None:
    numbers = []
    for _ in range(2):
        helpers(tmp_path, quiet=True, seed=7).begin()
        numbers.append(random.random())
    assert numbers[0] == numbers[1]
