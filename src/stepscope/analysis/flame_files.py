"""Stacks in the formats of flame-graph viewers: speedscope's JSON and folded stacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from stepscope.analysis.attribution import Attribution, attribute
from stepscope.analysis.flame import FlameStack, thread_events, user_stacks
from stepscope.trace import Trace

_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"
_EVENTS: Final = 20_000


def speedscope(trace: Trace, attribution: Attribution | None = None) -> Iterator[bytes]:
    """The pieces of a JSON document in speedscope's file format, in order.

    First comes a profile of the device's time by the user's stack, or of the operators' own time where the trace has no
    device, costliest stacks first; then one of each host thread over time, with all that the trace has of it.
    """
    attribution = attribute(trace) if attribution is None else attribution
    frames: dict[str, int] = {}
    head = {"$schema": _SCHEMA, "exporter": "stepscope", "name": trace.metadata.path, "activeProfileIndex": 0}
    yield json.dumps(head).encode()[:-1] + b', "profiles": [\n'
    yield _sampled(user_stacks(trace, attribution), stacks_name(trace), frames)
    for thread in thread_events(trace, attribution.activity):
        about = {"type": "evented", "name": thread.name, "unit": "nanoseconds"}
        values = {"startValue": thread.start_ns, "endValue": thread.end_ns}
        yield b",\n" + json.dumps({**about, **values}).encode()[:-1] + b', "events": ['
        separator, part = "", list[str]()
        for time, name, opens in thread.events:
            number = frames.setdefault(name, len(frames))
            part.append(f'{{"type":"{"O" if opens else "C"}","frame":{number},"at":{time}}}')
            if len(part) == _EVENTS:
                yield (separator + ",".join(part)).encode()
                separator, part = ",\n", []
        yield (separator if part else "").encode() + ",".join(part).encode() + b"]}"
    shared = {"frames": [{"name": name} for name in frames]}
    yield b'\n], "shared": ' + json.dumps(shared).encode() + b"}\n"


def folded(trace: Trace, attribution: Attribution | None = None) -> Iterator[bytes]:
    """One line for each stack: its frames, separated by semicolons, and its nanoseconds; the costliest first."""
    for stack in _costliest_first(user_stacks(trace, attribution)):
        frames = ";".join(_one_line(frame) for frame in stack.frames)
        yield f"{frames} {stack.ns}\n".encode("utf-8", "backslashreplace")


def stacks_name(trace: Trace) -> str:
    """What the stacks of `user_stacks` are."""
    return "device time by line" if trace.device_work.height else "operators' own time by line"


def _sampled(stacks: list[FlameStack], name: str, frames: dict[str, int]) -> bytes:
    ordered = _costliest_first(stacks)
    samples = [[frames.setdefault(frame, len(frames)) for frame in stack.frames] for stack in ordered]
    weights = [stack.ns for stack in ordered]
    profile = {"type": "sampled", "name": name, "unit": "nanoseconds", "startValue": 0, "endValue": sum(weights)}
    return json.dumps({**profile, "samples": samples, "weights": weights}).encode()


def _costliest_first(stacks: list[FlameStack]) -> list[FlameStack]:
    return sorted(stacks, key=lambda stack: (-stack.ns, stack.frames))


def _one_line(frame: str) -> str:
    """A frame without what separates frames and stacks, or could move a terminal's cursor."""
    return "".join(mark if mark.isprintable() else " " for mark in frame.replace(";", ",")) or "?"
