"""Two hand-written programs against each other: every figure known, every sum exact."""

from __future__ import annotations

from fractions import Fraction

import polars as pl
import pytest

from stepscope.compare import Comparison, Side, compare_sides, compare_traces
from stepscope.compare.comparison import by_name
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import LoaderFacts, ProgramFacts
from tests.unit.recording import Recording

INPUT = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def training(
    *, steps: int, load_ns: int, kernels: int = 2, shapes: str = "[[8, 8]]", metadata: Metadata | None = None
) -> Recording:
    """Steps one after the other: a batch is loaded, then kernels of 100 ns are launched and waited for."""
    recording = Recording(metadata or Metadata())
    time, correlation = 1000, 1
    for number in range(steps):
        begin = time
        recording.annotation(time, load_ns, INPUT)
        time += load_ns
        for _ in range(kernels):
            recording.operator(time, 10, "aten::mm", input_shapes=shapes)
            recording.launched(time + 2, time + 10, 100, "gemm", correlation)
            time, correlation = time + 120, correlation + 1
        recording.step(begin, time - begin, number)
    return recording


def totals(table: pl.DataFrame, side: str) -> int:
    return int(table[f"{side}_total_ns"].sum())


def check_sums(found: Comparison) -> None:
    """The law: per side the causes are the steps, and the differences the difference."""
    assert totals(found.causes, "before") == found.before.total_ns
    assert totals(found.causes, "after") == found.after.total_ns
    counts = found.before.step_count, found.after.step_count
    rows = found.causes.select("before_total_ns", "after_total_ns").iter_rows()
    exact = sum(Fraction(after, counts[1]) - Fraction(before, counts[0]) for before, after in rows)
    assert exact == Fraction(found.after.total_ns, counts[1]) - Fraction(found.before.total_ns, counts[0])
    assert found.causes["difference_ns"].sum() == pytest.approx(found.difference_ns)


def causes(found: Comparison) -> dict[tuple[str, str], tuple[float, float, float]]:
    columns = ("kind", "name", "before_ns", "after_ns", "difference_ns")
    return {
        (kind, name): (before, after, more) for kind, name, before, after, more in found.causes[columns].iter_rows()
    }


def test_nothing_recorded_on_either_side() -> None:
    found = compare_traces(Trace.from_tables({}), Trace.from_tables({}))

    assert found.samples.verdict == "too few steps"
    assert found.difference_ns == 0
    assert found.notes[:2] == (
        "No steps were found before: the whole recording counts as one step.",
        "No steps were found after: the whole recording counts as one step.",
    )
    check_sums(found)


def test_a_side_without_a_trace_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="after has no trace"):
        compare_traces(Trace.from_tables({}), [])


def test_the_causes_of_a_difference_add_up_to_it() -> None:
    """Given steps of 240 ns of work's time after loading for 500 ns, and for 90 ns: loading makes it all."""
    before = training(steps=4, load_ns=500).trace()
    after = training(steps=3, load_ns=90).trace()

    found = compare_traces(before, after)

    assert (found.before.step_ns, found.after.step_ns, found.difference_ns) == (740, 330, -410)
    assert found.basis == "device"
    assert found.samples.verdict == "faster"
    assert (found.samples.before_ns, found.samples.after_ns) == (740, 330)
    table = causes(found)
    assert table["busy", "computing"] == (200, 200, 0)
    assert table["idle", "input"] == (500, 90, -410)
    check_sums(found)
    assert found.causes["name"][0] == "input"
    assert found.causes["share"][0] == pytest.approx(-410 / 740)


def test_the_kinds_of_work_count_each_moment_once() -> None:
    """Given a copy of 60 ns that computing covers for 20 ns, and a collective that it covers whole."""

    def recording(copy_ns: int) -> Trace:
        made = Recording()
        made.launched(0, 10, 100, "gemm", 1)
        made.launched(2, 20, 50, "ncclAllReduce", 2, kind="communication", queue="8")
        made.launched(4, 90, copy_ns, "Memcpy HtoD", 3, kind="copy_in", queue="9")
        made.step(0, 200, 1)
        return made.trace()

    found = compare_traces(recording(60), recording(100))

    table = causes(found)
    assert table["busy", "computing"] == (100, 100, 0)
    assert table["busy", "copies"] == (40, 80, 40)
    assert ("busy", "communication") not in table
    assert found.difference_ns == 0
    check_sums(found)


def test_a_device_that_is_still_at_work_when_the_host_is_done_counts_to_its_end() -> None:
    def recording(kernel_ns: int) -> Trace:
        made = Recording()
        for number in range(3):
            made.step(number * 10, 10, number)
            made.launched(number * 10 + 1, 100 + number * kernel_ns, kernel_ns, "gemm", number + 1)
        return made.trace()

    found = compare_traces(recording(1000), recording(1500))

    assert (found.before.total_ns, found.after.total_ns) == (3000, 4500)
    assert (found.samples.before_ns, found.samples.after_ns) == (1000, 1500)
    assert causes(found) == {("busy", "computing"): (1000, 1500, 500)}
    check_sums(found)


def test_what_follows_the_last_work_is_told_by_the_host() -> None:
    made = Recording()
    made.launched(0, 10, 90, "gemm", 1)
    made.annotation(100, 300, INPUT)
    made.step(0, 400, 1)
    trace = made.trace()

    found = compare_traces(trace, trace)

    assert causes(found)["idle", "input"] == (300, 300, 0)
    check_sums(found)


def test_without_a_device_the_main_thread_tells() -> None:
    def recording(load_ns: int) -> Trace:
        made = Recording()
        for number in range(2):
            begin = number * (load_ns + 100)
            made.annotation(begin, load_ns, INPUT)
            made.operator(begin + load_ns, 100, "aten::mm")
            made.step(begin, load_ns + 100, number)
        return made.trace()

    found = compare_traces(recording(50), recording(10))

    assert found.basis == "host"
    assert causes(found) == {("host", "input"): (50, 10, -40), ("host", "compute"): (100, 100, 0)}
    assert found.operators.select("name", "before_ns", "after_ns").rows() == [("aten::mm", 100, 100)]
    check_sums(found)


def test_a_device_against_a_host_is_said_and_adds_up() -> None:
    made = Recording()
    for number in range(2):
        made.operator(number * 100, 100, "aten::mm", input_shapes="[[8, 8]]")
        made.step(number * 100, 100, number)

    found = compare_traces(made.trace(), training(steps=2, load_ns=60).trace())

    assert found.basis == "mixed"
    assert found.notes[0].startswith("No device was recorded before: ")
    assert found.operators.select("name", "before_ns", "after_ns").rows() == [("aten::mm", 100, 20)]
    check_sums(found)


def test_operators_with_other_shapes_and_kernels_that_came_and_went() -> None:
    before = training(steps=2, load_ns=50)
    after = training(steps=2, load_ns=50, shapes="[[16, 16]]")
    before.launched(702, 705, 20, "old_kernel", 99)
    after.launched(702, 705, 20, "new_kernel", 99)
    for made in (before, after):
        made.step(700, 300, 50)

    found = compare_traces(before.trace(), after.trace())

    row = found.operators.row(0, named=True)
    assert (row["name"], row["match"]) == ("aten::mm", "other shapes")
    assert (row["input_shapes"], row["after_input_shapes"]) == ("[[8, 8]]", "[[16, 16]]")
    kernels = dict(found.kernels.select("name", "match").iter_rows())
    assert kernels == {"gemm": "other shapes", "old_kernel": "only before", "new_kernel": "only after"}
    assert totals(found.kernels, "before") == 2 * 2 * 100 + 20


def test_shapes_that_only_one_recording_kept_part_nothing() -> None:
    before = training(steps=2, load_ns=50).trace()
    after = training(steps=2, load_ns=50)
    for row in after._rows["operators"]:
        row.pop("input_shapes")

    found = compare_traces(before, after.trace())

    assert found.operators["match"].to_list() == ["same"]
    assert "Only one side's recording has input shapes: operators are matched without them." in found.notes


def test_names_together() -> None:
    table = pl.DataFrame(
        {
            "name": ["mm", "mm", "add", "old"],
            "match": ["other shapes", "same", "same", "only before"],
            "difference_ns": [-30.0, 10.0, 1.0, -5.0],
            "share": [-0.3, 0.1, 0.01, -0.05],
            "before_ns": [40.0, 10.0, 1.0, 5.0],
            "after_ns": [10.0, 20.0, 2.0, 0.0],
            "before_calls": [4.0, 1.0, 1.0, 1.0],
            "after_calls": [1.0, 1.0, 1.0, 0.0],
            "module": ["a", "b", None, None],
            "input_shapes": ["[[1]]", "[[2]]", None, None],
        }
    )

    assert by_name(table).rows() == [
        ("mm", "other shapes", 50.0, 30.0, -20.0, pytest.approx(-0.2), 5.0, 2.0, 2, "a", "[[1]]"),
        ("old", "only before", 5.0, 0.0, -5.0, -0.05, 1.0, 0.0, 1, None, None),
        ("add", "same", 1.0, 2.0, 1.0, 0.01, 1.0, 1.0, 1, None, None),
    ]
    assert by_name(pl.concat([table, table.with_columns(match=pl.lit("only before"))]))["match"][0] == "partly"


def test_ranks_of_one_run_are_one_run_and_runs_are_several() -> None:
    ranks = [training(steps=3, load_ns=load, metadata=Metadata(rank=rank)) for rank, load in enumerate((40, 60))]
    runs = [training(steps=3, load_ns=load) for load in (40, 60)]

    found = compare_traces([made.trace() for made in ranks], [made.trace() for made in runs])

    assert (found.before.ranks, found.before.runs, found.samples.before_runs) == (2, 1, 1)
    assert (found.after.ranks, found.after.runs, found.samples.after_runs) == (1, 2, 2)
    assert (found.samples.before_steps, found.samples.after_steps) == (3, 6)
    assert (found.samples.before_ns, found.samples.after_ns) == (300, 290)  # a step ends when the last rank's does
    assert "Ranks: 2 before and 1 after; the tables are a rank's mean." in found.notes
    check_sums(found)


def test_ranks_of_several_runs_are_as_many_runs() -> None:
    records = [
        training(steps=2, load_ns=load, metadata=Metadata(rank=rank)).trace()
        for load in (40, 60, 80)
        for rank in range(2)
    ]

    found = compare_traces(records, records[:2])

    assert (found.before.ranks, found.before.runs, found.samples.before_runs) == (2, 3, 3)
    assert found.samples.before_ns == 300
    assert (found.after.ranks, found.after.runs) == (2, 1)


def test_several_programs_against_one_read_each_trace_once() -> None:
    opened = []

    def traces(load_ns: int) -> object:
        opened.append(load_ns)
        yield training(steps=2, load_ns=load_ns).trace()

    sides = [Side(name, traces(load)) for name, load in (("base", 50), ("a", 40), ("b", 70))]  # type: ignore[arg-type]
    found = compare_sides(sides[0], sides[1:])

    assert [(each.before.name, each.after.name, each.difference_ns) for each in found] == [
        ("base", "a", -10),
        ("base", "b", 20),
    ]
    assert opened == [50, 40, 70]


def test_steps_without_the_profiler_decide_where_both_have_some() -> None:
    before, after = training(steps=3, load_ns=50).trace(), training(steps=3, load_ns=50).trace()
    timed = [[100.0, 101.0, 99.0, 100.0] * 5], [[150.0, 151.0, 149.0, 150.0] * 5]

    found = compare_traces(Side("a", [before], unprofiled=timed[0]), Side("b", [after], unprofiled=timed[1]))
    one_sided = compare_traces(Side("a", [before], unprofiled=timed[0]), Side("b", [after]))

    assert found.is_unprofiled
    assert found.samples.verdict == "slower"
    assert found.notes[-1].startswith("The verdict is about steps that ran without the profiler;")
    assert not one_sided.is_unprofiled
    assert one_sided.samples.before_ns == 290


def test_only_settings_that_differ_are_listed() -> None:
    def metadata(workers: int, threads: int) -> Metadata:
        program = ProgramFacts(
            loaders=(LoaderFacts(workers=workers, batch_size=32),),
            torch={"threads": threads, "version": "2.9"},
            process={"processors": 8, "garbage_collection_ns": threads},
        )
        return Metadata(devices=(Device("0", "H100"),), recorded=("stacks",), program=program)

    found = compare_traces(
        Side("a", [training(steps=1, load_ns=5, metadata=metadata(0, 4)).trace()], {"git commit": "abc"}),
        Side("b", [training(steps=1, load_ns=5, metadata=metadata(4, 4)).trace()], {"git commit": "abd", "x": "1"}),
    )

    assert found.settings.rows() == [("git commit", "abc", "abd"), ("loader.workers", "0", "4"), ("x", None, "1")]


def test_other_recording_options_are_noted() -> None:
    sides = [training(steps=1, load_ns=5, metadata=Metadata(recorded=kept)).trace() for kept in ((), ("stacks",))]

    found = compare_traces(*sides)

    assert "Only one side's recording kept stacks, which costs time itself: record both alike." in found.notes


def test_lines_that_only_one_recording_kept_are_not_called_new() -> None:
    """Given the same program, recorded without Python frames and with them."""
    before, after = training(steps=2, load_ns=50), training(steps=2, load_ns=50)
    after.frame(1000, 1000, "train.py(10): main")

    found = compare_traces(before.trace(), after.trace())

    assert found.lines.is_empty()
    assert "Only one side's recording has lines of your code, so this is not compared." in found.notes


def test_memory_at_the_peak() -> None:
    def recording(size: int) -> Trace:
        made = training(steps=2, load_ns=50)
        made.block(1010, 1040, size)
        return made.trace()

    found = compare_traces(recording(100), recording(260))

    assert found.memory.select("before_bytes", "after_bytes", "difference_bytes").sum().row(0) == (100, 260, 160)
    one_sided = compare_traces(recording(100), training(steps=2, load_ns=50).trace())
    assert one_sided.memory.is_empty()
    assert "Only one side's recording has memory, so this is not compared." in one_sided.notes


def test_runs_of_different_lengths_count_alike_in_the_verdict_and_by_steps_in_the_tables() -> None:
    runs = [training(steps=count, load_ns=load).trace() for count, load in ((2, 60), (6, 20))]

    found = compare_traces(runs, runs)

    assert found.samples.before_ns == 280
    assert found.before.step_ns == 270
    assert found.notes == (
        "Every run counts the same in the verdict, and every step in the tables: their mean step is 0.3 us before and "
        "0.3 us after.",
    )


def test_several_devices_are_said_to_count_together_or_alone() -> None:
    recording = Recording()
    for step in range(4):
        recording.step(1_000 * step, 1_000, step)
        for device in ("0", "1"):
            correlation = 10 * step + int(device)
            recording.launch(1_000 * step + 5 + int(device), 1, correlation)
            recording.work(1_000 * step + 20, 500, "gemm", correlation, device=device)
    told = compare_traces(recording.trace(), recording.trace()).notes
    assert "A trace has 2 devices: operators and lines of your code count all of them, the other tables one." in told
