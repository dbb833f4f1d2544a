"""Train a small transformer to tell positive from negative product reviews."""

import argparse
import logging
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger("sentiment")

STEMS = ["great", "awful", "love", "hate", "movie", "battery", "screen", "story", "quick", "slow", "return", "price"]
ENDINGS = ["", "s", "ed", "ing", "ly", "ness", "able", "ful"]
PAD, UNKNOWN = 0, 1


def build_vocabulary():
    """Word pieces: letters, beginnings of words and their ends."""
    pieces = ["<pad>", "<unk>"]
    pieces += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces += ["##" + chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces += STEMS + ["##" + ending for ending in ENDINGS if ending]
    return {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}


class WordPieceTokenizer:
    """Greedy longest match first."""

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def tokenize_word(self, word):
        ids, start = [], 0
        while start < len(word):
            end = len(word)
            while end > start:
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in self.vocabulary:
                    break
                end -= 1
            if end == start:
                return [UNKNOWN]
            ids.append(self.vocabulary[piece])
            start = end
        return ids

    def encode(self, text, max_length):
        ids = []
        for word in text.lower().split():
            word = "".join(letter for letter in word if letter.isalnum())
            ids.extend(self.tokenize_word(word))
        ids = ids[:max_length]
        return ids + [PAD] * (max_length - len(ids))


def make_reviews(count, seed):
    rng = random.Random(seed)
    reviews = []
    for _ in range(count):
        label = rng.randrange(2)
        words = [rng.choice(STEMS) + rng.choice(ENDINGS) for _ in range(rng.randint(300, 600))]
        words += ["great" if label else "awful"] * 5
        rng.shuffle(words)
        reviews.append((" ".join(words).capitalize() + ".", label))
    return reviews


class ReviewDataset(Dataset):
    def __init__(self, reviews, tokenizer, max_length, pretokenize):
        self.reviews = reviews
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.encoded = None
        if pretokenize:
            self.encoded = torch.tensor([tokenizer.encode(text, max_length) for text, _ in reviews])

    def __len__(self):
        return len(self.reviews)

    def __getitem__(self, index):
        text, label = self.reviews[index]
        if self.encoded is not None:
            return self.encoded[index], label
        return torch.tensor(self.tokenizer.encode(text, self.max_length)), label  # planted


class Classifier(nn.Module):
    def __init__(self, vocabulary_size, width=64, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = total = 0
    for tokens, labels in loader:
        correct += (model(tokens).argmax(dim=1) == labels).sum().item()
        total += len(labels)
    model.train()
    return correct / total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--mended", action="store_true", help="tokenize the reviews once, before the training")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    vocabulary = build_vocabulary()
    tokenizer = WordPieceTokenizer(vocabulary)
    train_set = ReviewDataset(make_reviews(768, 0), tokenizer, args.max_length, args.mended)
    test_set = ReviewDataset(make_reviews(64, 1), tokenizer, args.max_length, args.mended)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)

    model = Classifier(len(vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        total = torch.zeros(())
        for tokens, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(tokens), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        log.info("epoch %d loss %.4f", epoch, total.item() / len(train_loader))
    log.info("accuracy %.3f", evaluate(model, test_loader))


if __name__ == "__main__":
    main()
