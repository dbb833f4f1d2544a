"""Steps of a thread with what the operating system counted in them, for the rules about the host."""

from __future__ import annotations

from typing import Any

from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import ProgramFacts, StepFacts
from tests.unit.recording import Recording


def counted(
    *, steps: int = 4, process: dict[str, Any] | None = None, device: bool = False, unit_ns: int = 1, **facts: Any
) -> Trace:
    """Steps of 1000 that are one operator; with a device, idle for the operator except 100 of work at its end.

    Args:
        unit_ns: the unit of these times.
        process: figures of the process.
        facts: of `ProgramFacts`, or of every step by names that `StepFacts` has.
    """
    of_step = {name: facts.pop(name) for name in list(facts) if name in StepFacts.__struct_fields__}
    rows = tuple(StepFacts(index=number, duration_ns=1000 * unit_ns, **of_step) for number in range(steps))
    program = ProgramFacts(steps=rows, process=process or {}, **facts)
    recording = Recording(Metadata(program=program, origin_unix_ns=1_000_000), unit_ns=unit_ns)
    for number in range(steps):
        begin = 1000 * number
        recording.step(begin, 1000, number)
        recording.frame(begin, 1000, "train.py(9): step")
        recording.operator(begin, 1000, "aten::mm")
        if device:
            recording.launched(begin + 880, begin + 890, 100, "gemm", number + 1)
    return recording.trace()
