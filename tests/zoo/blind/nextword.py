"""A neural n-gram model: the next word from the last three, with weights kept as plain parameters."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

CONTEXT = 3


def text(words, vocabulary, seed=0):
    """A chain in which each word has eight likely followers."""
    generator = torch.Generator().manual_seed(seed)
    followers = torch.randint(vocabulary, (vocabulary, 8), generator=torch.Generator().manual_seed(3)).tolist()
    choices = torch.randint(8, (words,), generator=generator).tolist()
    jumps = torch.randint(vocabulary, (words,), generator=generator).tolist()
    leaps = (torch.rand(words, generator=generator) < 0.05).tolist()
    word, chain = 0, []
    for choice, jump, leap in zip(choices, jumps, leaps, strict=True):
        word = jump if leap else followers[word][choice]
        chain.append(word)
    return torch.tensor(chain)


class NextWord(nn.Module):
    """After Bengio et al. (2003)."""

    def __init__(self, vocabulary, lookup, embedding=32, hidden=128):
        super().__init__()
        self.vocabulary, self.lookup = vocabulary, lookup
        self.C = nn.Parameter(torch.randn(vocabulary, embedding) * 0.1)
        self.hidden = nn.Linear(CONTEXT * embedding, hidden)
        self.out = nn.Linear(hidden, vocabulary)

    def embed(self, words):
        if self.lookup:
            return F.embedding(words, self.C)
        return F.one_hot(words, num_classes=self.vocabulary).float() @ self.C  # planted

    def forward(self, words):
        return self.out(self.hidden(self.embed(words).flatten(1)).tanh())


def contexts(chain):
    """Each word's three predecessors, and the word."""
    return chain.unfold(0, CONTEXT, 1)[:-1], chain[CONTEXT:]


@torch.no_grad()
def perplexity(model, x, y):
    parts = zip(x.split(500), y.split(500), strict=True)
    losses = [F.cross_entropy(model(part), goal, reduction="sum") for part, goal in parts]
    return math.exp(torch.stack(losses).sum().item() / len(y))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--words", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mended", action="store_true", help="look the embeddings up")
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = contexts(text(args.words, args.vocabulary))
    x_held_out, y_held_out = contexts(text(5000, args.vocabulary, seed=1))
    model = NextWord(args.vocabulary, lookup=args.mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    for step in range(1, args.steps + 1):
        chosen = torch.randint(len(y), (args.batch_size,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            held_out = perplexity(model, x_held_out, y_held_out)
            print(f"step {step}: loss {loss.item():.4f}, perplexity {held_out:.1f}")


if __name__ == "__main__":
    main()
