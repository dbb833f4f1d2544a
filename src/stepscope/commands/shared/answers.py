"""Kept answers: a command that only reads prints again what it printed, as long as nothing that it depends on changed.

An answer is kept under a hash of what is known beforehand: the words, the folder, the terminal, the environment
variables that stepscope reads, and stepscope itself. With it stands what showed only meanwhile: each file that was
opened, each folder that was listed, and each path that was looked for, with its state before the command. Python tells
of the first two (audit events); looking is `os.stat`, which is watched for the length of the command.

    ROOT/answers/<key>    the checksum of the rest, a line of JSON (`_Answer` without contents), the contents
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from stepscope import __version__
from stepscope.commands.shared import output
from stepscope.files import LIBRARIES, PACKAGE, cache_folder, keep_sealed, kept_sealed, package_state

PREFIXES: Final = ("STEPSCOPE_", "PYTORCH_", "POLARS_", "PYTHON", "LC_", "XDG_", "CUDA_", "PT_")
NAMES: Final = ("COLUMNS", "HOME", "LANG", "LOGNAME", "NO_COLOR", "TERM", "TMPDIR", "TZ", "USER", "LOCAL_WORLD_SIZE")
"""Environment variables that an answer may depend on, by their beginnings and whole names."""

_LARGEST_BYTES: Final = 32 << 20
_MOST_BYTES: Final = 256 << 20  # of all answers together
_MOST_CHECKS: Final = 20_000
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed this recently may change again without a new time."""
_OPENED, _LISTED, _LOOKED_FOR = range(3)
_ELSEWHERE: Final = ("/proc/", "/sys/", "/dev/")
_Check = tuple[int, str, tuple[int, ...]]


@dataclass(frozen=True)
class _Answer:
    checks: list[_Check]
    code: int
    errors: bytes  # printed on standard error
    printed: bytes  # on standard output
    files: list[tuple[str, bytes]]

    def packed(self) -> bytes:
        contents = [self.errors, self.printed, *(data for _, data in self.files)]
        head = [self.checks, self.code, [target for target, _ in self.files], [len(each) for each in contents]]
        return b"".join([json.dumps(head).encode(), b"\n", *contents])

    @classmethod
    def unpacked(cls, data: bytes) -> _Answer:
        head, _, rest = data.partition(b"\n")
        checks, code, targets, sizes = json.loads(head)
        ends = [0, *accumulate(sizes)]
        errors, printed, *files = (rest[first:end] for first, end in pairwise(ends))
        checks = [(kind, path, tuple(state)) for kind, path, state in checks]
        return cls(checks, code, errors, printed, list(zip(targets, files, strict=True)))


def answered(words: Sequence[str], run: Callable[[], int]) -> int:
    """Return the exit code of `run`, a command with these words, which does not run if its kept answer holds."""
    place = _place(words)
    kept = None if place is None else _kept(place)
    if place is None or kept is not None:
        return run() if kept is None else _again(kept)
    if _hooked:  # an earlier command may have read something that this process remembers
        return run()
    watch = _Watch(words)
    with watch.watching():
        code = run()
    if code in (0, 1):
        answer = watch.answer(code)
        if watch.is_answerable:
            _keep(place, answer)
    return code


def forget() -> int:
    """Remove all kept answers, what earlier diagnoses found, and summaries of ranks; return how many there were."""
    from stepscope.diagnosis import earlier, rank_summary

    removed = 0
    for folder in (_root(), earlier.folder(), rank_summary.folder()):
        with contextlib.suppress(OSError):
            for each in list(folder.iterdir()):
                with contextlib.suppress(OSError):
                    each.unlink()
                    removed += 1
    return removed


def _root() -> Path:
    return cache_folder() / "answers"


def _place(words: Sequence[str]) -> Path | None:
    """Where the answer to these words is kept; None if it cannot be known what it depends on."""
    if os.name != "posix" or sys.version_info < (3, 11):  # their paths are looked for without os.stat
        return None
    reads_input = any(word == "-" and not before.startswith("--") for before, word in pairwise(["", *words]))
    if reads_input or {"--no-cache", "--help", "-h"} & set(words):
        return None
    environment = sorted(
        (name, value) for name, value in os.environ.items() if name in NAMES or name.startswith(PREFIXES)
    )
    terminal = [sys.stdout.isatty(), sys.stderr.isatty(), output.width(), output.colour(), sys.stdout.encoding]
    known = [
        list(words),
        os.getcwd(),
        terminal,
        environment,
        platform.node(),
        sys.version,
        __version__,
        package_state(),
    ]
    return _root() / hashlib.sha256(json.dumps(known).encode()).hexdigest()


_Checks = dict[tuple[int, str], tuple[int, ...]]


class _Watch:
    """What a command opens, lists and looks for, what it prints, and the files that it writes."""

    def __init__(self, words: Sequence[str]) -> None:
        self.is_answerable = True
        self._named = tuple(os.path.abspath(word) for word in words)
        own = (PACKAGE, *LIBRARIES, str(_root().parent))
        self._passed_over = (*_ELSEWHERE, *(os.path.join(each, "") for each in own))
        self._checks: _Checks = {}
        self._made: set[str] = set()
        self._began_ns = time.time_ns()
        self._printed, self._errors = _Copied(sys.stdout), _Copied(sys.stderr)
        self._files: list[tuple[str, bytes]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if not _hooked:
            sys.addaudithook(_heard)  # for good: there is no way to remove one
            _hooked.append(True)
        looks = os.stat, os.lstat
        _watching.append(self)
        output.written.append(self._note_written)
        try:
            os.stat, os.lstat = (self._noting(look) for look in looks)
            sys.stdout, sys.stderr = self._printed, self._errors
            yield
        finally:
            os.stat, os.lstat = looks
            sys.stdout, sys.stderr = self._printed.stream, self._errors.stream
            output.written.remove(self._note_written)
            _watching.remove(self)

    def answer(self, code: int) -> _Answer:
        checks = [(kind, path, state) for (kind, path), state in self._checks.items() if not self._is_made(path)]
        recent = self._began_ns - _SETTLED_NS
        changing = any(kind == _OPENED and max(state[1:3], default=0) > recent for kind, _, state in checks)
        is_small = max(self._printed.bytes, self._errors.bytes) <= _LARGEST_BYTES and len(checks) <= _MOST_CHECKS
        self.is_answerable &= is_small and not changing
        errors = b"".join(each for each in self._errors.pieces if b"\r" not in each and b"\x1b" not in each)
        return _Answer(checks, code, errors, b"".join(self._printed.pieces), self._files)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what an audit event tells."""
        if event == "open":
            path, mode, flags = arguments
            writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else set(mode) & set("wax+")
            self._note_made(path) if writes else self._note(_OPENED, path)
        elif event in ("os.listdir", "os.scandir"):
            self._note(_LISTED, arguments[0] or ".")
        elif event == "sqlite3.connect":
            self._note(_OPENED, str(arguments[0]).removeprefix("file:").partition("?")[0])
        elif event == "os.mkdir":
            self._note_made(arguments[0])
        elif event == "os.rename":
            self._note_made(arguments[1])
        elif event in _OUTSIDE:
            self.is_answerable = False

    def _note(self, kind: int, path: object) -> None:
        name = _absolute(path)
        if name is None or (kind, name) in self._checks:
            return
        if name.startswith(self._passed_over) and not any(name.startswith(each) for each in self._named):
            return
        self._checks[kind, name] = _state(kind, name)

    def _note_made(self, path: object) -> None:
        if (name := _absolute(path)) is not None:
            self._made.add(name)

    def _is_made(self, path: str) -> bool:
        return path in self._made or any(path.startswith(os.path.join(each, "")) for each in self._made)

    def _note_written(self, target: str, data: object) -> None:
        self._note_made(target)
        self._note_made(os.path.realpath(target))
        if isinstance(data, bytes):
            self._files.append((target, data))
        else:
            self.is_answerable = False

    def _noting(self, look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def noted(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
            if named.get("dir_fd") is None:
                self._note(_LOOKED_FOR, path)
            return look(path, *arguments, **named)

        return noted


_watching: list[_Watch] = []
_hooked: list[bool] = []
_OUTSIDE: Final = frozenset({
    "socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "os.forkpty", "builtins.input",
})  # fmt: skip
"""What may bring something that files do not show."""


_thread = threading.local()


def _heard(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or getattr(_thread, "is_noting", False):  # noting lists folders, too
        return
    _thread.is_noting = True
    try:
        for watch in _watching:
            watch.hear(event, arguments)
    finally:
        _thread.is_noting = False


def _absolute(path: object) -> str | None:
    """A path's absolute name; None for what is no path, such as a file's number."""
    try:
        return os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
    except TypeError:
        return None


_stat: Final = os.stat


def _state(kind: int, name: str) -> tuple[int, ...]:
    """What must stay the same: of a file its times, size and identity, of a folder its names, or that it is one."""
    try:
        if kind == _LISTED:
            names = "\0".join(sorted(os.listdir(name)))
            return (int.from_bytes(hashlib.sha256(names.encode("utf-8", "surrogateescape")).digest()[:7], "big"),)
        found = _stat(name)
    except OSError as error:
        return (-(error.errno or 1),)
    if stat.S_ISDIR(found.st_mode):
        return (0,)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


class _Copied:
    """A text stream that also keeps what is written to it, unless that is too much."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.pieces: list[bytes] = []
        self.bytes = 0
        if hasattr(stream, "buffer"):
            self.buffer = _CopiedBytes(stream.buffer, self)

    def write(self, text: str) -> int:
        self.keep(text.encode(self.stream.encoding or "utf-8", self.stream.errors or "strict"))
        return int(self.stream.write(text))

    def keep(self, data: bytes) -> None:
        self.bytes += len(data)
        if self.bytes <= _LARGEST_BYTES:
            self.pieces.append(bytes(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _CopiedBytes:
    def __init__(self, stream: Any, copied: _Copied) -> None:
        self._stream, self._copied = stream, copied

    def write(self, data: bytes) -> int:
        self._copied.keep(data)
        return int(self._stream.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _kept(place: Path) -> _Answer | None:
    """The answer in a file, if nothing that it depends on has changed."""
    data = kept_sealed(place)
    if data is None:
        return None
    answer = _Answer.unpacked(data)
    return answer if all(_state(kind, path) == state for kind, path, state in answer.checks) else None


def _again(answer: _Answer) -> int:
    for target, data in answer.files:
        output.write_atomically(Path(target), data)
    output.print_again(answer.errors, sys.stderr)
    output.print_again(answer.printed, sys.stdout)
    return answer.code


def _keep(place: Path, answer: _Answer) -> None:
    data = answer.packed()
    if len(data) <= _LARGEST_BYTES:
        keep_sealed(place, data, _MOST_BYTES)
