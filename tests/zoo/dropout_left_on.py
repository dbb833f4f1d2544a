"""A text generator on a GPT-2.

Planted: nobody calls eval(), so that dropout is drawn in every layer, for every token.
Expected: training-mode
"""

import torch
from transformers import DynamicCache

from tests.zoo import command, language

TOKENS = 24


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    model = language.gpt2()
    if not options.fault:
        model.eval()
    for number in command.rounds(options):
        tokens = torch.tensor(language.prompts(16, 64, number=number))
        cache = DynamicCache(config=model.config)
        for _ in range(TOKENS):
            logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits  # planted
            tokens = logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    main()
