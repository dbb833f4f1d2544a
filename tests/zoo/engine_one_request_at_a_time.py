"""A client of an engine with continuous batching that has many questions at once.

Planted: it waits for the answer to each question before it hands in the next, so that the engine has one at a time.
Expected: one-request
"""

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from tests.zoo import command, language

TOKENS = 16


def one_at_a_time(manager: ContinuousBatchingManager, questions: list[list[int]]) -> list[list[int]]:
    answers = []
    for question in questions:
        name = manager.add_request(question, max_new_tokens=TOKENS)  # planted
        answers.append(manager.get_result(name).generated_tokens)  # planted
    return answers


def all_at_once(manager: ContinuousBatchingManager, questions: list[list[int]]) -> list[list[int]]:
    manager.add_requests(questions, max_new_tokens=TOKENS)
    return [manager.get_result().generated_tokens for _ in questions]


def main() -> None:
    options = command.options(__doc__)
    model = language.llama()
    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=language.PADDING)
    engine = ContinuousBatchingConfig(num_blocks=64, page_size=32, max_batch_tokens=256)
    ask = one_at_a_time if options.fault else all_at_once
    with model.continuous_batching_context_manager(settings, continuous_batching_config=engine) as manager:
        for number in command.rounds(options):
            ask(manager, language.prompts(8, number=number))


if __name__ == "__main__":
    main()
