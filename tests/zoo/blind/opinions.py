"""Guess the stars of opinions, which are of very different lengths, with a recurrent network."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

STARS = 5


class Opinions(Dataset):
    """Mostly a few words, at times an essay; some words are said more often with many stars."""

    def __init__(self, count, vocabulary, seed=0):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.empty(count).log_normal_(2.7, 0.8, generator=generator).long().clamp(3, 160)
        self.stars = torch.randint(STARS, (count,), generator=generator)
        spread = vocabulary // (2 * STARS)
        self.texts = [
            torch.where(
                torch.rand(length, generator=generator) < 0.25,
                torch.randint(1, spread, (length,), generator=generator) + star * spread,
                torch.randint(1, vocabulary, (length,), generator=generator),
            )
            for length, star in zip(lengths.tolist(), self.stars.tolist(), strict=True)
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], self.stars[index]


def collate(samples):
    texts, stars = zip(*samples, strict=True)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.stack(stars)


class GRUClassifier(nn.Module):
    def __init__(self, vocabulary, packed, embedding=64, hidden=128, dropout=0.2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.gru = nn.GRU(embedding, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(hidden, STARS)
        self.packed = packed

    def last_state(self, embedded, lengths):
        if self.packed:
            sequences = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
            return self.gru(sequences)[1][0]
        outputs, _ = self.gru(embedded)  # planted
        return outputs[torch.arange(len(lengths)), lengths - 1]  # planted

    def forward(self, texts, lengths):
        state = self.last_state(self.embedding(texts), lengths)
        return self.out(self.dropout(state))


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [model(texts, lengths).argmax(dim=1) == stars for texts, lengths, stars in loader]
    model.train()
    return torch.cat(hits).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opinions", type=int, default=4000)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--mended", action="store_true", help="pack the sequences, so that the padding is left out")
    args = parser.parse_args()
    torch.manual_seed(0)
    train_set = Opinions(args.opinions, args.vocabulary)
    valid_set = Opinions(500, args.vocabulary, seed=1)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, collate_fn=collate)
    held_out = DataLoader(valid_set, args.batch_size, collate_fn=collate)
    model = GRUClassifier(args.vocabulary, packed=args.mended)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    step = 0
    for epoch in range(args.epochs):
        for texts, lengths, stars in loader:
            optimizer.zero_grad()
            loss = criterion(model(texts, lengths), stars)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            step += 1
            if step % 25 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
        print(f"epoch {epoch}: accuracy {accuracy(model, held_out):.3f}")


if __name__ == "__main__":
    main()
