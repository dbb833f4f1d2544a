"""A text classifier on texts of very different lengths.

Planted: batches are filled at random, so that nearly every one holds a long text and the short ones are padded to it.
Expected: padding-waste
"""

import random

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.zoo import command
from tests.zoo.models import Encoder

BATCH = 16


def collate(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def main() -> None:
    options = command.options(__doc__)
    choose = random.Random(0)
    lengths = [choose.choice((12, 16, 20, 24, 28, 32, 40, 160)) for _ in range(options.steps * BATCH)]
    samples = [(torch.randint(1, 2000, (length,)), length % 4) for length in lengths]
    batches = [samples[begin : begin + BATCH] for begin in range(0, len(samples), BATCH)]
    if not options.fault:
        samples.sort(key=lambda sample: len(sample[0]))
        batches = [samples[begin : begin + BATCH] for begin in range(0, len(samples), BATCH)]
        choose.shuffle(batches)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for tokens, labels in DataLoader(batches, batch_size=None, collate_fn=collate):
        loss = cross_entropy(model(tokens, tokens == 0), labels)  # planted
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
