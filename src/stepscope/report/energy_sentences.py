"""What counters measured of a run's energy, in a sentence or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from stepscope.cost.energy_measured import Counter, EnergyRecord, MissingCounter
from stepscope.report.energy_format import energy
from stepscope.report.format import count, printable

WORDS: Final = {"gpu": "device", "cpu": "processor", "dram": "memory beside processor"}
ALL_WORDS: Final = {"gpu": "devices", "cpu": "processors", "dram": "memory"}


def measured_sentences(records: Sequence[EnergyRecord]) -> Iterator[str]:
    """What each counter measured, every one once, and which gave no number and why."""
    seen: set[str] = set()
    for record in records:
        for counter in record.counters:
            joules = record.step_joules(counter.key)
            identity = counter.identity or f"{record.machine} {counter.key}"
            if joules is not None and identity not in seen:
                seen.add(identity)
                yield (
                    f"energy of {counter_name(counter)}: {energy((joules, joules))} a step, measured over "
                    f"{count(record.steps)} steps after the recording"
                )
    for lacks, reason in grouped([lack for record in records for lack in record.missing]):
        yield f"energy not measured of {lacks}: {reason}"


def grouped(missing: Sequence[MissingCounter]) -> Iterator[tuple[str, str]]:
    """What could not be measured for one reason, as "processors, memory", and the reason."""
    by_reason: dict[str, list[str]] = {}
    for lack in dict.fromkeys(missing):
        what = ALL_WORDS[lack.kind] if lack.device is None else f"{WORDS[lack.kind]} {printable(lack.device)}"
        by_reason.setdefault(lack.reason, []).append(what)
    for reason, whats in by_reason.items():
        yield ", ".join(whats), printable(reason)


def counter_name(counter: Counter) -> str:
    """Such as "device 0 (NVIDIA A100)"."""
    named = f" ({printable(counter.name)})" if counter.kind == "gpu" and counter.name else ""
    return f"{WORDS[counter.kind]} {printable(counter.device)}{named}"
