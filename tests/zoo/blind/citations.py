"""Classify papers of a citation graph with a graph convolutional network."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def citation_graph(papers, edges, words, classes, seed=0):
    """A random graph whose edges prefer papers of the same class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (papers,), generator=generator)
    features = torch.randn(papers, words, generator=generator) + F.one_hot(labels, words).float()
    first = torch.randint(papers, (edges,), generator=generator)
    second = torch.randint(papers, (edges,), generator=generator)
    keep = (labels[first] == labels[second]) | (torch.rand(edges, generator=generator) < 0.2)
    adjacency = torch.zeros(papers, papers)
    adjacency[first[keep], second[keep]] = 1.0
    adjacency[second[keep], first[keep]] = 1.0
    return features, adjacency, labels


def normalize_adjacency(adjacency):
    """D^-1/2 (A + I) D^-1/2 of Kipf and Welling."""
    with_loops = adjacency + torch.eye(adjacency.shape[0])  # planted
    degree = with_loops.sum(dim=1)  # planted
    scale = torch.diag(degree.pow(-0.5))  # planted
    return scale @ with_loops @ scale  # planted


class GraphConvolution(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, normalized):
        return normalized @ (x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, words, hidden, classes, normalized=None, dropout=0.5):
        super().__init__()
        self.layers = nn.ModuleList(
            [GraphConvolution(words, hidden), GraphConvolution(hidden, hidden), GraphConvolution(hidden, classes)]
        )
        self.dropout = nn.Dropout(dropout)
        self.normalized = normalized

    def forward(self, x, adjacency):
        normalized = self.normalized
        if normalized is None:
            normalized = normalize_adjacency(adjacency)  # planted
        for layer in self.layers[:-1]:
            x = self.dropout(F.relu(layer(x, normalized)))
        return self.layers[-1](x, normalized)


def accuracy(scores, labels, mask):
    return (scores.argmax(dim=1)[mask] == labels[mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--papers", type=int, default=1000)
    parser.add_argument("--words", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--classes", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--mended", action="store_true", help="normalize the adjacency once")
    args = parser.parse_args()
    torch.manual_seed(0)

    features, adjacency, labels = citation_graph(args.papers, 8 * args.papers, args.words, args.classes)
    train_mask = torch.rand(args.papers) < 0.3
    model = GCN(
        args.words, args.hidden, args.classes, normalized=normalize_adjacency(adjacency) if args.mended else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4, fused=True)
    for epoch in range(1, args.epochs + 1):
        model.train()
        optimizer.zero_grad()
        scores = model(features, adjacency)
        loss = F.cross_entropy(scores[train_mask], labels[train_mask])
        loss.backward()
        optimizer.step()
        if epoch % args.eval_every == 0:
            model.eval()
            with torch.no_grad():
                scores = model(features, adjacency)
            print(
                f"epoch {epoch:3d} loss {loss.item():.3f} train {accuracy(scores, labels, train_mask):.3f} "
                f"test {accuracy(scores, labels, ~train_mask):.3f}"
            )


if __name__ == "__main__":
    main()
