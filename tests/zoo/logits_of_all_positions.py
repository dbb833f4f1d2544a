"""A reranker that asks a language model for one word after each document.

Planted: the logits of all positions are computed, and all but the last thrown away.
Expected: large-logits
"""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.zoo import command, language

VOCABULARY = 16384


def all_then_last(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    logits = model(tokens, use_cache=False).logits  # planted
    return logits[:, -1]


def last_only(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    return model(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    model = language.llama(vocabulary=VOCABULARY)
    rate = all_then_last if options.fault else last_only
    for number in command.rounds(options):
        documents = torch.tensor(language.prompts(4, 96, number=number, vocabulary=VOCABULARY))
        rate(model, documents)[:, 7].tolist()


if __name__ == "__main__":
    main()
