"""What the recorder sees of the tokens with which a model is called."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.record.batch_samples import ModelCalls

torch = pytest.importorskip("torch")


def counts(calls: ModelCalls) -> list[tuple[int, ...]]:
    """Requests, prompts that begin and tokens of each call."""
    facts = calls.calls()
    return [] if facts is None else [call[1:] for call in facts.calls]


def row(*tokens: int) -> Any:
    return torch.tensor([tokens])


def packed(*positions: range) -> dict[str, Any]:
    """A row with tokens of several requests at these positions, and where they begin and end."""
    places = torch.tensor([place for each in positions for place in each])[None]
    bounds = torch.tensor([0, *(len(each) for each in positions)]).cumsum(0)
    return {"input_ids": places + 100, "position_ids": places, "cu_seq_lens_q": bounds}


def test_a_prompt_and_its_answers_tokens() -> None:
    calls = ModelCalls()
    calls.called([], (torch.arange(5, 25).reshape(2, 10),), {})
    calls.called([], (), {"input_ids": torch.tensor([[7], [8]]), "position_ids": torch.tensor([[10], [10]])})

    assert counts(calls) == [(2, 2, 20), (2, 0, 2)]


def test_padding_is_left_out() -> None:
    calls = ModelCalls()
    tokens = torch.tensor([[0] * 6 + [3, 4, 5, 6], [*range(10, 20)]])
    calls.called([], (tokens,), {"attention_mask": (tokens != 0).long()})

    assert counts(calls) == [(2, 2, 14)]
    assert (calls.sequences.batches, calls.sequences.longest) == (1, 10)


def test_the_requests_of_a_packed_row_are_told_apart() -> None:
    calls = ModelCalls()
    calls.called([], (), packed(range(7, 8), range(8, 9), range(20)))
    calls.called([], (), packed(range(8, 9), range(9, 10), range(20, 36)))

    assert counts(calls) == [(3, 1, 22), (3, 0, 18)]


def test_a_beginning_that_comes_again_counts_in_whole_blocks() -> None:
    calls = ModelCalls()
    for last in (1, 2):
        calls.called([], (row(*range(50, 90), *[last] * 20),), {})

    facts = calls.prompts()
    assert facts is not None
    assert (facts.calls, facts.tokens, facts.repeated_tokens) == (2, 120, 32)


def test_an_answer_without_a_cache_is_no_prompt() -> None:
    calls = ModelCalls()
    for length in range(40, 60):
        calls.called([], (row(*range(length)),), {})

    facts = calls.prompts()
    assert facts is not None
    assert (facts.calls, facts.repeated_tokens) == (1, 0)


def test_a_prompt_in_parts_is_followed() -> None:
    calls = ModelCalls()
    for _ in range(2):
        calls.called([], (), packed(range(40)))
        calls.called([], (), packed(range(40, 64)))

    facts = calls.prompts()
    assert facts is not None
    assert (facts.tokens, facts.repeated_tokens) == (128, 64)


@pytest.mark.parametrize("given", [(), ("text",), (torch.rand(2, 10),), (torch.ones(4, dtype=torch.int64),)])
def test_what_holds_no_tokens_says_nothing(given: tuple[Any, ...]) -> None:
    calls = ModelCalls()
    calls.called([], given, {})

    assert (calls.calls(), calls.prompts()) == (None, None)


def test_tokens_that_were_looked_at_can_still_grow() -> None:
    tokens = torch.arange(32).reshape(2, 16)
    ModelCalls().called([], (tokens,), {})

    assert tokens.resize_(4, 1000).shape == (4, 1000)
