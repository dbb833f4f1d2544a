"""Train a network that reads emotions from faces."""

import argparse
import os
import tempfile

import torch
from data import EMOTIONS, Expressions, write_csv
from network import make_network
from torch import nn
from torch.utils.data import DataLoader


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2100)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mended", action="store_true", help="parse the pixels once, when the file is read")
    return parser.parse_args()


def test(model, loader):
    model.eval()
    right = torch.zeros(len(EMOTIONS))
    seen = torch.zeros(len(EMOTIONS))
    with torch.no_grad():
        for images, labels in loader:
            hit = (model(images).argmax(1) == labels).float()
            right.index_add_(0, labels, hit)
            seen.index_add_(0, labels, torch.ones_like(hit))
    return right / seen.clamp(min=1)


def main():
    args = arguments()
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "faces.csv")
        write_csv(path, args.rows)
        train_set = Expressions(path, "Training", augment=True, in_memory=args.mended)
        test_set = Expressions(path, "PublicTest", augment=False, in_memory=args.mended)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    print(f"{len(train_set)} faces for training, {len(test_set)} for the test")

    model = make_network(len(EMOTIONS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        recall = test(model, test_loader)
        worst = EMOTIONS[int(recall.argmin())]
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, recall {recall.mean():.3f}, worst {worst}")


if __name__ == "__main__":
    main()
