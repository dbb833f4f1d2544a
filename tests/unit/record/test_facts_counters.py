"""What the operating system and the collector count while steps are recorded."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
from pathlib import Path

import pytest

from stepscope.machine.environment import process_figures
from stepscope.record.counters import Counters, PauseWatch, StepCounters, WarmUp, mark, start_times

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_that_tells_all(tmp_path: Path) -> None:
    cores = {f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq": "2500000\n" for core in range(256)}
    root = written(
        tmp_path,
        {
            "proc/thread-self/schedstat": "400 7000 3\n",
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nthrottled_usec 12\n",
            "sys/fs/cgroup/job/cpu.pressure": "some avg10=0.00 total=34\nfull avg10=0.00 total=1\n",
            **cores,
        },
    )

    reading = Counters(root).read()

    assert (reading.thread_waiting_ns, reading.throttled_ns, reading.pressure_ns) == (7000, 12_000, 34_000)
    assert reading.clock_mhz in (2500.0, None)  # None where the current core is not told


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    reading = Counters(written(tmp_path, {"proc/thread-self/schedstat": "x y", "proc/pressure/cpu": "some\n"})).read()

    assert reading.thread_waiting_ns is reading.throttled_ns is reading.pressure_ns is reading.clock_mhz is None
    assert reading.thread_processor_ns >= 0


def map_pages(count: int) -> None:
    """Have so many pages of the operating system mapped."""
    with mmap.mmap(-1, count * mmap.PAGESIZE) as pages:
        if hasattr(pages, "madvise"):
            pages.madvise(mmap.MADV_NOHUGEPAGE)
        for number in range(count):
            pages[number * mmap.PAGESIZE] = 1


@linux
def test_a_warm_up_counts_the_pages_that_are_mapped() -> None:
    map_pages(1000)
    warm_up = WarmUp()
    before = warm_up.figures()["warm_up_faults"]
    map_pages(1000)
    figures = warm_up.figures()

    assert 1000 <= figures["warm_up_faults"] - before < 2000
    assert figures["warm_up_ns"] > 0


@linux
def test_steps_are_the_differences() -> None:
    counters = StepCounters()
    counters.border(None)
    for _ in range(1000):
        os.getpid()
    counters.border(4)
    counters.border(5)

    first, second = counters.steps

    assert (first.index, second.index) == (4, 5)
    assert 0 < (first.thread_processor_ns or 0) <= first.duration_ns + 1_000_000
    assert first.context_switches is not None
    assert first.minor_faults is not None


def test_the_collector_is_watched() -> None:
    watch = PauseWatch()
    watch.start()
    gc.collect()
    watch.stop()
    gc.collect()

    longest = max(watch.pauses(), key=lambda pause: pause.duration_ns)

    assert (longest.generation, longest.thread, longest.called) == (2, threading.get_native_id(), True)
    assert (longest.file, longest.function) == (__file__, "test_the_collector_is_watched")
    assert 0 < longest.duration_ns <= watch.total_ns
    assert watch.runs == 1


def test_garbage_that_the_collector_finds_by_itself() -> None:
    def tangled() -> list[object]:
        one: list[object] = []
        one.append(one)
        one.extend(object() for _ in range(100))
        return one

    before = gc.get_threshold()
    watch = PauseWatch()
    watch.start()
    try:
        gc.set_threshold(50, 1, 1)
        for _ in range(5000):
            tangled()
    finally:
        watch.stop()
        gc.set_threshold(*before)

    assert watch.runs > 10
    assert not any(pause.called for pause in watch.pauses())


def test_figures_of_a_machine_with_two_nodes(tmp_path: Path) -> None:
    from stepscope.machine.observed import Machine

    root = written(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node1/cpulist": "4-7\n",
            "sys/bus/pci/devices/0000:41:00.0/class": "0x030200\n",
            "sys/bus/pci/devices/0000:41:00.0/numa_node": "1\n",
            "sys/bus/pci/devices/0000:00:1f.2/class": "0x010601\n",
            "sys/bus/pci/devices/0000:00:1f.2/numa_node": "0\n",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3500000\n",
            "proc/self/maps": "7f00-7f01 r-xp 0 00:00 0 /usr/lib/libjemalloc.so.2\n7f02 /usr/lib/libc.so.6\n",
        },
    )

    figures = process_figures(Machine(root=root))

    assert figures["numa_nodes"] == 2
    assert figures["numa_processors"] == "0-3;4-7"
    assert figures["device_numa_nodes"] == "1"
    assert figures["processor_max_mhz"] == 3500.0
    assert figures["allocator"] == "jemalloc"


@linux
def test_only_the_first_of_equal_marks_counts() -> None:
    mark("test")
    first = start_times()["test_ns"]
    mark("test")

    assert first > 0
    assert abs(start_times()["test_ns"] - first) < 50_000_000  # the process's start is known to a hundredth of a second
