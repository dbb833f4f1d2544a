"""The notebooks of docs/notebooks: their outputs are true of a new run, and tell nothing of the machine they ran on."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.notebooks import NOTEBOOKS, executed, outputs

FACTS: Final[Mapping[str, Sequence[str]]] = {
    "h100": (
        r"kineto trace \.\./\.\./examples/gpt2_per_token_loss_cpu",
        r"H100-SXM: [\d.]+ ms \([\d.]+ to [\d.]+ ms\)",
        r"run 64 times in a row",
        r"would take 56\.8 ms instead of 720\.9 ms",
        r"H100-SXM: [\d.]+ ms, busy \d+%, limited by host",
    ),
    "memory": (
        r"memory grows by 2\.5 MiB every step",
        r"every step leaves 2\.5 MiB behind.*activation.*cell 2 +12 +train",
        r"leaking: 2\.5 MiB more.*mended: 0\.0 MiB more",
    ),
    "slow_loader": (
        r"cell 2, line 1[012]",
        r"Images\.__getitem__: .* 10 .* 11 .* 12 ",
        r"a step takes [\d.]+ m?s instead of [\d.]+ m?s",
    ),
    "two_ranks": (
        r"Writing two_ranks\.py",
        r"wait .* a step for rank 1.*two_ranks\.py:16 next_batch",
        r"rank 1: .*in next_batch",
    ),
}
"""Of each notebook, what its outputs say, in this order: the same on every machine."""
_LARGEST_BYTES: Final = 40_000


def assert_says(path: Path, notebook: Mapping[str, object]) -> None:
    said = outputs(dict(notebook))
    place = 0
    for fact in FACTS[path.stem]:
        found = next((number for number, text in enumerate(said) if number >= place and re.search(fact, text)), None)
        assert found is not None, (fact, said[place:])
        place = found


def test_every_notebook_has_facts() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(FACTS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_kept_outputs_are_small_and_of_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")

    assert len(text) < _LARGEST_BYTES
    assert_says(path, json.loads(text))
    assert '"output_type": "error"' not in text
    assert "application/vnd.jupyter" not in text
    assert re.findall(r"(?<![\w.<])/(?:tmp|home|root|usr|work|Users|var|opt)/[\w./-]+", text) == []
    for name in {socket.gethostname(), getpass.getuser()} - {"root"}:
        assert not re.search(rf"\b{re.escape(name)}\b", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_new_run_says_the_same(path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")

    assert_says(path, executed(path))
