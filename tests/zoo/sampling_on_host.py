"""A text generator with its own decoding loop and top-p sampling.

Planted: the next token of each sequence is chosen in Python, from a list of all probabilities.
Expected: python-in-step
"""

import random

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.zoo import command, language

TOP_P = 0.9
TOKENS = 24


def sample_in_python(logits: Tensor) -> Tensor:
    chosen = []
    for row in torch.softmax(logits, -1):
        ranked = sorted(enumerate(row.tolist()), key=lambda pair: -pair[1])  # planted
        total = 0.0
        kept = []
        for token, probability in ranked:  # planted
            kept.append((token, probability))  # planted
            total += probability  # planted
            if total >= TOP_P:  # planted
                break
        chosen.append(random.choices([token for token, _ in kept], [weight for _, weight in kept])[0])  # planted
    return torch.tensor(chosen)[:, None]


def sample(logits: Tensor) -> Tensor:
    probabilities, tokens = torch.softmax(logits, -1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= TOP_P] = 0.0
    return tokens.gather(-1, torch.multinomial(probabilities, 1))


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    random.seed(0)
    model = language.llama()
    choose = sample_in_python if options.fault else sample
    for number in command.rounds(options):
        tokens = torch.tensor(language.prompts(4, number=number))
        cache = DynamicCache(config=model.config)
        answer = []
        for _ in range(TOKENS):
            logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
            tokens = choose(logits[:, -1])  # planted
            answer.append(tokens)
        torch.cat(answer, 1).tolist()


if __name__ == "__main__":
    main()
