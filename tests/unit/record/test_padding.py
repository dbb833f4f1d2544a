"""How much of the batches is padding, as the recorder sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stepscope.record.batch_samples import PaddingSamples
from stepscope.trace.program_facts import PaddingFacts

torch = pytest.importorskip("torch")


def rows(*lengths: int, width: int = 12, padding: int = 0) -> Any:
    """Rows that count from 1 up to their length, filled up to the width."""
    made = torch.full((len(lengths), width), padding)
    for row, length in enumerate(lengths):
        made[row, :length] = torch.arange(1, length + 1)
    return made


@pytest.fixture
def samples() -> Iterator[PaddingSamples]:
    made = PaddingSamples()
    yield made
    made.stop()


def test_what_fills_rows_up_is_padding(samples: PaddingSamples) -> None:
    samples.add({"input_ids": rows(12, 3, 3, 6, 2, 10), "labels": torch.zeros(6, dtype=torch.int64)})

    [facts] = samples.stop()

    assert facts == PaddingFacts(
        name="input_ids", batches=1, positions=72, padding_share=0.5, sorted_padding_share=24 / 600, longest=12,
        ignored_share=0.0,
    )  # fmt: skip


def test_any_number_may_be_the_padding(samples: PaddingSamples) -> None:
    samples.add((rows(12, 6, 6, 6, 6, 12, padding=99), "text"))

    [facts] = samples.stop()

    assert (facts.name, facts.padding_share) == ("[0]", 24 / 72)


def test_ignored_positions_are_counted(samples: PaddingSamples) -> None:
    targets = rows(*[12] * 8)
    targets[:, :3] = -100
    samples.add([targets])

    [facts] = samples.stop()

    assert (facts.padding_share, facts.ignored_share) == (0.0, 0.25)


def test_full_rows_short_rows_and_what_is_no_tensor_say_nothing(samples: PaddingSamples) -> None:
    for batch in (rows(*[12] * 8), rows(1, 2, 3, width=4), torch.zeros(8, 12), "text", None, [[1, 2]]):
        samples.add(batch)

    assert [facts for facts in samples.stop() if facts.name.startswith("batch")] == []


def test_batches_of_loaders_are_seen_and_the_loaders_given_back(samples: PaddingSamples) -> None:
    from torch.utils.data import DataLoader, dataloader

    before = vars(dataloader._SingleProcessDataLoaderIter)["_next_data"]
    loader: Any = DataLoader([rows(12, 3, 3, 6, 2, 10)] * 3, batch_size=None)
    samples.start()
    assert sum(1 for _ in loader) == 3

    [facts] = samples.stop()

    assert (facts.batches, facts.padding_share) == (3, 0.5)
    assert vars(dataloader._SingleProcessDataLoaderIter)["_next_data"] is before


def test_without_a_loader_the_last_batch_is_looked_at(samples: PaddingSamples) -> None:
    batch = rows(*[400, 20, 20, 20] * 16, width=400)

    samples.start()
    found = samples.stop()

    assert batch.shape == (64, 400)
    assert [facts.padding_share for facts in found if facts.positions == batch.numel()] == [0.7125]


def test_batches_and_live_tensors_can_still_grow(samples: PaddingSamples) -> None:
    batch, live = rows(12, 3, 3, 6, 2, 10), torch.full((100,), -100)
    samples.add({"input_ids": batch})
    samples.stop()

    assert [each.resize_(10_000).numel() for each in (batch, live)] == [10_000, 10_000]
