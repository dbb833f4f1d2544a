"""An iterator that works ahead in a thread, and leaves none behind."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


class ThreadedIterator(Iterator[Any]):
    """The items of another iterator, taken from it in a thread up to `ahead` items before they are asked for.

    An exception comes at its place in the order, with its traceback. `close` ends the thread: it waits for the item
    that is being made.

    Args:
        items: taken from in the thread only, from the first on.
        ahead: how many items may wait, at least 1.
        prepare: applied to each item in the thread.
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
        """Whether the next item, or the end, is there without waiting."""
        with self._changed:
            return bool(self._ready) or self._ended

    def close(self) -> None:
        """End the thread, and forget what it has loaded."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            while self._has_room():
                item = self._prepare(next(self._items))
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
                del item
        except StopIteration:
            pass
        except BaseException as raised:
            error = raised
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until one more may be loaded; False once nobody wants any."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed
