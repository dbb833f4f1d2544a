"""A text classifier whose loader starts more workers than the machine has processors.

Planted: a crowd of workers fills its queues while the training starves for a processor.
Expected: loader-contention
"""

import os
import zlib

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from tests.zoo import command
from tests.zoo.models import Encoder

BATCH = 16
LENGTH = 64


class Texts(Dataset[tuple[Tensor, int]]):
    """Texts that are unpacked, and tokenized, when they are asked for."""

    def __init__(self, texts: int) -> None:
        self.texts = texts
        words = " ".join(f"word{(position * 7919) % 997}" for position in range(50_000))
        self.packed = zlib.compress(words.encode(), 1)

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        words = zlib.decompress(self.packed).decode().split()[index % 1000 :][:LENGTH]
        return torch.tensor([1 + zlib.crc32(word.encode()) % 1999 for word in words]), index % 4


def main() -> None:
    options = command.options(__doc__)
    processors = len(os.sched_getaffinity(0))
    workers = 8 * processors if options.fault else max(processors - 1, 1)
    loader = DataLoader(Texts(2000 * BATCH), batch_size=BATCH, num_workers=workers, prefetch_factor=64)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step, (tokens, labels) in enumerate(loader, 1):  # planted
        loss = cross_entropy(model(tokens), labels)  # planted
        optimizer.zero_grad()
        loss.backward()  # planted
        optimizer.step()
        if step == options.steps:
            break


if __name__ == "__main__":
    main()
