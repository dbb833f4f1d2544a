"""Two of the blind programs run, and the stopwatch sees what their faults cost."""

from __future__ import annotations

import pytest

from tests.zoo.blind.gains import measured

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["keyword_spotting", "vqvae"])
def test_a_step_is_much_shorter_without_the_fault(name: str) -> None:
    pytest.importorskip("torch")

    assert measured(name, repeat=1).share > 0.3
