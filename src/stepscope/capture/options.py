"""What a recording holds besides times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Optional parts of a recording; each costs the program some time while it is recorded.

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
