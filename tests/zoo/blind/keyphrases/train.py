"""Generate keyphrases for abstracts with a sequence-to-sequence model."""

import argparse
import time

import torch
from beam import beam_search
from data import PAD, Abstracts
from model import KeyphraseModel
from torch import nn
from torch.utils.data import DataLoader


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--abstracts", type=int, default=4096)
    parser.add_argument("--valid-abstracts", type=int, default=64)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--phrase", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--run-valid-every", type=int, default=16)
    parser.add_argument("--beam-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=6)
    parser.add_argument("--mended", action="store_true", help="validate with the loss, search after the training only")
    return parser.parse_args()


def loss_of(model, text, phrase, criterion):
    return criterion(model(text, phrase[:, :-1]).flatten(0, 1), phrase[:, 1:].flatten())


@torch.no_grad()
def valid_loss(model, loader, criterion):
    model.eval()
    losses = [loss_of(model, text, phrase, criterion) for text, phrase in loader]
    model.train()
    return torch.stack(losses).mean().item()


def exact_matches(model, loader, args):
    """Share of the texts whose phrase is found word by word."""
    model.eval()
    hits = 0
    for text, phrase in loader:
        found = beam_search(model, text, args.beam_size, args.max_length)
        hits += (found[:, : args.phrase] == phrase[:, 1 : args.phrase + 1]).all(1).sum()
    model.train()
    return hits.item() / len(loader.dataset)


def main():
    args = parse_args()
    torch.manual_seed(5)
    train_set = Abstracts(args.abstracts, args.words, args.phrase, args.vocabulary, seed=0)
    valid_set = Abstracts(args.valid_abstracts, args.words, args.phrase, args.vocabulary, seed=1)
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    valid_loader = DataLoader(valid_set, args.valid_abstracts)
    model = KeyphraseModel(args.vocabulary, width=96, hidden=128)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, fused=True)
    step, begin = 0, time.time()
    for epoch in range(args.epochs):
        for text, phrase in loader:
            loss = loss_of(model, text, phrase, criterion)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % args.run_valid_every == 0:
                if args.mended:
                    score = valid_loss(model, valid_loader, criterion)
                else:
                    score = exact_matches(model, valid_loader, args)  # planted
                if step % 32 == 0:
                    print(f"epoch {epoch} step {step} loss {loss.item():.3f} validation {score:.3f}")
    print(f"{step / (time.time() - begin):.1f} steps/s, exact matches {exact_matches(model, valid_loader, args):.3f}")


if __name__ == "__main__":
    main()
