"""What findings say where the words of a rule do not fit: in recordings without steps, and of other devices."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from stepscope.diagnosis.finding import Evidence, Remedy

_OF_THE_RECORDING: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bthe step waits\b", "the program waits"),
        (r"\bthe step\b", "the recording"),
        (r"\b(?:a|per|in each|in every) step\b", "in the recording"),
    )
)
_ON_ANY_DEVICE: Final[tuple[tuple[re.Pattern[str], str], ...]] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bwith torch\.cuda\.stream\((\w+)\)", r"with \1"),
        (r"\btorch\.cuda\.(Stream|Event)\(", r"torch.\1("),
        (r"\btorch\.cuda\.(current_stream|synchronize|empty_cache)\(", r"torch.accelerator.\1("),
    )
)
"""What torch.cuda has, by its names for every accelerator (PyTorch 2.9 and later)."""


def without_steps(title: str, basis: str, evidence: Evidence) -> tuple[str, str, Evidence]:
    """A finding's title, its saving's basis and its evidence with nothing in them that speaks of a step."""
    figures = tuple(replace(figure, name=_said(figure.name)) for figure in evidence.figures)
    return _said(title), _said(basis), replace(evidence, figures=figures)


def for_any_device(title: str, remedy: Remedy) -> tuple[str, Remedy]:
    """A finding's title and remedy with PyTorch's names for every accelerator instead of those for CUDA."""
    return _said(title, _ON_ANY_DEVICE), replace(
        remedy, text=_said(remedy.text, _ON_ANY_DEVICE), code=_said(remedy.code, _ON_ANY_DEVICE)
    )


def _said(text: str, changes: tuple[tuple[re.Pattern[str], str], ...] = _OF_THE_RECORDING) -> str:
    for pattern, words in changes:
        text = pattern.sub(words, text)
    return text
