"""Recommend items: matrix factorisation with a tower for each side, trained by Bayesian personalised ranking."""

import argparse
import logging
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("bpr")
USERS, ITEMS = 400, 3000


def make_interactions(per_user, seed):
    rng = random.Random(seed)
    return {user: [rng.randrange(ITEMS) for _ in range(per_user)] for user in range(USERS)}


class Triples(Dataset):
    """(user, item that was bought, items that were not)."""

    def __init__(self, interactions, negatives, as_sets):
        self.pairs = [(user, item) for user, items in interactions.items() for item in items]
        self.negatives = negatives
        self.bought = {user: set(items) for user, items in interactions.items()} if as_sets else interactions
        self.rng = random.Random(1)

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        user, positive = self.pairs[index]
        return user, positive, torch.tensor(self.sample(user))

    def sample(self, user):
        chosen = []
        while len(chosen) < self.negatives:
            item = self.rng.randrange(ITEMS)
            if item not in self.bought[user]:  # planted
                chosen.append(item)
        return chosen


class Tower(nn.Module):
    def __init__(self, count, width=64):
        super().__init__()
        self.embedding = nn.Embedding(count, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, ids):
        x = self.embedding(ids)
        return F.normalize(x + self.mlp(x), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = Tower(USERS)
        self.items = Tower(ITEMS)
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, users, positives, negatives):
        user = self.users(users)
        good = (user * self.items(positives)).sum(-1, keepdim=True)
        bad = torch.einsum("bd,bnd->bn", user, self.items(negatives))
        return self.scale * good, self.scale * bad


@torch.no_grad()
def recall_at(model, held_out, k=100):
    """Share of held-out purchases among the k best items of each user."""
    scores = model.users(torch.arange(USERS)) @ model.items(torch.arange(ITEMS)).T
    best = scores.topk(k).indices
    wanted = torch.tensor([items[:1] for items in held_out.values()])
    return (best == wanted).any(dim=1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=8)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="look up what a user bought in a set")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    triples = Triples(make_interactions(per_user=400, seed=0), args.negatives, as_sets=args.mended)
    loader = DataLoader(triples, args.batch_size, shuffle=True, drop_last=True)
    model = TwoTowers()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    losses = []
    for step, (users, positives, negatives) in enumerate(loader):
        good, bad = model(users, positives, negatives)
        loss = -F.logsigmoid(good - bad).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step and step % 20 == 0:
            log.info("step %d: loss %.4f", step, torch.stack(losses[-20:]).mean().item())
        if step + 1 == args.steps:
            break
    log.info("recall at 100: %.3f", recall_at(model, make_interactions(2, seed=2)))


if __name__ == "__main__":
    main()
