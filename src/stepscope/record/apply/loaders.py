"""Remedies for how batches are prepared and copied to a device. The order of batches does not change."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

from stepscope import guard
from stepscope.record.apply.flags import MOST_PROCESSES, Flag, Value
from stepscope.record.apply.patching import Applying, in_a_line, users_place

_NONE_MADE: Final = "no DataLoader was made"
LOADER_FLAGS: Final = (
    Flag(
        "workers",
        "prepares the batches of every DataLoader in N processes (0: in the program's own)",
        _NONE_MADE,
        "An IterableDataset gets at most one worker, since each would yield all of its batches. If a worker fails "
        "before its first batch, the loader continues without workers. Random augmentation draws other numbers in "
        "workers.",
        Value("N", least=0, most=MOST_PROCESSES),
    ),
    Flag(
        "prefetch",
        "has each worker prepare N batches ahead",
        _NONE_MADE,
        "Only if the loader has workers.",
        Value("N", least=1, most=MOST_PROCESSES),
    ),
    Flag(
        "pin-memory",
        "has every DataLoader put batches into pinned memory, from which copies to a device are faster",
        _NONE_MADE,
        "Only if there is an accelerator. Batches that are already on a device stay there.",
    ),
    Flag(
        "persistent-workers",
        "keeps the workers of a DataLoader from one epoch to the next",
        _NONE_MADE,
        "Only if the loader has workers. Changes to the dataset between epochs do not reach them.",
    ),
)

_AS_MADE: Final = (
    "has as many workers as it was made with",
    "has as many batches prepared ahead as it was made with",
    "keeps its workers as it was made to",
    "pins its batches as it was made to",
)
_DEFAULT_PREFETCH: Final = 2
"""Torch's default number of batches that a worker prefetches (documented for DataLoader)."""


def install_loaders(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Apply the flags to every DataLoader made from now on, including subclasses and loaders made by libraries."""
    from torch.utils.data import DataLoader

    rescue = _Rescue(applying)
    kept: weakref.WeakSet[Any] = weakref.WeakSet()

    def tell(loader: Any, name: str, plan: _Plan) -> None:
        for flag, sentence in plan.done:
            # for example when a library recreates a loader
            if sentence not in _AS_MADE or not applying.said_about(flag):
                applying.did(flag, f"{name} {sentence}")
        for flag, sentence in plan.refused:
            applying.could_not(flag, f"{name}: {sentence}")
        if plan.has_new_workers:
            rescue.watch(loader)
        if plan.keeps_workers:
            kept.add(loader)

    applying.replace_constructor(DataLoader, chosen, lambda arguments: _Plan(arguments, chosen), tell)
    if "persistent-workers" in chosen:
        _draw_seeds_as_before(applying, kept)
    if "pin-memory" in chosen:
        _leave_device_tensors(applying)


class _Plan:
    """The changes to one loader's arguments, made in place.

    Attributes:
        done, refused: flags, each with the end of a sentence that begins with the loader.
        has_new_workers: whether workers were added to a loader that had none.
        keeps_workers: whether the workers now persist across epochs.
    """

    def __init__(self, arguments: dict[str, Any], chosen: Mapping[str, str]) -> None:
        self._arguments = arguments
        self.done: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.has_new_workers = False
        self.keeps_workers = False
        if "workers" in chosen:
            self._workers(int(chosen["workers"]))
        if "prefetch" in chosen:
            self._prefetch(int(chosen["prefetch"]))
        if "persistent-workers" in chosen:
            self._persistent()
        if "pin-memory" in chosen:
            self._pin_memory()

    def _workers(self, wanted: int) -> None:
        from torch.utils.data import IterableDataset

        before = self._arguments.get("num_workers") or 0
        if wanted > 1 and isinstance(self._arguments.get("dataset"), IterableDataset):
            why = f"its IterableDataset would yield each batch {wanted} times, once for each worker"
            self.refused.append(("workers", f"{why}; it keeps its {before}" if before else f"{why}; it gets 1"))
            wanted = before or 1
        if wanted == before:
            if not self.refused:
                self.done.append(("workers", _AS_MADE[0]))
            return
        self._arguments["num_workers"] = wanted
        if not wanted:
            for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
                self._arguments.pop(name, None)
        self.has_new_workers = before == 0
        self.done.append(("workers", f"has {_count(wanted)} instead of {before or 'none'}"))

    def _prefetch(self, wanted: int) -> None:
        if not self._arguments.get("num_workers"):
            self.refused.append(("prefetch", "it has no workers that could prepare batches ahead"))
            return
        before = self._arguments.get("prefetch_factor") or _DEFAULT_PREFETCH
        self._arguments["prefetch_factor"] = wanted
        ahead = f"has each worker prepare {wanted} batch{'es' if wanted > 1 else ''} ahead instead of {before}"
        self.done.append(("prefetch", _AS_MADE[1] if wanted == before else ahead))

    def _persistent(self) -> None:
        if not self._arguments.get("num_workers"):
            self.refused.append(("persistent-workers", "it has no workers to keep"))
        elif self._arguments.get("persistent_workers"):
            self.done.append(("persistent-workers", _AS_MADE[2]))
        else:
            self._arguments["persistent_workers"] = self.keeps_workers = True
            self.done.append(("persistent-workers", "keeps its workers from epoch to epoch"))

    def _pin_memory(self) -> None:
        if not _has_accelerator():
            self.refused.append(("pin-memory", "there is no accelerator to pin for"))
        elif self._arguments.get("pin_memory"):
            self.done.append(("pin-memory", _AS_MADE[3]))
        else:
            self._arguments["pin_memory"] = True
            self.done.append(("pin-memory", "pins its batches"))


class _Rescue:
    """Falls back to loading without workers if the added workers fail before the first batch.

    A dataset may hold objects that cannot be sent to another process, or device tensors that cannot be used in one.
    """

    def __init__(self, applying: Applying) -> None:
        from torch.utils.data import dataloader

        self._applying = applying
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._instead: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._single: Any = dataloader._SingleProcessDataLoaderIter
        applying.wrap(dataloader.DataLoader, "_get_iterator", self._iterator)
        applying.wrap(dataloader._MultiProcessingDataLoaderIter, "_next_data", self._next)

    def watch(self, loader: Any) -> None:
        self._loaders.add(loader)

    def _iterator(self, original: Any, loader: Any) -> Any:
        if loader not in self._loaders or not loader.num_workers:
            return original(loader)
        import torch

        state = torch.get_rng_state()
        iterator, error = guard.tried(original, loader)
        if error is not None:  # workers cannot be started, or the loader raises its own error again
            self._give_up(loader, state, error)
            return original(loader)
        iterator._stepscope_loader, iterator._stepscope_state = weakref.ref(loader), state
        return iterator

    def _next(self, original: Any, iterator: Any) -> Any:
        instead = self._instead.get(iterator)
        if instead is not None:
            return guard.passing(instead._next_data)
        data, error = guard.tried(original, iterator)
        if error is None:
            return data
        loader = getattr(iterator, "_stepscope_loader", lambda: None)()
        if loader is None or iterator._num_yielded or isinstance(error, StopIteration):
            raise error
        iterator._shutdown_workers()  # a worker failed, for any reason
        self._give_up(loader, iterator._stepscope_state, error)
        self._instead[iterator] = self._single(loader)
        return guard.passing(self._instead[iterator]._next_data)

    def _give_up(self, loader: Any, state: Any, error: Exception) -> None:
        import torch

        torch.set_rng_state(state)
        loader.num_workers, loader.prefetch_factor = 0, None
        vars(loader)["persistent_workers"] = False  # the loader no longer allows it to be set
        self._loaders.discard(loader)
        self._applying.could_not("workers", f"a DataLoader continues without them, since they fail: {in_a_line(error)}")


def _draw_seeds_as_before(applying: Applying, kept: weakref.WeakSet[Any]) -> None:
    """Draw one random number per epoch, as the loader does to seed new workers.

    Without it, all later random numbers of the program would differ, such as the order of the next epoch.
    """
    import torch
    from torch.utils.data import dataloader

    def reset(original: Any, iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if not first_iter and loader in kept:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        original(iterator, loader, first_iter)

    applying.wrap(dataloader._MultiProcessingDataLoaderIter, "_reset", reset)


def _leave_device_tensors(applying: Applying) -> None:
    """Leave the batch's tensors that are not in host memory unpinned."""
    import torch
    from torch.utils.data._utils import pin_memory as module

    def pinned(original: Any, data: Any, *positional: Any, **named: Any) -> Any:
        if isinstance(data, torch.Tensor) and (data.device.type != "cpu" or data.layout != torch.strided):
            return data
        return original(data, *positional, **named)

    applying.wrap(module, "pin_memory", pinned)


def _has_accelerator() -> bool:
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    return bool(accelerator.is_available() if accelerator is not None else torch.cuda.is_available())


def _count(workers: int) -> str:
    return "no workers" if workers == 0 else f"{workers} worker{'s' if workers > 1 else ''}"


COPY_FLAGS: Final = (
    Flag(
        "non-blocking",
        "copies from pinned memory to a device without waiting for the copy",
        "nothing was copied from pinned memory to a device",
        "Only copies from pinned memory (pin-memory makes it), by Tensor.to and Tensor.cuda. The program must not "
        "write into the pinned tensor before the copy has ended.",
    ),
)


def install_copies(applying: Applying, chosen: Mapping[str, str]) -> None:
    """Make Tensor.to and Tensor.cuda non-blocking if the source is pinned."""
    import torch

    dtype: Any = torch.dtype

    def changed(tensor: Any, target: Any, named: dict[str, Any]) -> bool:
        """Whether this is a blocking copy from pinned memory to a device."""
        if tensor.device.type != "cpu" or named.get("non_blocking") or isinstance(target, dtype):
            return False
        if isinstance(target, torch.Tensor):
            target = target.device
        kind = torch.device(target).type if isinstance(target, (str, int, torch.device)) else "cpu"
        return kind != "cpu" and bool(tensor.is_pinned())

    def to(original: Any, tensor: Any, *positional: Any, **named: Any) -> Any:
        target = positional[0] if positional else named.get("device", named.get("other"))
        with applying.guarded("non-blocking"):
            rest = positional[1:]
            if rest and isinstance(rest[0], dtype):  # positional signature: to(device, dtype, non_blocking, copy)
                rest = rest[1:]
            if not (rest and rest[0]) and changed(tensor, target, named):
                if rest:  # non_blocking=False, given by position
                    place = len(positional) - len(rest)
                    positional = (*positional[:place], True, *rest[1:])
                else:
                    named["non_blocking"] = True
                _say(applying)
        return original(tensor, *positional, **named)

    def cuda(original: Any, tensor: Any, *positional: Any, **named: Any) -> Any:
        with applying.guarded("non-blocking"):
            if len(positional) < 2 and changed(tensor, "cuda", named):
                named["non_blocking"] = True
                _say(applying)
        return original(tensor, *positional, **named)

    applying.wrap(torch.Tensor, "to", to)
    applying.wrap(torch.Tensor, "cuda", cuda)


def _say(applying: Applying) -> None:
    if not applying.said_about("non-blocking"):
        applying.did(
            "non-blocking", f"copies such as the one at {users_place() or 'an unknown place'} are not waited for"
        )
