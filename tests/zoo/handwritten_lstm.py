"""A language model with an LSTM that is written out as a loop over time.

Planted: an LSTMCell is called for one time step after another, where nn.LSTM does all of them in one call.
Expected: loop-in-step
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.zoo import command

LENGTH = 96
WIDTH = 96


class ByHand(nn.Module):
    """An LSTM of one layer, one time step after another."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        hidden = memory = x.new_zeros(x.shape[0], WIDTH)
        states = []
        for time in range(LENGTH):
            hidden, memory = self.cell(x[:, time], (hidden, memory))  # planted
            states.append(hidden)
        return torch.stack(states, dim=1), None


class LanguageModel(nn.Module):
    """Embedding, LSTM, scores."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, WIDTH)
        self.recurrent = recurrent
        self.head = nn.Linear(WIDTH, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embedding(tokens))
        return self.head(states)


def main() -> None:
    options = command.options(__doc__)
    model = LanguageModel(ByHand() if options.fault else nn.LSTM(WIDTH, WIDTH, batch_first=True))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(options.steps):
        tokens = torch.randint(500, (8, LENGTH + 1))
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
