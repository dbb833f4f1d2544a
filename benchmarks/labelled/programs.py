"""The programs of the set, each with a fault and without it: the zoo, its simulated devices, the blind programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tests.zoo import registry, simulated
from tests.zoo.blind import registry as blind

GAINS: Final = Path(__file__).with_name("zoo_gains.toml")
TWINS: Final = ("fault", "clean")


@dataclass(frozen=True)
class Program:
    """A program with a planted fault, and a twin without it.

    Attributes:
        name: "zoo/...", "simulated/..." or "blind/...".
        file: of the program, from the repository's root.
        cause: what is planted.
        rules: that name the cause; none of a blind program, which is judged by its place.
        kind: of a blind program.
        gain: share of the faulty step that the twin saves; None where it was not measured, or is memory alone.
        is_at: whether a file and a line are the fault's; None where no line is the right one.
    """

    name: str
    file: str
    cause: str
    rules: tuple[str, ...]
    kind: str
    gain: float | None
    is_at: Callable[[str, int], bool] | None

    def recordings(self, folder: Path, twin: str) -> Path:
        """Where diagnosis_accuracy.py and blind_accuracy.py keep the recording of a twin with `--traces FOLDER`."""
        group, _, name = self.name.partition("/")
        kept = f"{name}-{'mended' if group == 'blind' and twin == 'clean' else twin}"
        return folder / (f"{kept}.json.gz" if group == "simulated" else kept)


@functools.cache
def programs() -> tuple[Program, ...]:
    """All programs of the set."""
    return (*_of_the_zoo(), *_simulated(), *_blind())


def _of_the_zoo() -> Iterator[Program]:
    gains = msgspec.toml.decode(GAINS.read_bytes(), type=dict[str, float])
    for one in registry.programs():
        file = str(one.path.relative_to(registry.FOLDER.parents[1]))
        place = one.names_the_line if one.has_place else None
        yield Program(f"zoo/{one.name}", file, one.planted, (one.rule,), "", gains.get(one.name), place)


def _simulated() -> Iterator[Program]:
    for one in simulated.SIMULATED:
        gain = 1 - one.step_ns("clean") / one.step_ns("fault")
        cause = one.name.replace("_", " ")
        yield Program(f"simulated/{one.name}", "tests/zoo/simulated.py", cause, (one.rule,), "", gain, None)


def _blind() -> Iterator[Program]:
    gains = blind.gains()
    for name, truth in blind.TRUTHS.items():
        file = str(truth.path.relative_to(registry.FOLDER.parents[1]))
        gain = gains[name].share if name in gains else None
        yield Program(f"blind/{name}", file, truth.cause, (), truth.kind.name, gain, truth.is_at)
