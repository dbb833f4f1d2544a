"""The replay of a job from what is kept of its ranks, beside the same job simulated without the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest

from stepscope.diagnosis import rank_summary as rank_summaries
from stepscope.diagnosis.job import job_of
from stepscope.diagnosis.rank_summary import rank_summary
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.whatif.changes import without_cause
from stepscope.whatif.job import Job
from tests.simulator.job import US, Rank, job, write_job

Program = Callable[[Rank], None]
RANKS = 4
STEPS = 3
INPUT_NS = 30 * US
LATE_NS = 400 * US
SECOND_NS = 100 * US


def step(rank: Rank, late_ns: int, layers: int = 6) -> None:
    main = rank.main
    with main.frame("train.py(12): step", before_ns=3 * US):
        main.data_loader(INPUT_NS + late_ns, workers=True)
        for layer in range(layers):
            with main.frame(f"nn.Module: Linear_{layer}", before_ns=2 * US), main.operator("aten::addmm"):
                main.launch("gemm", rank.queue, 15 * US)


def data_parallel(late: dict[int, int]) -> Program:
    """Each rank's batch comes late by so much, and all reduce at the end of a step."""

    def program(rank: Rank) -> None:
        for number in range(STEPS):
            with rank.main.step(number):
                step(rank, late.get(rank.number, 0))
                rank.reduce("0", range(RANKS))
                rank.main.item(rank.queue)

    return program


def tensor_parallel(late: dict[int, int]) -> Program:
    """Pairs reduce within each step, and ranks at the same place of their pairs at its end."""

    def program(rank: Rank) -> None:
        pair, place = divmod(rank.number, 2)
        for number in range(STEPS):
            with rank.main.step(number):
                step(rank, late.get(rank.number, 0))
                rank.reduce(f"pair {pair}", [2 * pair, 2 * pair + 1], transfer_ns=20 * US)
                step(rank, 0, layers=2)
                rank.reduce(f"place {place}", [place, place + 2])
                rank.main.item(rank.queue)

    return program


def beside(late: dict[int, int]) -> Program:
    """Gradients are reduced on a queue of their own, beside the rest of the backward pass."""

    def program(rank: Rank) -> None:
        main, sends = rank.main, rank.machine.queue(number=20)
        for number in range(STEPS):
            with main.step(number):
                step(rank, late.get(rank.number, 0))
                for _ in range(3):
                    with main.operator("aten::addmm"):
                        main.launch("gemm", rank.queue, 40 * US)
                    main.wait_event(sends, main.record_event(rank.queue))
                    rank.reduce("0", range(RANKS), queue=sends)
                main.wait_event(rank.queue, main.record_event(sends))
                with main.optimizer_step(), main.operator("aten::_fused_adamw_"):
                    main.launch("adamw", rank.queue, 25 * US)
                main.item(rank.queue)

    return program


def pipeline(late: dict[int, int]) -> Program:
    """Each rank receives from the one before, computes, and sends to the next."""

    def program(rank: Rank) -> None:
        number = rank.number
        for index in range(STEPS):
            with rank.main.step(index):
                if number:
                    rank.send_or_receive(number - 1, number)
                step(rank, late.get(number, 0))
                if number < RANKS - 1:
                    rank.send_or_receive(number, number + 1)
                rank.main.item(rank.queue)

    return program


PROGRAMS = {"data parallel": data_parallel, "tensor parallel": tensor_parallel, "beside": beside}


class Late(NamedTuple):
    """A job with two late ranks, of which one holds the others up."""

    views: list[View]
    job: Job
    program: Callable[[dict[int, int]], Program]


@pytest.fixture(scope="module", params=PROGRAMS)
def late(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Late:
    program = PROGRAMS[request.param]
    folder = tmp_path_factory.mktemp("job")
    write_job(folder, job(RANKS, program({2: LATE_NS, 1: SECOND_NS})))
    views = [View(open_trace(folder / f"rank{number}.json")) for number in range(RANKS)]
    found = job_of([rank_summary(view) for view in views])
    assert found is not None
    return Late(views, found, program)


def simulated_step_ns(ranks: list[Rank]) -> float:
    """The mean step of the rank that takes longest."""
    steps = [[each for each in rank.main.slices if each.name.startswith("ProfilerStep")] for rank in ranks]
    return max((own[-1].end_ns or 0) - own[0].start_ns for own in steps) / STEPS


def test_a_replay_without_a_change_gives_the_recorded_times(late: Late) -> None:
    found = late.job

    assert (found.measured.start == found.start).all()
    assert (found.measured.end == found.end).all()
    assert (found.meeting >= 0).all()
    assert found.recorded_ns == found.step_ns(found.measured).max()
    assert found.error_share == 0


def test_what_a_rank_saves_is_what_the_job_takes_less_without_its_cause(late: Late) -> None:
    without = simulated_step_ns(job(RANKS, late.program({2: -INPUT_NS, 1: SECOND_NS})))

    saved = late.job.saving_ns({2: late.views[2].saved(without_cause("input"))})

    assert saved == late.job.recorded_ns - without
    assert LATE_NS - SECOND_NS <= saved < LATE_NS


def test_without_the_cause_of_two_ranks_the_job_saves_all(late: Late) -> None:
    without = simulated_step_ns(job(RANKS, late.program({2: -INPUT_NS, 1: -INPUT_NS})))

    saved = {place: late.views[place].saved(without_cause("input")) for place in (1, 2)}

    assert late.job.saving_ns(saved) == late.job.recorded_ns - without


def test_a_rank_that_waits_for_another_saves_nothing_alone(late: Late) -> None:
    saved = late.views[1].saved(without_cause("input"))

    assert saved.end_ns == STEPS * (SECOND_NS + INPUT_NS)
    assert late.job.saving_ns({1: saved}) == 0


def test_the_critical_path_goes_over_the_late_rank(late: Late) -> None:
    path = late.job.critical_path()

    assert path["ns"].sum() == late.job.recorded_ns * STEPS
    inputs = path.filter(pl.col("cause") == "input")
    assert inputs["rank"].unique().to_list() == [2]
    assert inputs["ns"].to_list() == [LATE_NS + INPUT_NS] * STEPS


def test_a_prospect_says_which_rank_takes_longest(late: Late) -> None:
    saved = {place: view.saved(without_cause("input")) for place, view in enumerate(late.views)}

    found = late.job.prospect(saved)

    assert found.step_ns == late.job.recorded_ns - late.job.saving_ns(saved)
    assert (found.changed, found.error_share, len(found.ranks)) == (RANKS, 0, RANKS)
    assert found.saving_share == pytest.approx(late.job.saving_ns(saved) / late.job.recorded_ns)
    # the second latest gains nothing alone
    alone = [each.alone_step_ns for each in found.ranks]
    assert alone[1] == found.ranks[1].measured_step_ns == late.job.recorded_ns
    assert alone[2] < late.job.recorded_ns


def test_a_send_comes_before_its_receive(tmp_path: Path) -> None:
    write_job(tmp_path, job(RANKS, pipeline({0: LATE_NS})))
    views = [View(open_trace(tmp_path / f"rank{number}.json")) for number in range(RANKS)]
    found = job_of([rank_summary(view) for view in views])
    assert found is not None

    saved = found.saving_ns({0: views[0].saved(without_cause("input"))})

    assert (found.meeting >= 0).all()
    assert (found.measured.start == found.start).all()
    assert (found.measured.end == found.end).all()
    without = simulated_step_ns(job(RANKS, pipeline({0: -INPUT_NS})))
    assert saved == pytest.approx(found.recorded_ns - without, rel=0.01)  # hosts that waits hid take over


def test_what_is_kept_of_long_recordings_are_whole_steps(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_summaries, "_MOST_COLLECTIVES", 2 * late.views[0].met.height // STEPS)

    found = job_of([rank_summary(view) for view in late.views])

    assert found is not None
    assert (found.steps, found.error_share) == (2, 0)
    assert found.recorded_ns == pytest.approx(late.job.recorded_ns, rel=0.02)
    saved = {2: late.views[2].saved(without_cause("input"))}
    assert found.saving_ns(saved) == pytest.approx(late.job.saving_ns(saved), rel=0.02)
