"""What `profile(enabled=False)` gives: the interface of a profile block, and nothing behind it."""

from __future__ import annotations

TYPE_CHECKING = False  # as typing's, which this module is too cheap to import
if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path
    from types import TracebackType

    from stepscope.diagnosis import Diagnosis


class NullProfile:
    """Records nothing; every step costs one empty call."""

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

    def start(self) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def export_chrome_trace(self, path: str | PathLike[str], use_python_export: bool = False) -> None:
        """Do nothing."""

    def diagnosis(self) -> Diagnosis | None:
        """Nothing was recorded: None."""
        return None
