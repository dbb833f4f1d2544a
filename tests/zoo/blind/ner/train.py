"""Recognise names in sentences with a convolutional tagger."""

import argparse
import logging

import torch
from corpus import NamesDataset, make_corpus
from torch import nn
from torch.utils.data import DataLoader
from vocabulary import LABELS, Vocabulary

logger = logging.getLogger("ner")


class ConvTagger(nn.Module):
    def __init__(self, words, width=96, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, len(LABELS))

    def forward(self, numbers):
        x = self.embedding(numbers)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + torch.relu(convolution(norm(x).transpose(1, 2))).transpose(1, 2)
        return self.head(x)


def f1(model, loader):
    """Of names, over all kinds together."""
    model.eval()
    hits = guessed = real = 0
    with torch.no_grad():
        for numbers, labels in loader:
            best = model(numbers).argmax(-1)
            hits += ((best == labels) & (labels > 0)).sum().item()
            guessed += (best > 0).sum().item()
            real += (labels > 0).sum().item()
    model.train()
    return 2 * hits / max(guessed + real, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=30)
    parser.add_argument("--lexicon", type=int, default=3000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="look words up in a dictionary")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    corpus = make_corpus(800, args.lexicon, args.length, seed=0)
    train, valid = corpus[:640], corpus[640:]
    vocabulary = Vocabulary([words for words, _ in train], mapping=args.mended)
    train_loader = DataLoader(NamesDataset(train, vocabulary), args.batch_size, shuffle=True)
    valid_loader = DataLoader(NamesDataset(valid, vocabulary), args.batch_size)
    model = ConvTagger(len(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        for numbers, labels in train_loader:
            loss = criterion(model(numbers).flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logger.info("epoch %d loss %.3f f1 %.3f", epoch, loss.item(), f1(model, valid_loader))


if __name__ == "__main__":
    main()
