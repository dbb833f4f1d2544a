"""Noting when steps end, in the process that takes them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.compare.bench import Record, job_ends_ns, read_records
from stepscope.record.bench_steps import BenchSteps, DeviceMarks, ends_from_gaps
from stepscope.record.controller import StepController, StepSource
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RunOptions


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "A-1", RunManifest(("train.py",)))


def listening(folder: RunFolder, steps: int) -> StepController:
    controller = StepController()
    controller.listener = BenchSteps(controller, folder, RunOptions(steps=steps, measure=True))
    return controller


def test_the_program_is_ended_after_its_steps(folder: RunFolder) -> None:
    controller = listening(folder, steps=3)
    before = time.perf_counter_ns()
    for _ in range(3):
        controller.step_boundary()
    with pytest.raises(SystemExit) as ended:
        controller.step_boundary()

    assert ended.value.code == 0
    [record] = read_records(folder)
    assert (record.rank, record.world_size, record.source, record.clock) == (0, 1, "explicit", "host")
    assert (record.complete, record.own_profiler, record.said, len(record.ends_ns)) == (True, False, (), 4)
    assert before < record.ends_ns[0] < record.ends_ns[-1] < time.perf_counter_ns()
    assert list(record.ends_ns) == sorted(record.ends_ns)
    controller.step_boundary()  # nobody listens any more


def test_a_program_that_ends_earlier_leaves_the_steps_it_took(folder: RunFolder) -> None:
    controller = listening(folder, steps=50)
    for _ in range(5):
        controller.step_boundary()
    listener = controller.listener
    assert isinstance(listener, BenchSteps)
    listener.program_ends()
    listener.program_ends()

    [record] = read_records(folder)
    assert (record.complete, len(record.ends_ns)) == (False, 5)


def test_a_program_without_steps_leaves_nothing(folder: RunFolder) -> None:
    listener = listening(folder, steps=3).listener
    assert isinstance(listener, BenchSteps)
    listener.program_ends()
    assert read_records(folder) == []


def test_steps_by_a_better_sign_replace_the_others(folder: RunFolder) -> None:
    controller = listening(folder, steps=4)
    for _ in range(4):
        controller.step_boundary(StepSource.LOADER)
    for _ in range(4):
        controller.step_boundary(StepSource.OPTIMIZER)
    with pytest.raises(SystemExit):
        controller.step_boundary(StepSource.OPTIMIZER)

    [record] = read_records(folder)
    assert (record.source, len(record.ends_ns), controller.current_step()) == ("optimizer", 5, 4 + 5)


def test_guessed_steps_end_the_program_only_where_no_optimizer_is_waited_for(folder: RunFolder) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    controller = listening(folder, steps=2)
    for _ in range(10):
        controller.step_boundary(StepSource.LOADER)
    assert read_records(folder) == []
    del optimizer


def record(*ends_ns: int, rank: int = 0, machine: str = "host") -> Record:
    return Record(rank, 2, machine, "optimizer", "host", True, ends_ns, False, ())


def test_a_step_of_several_ranks_ends_with_the_last_one() -> None:
    assert job_ends_ns([]) == []
    assert job_ends_ns([record(10, 20, 30)]) == [10, 20, 30]
    assert job_ends_ns([record(10, 25, 30), record(12, 21, 33, 40, rank=1)]) == [12, 25, 33]


def write(folder: RunFolder, rank: int, process: int, **changes: Any) -> None:
    content = {
        "process": process,
        "machine": "host",
        "world_size": 2,
        "source": "optimizer",
        "clock": "host",
        "complete": True,
        "ends_ns": [1, 2, 3],
        "own_profiler": False,
        "said": [],
        **changes,
    }
    (folder.rank_folder(rank) / f"steps-{process}.json").write_text(json.dumps(content))


def test_of_a_rank_the_process_with_most_steps_counts(folder: RunFolder) -> None:
    write(folder, 0, 11, ends_ns=[1, 2])
    write(folder, 0, 12, ends_ns=[5, 6, 7])
    write(folder, 1, 13, ends_ns=[4, 6, 8])
    assert read_records(folder) == [record(5, 6, 7), record(4, 6, 8, rank=1)]


def test_ranks_on_other_machines_have_other_clocks(folder: RunFolder) -> None:
    write(folder, 0, 11)
    write(folder, 1, 12, machine="another")
    assert read_records(folder) == [record(1, 2, 3)]


def test_damaged_files_are_passed_over(folder: RunFolder) -> None:
    (folder.rank_folder(0) / "steps-1.json").write_text("{")
    (folder.rank_folder(0) / "steps-2.json").write_text("[]")
    write(folder, 0, 3, ends_ns=["no", "numbers"])
    assert read_records(folder) == []


def test_times_of_events_follow_from_the_last_and_the_gaps() -> None:
    assert ends_from_gaps([], 7_000_000) == [7_000_000]
    assert ends_from_gaps([1.0, 2.5], 7_000_000) == [3_500_000, 4_500_000, 7_000_000]


def test_a_process_that_uses_no_device_has_the_hosts_clock() -> None:
    assert DeviceMarks.of_this_process() is None


@pytest.mark.gpu
def test_steps_end_when_the_device_comes_to_their_end() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    matrix = torch.ones(4096, 4096, device="cuda")
    torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    marks = DeviceMarks.of_this_process()
    assert marks is not None
    begun = time.perf_counter_ns()
    for _ in range(5):
        for _ in range(20):
            torch.mm(matrix, matrix)
        assert marks.mark()
    launched = time.perf_counter_ns()
    ends = marks.ends_ns()

    assert ends == sorted(ends)
    assert begun < ends[0]
    assert launched < ends[-1] <= time.perf_counter_ns()
