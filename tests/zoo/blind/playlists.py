"""Recommend the next song with a Transformer over playlists, trained against songs drawn by popularity."""

import argparse
import logging

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("playlists")


def simulate(playlists, length, songs, seed):
    """Playlists of neighbouring songs, and how popular each song is."""
    rng = np.random.default_rng(seed)
    popularity = 1 / (np.arange(songs) + 10.0)
    popularity /= popularity.sum()
    start = rng.choice(songs, playlists, p=popularity)
    steps = rng.integers(1, 6, (playlists, length))
    return (start[:, None] + steps.cumsum(axis=1)) % songs, popularity


class PlaylistDataset(Dataset):
    """A playlist, the song after each of its songs, and songs to compare that with."""

    def __init__(self, playlists, popularity, negatives):
        self.playlists = torch.from_numpy(playlists)
        self.popularity = popularity
        self.negatives = negatives

    def __len__(self):
        return len(self.playlists)

    def __getitem__(self, index):
        songs = self.playlists[index]
        shape = (len(songs) - 1, self.negatives)
        others = np.random.choice(len(self.popularity), size=shape, p=self.popularity)  # planted
        return songs[:-1], songs[1:], torch.from_numpy(others)


class BatchNegatives:
    """Draws the other songs of a whole batch from the cumulated popularity, which is computed once."""

    def __init__(self, popularity, negatives, seed=0):
        self.cumulated = np.cumsum(popularity)
        self.negatives = negatives
        self.rng = np.random.default_rng(seed)

    def __call__(self, batch):
        songs = torch.stack(batch)
        chance = self.rng.random((len(songs), songs.shape[1] - 1, self.negatives)) * self.cumulated[-1]
        others = torch.from_numpy(self.cumulated.searchsorted(chance, side="right"))
        return songs[:, :-1], songs[:, 1:], others


class NextSong(nn.Module):
    def __init__(self, songs, width=64, heads=2, layers=2, longest=64):
        super().__init__()
        self.songs = nn.Embedding(songs, width)
        self.places = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(longest), persistent=False)

    def forward(self, songs):
        length = songs.shape[1]
        x = self.songs(songs) + self.places.weight[:length]
        return self.layers(x, mask=self.causal[:length, :length], is_causal=True)

    def loss(self, songs, following, others):
        """The true next song should score higher than the others."""
        state = self(songs)
        candidates = self.songs(torch.cat([following.unsqueeze(-1), others], dim=-1))
        scores = (candidates @ state.unsqueeze(-1)).squeeze(-1)
        return F.cross_entropy(scores.flatten(0, 1), torch.zeros(following.numel(), dtype=torch.long))


def hit_rate(model, playlists, first=10):
    """How often the last song is among those that score highest."""
    model.eval()
    songs = torch.from_numpy(playlists)
    with torch.no_grad():
        scores = model(songs[:, :-1])[:, -1] @ model.songs.weight.T
    return (scores.topk(first).indices == songs[:, -1:]).any(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--playlists", type=int, default=5120)
    parser.add_argument("--length", type=int, default=13)
    parser.add_argument("--songs", type=int, default=5000)
    parser.add_argument("--negatives", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--mended", action="store_true", help="draw the other songs of a batch at once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)

    playlists, popularity = simulate(args.playlists, args.length, args.songs, seed=0)
    if args.mended:
        together = BatchNegatives(popularity, args.negatives)
        loader = DataLoader(torch.from_numpy(playlists), args.batch_size, shuffle=True, collate_fn=together)
    else:
        data = PlaylistDataset(playlists, popularity, args.negatives)
        loader = DataLoader(data, args.batch_size, shuffle=True)
    model = NextSong(args.songs)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    for epoch in range(args.epochs):
        for step, batch in enumerate(loader, 1):
            loss = model.loss(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                log.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
    held_out, _ = simulate(256, args.length, args.songs, seed=1)
    log.info("hit rate at 10: %.3f", hit_rate(model, held_out))


if __name__ == "__main__":
    main()
