"""Predict the delay of small logic circuits, each a graph of gates, by passing messages along their wires."""

import argparse
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

GATES = 8


class Circuits(Dataset):
    """Random circuits; each gate is fed by two earlier ones. The delay is the one of the slowest path."""

    def __init__(self, count, seed=0):
        rng = random.Random(seed)
        self.circuits = [self.draw(rng, rng.randint(24, 56)) for _ in range(count)]

    @staticmethod
    def draw(rng, size):
        kinds = [rng.randrange(GATES) for _ in range(size)]
        wires, arrival = [], []
        for gate in range(size):
            feeding = rng.sample(range(max(0, gate - 8), gate), 2) if gate >= 2 else []
            wires += [(source, gate) for source in feeding]
            arrival.append(1 + kinds[gate] / GATES + max((arrival[source] for source in feeding), default=0.0))
        return torch.tensor(kinds), torch.tensor(wires).T, torch.tensor(max(arrival) / 10)

    def __len__(self):
        return len(self.circuits)

    def __getitem__(self, index):
        return self.circuits[index]


def collate(samples):
    kinds, wires, delays = zip(*samples, strict=True)
    return list(zip(kinds, wires, strict=True)), torch.stack(delays)


def merged(circuits):
    """One graph of several, which no wire joins: kinds of gates, wires, and the circuit of each gate."""
    kinds, wires = zip(*circuits, strict=True)
    sizes = torch.tensor([len(each) for each in kinds])
    begins = (sizes.cumsum(0) - sizes).tolist()
    shifted = torch.cat([each + begin for each, begin in zip(wires, begins, strict=True)], dim=1)
    return torch.cat(kinds), shifted, torch.repeat_interleave(sizes)


class Round(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.GRUCell(width, width)

    def forward(self, state, source, target):
        messages = self.message(state).relu()
        return self.update(torch.zeros_like(state).index_add(0, target, messages.index_select(0, source)), state)


class DelayNet(nn.Module):
    def __init__(self, width, rounds, batched):
        super().__init__()
        self.embed = nn.Embedding(GATES, width)
        self.rounds = nn.ModuleList([Round(width) for _ in range(rounds)])
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.batched = batched

    def run(self, kinds, wires, circuit, count):
        state = self.embed(kinds)
        for one in self.rounds:
            state = one(state, *wires)
        pooled = state.new_zeros(count, state.shape[1]).index_add(0, circuit, state)
        return self.readout(pooled / 40).squeeze(1)

    def forward(self, circuits):
        if self.batched:
            return self.run(*merged(circuits), len(circuits))
        delays = []  # planted
        for one in circuits:  # planted
            delays.append(self.run(*merged([one]), 1))  # planted
        return torch.cat(delays)  # planted


@torch.no_grad()
def mean_error(model, loader):
    errors = [(model(circuits) - delays).abs() for circuits, delays in loader]
    return torch.cat(errors).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--circuits", type=int, default=2560)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mended", action="store_true", help="run the circuits of a batch as one graph")
    args = parser.parse_args()
    torch.manual_seed(0)
    train_loader = DataLoader(Circuits(args.circuits), args.batch_size, shuffle=True, collate_fn=collate)
    valid_loader = DataLoader(Circuits(320, seed=1), args.batch_size, collate_fn=collate)
    model = DelayNet(args.width, args.rounds, args.mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    step = 0
    for epoch in range(args.epochs):
        for circuits, delays in train_loader:
            loss = nn.functional.smooth_l1_loss(model(circuits), delays)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} mean error {mean_error(model, valid_loader):.4f}")


if __name__ == "__main__":
    main()
