"""An engine with continuous batching and a scheduler of its own, which takes the most urgent requests first.

Planted: in each iteration the scheduler compares every waiting request with every other.
Expected: python-in-step
"""

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from tests.zoo import command, language

TOKENS = 8
REQUESTS = 256


def urgency(state: RequestState) -> int:
    return state.initial_tokens[0] % 5


class ComparesAll(FIFOScheduler):
    """Ranks each waiting request by counting those that are more urgent, in each iteration."""

    def schedule_batch(self, *arguments):
        waiting = list(self.waiting_requests.values())
        ranks = {}
        for state in waiting:
            ranks[state.request_id] = sum(urgency(other) < urgency(state) for other in waiting)  # planted
        self.waiting_requests_order = type(self.waiting_requests_order)(
            sorted(self.waiting_requests_order, key=ranks.get)
        )
        return super().schedule_batch(*arguments)


class SortsOnce(FIFOScheduler):
    """Ranks the waiting requests when one has come."""

    known = 0

    def schedule_batch(self, *arguments):
        if len(self.waiting_requests) > self.known:
            ranks = {name: urgency(state) for name, state in self.waiting_requests.items()}
            self.waiting_requests_order = type(self.waiting_requests_order)(
                sorted(self.waiting_requests_order, key=ranks.get)
            )
        self.known = len(self.waiting_requests)
        return super().schedule_batch(*arguments)


def main() -> None:
    options = command.options(__doc__)
    SCHEDULER_MAPPING["urgent_first"] = ComparesAll if options.fault else SortsOnce
    model = language.llama(width=128, layers=2)
    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=language.PADDING)
    engine = ContinuousBatchingConfig(
        num_blocks=128, page_size=32, max_batch_tokens=512, max_requests_per_batch=32, scheduler_type="urgent_first"
    )
    with model.continuous_batching_context_manager(settings, continuous_batching_config=engine) as manager:
        for number in command.rounds(options):
            manager.add_requests(language.prompts(REQUESTS, 12, number=number), max_new_tokens=TOKENS)
            for _ in range(REQUESTS):
                manager.get_result()


if __name__ == "__main__":
    main()
