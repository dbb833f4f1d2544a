"""Train a language model on sentences of different lengths, with batches of similar length."""

import argparse
import logging
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

log = logging.getLogger("bucketed")
VOCABULARY = 800


class Corpus(Dataset):
    def __init__(self, count, seed=0):
        rng = random.Random(seed)
        self.lengths = [min(int(rng.lognormvariate(3.2, 0.4)) + 4, 64) for _ in range(count)]
        self.seed = seed

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        length = self.lengths[index]
        return (torch.arange(length) * 7 + index) % (VOCABULARY - 1) + 1


class SimilarLengths(Sampler):
    """Batches of sentences whose lengths are near that of a random one."""

    def __init__(self, lengths, batch_size, batches, sort_once):
        self.lengths = lengths
        self.batch_size = batch_size
        self.batches = batches
        self.order = self.by_length() if sort_once else None
        self.rng = random.Random(3)

    def by_length(self):
        return sorted(range(len(self.lengths)), key=lambda index: self.lengths[index])  # planted

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            order = self.by_length() if self.order is None else self.order  # planted
            start = self.rng.randrange(len(order) - self.batch_size)
            yield order[start : start + self.batch_size]


class GRULanguageModel(nn.Module):
    def __init__(self, width=96, layers=1, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        states, _ = self.gru(self.dropout(self.embedding(tokens)))
        return self.output(self.dropout(states))


def language_loss(model, tokens):
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def pad(sentences):
    return pad_sequence(sentences, batch_first=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mended", action="store_true", help="sort the corpus once")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    corpus = Corpus(args.sentences)
    sampler = SimilarLengths(corpus.lengths, args.batch_size, args.steps, sort_once=args.mended)
    loader = DataLoader(corpus, batch_sampler=sampler, collate_fn=pad)
    model = GRULanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    running = torch.zeros(())
    for step, tokens in enumerate(loader, 1):
        loss = language_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        running += loss.detach()
        if step % 20 == 0:
            log.info("step %d loss %.3f", step, running.item() / 20)
            running.zero_()
    model.eval()
    with torch.no_grad():
        valid = language_loss(model, pad([corpus[index] for index in range(32)]))
    log.info("valid perplexity %.1f", valid.exp().item())


if __name__ == "__main__":
    main()
