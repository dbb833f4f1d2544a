"""Steps of real ranks: the buckets that they sent, their links, and the step rebuilt from their gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stepscope.predict.buckets import CutExperiment, buckets_of, gradients_of
from stepscope.predict.exchanges import AddedExchange, RecordedExchange
from stepscope.predict.scaling import data_parallel, exchange_of
from stepscope.whatif import Experiment, replay
from tests.golden.opened import opened

pytestmark = pytest.mark.traces


def experiment_of(folder: Path, name: str) -> Experiment:
    return Experiment(opened(folder / "kineto" / f"{name}.json.gz"))


def recorded(experiment: Experiment, *others: Experiment) -> RecordedExchange:
    exchange = exchange_of(experiment, others)
    assert isinstance(exchange, RecordedExchange)
    return exchange


def test_gradients_make_the_buckets_that_were_sent(traces_folder: Path) -> None:
    experiment = experiment_of(traces_folder, "mi300x_resnet_checkpoint_rank0of8")

    buckets = buckets_of(gradients_of(experiment))

    sent = recorded(experiment).table["bytes"].to_list()
    assert buckets.bytes.tolist() == sent == [5_746_640, 17_632_384] * 3


def test_buckets_of_1_mib_on_a_processor(traces_folder: Path) -> None:
    experiment = experiment_of(traces_folder, "cpu_ddp_gloo/rank0")

    buckets = buckets_of(gradients_of(experiment), bucket_bytes=1 << 20)

    sent = recorded(experiment).table["bytes"].to_list()
    assert buckets.bytes.tolist() == sent == [1_048_576, 1_056_768, 1_611_776] * 3


@pytest.mark.parametrize(
    ("name", "ranks", "megabytes"),
    [("a100_ddp_rank3of8", 8, [181.2, 1.1, 17.7]), ("v100_ddp_rank1of2", 2, [181.2, 1.1, 17.7])],
)
def test_what_the_profiler_does_not_note_gradients_tell(
    name: str, ranks: int, megabytes: list[float], traces_folder: Path
) -> None:
    exchange = recorded(experiment_of(traces_folder, name))

    assert exchange.ranks == ranks
    sizes = exchange.table["bytes"].unique(maintain_order=True).to_list()
    assert [round(size / 1e6, 1) for size in sizes] == megabytes


def test_links_of_recordings(traces_folder: Path) -> None:
    a100 = recorded(experiment_of(traces_folder, "a100_ddp_rank3of8")).link
    v100 = recorded(experiment_of(traces_folder, "v100_ddp_rank1of2")).link

    assert a100 is not None
    assert v100 is not None
    # Eight A100 reach 235 GB/s at best; the two V100 move 181 MB in 12.2 ms.
    assert a100.bandwidth_bytes_s / 1e9 == pytest.approx(194, abs=1)
    assert v100.bandwidth_bytes_s / 1e9 == pytest.approx(17.2, abs=0.2)


def test_a_step_without_its_messages_and_with_its_gradients_buckets_again(traces_folder: Path) -> None:
    experiment = experiment_of(traces_folder, "mi300x_resnet_checkpoint_rank0of8")
    exchange = recorded(experiment)
    alone = exchange.graph(experiment.graph, np.zeros(exchange.table.height))
    added = AddedExchange(experiment, buckets_of(gradients_of(experiment)))

    again = experiment.run(added.graph(alone, added.transfers_ns(exchange.link, 8)))

    measured = experiment.recorded_ns / experiment.step_count
    assert experiment.run(alone).step_ns / measured == pytest.approx(0.861, abs=0.01)
    assert again.step_ns / measured == pytest.approx(0.979, abs=0.005)


def test_as_many_ranks_as_recorded_take_as_long(traces_folder: Path) -> None:
    for name in ("a100_ddp_rank3of8", "v100_dlrm_rank1of2", "cpu_ddp_gloo/rank1"):
        experiment = experiment_of(traces_folder, name)
        [step] = data_parallel(experiment, [recorded(experiment).ranks])

        assert step.step_ns == pytest.approx(experiment.recorded_ns / experiment.step_count, rel=1e-3)


def test_more_devices_never_take_less(traces_folder: Path) -> None:
    steps = data_parallel(experiment_of(traces_folder, "v100_resnet50_workers4"), [1, 2, 4, 8, 16], "pcie3")

    times = [step.step_ns for step in steps]
    assert times == sorted(times)
    assert all(step.exposed_ns <= step.communication_ns for step in steps)
    assert [round(step.communication_ns / 1e6, 1) for step in steps] == [0.0, 8.6, 13.0, 15.3, 16.9]


def test_further_borders_leave_a_real_step_as_it_is(traces_folder: Path) -> None:
    experiment = experiment_of(traces_folder, "cpu_gpt2_batched_loss")
    gradients = gradients_of(experiment)

    cut = CutExperiment(experiment, gradients.lane, gradients.time).graph

    assert len(cut.stretches.start) > len(experiment.graph.stretches.start)
    done = replay(cut)
    assert (done.stretch_start == cut.stretches.start).all()
    assert (done.stretch_end == cut.stretches.end).all()
