"""Predict which customers leave."""

import argparse
import time

import torch
from data import CustomerDataset, CustomerTable, load_customers
from model import TabularNet
from torch import nn
from torch.utils.data import DataLoader


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--mended", action="store_true", help="turn the data frame into tensors once")
    return parser.parse_args()


def train_epoch(model, batches, optimizer, criterion):
    model.train()
    losses = []
    for numbers, categories, labels in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(numbers, categories), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


@torch.no_grad()
def accuracy(model, table):
    model.eval()
    hits = [((model(table.numbers, table.categories) > 0) == (table.labels > 0.5)).float().mean()]
    return torch.stack(hits).mean().item()


def main():
    args = parse_args()
    torch.manual_seed(7)
    frame = load_customers(args.rows)
    if args.mended:
        batches = CustomerTable(frame, args.batch_size)
    else:
        batches = DataLoader(CustomerDataset(frame), batch_size=args.batch_size, shuffle=True, drop_last=True)
    held_out = CustomerTable(load_customers(2000, seed=1), args.batch_size)
    model = TabularNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(args.epochs):
        begin = time.time()
        loss = train_epoch(model, batches, optimizer, criterion)
        print(f"epoch {epoch}: loss {loss:.4f} in {time.time() - begin:.1f} s")
    print(f"accuracy {accuracy(model, held_out):.3f}")


if __name__ == "__main__":
    main()
