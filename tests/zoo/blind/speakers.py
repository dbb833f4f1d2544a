"""Learn embeddings of voices with pairs of recordings, of one speaker or of two."""

import argparse
import itertools
import random

import torch
import torch.nn.functional as F
from torch import nn


class Recordings:
    """Mel spectrograms, as many of each speaker; a batch has some recordings of some speakers."""

    def __init__(self, speakers, each, bands=32, frames=24, seed=0):
        generator = torch.Generator().manual_seed(seed)
        voices = torch.randn(speakers, bands, 1, generator=generator)
        noise = 1.5 * torch.randn(speakers, each, bands, frames, generator=generator)
        self.spectrograms = (voices[:, None] + noise).flatten(0, 1)
        self.speakers, self.each = speakers, each

    def batch(self, speakers, recordings, generator):
        chosen = torch.randperm(self.speakers, generator=generator)[:speakers]
        take = torch.rand(speakers, self.each, generator=generator).argsort(1)[:, :recordings]
        rows = (chosen[:, None] * self.each + take).flatten()
        return self.spectrograms[rows], rows // self.each


class AllPairs:
    """Lists the pairs of a batch and draws from the list."""

    def __init__(self, count, seed=0):
        self.count, self.random = count, random.Random(seed)

    def __call__(self, labels):
        speakers = labels.tolist()  # planted
        same, different = [], []  # planted
        for i, j in itertools.combinations(range(len(speakers)), 2):  # planted
            (same if speakers[i] == speakers[j] else different).append((i, j))  # planted
        same = self.random.sample(same, self.count)  # planted
        different = self.random.sample(different, self.count)  # planted
        return torch.tensor(same).T, torch.tensor(different).T  # planted


class DrawnPairs:
    """Draws one recording of a pair, then another among those of its speaker or of the rest."""

    def __init__(self, count, seed=0):
        self.count, self.generator = count, torch.Generator().manual_seed(seed)

    def draw(self, below):
        return (torch.rand(self.count, generator=self.generator) * below).long()

    def __call__(self, labels):
        order = labels.argsort(stable=True)
        _, place, sizes = labels[order].unique_consecutive(return_inverse=True, return_counts=True)
        begins = sizes.cumsum(0) - sizes
        first = self.draw(torch.tensor(len(labels)))
        size, begin = sizes[place[first]], begins[place[first]]
        partner = begin + (first - begin + 1 + self.draw(size - 1)) % size
        anchor = self.draw(torch.tensor(len(labels)))
        size, begin = sizes[place[anchor]], begins[place[anchor]]
        other = (begin + size + self.draw(len(labels) - size)) % len(labels)
        return order[torch.stack([first, partner])], order[torch.stack([anchor, other])]


class VoiceNet(nn.Module):
    def __init__(self, bands=32, width=48, embedding=64):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(bands, width, 5, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.project = nn.Linear(2 * width, embedding)

    def forward(self, spectrograms):
        features = self.convolutions(spectrograms)
        statistics = torch.cat([features.mean(2), features.std(2)], dim=1)
        return F.normalize(self.project(statistics), dim=1)


def contrastive_loss(embeddings, same, different, margin=0.8):
    near = (embeddings[same[0]] - embeddings[same[1]]).square().sum(1)
    far = ((embeddings[different[0]] - embeddings[different[1]]).square().sum(1) + 1e-6).sqrt()
    return near.mean() + F.relu(margin - far).square().mean()


@torch.no_grad()
def identified(model, recordings, generator):
    """Share of recordings whose nearest neighbour is of the same speaker."""
    spectrograms, labels = recordings.batch(40, 10, generator)
    embeddings = model(spectrograms)
    nearest = (embeddings @ embeddings.T).fill_diagonal_(-2).argmax(1)
    return (labels[nearest] == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speakers", type=int, default=120)
    parser.add_argument("--batch-speakers", type=int, default=24)
    parser.add_argument("--batch-recordings", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--mended", action="store_true", help="draw the pairs without listing all of them")
    args = parser.parse_args()
    torch.manual_seed(0)
    train_set, test_set = Recordings(args.speakers, 30), Recordings(40, 10, seed=1)
    pairs = (DrawnPairs if args.mended else AllPairs)(args.pairs)
    model = VoiceNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(5)
    for step in range(1, args.steps + 1):
        spectrograms, labels = train_set.batch(args.batch_speakers, args.batch_recordings, generator)
        loss = contrastive_loss(model(spectrograms), *pairs(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"identified {identified(model, test_set, generator):.3f}")


if __name__ == "__main__":
    main()
