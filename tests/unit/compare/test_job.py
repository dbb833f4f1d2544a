"""Two jobs of several ranks, of which one rank got slower."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from stepscope.compare.comparison import Comparison, compare_traces
from stepscope.compare.job import JobComparison, compared_jobs
from stepscope.readers import open_trace
from stepscope.report.comparison import job_sentences
from tests.simulator.job import US, Rank, job, write_job

RANKS, STEPS = 3, 6
LATE, LATE_NS = 2, 400 * US


def write(folder: Path, late: dict[int, int]) -> None:
    def program(rank: Rank) -> None:
        for number in range(STEPS):
            with rank.main.step(number):
                rank.main.data_loader((30 + number % 3) * US + late.get(rank.number, 0), workers=True)
                with rank.main.operator("aten::addmm"):
                    rank.main.launch("gemm", rank.queue, 150 * US)
                rank.reduce("0", range(RANKS))
                rank.main.item(rank.queue)

    write_job(folder, job(RANKS, program))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("jobs")
    write(folder / "before", {})
    write(folder / "after", {LATE: LATE_NS})
    before, after = (
        [open_trace(folder / side / f"rank{number}.json") for number in range(RANKS)] for side in ("before", "after")
    )
    return compare_traces(before, after)


def jobs(found: Comparison) -> JobComparison:
    assert found.job is not None
    return found.job


def test_the_step_is_that_of_the_last_rank(found: Comparison) -> None:
    assert jobs(found).after.step_ns - jobs(found).before.step_ns == LATE_NS
    assert found.samples.verdict == "slower"
    assert found.samples.after_ns == pytest.approx((found.samples.before_ns or 0) + LATE_NS, rel=0.01)


def test_the_critical_paths_differ_by_what_the_late_rank_waits_for(found: Comparison) -> None:
    path = jobs(found).path
    assert path.row(0)[0] == "input"
    assert path["difference_ns"].to_list()[0] == LATE_NS
    assert path["difference_ns"].sum() == pytest.approx(LATE_NS, abs=len(path))
    [parts] = jobs(found).after.parts.filter(pl.col("cause") == "input").rows()
    assert parts[0] == f"rank {LATE}"


def test_only_the_late_rank_got_slower_besides_waiting(found: Comparison) -> None:
    rows = {row["rank"]: row for row in jobs(found).ranks.rows(named=True)}
    assert rows[f"rank {LATE}"]["difference_ns"] == pytest.approx(LATE_NS, rel=0.01)
    assert [name for name, row in rows.items() if row["verdict"] == "slower"] == [f"rank {LATE}"]
    assert any(f"rank {LATE}" in sentence for sentence in job_sentences(jobs(found)))


def test_the_others_wait_longer_and_data_move_as_long(found: Comparison) -> None:
    before, after = jobs(found).before, jobs(found).after
    assert after.wait_ns - before.wait_ns == LATE_NS * (RANKS - 1) // RANKS
    assert after.transfer_ns == before.transfer_ns


def test_ranks_that_do_not_meet_are_no_jobs() -> None:
    assert compared_jobs([], []) is None
