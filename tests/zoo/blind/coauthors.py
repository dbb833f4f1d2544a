"""Predict researchers' fields from a weighted graph of joint papers, with a graph convolutional network."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

FIELDS, WORDS = 8, 320


def make_graph(people, papers, seed=0):
    """Edges in both directions within and across fields, numbers of joint papers, word counts and fields."""
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(FIELDS, (people,), generator=generator).sort().values
    first = torch.randint(people, (papers,), generator=generator)
    near = (first + torch.randint(-people // 12, people // 12, (papers,), generator=generator)) % people
    far = torch.randint(people, (papers,), generator=generator)
    second = torch.where(torch.rand(papers, generator=generator) < 0.75, near, far)
    edges = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
    joint = torch.randint(1, 6, (papers,), generator=generator).float().repeat(2)
    topics = torch.rand(FIELDS, WORDS, generator=generator)
    words = torch.poisson(topics[fields] * 2, generator=generator)
    return edges, joint, words, fields


def normalised(edges, weights, people):
    """Self loops, and weights divided by the square roots of both ends' degrees."""
    loops = torch.arange(people).expand(2, people)
    edges = torch.cat([edges, loops], dim=1)
    weights = torch.cat([weights, torch.ones(people)])
    degrees = torch.zeros(people).index_add_(0, edges[1], weights)
    return edges, weights * (degrees[edges[0]] * degrees[edges[1]]).rsqrt()


class Propagation(nn.Module):
    """Sum of the neighbours' features times the edges' weights."""

    def __init__(self, edges, weights, people, sparse):
        super().__init__()
        self.register_buffer("edges", edges)
        self.register_buffer("weights", weights)
        # as many edges one way as the other, with the same weights: the matrix is symmetric
        matrix = torch.sparse_coo_tensor(edges.flip(0), weights, (people, people)) if sparse else None
        self.matrix = matrix.coalesce().to_sparse_csr() if sparse else None

    def forward(self, x):
        if self.matrix is not None:
            return SymmetricProduct.apply(self.matrix, x)
        sources, targets = self.edges
        messages = x[sources] * self.weights[:, None]  # planted
        return torch.zeros_like(x).index_add(0, targets, messages)  # planted


class SymmetricProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix, x):
        ctx.matrix = matrix
        return matrix @ x

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.matrix @ grad


class GCN(nn.Module):
    def __init__(self, propagation, width, dropout=0.3):
        super().__init__()
        self.propagation = propagation
        self.first, self.second = nn.Linear(WORDS, width), nn.Linear(width, width)
        self.out = nn.Linear(width, FIELDS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = self.propagation(self.first(x)).relu()
        x = self.propagation(self.second(self.dropout(x))).relu()
        return self.out(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=4000)
    parser.add_argument("--papers", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=240)
    parser.add_argument("--mended", action="store_true", help="multiply with a sparse matrix")
    args = parser.parse_args()
    torch.manual_seed(0)
    edges, joint, words, fields = make_graph(args.people, args.papers)
    edges, weights = normalised(edges, joint, args.people)
    x = F.normalize(words, dim=1)
    train = torch.rand(args.people) < 0.3
    model = GCN(Propagation(edges, weights, args.people, sparse=args.mended), args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4, fused=True)
    for epoch in range(1, args.epochs + 1):
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[train], fields[train])
        loss.backward()
        optimizer.step()
        if epoch % 40 == 0:
            model.eval()
            with torch.no_grad():
                right = (model(x).argmax(dim=1) == fields)[~train].float().mean()
            print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right.item():.3f}")


if __name__ == "__main__":
    main()
