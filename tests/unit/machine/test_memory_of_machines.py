"""How much memory a process can use, by the machine and by its control groups."""

from __future__ import annotations

from pathlib import Path

from stepscope.machine.environment import memory_bytes
from tests.unit.machines import machine


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert memory_bytes(machine(tmp_path)) is None


def test_the_machines_memory(tmp_path: Path) -> None:
    assert memory_bytes(machine(tmp_path, {"proc/meminfo": "MemTotal:  2048 kB\nMemFree:  512 kB"})) == 2048 * 1024


def test_the_tightest_limit_of_its_control_groups(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:  2048 kB",
        "proc/4711/cgroup": "0::/jobs/train",
        "proc/4711/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/jobs/memory.max": "1000000",
        "sys/fs/cgroup/jobs/train/memory.max": "max",
    }

    assert memory_bytes(machine(tmp_path, files)) == 1_000_000
