"""The profile block that records nothing. Cheap to import: it is in programs that do not record, too."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing's, which this module is too cheap to import
if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path
    from types import TracebackType

    from stepscope import Diagnosis


class NullProfile:
    """What `profile(enabled=False)` gives: the interface of a profile block, and nothing behind it."""

    __slots__ = ()

    enabled = False
    is_recording = False
    step_number = 0
    problem: str | None = None
    traces: tuple[Path, ...] = ()

    def __enter__(self) -> NullProfile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def start(self) -> None: ...

    def step(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str | PathLike[str], use_python_export: bool = False) -> None: ...

    def diagnosis(self) -> Diagnosis | None:
        return None
