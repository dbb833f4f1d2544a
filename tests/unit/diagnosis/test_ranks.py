"""What several ranks' traces tell together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.communication import collectives, lateness
from stepscope.analysis.matching import RankCollectives, clocks, matched_collectives
from stepscope.diagnosis import Diagnosis, diagnose
from stepscope.diagnosis.rank_groups import exchanges, parallelism
from stepscope.diagnosis.rank_summary import rank_record
from stepscope.diagnosis.ranks import across_ranks, diagnose_ranks, reasons, without_answered
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace, trace_files
from stepscope.trace import Metadata, Trace
from tests.claims import unsupported
from tests.simulator.jobs import FAULTS, drawn
from tests.simulator.nsight_systems import write_nsight
from tests.simulator.ranks import rank_machine
from tests.simulator.xplane import write_xplane
from tests.unit.recording import Recording

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
STEPS = 3


def rank(
    number: int,
    arrival_ns: int,
    *,
    clock_ns: int = 0,
    loading_ns: int = 0,
    elements: int = 64,
    world: int = 2,
    scale: int = 1,
) -> Trace:
    """Steps of 1,000 ns times the scale: this rank comes to the reduction at one time, and all leave it at 700."""
    metadata = Metadata(path=f"rank{number}.json", rank=number, world_size=world, origin_unix_ns=10_000 + clock_ns)
    recording = Recording(metadata=metadata)
    for step in range(STEPS):
        begin = 1000 * scale * step
        recording.step(begin, 1000 * scale, step)
        recording.frame(begin, 990 * scale, "train.py(12): step")
        if loading_ns:
            recording.annotation(begin + 2, loading_ns, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        recording.launched(begin + loading_ns + 3, begin + loading_ns + 10, 80 * scale, "gemm", 10 * step + 101)
        recording.launched(
            begin + arrival_ns * scale - 5, begin + arrival_ns * scale, (700 - arrival_ns) * scale, ALL_REDUCE,
            10 * step + 102, queue="24", kind="communication", message_elements=elements, message_type="Float",
            collective="allreduce", group="0", group_size=world,
        )  # fmt: skip
        recording.launched(begin + 720 * scale, begin + 730 * scale, 200 * scale, "optimizer", 10 * step + 103)
    return recording.trace()


def test_nothing_is_told_of_one_rank_or_none() -> None:
    assert diagnose_ranks([]) == ()
    assert diagnose_ranks([rank(0, 100)]) == ()
    assert matched_collectives([]).is_empty()


def test_the_rank_that_comes_last_is_named_with_what_held_it_up() -> None:
    [finding] = diagnose_ranks([rank(0, 100), rank(1, 500, loading_ns=400)])

    assert (finding.rule, finding.saving_ns_per_step) == ("late-rank", 400)
    assert finding.title.startswith("the other ranks wait 0.0 ms a step for rank 1, where the host was loading data")
    assert [(place.file, place.line) for place in finding.where] == [("train.py", 12)]
    assert finding.evidence.figures[1].value == 1.0


def test_clocks_are_put_right_by_the_ends() -> None:
    same = diagnose_ranks([rank(0, 100), rank(1, 500, loading_ns=400)])

    assert diagnose_ranks([rank(0, 100), rank(1, 500, clock_ns=123_456_789, loading_ns=400)]) == same


def test_ranks_that_come_together_wait_for_nobody() -> None:
    assert diagnose_ranks([rank(0, 100), rank(1, 110)]) == ()


def test_where_several_ranks_come_late_all_waits_count() -> None:
    ranks = [rank(0, 100, world=3), rank(1, 480, world=3), rank(2, 500, world=3)]
    [finding] = diagnose_ranks(ranks)

    # The last comes 20 ns after the one before; the ranks wait 400, 20 and 0 ns.
    assert (finding.rule, finding.saving_ns_per_step, finding.saving_share) == ("late-rank", 140, 0.14)
    assert [figure.value for figure in finding.evidence.figures][:6] == [0.14, 140, 1.0, 400, 0, 1]
    assert ("rank 2 comes last" in finding.title, "rank 0 waits" in finding.title) == (True, True)
    assert diagnose_ranks([rank(number, 500, world=3) for number in range(3)]) == ()


def exchanging(number: int, begin_ns: int, work_ns: list[int], *, end_ns: int, idle_ns: int = 0) -> Trace:
    """One step: the rank begins it, waits for its data, works, and comes to a reduction that all leave at one time."""
    recording = Recording(metadata=Metadata(path=f"rank{number}.json", rank=number, world_size=2, origin_unix_ns=1))
    recording.step(begin_ns, end_ns + 50 - begin_ns, 7)
    now = begin_ns
    if idle_ns:
        recording.annotation(now, idle_ns, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        now += idle_ns
    for place, length in enumerate(work_ns):
        recording.launched(now, now + 10, length, "gemm", 10 + place)
        now += length + 10
    recording.launched(
        now, now + 5, end_ns - now - 5, ALL_REDUCE, 99, queue="24", kind="communication", message_elements=2**20,
        message_type="Float", collective="allreduce", group="0", group_size=2,
    )  # fmt: skip
    return recording.trace()


def largest_reason(*traces: Trace) -> tuple[int, str, int]:
    records = [rank_record(View(trace)) for trace in traces]
    found = [record.collectives for record in records]
    late = lateness(found, matched_collectives(found))
    first = reasons(records, late, late.root)[0]
    return first.place, first.cause, first.works


def test_why_a_rank_comes_late_is_told_by_what_it_did_longer_since_the_exchange_before() -> None:
    usual = exchanging(0, 1000, [200_000], end_ns=900_000)
    assert largest_reason(usual, exchanging(1, 401_000, [200_000], end_ns=900_000)) == (1, "begin", 0)
    assert largest_reason(usual, exchanging(1, 1000, [600_000], end_ns=900_000)) == (1, "busy", 0)
    assert largest_reason(usual, exchanging(1, 1000, [200_000] * 3, end_ns=900_000)) == (1, "busy", 2)
    assert largest_reason(usual, exchanging(1, 1000, [200_000], end_ns=900_000, idle_ns=400_000)) == (1, "input", 0)


def test_a_late_begin_is_not_blamed_on_what_the_rank_does() -> None:
    [finding] = diagnose_ranks([exchanging(0, 1000, [200_000], end_ns=900_000),
                                exchanging(1, 401_000, [200_000], end_ns=900_000)])  # fmt: skip
    assert "which began the recorded steps 0.4 ms later" in finding.title
    assert "Record several steps" in finding.remedy.text


def ends_of(clock: Callable[[int], int], *, count: int = 100, apart_ns: int = 50_000_000) -> RankCollectives:
    """A rank whose clock shows this when the first one's shows a time; every collective lasts 1 ms."""
    ends = [clock(apart_ns * number) for number in range(1, count + 1)]
    table = pl.DataFrame({"start_ns": ends}).with_columns(pl.col("start_ns") - 1_000_000)
    return RankCollectives(
        table.select(
            step=pl.int_range(pl.len()), kind=pl.lit("all_reduce"), group=pl.lit("0"), bytes=pl.lit(64),
            start_ns="start_ns", duration_ns=pl.lit(1_000_000),
        )
    )  # fmt: skip


def test_clocks_that_drift_are_told_from_noise() -> None:
    noise = [((number * 7919) % 401) - 200 for number in range(10_000)]

    def drifting(time: int) -> int:
        return 5_000_000_000 + time + round(time * 20e-6)

    def noisy(time: int) -> int:
        return time + noise[time // 50_000_000] * 1_000

    matched = matched_collectives([ends_of(lambda time: time), ends_of(drifting), ends_of(noisy)])
    first, second, third = clocks(matched).values()
    assert first == (0, 0.0, 0)
    assert second.drift == pytest.approx(20e-6, rel=1e-3)
    assert abs(second.ahead_ns - 5_000_001_000) < 1_000
    assert second.error_ns <= 1
    assert third.drift == 0.0
    assert third.error_ns == pytest.approx(100_000, rel=0.1)
    assert max(matched["waiting_ns"].to_list()) < 450_000  # without the drift, which is 100 us by the end


def test_a_few_collectives_tell_no_drift() -> None:
    matched = matched_collectives(
        [ends_of(lambda time: time, count=10), ends_of(lambda time: time + time // 50_000, count=10)]
    )
    assert [clock.drift for clock in clocks(matched).values()] == [0.0, 0.0]
    assert clocks(matched_collectives([])) == {}


def test_waiting_and_transfer_of_each_kind_and_size() -> None:
    traces = [exchanging(0, 1000, [200_000], end_ns=900_000), exchanging(1, 1000, [600_000], end_ns=900_000)]
    [row] = exchanges([rank_record(View(trace)) for trace in traces]).table.rows(named=True)
    assert (row["kind"], row["bytes"], row["per_step"], row["last"], row["last_share"]) == (
        "all_reduce", 2**22, 1.0, "rank 1", 1.0,
    )  # fmt: skip
    assert (row["wait_ns"], row["transfer_ns"]) == (200_000, 900_000 - 601_015)  # rank 0 waits 400,000, rank 1 nothing
    assert row["bus_gb_per_s"] == row["algorithm_gb_per_s"] == 2**22 / (900_000 - 601_015)
    assert (row["link_share"], row["overlapped_share"], row["most_exposed"]) == (None, 0.0, "rank 0")
    assert exchanges([]).table.is_empty()


def test_a_rank_that_is_not_here_may_be_the_last() -> None:
    assert diagnose_ranks([rank(0, 100, world=8), rank(1, 500, world=8)]) == ()


def test_collectives_match_by_step_and_order() -> None:
    traces = [rank(0, 100), rank(1, 500)]
    tables = []
    for trace in traces:
        work = trace.device_work.filter(trace.device_work["kind"] == "communication")
        table = work.select("start_ns", "duration_ns", "group").with_columns(step=work["start_ns"] // 1000)
        columns = table.with_columns(kind=table["group"].replace("0", "all_reduce"), bytes=table["step"] * 0 + 256)
        tables.append(RankCollectives(columns))

    matched = matched_collectives(tables)

    assert matched["step"].to_list() == [0, 1, 2]
    assert matched["last"].to_list() == [1, 1, 1]
    assert matched["late_ns"].to_list() == [400, 400, 400]
    assert matched["transfer_ns"].to_list() == [200, 200, 200]


def test_slow_data_is_told_apart_from_late_ranks() -> None:
    # 1 MiB in 2 ms after both have come; at 5 GB/s it would take 209,715 ns.
    traces = [rank(number, 500, elements=2**18, scale=10_000) for number in (0, 1)]

    [finding] = diagnose_ranks(traces)

    assert (finding.rule, finding.saving_ns_per_step) == ("slow-transfer", 2_000_000 - 209_716)
    assert finding.title == "data moves at 0.52 GB/s once all ranks are there, below the 5.0 GB/s expected"


def test_fast_data_is_not_slow() -> None:
    assert diagnose_ranks([rank(number, 500, elements=2**18) for number in (0, 1)]) == ()


def test_the_question_for_the_other_ranks_is_gone_where_all_are_there() -> None:
    both = [diagnose(rank(0, 100)), diagnose(rank(1, 100))]

    def open_questions(diagnosis: Diagnosis) -> bool:
        return any(question.rule == "exposed-communication" for question in diagnosis.not_answered)

    assert all(open_questions(diagnosis) for diagnosis in both)
    assert not any(open_questions(diagnosis) for diagnosis in without_answered(both))
    assert all(open_questions(diagnosis) for diagnosis in without_answered([diagnose(rank(0, 100, world=3)), both[1]]))


def test_a_message_that_no_rank_can_send_has_no_size() -> None:
    for elements, size in ((2**62, None), (-5, None), (0, 0), (64, 256)):
        assert set(collectives(rank(0, 100, elements=elements))["bytes"].to_list()) == {size}


def test_what_groups_are_for_is_told_by_their_names_or_by_when_they_exchange() -> None:
    def rows(*groups: tuple[str, int, str, list[int]]) -> pl.DataFrame:
        found = [
            {"step": 0, "kind": kind, "group": name, "description": name, "size": size, "ranks": list(range(size)),
             "source": None, "arrivals_ns": [at] * size}
            for name, size, kind, times in groups for at in times
        ]  # fmt: skip
        return pl.DataFrame(found, schema_overrides={"source": pl.Int64})

    layers, end = list(range(0, 100, 10)), [85, 95, 100]
    assert parallelism(rows(("mesh_tp", 8, "all_reduce", layers), ("fsdp", 4, "all_gather", layers))) == {
        ("mesh_tp", 8): "tensor", ("fsdp", 4): "data",
    }  # fmt: skip
    assert parallelism(rows(("", 8, "all_reduce", layers), ("", 4, "all_reduce", end))) == {
        ("", 8): "tensor", ("", 4): "data",
    }  # fmt: skip
    assert parallelism(rows(("", 8, "all_reduce", layers))) == {}  # alone, it may be either
    assert parallelism(rows(("", 8, "all_to_all", layers), ("", 4, "all_reduce", end))) == {}


@pytest.mark.parametrize(("number", "fault"), [*enumerate(FAULTS[:-1])])  # the last one takes long
def test_planted_faults_are_found_first_and_clean_twins_stay_silent(number: int, fault: str) -> None:
    records, planted = drawn(8, number, fault)
    findings = across_ranks(records)
    assert planted is not None
    assert planted.is_told(findings), [each.title for each in findings]
    assert across_ranks(drawn(8, number, f"clean {fault}")[0]) == ()
    [rule] = [each for each in RULES if each.id == findings[0].rule]
    assert unsupported(findings[0], rule) == []


def late_nsight(rank: int, path: Path) -> None:
    write_nsight(rank_machine((rank == 2,) * 6), path / f"report_rank{rank}.sqlite")


def late_xla(rank: int, path: Path) -> None:
    run = path / "plugins" / "profile" / "2026_01_01"
    run.mkdir(parents=True, exist_ok=True)
    write_xplane(rank_machine((rank == 2,) * 6), run / f"host{rank}.xplane.pb")


@pytest.mark.parametrize("write", [late_nsight, late_xla])
def test_the_late_rank_among_nsights_reports_and_xlas_hosts(write: Callable[[int, Path], None], tmp_path: Path) -> None:
    for number in range(4):
        write(number, tmp_path)
    traces = [open_trace(file) for file in trace_files(tmp_path)]
    assert [(trace.metadata.rank, trace.metadata.world_size) for trace in traces] == [(rank, 4) for rank in range(4)]
    [finding] = diagnose_ranks(traces)
    assert (finding.rule, "rank 2" in finding.title) == ("late-rank", True)
