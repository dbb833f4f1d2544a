"""Several processes at once: the same steps of each."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, TypeVar

from stepscope.capture.client import AgentClient, CaptureState, RefusedError
from stepscope.capture.protocol import TOO_LATE, CaptureOrder
from stepscope.errors import AgentError

Started = list[tuple[AgentClient, CaptureState]]
Item = TypeVar("Item")
Value = TypeVar("Value")

_ATTEMPTS: Final = 6
_MARGIN_STEPS: Final = 2
"""The step that runs, and one in which the profiler warms up."""
_SAMPLE_S: Final = 0.25
_MARGIN_S: Final = 0.25
_PATIENT_SAMPLE_S: Final = 10.0


def start_together(clients: Sequence[AgentClient], order: CaptureOrder) -> Started:
    """Begin a capture of the same step numbers in every process.

    The first step is one that no process has reached: the furthest process's step, and as many as the processes may
    do while they are being asked. Where one has reached it all the same, everything is cancelled and tried again with
    more. Seconds become the number of steps that take as long.

    Raises:
        AgentError: one of them cannot be reached or refuses; then none records.
    """
    if len(clients) == 1:
        return [(clients[0], clients[0].start(order))]
    step, steps_per_s, answer_s = _pace(clients, order.seconds)
    if order.seconds is not None:
        order = replace(order, steps=max(1, round(order.seconds * steps_per_s)), seconds=None)
    margin = _MARGIN_STEPS + math.ceil(steps_per_s * (2 * answer_s + _MARGIN_S))
    for _ in range(_ATTEMPTS):
        started = _started(clients, replace(order, first_step=step + margin))
        if started is not None:
            return started
        step = max(for_each(clients, lambda client: int(client.status()["step"])))
        margin *= 4
    raise AgentError("the processes do their steps faster than they can be asked to record the same ones")


def cancel_all(started: Started) -> None:
    """Cancel every capture, whatever becomes of it."""
    for client, state in started:
        with contextlib.suppress(AgentError):
            client.cancel(state.id)


def for_each(asked: Sequence[Item], ask: Callable[[Item], Value]) -> list[Value]:
    """Ask all at the same time; the answers in the same order, or the first error."""
    pool = ThreadPoolExecutor(max(1, len(asked)))
    try:
        return list(pool.map(ask, asked))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for answers


def for_each_pair(started: Started, ask: Callable[[AgentClient, CaptureState], CaptureState]) -> Started:
    """Ask every client about its capture, all at the same time; the new states in the same order."""
    states = for_each(started, lambda pair: ask(*pair))
    return [(client, state) for (client, _), state in zip(started, states, strict=True)]


def _started(clients: Sequence[AgentClient], order: CaptureOrder) -> Started | None:
    """Begin in every process; None, and nothing begun, where the first step had come in one of them."""

    def begun(client: AgentClient) -> CaptureState | AgentError:
        try:
            return client.start(order)
        except AgentError as error:
            return error

    answers = list(zip(clients, for_each(clients, begun), strict=True))
    started = [(client, answer) for client, answer in answers if isinstance(answer, CaptureState)]
    errors = [answer for _, answer in answers if isinstance(answer, AgentError)]
    if not errors:
        return started
    cancel_all(started)
    others = [error for error in errors if not (isinstance(error, RefusedError) and error.status == TOO_LATE)]
    if others:
        raise others[0]
    return None


def _pace(clients: Sequence[AgentClient], seconds: float | None) -> tuple[int, float, float]:
    """The furthest step, steps per second, and seconds that asking all of them takes.

    Where seconds are to be turned into steps, waits for the end of a step, up to as long as that or ten seconds.
    """
    until = time.monotonic() + (_SAMPLE_S if seconds is None else max(seconds, _PATIENT_SAMPLE_S))
    begun = time.monotonic()
    first = max(_steps(clients))
    answer_s = time.monotonic() - begun
    while True:
        time.sleep(_SAMPLE_S)
        asked = time.monotonic()
        step = max(_steps(clients))
        answer_s = max(answer_s, time.monotonic() - asked)
        enough = seconds is None or (step > first and asked - begun >= min(seconds, 1.0))
        if enough or time.monotonic() >= until:
            return step, (step - first) / (time.monotonic() - begun), answer_s


def _steps(clients: Sequence[AgentClient]) -> list[int]:
    return for_each(clients, lambda client: int(client.status()["step"]))
