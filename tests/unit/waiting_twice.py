"""A trace whose steps wait for two things: for batches, and for the device's result."""

from __future__ import annotations

from stepscope.trace import Metadata, Trace
from tests.unit.recording import Recording

US = 1_000
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def waiting_twice(steps: int = 4, *, annotated: bool = True) -> Trace:
    """Steps of 1000 us, one after the other.

    In each the host loads a batch for 300 us, works for 40 us in an operator that launches a kernel, waits until the
    kernel is done, and works in Python for the rest. The kernel begins 20 us after its launch began and takes 400 us.
    """
    recording = Recording(Metadata(format="kineto", path="trace.json"))
    for number in range(steps):
        begin = number * 1000 * US
        if annotated:
            recording.step(begin, 1000 * US, number)
        recording.frame(begin, 1000 * US, "train.py(12): step")
        recording.annotation(begin, 300 * US, LOADER)
        recording.operator(begin + 300 * US, 40 * US, "aten::mm")
        recording.launch(begin + 300 * US, 10 * US, 2 * number + 1)
        recording.work(begin + 320 * US, 400 * US, "gemm", 2 * number + 1)
        recording.launch(begin + 340 * US, 385 * US, 2 * number + 2, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def alone(steps: int = 3) -> Trace:
    """The same without a device: batches, and an operator of 400 us."""
    recording = Recording(Metadata(format="kineto", path="cpu.json"))
    for number in range(steps):
        begin = number * 1000 * US
        recording.step(begin, 1000 * US, number)
        recording.frame(begin, 1000 * US, "train.py(12): step")
        recording.annotation(begin, 300 * US, LOADER)
        recording.operator(begin + 300 * US, 400 * US, "aten::mm")
    return recording.trace()
