"""What findings say where the recording has no steps: of the recording what they otherwise say of a step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from stepscope.diagnosis.finding import Evidence

_OF_THE_RECORDING: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bthe step waits\b", "the program waits"),
        (r"\bthe step\b", "the recording"),
        (r"\b(?:a|per|in each|in every) step\b", "in the recording"),
    )
)


def without_steps(title: str, basis: str, evidence: Evidence) -> tuple[str, str, Evidence]:
    """A finding's title, its saving's basis and its evidence with nothing in them that speaks of a step."""
    figures = tuple(replace(figure, name=_said(figure.name)) for figure in evidence.figures)
    return _said(title), _said(basis), replace(evidence, figures=figures)


def _said(text: str) -> str:
    for pattern, words in _OF_THE_RECORDING:
        text = pattern.sub(words, text)
    return text
