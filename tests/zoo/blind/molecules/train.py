"""Predict the solubility of molecules with a message passing network."""

import argparse
import logging

import torch
from graphs import ATOMS, Molecules, collate_with_indices, collate_with_loops
from torch import nn
from torch.utils.data import DataLoader

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("molecules")


class MessagePassing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Linear(width, width)
        self.update = nn.GRUCell(width, width)

    def forward(self, states, adjacency):
        batch, atoms, width = states.shape
        received = adjacency @ self.message(states)
        return self.update(received.view(-1, width), states.reshape(-1, width)).view(batch, atoms, width)


class MoleculeNet(nn.Module):
    def __init__(self, width=64, rounds=3):
        super().__init__()
        self.atoms = nn.Embedding(ATOMS, width)
        self.rounds = nn.ModuleList(MessagePassing(width) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, kinds, adjacency, mask):
        states = self.atoms(kinds) * mask.unsqueeze(-1)
        adjacency = adjacency / adjacency.sum(dim=-1, keepdim=True).clamp(min=1)
        for passing in self.rounds:
            states = passing(states, adjacency)
        pooled = (states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return self.readout(pooled).squeeze(1)


@torch.no_grad()
def error(model, loader):
    model.eval()
    errors = [(model(kinds, bonds, mask) - targets).abs().mean() for kinds, bonds, mask, targets in loader]
    model.train()
    return torch.stack(errors).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--molecules", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="fill the batch's tensors by index")
    args = parser.parse_args()
    torch.manual_seed(0)

    collate = collate_with_indices if args.mended else collate_with_loops
    train = DataLoader(Molecules(args.molecules, 0), args.batch_size, shuffle=True, collate_fn=collate)
    test = DataLoader(Molecules(64, 1), args.batch_size, collate_fn=collate)
    model = MoleculeNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        for step, (kinds, adjacency, mask, targets) in enumerate(train):
            loss = nn.functional.mse_loss(model(kinds, adjacency, mask), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 20 == 0:
                log.info("epoch %d step %d loss %.4f", epoch, step, loss.item())
        log.info("epoch %d error %.4f", epoch, error(model, test))


if __name__ == "__main__":
    main()
