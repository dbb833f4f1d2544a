"""An engine with continuous batching whose requests all begin with the same long instructions.

Planted: the engine may not share what requests have in common, so that the instructions are computed for each.
Expected: repeated-prefix
"""

from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.zoo import command, language

TOKENS = 6


def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=language.PADDING)
    share = not options.fault
    engine = ContinuousBatchingConfig(  # planted
        num_blocks=64, page_size=32, max_batch_tokens=256, allow_block_sharing=share
    )
    with model.continuous_batching_context_manager(settings, continuous_batching_config=engine) as manager:
        for number in command.rounds(options):
            manager.add_requests(language.prompts(8, 12, shared=192, number=number), max_new_tokens=TOKENS)
            for _ in range(8):
                manager.get_result()


if __name__ == "__main__":
    main()
