"""Work in the program's process that its own modes of torch and tensor subclasses do not see."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any, Final


class _Unseen(threading.local):
    """A block in which this thread's calls of torch reach no `__torch_function__` and no `__torch_dispatch__`."""

    def __init__(self) -> None:
        self._entered: list[list[Any]] = []

    def __enter__(self) -> None:
        compiled: Any = getattr(sys.modules.get("torch"), "_C", None)
        kinds = (getattr(compiled, name, None) for name in ("DisableTorchFunction", "_DisableTorchDispatch"))
        guards = [kind() for kind in kinds if kind is not None]
        for each in guards:
            each.__enter__()
        self._entered.append(guards)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for each in reversed(self._entered.pop()):
            each.__exit__(kind, error, traceback)


unseen: Final = _Unseen()
