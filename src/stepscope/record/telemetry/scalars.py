"""A logged value becomes a number, and one on a device does so without the host waiting for it.

Values on a device are gathered there, copied into pinned memory behind the work that computes them, and followed by an
event. Later calls look whether the event has passed and only then read the memory. Nobody but the thread that logs asks
for the event: while a CUDA graph is captured, the question alone, from any other thread, would spoil the capture.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from stepscope import guard
from stepscope.guard import sentence
from stepscope.record.telemetry.store import Sample, Series, Writer

Logged: TypeAlias = tuple[Series, Any]
"""A series and its value: anything that is one number."""

_SMALLEST_PAGE: Final = 64
_PAGES_AT_ONCE: Final = 16


@dataclass(slots=True)
class _Copy:
    """Numbers on their way from a device."""

    event: Any
    page: Any
    numbers: Any
    series: list[Series]
    unix_ns: int
    step: int | None


class ScalarReader:
    """Reads logged values, now where that is free, later where a device is still computing them."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.begin()

    def begin(self) -> None:
        """Start anew, in a child process too: what the parent's device computes is the parent's."""
        self._lock = threading.Lock()
        self._waiting: deque[_Copy] = deque()
        self._pages = PinnedPages()

    def read(self, logged: Sequence[Logged], unix_ns: int, step: int | None) -> None:
        """Note the values, which were true at that time and step."""
        self.poll()
        on_devices: defaultdict[Any, list[Logged]] = defaultdict(list)
        for series, value in logged:
            with guard.attempt() as reading:
                device = _device_of(value)
                if device is not None:
                    on_devices[device].append((series, value))
                    continue
                self._writer.add(Sample(series, unix_ns, step, None if value is None else _number(value)))
            if reading.error is not None:
                self._lack(series, unix_ns, step, sentence(reading.error))
        for device, values in on_devices.items():
            self._start_copy(device, values, unix_ns, step)

    def poll(self) -> None:
        """Take what has arrived; never waits."""
        if not self._waiting or is_capturing():
            return
        with self._lock:
            while self._waiting and self._arrived(self._waiting[0]):
                self._waiting.popleft()

    def drain(self, timeout_s: float = 5.0) -> None:
        """Wait for what is still on its way, at the end of a run; a device that hangs is not waited for."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.001)
            self.poll()
        for copy in self._waiting:
            for series in copy.series:
                self._lack(series, copy.unix_ns, copy.step, "the device had not computed it when the run ended")
        self._waiting.clear()

    def _arrived(self, copy: _Copy) -> bool:
        """Whether the numbers are here, or never will be; those that are here are noted."""
        try:
            if not copy.event.query():
                return False
        except RuntimeError as error:  # the device has failed, which the program will hear of in its own calls
            for series in copy.series:
                self._lack(series, copy.unix_ns, copy.step, sentence(error))
            return True
        for series, number in zip(copy.series, copy.numbers.tolist(), strict=True):
            self._writer.add(Sample(series, copy.unix_ns, copy.step, number))
        self._pages.give_back(copy.page)
        return True

    def _start_copy(self, device: Any, values: list[Logged], unix_ns: int, step: int | None) -> None:
        series = [each for each, _ in values]
        with guard.attempt() as copying:  # whatever a driver or a tensor subclass raises
            copy = self._copy(device, [value for _, value in values], series, unix_ns, step)
            with self._lock:
                self._waiting.append(copy)
        if copying.error is not None:
            for each in series:
                self._lack(each, unix_ns, step, sentence(copying.error))

    def _copy(self, device: Any, tensors: list[Any], series: list[Series], unix_ns: int, step: int | None) -> _Copy:
        torch = sys.modules["torch"]
        module: Any = getattr(torch, device.type, None)
        if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
            raise RuntimeError(
                f"a value on the device {device} cannot be copied without waiting; log float(value) rarely"
            )
        if is_capturing():
            raise RuntimeError("it was logged while a CUDA graph was captured")
        with torch.no_grad():
            # What the page cannot hold exactly is rare: whole numbers, and float64, take twice the room.
            exact = all(tensor.is_floating_point() and tensor.element_size() <= 4 for tensor in tensors)
            dtype = torch.float32 if exact else torch.float64
            scalars = [local_part(tensor.detach()).reshape(()).to(dtype) for tensor in tensors]
            gathered = torch.stack(scalars)
            page = self._pages.take(len(scalars))
            numbers = page.view(dtype)[: len(scalars)]
            numbers.copy_(gathered, non_blocking=True)
            event = module.Event()
            event.record(module.current_stream(device))
        return _Copy(event, page, numbers, series, unix_ns, step)

    def _lack(self, series: Series, unix_ns: int, step: int | None, reason: str) -> None:
        self._writer.add(Sample(series, unix_ns, step, None))
        self._writer.lacks(series, reason)


class PinnedPages:
    """Memory that devices can copy into while the host goes on; kept, since making it can stop the device."""

    def __init__(self, allocate: Callable[[int], Any] | None = None) -> None:
        self._allocate = allocate or pinned_bytes
        self._free: defaultdict[int, list[Any]] = defaultdict(list)

    def take(self, numbers: int) -> Any:
        size = 8 * max(_SMALLEST_PAGE, 1 << (numbers - 1).bit_length())
        free = self._free[size]
        if not free:
            free.extend(self._allocate(_PAGES_AT_ONCE * size).split(size))
        return free.pop()

    def give_back(self, page: Any) -> None:
        self._free[page.numel()].append(page)


def pinned_bytes(size: int) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def local_part(tensor: Any) -> Any:
    """What this rank holds of a tensor that may be spread over ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _device_of(value: Any) -> Any:
    """The device of a tensor that is not on the host; None for everything else.

    Raises:
        ValueError: a tensor that is no single number on this rank.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    if value.numel() != 1:
        raise ValueError(f"a tensor of shape {list(value.shape)} is not one number")
    if any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
        raise ValueError("a tensor spread over several ranks is not one number on any of them")
    device = value.device
    return None if device.type == "cpu" else device


def _number(value: Any) -> float:
    """The value of a number, or of a tensor or array in host memory.

    Raises:
        TypeError, ValueError: it is no number.
    """
    if isinstance(value, (int, float)):
        return float(value)
    # tolist() reads the memory; item() would pass through the framework's dispatcher and look like a wait in a trace.
    if hasattr(value, "detach") and hasattr(value, "tolist"):
        return float(local_part(value.detach()).reshape(()).tolist())
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"a value of type {type(value).__name__} is not a number")
    return float(value)


def is_capturing() -> bool:
    """Whether this thread is recording a CUDA graph, in which nothing may be copied or asked."""
    torch: Any = sys.modules.get("torch")
    return (
        torch is not None
        and torch.cuda.is_initialized()
        and hasattr(torch.cuda, "is_current_stream_capturing")
        and torch.cuda.is_current_stream_capturing()
    )
