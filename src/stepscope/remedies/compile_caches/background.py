"""Evicting beside the training: a thread that looks whether a compiler has written, and evicts after it has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from stepscope.remedies.compile_caches.entries import entries_of
from stepscope.remedies.compile_caches.eviction import RECENTLY_S, Eviction, EvictionBusy, evict, refuse_other_folders
from stepscope.remedies.compile_caches.places import CompileCache, find_caches

LOOK_S: Final = 5.0
_PAUSE_PER_LOOK: Final = 20.0
"""Looking at a large cache takes at most a twentieth of the time."""


class BackgroundEviction:
    """Keeps caches below their limits while it runs; made by `evict_in_background`, used in a `with` block.

    Attributes:
        evictions: what was evicted so far, with the cache each.
    """

    def __init__(
        self,
        caches: Sequence[tuple[CompileCache, int]],
        *,
        look_s: float = LOOK_S,
        recently_s: float = RECENTLY_S,
        tell: Callable[[CompileCache, Eviction], None] | None = None,
    ) -> None:
        for cache, _ in caches:
            refuse_other_folders(cache)
        self._caches = caches
        self._look_s, self._recently_s = look_s, recently_s
        self._tell = tell
        self._seen: dict[CompileCache, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.run, name="stepscope-cache-eviction", daemon=True)
        self.evictions: list[tuple[CompileCache, Eviction]] = []

    def __enter__(self) -> BackgroundEviction:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Have `run` return at its next look."""
        self._stop.set()

    def run(self) -> None:
        """Look again and again until `stop` is called; in the calling thread."""
        while not self._stop.is_set():
            begun = time.monotonic()
            self.look()
            spent = time.monotonic() - begun
            self._stop.wait(max(self._look_s, _PAUSE_PER_LOOK * spent))

    def look(self) -> None:
        """Evict from each cache that was written since the last look, and from one that was above its limit then."""
        for cache, limit in self._caches:
            entries = entries_of(cache)
            state = (sum(entry.bytes for entry in entries), max((entry.made_unix for entry in entries), default=0.0))
            if self._seen.get(cache) == state:
                continue
            with contextlib.suppress(
                EvictionBusy, OSError, ValueError
            ):  # the other one evicts for all, or it is tried again
                eviction = evict(cache, limit, recently_s=self._recently_s)
                if eviction.removed:
                    self.evictions.append((cache, eviction))
                    if self._tell is not None:
                        self._tell(cache, eviction)
                elif eviction.is_below:
                    self._seen[cache] = state


def evict_in_background(
    limit_bytes: int | None = None,
    caches: Sequence[CompileCache] | None = None,
    *,
    look_s: float = LOOK_S,
) -> BackgroundEviction:
    """A context in which a thread keeps compile caches below a limit, evicting after each write.

    Launches and compilations do not wait for it. As many processes may do so as like: one evicts at a time.

    Args:
        limit_bytes: for each cache; its own limit where it is None.
        caches: those of this process's environment where it is None.
        look_s: seconds between two looks; a cache so large that looking takes long is looked at less often.

    Raises:
        ValueError: a limit that is not above 0, none at all for any cache, or a folder that is surely no cache.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise ValueError(f"a cache's limit must be above 0 bytes, not {limit_bytes}")
    found = find_caches() if caches is None else caches
    limited = [(cache, limit) for cache in found if (limit := limit_bytes or cache.limit_bytes) is not None]
    if found and not limited:
        raise ValueError("no cache has a limit: say how many bytes each may hold")
    return BackgroundEviction(limited, look_s=look_s)
