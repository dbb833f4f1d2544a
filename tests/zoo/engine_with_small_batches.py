"""An engine with continuous batching and a queue of requests.

Planted: the engine is told to take two requests into a batch at most, although eight are waiting.
Expected: one-request
"""

from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.zoo import command, language

TOKENS = 16


def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=language.PADDING)
    most = 2 if options.fault else 64
    engine = ContinuousBatchingConfig(  # planted
        num_blocks=64, page_size=32, max_batch_tokens=256, max_requests_per_batch=most
    )
    with model.continuous_batching_context_manager(settings, continuous_batching_config=engine) as manager:
        for number in command.rounds(options):
            manager.add_requests(language.prompts(8, number=number), max_new_tokens=TOKENS)
            for _ in range(8):
                manager.get_result()


if __name__ == "__main__":
    main()
