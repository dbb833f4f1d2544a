"""Write a report of an internal error for the user to send: versions, command and traceback, nothing from a trace.

It has only cheap imports, since it also runs inside the user's program.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BEGINNING: Final = "stepscope-fault-"
_ENDING: Final = ".txt"
_SHOWN: Final = ("numpy", "polars", "msgspec", "torch", "jax")


def write_report(error: BaseException, *, command: Sequence[str], doing: str) -> Path | None:
    """Write the report into a file of its own, readable for its owner only; None if that fails.

    An error's message may quote a trace or a program, so only the error's class is kept; the command's options are kept
    without their values.

    Args:
        command: the words of the command line.
        doing: where the error occurred.
    """
    with contextlib.suppress(Exception):
        handle, path = _new_file()
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_text(error, command, doing))
        return Path(path)
    return None


def kept_sentence(error: BaseException, command: str, doing: str) -> str:
    """Write the report, and say so in words that follow the name of what failed."""
    kept = write_report(error, command=["stepscope", command], doing=doing)
    return f"a bug in stepscope ({type(error).__name__})" + (f": please send {kept}" if kept else "")


def _new_file() -> tuple[int, str]:
    try:
        from stepscope.files import cache_folder

        folder = os.path.join(cache_folder(), "faults")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return tempfile.mkstemp(_ENDING, _BEGINNING, folder)
    except (ImportError, OSError):
        return tempfile.mkstemp(_ENDING, _BEGINNING)


def _text(error: BaseException, command: Sequence[str], doing: str) -> str:
    from stepscope import __version__

    versions = {"stepscope": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _SHOWN:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            versions[name] = str(version)
    lines = [f"{name} {version}" for name, version in versions.items()]
    lines.append(f"command: {' '.join(_hidden(word) for word in command)}")
    lines.append(f"in: {doing}")
    return "\n".join([*lines, "", *_traceback(error)]) + "\n"


def _hidden(word: str) -> str:
    if word.startswith("-"):
        return word.partition("=")[0]
    return os.path.basename(word) if word.endswith("stepscope") or word.isidentifier() else "..."


def _traceback(error: BaseException) -> list[str]:
    """Return frames without source lines and folders, and the classes of the errors, including causes."""
    lines: list[str] = []
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        for frame in traceback.extract_tb(each.__traceback__):
            lines.append(f"  {_place(frame.filename)}:{frame.lineno} in {frame.name}")
        lines.append(f"{type(each).__module__}.{type(each).__qualname__}")
        each = each.__cause__ or each.__context__
    return lines


def _place(file: str) -> str:
    """Return a path inside its package for our files and installed packages, and only the file name for others."""
    if file.startswith(_PACKAGE):
        return file[len(_PACKAGE) :]
    _, marker, inside = file.rpartition(f"site-packages{os.sep}")
    return inside if marker else os.path.basename(file)
