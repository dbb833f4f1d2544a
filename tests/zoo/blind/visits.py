"""Tell from the last pages that a visitor saw, of which new visitors have few, whether the visitor buys."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Visits:
    """Pages padded with 0 to the longest visit."""

    pages: torch.Tensor
    lengths: torch.Tensor
    bought: torch.Tensor

    @classmethod
    def simulated(cls, count, pages, longest, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.empty(count).exponential_(1 / 500, generator=generator).long().clamp(1, longest)
        visits = torch.randint(1, pages, (count, longest), generator=generator)
        visits.masked_fill_(torch.arange(longest) >= lengths[:, None], 0)
        wanted = ((visits > 0) & (visits % 17 == 0)).sum(1) / lengths.sqrt()
        chance = torch.sigmoid(4 * (wanted - wanted.mean()))
        return cls(visits, lengths, (torch.rand(count, generator=generator) < chance).float())

    def batches(self, size, generator):
        for chosen in torch.randperm(len(self.pages), generator=generator).split(size):
            yield self.pages[chosen], self.lengths[chosen], self.bought[chosen]


def mask_by_rows(lengths, longest):
    """Ones for the pages of a visit, zeros for what pads it."""
    mask = torch.ones(len(lengths), longest)  # planted
    for row in range(len(lengths)):  # planted
        mask[row, lengths[row] :] = 0  # planted
    return mask.bool()  # planted


def mask_by_comparison(lengths, longest):
    """The same in one comparison."""
    return torch.arange(longest) < lengths[:, None]


class VisitNet(nn.Module):
    def __init__(self, pages, longest, mask_of, width=16, hidden=24):
        super().__init__()
        self.embedding = nn.Embedding(pages, width, padding_idx=0)
        self.position = nn.Parameter(torch.zeros(longest, width))
        self.keys = nn.Linear(width, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 1))
        self.mask_of = mask_of

    def forward(self, pages, lengths):
        states = self.embedding(pages) + self.position
        scores = self.score(self.keys(states).tanh()).squeeze(2)
        mask = self.mask_of(lengths, pages.shape[1])
        weights = scores.masked_fill(~mask, -1e9).softmax(1)
        return self.head(torch.einsum("bl,blw->bw", weights, states)).squeeze(1)


@torch.no_grad()
def area_under_curve(model, visits):
    """Chance that a buyer's score is above the one of another visitor."""
    model.eval()
    scores = model(visits.pages, visits.lengths)
    model.train()
    ranks = scores.argsort().argsort().float() + 1
    buyers = visits.bought.bool()
    positive, negative = buyers.sum(), (~buyers).sum()
    return ((ranks[buyers].sum() - positive * (positive + 1) / 2) / (positive * negative)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=int, default=122880)
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--mended", action="store_true", help="compare positions with the lengths at once")
    args = parser.parse_args()
    torch.manual_seed(0)
    train = Visits.simulated(args.visits, args.pages, args.longest, seed=0)
    valid = Visits.simulated(2048, args.pages, args.longest, seed=1)
    model = VisitNet(args.pages, args.longest, mask_by_comparison if args.mended else mask_by_rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    order = torch.Generator().manual_seed(3)
    for epoch in range(args.epochs):
        losses = []
        for pages, lengths, bought in train.batches(args.batch_size, order):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(pages, lengths), bought)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.4f}, area {area_under_curve(model, valid):.3f}")


if __name__ == "__main__":
    main()
