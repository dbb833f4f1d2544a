"""Learn which documents answer which queries, with a triplet loss over the hardest part of both sides."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

TOPICS, DIM = 12, 300


def corpus(queries, documents, seed=0):
    """Averaged word vectors of queries and documents, and the topic of each."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(TOPICS, DIM, generator=torch.Generator().manual_seed(7)) * 0.15
    topics = torch.rand(TOPICS, generator=generator).cumsum(0)
    draws = [torch.rand(count, generator=generator) * topics[-1] for count in (queries, documents)]
    kinds = [torch.searchsorted(topics, draw) for draw in draws]
    vectors = [centres[kind] + torch.randn(len(kind), DIM, generator=generator) for kind in kinds]
    return vectors[0], kinds[0], vectors[1], kinds[1]


class Tower(nn.Sequential):
    def __init__(self, width=512, outputs=128, dropout=0.1):
        super().__init__(
            nn.Linear(DIM, width), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(width), nn.Linear(width, outputs)
        )


class Matcher(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = Tower(), Tower()

    def forward(self, queries, documents):
        return F.normalize(self.query(queries), dim=1) @ F.normalize(self.document(documents), dim=1).T


def share_of(count, fraction):
    return max(1, int(count * fraction))


def hard_triplet_loss(sim, matches, fraction, margin=0.2):
    """For each query the mean over pairs of its least similar positives and most similar negatives."""
    losses = []
    for scores, match in zip(sim, matches, strict=True):  # planted
        positive, negative = scores[match], scores[~match]  # planted
        if len(positive) == 0:  # planted
            continue
        low = positive.topk(share_of(len(positive), fraction), largest=False).values  # planted
        high = negative.topk(share_of(len(negative), fraction)).values  # planted
        losses.append(F.relu(margin + high[None, :] - low[:, None]).mean())  # planted
    return torch.stack(losses).mean()  # planted


def hard_triplet_loss_of_all(sim, matches, fraction, margin=0.2):
    """The same for all queries at once: both sides sorted, and what is beyond a query's share masked."""
    positives = matches.sum(dim=1)
    negatives = matches.shape[1] - positives
    lows, highs = ((count * fraction).long().clamp(min=1) for count in (positives, negatives))
    low = sim.masked_fill(~matches, torch.inf).topk(int(lows.max()), largest=False).values
    high = sim.masked_fill(matches, -torch.inf).topk(int(highs.max())).values
    use_low = torch.arange(low.shape[1]) < torch.minimum(lows, positives)[:, None]
    use_high = torch.arange(high.shape[1]) < highs[:, None]
    hinge = F.relu(margin + high[:, None, :] - low[:, :, None])
    pairs = use_low[:, :, None] & use_high[:, None, :]
    sums = torch.where(pairs, hinge, 0).sum(dim=(1, 2))
    answered = positives > 0
    return (sums / (lows * highs))[answered].mean()


@torch.no_grad()
def precision_at(model, queries, query_topics, documents, topics, k=10):
    model.eval()
    best = model(queries, documents).topk(k, dim=1).indices
    model.train()
    return (topics[best] == query_topics[:, None]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--queries", type=int, default=128, help="of a batch")
    parser.add_argument("--documents", type=int, default=192, help="of a batch")
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--mended", action="store_true", help="compute the loss of all queries at once")
    args = parser.parse_args()
    torch.manual_seed(0)
    queries, query_topics, documents, topics = corpus(2000, 10_000)
    held_out = corpus(200, 2000, seed=1)
    loss_of = hard_triplet_loss_of_all if args.mended else hard_triplet_loss
    model = Matcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for step in range(1, args.steps + 1):
        some = torch.randint(len(queries), (args.queries,))
        others = torch.randint(len(documents), (args.documents,))
        sim = model(queries[some], documents[others])
        loss = loss_of(sim, query_topics[some][:, None] == topics[others], args.fraction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, precision {precision_at(model, *held_out):.3f}")


if __name__ == "__main__":
    main()
