"""A chat server that sends each token to its users as soon as it is there.

Planted: with each token a user's whole answer is decoded to text again, to find what is new in it.
Expected: python-in-step
"""

import torch
from tokenizers.decoders import DecodeStream
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.zoo import command, language

TOKENS = 160
USERS = 4


class WholeText:
    """What is new in the text of all tokens so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.sent = ""

    def step(self, token: int) -> str:
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)  # planted
        new = text[len(self.sent) :]
        self.sent = text
        return new


class NewText:
    """The text of the new token, from the few tokens that it may depend on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.inner = tokenizer.backend_tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        return self.stream.step(self.inner, token) or ""


@torch.inference_mode()
def answer(model: LlamaForCausalLM, prompts: list[list[int]], streams: list[WholeText] | list[NewText]) -> list[str]:
    tokens = torch.tensor(prompts)
    cache = DynamicCache(config=model.config)
    answers = [""] * len(prompts)
    for _ in range(TOKENS):
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        for user, token in enumerate(tokens[:, 0].tolist()):
            answers[user] += streams[user].step(token)
    return answers


def main() -> None:
    options = command.options(__doc__)
    model = language.llama(width=64, layers=1)
    tokenizer = language.tokenizer()
    make = WholeText if options.fault else NewText
    for number in command.rounds(options):
        answer(model, language.prompts(USERS, number=number), [make(tokenizer) for _ in range(USERS)])


if __name__ == "__main__":
    main()
