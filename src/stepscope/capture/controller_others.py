"""Profilers that the program starts itself: only one can record at a time, and the program's goes first.

While captures are asked for, the functions through which every profiler of torch, of JAX and of PyTorch/XLA is
prepared, started and stopped are wrapped, so that the program's own are seen coming.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from stepscope.capture import guard

_XLA: Final = {"start_trace": True, "stop_trace": False, "stop_and_get_fdo_profile": False}
_FUNCTIONS: Final = {
    "torch.autograd.profiler": {
        "_prepare_profiler": True,
        "_enable_profiler": True,
        "_disable_profiler": False,
    },
    "jax.profiler": _XLA,
    "jax._src.profiler": _XLA,  # which jax.profiler.trace calls
    "torch_xla.debug.profiler": _XLA,
}
"""Functions by module, and whether a profiler is in use after they were called."""
_NAMES: Final = {"torch.autograd.profiler": "torch.profiler", "torch_xla.debug.profiler": "torch_xla.debug.profiler"}

_watchers: list[OtherProfilers] = []
_originals: dict[tuple[str, str], Any] = {}


class OtherProfilers:
    """Sees profilers of torch and XLA that are not stepscope's.

    Args:
        give_way: called when one is about to begin while stepscope records.

    Attributes:
        seen: whether there ever was one.
        name: what the program calls it.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self.seen = False
        self.name = "torch.profiler"
        self._give_way = give_way
        self._in_use = False
        self._our_own = False
        self._recording = False

    def watch(self) -> None:
        """Look out for them from now on, in the modules that are imported; may be called again when there are more."""
        modules = {name: sys.modules[name] for name in _FUNCTIONS if name in sys.modules}
        for name, module in modules.items():
            _wrap(name, module)
        if modules and self not in _watchers:
            self._in_use = _is_in_use()
            _watchers.append(self)

    def unwatch(self) -> None:
        """Look out no more; after the last, the modules are as they were."""
        if self in _watchers:
            _watchers.remove(self)
            if not _watchers:
                _unwrap()

    def active(self) -> bool:
        """Whether one is prepared or records now."""
        return self._in_use

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """What is called inside is stepscope's."""
        self._our_own = True
        try:
            yield
        finally:
            self._our_own = False

    def guard(self, recording: bool) -> None:
        """Whether to give way to the next one, because stepscope has the profiler."""
        self._recording = recording

    def _called(self, module: str, in_use: bool) -> None:
        if not self._our_own:
            self.name = _NAMES.get(module, "jax.profiler")
            if in_use and self._recording:
                self._give_way()
            self._in_use, self.seen = in_use, True


def _is_in_use() -> bool:
    """Whether a profiler was started before anybody looked."""
    if getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False):
        return True
    states = (
        getattr(sys.modules.get(name), "_profile_state", None)
        for name in ("jax._src.profiler", "torch_xla.debug.profiler")
    )
    return any(getattr(state, "profile_session", None) is not None for state in states)


def _wrap(name: str, module: Any) -> None:
    for function, in_use in _FUNCTIONS[name].items():
        original = getattr(module, function, None)
        if original is not None and (name, function) not in _originals:
            _originals[name, function] = original
            setattr(module, function, _wrapped(original, name, in_use))


def _unwrap() -> None:
    for (name, function), original in _originals.items():
        module = sys.modules.get(name)
        if module is not None:
            setattr(module, function, original)
    _originals.clear()


def _wrapped(original: Any, module: str, in_use: bool) -> Any:
    return guard.around(original, before=functools.partial(_tell, module, in_use))


@guard.entry
def _tell(module: str, in_use: bool, *_: object, **__: object) -> None:
    for watcher in list(_watchers):
        watcher._called(module, in_use)
