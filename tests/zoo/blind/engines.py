"""Predict how many cycles an engine has left from the last cycles of its sensors."""

from __future__ import annotations

import argparse
import logging

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger("engines")
SENSORS = [f"s{number}" for number in range(1, 15)]
LONGEST = 125


def run_to_failure(engines: int, seed: int) -> pl.DataFrame:
    """A row for each cycle of each engine, as the log server writes them: by time, so engines are mixed."""
    rng = np.random.default_rng(seed)
    lives = rng.integers(140, 320, engines)
    engine = np.repeat(np.arange(engines), lives)
    cycle = np.concatenate([np.arange(life) for life in lives])
    left = lives[engine] - cycle
    wear = np.exp(-left / 40.0)[:, None] * np.linspace(-1.5, 1.5, len(SENSORS))
    values = wear + rng.normal(0, 0.4, (len(engine), len(SENSORS)))
    columns = {"engine": engine, "cycle": cycle, "left": (np.minimum(left, LONGEST) / LONGEST).astype(np.float32)}
    columns |= {name: values[:, number].astype(np.float32) for number, name in enumerate(SENSORS)}
    return pl.DataFrame(columns).sort("cycle", "engine")


class Histories(Dataset):
    """The last `length` cycles before a cycle, and the share of LONGEST cycles left after it."""

    def __init__(self, frame: pl.DataFrame, length: int) -> None:
        self.frame = frame
        self.length = length
        last = frame.group_by("engine").agg(pl.col("cycle").max()).sort("engine")
        self.ends = [(engine, end) for engine, cycles in last.iter_rows() for end in range(length, cycles + 1, 3)]

    def __len__(self) -> int:
        return len(self.ends)

    def of_engine(self, engine: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sensors and cycles left of all its cycles."""
        rows = self.frame.filter(pl.col("engine") == engine)  # planted
        return torch.from_numpy(rows.select(SENSORS).to_numpy()), torch.from_numpy(rows["left"].to_numpy())  # planted

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        engine, end = self.ends[index]
        sensors, left = self.of_engine(engine)
        return sensors[end - self.length : end], left[end - 1]


class GroupedHistories(Histories):
    """The frame is divided by engine once."""

    def __init__(self, frame: pl.DataFrame, length: int) -> None:
        super().__init__(frame, length)
        self.groups = {
            engine: (torch.tensor(rows.select(SENSORS).to_numpy()), torch.tensor(rows["left"].to_numpy()))
            for (engine,), rows in frame.partition_by("engine", as_dict=True).items()
        }

    def of_engine(self, engine: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.groups[engine]


class LifeNet(nn.Module):
    def __init__(self, sensors: int, width: int = 72) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(sensors, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2), nn.ReLU()
        )
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, sensors: torch.Tensor) -> torch.Tensor:
        features = self.convolutions(sensors.transpose(1, 2)).transpose(1, 2)
        return self.head(self.recurrent(features)[0][:, -1]).squeeze(1)


@torch.no_grad()
def error(model: nn.Module, loader: DataLoader) -> float:
    """Root of the mean squared error, in cycles."""
    model.eval()
    squares = torch.cat([(model(sensors) - left) ** 2 for sensors, left in loader])
    model.train()
    return LONGEST * squares.mean().sqrt().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=80)
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--mended", action="store_true", help="group the rows by engine once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.manual_seed(0)
    kind = GroupedHistories if args.mended else Histories
    train_set = kind(run_to_failure(args.engines, seed=0), args.history)
    test_set = kind(run_to_failure(args.engines // 8, seed=1), args.history)
    logger.info("%d histories of %d engines", len(train_set), args.engines)
    model = LifeNet(len(SENSORS))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    for epoch in range(args.epochs):
        for step, (sensors, left) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(sensors), left)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 40 == 0:
                logger.info("epoch %d step %d loss %.4f", epoch, step, loss.item())
        logger.info("epoch %d error %.1f cycles", epoch, error(model, DataLoader(test_set, args.batch_size)))


if __name__ == "__main__":
    main()
