"""What the language server says in one line."""

from __future__ import annotations

import pytest

pytest.importorskip("pygls")

from stepscope.commands.assist.language_server import predicted_words

PREDICTED = {
    "device": "L4", "fits": True, "step_ns": 2e6, "low_ns": 1e6, "high_ns": 3e6, "limit": "host", "notes": ["a", "b"],
}  # fmt: skip


def test_a_prediction_has_its_range_or_the_reason_why_there_is_none() -> None:
    assert predicted_words(PREDICTED) == "L4: 2.0 ms per step (1.0 ms to 3.0 ms), limited by host"
    assert predicted_words(PREDICTED | {"step_ns": None}) == "L4: no step time: b"
    assert "memory" in predicted_words(PREDICTED | {"fits": False})
