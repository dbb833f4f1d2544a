"""Train a small GPT-2-like model on made-up text, and optionally profile a few steps of it.

    python examples/gpt2_training.py --loss per-token --profile slow.json.gz
    python examples/gpt2_training.py --loss batched --profile fast.json.gz
    stepscope diagnose slow.json.gz

With `--loss per-token` the cross-entropy is computed in a Python loop over the tokens of the sequence, a mistake
that many a first training loop makes; with `--loss batched` the same loss is computed at once. Needs only PyTorch.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 2048
SEQUENCE = 64
BATCH = 8
WIDTH = 128
HEADS = 4
LAYERS = 2


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of token sequences, the second shifted by one: what follows each token."""

    def __init__(self, sequences: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (sequences, SEQUENCE + 1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens[index]
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """One transformer layer: attention to what came before, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.attention(x).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


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
        x = self.token(tokens) + self.position.weight
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


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"per-token": per_token_loss, "batched": batched_loss}


def train(device: torch.device, loss_function: Loss, steps: int, after_step: Callable[[], None]) -> float:
    """Train for `steps` steps, calling `after_step` after each, and return the last loss."""
    torch.manual_seed(0)
    model = GPT2().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loader = DataLoader(Text(steps * BATCH), batch_size=BATCH, shuffle=True, pin_memory=device.type == "cuda")
    loss = torch.zeros(())
    for tokens, targets in loader:
        tokens = tokens.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        loss = loss_function(model(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step()
    return loss.item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT-2-like model on made-up text.")
    parser.add_argument("--loss", choices=list(LOSSES), default="per-token")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warm-up", type=int, default=3, metavar="STEPS", help="steps before the profiled ones")
    parser.add_argument("--steps", type=int, default=3, help="steps to train, and to profile, after the warm-up")
    parser.add_argument("--profile", metavar="FILE", help="write a profile of the steps (.json or .json.gz)")
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    steps = options.warm_up + options.steps
    if options.profile is None:
        loss = train(device, LOSSES[options.loss], steps, after_step=lambda: None)
    else:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=options.warm_up, active=options.steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(options.profile),
            with_stack=True,
            record_shapes=True,
            profile_memory=True,
        ) as profiler:
            loss = train(device, LOSSES[options.loss], steps, after_step=profiler.step)
    print(f"{options.loss} loss on {device}: {loss:.4f} after {steps} steps")


if __name__ == "__main__":
    main()
