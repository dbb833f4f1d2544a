"""A batch job that rates texts by a language model's next word.

Planted: the texts are taken as they come, so that short ones are padded to a long one in nearly every batch.
Expected: padding-waste
"""

import torch

from tests.zoo import command, language

BATCH = 8


@torch.inference_mode()
def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    for number in command.rounds(options):
        texts = language.prompts(4 * BATCH, 24, number=number, longest=192)
        if not options.fault:
            texts.sort(key=len)
        for begin in range(0, len(texts), BATCH):
            tokens, mask = language.padded(texts[begin : begin + BATCH])  # planted
            logits = model(tokens, attention_mask=mask, use_cache=False, logits_to_keep=1).logits  # planted
            logits[:, -1].argmax(-1).tolist()


if __name__ == "__main__":
    main()
