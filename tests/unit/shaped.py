"""Operators with input shapes and types, written one after the other, for tests of rules that read them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.recording import Recording

LINE = {"source_file": "train.py", "source_line": 20, "source_function": "step"}


class Shaped:
    """One thread on which operators follow each other; a step of `step_ns` from 0 on."""

    def __init__(self, step_ns: int = 100_000, *, facts: ProgramFacts | None = None) -> None:
        self.recording = Recording(metadata=Metadata(program=facts))
        self.recording.step(0, step_ns, 1)
        self.now = 10

    def call(
        self,
        name: str,
        duration_ns: int,
        *shapes: Sequence[int],
        types: Sequence[str] | str = "float",
        number: int | None = None,
        values: Sequence[str] | None = None,
    ) -> None:
        """An operator; with `number`, one that autograd knows by that sequence number."""
        self._write(name, duration_ns, shapes, types, number, 0, values)
        self.now += duration_ns + 1

    def gradient(self, node: str, duration_ns: int, number: int) -> None:
        """The backward operator of the call of that sequence number."""
        name = f"autograd::engine::evaluate_function: {node}"
        more = {"sequence_number": number, "forward_thread": 1, **LINE}
        self.recording.operator(self.now, duration_ns, name, **more)
        self.now += duration_ns + 1

    @contextmanager
    def inside(
        self,
        name: str,
        duration_ns: int,
        *shapes: Sequence[int],
        types: Sequence[str] | str = "float",
        number: int | None = None,
        backward: bool = False,
    ) -> Iterator[None]:
        """An operator of that length around those that are called in the block."""
        begin = self.now
        self._write(name, duration_ns, shapes, types, number, 1 if backward else 0, None)
        self.now += 1
        yield
        self.now = begin + duration_ns + 1

    def _write(
        self,
        name: str,
        duration_ns: int,
        shapes: Sequence[Sequence[int]],
        types: Sequence[str] | str,
        number: int | None,
        forward_thread: int,
        values: Sequence[str] | None,
    ) -> None:
        kinds = [types] * len(shapes) if isinstance(types, str) else list(types)
        more: dict[str, object] = {"input_shapes": json.dumps([list(shape) for shape in shapes]), **LINE}
        more["input_types"] = json.dumps(kinds)
        if number is not None:
            more |= {"sequence_number": number, "forward_thread": forward_thread}
        if values is not None:
            more["input_values"] = json.dumps(list(values))
        self.recording.operator(self.now, duration_ns, name, **more)

    def trace(self) -> Trace:
        return self.recording.trace()
