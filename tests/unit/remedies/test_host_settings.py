"""Garbage at step borders, processors and threads."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepscope.remedies import settings
from stepscope.remedies.settings import collect_garbage_at_steps, quota, thread_counts, usable_cores, usable_processors

SOURCES = str(Path(settings.__file__).parents[2])


class Cycle:
    """Freed by the collector only."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector as other tests want it, whatever happens here."""
    enabled = gc.isenabled()
    gc.unfreeze()
    yield
    (gc.enable if enabled else gc.disable)()
    gc.unfreeze()


def test_garbage_is_collected_at_borders_only() -> None:
    gc.enable()
    with collect_garbage_at_steps(every=3) as garbage:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        freed = []
        for _ in range(6):
            Cycle()
            freed.append(garbage.step())

    assert [number > 0 for number in freed] == [False, False, True, False, False, True]
    assert garbage.collections == 2
    assert garbage.collected_ns > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_state_is_put_back_after_an_exception(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()

    with pytest.raises(ZeroDivisionError), collect_garbage_at_steps():
        raise ZeroDivisionError

    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() == 0


def test_the_first_step_starts_it() -> None:
    gc.enable()
    garbage = collect_garbage_at_steps(every=2)
    assert gc.isenabled()

    garbage.step()
    assert not gc.isenabled()
    garbage.close()
    garbage.close()

    assert gc.isenabled()


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    with collect_garbage_at_steps():
        later = Cycle()
    # Frozen objects still die when their last reference does, so their number is no constant.
    assert gc.get_freeze_count() > 0
    assert any(each is later for each in gc.get_objects())
    gc.unfreeze()

    with collect_garbage_at_steps(freeze=False):
        assert gc.get_freeze_count() == 0


def test_one_inside_another() -> None:
    gc.enable()
    with collect_garbage_at_steps():
        with collect_garbage_at_steps():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_collects_by_itself() -> None:
    code = (
        "import gc, os\n"
        "from stepscope.remedies.settings import collect_garbage_at_steps\n"
        "with collect_garbage_at_steps():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os._exit(10 + gc.isenabled())\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gc.isenabled())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": SOURCES}, capture_output=True, text=True, check=True
    )

    assert done.stdout == "11 False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every is 0; it takes a whole number from 1 on"),
        ({"every": 2.5}, "every is 2.5"),
        ({"generation": 3}, "generation is 3; it takes 0, 1 or 2"),
    ],
)
def test_numbers_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect_garbage_at_steps(**arguments)


def machine(folder: Path, files: dict[str, str]) -> Path:
    """A root folder with these files of the kernel."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/job/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/user/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n1:name=systemd:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "nonsense\n0::/\n", "sys/fs/cgroup/cpu.max": "1 2 3"}, None),
    ],
)
def test_the_quota_of_control_groups(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    assert quota(machine(tmp_path, files)) == expected


def test_cores_are_counted_once_and_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "allowed_processors", lambda: {0, 1, 2, 3, 4, 5})
    siblings = {0: "0,3", 3: "0,3", 1: "1,4", 4: "1,4", 2: "2,5", 5: "2,5"}
    root = machine(
        tmp_path,
        {f"sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list": text for one, text in siblings.items()},
    )
    assert (usable_processors(root), usable_cores(root)) == (6, 3)

    machine(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})

    assert (usable_processors(root), usable_cores(root)) == (2, 2)


@pytest.mark.parametrize(
    ("count", "arguments", "intra_op"),
    [
        (16, {}, 16),
        (16, {"ranks": 4}, 4),
        (16, {"ranks": 4, "workers": 3}, 1),
        (16, {"ranks": 4, "workers": 30}, 1),
        (16, {"workers": 4}, 12),
        (2, {"ranks": 8}, 1),
        (16, {"intra_op": 5, "workers": 4}, 5),
        (16, {"environ": {"LOCAL_WORLD_SIZE": "8"}}, 2),
        (16, {"environ": {"LOCAL_WORLD_SIZE": "many"}}, 16),
    ],
)
def test_threads_follow_from_processors_ranks_and_workers(
    count: int, arguments: dict[str, Any], intra_op: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "allowed_processors", lambda: set(range(count)))
    monkeypatch.setattr(settings, "_has_its_own_processors", lambda: False)

    counts = thread_counts(**{"environ": {}, **arguments}, root=tmp_path)

    assert (counts.processors, counts.intra_op, counts.inter_op) == (count, intra_op, 1)
    assert set(counts.environment.values()) == {str(intra_op)}


def test_workers_take_the_second_threads_of_cores_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "allowed_processors", lambda: set(range(8)))
    root = machine(
        tmp_path,
        {
            f"sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list": f"{one % 4},{one % 4 + 4}"
            for one in range(8)
        },
    )

    assert [thread_counts(workers=number, ranks=1, root=root).intra_op for number in (0, 4, 5)] == [4, 4, 3]


def test_a_rank_that_was_given_its_processors_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "allowed_processors", lambda: {0, 1})
    monkeypatch.setattr(settings, "allowed_processors", lambda: {0, 1})
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: {0, 1, 2, 3}, raising=False)

    assert thread_counts(environ={"LOCAL_WORLD_SIZE": "2"}, root=tmp_path).intra_op == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": -1}, "workers is -1; it takes a whole number from 0 on"),
        ({"ranks": 0}, "ranks is 0; it takes a whole number from 1 on"),
        ({"intra_op": True}, "intra_op is True"),
    ],
)
def test_counts_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        thread_counts(**arguments)


@pytest.mark.slow
def test_a_real_process_gets_its_threads_and_says_what_came_too_late() -> None:
    code = (
        "import json, os, torch\n"
        "from stepscope.remedies.settings import set_thread_counts\n"
        "first = set_thread_counts(intra_op=3, inter_op=2)\n"
        "def too_late(number):\n"
        "    raise RuntimeError('cannot set number of interop threads after parallel work has started')\n"
        "torch.set_num_interop_threads = too_late\n"
        "second = set_thread_counts(intra_op=1, inter_op=1)\n"
        "print(json.dumps([first.intra_op, first.inter_op, first.not_set, os.environ['OMP_NUM_THREADS'],\n"
        "    torch.get_num_threads(), second.inter_op, second.not_set]))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": SOURCES}, capture_output=True, text=True, check=True
    )

    *counts, late = json.loads(done.stdout)
    assert counts == [3, 2, [], "1", 1, 2]
    assert late == [
        "torch runs 2 operators side by side, and changes that only before the first ones run: call set_thread_counts "
        "earlier"
    ]
