"""Why a device can be idle, or a host thread busy: the vocabulary of causes, with a sentence for each."""

from __future__ import annotations

from typing import Final

CAUSES: Final[dict[str, str]] = {
    "input": "the host was loading data",
    "synchronisation": "the host waited for a value from the device, or for the device to finish",
    "graph_tracing": "the host ran the program only to record the graph of what to compute",
    "step_marker": "the host prepared a recorded graph at a step marker, before it runs",
    "compilation": "code was being compiled",
    "host_to_device_copy": "the host was copying data to the device",
    "allocation": "device memory was being allocated or freed",
    "garbage_collection": "Python was collecting garbage",
    "checkpoint": "a checkpoint was being saved or loaded",
    "logging": "the host was logging, printing or writing files",
    "communication": "the host waited for other ranks",
    "optimizer": "the host was preparing the optimizer's work",
    "python": "the host was running Python code between operators",
    "dispatch": "the host was inside operators, too slow to launch work (launch-bound)",
    "profiler_overhead": "the profiler itself was working",
    "dependency": "launched work waited for another queue",
    "launch_latency": "launched work had not yet reached the device",
    "untraced": "nothing was recorded on the host thread",
    "unknown": "the trace does not show what the work that followed was waiting for",
}
"""Cause -> what it means. Those before "dependency" are the host's doing; "compute" is added for host time."""

DEVICE_CAUSES: Final = ("dependency", "launch_latency", "unknown")
