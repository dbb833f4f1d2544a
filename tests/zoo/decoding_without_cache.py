"""A chat model that answers a batch of questions.

Planted: the settings of the generation turn the cache off, so that each new token computes all tokens before it again.
Expected: costly-line
"""

from transformers import GenerationConfig

from tests.zoo import command, language


def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=language.PADDING)
    settings.use_cache = not options.fault  # planted
    for number in command.rounds(options):
        tokens, mask = language.padded(language.prompts(4, number=number))
        model.generate(tokens, attention_mask=mask, generation_config=settings)  # planted


if __name__ == "__main__":
    main()
