"""What makes timings slow or noisy, read from machines written down as files, and from the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import machine as command
from stepscope.commands import main
from stepscope.machine.checks.devices import (
    DeviceState,
    accelerators,
    device_state,
    judged,
    numa_affinity,
    numa_balancing,
)
from stepscope.machine.checks.host import (
    allocator,
    cpu_quota,
    governor,
    huge_pages,
    memory_limit,
    memory_pressure,
    other_load,
    shared_memory,
    swap,
    thermal_throttling,
    threads,
    turbo,
    usable_cores,
)
from stepscope.machine.environment import (
    CHECKS,
    SETTINGS,
    Machine,
    Observation,
    Runtime,
    debug_settings,
    garbage_collector,
    inspect_environment,
    power_supply,
    program_settings,
    release,
    slow_versions,
    versions,
)
from stepscope.machine.observed import cpu_list, cpu_list_text
from stepscope.readers.kineto import scanned
from tests.unit.machines import CPU, allowed, control_group, device, machine, server

GIB = 1 << 30
DOCS = Path(__file__).parents[3] / "docs"
THP = "sys/kernel/mm/transparent_hugepage"


def gone(_: Path) -> tuple[int, int]:
    raise FileNotFoundError


def said(check: Callable[[Machine], Any], computer: Machine) -> list[tuple[str, str]]:
    found = check(computer)
    return [(one.verdict, one.title) for one in (found if isinstance(found, list) else [found])]


def test_a_machine_that_tells_nothing_has_only_unknowns(tmp_path: Path) -> None:
    nothing = machine(tmp_path, environ=None, free_bytes=gone)

    found = inspect_environment(nothing)

    assert {observation.verdict for observation in found} == {"unknown"}
    assert len(found) >= len(CHECKS)
    assert all(observation.title and observation.read for observation in found)


def test_this_machine_is_read_without_an_error() -> None:
    found = inspect_environment(Machine(runtime=Runtime.of_this_process()))

    checks = {observation.check for observation in found}
    page = (DOCS / "environment.md").read_text()
    assert [check for check in checks if f"`{check}`" not in page] == []
    for observation in found:
        assert (observation.verdict in ("problem", "note")) == bool(observation.change and observation.why)


@pytest.mark.parametrize(
    ("check", "files", "verdict", "title"),
    [
        (
            governor,
            {f"{CPU}/cpu0/cpufreq/scaling_governor": "performance"},
            "fine",
            "The CPU governor is performance",
        ),
        (
            governor,
            {
                f"{CPU}/cpu0/cpufreq/scaling_governor": "performance",
                f"{CPU}/cpu1/cpufreq/scaling_governor": "schedutil",
            },
            "problem",
            "The CPU governor is schedutil on 1 of 2 cores",
        ),
        (
            governor,
            {
                f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave",
                f"{CPU}/cpu0/cpufreq/scaling_driver": "intel_pstate",
            },
            "note",
            "The CPU governor is powersave on 1 of 1 cores",
        ),
        (turbo, {f"{CPU}/intel_pstate/no_turbo": "0"}, "note", "The clock is boosted above its base"),
        (turbo, {f"{CPU}/intel_pstate/no_turbo": "1"}, "fine", "The clock is not boosted, so it is steady"),
        (turbo, {f"{CPU}/cpufreq/boost": "1"}, "note", "The clock is boosted above its base"),
        (turbo, {f"{CPU}/cpufreq/boost": "0"}, "fine", "The clock is not boosted, so it is steady"),
        (
            thermal_throttling,
            {f"{CPU}/cpu{core}/thermal_throttle/core_throttle_count": str(7 * core) for core in range(2)},
            "note",
            "Heat has throttled 1 of 2 cores since the machine started",
        ),
        (
            thermal_throttling,
            {f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "0"},
            "fine",
            "No core has been throttled by heat",
        ),
        (
            numa_balancing,
            {**server(), "proc/sys/kernel/numa_balancing": "1"},
            "note",
            "The kernel moves memory between NUMA nodes",
        ),
        (
            numa_balancing,
            {**server(), "proc/sys/kernel/numa_balancing": "0"},
            "fine",
            "The kernel does not move memory between NUMA nodes",
        ),
        (huge_pages, {f"{THP}/enabled": "always [madvise] never"}, "fine", "Transparent huge pages: madvise"),
        (huge_pages, {f"{THP}/enabled": "always madvise [never]"}, "note", "Transparent huge pages are off"),
        (
            huge_pages,
            {f"{THP}/enabled": "[always] madvise never", f"{THP}/defrag": "[always] defer madvise never"},
            "note",
            "Memory is compacted for huge pages while programs wait",
        ),
        (swap, {"proc/meminfo": "SwapTotal: 0 kB\nSwapFree: 0 kB"}, "fine", "There is no swap"),
        (swap, {"proc/meminfo": "SwapTotal: 8 kB\nSwapFree: 8 kB"}, "fine", "No swap is in use"),
        (
            swap,
            {"proc/meminfo": "SwapTotal: 8388608 kB\nSwapFree: 4194304 kB"},
            "note",
            "4.0 GiB of swap is in use",
        ),
        (
            swap,
            {**allowed("0"), "proc/meminfo": "SwapTotal: 8388608 kB\nSwapFree: 4194304 kB"},
            "problem",
            "2 MiB of the process is in swap",
        ),
        (
            memory_pressure,
            {"proc/pressure/memory": "some avg10=12.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00"},
            "problem",
            "Processes waited for memory 12.5 % of the last 10 seconds",
        ),
        (memory_pressure, {"proc/pressure/memory": "some avg10=0.00"}, "fine", "No process waits for memory"),
        (
            power_supply,
            {"sys/class/power_supply/AC/type": "Mains", "sys/class/power_supply/AC/online": "0"},
            "problem",
            "The machine runs on its battery",
        ),
        (
            power_supply,
            {"sys/class/power_supply/AC/type": "Mains", "sys/class/power_supply/AC/online": "1"},
            "fine",
            "The machine runs on mains power",
        ),
    ],
)
def test_one_file_decides(
    tmp_path: Path, check: Callable[[Machine], Observation], files: dict[str, str], verdict: str, title: str
) -> None:
    assert said(check, machine(tmp_path, files)) == [(verdict, title)]


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (2, {"cpu_max": "250000 100000", "cpu_stat": "nr_periods 1000\nnr_throttled 300"}),
        (
            1,
            {
                "cpu_cfs_quota_us": "250000",
                "cpu_cfs_period_us": "100000",
                "cpu_stat": "nr_periods 1000\nnr_throttled 300",
            },
        ),
    ],
)
def test_a_containers_quota(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    container = machine(tmp_path, {**allowed("0-63"), **control_group(version, **files)})

    assert usable_cores(container).usable == 2
    assert said(cpu_quota, container) == [
        ("problem", "The CPU quota of 2.5 cores ran out in 300 of 1,000 periods"),
    ]


def test_a_quota_that_never_ran_out_is_worth_knowing(tmp_path: Path) -> None:
    files = control_group(2, cpu_max="400000 100000", cpu_stat="nr_periods 1000\nnr_throttled 1")
    assert said(cpu_quota, machine(tmp_path, files)) == [("note", "A CPU quota of 4 cores is set")]


def test_no_quota(tmp_path: Path) -> None:
    files = control_group(2, cpu_max="max 100000")
    assert said(cpu_quota, machine(tmp_path, files)) == [("fine", "No CPU quota limits the process")]


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (2, {"memory_max": str(10 * GIB), "memory_current": str(9.5 * GIB).split(".")[0]}),
        (1, {"memory_limit_in_bytes": str(10 * GIB), "memory_usage_in_bytes": str(9.5 * GIB).split(".")[0]}),
    ],
)
def test_a_nearly_full_container(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    container = machine(tmp_path, control_group(version, **files))
    assert said(memory_limit, container) == [("problem", "9.5 GiB of the 10.0 GiB memory limit is in use")]


def test_memory_limits_that_are_none(tmp_path: Path) -> None:
    files = control_group(1, memory_limit_in_bytes="9223372036854771712", memory_usage_in_bytes="1")
    assert said(memory_limit, machine(tmp_path, files)) == [("fine", "No control group limits memory")]


@pytest.mark.parametrize(
    ("environ", "torch_threads", "verdict", "title"),
    [
        ({}, 8, "fine", "8 threads for 8 usable cores"),
        ({}, 16, "problem", "16 threads compute on 8 usable cores"),
        ({"OMP_NUM_THREADS": "9,2"}, None, "problem", "9 threads compute on 8 usable cores"),
        ({"LOCAL_WORLD_SIZE": "4"}, 4, "problem", "4 ranks with 4 threads each compute on 8 usable cores"),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}, None, "note", "Operators on the CPU use 1 of 2 cores"),
        ({"OMP_NUM_THREADS": "many"}, None, "unknown", "The number of threads is not known"),
    ],
)
def test_threads_against_cores(
    tmp_path: Path, environ: dict[str, str], torch_threads: int | None, verdict: str, title: str
) -> None:
    computer = machine(tmp_path, allowed("0-7"), environ=environ, runtime=Runtime(torch_threads=torch_threads))
    assert said(threads, computer) == [(verdict, title)]


def cpu_times(root: Path, busy: int, idle: int, steal: int = 0, processes: dict[int, int] | None = None) -> None:
    """The counters of four cores and of processes, in clock ticks."""
    files = {"proc/stat": f"cpu  {busy} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 0\ncpu1 0\ncpu2 0\ncpu3 0\nintr 5"}
    for process, ticks in (processes or {}).items():
        files[f"proc/{process}/stat"] = f"{process} (a (b) c) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0"
    machine(root, files)


def test_other_load_is_measured_between_two_readings(tmp_path: Path) -> None:
    cpu_times(tmp_path, 1000, 1000, processes={4711: 50, 99: 100})

    def later(_: float) -> None:
        """4 cores for 100 ticks: 200 of process 4711, from which we look, 90 of process 99, 10 of nobody we see."""
        cpu_times(tmp_path, 1300, 1100, processes={4711: 250, 99: 190})

    found = other_load(machine(tmp_path, sleep=later))

    assert [(one.verdict, one.title) for one in found] == [
        ("problem", "Other processes keep 1.0 of 4 cores busy"),
        ("fine", "No hypervisor takes time from the cores"),
    ]
    assert found[0].read.endswith("; a (b) c (process 99) 0.9")


def test_time_that_a_hypervisor_takes(tmp_path: Path) -> None:
    cpu_times(tmp_path, 1000, 1000)

    found = other_load(machine(tmp_path, sleep=lambda _: cpu_times(tmp_path, 1010, 1370, steal=20)))

    assert [(one.verdict, one.title) for one in found] == [
        ("fine", "Other processes keep 0.1 of 4 cores busy"),
        ("problem", "The hypervisor takes 5.0% of the cores' time"),
    ]


def test_counters_that_stand_still_are_unknown(tmp_path: Path) -> None:
    cpu_times(tmp_path, 1, 1, 0, {})
    assert [verdict for verdict, _ in said(other_load, machine(tmp_path, sleep=lambda _: None))] == ["unknown"] * 2


@pytest.mark.parametrize(("free", "verdict"), [(64 << 20, "problem"), (2 * GIB, "fine")])
def test_shared_memory(tmp_path: Path, free: int, verdict: str) -> None:
    computer = machine(tmp_path, free_bytes=lambda path: (4 * GIB, free))
    assert shared_memory(computer).verdict == verdict


@pytest.mark.parametrize(
    ("cores", "verdict", "title"),
    [
        ("0-15", "note", "The process may run on any of 2 NUMA nodes"),
        ("4-7", "fine", "The process runs on its device's NUMA node"),
    ],
)
def test_the_devices_node(tmp_path: Path, cores: str, verdict: str, title: str) -> None:
    assert said(numa_affinity, machine(tmp_path, server(cores))) == [(verdict, title)]


def test_a_process_far_from_every_device(tmp_path: Path) -> None:
    files = {**server("4-7"), **device("0000:37:00.0", node=0), **device("0000:47:00.0", node=0)}

    found = numa_affinity(machine(tmp_path, files))

    assert (found.verdict, found.title) == ("problem", "The process runs on another NUMA node than its device")
    assert found.change.endswith("taskset -c 0-3,8-11.")


def test_only_accelerators_of_known_makers_count(tmp_path: Path) -> None:
    files = {
        **device("0000:01:00.0", node=-1),
        **device("0000:02:00.0", node=0, vendor="0x1a03", kind="0x030000"),  # a server's video chip
        **device("0000:03:00.0", node=0, kind="0x020000"),  # NVIDIA's network card
        **device("0000:04:00.0", node=1, vendor="0x1da3", kind="0x120000"),
    }
    found = accelerators(machine(tmp_path, files))
    assert found is not None
    assert [(one.address, one.vendor, one.node) for one in found] == [
        ("0000:01:00.0", "NVIDIA", None),
        ("0000:04:00.0", "Habana", 1),
    ]


def test_load_on_devices_that_nobody_can_ask_about_is_unknown(tmp_path: Path) -> None:
    found = device_state(machine(tmp_path, device("0000:01:00.0", node=0, vendor="0x1002")))
    assert [(one.verdict, one.title) for one in found] == [("unknown", "The load on the devices cannot be read")]
    assert "AMD" in found[0].read


def test_what_a_devices_state_means() -> None:
    quiet = DeviceState(0, "H200", 0.0, (), (), True, 700.0, 700.0)
    busy = DeviceState(1, "H200", 0.98, ((99, 2 * GIB),), ("the power limit",), False, 500.0, 700.0)

    assert {one.verdict for one in judged(quiet)} == {"fine"}
    assert [(one.check, one.verdict, one.title) for one in judged(busy)] == [
        ("device-load", "problem", "Other processes use device 1 (H200): 98% busy"),
        ("device-clocks", "problem", "The clock of device 1 (H200) is lowered by the power limit"),
        ("device-persistence", "note", "The driver does not keep device 1 (H200) initialised between processes"),
        ("device-power", "note", "The power limit of device 1 (H200) is 500 W; the default is 700 W"),
    ]
    assert "process 99 (2.0 GiB)" in judged(busy)[0].read
    assert {one.verdict for one in judged(DeviceState(0, "old"))} == {"unknown"}


@pytest.mark.parametrize(
    ("environ", "titles"),
    [
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, ["Host memory comes from jemalloc", "its default settings"]),
        ({"PYTHONMALLOC": "debug"}, ["PYTHONMALLOC", "its default settings"]),
        ({"MALLOC_ARENA_MAX": "1"}, ["All threads allocate from one arena", "its default settings"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["the C library's malloc", "is set"]),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}, ["the C library's malloc", "above 32 MB are never split"]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.3"},
            ["the C library's malloc", "released once 30%"],
        ),
    ],
)
def test_allocators(tmp_path: Path, environ: dict[str, str], titles: list[str]) -> None:
    found = allocator(machine(tmp_path, {"proc/4711/maps": "7f00 r-xp libc.so.6"}, environ=environ))
    assert all(part in one.title for part, one in zip(titles, found, strict=True))


def test_debugging_aids(tmp_path: Path) -> None:
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "INFO", "PYTHONDEVMODE": "0", "NVIDIA_TF32_OVERRIDE": "1"}
    assert said(debug_settings, machine(tmp_path, environ=environ)) == [
        ("problem", "CUDA_LAUNCH_BLOCKING is set: every kernel launch waits until the kernel has ended"),
        ("note", "NCCL_DEBUG is set: NCCL logs; TRACE logs every call"),
    ]
    assert [verdict for verdict, _ in said(debug_settings, machine(tmp_path))] == ["fine"]


def test_every_variable_stands_in_the_docs() -> None:
    page = (DOCS / "environment.md").read_text()
    assert [setting.name for setting in SETTINGS if f"`{setting.name}`" not in page] == []


def test_what_only_the_program_can_tell() -> None:
    import torch

    with torch.autograd.set_detect_anomaly(True):
        runtime = Runtime.of_this_process(torch=torch)
    found = program_settings(Machine(runtime=runtime))

    assert runtime.torch_threads == torch.get_num_threads()
    assert "Anomaly mode is on" in found[0].title
    assert program_settings(Machine())[0].verdict == "unknown"


def test_the_garbage_collector(tmp_path: Path) -> None:
    assert garbage_collector(machine(tmp_path, runtime=Runtime(collector=True))).verdict == "note"
    assert garbage_collector(machine(tmp_path, runtime=Runtime(collector=False))).verdict == "fine"


@pytest.mark.parametrize(
    ("python", "torch", "found"),
    [
        ("3.12.1", "2.13.0+cpu", []),
        ("3.12.1", "2.9.1+cu128", ["torch 2.9.1+cu128: 3D convolutions"]),
        ("3.10.14", "2.10.0", ["python 3.10.14: pure Python code"]),
        ("3.14.4", "1.13.1", ["torch 1.13.1: optimizers", "python 3.14.4: the incremental"]),
        ("3.14.5", "2.0.0a0+git", []),
    ],
)
def test_versions_known_to_be_slow(python: str, torch: str, found: list[str]) -> None:
    observations = versions(Machine(runtime=Runtime(python=python, versions={"torch": torch})))
    slow = [one.title for one in observations if one.verdict == "note"]
    assert [title[: len(start)] for title, start in zip(slow, found, strict=True)] == found
    assert all("https://" in one.why for one in observations if one.verdict == "note")


def test_every_row_of_slow_versions_has_a_range_and_a_source() -> None:
    for row in slow_versions():
        assert row.first < row.end
        assert row.source.startswith("https://")


def test_releases() -> None:
    assert [release(text) for text in ("2.9.0+cu128", "2.10.0rc1", "3", "x")] == [(2, 9, 0), (2, 10, 0), (3,), ()]


def test_lists_of_cores() -> None:
    assert cpu_list("0-3,8") == {0, 1, 2, 3, 8}
    assert cpu_list("") == cpu_list("none") == frozenset()
    assert cpu_list_text(frozenset({8, 0, 1, 3})) == "0-1,3,8"
    assert cpu_list(cpu_list_text(frozenset(range(5, 9)))) == {5, 6, 7, 8}


def test_the_text_says_what_to_change_first() -> None:
    lines = "\n".join(
        command.text_lines(
            [
                Observation("swap", "problem", "Swap is in use", "/proc/meminfo", "It is slow.", "Free memory."),
                Observation("cpu-turbo", "note", "The clock is boosted", "no_turbo: 0", "It drifts.", "Warm up."),
                Observation("threads", "fine", "8 threads for 8 usable cores", "torch"),
                Observation("cpu-governor", "unknown", "The governor cannot be read", "not there"),
            ],
            width=80,
        )
    )
    assert lines == (
        "1 thing makes timings slow or noisy here; 1 more worth knowing, 1 fine, 1 unknown.\n"
        "\n1. Swap is in use\n   read   /proc/meminfo\n   why    It is slow.\n   change Free memory.\n"
        "\n2. The clock is boosted (worth knowing)\n   read   no_turbo: 0\n   why    It drifts.\n   change Warm up.\n"
        "\nFine\n  - 8 threads for 8 usable cores (torch)\n"
        "\nUnknown, because it cannot be read\n  - The governor cannot be read (not there)"
    )


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "environment", "--format", "json"],
        env={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["schema"] == 1
    assert ("debug-settings", "problem") in [(one["check"], one["verdict"]) for one in report["observations"]]


@pytest.mark.parametrize(("is_built", "verdict"), [(True, "fine"), (False, "note")])
def test_the_command_says_whether_the_scanner_was_built(
    is_built: bool, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scanned, "is_built", lambda: is_built)
    assert main(["environment", "--format", "json"]) == 0
    observations = json.loads(capsys.readouterr().out)["observations"]
    assert [one["verdict"] for one in observations if one["check"] == "scanner"] == [verdict]


def test_from_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    variables = {**os.environ, "TORCH_LOGS": "+dynamo", "SECRET": "hunter2"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert main(["environment", "--pid", str(child.pid)]) == 0
        child.communicate()
    said_of_it = capsys.readouterr().out
    assert "TORCH_LOGS is set" in said_of_it
    assert "hunter2" not in said_of_it


def test_a_process_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environment", "--pid", "999999999"]) == 2
    assert capsys.readouterr().err == ("stepscope: there is no process 999999999 whose /proc/999999999 can be read\n")
