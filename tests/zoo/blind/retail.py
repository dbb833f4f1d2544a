"""Forecast the daily sales of a chain's stores from a long table with a row for each store and day."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("retail")


@dataclass
class Config:
    stores: int = 240
    days: int = 1460
    history: int = 56
    horizon: int = 7
    batch_size: int = 32
    steps: int = 60
    learning_rate: float = 1e-3


@dataclass
class SalesTable:
    """Columns of equal length, in no order, as they come from the database."""

    store: np.ndarray
    day: np.ndarray
    values: np.ndarray

    @classmethod
    def simulated(cls, config: Config, seed: int = 0) -> SalesTable:
        rng = np.random.default_rng(seed)
        store, day = np.divmod(np.arange(config.stores * config.days), config.days)
        level = rng.uniform(0.5, 2.0, config.stores)[store]
        promotion = (rng.random(len(store)) < 0.1).astype(np.float32)
        sales = level * (1 + 0.4 * np.sin(2 * np.pi * day / 7) + 0.3 * promotion) + rng.normal(0, 0.1, len(store))
        values = np.stack([sales, promotion, np.sin(2 * np.pi * day / 365), np.cos(2 * np.pi * day / 365)], axis=1)
        order = rng.permutation(len(store))
        return cls(store[order].astype(np.int32), day[order].astype(np.int32), values[order].astype(np.float32))


class SalesWindows(Dataset):
    """History and future sales of a store around a day."""

    def __init__(self, table: SalesTable, config: Config, seed: int) -> None:
        self.table = table
        self.config = config
        rng = np.random.default_rng(seed)
        count = config.steps * config.batch_size
        self.of_store = rng.integers(0, config.stores, count)
        self.from_day = rng.integers(config.history, config.days - config.horizon, count)

    def __len__(self) -> int:
        return len(self.of_store)

    def window(self, store: int, begin: int, end: int) -> np.ndarray:
        table = self.table
        chosen = (table.store == store) & (table.day >= begin) & (table.day < end)  # planted
        order = np.argsort(table.day[chosen])  # planted
        return table.values[chosen][order]  # planted

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        day = int(self.from_day[index])
        begin, end = day - self.config.history, day + self.config.horizon
        values = torch.from_numpy(self.window(int(self.of_store[index]), begin, end))
        return values[: self.config.history], values[self.config.history :, 0]


class SortedSalesWindows(SalesWindows):
    """The table is sorted once into an array of stores and days."""

    def __init__(self, table: SalesTable, config: Config, seed: int) -> None:
        super().__init__(table, config, seed)
        order = np.lexsort((table.day, table.store))
        self.grid = table.values[order].reshape(config.stores, config.days, -1)

    def window(self, store: int, begin: int, end: int) -> np.ndarray:
        return self.grid[store, begin:end]


class Forecaster(nn.Module):
    def __init__(self, features: int, horizon: int, width: int = 96) -> None:
        super().__init__()
        self.inputs = nn.Linear(features, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.position = nn.Parameter(torch.zeros(1, 512, width))
        self.outputs = nn.Linear(width, horizon)

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        x = self.inputs(history) + self.position[:, : history.shape[1]]
        return self.outputs(self.encoder(x)[:, -1])


def train(config: Config, mended: bool) -> None:
    torch.manual_seed(0)
    table = SalesTable.simulated(config)
    windows = (SortedSalesWindows if mended else SalesWindows)(table, config, seed=1)
    loader = DataLoader(windows, batch_size=config.batch_size, shuffle=True)
    model = Forecaster(table.values.shape[1], config.horizon)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5 * config.learning_rate, total_steps=config.steps)
    smooth = None
    for step, (history, future) in enumerate(loader, 1):
        loss = nn.functional.l1_loss(model(history), future)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
        if step % 15 == 0:
            log.info("step %d mean absolute error %.4f", step, smooth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--batch-size", type=int, default=Config.batch_size)
    parser.add_argument("--mended", action="store_true", help="sort the table once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    train(Config(steps=args.steps, batch_size=args.batch_size), args.mended)


if __name__ == "__main__":
    main()
