"""A word-level language model with a GRU, after an old tutorial."""

import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger("char_lm")


class InputLayer(nn.Module):
    """Words into vectors, with a weight that the output shares."""

    def __init__(self, vocabulary, width, lookup):
        super().__init__()
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.05)
        self.lookup = lookup

    def forward(self, tokens):
        if self.lookup:
            return F.embedding(tokens, self.weight)
        one_hot = F.one_hot(tokens, self.vocabulary).float()  # planted
        return one_hot @ self.weight  # planted


class WordModel(nn.Module):
    def __init__(self, vocabulary, width, lookup, dropout=0.1):
        super().__init__()
        self.inputs = InputLayer(vocabulary, width, lookup)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, tokens, state=None):
        outputs, state = self.gru(self.dropout(self.inputs(tokens)), state)
        return self.dropout(outputs) @ self.inputs.weight.T + self.bias, state


def made_up_text(words, vocabulary, seed=0):
    """A sequence in which each word hints at the next."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(1, 6, (words,), generator=generator)
    return jumps.cumsum(0) % vocabulary


def batchify(text, batch_size):
    length = len(text) // batch_size
    return text[: length * batch_size].view(batch_size, length)


def windows(data, span):
    for begin in range(0, data.shape[1] - 1, span):
        end = min(begin + span, data.shape[1] - 1)
        yield data[:, begin:end], data[:, begin + 1 : end + 1]


@torch.no_grad()
def perplexity(model, data, span):
    model.eval()
    losses, state = [], None
    for inputs, targets in windows(data, span):
        scores, state = model(inputs, state)
        losses.append(F.cross_entropy(scores.flatten(0, 1), targets.flatten()))
    model.train()
    return torch.stack(losses).mean().exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--span", type=int, default=24)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mended", action="store_true", help="look the vectors up")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    words = args.batch_size * (args.span * args.steps + 1)
    data = batchify(made_up_text(words, args.vocabulary), args.batch_size)
    model = WordModel(args.vocabulary, args.width, lookup=args.mended)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    state = None
    for step, (inputs, targets) in enumerate(windows(data, args.span), 1):
        scores, state = model(inputs, state)
        state = state.detach()
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if step % 15 == 0:
            log.info("step %d loss %.3f", step, loss.item())
    held_out = batchify(made_up_text(12 * 100, args.vocabulary, seed=1), args.batch_size)
    log.info("perplexity %.1f", perplexity(model, held_out, args.span))


if __name__ == "__main__":
    main()
