"""A classifier of table rows that measures its accuracy on what it trains on.

Planted: in every step a confusion matrix and the F1 score of each class are counted row by row.
Expected: host-metrics
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import mlp

CLASSES = 10
EVERY = 50


def f1_scores(scores: Tensor, labels: Tensor) -> list[float]:
    """The F1 score of each class."""
    matrix = [[0] * CLASSES for _ in range(CLASSES)]
    for own_scores, label in zip(scores, labels, strict=True):  # planted
        matrix[int(label.item())][int(own_scores.argmax().item())] += 1  # planted
    result = []
    for kind in range(CLASSES):
        wrong = sum(matrix[kind]) + sum(row[kind] for row in matrix)
        result.append(2 * matrix[kind][kind] / max(wrong, 1))
    return result


def main() -> None:
    options = command.options(__doc__)
    model = mlp(64, 256, 4, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history = []
    for step in range(options.steps):
        rows, labels = torch.randn(1024, 64), torch.randint(CLASSES, (1024,))
        scores = model(rows)
        loss = cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.fault or step % EVERY == 0:
            history.append(f1_scores(scores.detach(), labels))  # planted


if __name__ == "__main__":
    main()
