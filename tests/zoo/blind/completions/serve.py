"""Answer completion requests in batches, as a server does."""

import argparse
import time
from dataclasses import dataclass, field

import torch
from model import Decoder
from sampling import Settings, make_sampler


@dataclass
class Request:
    prompt: torch.Tensor
    settings: Settings
    tokens: list = field(default_factory=list)

    def __post_init__(self):
        self.sampler = make_sampler(self.settings)


def group_by_settings(requests):
    """Rows of the batch for each of the settings, with a sampler."""
    groups = {}
    for row, request in enumerate(requests):
        groups.setdefault(request.settings, []).append(row)
    return [(torch.tensor(rows), requests[rows[0]].sampler) for rows in groups.values()]


def sample_groups(logprobs, groups):
    tokens = torch.empty(len(logprobs), dtype=torch.int64)
    for rows, sampler in groups:
        tokens[rows] = sampler(logprobs[rows])
    return tokens


def sample_rows(logprobs, requests):
    tokens = [request.sampler(logprobs[row : row + 1]) for row, request in enumerate(requests)]  # planted
    return torch.cat(tokens)  # planted


@torch.inference_mode()
def decode(model, ids, cache, requests, groups):
    """The next token of each request."""
    logprobs = model(ids, cache).log_softmax(-1)
    if groups is not None:
        return sample_groups(logprobs, groups)
    return sample_rows(logprobs, requests)


def answer(model, requests, new_tokens, grouped):
    """Complete the requests' prompts."""
    cache = model.new_cache(len(requests))
    groups = group_by_settings(requests) if grouped else None
    ids = torch.stack([request.prompt for request in requests])
    steps = []
    for _ in range(new_tokens):
        tokens = decode(model, ids, cache, requests, groups)
        steps.append(tokens)
        ids = tokens[:, None]
    for request, tokens in zip(requests, torch.stack(steps, 1).tolist(), strict=True):
        request.tokens = tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=768)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--mended", action="store_true", help="sample rows with the same settings together")
    args = parser.parse_args()
    torch.manual_seed(4)

    model = Decoder(args.vocabulary, args.prompt + args.new_tokens).eval()
    prompts = torch.randint(0, args.vocabulary, (args.requests, args.prompt))
    usual, careful = Settings(), Settings(temperature=0.3, top_k=10)
    waiting = [Request(prompt, careful if index % 8 == 0 else usual) for index, prompt in enumerate(prompts)]
    for begin in range(0, args.requests, args.concurrency):
        batch, started = waiting[begin : begin + args.concurrency], time.time()
        answer(model, batch, args.new_tokens, args.mended)
        rate = len(batch) * args.new_tokens / (time.time() - started)
        distinct = len({token for request in batch for token in request.tokens})
        print(f"requests {begin} to {begin + len(batch) - 1}: {rate:.0f} tokens/s, {distinct} different tokens")


if __name__ == "__main__":
    main()
