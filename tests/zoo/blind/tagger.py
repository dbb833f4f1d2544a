"""Tag the words of sentences (a made-up part-of-speech task) with a bidirectional GRU."""

import argparse
import logging
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("tagger")

VOCABULARY = 5000
TAGS = 17
IGNORE = -100


class Sentences(Dataset):
    """Sentences as lists of word numbers with a list of tags."""

    def __init__(self, count, seed):
        rng = random.Random(seed)
        self.items = []
        for _ in range(count):
            words = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(20, 60))]
            self.items.append((words, [word % TAGS for word in words]))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def collate_by_hand(samples):
    """Pad words and tags, and say which words are real."""
    longest = max(len(words) for words, _ in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    targets = torch.full((len(samples), longest), IGNORE)
    mask = torch.zeros(len(samples), longest)
    for row, (words, tags) in enumerate(samples):
        for column, word in enumerate(words):  # planted
            tokens[row, column] = word  # planted
            targets[row, column] = tags[column]  # planted
            mask[row, column] = 1.0  # planted
    return tokens, targets, mask


def collate(samples):
    """The same with a few operations on whole sentences."""
    tokens = pad_sequence([torch.tensor(words) for words, _ in samples], batch_first=True)
    targets = pad_sequence([torch.tensor(tags) for _, tags in samples], batch_first=True, padding_value=IGNORE)
    lengths = torch.tensor([len(words) for words, _ in samples])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).float()
    return tokens, targets, mask


class Tagger(nn.Module):
    def __init__(self, width=96, hidden=96):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.gru = nn.GRU(width, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.2)
        self.out = nn.Linear(2 * hidden, TAGS)

    def forward(self, tokens, mask):
        embedded = self.embedding(tokens) * mask.unsqueeze(-1)
        states, _ = self.gru(embedded)
        return self.out(self.dropout(states))


def accuracy(model, loader):
    model.eval()
    right = words = 0
    with torch.no_grad():
        for tokens, targets, mask in loader:
            guessed = model(tokens, mask).argmax(-1)
            right += ((guessed == targets) & (targets != IGNORE)).sum().item()
            words += int(mask.sum().item())
    model.train()
    return right / words


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--mended", action="store_true", help="pad whole sentences, not word by word")
    args = parser.parse_args()
    torch.manual_seed(args.epochs)

    gather = collate if args.mended else collate_by_hand
    train_loader = DataLoader(Sentences(1344, 0), args.batch_size, shuffle=True, collate_fn=gather)
    test_loader = DataLoader(Sentences(128, 1), args.batch_size, collate_fn=gather)
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    step = 0
    for epoch in range(args.epochs):
        for tokens, targets, mask in train_loader:
            optimizer.zero_grad()
            scores = model(tokens, mask)
            loss = criterion(scores.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            step += 1
            if step % 20 == 0:
                log.info("step %d loss %.3f", step, loss.item())
        log.info("epoch %d done", epoch)
    log.info("accuracy %.3f", accuracy(model, test_loader))


if __name__ == "__main__":
    main()
