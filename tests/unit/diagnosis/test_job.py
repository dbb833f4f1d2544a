"""What a rank's findings save for its job, beside the same job simulated without their cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.analysis.host import CAUSES
from stepscope.diagnosis.job import JobSteps, job_of, job_steps, promised
from stepscope.diagnosis.rank_groups import exchanges
from stepscope.diagnosis.rank_summary import cut_places
from stepscope.diagnosis.ranks import _ABOUT, across_ranks, with_remedies
from stepscope.diagnosis.rules import RULES
from stepscope.diagnosis.view import View
from stepscope.readers import open_trace
from stepscope.report.diagnosis import TraceReport, trace_report
from stepscope.report.ranks import job_sentences
from stepscope.whatif.job import Job
from tests.simulator.job import US, Rank, job, write_job

RANKS, STEPS = 3, 3
LATE, SECOND = 2, 1
INPUT_NS = {0: 60 * US, SECOND: 160 * US, LATE: 460 * US}


def program(rank: Rank, input_ns: dict[int, int] = INPUT_NS) -> None:
    main = rank.main
    for number in range(STEPS):
        with main.step(number), main.frame("train.py(12): step", before_ns=3 * US):
            if input_ns[rank.number]:
                main.data_loader(input_ns[rank.number], workers=True)
            with main.operator("aten::addmm"):
                main.launch("gemm", rank.queue, 150 * US)
            rank.reduce("0", range(RANKS))
            main.item(rank.queue)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[TraceReport]:
    folder = tmp_path_factory.mktemp("job")
    write_job(folder, job(RANKS, program))
    views = [View(open_trace(folder / f"rank{number}.json")) for number in range(RANKS)]
    return [trace_report(view, rules=["input-bound"], top=0, minimum_share=0.01) for view in views]


def joined(reports: list[TraceReport]) -> tuple[Job, JobSteps]:
    summaries = [report.rank for report in reports if report.rank is not None]
    found = job_of(summaries)
    assert found is not None
    return found, job_steps(found, summaries)


def savings(reports: list[TraceReport], minimum_share: float = 0.0) -> list[dict[str, int]]:
    found, steps = joined(reports)
    diagnoses, saved = [report.diagnosis for report in reports], [report.saved for report in reports]
    after = promised(diagnoses, saved, found, steps, minimum_share=minimum_share)
    return [{each.rule: each.saving_ns_per_step for each in diagnosis.findings} for diagnosis in after]


def step_ns(input_ns: dict[int, int]) -> int:
    rank = job(RANKS, lambda each: program(each, input_ns))[0]
    steps = [each for each in rank.main.slices if each.name.startswith("ProfilerStep")]
    return ((steps[-1].end_ns or 0) - steps[0].start_ns) // STEPS


def test_a_finding_of_all_ranks_saves_what_the_job_takes_less(reports: list[TraceReport]) -> None:
    alone = [report.diagnosis.findings[0].saving_ns_per_step for report in reports]
    without = step_ns(INPUT_NS) - step_ns(dict.fromkeys(INPUT_NS, 0))

    assert alone == list(INPUT_NS.values())
    assert savings(reports) == [{"input-bound": without}] * RANKS


def test_a_finding_of_the_late_rank_saves_up_to_the_second_latest(reports: list[TraceReport]) -> None:
    only = [
        report if number == LATE else replace(report, diagnosis=replace(report.diagnosis, findings=()), saved=())
        for number, report in enumerate(reports)
    ]
    without = step_ns(INPUT_NS) - step_ns({**INPUT_NS, LATE: 0})

    assert savings(only) == [{}, {}, {"input-bound": without}]
    assert without == INPUT_NS[LATE] - INPUT_NS[SECOND]


def test_a_finding_of_a_rank_that_waits_saves_nothing(reports: list[TraceReport]) -> None:
    only = [
        report if number == SECOND else replace(report, diagnosis=replace(report.diagnosis, findings=()), saved=())
        for number, report in enumerate(reports)
    ]

    assert savings(only) == [{}, {"input-bound": 0}, {}]
    assert savings(only, 0.01) == [{}, {}, {}]


def test_a_saving_that_was_added_up_is_spread_over_the_ranks_own_work(reports: list[TraceReport]) -> None:
    attributed = [replace(report, saved=(None,)) for report in reports]
    found, steps = joined(reports)

    [finding] = promised(
        [report.diagnosis for report in attributed], [(None,)] * RANKS, found, steps, minimum_share=0.0
    )[LATE].findings

    assert INPUT_NS[LATE] - INPUT_NS[SECOND] < finding.saving_ns_per_step < INPUT_NS[LATE]
    assert finding.confidence != "high"


def test_the_job_is_as_long_as_its_last_rank(reports: list[TraceReport]) -> None:
    _, steps = joined(reports)

    assert (steps.step_ns, steps.error_share, steps.missing, steps.is_whole) == (step_ns(INPUT_NS), 0, 0, True)
    assert steps.parts.row(0)[:3] == (f"rank {LATE}", "input", INPUT_NS[LATE])
    assert steps.holders["rank"].to_list() == [f"rank {LATE}"] * STEPS
    assert steps.holders["cause"].to_list() == ["input"] * STEPS


def test_without_a_rank_less_is_certain(reports: list[TraceReport]) -> None:
    found, steps = joined(reports[1:])

    [finding] = promised(
        [report.diagnosis for report in reports[1:]], [report.saved for report in reports[1:]], found, steps,
        minimum_share=0.0,
    )[1].findings  # fmt: skip

    assert (steps.missing, steps.is_whole, finding.confidence) == (1, False, "low")
    assert any(figure.name == "ranks that were not recorded whole" for figure in finding.evidence.figures)
    assert (steps.absent, steps.open_ns) == (("rank 0",), steps.transfer_ns)
    assert any("rank 0" in sentence for sentence in job_sentences(steps))


def test_a_cut_rank_is_left_out_and_named(reports: list[TraceReport]) -> None:
    whole = [report.rank for report in reports if report.rank is not None]
    kept = whole[0].record.collectives
    assert kept.before is not None
    first = replace(kept, table=kept.table.head(1), before=kept.before.head(1))
    cut = replace(whole[0], record=replace(whole[0].record, collectives=first), waits=whole[0].waits.head(1))
    summaries = [cut, *whole[1:]]

    found = job_of(summaries)

    assert found is not None
    steps = job_steps(found, summaries)
    assert (steps.apart, steps.ranks, steps.missing, steps.error_share) == (("rank 0",), 2, 1, 0)
    assert (steps.last, steps.step_ns) == (f"rank {LATE}", step_ns(INPUT_NS))
    diagnoses = [report.diagnosis for report in reports]
    after = promised(diagnoses, [report.saved for report in reports], found, steps, minimum_share=0.0)
    assert after[0] == diagnoses[0]


def test_ranks_without_common_collectives_are_no_job(reports: list[TraceReport]) -> None:
    assert job_of([]) is None
    assert job_of([each.rank for each in reports[:1] if each.rank is not None]) is None


def test_communication_with_a_missing_rank_promises_nothing_and_a_tie_names_nobody(tmp_path: Path) -> None:
    ranks = job(RANKS, lambda rank: program(rank, {0: 60 * US, 1: 60 * US, 2: 460 * US}))
    write_job(tmp_path, ranks)
    views = [View(open_trace(tmp_path / f"rank{number}.json")) for number in (0, 1)]
    reports = [trace_report(view, rules=["exposed-communication"], top=0, minimum_share=0.01) for view in views]
    assert all(report.diagnosis.findings for report in reports)

    _, steps = joined(reports)

    assert steps.holders["rank"].to_list() == [None] * STEPS
    assert steps.open_ns >= 400 * US
    assert savings(reports) == [{"exposed-communication": 0}] * 2


def test_a_rank_that_ends_early_is_nobody_in_the_others_exchanges(reports: list[TraceReport]) -> None:
    records = [report.rank.record for report in reports if report.rank is not None]
    kept = records[LATE].collectives
    short = replace(kept, table=kept.table.head(1), before=None if kept.before is None else kept.before.head(1))
    cut = [*records[:LATE], replace(records[LATE], collectives=short)]

    assert cut_places(cut) == {LATE}
    assert not across_ranks(cut)
    assert exchanges(cut).table["last"].to_list() == [f"rank {SECOND}"]


def test_the_late_ranks_own_finding_tells_what_to_do(reports: list[TraceReport]) -> None:
    records = [
        with_remedies(report.rank.record, report.diagnosis.findings) for report in reports if report.rank is not None
    ]
    [own] = reports[LATE].diagnosis.findings

    late = across_ranks(records)[0]

    assert (late.rule, late.remedy, late.where) == ("late-rank", own.remedy, own.where)
    assert set(_ABOUT) <= {rule.id for rule in RULES}
    assert set(_ABOUT.values()) <= set(CAUSES)
