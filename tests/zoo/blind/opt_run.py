"""Train a small OPT-like language model and log how its layers do."""

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DecoderLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.final_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.relu(self.fc1(self.final_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, length, width, layers, heads=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.embed_positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, ids):
        x = self.embed_tokens(ids) + self.embed_positions(self.positions[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)


class RunLog:
    """Numbers of the run, a line of JSON for each logged step."""

    def __init__(self, path):
        self.file = path.open("w")

    def write(self, step, numbers):
        self.file.write(json.dumps({"step": step} | numbers) + "\n")

    def close(self):
        self.file.close()


@torch.no_grad()
def layer_stats(model):
    """Norm and spread of each weight and of its gradient."""
    stats = {}
    for name, parameter in model.named_parameters():
        stats[f"{name}/weight_norm"] = parameter.norm().item()
        stats[f"{name}/grad_norm"] = parameter.grad.norm().item()
        stats[f"{name}/grad_std"] = parameter.grad.std().item()
        stats[f"{name}/grad_max"] = parameter.grad.abs().max().item()
    return stats


def make_text(sequences, length, vocabulary, seed):
    """A walk over the vocabulary in which the next token depends on the last."""
    generator = torch.Generator().manual_seed(seed)
    jumps = torch.randint(0, 8, (sequences, length), generator=generator) ** 2
    return (torch.randint(0, vocabulary, (sequences, 1), generator=generator) + jumps.cumsum(1)) % vocabulary


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader):
    return torch.stack([loss_of(model, ids) for (ids,) in loader]).mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--length", type=int, default=33)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=1200)
    parser.add_argument("--stats-every", type=int, default=1, help="steps between two looks at the layers")
    parser.add_argument("--mended", action="store_true", help="look at the layers in every 25th step only")
    args = parser.parse_args()
    if args.mended:
        args.stats_every = 25
    torch.manual_seed(3)

    train_set = TensorDataset(make_text(args.sequences, args.length, args.vocabulary, seed=0))
    valid_set = TensorDataset(make_text(64, args.length, args.vocabulary, seed=1))
    loader = DataLoader(train_set, args.batch_size, shuffle=True)
    model = LanguageModel(args.vocabulary, args.length, args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder) / "run.jsonl")
        for step, (ids,) in enumerate(loader):
            loss = loss_of(model, ids)
            optimizer.zero_grad()
            loss.backward()
            if step % args.stats_every == 0:
                log.write(step, layer_stats(model) | {"loss": loss.item()})  # planted
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.3f} lr {schedule.get_last_lr()[0]:.1e}")
        log.close()
    print(f"validation loss {evaluate(model, DataLoader(valid_set, 32)):.3f}")


if __name__ == "__main__":
    main()
