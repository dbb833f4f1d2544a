"""Predict ratings of films from embeddings of the viewer and the film, learned with explicit ratings."""

import argparse
import logging
import math
import time

import torch
from torch import nn

log = logging.getLogger("films")


def ratings(count, viewers, films, seed):
    """Viewers, films and ratings around 3.5; few films are rated by many."""
    fixed = torch.Generator().manual_seed(99)
    taste, style = torch.randn(viewers, 4, generator=fixed), torch.randn(films, 4, generator=fixed)
    own = torch.Generator().manual_seed(seed)
    viewer = torch.randint(viewers, (count,), generator=own)
    film = (films * torch.rand(count, generator=own) ** 3).long()
    liked = (taste[viewer] * style[film]).sum(1)
    return viewer, film, 3.5 + 0.4 * liked + 0.3 * torch.randn(count, generator=own)


class FactorizationNet(nn.Module):
    """Embeddings' product and a small network on both."""

    def __init__(self, viewers, films, width, sparse):
        super().__init__()
        self.viewers = nn.Embedding(viewers, width, sparse=sparse)  # planted
        self.films = nn.Embedding(films, width, sparse=sparse)  # planted
        self.network = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.out = nn.Linear(128 + width, 1)
        nn.init.constant_(self.out.bias, 3.5)
        for table in (self.viewers, self.films):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, viewer, film):
        left, right = self.viewers(viewer), self.films(film)
        deep = self.network(torch.cat([left, right], dim=1))
        return self.out(torch.cat([deep, left * right], dim=1)).squeeze(1)


@torch.no_grad()
def root_mean_squared_error(model, viewer, film, rating):
    model.eval()
    error = (model(viewer, film) - rating).square().mean().item()
    model.train()
    return math.sqrt(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratings", type=int, default=524288)
    parser.add_argument("--viewers", type=int, default=160000)
    parser.add_argument("--films", type=int, default=60000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1280)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--mended", action="store_true", help="give the embeddings sparse gradients")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.manual_seed(0)
    data = ratings(args.ratings, args.viewers, args.films, seed=0)
    held_out = ratings(8192, args.viewers, args.films, seed=1)
    model = FactorizationNet(args.viewers, args.films, args.width, sparse=args.mended)
    # fused Adagrad takes no sparse gradients
    optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr, fused=not args.mended)
    for epoch in range(args.epochs):
        begin = time.time()
        for step, chosen in enumerate(torch.randperm(args.ratings).split(args.batch_size)):
            viewer, film, rating = (part[chosen] for part in data)
            loss = nn.functional.mse_loss(model(viewer, film), rating)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 64 == 0:
                log.info("epoch %d step %d loss %.4f", epoch, step, loss.item())
        error = root_mean_squared_error(model, *held_out)
        log.info("epoch %d error %.4f, %.1f s", epoch, error, time.time() - begin)


if __name__ == "__main__":
    main()
