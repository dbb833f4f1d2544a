"""Which steps are recorded: `schedule`, with the meaning that torch.profiler gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stepscope.errors import UsageError

NOTHING: Final = "NONE"
WARM_UP: Final = "WARMUP"
RECORD: Final = "RECORD"
RECORD_AND_SAVE: Final = "RECORD_AND_SAVE"
ACTIONS: Final = (NOTHING, WARM_UP, RECORD, RECORD_AND_SAVE)
"""The actions of a step, with the names of torch.profiler.ProfilerAction."""

Schedule = Callable[[int], Any]


def schedule(
    *, wait: int = 0, warmup: int = 1, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Schedule:
    """Make a schedule: a cycle of `wait`, `warmup` and `active` steps, after `skip_first` steps.

    Args:
        wait: steps at the beginning of a cycle in which nothing is done.
        warmup: steps that are recorded and discarded, since the profiler's first steps are slow.
        active: steps that are recorded; the trace is saved after the last.
        repeat: number of cycles, 0 for as many as there are.
        skip_first: steps before the first cycle.
        skip_first_wait: anything but 0 skips the first cycle's `wait`.

    Returns:
        A function from a step number, from 0, to one of ACTIONS.

    Raises:
        UsageError: a number is negative or not a whole number, or `active` is 0.
    """
    given = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat, "skip_first": skip_first}
    given["skip_first_wait"] = skip_first_wait
    for name, value in given.items():
        lowest = 1 if name == "active" else 0
        is_number = isinstance(value, int) and (not isinstance(value, bool) or name == "skip_first_wait")
        if not is_number or value < lowest:
            raise UsageError(f"schedule: {name} must be a number of steps, {lowest} or more, not {value!r}")
    length = wait + warmup + active
    shift = (wait if skip_first_wait else 0) - skip_first

    def action(step: int) -> str:
        if step < 0:
            raise UsageError(f"schedule: a step's number must be 0 or more, not {step}")
        cycle, place = divmod(step + shift, length)
        if step < skip_first or 0 < repeat <= cycle:
            return NOTHING
        if place < wait:
            return NOTHING
        if place < wait + warmup:
            return WARM_UP
        return RECORD if place < length - 1 else RECORD_AND_SAVE

    return action


def every_step(_: int) -> str:
    """The default schedule: record every step, and save at the end of the block."""
    return RECORD


def action_of(found: object) -> str:
    """Convert a schedule's result, a word or torch's ProfilerAction, to an action.

    Raises UsageError if it is neither.
    """
    name = found if isinstance(found, str) else getattr(found, "name", None)
    if name not in ACTIONS:
        raise UsageError(f"profile: the schedule returned {found!r}; it must return one of {', '.join(ACTIONS)}")
    return str(name)


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Optional parts of a recording; each slows the recorded steps down.

    Attributes:
        shapes: input shapes and types of operators.
        stacks: every Python frame.
        memory: allocations.
        lines: the user's line for each operator, forward and backward; cheaper than stacks.
        flops: floating-point operations of operators.
        modules: the hierarchy of modules.
    """

    shapes: bool = True
    stacks: bool = False
    memory: bool = True
    lines: bool = True
    flops: bool = False
    modules: bool = False
