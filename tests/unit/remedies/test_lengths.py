"""Batches of similar length, and padding to few shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from stepscope.remedies.loading.padding import LengthBucketSampler, PadCollate, pad_to_lengths

LENGTHS = [1 + (37 * number) % 500 for number in range(1000)]


class Pair(NamedTuple):
    tokens: torch.Tensor
    label: int


def padding(batches: list[list[int]]) -> float:
    """Share of the batches' elements that is padding, each padded to its longest."""
    whole = sum(len(batch) * max(LENGTHS[index] for index in batch) for batch in batches)
    return 1 - sum(LENGTHS[index] for batch in batches for index in batch) / whole


def test_no_samples() -> None:
    sampler = LengthBucketSampler([], 4)

    assert (len(sampler), list(sampler)) == (0, [])


def test_every_index_comes_once_and_batches_are_full() -> None:
    sampler = LengthBucketSampler(LENGTHS, 32)

    batches = list(sampler)

    assert len(batches) == len(sampler) == 32
    assert sorted(index for batch in batches for index in batch) == list(range(1000))
    assert sorted(map(len, batches))[1:] == [32] * 31


def test_batches_hold_similar_lengths() -> None:
    shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).split(32)

    assert padding([batch.tolist() for batch in shuffled]) > 0.4
    assert padding(list(LengthBucketSampler(LENGTHS, 32))) < 0.15
    assert padding(list(LengthBucketSampler(LENGTHS, 32, pool_batches=1))) > 0.4


def test_without_shuffling_batches_go_from_short_to_long() -> None:
    batches = list(LengthBucketSampler([5, 1, 4, 2, 3], 2, shuffle=False))

    assert batches == [[1, 3], [4, 2], [0]]


def test_each_epoch_has_another_order_that_its_number_determines() -> None:
    sampler = LengthBucketSampler(LENGTHS, 32, seed=1)
    first, second = list(sampler), list(sampler)
    again = LengthBucketSampler(LENGTHS, 32, seed=1)
    again.set_epoch(1)

    assert first != second
    assert list(again) == second
    assert {tuple(sorted(batch)) for batch in first} != {tuple(sorted(batch)) for batch in second}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "world_size", "batch_size"), [(1000, 4, 32), (130, 4, 32), (129, 8, 16), (13, 4, 3)])
def test_ranks_share_the_samples_and_make_the_same_number_of_steps(
    count: int, world_size: int, batch_size: int, drop_last: bool
) -> None:
    ranks = [
        LengthBucketSampler(LENGTHS[:count], batch_size, drop_last=drop_last, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    batches = [list(rank) for rank in ranks]

    together = batch_size * world_size
    assert {len(own) for own in batches} == {len(ranks[0])}
    assert all(1 <= len(batch) <= batch_size for own in batches for batch in own)
    indices = [index for own in batches for batch in own for index in batch]
    rest = count % together
    if drop_last:
        assert len(indices) == len(set(indices)) == count - rest
    else:
        assert set(indices) == set(range(count))
        assert len(indices) == count + (world_size - rest if 0 < rest < world_size else 0)
    for step in zip(*batches, strict=True):
        assert max(map(len, step)) - min(map(len, step)) <= 1


def test_the_ranks_of_a_step_have_similar_lengths() -> None:
    ranks = [list(LengthBucketSampler(LENGTHS, 8, rank=rank, world_size=4)) for rank in range(4)]

    longest = [[max(LENGTHS[index] for index in batch) for batch in step] for step in zip(*ranks, strict=True)]

    assert max(max(step) - min(step) for step in longest) < 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it takes a whole number from 1 on"),
        ({"pool_batches": 1.5}, "pool_batches is 1.5"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank is 2; with world_size=2 it takes 0 to 1"),
        ({"lengths": [[1, 2]]}, r"it has the shape \(1, 2\)"),
        ({"rank": 0, "world_size": 3}, "2 samples cannot be divided among 3 ranks"),
    ],
)
def test_arguments_that_make_no_sampler(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthBucketSampler(**{"lengths": [1, 2], "batch_size": 1, **arguments})


def test_lengths_that_are_no_numbers() -> None:
    with pytest.raises(TypeError, match="lengths takes one number for each sample"):
        LengthBucketSampler(["a", "b"], 1)  # type: ignore[list-item]


def test_the_longest_sequence_decides_the_length() -> None:
    sequences = [torch.tensor([1, 2, 3]), [4], torch.tensor([5, 6])]

    assert pad_to_lengths(sequences, (2, 4, 8), padding_value=-1).tolist() == [
        [1, 2, 3, -1],
        [4, -1, -1, -1],
        [5, 6, -1, -1],
    ]
    assert pad_to_lengths(sequences, multiple=5).shape == (3, 5)
    assert pad_to_lengths(sequences).shape == (3, 64)
    assert pad_to_lengths([torch.ones(3, 7, dtype=torch.bfloat16)], multiple=2).shape == (1, 4, 7)
    assert pad_to_lengths([torch.ones(0)], multiple=2).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "there is no sequence to pad"),
        (
            ([torch.ones(9)], (4, 8)),
            "a sequence has 9 elements, and the longest length to pad to is 8: truncate it, or",
        ),
        (([torch.ones(2, 3), torch.ones(2, 4)],), r"must agree in the others: \[2, 3\] and \[2, 4\]"),
        (([torch.tensor(1)],), r"must agree in the others: \[\] and \[\]"),
        (([torch.ones(1)], (4,), 4), "give lengths or multiple, not both"),
        (([torch.ones(1)], None, 0), "multiple is 0; it takes a whole number from 1 on"),
        (([torch.ones(1)], ()), r"lengths is \(\); it takes whole numbers above 0"),
    ],
)
def test_what_cannot_be_padded(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_to_lengths(*arguments)


def test_a_sample_of_named_fields() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "labels": torch.tensor([1, 2, 3]), "weight": 0.5, "image": torch.ones(2, 2)},
        {"input_ids": [4], "labels": torch.tensor([4]), "weight": 1.5, "image": torch.ones(2, 2)},
    ]

    batch = PadCollate((4, 8), mask="attention_mask")(samples)

    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100], [4, -100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[True, True, True, False], [True, False, False, False]]
    assert batch["weight"].tolist() == [0.5, 1.5]
    assert batch["image"].shape == (2, 2, 2)


def test_values_of_the_padding_by_field() -> None:
    samples = [(torch.tensor([1.0]), torch.tensor([2])), (torch.tensor([3.0, 4.0]), torch.tensor([5, 6]))]

    inputs, targets, mask = PadCollate(multiple=3, padding_value={1: -1}, mask=True)(samples)

    assert inputs.tolist() == [[1, 0, 0], [3, 4, 0]]
    assert targets.tolist() == [[2, -1, -1], [5, 6, -1]]
    assert mask.sum(1).tolist() == [1, 2]


def test_samples_of_other_kinds() -> None:
    pair = PadCollate(multiple=2)([Pair(torch.ones(1), 0), Pair(torch.ones(3), 1)])
    tensor = PadCollate(multiple=2, padding_value=9)([torch.ones(1), torch.ones(3)])

    assert isinstance(pair, Pair)
    assert pair.tokens.shape == (2, 4)
    assert pair.label.tolist() == [0, 1]  # type: ignore[attr-defined]
    assert tensor.tolist() == [[1, 9, 9, 9], [1, 1, 1, 9]]


def test_fields_that_are_named_are_padded_alone() -> None:
    samples = [
        {"image": torch.ones(3, 2), "tokens": torch.ones(3)},
        {"image": torch.ones(3, 2), "tokens": torch.ones(3)},
    ]

    batch = PadCollate(multiple=4, fields=["tokens"])(samples)

    assert batch["image"].shape == (2, 3, 2)
    assert batch["tokens"].shape == (2, 4)
    with pytest.raises(ValueError, match="the samples have no field 'text'; they have 'image', 'tokens'"):
        PadCollate(fields=["text"])(samples)


@pytest.mark.parametrize("samples", [[{"x": 1.0}], [(1.0, 2)], [1.0]])
def test_samples_without_a_sequence(samples: list[Any]) -> None:
    with pytest.raises(ValueError, match="no field of the samples is a sequence"):
        PadCollate()(samples)


def test_a_loader_makes_as_few_shapes_as_lengths_are_allowed() -> None:
    samples = [torch.arange(length) for length in LENGTHS]
    shapes: dict[str, set[torch.Size]] = {"plain": set(), "padded": set()}
    for name, collate in (("plain", PadCollate(multiple=1)), ("padded", PadCollate((128, 256, 512)))):
        sampler = LengthBucketSampler(LENGTHS, 8, drop_last=True)
        for batch in DataLoader(samples, batch_sampler=sampler, collate_fn=collate):  # type: ignore[arg-type]
            shapes[name].add(batch.shape)

    assert shapes["padded"] == {torch.Size([8, length]) for length in (128, 256, 512)}
    assert len(shapes["plain"]) > 60
