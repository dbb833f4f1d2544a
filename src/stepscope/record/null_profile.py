"""The profile block that records nothing. Cheap to import, since programs that do not record import it too."""

from __future__ import annotations

TYPE_CHECKING = False  # like typing.TYPE_CHECKING; typing is too slow to import here
if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path
    from types import TracebackType

    from stepscope import Diagnosis


class NullProfile:
    """The result of `profile(enabled=False)`: the interface of a profile block without any effect."""

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
