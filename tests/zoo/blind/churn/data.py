"""Customers of a made-up phone company, as a data frame."""

import numpy as np
import polars as pl
import torch
from torch.utils.data import Dataset

NUMERIC = ["age", "tenure", "monthly", "total", "calls", "complaints", "data_gb", "roaming", "discount", "late_days"]
CATEGORICAL = {"plan": 6, "region": 20, "device": 40, "channel": 5}


def load_customers(rows, seed=0):
    rng = np.random.default_rng(seed)
    columns = {name: rng.gamma(2.0, 10.0, rows).round(2) for name in NUMERIC}
    columns |= {name: rng.integers(0, size, rows) for name, size in CATEGORICAL.items()}
    frame = pl.DataFrame(columns)
    risk = frame["complaints"] * 0.1 - frame["tenure"] * 0.05 + rng.normal(size=rows)
    return frame.with_columns(churned=(risk > 0).cast(pl.Int8))


class CustomerDataset(Dataset):
    """One customer as (numbers, categories, label)."""

    def __init__(self, frame):
        self.frame = frame
        self.means = {name: frame[name].mean() for name in NUMERIC}
        self.stds = {name: frame[name].std() for name in NUMERIC}

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        row = self.frame.row(index, named=True)  # planted
        numbers = [(row[name] - self.means[name]) / self.stds[name] for name in NUMERIC]  # planted
        categories = [row[name] for name in CATEGORICAL]  # planted
        label = float(row["churned"])
        return torch.tensor(numbers, dtype=torch.float32), torch.tensor(categories), torch.tensor(label)  # planted


class CustomerTable:
    """The same customers as three tensors, standardised once; gives whole batches."""

    def __init__(self, frame, batch_size):
        numbers = frame.select(NUMERIC).to_torch(dtype=pl.Float32)
        self.numbers = (numbers - numbers.mean(dim=0)) / numbers.std(dim=0)
        self.categories = frame.select(list(CATEGORICAL)).to_torch(dtype=pl.Int64)
        self.labels = frame["churned"].cast(pl.Float32).to_torch()
        self.batch_size = batch_size

    def __len__(self):
        return len(self.labels) // self.batch_size

    def __iter__(self):
        for chosen in torch.randperm(len(self.labels)).split(self.batch_size):
            yield self.numbers[chosen], self.categories[chosen], self.labels[chosen]
