"""A small MLP with a table of its progress.

Planted: the table is drawn anew in every step, and every step is short.
Expected: frequent-logging
"""

import sys

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import mse_loss

from tests.zoo import command
from tests.zoo.models import mlp

EVERY = 50


def main() -> None:
    options = command.options(__doc__, steps=60)
    model = mlp(64, 256, 3, 1)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr, force_terminal=True, width=100)
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("training", total=options.steps)
        for step in range(options.steps):
            x, y = torch.randn(512, 64), torch.randn(512, 1)
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if options.fault or step % EVERY == 0:
                progress.update(task, completed=step, description=f"loss {loss.item():.4f}", refresh=True)  # planted


if __name__ == "__main__":
    main()
