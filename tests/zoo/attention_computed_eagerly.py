"""A batch job that embeds documents by a language model.

Planted: the model is made with eager attention, which writes the scores of all pairs of positions to memory.
Expected: unfused-attention
"""

import torch

from tests.zoo import command, language


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__, steps=100)
    model = language.llama(width=128, layers=3, attn_implementation="eager" if options.fault else "sdpa")  # planted
    for number in command.rounds(options):
        documents = torch.tensor(language.prompts(2, 384, number=number))
        hidden = model.model(documents, use_cache=False).last_hidden_state  # planted
        hidden.mean(1).tolist()


if __name__ == "__main__":
    main()
