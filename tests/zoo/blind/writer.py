"""Let a small decoder continue the beginnings of texts."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class SequentialBlock(nn.Module):
    """Attention and a gated layer; gives its keys and values beside the output."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ff_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff_in, self.ff_out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, past=None):
        batch, length, width = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, value = self.ff_in(self.ff_norm(x)).chunk(2, -1)
        return x + self.ff_out(F.silu(gate) * value), (k, v)


class SmallOlmo(nn.Module):
    def __init__(self, vocabulary, length, width, layers, heads=4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(SequentialBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.wte.weight, std=0.05)

    def forward(self, ids, past=None):
        """Scores of what follows the last of `ids`, and all blocks' keys and values.

        With a `past`, `ids` are the tokens after those that it holds.
        """
        begin = 0 if past is None else past[0][0].shape[2]
        x = self.wte(ids) + self.wpe.weight[begin : begin + ids.shape[1]]
        present = []
        for index, block in enumerate(self.blocks):
            x, keys_and_values = block(x, None if past is None else past[index])
            present.append(keys_and_values)
        return F.linear(self.norm(x[:, -1]), self.wte.weight), present


def choose(scores, temperature, top_k):
    best, tokens = scores.topk(top_k)
    return tokens.gather(1, torch.multinomial((best / temperature).softmax(-1), 1))


@torch.inference_mode()
def generate(model, ids, new_tokens, temperature, top_k, use_cache):
    """`ids` with `new_tokens` more in each row."""
    if use_cache:
        scores, past = model(ids)
        for _ in range(new_tokens - 1):
            token = choose(scores, temperature, top_k)
            ids = torch.cat([ids, token], 1)
            scores, past = model(token, past)
        return torch.cat([ids, choose(scores, temperature, top_k)], 1)
    for _ in range(new_tokens):
        scores, _ = model(ids)  # planted
        ids = torch.cat([ids, choose(scores, temperature, top_k)], 1)
    return ids


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=960)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--beginning", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-k", type=int, default=50)
    parser.add_argument("--mended", action="store_true", help="keep keys and values of the tokens read so far")
    args = parser.parse_args()
    torch.manual_seed(11)

    model = SmallOlmo(args.vocabulary, args.beginning + args.new_tokens, args.width, args.layers).eval()
    beginnings = torch.randint(0, args.vocabulary, (args.texts, args.beginning))
    begin, tokens = time.time(), 0
    for number, ids in enumerate(beginnings.split(args.batch_size), 1):
        texts = generate(model, ids, args.new_tokens, args.temperature, args.top_k, args.mended)
        tokens += len(texts) * args.new_tokens
        if number % 40 == 0:
            print(f"batch {number}: {tokens / (time.time() - begin):.0f} tokens/s, last ends {texts[-1, -5:].tolist()}")


if __name__ == "__main__":
    main()
