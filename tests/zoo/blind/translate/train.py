"""Train a sequence-to-sequence transformer on a toy language: the target is the source, reversed and shifted."""

import argparse
import logging

import torch
from layers import Seq2Seq
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("translate")
BOS = 1


def make_pairs(count, length, vocabulary, seed):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(3, vocabulary - 1, (count, length), generator=generator)
    target = source.flip(1) + 1
    return TensorDataset(source, torch.cat([torch.full((count, 1), BOS), target], dim=1))


def learning_rate(step, width, warmup):
    """Of Attention Is All You Need."""
    step = max(step, 1)
    return width**-0.5 * min(step**-0.5, step * warmup**-1.5)


def step_loss(model, criterion, source, target):
    scores = model(source, target[:, :-1])
    return criterion(scores.flatten(0, 1), target[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader, criterion):
    model.eval()
    losses = [step_loss(model, criterion, source, target) for source, target in loader]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=600)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--mended", action="store_true", help="keep the positional encodings in a buffer")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.manual_seed(0)

    train_loader = DataLoader(make_pairs(320, args.length, args.vocabulary, 0), args.batch_size, shuffle=True)
    valid_loader = DataLoader(make_pairs(32, args.length, args.vocabulary, 1), args.batch_size)
    model = Seq2Seq(args.vocabulary, args.width, args.length + 1, args.mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate(s, args.width, args.warmup))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(args.epochs):
        for source, target in train_loader:
            optimizer.zero_grad()
            loss = step_loss(model, criterion, source, target)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        log.info("epoch %d train %.3f valid %.3f", epoch, loss.item(), evaluate(model, valid_loader, criterion))


if __name__ == "__main__":
    main()
