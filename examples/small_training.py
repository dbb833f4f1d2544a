"""Train a small network on made-up data; its hyperparameters are made for a search.

    python examples/small_training.py --lr 0.01 --width 64 --dropout 0.1
    stepscope sweep examples/sweep.yaml

Needs only PyTorch; a run takes a few seconds on a CPU. The validation loss is logged with
`stepscope.log`, which a sweep reads and which does nothing else than keep it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stepscope

FEATURES = 16
BATCH = 64


def made_up(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points, and a wavy function of some of their coordinates with a little noise."""
    points = torch.randn(count, FEATURES, generator=generator)
    values = torch.sin(2 * points[:, 0]) + points[:, 1] * points[:, 2] + 0.5 * points[:, 3].abs()
    return points, values + 0.1 * torch.randn(count, generator=generator)


def main() -> None:
    """Train for some epochs, logging the validation loss of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    points, values = made_up(2048, generator)
    held_out = made_up(1024, generator)
    model = nn.Sequential(
        nn.Linear(FEATURES, options.width),
        nn.ReLU(),
        nn.Dropout(options.dropout),
        nn.Linear(options.width, options.width),
        nn.ReLU(),
        nn.Linear(options.width, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    for epoch in range(options.epochs):
        model.train()
        for batch in torch.randperm(len(points), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = F.mse_loss(model(points[batch]).squeeze(1), values[batch])
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            validation = F.mse_loss(model(held_out[0]).squeeze(1), held_out[1])
        stepscope.log({"val_loss": validation}, step=epoch)
        print(f"epoch {epoch}: validation loss {validation:.4f}")


if __name__ == "__main__":
    main()
