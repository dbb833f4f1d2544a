"""The measured energy of two runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.compare import Side, compare_sides
from stepscope.compare.trace_record import compared_energies
from stepscope.report.comparison import comparison_document, comparison_json, overview
from stepscope.report.comparison_words import energy_sentences
from stepscope.report.text import markdown_of, text_of
from stepscope.trace.energy_records import Counter, EnergyRecord, step_energies
from tests.unit.predict.test_energy import measured, steps
from tests.unit.rendered import written

BEFORE = {"gpu": [[2.0, 2.02, 1.98, 2.01, 1.99]], "cpu": [[0.5]]}
AFTER = {"gpu": [[1.6, 1.62, 1.58, 1.61, 1.59]], "dram": [[0.1, 0.1]]}


def test_only_what_both_sides_measured_is_compared() -> None:
    (gpu,) = compared_energies(BEFORE, AFTER)

    assert (gpu.kind, gpu.before_j, gpu.after_j) == ("gpu", pytest.approx(2.0), pytest.approx(1.6))
    assert (gpu.change, gpu.before_windows, gpu.after_windows) == (pytest.approx(-0.2), 5, 5)
    assert gpu.change_low is not None
    assert gpu.change_high is not None
    assert -0.25 < gpu.change_low < -0.2 < gpu.change_high < -0.15


def test_nothing_is_compared_with_nothing() -> None:
    assert compared_energies({}, {}) == ()
    assert compared_energies(BEFORE, {}) == ()
    assert compared_energies({"gpu": [[]]}, {"gpu": [[]]}) == ()


def test_in_reports() -> None:
    (comparison,) = compare_sides(Side("a", [steps()], energies=BEFORE), [Side("b", [steps()], energies=AFTER)])

    (sentence,) = energy_sentences(comparison)
    assert sentence.startswith("Devices use 1.60 J a step instead of 2.00 J, 20.0 % less (95 % interval: ")
    assert "Devices use 1.60 J a step" in text_of(comparison_document([comparison]), width=100, top=1)
    report = json.loads(json.dumps(written(comparison_json([comparison]))["comparisons"][0]["energies"]))
    assert [(each["kind"], each["before_windows"]) for each in report] == [("gpu", 5)]


def test_as_columns_where_every_program_measured_it() -> None:
    first = Side("a", [steps()], energies={"gpu": [[2.0]], "cpu": [[0.5]]})
    others = [
        Side("b", [steps()], energies={"gpu": [[1.6]], "cpu": [[0.4]]}),
        Side("c", [steps()], energies={"gpu": [[1.2]]}),
    ]
    comparisons = compare_sides(first, others)

    table = overview(comparisons)
    assert table["gpu_energy"].to_list() == ["2.00 J", "1.60 J", "1.20 J"]
    assert "cpu_energy" not in table.columns
    assert "gpu energy" in text_of(comparison_document(comparisons), width=120, top=1)
    assert "cpu energy" in markdown_of(comparison_document(comparisons), top=1)


def test_one_window_tells_nothing_of_chance() -> None:
    sides = [Side("a", [steps()], energies={"cpu": [[joules]]}) for joules in (2.0, 3.0)]
    (comparison,) = compare_sides(sides[0], sides[1:])

    assert energy_sentences(comparison) == [
        "Processors use 3.00 J a step instead of 2.00 J, 50.0 % more; how much of that is chance is unknown."
    ]


def test_runs_without_energy_say_nothing_of_it() -> None:
    (comparison,) = compare_sides(steps(), [steps()])

    assert (energy_sentences(comparison), comparison.energies) == ([], ())


def left(record: EnergyRecord, rank: int) -> dict[str, object]:
    return {"rank": rank, "energy": record.to_json()}


def test_of_all_ranks_together_each_device_once() -> None:
    first, second = measured(160.0, windows=3, machine="m1"), measured(80.0, windows=2, machine="m2")
    again = measured(160.0, windows=3, machine="m1")

    found = step_energies([[left(first, 0), left(second, 1), left(again, 2)], [{"rank": 0}]])

    assert found == {"gpu": [[pytest.approx(2.4), pytest.approx(2.4)], []], "cpu": [[], []], "dram": [[], []]}


def test_a_counter_without_a_number_leaves_the_kind_without_one() -> None:
    record = measured(160.0)
    record.counters.append(Counter("gpu", "1", "counter", identity="other"))

    assert step_energies([[left(record, 0)]])["gpu"] == [[]]


def test_the_command_reads_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepscope.commands import main
    from tests.unit.run_folders import made_run, recording

    sample = Path(__file__).parents[3] / "examples/gpt2_per_token_loss_cpu.json.gz"
    for name, joules in (("before", 200.0), ("after", 160.0)):
        energies = measured(joules, key="cpu 0", windows=3).to_json()
        run = made_run(name, recording(energy=energies, trace="trace-1.json.gz"), root=tmp_path)
        run.write_recording(0, recording(energy=energies, trace="trace-1.json.gz"))
        (run.rank_folder(0) / "trace-1.json.gz").write_bytes(sample.read_bytes())

    assert main(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--no-cache"]) == 0
    assert "Processors use 1.60 J a step instead of 2.00 J, 20.0 % less" in capsys.readouterr().out.replace("\n", " ")
    assert main(["energy", str(tmp_path / "after"), "--no-cache"]) == 0
    energy = capsys.readouterr().out
    assert "Processor 0: 1.60 J a step, 200 W: measured: RAPL's counter" in energy
    assert "over 300 steps" in energy
