"""Copy batches to the device before the step asks for them.

loader = DataLoader(dataset, batch_size=64, num_workers=4, pin_memory=True)
for images, labels in prefetch_to_device(loader):       # in place of images.to("cuda"), labels.to("cuda")
    ...
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import torch

from stepscope.remedies.attempts import Attempt
from stepscope.remedies.settings import check_whole, default_device, streams_of


class ThreadedIterator(Iterator[Any]):
    """The items of another iterator, taken and prepared in a thread up to `ahead` items before they are asked for.

    An exception is raised at its place in the order, with its traceback. `close` ends the thread after the item that it
    is working on.
    """

    def __init__(self, items: Iterator[Any], ahead: int, prepare: Callable[[Any], Any]) -> None:
        self._items, self._ahead, self._prepare = items, ahead, prepare
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="stepscope-loads-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    @property
    def is_ready(self) -> bool:
        """Whether the next item, or the end, is available without waiting."""
        with self._changed:
            return bool(self._ready) or self._ended

    def close(self) -> None:
        """End the thread, and drop what it has loaded."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        with Attempt(BaseException) as loading, contextlib.suppress(StopIteration):
            while self._has_room():
                item = self._prepare(next(self._items))
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                del item
        with self._changed:
            self._ended, self._error = True, loading.error
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until one more may be loaded; False after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed


_DEEPEST: Final = 16
"""Levels of a structure that are followed; cycles end there."""


def moved(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move all tensors of the batch to the device, keeping its structure; other values stay as they are."""
    return mapped(batch, lambda item: _to(item, device, non_blocking))


def mapped(batch: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Copy a structure with `change` applied to each tensor and each object that has a `to` method.

    The original is never changed; the types of containers stay.
    """
    if isinstance(batch, torch.Tensor) or (callable(getattr(batch, "to", None)) and not isinstance(batch, type)):
        return change(batch)
    if depth >= _DEEPEST or isinstance(batch, (str, bytes, bytearray, type)):
        return batch
    if isinstance(batch, Mapping):
        items = {key: mapped(value, change, depth + 1) for key, value in batch.items()}
        return items if type(batch) is dict else _filled(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change, depth + 1) for value in batch))
    if isinstance(batch, (list, tuple)):
        values = [mapped(value, change, depth + 1) for value in batch]
        return values if type(batch) is list else type(batch)(values)
    if dataclasses.is_dataclass(batch):
        clone = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            # Works for frozen ones, too: nobody else has the copy yet.
            object.__setattr__(clone, entry.name, mapped(getattr(batch, entry.name), change, depth + 1))
        return clone
    return batch


def tensors_of(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield every tensor in the structure, including those in attributes of objects."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth >= _DEEPEST or isinstance(batch, (str, bytes, bytearray, type, int, float)):
        return
    else:
        for value in _parts_of(batch):
            yield from tensors_of(value, depth + 1)


def _parts_of(item: Any) -> Iterable[Any]:
    if isinstance(item, Mapping):
        return item.values()
    if isinstance(item, Sequence):
        return item
    slots: list[Any] = []
    if dataclasses.is_dataclass(item):
        slots = [getattr(item, entry.name) for entry in dataclasses.fields(item)]
    elif not callable(getattr(item, "to", None)):
        return ()
    return list(getattr(item, "__dict__", {}).values()) or slots


def _to(item: Any, device: torch.device, non_blocking: bool) -> Any:
    try:
        return item.to(device, non_blocking=non_blocking)
    except TypeError:
        if isinstance(item, torch.Tensor):
            raise
        return item.to(device)  # of an object whose method takes no other arguments


def _filled(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same type with other values."""
    clone = copy.copy(batch)
    if hasattr(clone, "update"):
        clone.update(items)
        return clone
    return type(batch)(items)  # type: ignore[call-arg]


def prefetch_to_device(
    loader: Iterable[Any], device: torch.device | str | int | None = None, ahead: int = 2, *, in_thread: bool = False
) -> DevicePrefetcher:
    """Wrap a loader so that its batches are on the device and the next ones are copied while the step computes.

    On CUDA (and XPU) the copies run from pinned memory on a stream of their own; the step's stream waits for its batch
    on the device, and the host does not wait. On XLA this is torch_xla's MpDeviceLoader, which also ends a step with
    each batch. On other accelerators copies are issued ahead without waiting for them. On the CPU batches pass through
    unchanged.

    Batches may be tensors, mappings, lists, tuples, named tuples, dataclasses, objects with a `to` method, and nested
    combinations. Values and order are the loader's.

    Args:
        loader: any iterable of batches; `len`, `set_epoch`, `dataset`, `batch_sampler` and so on are passed through.
        device: by default the current accelerator, or the CPU.
        ahead: how many batches wait on the device besides the one in use, each with its memory.
        in_thread: take batches from the loader (and pin them) in a thread, which helps a loader without workers. Random
            numbers that the data set draws from the process's generators then interleave with the model's.

    Raises:
        ValueError: `ahead` is below 1.
        TypeError: the loader is not iterable.
    """
    check_whole("ahead", ahead)
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"prefetch_to_device takes an iterable, such as a DataLoader, not {type(loader).__name__}")
    place = default_device() if device is None else torch.device(device)
    return DevicePrefetcher(loader, place, ahead, in_thread)


class DevicePrefetcher:
    """The result of `prefetch_to_device`: the loader, with its batches on the device."""

    def __init__(self, loader: Iterable[Any], device: torch.device, ahead: int, in_thread: bool) -> None:
        self.loader, self.device = loader, device
        self._ahead, self._in_thread = ahead, in_thread

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("loader", "device"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to whichever of loader, sampler, batch sampler and data set has `set_epoch`."""
        owners: list[Any] = [self.loader]
        if not hasattr(self.loader, "set_epoch"):  # otherwise the loader passes it to its own parts
            batches = getattr(self.loader, "batch_sampler", None)
            owners = [getattr(self.loader, "sampler", None), batches, getattr(batches, "sampler", None)]
            owners.append(getattr(self.loader, "dataset", None))
        for owner in {id(owner): owner for owner in owners}.values():
            tell = getattr(owner, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self.device.type == "xla":
            return iter(import_module("torch_xla.distributed.parallel_loader").MpDeviceLoader(self.loader, self.device))
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        prepare = (lambda batch: batch) if self.device.type in ("cpu", "mps") else self._pinned
        source: Iterator[Any] = iter(self.loader)
        with contextlib.ExitStack() as stack:
            if self._in_thread:
                batches: Iterator[Any] = stack.enter_context(
                    contextlib.closing(ThreadedIterator(source, self._ahead, prepare))
                )
            else:
                batches = map(prepare, source)
            yield from batches if self.device.type == "cpu" else _copied_ahead(batches, self.device, self._ahead)

    def _pinned(self, batch: Any) -> Any:
        """The batch in memory that the device can copy from asynchronously."""
        streams = streams_of(self.device)
        # A new thread's current device is the first one, which may be another process's.
        with streams.device(self.device) if streams is not None else contextlib.nullcontext():
            return mapped(batch, self._pin)

    def _pin(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu" or item.is_pinned():
                return item
            return item.pin_memory() if self.device.type == "cuda" else _pinned_for(item, self.device)
        pin = getattr(item, "pin_memory", None)
        return pin() if callable(pin) else item


def _pinned_for(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pin for an accelerator other than CUDA, if this torch supports it."""
    try:
        return tensor.pin_memory() if hasattr(torch, "accelerator") else tensor.pin_memory(device.type)
    except (RuntimeError, NotImplementedError, TypeError):
        return tensor


def _copied_ahead(batches: Iterator[Any], device: torch.device, ahead: int) -> Iterator[Any]:
    """Yield the batches on the device while the next `ahead` ones are being copied."""
    streams = streams_of(device)
    side = streams.Stream(device=device) if streams is not None else None
    copying: deque[tuple[Any, Any, list[torch.Tensor]]] = deque()
    more, error = True, None
    while True:
        # A batch that is on the device does not wait for one that is still being loaded.
        while more and len(copying) <= ahead and (not copying or getattr(batches, "is_ready", True)):
            try:
                copying.append(_begun(next(batches), device, streams, side))
            except StopIteration:
                more = False
            except (
                Exception
            ) as raised:  # the user's loader's exception: raised at its place, after the batches before it
                more, error = False, raised
        if not copying:
            if error is not None:
                raise error
            return
        copy, done, new = copying.popleft()
        if done is not None and streams is not None:
            current = streams.current_stream(device)
            current.wait_event(done)
            for tensor in new:
                # Its memory belongs to the side stream: it must not be reused while the step still reads it.
                tensor.record_stream(current)
        del new
        yield copy
        del copy


def _begun(batch: Any, device: torch.device, streams: Any, side: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    """Issue a batch's copy; return the new batch, the event after the copy, and the tensors new on the device."""
    if streams is None:
        return moved(batch, device, non_blocking=True), None, []
    with streams.stream(side):
        copy = moved(batch, device, non_blocking=True)
        done = streams.Event()
        done.record(side)
    before = {id(tensor) for tensor in tensors_of(batch)}
    return copy, done, [tensor for tensor in tensors_of(copy) if id(tensor) not in before]
