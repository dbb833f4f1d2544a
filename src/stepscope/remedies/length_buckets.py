"""Batches of samples of similar length, so that little of a batch is padding.

sampler = LengthBucketSampler([len(sample) for sample in dataset], batch_size=32)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PadCollate(multiple=64))
for epoch in range(epochs):
    sampler.set_epoch(epoch)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.data import Sampler

_FEWEST_POOLS: Final = 4


class LengthBucketSampler(Sampler[list[int]]):
    """Batches of indices in which lengths are similar, in another random order each epoch.

    All samples are shuffled and cut into pools of `pool_batches` batches of every rank; each pool is sorted by length
    and cut into batches, and these are shuffled. So a batch holds neighbours in length, and which ones changes from
    epoch to epoch: there are four pools at least. On several ranks the batches that are used in the same step are
    neighbours too: no rank waits for a longer one.

    Every index comes exactly once an epoch, over all ranks. Two exceptions: `drop_last` leaves out the samples that do
    not fill a batch on every rank; and where fewer samples than ranks are left for the last batches, some of these come
    twice, so that every rank makes the same number of steps. Batches of a step differ by one sample at most.

    Args:
        lengths: of each sample, in any unit, in the data set's order.
        batch_size: samples of a batch, on each rank.
        shuffle: False takes all samples as one pool, and gives batches from short to long.
        drop_last: only full batches.
        pool_batches: more make batches more uniform, fewer make them more random; 1 is plain shuffling.
        seed: the same on every rank.
        rank, world_size: by default those of torch.distributed where it is initialised, else 0 and 1.

    Raises:
        ValueError, TypeError: an argument cannot be used; there are fewer samples than ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        pool_batches: int = 50,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._lengths = _numbers(lengths)
        for name, number in (("batch_size", batch_size), ("pool_batches", pool_batches)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is {number!r}; it takes a whole number from 1 on")
        self.batch_size, self.drop_last, self.seed = batch_size, drop_last, seed
        self.rank, self.world_size = _place(rank, world_size)
        if 0 < len(self._lengths) < self.world_size:
            raise ValueError(f"{len(self._lengths)} samples cannot be divided among {self.world_size} ranks")
        self._shuffle, self._pool_batches = shuffle, pool_batches
        self._epoch = 0

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        full, rest = divmod(len(self._lengths), self.batch_size * self.world_size)
        return full + (1 if rest and not self.drop_last else 0)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of this epoch; without it each iteration is the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self._epoch)
        self._epoch += 1
        groups = self._groups(generator)
        order = torch.randperm(len(groups), generator=generator).tolist() if self._shuffle else range(len(groups))
        for number in order:
            yield self._own_part(groups[number])

    def _groups(self, generator: torch.Generator) -> list[list[int]]:
        """The samples of each step, of all ranks, neighbours in length."""
        count, together = len(self._lengths), self.batch_size * self.world_size
        indices = torch.randperm(count, generator=generator) if self._shuffle else torch.arange(count)
        if self.drop_last:
            indices = indices[: count - count % together]
        pool = min(together * self._pool_batches, together * max(-(-len(indices) // (together * _FEWEST_POOLS)), 1))
        if not self._shuffle:
            pool = max(count, 1)
        groups: list[list[int]] = []
        for part in torch.split(indices, pool) if len(indices) else ():
            # Stable, so that of samples of the same length it is still chance that decides.
            sorted_part = part[torch.sort(self._lengths[part], stable=True).indices]
            groups += [group.tolist() for group in torch.split(sorted_part, together)]
        return groups

    def _own_part(self, group: list[int]) -> list[int]:
        """This rank's batch of a step's samples, all ranks' batches being of nearly the same size."""
        if len(group) < self.world_size:
            group = (group * self.world_size)[: self.world_size]
        size, larger = divmod(len(group), self.world_size)
        begin = self.rank * size + min(self.rank, larger)
        return group[begin : begin + size + (self.rank < larger)]


def _numbers(lengths: Any) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"lengths takes one number for each sample, not {type(lengths).__name__} of other things"
        ) from error
    if numbers.dim() != 1 or numbers.is_complex():
        raise ValueError(f"lengths takes one number for each sample; it has the shape {tuple(numbers.shape)}")
    return numbers.cpu()


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    distributed = torch.distributed
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together: give both or neither")
    if rank is None or world_size is None:
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; with world_size={world_size} it takes 0 to {world_size - 1}")
    return rank, world_size
