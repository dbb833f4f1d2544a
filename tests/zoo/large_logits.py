"""A tiny GPT with a large vocabulary that is trained on the answer, the last tokens of each text.

Planted: scores of the whole vocabulary are computed and copied for all positions, of which few count.
Expected: large-logits
"""

import torch
from torch.nn.functional import cross_entropy

from tests.zoo import command
from tests.zoo.models import GPT

VOCABULARY = 8000
LENGTH = 96
ANSWER = 12
IGNORED = -100


def main() -> None:
    options = command.options(__doc__)
    model = GPT(vocabulary=VOCABULARY, width=96, length=LENGTH, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1))
        targets = tokens[:, 1:].clone()
        targets[:, :-ANSWER] = IGNORED
        features = model.features(tokens[:, :-1])
        if options.fault:
            logits = model.head(features).double()  # planted
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)  # planted
        else:
            counted = targets != IGNORED
            loss = cross_entropy(model.head(features[counted]), targets[counted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
