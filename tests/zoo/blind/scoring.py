"""Score a table of card payments with a trained fraud model and keep the most suspicious ones."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 100


class FraudNet(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("scale", torch.ones(FEATURES))
        self.layers = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers((x - self.mean) * self.scale).squeeze(1)


def load_payments(rows, seed):
    """The table is small enough to lie in memory as one tensor."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, FEATURES, generator=generator)


def fit_scaler(model, payments):
    sample = payments[:10_000]
    model.mean.copy_(sample.mean(dim=0))
    model.scale.copy_(1 / sample.std(dim=0))


def batches_of(payments, batch_size, slices):
    if slices:
        yield from payments.split(batch_size)
    else:
        for (batch,) in DataLoader(TensorDataset(payments), batch_size=batch_size):  # planted
            yield batch


@torch.inference_mode()
def score(model, batch):
    return model(batch).sigmoid()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--days", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=5000)
    parser.add_argument("--top", type=int, default=20, help="payments to show to an analyst")
    parser.add_argument("--mended", action="store_true", help="slice the tensor instead of collating rows")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = FraudNet().eval()
    fit_scaler(model, load_payments(10_000, seed=99))
    for day in range(args.days):
        payments = load_payments(args.rows, seed=day)
        begin = time.perf_counter()
        scores = torch.cat([score(model, batch) for batch in batches_of(payments, args.batch_size, args.mended)])
        worst, index = scores.topk(args.top)
        seconds = time.perf_counter() - begin
        print(f"day {day}: {len(scores)} payments in {seconds:.1f} s, worst {worst[0]:.4f} in row {index[0]}")


if __name__ == "__main__":
    main()
