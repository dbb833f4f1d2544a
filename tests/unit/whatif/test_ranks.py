"""Two ranks that meet in all-reduces. Times are microseconds."""

from __future__ import annotations

import numpy as np
import pytest

from stepscope.trace import Metadata, Trace
from stepscope.whatif import Experiment
from stepscope.whatif.changes import scaled_work, without_cause
from stepscope.whatif.experiment import Ranks
from tests.unit.whatif.test_graph import US, Machine, waiting_step


def rank(compute: int, reduce_start: int, end: int, *, clock: int = 0) -> Trace:
    """Two steps of a kernel, an all-reduce that ends at `end`, and a wait of the host; on a clock of its own."""
    machine = Machine(Metadata(world_size=2))
    for step in range(2):
        base = 2000 * step + clock
        machine.step(base * US, 2000 * US, step)
        machine.kernel(base + 10, base + 16, compute, 100 * step + 1)
        machine.launch((base + 20) * US, 4 * US, 100 * step + 2)
        machine.work(
            (base + reduce_start) * US, (end - reduce_start) * US, "ncclDevKernel_AllReduce", 100 * step + 2,
            kind="communication", group="0",
        )  # fmt: skip
        machine.call(base + 30, end + 4 - 30, 100 * step + 3, "cudaDeviceSynchronize", "synchronise")
    return machine.trace()


def both(clock: int = 0) -> Ranks:
    """The second rank computes 500 us longer, and the first waits for it: both are done at 1,100 us."""
    quick, slow = rank(400, 417, 1100), rank(900, 917, 1100, clock=clock)
    return Ranks.of([Experiment(quick), Experiment(slow)])


@pytest.mark.parametrize("clock", [0, 12_345])
def test_ranks_replayed_together_give_the_measured_times(clock: int) -> None:
    ranks = both(clock)

    outcomes = ranks.run([None, None])

    assert ranks.shifts_ns == [0, clock * US]
    assert [outcome.saving_ns for outcome in outcomes] == [0, 0]
    for experiment, outcome in zip(ranks.experiments, outcomes, strict=True):
        assert (outcome.replay.work_start == experiment.graph.works.start).all()
        assert (outcome.replay.stretch_start == experiment.graph.stretches.start).all()


def test_a_collective_is_waiting_and_transfer() -> None:
    rows, transfer = both().meetings

    assert rows.tolist() == [[1, 3], [1, 3]]
    assert transfer.tolist() == [[183 * US, 183 * US], [183 * US, 183 * US]]


@pytest.mark.parametrize("clock", [0, 12_345])
def test_when_the_late_rank_computes_faster_all_are_done_earlier(clock: int) -> None:
    late = scaled_work(np.array([0, 2]), 400 / 900)

    outcomes = both(clock).run([None, late])

    assert [outcome.saving_ns for outcome in outcomes] == [500 * US, 500 * US]


def test_when_the_early_rank_computes_faster_it_waits_longer() -> None:
    outcomes = both().run([scaled_work(np.array([0, 2]), 0.5), None])

    assert [outcome.saving_ns for outcome in outcomes] == [0, 0]
    assert outcomes[0].replay.work_start[1] == 217 * US
    assert outcomes[0].replay.work_end[1] == 1100 * US


def test_without_communication_only_the_waiting_is_left() -> None:
    outcomes = both().run([without_cause("communication")] * 2)

    # The transfer of 183 us is gone, and the pause of 1 us before the collective of the late rank.
    assert [outcome.saving_ns for outcome in outcomes] == [184 * US, 184 * US]


def test_ranks_without_collectives_are_replayed_alone() -> None:
    ranks = Ranks.of([Experiment(waiting_step()), Experiment(waiting_step())])

    first, second = ranks.run([without_cause("synchronisation"), None])

    assert ranks.meetings[0].shape == (2, 0)
    assert (first.saving_ns, second.saving_ns) == (320 * US, 0)
