"""Where a step's energy goes: parts that add up, measured before sampled before estimated, and what findings save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.diagnosis import diagnose_view
from stepscope.diagnosis.diagnosis import Diagnosis
from stepscope.diagnosis.view import View
from stepscope.predict.cost.energy import energy_of_trace, sampled_energy
from stepscope.predict.cost.energy_parts import (
    DeviceEnergy,
    EnergyAnswer,
    PowerSettings,
    SampledEnergy,
    TraceEnergy,
    grid_of,
    shared,
)
from stepscope.report.energy import electricity, energy, energy_document, energy_json, mass
from stepscope.report.text import text_of
from stepscope.trace import Metadata, Trace, Window
from stepscope.trace.energy_records import Counter, EnergyRecord, EnergyWindow, MissingCounter
from stepscope.trace.metadata import Device
from stepscope.trace.telemetry import MISSING_SCHEMA, SAMPLE_SCHEMA, Telemetry
from tests.unit.recording import Recording
from tests.unit.rendered import json_of, markdown_reports, text_reports, written
from tests.unit.small_traces import complete, kernel, opened

MS = 1_000_000
WATTS = PowerSettings(device_watts=400, idle_watts=100)
UNKNOWN = "NVIDIA Unheard Of"
PARTS_OF_A_STEP = [
    ("idle", "input", 3 * MS, 300 * MS, 300 * MS),
    ("idle", "dispatch", MS, 100 * MS, 100 * MS),
    ("busy", "computation", 6 * MS, 600 * MS, 2400 * MS),
]


def steps(count: int = 2, name: str | None = UNKNOWN) -> Trace:
    """Steps of 10 ms: 3 ms in which a batch is loaded, 1 ms until the work is launched, 6 ms of work."""
    metadata = Metadata(path="/home/alice/run/trace.json", format="kineto", devices=(Device("0", name),))
    recording = Recording(metadata, unit_ns=1000)
    for number in range(count):
        begin = 10_000 * number
        recording.step(begin, 10_000, number)
        recording.annotation(begin, 3000, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        recording.operator(begin + 3000, 1002, "aten::mm")
        recording.launched(begin + 4000, begin + 4000, 6000, "gemm", number + 1)
    return recording.trace()


def of(
    trace: Trace,
    settings: PowerSettings = PowerSettings(),  # noqa: B008
    record: EnergyRecord | None = None,
    sampled: tuple[SampledEnergy, ...] = (),
) -> TraceEnergy:
    view = View(trace)
    return energy_of_trace(view, diagnose_view(view).findings, settings, record=record, sampled=sampled)


def measured(joules: float, *, windows: int = 2, key: str = "gpu 0", machine: str = "m1") -> EnergyRecord:
    """Windows of 100 steps of 8 ms each, which one counter saw."""
    kind, device = key.split()
    counter = Counter(kind, device, "counter", identity=f"{machine} {key}")  # type: ignore[arg-type]
    rows = [EnergyWindow(20 + 100 * number, 100, 800 * MS, {key: joules}) for number in range(windows)]
    return EnergyRecord(machine, [counter], rows)


def rows(device: DeviceEnergy) -> list[tuple[str, str, int, int, int]]:
    return [(part.kind, part.name, part.ns, *part.nanojoules) for part in device.parts]


def test_nothing_at_all() -> None:
    energy_of_nothing = of(Trace.from_tables({}))

    assert (energy_of_nothing.devices, energy_of_nothing.hosts, energy_of_nothing.findings) == ((), (), ())
    assert EnergyAnswer((energy_of_nothing,)).step_nanojoules is None


def test_an_estimate_divides_by_cause_and_adds_up() -> None:
    device = of(steps(), WATTS).devices[0]

    assert (device.basis, device.nanojoules) == ("estimate", (1000 * MS, 2800 * MS))
    assert rows(device) == PARTS_OF_A_STEP
    # 4 ms at 100 W of 0.4 J + 2.4 J, and of 0.4 J + 0.6 J.
    assert device.idle_share == (pytest.approx(0.4 / 2.8), pytest.approx(0.4))
    assert [(part.name, part.nanojoules) for part in device.operators] == [("aten::mm", (600 * MS, 2400 * MS))]


def test_without_idle_power_a_gap_used_nothing_up_to_its_share_of_the_time() -> None:
    device = of(steps(), PowerSettings(device_watts=400)).devices[0]

    assert device.nanojoules == (0, 4000 * MS)
    assert device.idle_share is None  # nothing may have been used at all
    # An unknown device has no peaks: its work may have kept it at nothing.
    assert "idle = 0 to 400 W" in device.how


def test_an_unknown_device_has_no_number() -> None:
    named, nameless = of(steps()).devices[0], of(steps(name=None)).devices[0]

    assert (named.nanojoules, named.how) == (
        None,
        "the power limit of NVIDIA Unheard Of is unknown; --device-watts gives its power limit",
    )
    assert nameless.how == "the trace does not say what device it is; --device-watts gives its power limit"


def test_measured_energy_comes_first_and_is_divided() -> None:
    result = of(steps(), WATTS, measured(160.0), (SampledEnergy("0", 9.0, "sampled"),))
    device = result.devices[0]

    # 1.6 J a step of 8 ms, of which 3.2 ms at 100 W are idle.
    assert (device.basis, device.step_ns, device.nanojoules) == ("measured", 8 * MS, (1600 * MS, 1600 * MS))
    assert rows(device) == [
        ("idle", "input", 2_400_000, 240 * MS, 240 * MS),
        ("idle", "dispatch", 800_000, 80 * MS, 80 * MS),
        ("busy", "computation", 4_800_000, 1280 * MS, 1280 * MS),
    ]
    assert device.idle_share == (pytest.approx(0.2), pytest.approx(0.2))
    assert device.window_joules == (1.6, 1.6)


def test_measured_without_idle_power_lies_between_nothing_and_the_mean() -> None:
    device = of(steps(), record=measured(160.0)).devices[0]

    assert device.nanojoules == (1600 * MS, 1600 * MS)
    assert device.of_kind("idle") == (0, 640 * MS)
    assert device.of_kind("busy") == (1600 * MS, 960 * MS)
    assert device.idle_share == (0.0, pytest.approx(0.4))
    assert "its idle power is unknown" in device.how


def test_a_device_at_rest_never_uses_more_than_was_measured() -> None:
    device = of(steps(), PowerSettings(device_watts=400, idle_watts=399), measured(160.0)).devices[0]

    assert device.of_kind("idle") == (640 * MS, 640 * MS)  # 3.2 ms at the mean of 200 W


def test_samples_are_marked_as_such() -> None:
    device = of(steps(), WATTS, sampled=(SampledEnergy("0", 2.0, "its power, sampled 40 times"),)).devices[0]

    assert (device.basis, device.nanojoules, device.step_ns) == ("sampled", (2000 * MS, 2000 * MS), 10 * MS)
    assert device.how.startswith("its power, sampled 40 times; idle time counts 100 W")


def test_missing_counters_are_named_and_give_no_number() -> None:
    lack = MissingCounter("cpu", None, "RAPL needs root")
    result = of(steps(), WATTS, EnergyRecord("m1", [], [], [lack]))

    assert (result.missing, result.hosts) == ((lack,), ())
    assert result.devices[0].basis == "estimate"
    assert "Not measured: processors: RAPL needs root." in text_of(
        energy_document(EnergyAnswer((result,))), width=120, top=0
    )


def test_a_counter_that_did_not_move_in_a_window_has_no_number() -> None:
    record = measured(160.0)
    record.windows[1].joules.clear()

    assert record.step_joules("gpu 0") is None
    assert of(steps(), record=record).devices[0].nanojoules is None


def test_the_processors_of_a_machine_without_accelerator() -> None:
    recording = Recording(unit_ns=1000)
    for number in range(2):
        recording.step(10_000 * number, 10_000, number)
        recording.operator(10_000 * number, 8000, "aten::mm")
    result = of(recording.trace(), PowerSettings(cpu_watts=50))

    host = result.hosts[0]
    assert (host.basis, host.nanojoules, result.devices) == ("given", 500 * MS, ())
    assert [(part.name, part.ns, part.nanojoules[0]) for part in host.parts] == [
        ("compute", 8 * MS, 400 * MS),
        ("untraced", 2 * MS, 100 * MS),
    ]


def test_measured_processors_come_before_given_ones() -> None:
    result = of(steps(), PowerSettings(cpu_watts=50), measured(80.0, key="cpu 0"))

    assert [(host.basis, host.nanojoules) for host in result.hosts] == [("measured", 800 * MS)]


def test_a_finding_that_removes_idle_time_saves_idle_power() -> None:
    found = {each.rule: each for each in of(steps(20), WATTS).findings}["input-bound"]

    assert found.busy_ns == (0, 0)
    assert found.nanojoules == (100 * found.saving_ns, 100 * found.saving_ns)


@pytest.mark.parametrize(
    ("total", "weights"), [(0, [1, 2]), (10, [1, 1, 1]), (7, [0, 5]), (1, [3, 3]), (2**60 + 1, [2**60, 1, 2**59])]
)
def test_parts_add_up_exactly(total: int, weights: list[int]) -> None:
    parts = shared(total, weights)

    assert sum(parts) == total
    assert all(
        abs(part - total * weight / sum(weights)) <= max(1, total * 1e-15)
        for part, weight in zip(parts, weights, strict=True)
    )


def test_nothing_is_shared_among_none() -> None:
    assert shared(5, []) == []
    assert shared(5, [0, 0]) == [0, 0]


@pytest.mark.parametrize(
    "event",
    [
        complete("aten::mm", "cpu_op", 1, 2),
        complete("ProfilerStep#1", "user_annotation", 1, 2),
        kernel(1, 2),
        kernel(0, 0),
        kernel(1, 2, pid=0, tid=7, args={"device": "../../etc/passwd", "stream": "a|b"}),
    ],
    ids=["operator", "step", "kernel", "nothing long", "another device"],
)
def test_a_single_event(event: dict[str, Any], tmp_path: Path) -> None:
    answer = EnergyAnswer((of(opened(tmp_path, [event]), PowerSettings(300, 50, 90)),), 1000, 1.1, grid_of("FRA"))

    assert "1,000 iterations use" in text_of(energy_document(answer), width=80, top=1)
    for device in written(energy_json(answer))["traces"][0]["devices"]:
        assert sum(part["joules"][1] for part in device["parts"]) == pytest.approx(device["joules"][1])


class TestSeveralRanks:
    def test_every_device_and_processor_counts_once(self) -> None:
        both = [of(steps(), record=measured(160.0, machine="m1")) for _ in range(2)]
        other = of(steps(), record=measured(160.0, machine="m2"))

        assert EnergyAnswer(tuple(both)).step_nanojoules == (1600 * MS, 1600 * MS)
        assert EnergyAnswer((*both, other)).step_nanojoules == (3200 * MS, 3200 * MS)

    def test_processors_that_one_rank_measures_for_all_count_once(self) -> None:
        first = of(steps(), PowerSettings(cpu_watts=50), measured(80.0, key="cpu 0"))
        others = [of(steps(), PowerSettings(cpu_watts=50)) for _ in range(2)]

        assert EnergyAnswer((first, *others)).step_nanojoules == (800 * MS, 800 * MS)
        assert EnergyAnswer(tuple(others)).step_nanojoules == (500 * MS, 500 * MS)
        assert "--cpu-watts gives" not in text_of(energy_document(EnergyAnswer((first, of(steps())))), width=120, top=0)

    def test_a_device_without_a_number_is_named(self) -> None:
        answer = EnergyAnswer((of(steps(), record=measured(160.0)), of(steps())))

        assert answer.step_nanojoules == (1600 * MS, 1600 * MS)
        assert [device.device for device in answer.unknown_devices] == ["0"]
        assert "This excludes device 0" in text_of(energy_document(answer), width=120, top=0)


class TestSamples:
    ORIGIN = 1_000_000_000_000

    def telemetry(self, name: str, values: list[tuple[float, float]]) -> Telemetry:
        rows = [
            {"rank": 0, "process": 1, "source": "device", "name": name, "device": "0"}
            | {"unix_ns": self.ORIGIN + round(at * 1e9), "value": value}
            for at, value in values
        ]
        return Telemetry(pl.DataFrame(rows, schema=SAMPLE_SCHEMA), pl.DataFrame(schema=MISSING_SCHEMA))

    def sampled(self, name: str, values: list[tuple[float, float]]) -> tuple[SampledEnergy, ...]:
        return sampled_energy(self.telemetry(name, values), self.ORIGIN, Window(1_000_000_000, 5_000_000_000), 4)

    def test_power_is_integrated_over_the_steps(self) -> None:
        # 100 W until 2 s, then rising by 50 W a second: 100 + 125 + 175 + 225 J from 1 s to 5 s.
        (found,) = self.sampled("power_w", [(0, 100), (2, 100), (3, 150), (4, 200), (6, 300)])

        assert found.step_joules == pytest.approx(625 / 4)
        assert found.how == "its power, sampled 3 times during the steps"

    def test_a_counter_is_read_at_both_ends(self) -> None:
        (found,) = self.sampled("energy_j", [(0, 50), (2, 250), (3, 400), (4, 500), (6, 900)])

        assert found.step_joules == pytest.approx((700 - 150) / 4)
        assert found.how == "its counter of energy, sampled 3 times during the steps"

    @pytest.mark.parametrize(
        "values",
        [[(0, 100), (2, 100), (6, 100)], [(2, 100), (3, 100), (4, 100)], [(0, 100), (2, float("nan")), (6, 1)]],
    )
    def test_too_few_samples_tell_nothing(self, values: list[tuple[float, float]]) -> None:
        (found,) = self.sampled("power_w", values)

        assert found.step_joules is None
        assert "in the 4 s of the steps, which is too few" in found.how

    def test_no_samples(self) -> None:
        assert self.sampled("utilization_share", [(0, 1), (3, 1), (6, 1)]) == ()
        assert sampled_energy(self.telemetry("power_w", [(0, 1)]), None, Window(0, 1), 1) == ()


class TestReports:
    ANSWER = EnergyAnswer((of(steps(), WATTS),), 4_000_000, 1.5, grid_of("FRA"))

    def test_a_run_in_kilowatt_hours_and_kilograms(self) -> None:
        text = text_of(energy_document(self.ANSWER), width=160, top=0)

        # 1.0 to 2.8 J a step, 4 million times, times 1.5: 6 to 16.8 MJ.
        assert "4,000,000 iterations use 1.67 to 4.67 kWh, with PUE 1.5 (an estimate)." in text
        assert "emits 93.4 to 262 g of CO2 equivalents: 56.039 g per kWh (codecarbon 3.3.2, 2023)." in text
        assert "As much as 0.37 to 1.04 km by an average US car or 0.04 to 0.11 litres of petrol burned." in text
        assert "Idle gaps used 14.3 to 40.0 % of the energy of device 0." in text

    def test_for_programs(self) -> None:
        report = written(energy_json(self.ANSWER))

        assert report["total"] == {"joules": [1.0, 2.8000000000000003], "is_estimate": True, "unknown_devices": []}
        assert report["run"]["kwh"] == pytest.approx([6 / 3.6, 16.8 / 3.6])
        assert report["run"]["kilograms"] == pytest.approx((6 / 3.6 * 0.056039, 16.8 / 3.6 * 0.056039))
        device = report["traces"][0]["devices"][0]
        assert (device["idle_watts"], device["busy_watts"]) == ([100.0, 100.0], [100.0, 400.0])
        for side in (0, 1):
            assert sum(part["joules"][side] for part in device["parts"]) == pytest.approx(device["joules"][side])

    def test_without_a_place_no_carbon_is_guessed(self) -> None:
        answer = EnergyAnswer((of(steps(), WATTS),))

        assert "CO2 needs a place" in text_of(energy_document(answer), width=120, top=0)
        assert (written(energy_json(answer))["run"]["kilograms"], written(energy_json(answer))["carbon"]) == (
            None,
            None,
        )

    def test_hostile_names_are_written_out(self) -> None:
        text = text_of(energy_document(EnergyAnswer((of(steps(name="\x1b[31mH100\n"), WATTS),))), width=120, top=0)

        assert "\x1b" not in text
        assert r"\x1b[31mH100\n" in text


class TestSections:
    """Of the reports of a diagnosis, where the run measured its energy."""

    LACK = MissingCounter("cpu", None, "RAPL <needs> root")
    SENTENCE = "Device 0 uses 1.60 J a step (200 W), 20.0 % of it in idle gaps; measured without the profiler."

    def found(self) -> tuple[Diagnosis, TraceEnergy]:
        view = View(steps())
        diagnosis = diagnose_view(view)
        record = measured(160.0)
        record.missing.append(self.LACK)
        return diagnosis, energy_of_trace(view, diagnosis.findings, WATTS, record=record)

    def test_in_every_report(self) -> None:
        diagnosis, found = self.found()

        text = text_reports([diagnosis], width=160, colour=False, top=1, energies=[found])
        assert f"Energy\n  - {self.SENTENCE}\n  - Not measured: processors: RAPL <needs> root.\n" in text
        markdown = markdown_reports([diagnosis], top=1, energies=[found])
        assert f"## Energy\n\n- {self.SENTENCE}\n- Not measured: processors: RAPL &lt;needs&gt; root.\n" in markdown
        assert json_of([diagnosis], energies=[found])["energy"]["devices"][0]["joules"] == [1.6, 1.6]

    def test_of_the_rank_that_measured(self) -> None:
        diagnosis, found = self.found()
        both = [diagnosis, diagnose_view(View(steps()))]

        reports = json_of(both, energies=[None, found])["ranks"]
        assert ["energy" in report for report in reports] == [False, True]
        assert (
            text_reports(both, width=160, colour=False, top=1, every=True, energies=[None, found]).count("\nEnergy\n")
            == 1
        )

    def test_of_a_run_that_measured_nothing(self) -> None:
        diagnosis, _ = self.found()

        assert "Energy" not in text_reports([diagnosis], width=160, colour=False, top=1)
        assert "energy" not in json_of([diagnosis])


class TestFormats:
    @pytest.mark.parametrize(
        ("joules", "text"),
        [
            ((0.0, 0.0), "0 uJ"),
            ((0.812, 0.812), "812 mJ"),
            ((21.34, 52.5), "21.3 to 52.5 J"),
            ((0.0, 1.5), "0 to 1.50 J"),
            ((999.96, 999.96), "1.00 kJ"),
            ((1234567.0, 1234567.0), "1.23 MJ"),
            ((2.5e9, 2.5e9), "2,500 MJ"),
        ],
    )
    def test_energy(self, joules: tuple[float, float], text: str) -> None:
        assert energy(joules) == text

    def test_electricity_and_mass(self) -> None:
        assert electricity((3.6e6, 3.6e6)) == "1.00 kWh"
        assert electricity((1.8e6, 3.6e6)) == "0.50 to 1.00 kWh"
        assert mass((1.0, 1.0)) == "1.00 kg"
        assert mass((0.5, 1500.0)) == "500 g to 1.50 t"


class TestRecord:
    def test_to_json_and_back(self) -> None:
        record = measured(160.0)
        record.missing.append(MissingCounter("dram", None, "the package has no counter of memory"))

        assert EnergyRecord.from_json(record.to_json()) == record

    @pytest.mark.parametrize("content", [None, 3, [], {}, {"format": 2}, {"format": 1, "windows": 3, "counters": {}}])
    def test_something_else(self, content: object) -> None:
        record = EnergyRecord.from_json(content)

        assert record is None or (record.counters, record.windows, record.missing) == ([], [], [])

    def test_what_is_damaged_is_left_out(self) -> None:
        content = measured(160.0).to_json()
        content["windows"] += [
            {"first_step": 0, "steps": 0, "ns": 5, "joules": {}},
            {"first_step": 0, "steps": True, "ns": 5, "joules": {}},
            {"first_step": 0, "steps": 1, "ns": 2**80, "joules": {}},
            "window",
        ]
        content["windows"][0]["joules"] |= {"gpu 1": 5.0}
        content["counters"] += [{"kind": "toaster", "device": "0", "method": "counter"}, {"kind": "gpu"}]

        assert EnergyRecord.from_json(content) == measured(160.0)

    def test_half_a_surrogate_pair_is_left_out(self) -> None:
        content = measured(160.0).to_json()
        broken = {**content, "missing": [{"kind": "\ud800", "device": None, "reason": "none"}]}

        assert EnergyRecord.from_json(broken) == EnergyRecord.from_json({**content, "missing": []})

    @pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan"), "5", True, None, 0])
    def test_an_impossible_energy_is_none(self, value: object) -> None:
        content = measured(160.0).to_json()
        content["windows"][0]["joules"]["gpu 0"] = value
        record = EnergyRecord.from_json(content)

        assert record is not None
        assert record.step_joules("gpu 0") is None
