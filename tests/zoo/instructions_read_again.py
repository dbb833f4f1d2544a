"""An assistant whose requests all begin with the same long instructions.

Planted: the instructions are computed again for each batch of requests, instead of a copy of their cache.
Expected: repeated-prefix
"""

import copy

import torch
from transformers import DynamicCache, GenerationConfig

from tests.zoo import command, language

INSTRUCTIONS = 192
BATCH = 4


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=language.PADDING)
    read = DynamicCache(config=model.config)
    instructions = torch.tensor(language.prompts(1, 0, shared=INSTRUCTIONS))
    model(instructions.expand(BATCH, -1), past_key_values=read, logits_to_keep=1)
    for number in command.rounds(options):
        for tokens in torch.tensor(language.prompts(4 * BATCH, 12, number=number, shared=INSTRUCTIONS)).split(BATCH):
            mask = torch.ones_like(tokens)
            cache = DynamicCache(config=model.config) if options.fault else copy.deepcopy(read)
            model.generate(tokens, attention_mask=mask, past_key_values=cache, generation_config=settings)  # planted


if __name__ == "__main__":
    main()
