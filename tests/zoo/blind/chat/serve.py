"""Answer a queue of chat prompts, greedily, one request after the other."""

import argparse
import logging
import queue
import statistics
import time

import torch
from gpt import GPT

log = logging.getLogger("serve")


class Engine:
    """Generates answers."""

    def __init__(self, model, use_cache, max_new_tokens):
        self.model = model.eval()
        self.use_cache = use_cache
        self.max_new_tokens = max_new_tokens

    @torch.inference_mode()
    def generate(self, prompt):
        return self._generate_cached(prompt) if self.use_cache else self._generate(prompt)

    def _generate(self, prompt):
        tokens = prompt
        for _ in range(self.max_new_tokens):
            logits, _ = self.model(tokens)  # planted
            following = logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens[:, prompt.shape[1] :]

    def _generate_cached(self, prompt):
        logits, past = self.model(prompt)
        answer = [logits[:, -1].argmax(dim=-1, keepdim=True)]
        for _ in range(self.max_new_tokens - 1):
            logits, past = self.model(answer[-1], past)
            answer.append(logits[:, -1].argmax(dim=-1, keepdim=True))
        return torch.cat(answer, dim=1)


def fill_queue(requests, vocabulary, prompt_length):
    waiting = queue.Queue()
    generator = torch.Generator().manual_seed(0)
    for number in range(requests):
        waiting.put((number, torch.randint(vocabulary, (1, prompt_length), generator=generator)))
    return waiting


def handle(engine, request):
    """One request: the seconds it took."""
    number, prompt = request
    begin = time.perf_counter()
    answer = engine.generate(prompt)
    seconds = time.perf_counter() - begin
    if number % 10 == 0:
        log.info("request %d: %d tokens in %.2f s", number, answer.shape[1], seconds)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt-length", type=int, default=96)
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--mended", action="store_true", help="keep keys and values of the tokens so far")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)

    model = GPT()
    engine = Engine(model, args.mended, args.max_new_tokens)
    waiting = fill_queue(args.requests, model.wte.num_embeddings, args.prompt_length)
    latencies = []
    while not waiting.empty():
        latencies.append(handle(engine, waiting.get()))
    log.info("median latency %.3f s", statistics.median(latencies))


if __name__ == "__main__":
    main()
