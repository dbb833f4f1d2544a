"""Classify long documents with sparse attention."""

import argparse
import logging

import torch
from attention import Layer, SparsePattern
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
log = logging.getLogger()


class DocumentClassifier(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Parameter(0.02 * torch.randn(args.length, args.width))
        self.layers = nn.Sequential()
        for number in range(args.layers):
            pattern = SparsePattern(args.window, args.first, args.links, args.length, seed=number)
            self.layers.append(Layer(args.width, args.heads, pattern, keep_mask=args.mended))
        self.classify = nn.Linear(args.width, args.topics)

    def forward(self, words):
        x = self.words(words) + self.positions[: words.shape[1]]
        return self.classify(self.layers(x)[:, 0])


def make_documents(args, count, seed):
    """Documents whose topic makes some words more likely."""
    generator = torch.Generator().manual_seed(seed)
    topics = torch.randint(args.topics, (count,), generator=generator)
    words = torch.randint(args.vocabulary, (count, args.length), generator=generator)
    marked = torch.rand(count, args.length, generator=generator) < 0.05
    return TensorDataset(torch.where(marked, topics[:, None].expand_as(words), words), topics)


@torch.no_grad()
def test(model, loader):
    model.eval()
    right = sum((model(words).argmax(1) == topics).sum().item() for words, topics in loader)
    model.train()
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=800)
    parser.add_argument("--topics", type=int, default=6)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--window", type=int, default=12)
    parser.add_argument("--first", type=int, default=4)
    parser.add_argument("--links", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--mended", action="store_true", help="keep the masks")
    args = parser.parse_args()
    torch.manual_seed(0)

    model = DocumentClassifier(args)
    loader = DataLoader(make_documents(args, args.documents, 0), args.batch_size, shuffle=True)
    test_loader = DataLoader(make_documents(args, 24, 1), args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step, (words, topics) in enumerate(loader, 1):
        loss = nn.functional.cross_entropy(model(words), topics)
        (loss / args.accumulate).backward()
        if step % args.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 10 == 0:
            log.info("step %d loss %.3f", step, loss.item())
    log.info("accuracy %.3f", test(model, test_loader))


if __name__ == "__main__":
    main()
