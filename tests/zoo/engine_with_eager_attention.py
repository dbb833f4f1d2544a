"""An engine with continuous batching that reads long documents.

Planted: the model is loaded with eager attention, which writes the scores of all pairs of positions to memory.
Expected: unfused-attention
"""

from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.zoo import command, language

TOKENS = 6


def main() -> None:
    options = command.options(__doc__)
    model = language.llama(attn_implementation="eager" if options.fault else "sdpa")  # planted
    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=language.PADDING)
    engine = ContinuousBatchingConfig(num_blocks=64, page_size=64, max_batch_tokens=512, allow_block_sharing=False)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=engine) as manager:
        for number in command.rounds(options):
            manager.add_requests(language.prompts(2, 512, number=number), max_new_tokens=TOKENS)
            for _ in range(2):
                manager.get_result()


if __name__ == "__main__":
    main()
