"""What is true of a trace in Chrome's format, computed from its raw events by brute force.

    python benchmarks/labelled/raw_facts.py TRACE.json.gz ...

Standard library only, and no code in common with stepscope: the truths of real_traces.toml were written from what this
prints. For each device: busy time, the same inside of each step, what each step launched (by correlation number), sums
by kernel, collectives that nothing overlaps. For the threads: longest runtime calls, and the stack of the launching
thread over every gap of the device.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events", "concurrent_kernel"}
RUNTIME = {"cuda_runtime", "cuda_driver", "runtime", "mtia_runtime", "privateuse1_runtime"}
ROWS = 10

Event = dict[str, Any]
Interval = tuple[float, float]


def events_of(path: Path) -> list[Event]:
    """The complete events, times in microseconds, category in lower case."""
    packed = path.read_bytes()
    document = json.loads(gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed)
    events = document["traceEvents"] if isinstance(document, dict) else document
    complete = [event for event in events if event.get("ph") == "X" and "dur" in event]
    for event in complete:
        event["cat"] = str(event.get("cat", "")).lower()
        event["from"], event["to"] = float(event["ts"]), float(event["ts"]) + float(event["dur"])
    return complete


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals without overlaps, in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length_ms(intervals: Iterable[Interval]) -> float:
    """What intervals without overlaps last together."""
    return sum(stop - start for start, stop in intervals) / 1e3


def within(intervals: Iterable[Interval], start: float, stop: float) -> list[Interval]:
    """The parts of intervals between two times."""
    return [(max(a, start), min(b, stop)) for a, b in intervals if b > start and a < stop]


def spans(events: Iterable[Event]) -> list[Interval]:
    """The union of events' intervals."""
    return union((event["from"], event["to"]) for event in events)


def correlation(event: Event) -> object:
    """The number that links a launch to its work."""
    return (event.get("args") or {}).get("correlation")


def print_sums(title: str, events: Iterable[Event], named: Callable[[Event], object]) -> None:
    """Print count, sum and maximum of durations by name, the largest sums first."""
    by_name: dict[object, list[float]] = defaultdict(list)
    for event in events:
        by_name[named(event)].append((event["to"] - event["from"]) / 1e3)
    for name, times in sorted(by_name.items(), key=lambda row: -sum(row[1]))[:ROWS]:
        print(f"  {title} {sum(times):.3f} ms, {len(times)} times, at most {max(times):.3f}: {str(name)[:110]}")


def print_device(device: object, work: Sequence[Event], launches: dict[object, Event], steps: Sequence[Event]) -> None:
    """Print what one device did."""
    busy = spans(work)
    window = (busy[-1][1] - busy[0][0]) / 1e3
    unlaunched = sum(correlation(event) not in launches for event in work)
    print(f" device {device}: {len(work)} events, {unlaunched} launched before", end="; ")
    print(f"busy {length_ms(busy):.3f} of {window:.3f} ms")
    for step in steps:
        start, stop = step["from"], step["to"]
        launched = [e for e in work if (by := launches.get(correlation(e))) and start <= by["from"] < stop]
        own = spans(launched)
        reach = f", from {own[0][0] - start:.0f} to {own[-1][1] - start:.0f} us" if own else ""
        print(
            f"  {step['name']}: {(stop - start) / 1e3:.3f} ms, busy {length_ms(within(busy, start, stop)):.3f}",
            end="; ",
        )
        print(f"launched {len(launched)}, which take {length_ms(own):.3f} ms{reach}")
    print_sums("kernel", work, lambda event: event["name"])
    talk = [event for event in work if re.search("nccl|rccl", event["name"], re.IGNORECASE)]
    rest = spans(event for event in work if event not in talk) if talk else []
    alone = length_ms(union([*spans(talk), *rest])) - length_ms(rest)
    print(f"  collectives {length_ms(spans(talk)):.3f} ms, {alone:.3f} that nothing overlaps")


def stacks(thread: Sequence[Event], start: float, stop: float) -> Iterator[tuple[float, float, tuple[Event, ...]]]:
    """Pieces of a thread's time with all events that are open in each, outermost first."""
    open_events: list[Event] = []
    now = start
    last = {"from": stop, "to": stop}
    for event in [*sorted(thread, key=lambda each: (each["from"], -each["to"])), last]:
        while open_events and open_events[-1]["to"] <= event["from"]:
            ended = open_events[-1]["to"]
            if ended > now:
                yield now, ended, tuple(open_events)
                now = ended
            open_events.pop()
        if event["from"] > now:
            yield now, event["from"], tuple(open_events)
            now = event["from"]
        open_events.append(event)


def print_gaps(work: Sequence[Event], thread: Sequence[Event], start: float, stop: float) -> None:
    """Print what a thread does while the device is idle: annotations and operators, runtime calls, Python functions."""
    edges = [start, *(edge for piece in within(spans(work), start, stop) for edge in piece), stop]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
    print(f" idle {length_ms(gaps):.3f} of {(stop - start) / 1e3:.3f} ms")
    sums: dict[tuple[str, object], float] = defaultdict(float)
    position = 0
    for begin, end, stack in stacks(thread, start, stop):
        while position < len(gaps) and gaps[position][1] <= begin:
            position += 1
        idle, later = 0.0, position
        while later < len(gaps) and gaps[later][0] < end:
            idle += min(end, gaps[later][1]) - max(begin, gaps[later][0])
            later += 1
        for kind, key in _keys(stack):
            sums[kind, key] += idle
    for kind in ("annotation and operator", "runtime call", "Python"):
        rows = sorted(((key, idle) for (each, key), idle in sums.items() if each == kind), key=lambda row: -row[1])
        for key, idle in rows[:ROWS]:
            print(f"  idle under {kind} {idle / 1e3:.3f} ms: {str(key)[:150]}")


def _keys(stack: Sequence[Event]) -> Iterator[tuple[str, object]]:
    named = {kind: [e["name"] for e in stack if e["cat"] in kinds] for kind, kinds in _KINDS.items()}
    yield "annotation and operator", (*named["annotation"][-1:], *named["operator"][:1])
    yield "runtime call", (*named["runtime"][-1:], *named["operator"][-1:])
    yield "Python", " < ".join(name[-50:] for name in named["python"][::-1][:4])


_KINDS = {
    "annotation": {"user_annotation"},
    "operator": {"cpu_op", "operator"},
    "runtime": RUNTIME,
    "python": {"python_function"},
}


def print_facts(path: Path) -> None:
    """Print everything of one trace."""
    events = events_of(path)
    print(f"{path.name}: {dict(Counter(event['cat'] for event in events))}")
    steps = [e for e in events if e["name"].startswith("ProfilerStep") and e["cat"] != "gpu_user_annotation"]
    calls = [event for event in events if event["cat"] in RUNTIME]
    host = [e for e in events if e["cat"] not in DEVICE | {"trace"} and not e["cat"].startswith("gpu_")]
    devices: dict[object, list[Event]] = defaultdict(list)
    for event in events:
        if event["cat"] in DEVICE:
            devices[(event.get("args") or {}).get("device", event["pid"])].append(event)
    launches = {correlation(call): call for call in calls}
    for device, work in devices.items():
        print_device(device, work, launches, steps)
    print_sums("runtime", calls, lambda event: event["name"])
    threads = Counter((event.get("pid"), event.get("tid")) for event in calls or host).most_common(1)
    for name, _ in threads:
        thread = [event for event in host if (event.get("pid"), event.get("tid")) == name]
        print_sums("thread", thread, lambda event: (event["cat"], event["name"]))
        if devices:
            shown = steps or host
            start, stop = min(each["from"] for each in shown), max(each["to"] for each in shown)
            print_gaps(max(devices.values(), key=len), thread, start, stop)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print_facts(Path(argument))
