"""Train a small GPT-2 the naive way, and mend it with four flags.

    stepscope run examples/naive_gpt2.py
    stepscope run examples/naive_gpt2.py --batched-loss --deferred-logging --loader-workers 2 --fused-optimizer

The naive loop computes the loss token by token, reads it from the device in every step, prepares each batch in the
training process and updates one parameter tensor at a time. Needs only PyTorch; a step takes a fraction of a second
on a CPU.
"""

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 4096
SEQUENCE = 64
BATCH = 4
WIDTH = 64
HEADS = 4
LAYERS = 2
LOG_EVERY = 10


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Made-up text that is turned into tokens when it is asked for, as many a first data set does."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = " ".join(str((index * 7919 + position * position) % 9973) for position in range(SEQUENCE + 1))
        tokens = torch.tensor(tokenize(text))
        return tokens[:-1], tokens[1:]


def tokenize(text: str) -> list[int]:
    """A token for each word: a checksum of its letters, computed in plain Python."""
    tokens = []
    for word in text.split():
        checksum = 0
        for letter in word * 8:
            checksum = (checksum * 31 + ord(letter)) % VOCABULARY
        tokens.append(checksum)
    return tokens


class Attention(nn.Module):
    """Each token looks at those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One layer: attention, then a feed-forward network, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class GPT2(nn.Module):
    """Token and position embeddings, a few layers, and a score for every token of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def per_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    loss = torch.zeros((), device=logits.device)
    for position in range(SEQUENCE):
        loss = loss + F.cross_entropy(logits[:, position], targets[:, position])
    return loss / SEQUENCE


def batched_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_loader(options: argparse.Namespace, device: torch.device) -> DataLoader[tuple[Tensor, Tensor]]:
    data = Text(options.steps * BATCH)
    if options.loader_workers == 0:
        return DataLoader(data, batch_size=BATCH)
    return DataLoader(
        data, batch_size=BATCH, num_workers=options.loader_workers, pin_memory=device.type == "cuda", prefetch_factor=4
    )


def make_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if options.fused_optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)


def train(options: argparse.Namespace) -> list[float]:
    """Train for `options.steps` steps and return the losses that were logged."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = GPT2().to(device)
    optimizer = make_optimizer(options, model)
    loss_of = batched_loss if options.batched_loss else per_token_loss
    history: list[float] = []
    unread: list[Tensor] = []
    for tokens, targets in make_loader(options, device):
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        loss = loss_of(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.deferred_logging:
            unread.append(loss.detach())
            if len(unread) == LOG_EVERY:
                history.extend(torch.stack(unread).tolist())
                unread.clear()
        else:
            history.append(loss.item())
    return history + [loss.item() for loss in unread]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 the naive way; each flag mends one mistake.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batched-loss", action="store_true", help="the loss of all tokens at once")
    parser.add_argument("--deferred-logging", action="store_true", help=f"read the loss every {LOG_EVERY} steps")
    parser.add_argument("--loader-workers", type=int, default=0, metavar="N", help="processes that prepare batches")
    parser.add_argument("--fused-optimizer", action="store_true", help="update all parameters in one kernel")
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    history = train(options)
    elapsed = time.perf_counter() - begin
    step_ms = 1000 * elapsed / max(options.steps, 1)
    print(f"{len(history)} steps of {step_ms:.1f} ms, loss {history[0]:.4f} -> {history[-1]:.4f}")


if __name__ == "__main__":
    main()
