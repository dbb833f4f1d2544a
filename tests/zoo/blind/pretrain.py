"""Pretrain a small decoder on documents, packed into sequences of equal length."""

import argparse
import time

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerFast

SYLLABLES = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", "n", "r", "s", "th")]


def write_documents(count, words_per_document, rng):
    """Documents of made-up words, frequent and rare ones, with punctuation and numbers."""
    words = np.array(["".join(rng.choice(SYLLABLES, rng.integers(1, 5))) for _ in range(20000)])
    frequency = 1 / np.arange(10, len(words) + 10)
    frequency /= frequency.sum()
    documents = []
    for _ in range(count):
        chosen = words[rng.choice(len(words), words_per_document, p=frequency)]
        sentences = [" ".join(part).capitalize() for part in np.array_split(chosen, words_per_document // 12)]
        documents.append(". ".join(sentences) + f". {rng.integers(1000, 9999)}-{rng.integers(10, 99)}\n")
    return documents


def train_tokenizer(documents, vocabulary):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


class PackedText(IterableDataset):
    """Sequences of `length` + 1 tokens, cut from shuffled documents one after the other."""

    def __init__(self, documents, tokenizer, length, tokenize_first):
        self.documents = documents
        self.tokenizer = tokenizer
        self.length = length
        self.tokens = None
        if tokenize_first:
            ids = tokenizer(documents)["input_ids"]
            self.tokens = [np.array([*document, tokenizer.eos_token_id]) for document in ids]

    def document(self, index):
        if self.tokens is not None:
            return self.tokens[index]
        ids = self.tokenizer(self.documents[index])["input_ids"]  # planted
        return np.array([*ids, self.tokenizer.eos_token_id])  # planted

    def __iter__(self):
        buffer = np.empty(0, dtype=np.int64)
        for index in torch.randperm(len(self.documents)).tolist():
            buffer = np.concatenate([buffer, self.document(index)])
            while len(buffer) > self.length:
                yield torch.from_numpy(buffer[: self.length + 1])
                buffer = buffer[self.length + 1 :]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, length, width, layers, heads=4):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.words(ids) + self.places[: ids.shape[1]])))


def next_token_loss(model, tokens):
    scores = model(tokens[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def perplexity(model, loader):
    model.eval()
    losses = torch.stack([next_token_loss(model, tokens) for tokens in loader])
    model.train()
    return losses.mean().exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1600)
    parser.add_argument("--words", type=int, default=360)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--mended", action="store_true", help="tokenize all documents before the training")
    args = parser.parse_args()
    torch.manual_seed(1)

    documents = write_documents(args.documents, args.words, np.random.default_rng(1))
    tokenizer = train_tokenizer(documents[:400], args.vocabulary)
    train_set = PackedText(documents[64:], tokenizer, args.length, args.mended)
    valid_set = PackedText(documents[:24], tokenizer, args.length, args.mended)
    loader = DataLoader(train_set, args.batch_size, drop_last=True)
    model = Decoder(args.vocabulary, args.length, args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, fused=True)
    begin = time.time()
    for step, tokens in enumerate(loader, 1):
        loss = next_token_loss(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0:
            print(f"step {step} loss {loss.item():.3f} {step / (time.time() - begin):.1f} steps/s")
        if step == args.steps:
            break
    print(f"perplexity {perplexity(model, DataLoader(valid_set, args.batch_size)):.1f}")


if __name__ == "__main__":
    main()
