"""Samplers, made for each request from its settings."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Settings:
    temperature: float = 0.8
    top_k: int = 40
    min_p: float = 0.02


def make_sampler(settings) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from log probabilities, (rows, vocabulary), to a token of each row."""

    def sample(logprobs):
        best, tokens = logprobs.topk(settings.top_k)
        probabilities = (best / settings.temperature).softmax(-1)
        probabilities.masked_fill_(probabilities < settings.min_p * probabilities[:, :1], 0.0)
        return tokens.gather(1, torch.multinomial(probabilities, 1))[:, 0]

    return sample
