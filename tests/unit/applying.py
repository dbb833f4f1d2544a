"""Applying remedies to the process of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from stepscope.record.apply import install, parse_applications
from stepscope.record.apply.patching import Applying

Start = Callable[[str], Applying]


@contextlib.contextmanager
def applied() -> Iterator[Start]:
    """Gives a function that applies a list such as "bf16,zero-grad"; what was applied is removed at the end."""
    made: list[Applying] = []

    def begin(text: str) -> Applying:
        made.append(install(parse_applications(text), None))
        return made[-1]

    yield begin
    for applying in reversed(made):
        applying.remove()
