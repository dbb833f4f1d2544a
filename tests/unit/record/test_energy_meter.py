"""Measuring energy in windows of steps: by counters that a test moves, by RAPL's files, and by zeus where it is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.machine import energy_counters
from stepscope.machine.energy_counters import RaplZone, SampledPower, open_counters
from stepscope.record import energy as energy_module
from stepscope.record.bootstrap import FirstRecording
from stepscope.record.controller import StepController
from stepscope.record.energy import EnergyMeter
from stepscope.record.hooks import AllHooks
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.run_process import RunOptions
from stepscope.record.schedule import RecordOptions
from stepscope.report.energy import measured_sentences
from stepscope.trace.energy_records import (
    Counter,
    EnergyRecord,
    EnergyWindow,
    MissingCounter,
    record_beside,
    records_of,
)
from tests.unit.record.test_controller import Notes

GPU = Counter("gpu", "0", "counter", "id0", "NVIDIA A100")
CPU = Counter("cpu", "0", "counter")


class Moved:
    """A counter at a constant power over the test's clock; fails where the power is an error."""

    longest_s = 100.0

    def __init__(self, bench: Bench, counter: Counter, watts: float | Exception) -> None:
        self.bench, self.counter, self.watts, self.closed = bench, counter, watts, False

    def joules(self) -> float:
        if isinstance(self.watts, Exception):
            raise self.watts
        return 1000 + self.watts * self.bench.ns / 1e9

    def close(self) -> None:
        self.closed = True


class Bench:
    """A meter with a clock and counters of its own."""

    def __init__(self, *watts: tuple[Counter, float | Exception], missing: Sequence[MissingCounter] = ()) -> None:
        self.ns = 5_000_000_000
        self.opened = 0
        self.sources = [Moved(self, counter, power) for counter, power in watts]
        self.missing = list(missing)
        self.meter = EnergyMeter(opens=self.opens, clock_ns=lambda: self.ns)

    def opens(self, devices: Sequence[int], *, with_host: bool) -> Any:
        self.opened += 1
        assert (list(devices), with_host) == ([], True)
        return list(self.sources), list(self.missing)

    def steps(self, first: int, count: int, seconds: float) -> None:
        for number in range(first, first + count):
            self.meter.begins(number)
            self.ns += round(seconds * 1e9)
            self.meter.ended()

    @property
    def record(self) -> EnergyRecord:
        return self.meter.record


def test_windows_follow_each_other_without_a_gap() -> None:
    bench = Bench((GPU, 100.0), (CPU, 30.0))
    bench.steps(20, 7, 0.75)
    bench.meter.finish()

    assert bench.record.windows == [
        EnergyWindow(20, 3, 2_250_000_000, {"gpu 0": pytest.approx(225.0), "cpu 0": pytest.approx(67.5)}),
        EnergyWindow(23, 3, 2_250_000_000, {"gpu 0": pytest.approx(225.0), "cpu 0": pytest.approx(67.5)}),
    ]
    assert bench.record.step_joules("gpu 0") == pytest.approx(75.0)
    assert (bench.record.steps, bench.record.step_ns, bench.record.missing) == (6, 750_000_000, [])
    assert (bench.opened, bench.sources[0].closed) == (1, True)


def test_long_steps_have_a_window_each() -> None:
    bench = Bench((GPU, 100.0))
    bench.steps(3, 2, 10.0)

    assert bench.record.window_joules("gpu 0") == [pytest.approx(1000.0), pytest.approx(1000.0)]


def test_steps_that_are_not_to_be_measured_are_in_no_window() -> None:
    bench = Bench((GPU, 100.0))
    bench.steps(0, 2, 0.9)
    bench.meter.pauses()
    bench.ns += 50_000_000_000
    bench.meter.ended()
    bench.steps(10, 3, 0.9)

    assert bench.record.windows == [EnergyWindow(10, 3, 2_700_000_000, {"gpu 0": pytest.approx(270.0)})]


def test_a_program_that_ends_too_soon_has_no_number_and_a_reason() -> None:
    bench = Bench((GPU, 100.0))
    bench.steps(0, 2, 0.9)
    bench.meter.finish()
    bench.meter.finish()
    bench.steps(2, 10, 0.9)

    assert bench.record.windows == []
    reason = "no window of 2 s of steps after the recording was complete"
    assert bench.record.missing == [MissingCounter("gpu", "0", reason)]


def test_a_program_without_steps_after_the_recording() -> None:
    bench = Bench((GPU, 100.0))
    bench.meter.finish()

    reason = "the program took no step after the recording"
    assert bench.record.missing == [MissingCounter(kind, None, reason) for kind in ("gpu", "cpu", "dram")]
    assert list(measured_sentences([bench.record])) == [f"energy not measured of devices, processors, memory: {reason}"]


@pytest.mark.parametrize(
    ("watts", "reason"),
    [
        (0.0, "its counter did not change in 3 s"),
        (-5.0, "its counter did not change in 3 s"),
        (OSError("the device fell off the bus\nand more"), "the device fell off the bus"),
    ],
)
def test_a_counter_that_says_nothing_is_named_and_the_others_count(watts: float | Exception, reason: str) -> None:
    bench = Bench((GPU, watts), (CPU, 30.0))
    bench.steps(0, 4, 3.0)

    assert bench.record.step_joules("gpu 0") is None
    assert bench.record.step_joules("cpu 0") == pytest.approx(90.0)
    assert bench.record.missing == [MissingCounter("gpu", "0", reason)]


def test_a_window_in_which_a_counter_can_have_come_round_has_no_number() -> None:
    bench = Bench((CPU, 30.0))
    bench.steps(0, 1, 101.0)

    assert bench.record.missing == [MissingCounter("cpu", "0", "its counter may have wrapped more than once in 101 s")]


def test_devices_that_cannot_be_waited_for_have_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronise(devices: Sequence[int], uses_jax: bool) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(energy_module, "synchronise", synchronise)
    bench = Bench((GPU, 100.0), (CPU, 30.0))
    bench.steps(0, 2, 3.0)

    reason = "the devices could not be waited for: CUDA error: device-side assert triggered"
    assert bench.record.missing == [MissingCounter("gpu", "0", reason)]
    assert bench.record.step_joules("gpu 0") is None
    assert bench.record.step_joules("cpu 0") == pytest.approx(90.0)


def test_where_nothing_can_be_measured_nothing_is_asked_again() -> None:
    lack = MissingCounter("cpu", None, "RAPL needs root")
    bench = Bench(missing=[lack])
    bench.steps(0, 3, 3.0)

    assert (bench.opened, bench.record.windows, bench.record.missing) == (1, [], [lack])
    assert not bench.meter.wants_more(0.0)


def test_counters_that_cannot_be_opened_do_not_end_the_program() -> None:
    def opens(devices: Sequence[int], *, with_host: bool) -> Any:
        raise RuntimeError("a library is broken")

    meter = EnergyMeter(opens=opens)
    meter.begins(0)
    meter.ended()

    assert meter.record.missing == [MissingCounter("gpu", None, "a library is broken")]


def test_only_the_first_process_of_a_machine_measures_what_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def opens(devices: Sequence[int], *, with_host: bool) -> Any:
        asked.append(with_host)
        return [], []

    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        EnergyMeter(opens=opens).begins(0)

    assert asked == [True, False]


class TestZone:
    def zone(self, folder: Path, microjoules: int, most: float = 1000.0) -> RaplZone:
        (folder / "energy_uj").write_text(f"{microjoules}\n")
        return RaplZone(CPU, folder / "energy_uj", most)

    def test_a_full_counter_begins_anew(self, tmp_path: Path) -> None:
        zone = self.zone(tmp_path, 900)
        begin = zone.joules()
        (tmp_path / "energy_uj").write_text("100\n")

        assert zone.joules() - begin == pytest.approx(200e-6)

    def test_how_long_it_can_tell(self, tmp_path: Path) -> None:
        assert self.zone(tmp_path, 1, 262_143e6).longest_s == pytest.approx(262.143)


def test_power_is_integrated_where_there_is_no_counter() -> None:
    source = SampledPower(GPU, lambda: 50.0, interval_s=0.001)
    begin, joules = time.monotonic(), source.joules()
    time.sleep(0.05)
    more, least = source.joules() - joules, time.monotonic()
    source.close()

    assert 0.05 * 50 <= more <= (least - begin) * 50 + 1e-9


def test_without_the_package_everything_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("zeus", "zeus.device.gpu", "zeus.device.cpu"):
        monkeypatch.setitem(sys.modules, module, None)

    sources, missing = open_counters([0], with_host=True)

    reason = "the package zeus is missing: pip install 'stepscope[energy]'"
    assert (sources, missing) == ([], [MissingCounter(kind, None, reason) for kind in ("gpu", "cpu", "dram")])
    assert open_counters([0], with_host=False) == ([], [MissingCounter("gpu", None, reason)])


class TestZeus:
    """With the package zeus itself, on folders of files that look like RAPL's."""

    @pytest.fixture(autouse=True)
    def rapl(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        cpu = pytest.importorskip("zeus.device.cpu")
        folder = tmp_path / "intel-rapl"
        monkeypatch.setattr("zeus.device.cpu.rapl.RAPL_DIR", str(folder))
        monkeypatch.setattr("zeus.device.cpu.rapl.CONTAINER_RAPL_DIR", str(folder / "none"))
        monkeypatch.setattr(cpu, "_cpus", None)
        cpu.rapl_is_available.cache_clear()
        return folder

    def zone(self, folder: Path, name: str) -> Path:
        folder.mkdir(parents=True)
        for file, text in (("name", name), ("energy_uj", "1000000"), ("max_energy_range_uj", "262143328850")):
            (folder / file).write_text(f"{text}\n")
        return folder / "energy_uj"

    def test_packages_and_memory_but_not_the_whole_platform(self, rapl: Path) -> None:
        package = self.zone(rapl / "intel-rapl:0", "package-0")
        self.zone(rapl / "intel-rapl:0/intel-rapl:0:0", "dram")
        self.zone(rapl / "intel-rapl:1", "package-1")
        self.zone(rapl / "intel-rapl:2", "psys")
        before = set(os.listdir("/proc"))

        sources, missing = open_counters([], with_host=True)
        begun = sources[0].joules()
        package.write_text("31000000\n")

        assert [source.counter.key for source in sources] == ["cpu 0", "dram 0", "cpu 1"]
        assert sources[0].joules() - begun == pytest.approx(30.0)
        assert [each for each in missing if each.kind != "gpu"] == [
            MissingCounter("dram", "1", "RAPL has no counter of it here")
        ]
        assert not [each for each in set(os.listdir("/proc")) - before if _is_child(each)]

    def test_a_machine_without_it(self) -> None:
        sources, missing = open_counters([], with_host=True)

        reason = "this machine has no RAPL counters (/sys/class/powercap/intel-rapl)"
        assert [each for each in missing if each.kind != "gpu"] == [
            MissingCounter("cpu", None, reason),
            MissingCounter("dram", None, reason),
        ]
        assert [source for source in sources if source.counter.kind != "gpu"] == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
    def test_without_permission(self, rapl: Path) -> None:
        self.zone(rapl / "intel-rapl:0", "package-0").chmod(0)

        missing = open_counters([], with_host=True)[1]

        assert MissingCounter("cpu", None, energy_counters.NOT_ALLOWED) in missing


def _is_child(process: str) -> bool:
    try:
        return process.isdecimal() and int(Path(f"/proc/{process}/stat").read_text().split()[3]) == os.getpid()
    except OSError:
        return False


class TestPlan:
    """What a recorded program does, with a recorder that only notes what is asked of it."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        return RunFolder.create(tmp_path, "it", RunManifest(("train.py",)))

    def taken(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, bench: Bench, steps: int, **more: Any) -> int:
        """Take steps of 0.1 s on the test's clock; returns how many the program came to."""
        monkeypatch.setattr(energy_module, "EnergyMeter", lambda **_: bench.meter)
        monkeypatch.setattr(energy_module, "MEASURED_S", 0.0)

        def recording(options: RecordOptions, first: int) -> Notes:
            return Notes([], first, False)

        controller = StepController(lambda: folder.new_trace_path(0), make_recording=recording)
        options = RunOptions(steps=2, warmup=1, telemetry=False, energy=True, **more)
        controller.listener = plan = FirstRecording(controller, AllHooks(controller), folder, options)
        for taken in range(steps):
            bench.ns += 100_000_000
            try:
                controller.step_boundary()
            except SystemExit:
                return taken + 1
        plan.program_ends()
        return steps

    def test_the_steps_after_the_recording_are_measured(
        self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = Bench((GPU, 100.0), missing=[MissingCounter("cpu", None, "RAPL needs root")])
        self.taken(folder, monkeypatch, bench, 100)

        (left,) = folder.recordings()
        ((rank, record),) = records_of([left])
        assert (left["first_step"], left["steps"], rank) == (1, 2, 0)
        assert [(window.first_step, window.steps) for window in record.windows] == [(3, 20), (23, 20)]
        assert record.step_joules("gpu 0") == pytest.approx(10.0)
        assert record_beside(folder.path / "rank0" / left["trace"]) == record
        assert list(measured_sentences([record, record])) == [
            "energy of device 0 (NVIDIA A100): 10.0 J a step, measured over 40 steps after the recording",
            "energy not measured of processors: RAPL needs root",
        ]

    def test_exit_after_waits_for_the_measurement(self, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.taken(folder, monkeypatch, Bench((GPU, 100.0)), 100, exit_after=True) < 10

    def test_without_a_trace_beside_there_is_no_record(self, tmp_path: Path) -> None:
        (tmp_path / "recording-1.json").write_text("{broken")
        (tmp_path / "recording-2.json").write_text('["trace"]')
        (tmp_path / "recording-3.json").write_text('{"trace": "trace-1.json.gz", "energy": 5}')

        assert record_beside(tmp_path / "trace-1.json.gz") is None
        assert record_beside(tmp_path / "none" / "trace-1.json.gz") is None
