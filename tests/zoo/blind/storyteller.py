"""Continue story openings with a GPT-2 of Transformers, batch after batch, and write the results to a file."""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn")
VERBS = ("found", "lost", "painted", "followed", "feared", "built")
THINGS = ("a lantern", "the old map", "a silver fox", "the last boat", "a clock", "the red door")
PLACES = ("in the harbour", "at night", "behind the mill", "on the hill", "far away", "by the river")


class CharacterTokenizer:
    """One token a character; openings are padded on the left, as generation wants it."""

    pad, end = 0, 1

    def __init__(self):
        self.characters = "".join(chr(code) for code in range(32, 127))
        self.numbers = {character: number + 2 for number, character in enumerate(self.characters)}

    def __len__(self):
        return len(self.characters) + 2

    def encode(self, texts):
        longest = max(map(len, texts))
        rows = [[self.pad] * (longest - len(text)) + [self.numbers[one] for one in text] for text in texts]
        tokens = torch.tensor(rows)
        return tokens, (tokens != self.pad).long()

    def decode(self, tokens):
        return "".join(self.characters[number - 2] for number in tokens.tolist() if number > self.end)


class Storyteller:
    def __init__(self, new_tokens, batched):
        torch.manual_seed(0)
        self.tokenizer = CharacterTokenizer()
        config = GPT2Config(
            vocab_size=len(self.tokenizer),
            n_positions=128,
            n_embd=160,
            n_layer=4,
            n_head=4,
            bos_token_id=CharacterTokenizer.end,
            eos_token_id=CharacterTokenizer.end,
        )
        self.model = GPT2LMHeadModel(config).eval()
        self.generation = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=CharacterTokenizer.pad,
            eos_token_id=CharacterTokenizer.end,
        )
        self.batched = batched

    def generate(self, texts):
        tokens, mask = self.tokenizer.encode(texts)
        output = self.model.generate(tokens, attention_mask=mask, generation_config=self.generation)  # planted
        return [self.tokenizer.decode(row) for row in output[:, tokens.shape[1] :]]

    def continue_all(self, openings):
        """The openings' continuations, in their order."""
        if self.batched:
            return self.generate(openings)
        stories = []
        for opening in openings:  # planted
            stories += self.generate([opening])  # planted
        return stories


def tell(storyteller, openings, file):
    """Continue one batch of openings and write it; returns seconds."""
    begin = time.perf_counter()
    stories = storyteller.continue_all(openings)
    for opening, story in zip(openings, stories, strict=True):
        file.write(json.dumps({"opening": opening, "story": story}) + "\n")
    return time.perf_counter() - begin


def make_openings(count):
    return [f"{NAMES[n % 6]} {VERBS[n // 6 % 6]} {THINGS[(n + n // 6) % 6]} {PLACES[n // 3 % 6]}" for n in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--mended", action="store_true", help="generate a batch at once")
    args = parser.parse_args()

    storyteller = Storyteller(args.new_tokens, batched=args.mended)
    openings = make_openings(args.stories)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stories.jsonl"
        with path.open("w") as file:
            for begin in range(0, len(openings), args.batch_size):
                seconds.append(tell(storyteller, openings[begin : begin + args.batch_size], file))
        first = json.loads(path.read_text().splitlines()[0])
    print(f"{first['opening']} ... {first['story']!r}")
    print(f"{len(openings)} stories, median {statistics.median(seconds):.3f} s for {args.batch_size}")


if __name__ == "__main__":
    main()
