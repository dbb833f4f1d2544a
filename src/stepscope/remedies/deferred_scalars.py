"""Logging what the device computed without waiting for it.

with DeferredScalars(writer) as scalars:            # a SummaryWriter, wandb, or any write(step, name, value)
    for step, batch in enumerate(loader):
        loss = ...
        scalars.add(step, loss=loss)                # in place of writer.add_scalar("loss", loss.item(), step)
"""

from __future__ import annotations

import atexit
import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from stepscope.remedies.accelerators import host_memory, streams_of

Write = Callable[[int, str, float], object]
_MOST_UNREAD: Final = 4
"""Groups of values whose copies to the host may be under way; then the oldest is waited for."""


@dataclass(slots=True)
class _Group:
    """Values of consecutive steps, whose copies to the host begin together.

    Each entry is (step, name, value), the value a number, or where it stands: its device and type, and a position.
    """

    entries: list[tuple[int, str, float | tuple[Any, int]]] = field(default_factory=list)
    on_device: dict[Any, list[torch.Tensor]] = field(default_factory=dict)
    copies: dict[Any, torch.Tensor] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)
    given: int = 0

    def begin_copying(self) -> None:
        """One copy for each device and type: into pinned memory, without waiting, where the device has streams."""
        for key, values in self.on_device.items():
            together = torch.stack(values)
            streams = streams_of(together.device)
            if streams is None:
                self.copies[key] = together  # read when it is asked for
                continue
            copy = host_memory(together)
            copy.copy_(together, non_blocking=True)
            event = streams.Event()
            event.record(streams.current_stream(together.device))
            self.copies[key] = copy
            self.events.append(event)
        self.on_device.clear()

    @property
    def is_there(self) -> bool:
        return all(event.query() for event in self.events)

    def give(self, write: Write, latest: dict[str, tuple[int, float]]) -> None:
        """Hand the values on in order; after an exception of `write`, from the one that it had not taken."""
        for event in self.events:
            event.synchronize()
        numbers = {key: copy.tolist() for key, copy in self.copies.items()}
        while self.given < len(self.entries):
            step, name, value = self.entries[self.given]
            number = float(numbers[value[0]][value[1]]) if isinstance(value, tuple) else value
            latest[name] = (step, number)
            write(step, name, number)
            self.given += 1


class DeferredScalars:
    """Collects scalars that may still be computed on a device, and hands them on once they are there.

    `add` copies each value on its device, so that what happens to the tensor afterwards changes nothing, and reads
    nothing. Every `every` calls the collected values are copied to the host together; on CUDA (and XPU) in the stream,
    and handed on at a later `add` when the copy has happened: the host does not wait, unless it is so far ahead that
    the values of five copies are not there. On other accelerators reading waits, once every `every` calls. Numbers and
    tensors on the CPU are handed on at once, but after all that was added before them: everything comes in the order in
    which it was added. Values are not changed: what is given is `float(value)`.

    Use it from one thread, and close it, or use it in a `with` statement: that hands on what is left, also after an
    exception. What is not closed is handed on when the interpreter ends.

    Args:
        write: `write(step, name, value)`, such as `print`; or an object with `add_scalar` (TensorBoard's
            SummaryWriter), or with `log` (wandb, or a run of it), which gets all values of a step in one call.
        every: after how many calls of `add` values are copied to the host.
        most: the most values to collect before they are copied, if that is sooner.

    Attributes:
        latest: for each name the step and value handed on last, for progress bars.

    Raises:
        TypeError, ValueError: an argument cannot be used.
    """

    def __init__(self, write: Write | Any, *, every: int = 50, most: int = 10_000) -> None:
        for name, number in (("every", every), ("most", most)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is {number!r}; it takes a whole number from 1 on")
        self.latest: dict[str, tuple[int, float]] = {}
        self._write, self._flush_written = _writer(write)
        self._every, self._most = every, most
        self._calls = 0
        self._collected = _Group()
        self._under_way: deque[_Group] = deque()
        self._closed = False
        atexit.register(self._close_at_exit)

    def add(self, step: int, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Collect the values of a step: tensors with one element on any device, or numbers.

        Raises:
            ValueError: a tensor has not one element, or this is closed.
            TypeError: a value is no number.
        """
        if self._closed:
            raise ValueError("these scalars are closed: add values before close(), or inside the with statement")
        # Everything is looked at before anything is kept.
        entries = [(name, _scalar(name, value)) for name, value in {**(values or {}), **more}.items()]
        for name, value in entries:
            if isinstance(value, torch.Tensor):
                key = (value.device, value.dtype)
                kept = self._collected.on_device.setdefault(key, [])
                self._collected.entries.append((step, name, (key, len(kept))))
                kept.append(value)
            else:
                self._collected.entries.append((step, name, value))
        self._calls += 1
        # Where nothing comes from a device, there is nothing to wait for.
        only_numbers = not self._under_way and not self._collected.on_device
        if only_numbers or self._calls >= self._every or len(self._collected.entries) >= self._most:
            self._begin_copying()
        self._give_what_is_there()

    def flush(self) -> None:
        """Wait for everything that was added, and hand it on."""
        self._begin_copying()
        while self._under_way:
            self._give_oldest()
        self._flush_written()

    def close(self) -> None:
        """Hand everything on; nothing can be added afterwards."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        atexit.unregister(self._close_at_exit)

    def __enter__(self) -> DeferredScalars:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # must not hide what went wrong first: a device that failed cannot be read
            warnings.warn(f"the last scalars could not be read: {second}", RuntimeWarning, stacklevel=2)

    def _close_at_exit(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter ends, and with it a writer or a device
            self.close()

    def _begin_copying(self) -> None:
        group, self._collected, self._calls = self._collected, _Group(), 0
        if group.entries:
            group.begin_copying()
            self._under_way.append(group)

    def _give_what_is_there(self) -> None:
        while self._under_way and (len(self._under_way) > _MOST_UNREAD or self._under_way[0].is_there):
            self._give_oldest()

    def _give_oldest(self) -> None:
        self._under_way[0].give(self._write, self.latest)
        self._under_way.popleft()


def _scalar(name: str, value: Any) -> torch.Tensor | float:
    """A number, or a copy on the device."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            what = "is complex" if value.is_complex() else f"has {value.numel()} elements"
            raise ValueError(f"{name} {what}; a scalar is one real number: take its mean or norm first")
        value = value.detach()
        return float(value) if _is_on_host(value) else value.reshape(()).clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} is {type(value).__name__}; a scalar is a number or a tensor with one element"
        ) from None


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _writer(write: Any) -> tuple[Write, Callable[[], object]]:
    """As write(step, name, value), and what is called at the end of a flush."""
    if hasattr(write, "add_scalar"):
        return (lambda step, name, value: write.add_scalar(name, value, step)), _nothing
    if not callable(write) and hasattr(write, "log"):
        steps = _WholeSteps(write.log)
        return steps.write, steps.flush
    if not callable(write):
        raise TypeError(
            f"{type(write).__name__} cannot be written to: give a function of step, name and value, or an object with "
            "add_scalar or log"
        )
    return cast(Write, write), _nothing


class _WholeSteps:
    """Values for a `log(values, step=step)` that takes a step only once."""

    def __init__(self, log: Callable[..., object]) -> None:
        self._log = log
        self._step: int | None = None
        self._values: dict[str, float] = {}

    def write(self, step: int, name: str, value: float) -> None:
        if step != self._step or name in self._values:
            self.flush()
        self._step = step
        self._values[name] = value

    def flush(self) -> None:
        if self._values:
            self._log(dict(self._values), step=self._step)
            self._values.clear()


def _nothing() -> None:
    pass
