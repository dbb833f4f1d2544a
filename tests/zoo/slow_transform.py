"""A text classifier whose data set tokenizes.

Planted: the tokenizer works letter by letter in plain Python, so that even a worker cannot keep up.
Expected: slow-input-function
"""

import zlib

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from tests.zoo import command
from tests.zoo.models import Encoder

BATCH = 16
LENGTH = 32


def tokenize_letters(text: str) -> list[int]:
    tokens = []
    for word in text.split():  # planted
        checksum = 0
        for letter in word * 250:  # planted
            checksum = (checksum * 31 + ord(letter)) % 1999  # planted
        tokens.append(1 + checksum)
    return tokens


def tokenize(text: str) -> list[int]:
    return [1 + zlib.crc32(word.encode()) % 1999 for word in text.split()]


class Texts(Dataset[tuple[Tensor, int]]):
    """Made-up texts."""

    def __init__(self, texts: int, slow: bool) -> None:
        self.texts = texts
        self.slow = slow

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # planted
        text = " ".join(f"word{(index * 7919 + position) % 997}" for position in range(LENGTH))
        tokens = tokenize_letters(text) if self.slow else tokenize(text)  # planted
        return torch.tensor(tokens), index % 4


def main() -> None:
    options = command.options(__doc__)
    texts = Texts(options.steps * BATCH, slow=options.fault)
    loader = DataLoader(texts, batch_size=BATCH, num_workers=1, persistent_workers=True)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for tokens, labels in loader:
        loss = cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
