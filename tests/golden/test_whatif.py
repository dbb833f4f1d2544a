"""Replays of real traces: exact without a change, and near what really happened with one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from stepscope.analysis.steps import step_table
from stepscope.diagnosis.job import job_of
from stepscope.diagnosis.rank_summary import rank_summary
from stepscope.diagnosis.view import View
from stepscope.whatif import Experiment
from stepscope.whatif.answer import loader_workers
from stepscope.whatif.changes import without_cause
from stepscope.whatif.critical_path import critical_path, slack_of_operators
from stepscope.whatif.experiment import Ranks
from tests.golden.opened import opened

pytestmark = pytest.mark.traces

TRACES = (
    "a100_ddp_rank3of8.json.gz",
    "a100_event_sync_two_streams.json.gz",
    "cpu_gpt2_per_token_loss.json.gz",
    "h100_owlv2.json.gz",
    "h100_qwen_chat.json.gz",
    "mi210_gpu_events_only.json.gz",
    "mi300x_resnet_checkpoint_rank0of8.json.gz",
    "mtia_training_rank0.json.gz",
    "rtx2080ti_resnet.json.gz",
    "v100_dlrm_rank1of2.json.gz",
    "v100_resnet50_workers0.json.gz",
)


@pytest.mark.parametrize("name", TRACES)
def test_the_critical_path_is_as_long_as_the_steps(name: str, traces_folder: Path) -> None:
    experiment = Experiment(opened(traces_folder / "kineto" / name))
    changed = experiment.run(without_cause("input")(experiment, experiment.graph))

    for done, length in ((None, experiment.measured_ns), (changed.replay, experiment.length_ns(changed.replay))):
        path = critical_path(experiment, done)
        ends = path["start_ns"] + path["duration_ns"]
        assert path["start_ns"][1:].to_list() == ends[:-1].to_list()
        assert path["duration_ns"].sum() == length


@pytest.mark.parametrize("name", ["v100_resnet50_workers4.json.gz", "a100_ddp_rank3of8.json.gz"])
def test_operators_may_be_late_by_their_slack_and_no_more(name: str, traces_folder: Path) -> None:
    experiment = Experiment(opened(traces_folder / "kineto" / name))
    slack = slack_of_operators(experiment)

    launched_by = experiment.trace.launches["operator"].gather(experiment.trace.device_work["launch"])
    for row, _, start, duration, _, ns in slack.sample(5, seed=1).iter_rows():
        lane, end = experiment.trace.operators["lane"].to_numpy()[[row]], np.array([start + duration])
        work = np.flatnonzero((launched_by == row).fill_null(False).to_numpy())
        for more, longer in ((ns, False), (ns + 100_000, True)):
            graphs = [experiment.graph.with_host_time(lane, end - 1, end, np.array([1.0 + more]))]
            lasts = experiment.graph.works.duration[work]
            graphs += [
                experiment.graph.with_work(np.array([one]), (last + more) / last)
                for one, last in zip(work, lasts, strict=True)
                if last > 0
            ]
            lengths = [experiment.length_ns(experiment.run(graph).replay) for graph in graphs]
            assert (max(lengths) - experiment.measured_ns > 2) == longer


def test_four_workers_give_what_was_measured_with_four_workers(traces_folder: Path) -> None:
    slow, fast = (opened(traces_folder / "kineto" / f"v100_resnet50_workers{count}.json.gz") for count in (0, 4))
    experiment = Experiment(slow)

    outcome = experiment.run(loader_workers(4)(experiment, experiment.graph))

    before, after = (float(np.median(step_table(trace)["duration_ns"].to_numpy())) for trace in (slow, fast))
    assert outcome.saving_share == pytest.approx(1 - after / before, rel=0.15)


def test_a_rank_that_another_waits_for_gains_nothing_alone(traces_folder: Path) -> None:
    traces = sorted((traces_folder / "kineto" / "ranks128_sampled").iterdir())
    ranks = Ranks.of([Experiment(opened(path)) for path in traces])

    assert [outcome.saving_ns for outcome in ranks.run([None, None])] == [0, 0]
    first, second = ranks.run([without_cause("dispatch"), None])
    both = ranks.run([without_cause("dispatch")] * 2)

    assert second.saving_ns == 0
    assert first.saving_ns < 0.25 * both[0].saving_ns


@pytest.mark.parametrize("name", ["v100_resnet50_workers0.json.gz", "v100_dlrm_rank1of2.json.gz"])
def test_own_time_saves_no_more_than_it_takes_of_the_critical_path(name: str, traces_folder: Path) -> None:
    experiment = Experiment(opened(traces_folder / "kineto" / name))
    takes = dict(critical_path(experiment).group_by("cause").agg(pl.col("duration_ns").sum()).iter_rows())

    for cause in ("dispatch", "optimizer", "untraced"):
        saved = experiment.run(without_cause(cause)(experiment, experiment.graph))
        assert 0 < saved.saving_ns * saved.step_count <= takes[cause]


def test_ranks_that_meet_on_their_hosts_are_replayed_together(traces_folder: Path) -> None:
    traces = sorted((traces_folder / "kineto" / "cpu_ddp_gloo").iterdir())
    ranks = Ranks.of([Experiment(opened(path)) for path in traces])

    assert ranks.meetings[0].shape == (2, 12)
    assert [outcome.saving_ns for outcome in ranks.run([None, None])] == [0, 0]
    # What looks like communication on the first rank is nearly all waiting for the second.
    alone = ranks.experiments[0]
    assert alone.run(without_cause("communication")(alone, alone.graph)).saving_share > 0.35
    assert max(outcome.saving_share for outcome in ranks.run([without_cause("communication")] * 2)) < 0.06


@pytest.mark.parametrize(
    ("folder", "cause", "least", "most"),
    [
        ("kineto/cpu_ddp_gloo", "communication", 0.03, 0.06),  # the first rank's trace alone promises 38 %
        ("kineto/cpu_ddp_gloo", "dispatch", 0.40, 0.50),
        ("second/v100_dlrm_8_ranks", "input", 0.05, 0.06),
        ("second/v100_dlrm_8_ranks", "communication", -0.001, 0.01),  # waits for the last rank: alone 37 %
    ],
)
def test_summaries_of_ranks_save_what_a_replay_of_all_their_traces_saves(
    folder: str, cause: str, least: float, most: float, traces_folder: Path
) -> None:
    views = [View(opened(path)) for path in sorted((traces_folder / folder).iterdir())]
    job = job_of([rank_summary(view) for view in views])
    assert job is not None
    change = without_cause(cause)

    saved = job.saving_ns({place: view.saved(change) for place, view in enumerate(views)}) / job.recorded_ns

    exact = [each.step_ns for each in Ranks.of([view.experiment for view in views]).run([change] * len(views))]
    assert job.error_share == 0
    assert least <= saved <= most
    assert saved == pytest.approx(1 - max(exact) / job.recorded_ns, abs=0.01)
