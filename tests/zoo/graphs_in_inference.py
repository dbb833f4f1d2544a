"""A text generator with its own decoding loop.

Planted: nothing turns gradients off, so that each answer builds a graph that keeps all activations until it ends.
Expected: costly-line
"""

import contextlib

import torch
from transformers import DynamicCache

from tests.zoo import command, language

TOKENS = 32


def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    off = contextlib.nullcontext if options.fault else torch.inference_mode
    for number in command.rounds(options):
        tokens = torch.tensor(language.prompts(8, 64, number=number))
        cache = DynamicCache(config=model.config)
        with off():
            for _ in range(TOKENS):
                logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits  # planted
                tokens = logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main()
