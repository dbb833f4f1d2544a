"""Answers about public traces are as right as known: what holds goes on holding, what becomes right leaves the list."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import pytest

from benchmarks.labelled.judging import judge, truths
from benchmarks.real_traces import said_of

pytestmark = pytest.mark.traces

TRUTHS: Final = truths().by_path()
KNOWN_WRONG: Final = msgspec.toml.decode(
    Path(__file__).with_name("known_wrong.toml").read_bytes(), type=dict[str, tuple[str, ...]]
)
NO_RECORDINGS: Final = ("README.md", "facts.json", "reference_facts.py")


@pytest.mark.parametrize("path", TRUTHS)
def test_an_answer_is_as_right_as_known(path: str, traces_folder: Path) -> None:
    verdict = judge(path, TRUTHS[path], said_of(traces_folder / path))

    assert verdict.faults == KNOWN_WRONG.get(path, ()), f"shrink known_wrong.toml, or mend this: {verdict}"


def test_the_list_of_wrong_answers_names_known_traces() -> None:
    assert set(KNOWN_WRONG) <= set(TRUTHS)


def test_every_public_file_has_a_truth(traces_folder: Path) -> None:
    files = [path.relative_to(traces_folder) for path in traces_folder.rglob("*") if path.is_file()]

    known = set(map(Path, TRUTHS))
    unknown = [path for path in files if path.name not in NO_RECORDINGS and not known & {path, *path.parents}]
    assert not unknown
