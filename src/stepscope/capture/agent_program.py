"""The program an agent is in, as its `StepController` sees it."""

from __future__ import annotations

import sys
from pathlib import Path

from stepscope.capture.agent_service import Outcome
from stepscope.capture.controller import CaptureHandle, CaptureRequest, StepController
from stepscope.capture.protocol import TOO_LATE, CaptureOrder, Refusal
from stepscope.errors import AgentError


class ControlledProgram:
    """A program whose steps a controller is told of."""

    def __init__(self, controller: StepController) -> None:
        self._controller = controller

    def current_step(self) -> int:
        """The number of the step that runs now."""
        return self._controller.current_step()

    def begin(self, order: CaptureOrder, out: Path) -> ControlledCollection:
        """Record what was ordered into the file `out`.

        Raises:
            Refusal: the first step has begun already.
        """
        self._refuse_passed(order)
        handle = self._controller.request(
            CaptureRequest(
                steps=order.steps,
                seconds=order.seconds,
                first_step=order.first_step,
                options=order.options,
                out=out,
                timeout_s=order.timeout_s,
            )
        )
        try:
            self._refuse_passed(order)  # it may have begun just now
        except Refusal:
            handle.cancel()
            raise
        return ControlledCollection(handle)

    def _refuse_passed(self, order: CaptureOrder) -> None:
        step = self._controller.current_step()
        if order.first_step is not None and order.first_step <= step:
            raise Refusal(TOO_LATE, f"step {order.first_step} is not to come: step {step} has begun")


class ControlledCollection:
    """A capture that the controller was asked for."""

    def __init__(self, handle: CaptureHandle) -> None:
        self._handle = handle

    def is_recording(self) -> bool:
        """Whether its first step has begun."""
        return self._handle.is_recording

    def wait(self, timeout_s: float) -> Outcome | None:
        """How it ended; None where it has not after that long."""
        try:
            result = self._handle.wait(timeout_s)
        except TimeoutError:
            return None
        return Outcome(result.path, result.first_step, result.steps, result.problem)

    def finish(self) -> None:
        """End it at the end of the current step, and keep what was recorded."""
        self._handle.finish()

    def cancel(self) -> None:
        """End it and throw away what was recorded."""
        self._handle.cancel()


def installed_program() -> ControlledProgram:
    """This process's program; where nobody counts its steps yet, hooks in torch and jax do from now on.

    Raises:
        AgentError: there is neither jax nor torch, so there is nothing to record with.
    """
    if "jax" not in sys.modules:
        try:
            import torch  # noqa: F401  # the hooks need it, and the program will
        except ImportError as error:
            raise AgentError(
                f"an agent records with torch, which cannot be imported here, or with jax, which is not: {error}"
            ) from error
    from stepscope.capture.hooks import watch_steps

    controller = watch_steps()
    controller.stays = True
    return ControlledProgram(controller)
