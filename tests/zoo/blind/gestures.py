"""Predict how gestures go on, with a soft dynamic time warping loss between prediction and truth."""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAR = 1e6


def broadcast_distances(x, y):
    """Squared distances of all pairs of times, (batch, n, m)."""
    n, m, size = x.shape[1], y.shape[1], x.shape[2]
    x = x.unsqueeze(2).expand(-1, n, m, size)  # planted
    y = y.unsqueeze(1).expand(-1, n, m, size)  # planted
    return torch.pow(x - y, 2).sum(3)  # planted


def product_distances(x, y):
    """The same by |x|^2 + |y|^2 - 2 xy."""
    norms = x.square().sum(-1)[:, :, None] + y.square().sum(-1)[:, None, :]
    return torch.baddbmm(norms, x, y.transpose(1, 2), alpha=-2).clamp(min=0)


class SoftDTW(nn.Module):
    """Cost of the best soft alignment of two series, diagonal by diagonal for a whole batch."""

    def __init__(self, n, m, distances, gamma=1.0):
        super().__init__()
        self.distances = distances
        self.gamma = gamma
        row = torch.arange(n)[None, :]
        column = torch.arange(n + m - 1)[:, None] - row
        self.outside = (column < 0) | (column >= m)
        self.cells = row * m + column.clamp(0, m - 1)

    def forward(self, x, y):
        costs = self.distances(x, y).flatten(1)[:, self.cells].masked_fill(self.outside, FAR)
        border = costs.new_full((len(x), 1), FAR)
        before_last = torch.cat([torch.zeros_like(border), border.expand(-1, costs.shape[2])], 1)
        last = border.expand(-1, costs.shape[2] + 1)
        for cost in costs.unbind(1):
            ways = torch.stack([last[:, 1:], last[:, :-1], before_last[:, :-1]])
            reached = cost - self.gamma * torch.logsumexp(ways / -self.gamma, 0)
            before_last, last = last, torch.cat([border, reached], 1)
        return last[:, -1]


class Forecaster(nn.Module):
    """Reads a gesture with a GRU and writes what follows all at once."""

    def __init__(self, joints, ahead, hidden=96):
        super().__init__()
        self.ahead = ahead
        self.reader = nn.GRU(joints, hidden, batch_first=True)
        self.places = nn.Parameter(torch.randn(ahead, hidden) * 0.3)
        self.writer = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, joints))

    def forward(self, past):
        _, state = self.reader(past)
        return self.writer(torch.tanh(state[0])[:, None] + self.places)


def make_gestures(count, past, ahead, joints, seed):
    """Swings of all joints at one pace, which differs between gestures."""
    mixing = torch.randn(3, joints, generator=torch.Generator().manual_seed(123))
    generator = torch.Generator().manual_seed(seed)
    pace = torch.rand(count, 1, 1, generator=generator) * 0.15 + 0.1
    phase = torch.rand(count, 1, 3, generator=generator) * 2 * math.pi
    time = torch.arange(past + ahead)[None, :, None]
    swings = torch.sin(time * pace * torch.tensor([1.0, 1.5, 2.0]) + phase) @ mixing
    swings += 0.1 * torch.randn(swings.shape, generator=generator)
    return TensorDataset(swings[:, :past], swings[:, past:])


@torch.no_grad()
def evaluate(model, criterion, loader):
    model.eval()
    losses = torch.cat([criterion(model(past), future) for past, future in loader])
    model.train()
    return losses.mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gestures", type=int, default=4096)
    parser.add_argument("--past", type=int, default=30)
    parser.add_argument("--ahead", type=int, default=30)
    parser.add_argument("--joints", type=int, default=45)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mended", action="store_true", help="take the distances from a matrix product")
    args = parser.parse_args()
    torch.manual_seed(0)

    sizes = args.past, args.ahead, args.joints
    loader = DataLoader(make_gestures(args.gestures, *sizes, seed=0), args.batch_size, shuffle=True)
    valid_loader = DataLoader(make_gestures(128, *sizes, seed=1), 64)
    model = Forecaster(args.joints, args.ahead)
    criterion = SoftDTW(args.ahead, args.ahead, product_distances if args.mended else broadcast_distances)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, fused=True)
    for epoch in range(args.epochs):
        losses = []
        for past, future in loader:
            loss = criterion(model(past), future).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()
        print(f"epoch {epoch} loss {mean:.1f} validation {evaluate(model, criterion, valid_loader):.1f}")


if __name__ == "__main__":
    main()
