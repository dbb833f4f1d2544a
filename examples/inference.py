"""Let a small GPT-2 write text, token by token, the naive way or with a cache of keys and values.

    stepscope run examples/inference.py
    stepscope run examples/inference.py --cache

The naive loop runs the whole text through the model again for every new token; with `--cache` only the new token. Each
token is read from the device before the next is asked for. Needs only PyTorch.
"""

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 1024
LONGEST = 256
WIDTH = 128
HEADS = 4
LAYERS = 2

Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    """One layer; `past` holds the keys and values of earlier tokens, or is None to begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = x.shape
        split = self.query_key_value(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm_2(x)), (key, value)


class GPT2(nn.Module):
    """Scores for the token after the last one, and the keys and values for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        done = past[0][0].shape[2] if past else 0
        x = self.token(tokens) + self.position.weight[done : done + tokens.shape[1]]
        cache: Cache = []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, past[number] if past else None)
            cache.append(kept)
        return self.head(self.norm(x[:, -1])), cache


@torch.inference_mode()
def generate(model: GPT2, prompt: Tensor, count: int, *, use_cache: bool) -> list[int]:
    """The `count` likeliest tokens after the prompt (shape (1, length)), one at a time."""
    tokens, cache, written = prompt, None, []
    for _ in range(count):
        scores, kept = model(tokens[:, -1:] if cache else tokens, cache)
        cache = kept if use_cache else None
        token = int(scores.argmax(dim=-1).item())
        written.append(token)
        tokens = torch.cat((tokens, torch.tensor([[token]], device=tokens.device)), dim=1)
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Let a small GPT-2 write text.")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", action="store_true", help="keep the keys and values of earlier tokens")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = GPT2().to(device).eval()
    prompt = torch.randint(VOCABULARY, (1, 64), device=device)
    begin = time.perf_counter()
    written = generate(model, prompt, options.tokens, use_cache=options.cache)
    elapsed = time.perf_counter() - begin
    print(f"{len(written)} tokens of {1000 * elapsed / max(len(written), 1):.1f} ms, the last {written[-3:]}")


if __name__ == "__main__":
    main()
