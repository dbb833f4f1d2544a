"""A quiet process: its cores, its garbage collector, its seeds; and that everything is undone."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.machine.observed import Machine, cpu_list_text
from stepscope.machine.quiet import core_share, device_nodes, prepare_quiet, quiet_steps
from tests.unit.machines import allowed, control_group, machine, server


@pytest.fixture(autouse=True)
def undisturbed() -> Iterator[None]:
    """What a test leaves behind would make the next ones lie."""
    gc.unfreeze()
    before = surroundings()
    yield
    gc.enable()
    assert surroundings() == before


def collector() -> tuple[bool, tuple[int, ...], bool]:
    """Whether anything is frozen, not how much: frozen objects still die with their last reference."""
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0


def surroundings() -> list[Any]:
    return [collector(), os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS"), list(sys.meta_path)]


@pytest.mark.parametrize(
    ("rank", "cores"),
    [(0, "0-1,8-9"), (1, "2-3,10-11"), (2, "4-5,12-13"), (3, "6-7,14-15")],
)
def test_ranks_share_the_cores_near_their_devices(tmp_path: Path, rank: int, cores: str) -> None:
    share = core_share(machine(tmp_path, server()), rank, 4)

    assert share.cores is not None
    assert cpu_list_text(share.cores) == cores
    assert share.threads == 2
    assert share.why == (
        f"pinned to cores {cores}: 2 physical cores, "
        f"on NUMA node {rank // 2}, which the device of local rank {rank} is attached to"
    )


@pytest.mark.parametrize(
    ("environ", "ranks", "cores"),
    [
        ({}, 1, "0-3,8-11"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1, "4-7,12-15"),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 2, "4-7,12-15"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab12,GPU-cd34"}, 2, "0-3,8-11"),  # unknown nodes: an equal part of all
        ({"CUDA_VISIBLE_DEVICES": "1"}, 2, "0-3,8-11"),  # what the other rank sees is not known
    ],
)
def test_visible_devices_decide(tmp_path: Path, environ: dict[str, str], ranks: int, cores: str) -> None:
    share = core_share(machine(tmp_path, server(), environ=environ), 0, ranks)
    assert share.cores is not None
    assert cpu_list_text(share.cores) == cores


def test_devices_of_unknown_name_have_unknown_nodes(tmp_path: Path) -> None:
    assert device_nodes(machine(tmp_path, server(), environ={"CUDA_VISIBLE_DEVICES": "MIG-1"})) is None
    assert device_nodes(machine(tmp_path, server(), environ={"CUDA_VISIBLE_DEVICES": ""})) is None
    assert device_nodes(machine(tmp_path, server(), environ={"CUDA_VISIBLE_DEVICES": "7"})) is None
    assert device_nodes(machine(tmp_path, server())) == [0, 0, 1, 1]
    assert device_nodes(machine(tmp_path / "none")) is None


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_shares_are_whole_cores_that_nobody_else_has(tmp_path: Path, ranks: int) -> None:
    computer = machine(tmp_path, server(), environ={"CUDA_VISIBLE_DEVICES": ""})
    shares = [core_share(computer, rank, ranks).cores for rank in range(ranks)]

    assert frozenset().union(*(share or () for share in shares)) == set(range(16))
    assert sum(len(share or ()) for share in shares) == 16
    assert all(share and {core % 8 for core in share if core < 8} == {core % 8 for core in share} for share in shares)


def test_a_process_that_is_alone_stays(tmp_path: Path) -> None:
    share = core_share(machine(tmp_path, allowed("0-7")), 0, 1)
    assert (share.cores, share.threads, share.possible) == (None, None, True)
    assert share.why == "left on all its cores (0-7): it is alone, and no NUMA node is known to be closer"


def test_a_process_that_was_bound_stays(tmp_path: Path) -> None:
    share = core_share(machine(tmp_path, server("2-3,10-11")), 1, 4)
    assert (share.cores, share.why) == (None, "left on cores 2-3,10-11, to which it was already bound")


def test_a_quota_limits_threads(tmp_path: Path) -> None:
    files = {**allowed("0-7"), **control_group(2, cpu_max="200000 100000")}
    assert core_share(machine(tmp_path, files), 0, 1).threads == 2
    assert core_share(machine(tmp_path, files), 1, 2).threads == 1


def test_too_few_cores_are_refused_gently(tmp_path: Path) -> None:
    report = prepare_quiet(1, 4, machine=machine(tmp_path, allowed("0-1")))
    assert (report.cores, report.done) == ((), [])
    assert report.sentences() == [
        "Quiet machine, not done: the process is not pinned: "
        "2 physical cores are too few to give each of 4 ranks its own."
    ]


def test_a_system_without_cores_to_choose_is_refused_gently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not say which cores" in prepare_quiet(0, 1, machine=machine(tmp_path)).refused[0]
    monkeypatch.delattr(os, "sched_setaffinity")
    report = prepare_quiet(0, 2, machine=machine(tmp_path, allowed("0-1")))
    report.undo()
    assert "does not support it" in report.refused[0]


def test_cores_that_the_system_does_not_give_are_refused_gently(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    report = prepare_quiet(1, 2, machine=machine(tmp_path, allowed("0,900")))
    report.undo()
    assert report.cores == ()
    assert "the system refuses (Invalid argument)" in report.refused[0]
    assert os.sched_getaffinity(0) == before


def in_a_process(program: str, **variables: str) -> Any:
    """What a program prints as JSON, in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
    return json.loads(done.stdout)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_this_process_is_pinned_and_given_back() -> None:
    said = in_a_process(
        """
        import json, os, threading
        from stepscope.machine.quiet import prepare_quiet

        begun, ended = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: (begun.set(), ended.wait()))
        thread.start(); begun.wait()
        before = [sorted(os.sched_getaffinity(t)) for t in (0, thread.native_id)]
        os.environ.pop("OMP_NUM_THREADS", None)
        report = prepare_quiet(3, 2)  # a global rank: the second of two on this machine
        during = [sorted(os.sched_getaffinity(t)) for t in (0, thread.native_id)]
        variable = os.environ.get("OMP_NUM_THREADS")
        report.undo(); report.undo()
        after = [sorted(os.sched_getaffinity(t)) for t in (0, thread.native_id)]
        ended.set()
        print(json.dumps([before, during, after, report.cores, report.done, variable, "OMP_NUM_THREADS" in os.environ]))
        """
    )
    before, during, after, cores, done, variable, left = said

    assert during == [cores, cores]
    assert set(cores) < set(before[0])
    assert after == before
    assert done[0].startswith(f"pinned to cores {cpu_list_text(tuple(cores))}: ")
    assert done[1].startswith(f"OMP_NUM_THREADS={variable} is set")
    assert not left


def test_pytorchs_threads_are_limited_and_given_back(tmp_path: Path) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    files = {**allowed("0-7"), **control_group(2, cpu_max="200000 100000")}
    try:
        report = prepare_quiet(0, 1, machine=machine(tmp_path, files))
        assert torch.get_num_threads() == 2
        assert "PyTorch uses 2 threads instead of 3" in report.done
        report.undo()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("was_on", [True, False])
def test_nothing_is_collected_during_quiet_steps(was_on: bool) -> None:
    gc.enable() if was_on else gc.disable()
    before = collector()
    collections = []
    gc.callbacks.append(lambda phase, _: collections.append(phase))
    try:
        with quiet_steps() as report:
            frozen = gc.get_freeze_count()
            collections.clear()
            for _ in range(5 * gc.get_threshold()[0]):
                cycle: list[Any] = []
                cycle.append([cycle])
            assert collections == []
            assert not gc.isenabled()
    finally:
        gc.callbacks.pop()
    assert collector() == before
    assert frozen > 0
    assert re.fullmatch(r"garbage collection held off during the recorded steps, [\d,]+ objects frozen", report.done[0])
    gc.enable()


def test_the_collector_is_restored_when_the_block_raises() -> None:
    before = collector()
    with contextlib.suppress(KeyError), quiet_steps():
        gc.enable()  # whatever the program does meanwhile
        raise KeyError
    assert collector() == before


def test_quiet_steps_may_be_nested() -> None:
    before = collector()
    with quiet_steps():
        with quiet_steps():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert collector() == before


def test_objects_that_the_program_froze_stay_frozen() -> None:
    kept: list[Any] = []
    gc.freeze()
    try:
        with quiet_steps() as report:
            assert not gc.isenabled()
        assert not any(each is kept for each in gc.get_objects())  # which lists what is not frozen
        assert report.done[0].endswith("the program's frozen objects kept")
    finally:
        gc.unfreeze()


def test_a_forked_child_collects_again() -> None:
    assert in_a_process(
        """
        import gc, json, os
        from stepscope.machine.quiet import quiet_steps
        read, write = os.pipe()
        with quiet_steps():
            if os.fork() == 0:
                os.write(write, json.dumps([gc.isenabled(), gc.get_freeze_count()]).encode())
                os._exit(0)
            os.wait()
            held = not gc.isenabled()
        print(json.dumps([json.loads(os.read(read, 100)), held, gc.isenabled()]))
        """
    ) == [[True, 0], True, True]


def test_what_the_program_does_to_its_own_timings_is_said() -> None:
    import torch

    with torch.autograd.set_detect_anomaly(True), quiet_steps() as report:
        pass
    with quiet_steps() as calm:
        pass
    assert "Anomaly mode is on" in report.noise[0]
    assert calm.noise == []


SEEDED = """
import json, importlib.util, sys
from stepscope.machine.quiet import prepare_quiet
early = {early}
if early:
    import numpy, torch
report = prepare_quiet(0, 1, seed=7)
importlib.util.find_spec("torch")  # a look is no import
import random
drawn = [random.random()]
import numpy, torch
drawn += [numpy.random.rand(), torch.rand(1).item()]
random.seed(7); numpy.random.seed(7); torch.manual_seed(7)
report.undo()
hooks = [type(finder).__name__ for finder in sys.meta_path if "Seed" in type(finder).__name__]
print(json.dumps([drawn, [random.random(), numpy.random.rand(), torch.rand(1).item()], report.refused, hooks]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_seeds_are_fixed_before_and_after_the_import(early: bool) -> None:
    drawn, expected, refused, hooks = in_a_process(SEEDED.format(early=early), PYTHONHASHSEED="random")
    assert drawn == expected
    assert hooks == []
    assert any("PYTHONHASHSEED" in phrase for phrase in refused)


def test_seeds_are_left_alone_unless_asked_for() -> None:
    state = random.getstate()
    prepare_quiet(0, 1, machine=Machine(root=Path("/nowhere"))).undo()
    assert random.getstate() == state
