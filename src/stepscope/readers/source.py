"""The Reader interface, and the input of readers: a trace file's bytes, decompressed, even if damaged, within a budget.

    source = ByteSource(path)        opens a file with a budget of its own; `current()` returns it anywhere below
    budget = current()
    budget.spend("rows", 1000)       counts, and rejects the file above the limit
    budget.tick()                    rejects it after a minute without progress, or when memory runs short

Every rejection is a `TooLargeError` that names the option to raise the limit.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from gzip import BadGzipFile
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import polars as pl
import zstandard
from isal import igzip_lib

from stepscope.errors import NotATraceError, StepscopeError, TooLargeError, UnreadableTraceError, UsageError
from stepscope.files import text_of
from stepscope.readers import remote
from stepscope.trace.metadata import Metadata, TraceWarning
from stepscope.trace.model import StoreWriter
from stepscope.trace.window import StepRange, Window

VARIABLE: Final = "STEPSCOPE_LIMITS"
"""Environment variable with limits in the form of --limit, separated by commas."""
_LOOK_S: Final = 0.25
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_MEMORY_SHARE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: what it bounds, its default, and how to format an amount."""

    what: str
    default: Callable[[], float]
    shown: Callable[[float], str]


def _plain(amount: float) -> str:
    return f"{amount:,.0f}"


def _bytes(amount: float) -> str:
    return f"{amount / 2**30:,.3g} GiB"


def memory_limit() -> float:
    """Return the bytes this process may use: a share of the machine's or, if less, of the control group's memory."""
    found = [float(2**50)]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # not available on every system
        found.append(float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal():
            found.append(float(text))
    return _MEMORY_SHARE * min(found)


LIMITS: Final[Mapping[str, Limit]] = {
    "bytes": Limit("bytes of content, unpacked", lambda: 256 * 2.0**30, _bytes),
    "ratio": Limit("times its packed size", lambda: 150, _plain),  # real traces shrink 10 to 40 times
    "rows": Limit("rows", lambda: 500e6, _plain),
    "values": Limit("lists, dictionaries and named values", lambda: 40e6, _plain),
    "strings": Limit("different texts", lambda: 50e6, _plain),
    "names": Limit("names in the tables of an XLA profile", lambda: 4e6, _plain),
    "lines": Limit(
        "lines of events in an XLA profile", lambda: 50_000, _plain
    ),  # one per thread and stream: usually a few hundred
    "depth": Limit("levels of nesting", lambda: 1000, _plain),
    "idle": Limit("seconds of reading without progress", lambda: 60, _plain),
    "memory": Limit("of memory", memory_limit, _bytes),
}
"""Limits by the name that --limit accepts."""
RATIO_FROM_BYTES: Final = 2**28
"""Unpacked size in bytes below which the ratio is not checked."""


class Budget:
    """The remaining budget for one file; `limits` override the defaults by name."""

    def __init__(self, name: str, limits: Mapping[str, float] | None = None) -> None:
        chosen = limits or {}
        self._name = name
        self._limits = {key: chosen.get(key, limit.default()) for key, limit in LIMITS.items()}
        self._spent = dict.fromkeys(LIMITS, 0)
        self._has_moved = False
        self._progress_s = self._looked_s = time.monotonic()

    @classmethod
    def of(cls, name: str) -> Budget:
        """Create a budget with the environment's limits and make it the `current` one.

        Raises UsageError for unknown limits.
        """
        budget = cls(name, parse_limits(os.environ.get(VARIABLE, "")))
        _current.set(budget)
        return budget

    def spend(self, kind: str, amount: int) -> None:
        """Count `amount` more; raise TooLargeError above the limit. Everything except bytes counts as progress."""
        self._spent[kind] = spent = self._spent[kind] + amount
        if spent > self._limits[kind]:
            self._refuse(kind)
        if kind != "bytes" and amount:
            self._has_moved = True

    def require(self, kind: str, amount: float) -> None:
        """Raise TooLargeError if `amount` is above the limit."""
        if amount > self._limits[kind]:
            self._refuse(kind)

    def unpack(self, size: int, packed: int) -> None:
        """Count `size` unpacked bytes, given that `packed` bytes were read in total so far.

        Raises TooLargeError if the size or the compression ratio is too high.
        """
        self.spend("bytes", size)
        unpacked = self._spent["bytes"]
        if unpacked > RATIO_FROM_BYTES and unpacked > self._limits["ratio"] * packed:
            self._refuse("ratio")
        self.tick()

    def tick(self) -> None:
        """Check elapsed time and memory, at most every quarter of a second.

        Raises TooLargeError if there was no progress or memory is above the limit.
        """
        now = time.monotonic()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        if self._has_moved:
            self._has_moved, self._progress_s = False, now
        self.require("idle", now - self._progress_s)
        self.require("memory", _resident_bytes())

    def _refuse(self, kind: str) -> None:
        limit = LIMITS[kind]
        least = self._limits[kind]
        verb = "needs" if kind in ("memory", "idle") else "unpacks to" if kind == "ratio" else "has"
        raise TooLargeError(
            f"{self._name} {verb} more than {limit.shown(least)}"
            f"{'' if kind == 'memory' else f' {limit.what}'}{' of memory' if kind == 'memory' else ''}, "
            f"which no trace should; --limit {kind}={_written(2 * least)} allows twice as much"
        )


_current: ContextVar[Budget | None] = ContextVar("stepscope_budget", default=None)


def current() -> Budget:
    """Return the budget of the file being read, or a default one."""
    found = _current.get()
    if found is None:
        found = Budget("the file")
        _current.set(found)
    return found


def parse_limits(text: str) -> dict[str, float]:
    """Parse limits such as "rows=1G,memory=40GiB"; raise UsageError for anything else."""
    found = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z]+)=([0-9]{1,15}(?:\.[0-9]{1,6})?)([a-zA-Z]{0,3})", word, re.ASCII)
        if match is None or match[1] not in LIMITS or match[3].lower() not in _UNITS:
            raise UsageError(
                f"{word!r} is not a limit: write NAME=NUMBER, such as rows=1G; names are {', '.join(LIMITS)}"
            )
        found[match[1]] = float(match[2]) * _UNITS[match[3].lower()]
    return found


def _written(amount: float) -> str:
    unit = next((name for name in ("tib", "gib") if amount >= 2**30 and amount % _UNITS[name] == 0), "")
    return f"{amount / _UNITS[unit]:.0f}{unit[:1].upper() + 'iB' if unit else ''}"


def _resident_bytes() -> float:
    """Returns 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError, ValueError, AttributeError):  # Windows has no sysconf
        return 0.0


_MOST_SPARE_THREADS: Final = 3
_MOST_AHEAD: Final = 2
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def spare_threads() -> int:
    """Return how many threads may work beside the caller's: those of Polars (POLARS_MAX_THREADS, or the cores)."""
    return min(_MOST_SPARE_THREADS, pl.thread_pool_size() - 1)


def computed_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item], workers: int
) -> Iterator[tuple[_Item, _Result]]:
    """Yield each item, in order, with what the function returns for it, which `workers` threads compute ahead.

    The caller's thread takes the items, and computes the first one, which is the only one of most files.
    """
    remaining = iter(items)
    for item in itertools.islice(remaining, None if workers == 0 else 1):
        yield item, function(item)
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for item in remaining:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > workers + _MOST_AHEAD:
                yield _first_of(waiting, function)
        while waiting:
            yield _first_of(waiting, function)


def _first_of(
    waiting: deque[tuple[_Item, Future[_Result]]], function: Callable[[_Item], _Result]
) -> tuple[_Item, _Result]:
    """Take the first item and its result; if that is not ready, compute a later one meanwhile."""
    item, result = waiting.popleft()
    if not result.done():
        for place, (later, future) in enumerate(waiting):
            if future.cancel():
                own: Future[_Result] = Future()
                own.set_result(function(later))
                waiting[place] = later, own
                break
    return item, result.result()


class Background:
    """Runs calls in order, in one thread beside the caller's if a core is to spare; leaving it waits for all of them.

    An error of a call is raised by a later `run`, or on leaving.
    """

    _MOST_WAITING: Final = 2

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1) if spare_threads() else None
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Background:
        return self

    def run(self, call: Callable[[], None]) -> None:
        if self._pool is None:
            call()
            return
        self._wait(self._MOST_WAITING)
        self._waiting.append(self._pool.submit(call))

    def _wait(self, fewer_than: int) -> None:
        while len(self._waiting) >= fewer_than:
            self._waiting.popleft().result()

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._wait(1)
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)


Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the compressed bytes read so far and in total, None if unknown."""
ReadResult: TypeAlias = tuple[Metadata, tuple[TraceWarning, ...]]
"""Metadata of a file, and warnings about what was skipped or repaired."""

MAGIC: Final = b"\x1f\x8b"
_INPUT_BYTES: Final = 2**16
_OUTPUT_BYTES: Final = 2**12
"""A decompressor that finds damage loses its output of that call, so at most this much."""
_TRAILER_BYTES: Final = 8
_ISAL_ERROR: Final[type[Exception]] = igzip_lib.IsalError  # type: ignore[assignment] # its stub declares an instance


class Readable(Protocol):
    """A file, or a decompressor's output."""

    def read(self, size: int = -1, /) -> bytes: ...


class Gunzip:
    """A gzip file of any number of members.

    `read` returns everything before a failure first, then raises EOFError for truncated and BadGzipFile for damaged
    data.
    """

    def __init__(self, packed: Readable) -> None:
        self._packed = packed
        self._held = b""
        self._ended = False
        self._decompressor = _decompressor()
        self._failure: Exception | None = None

    def read(self, size: int = _INPUT_BYTES, /) -> bytes:
        """Return up to about `size` decompressed bytes; empty at the end."""
        parts: list[bytes] = []
        wanted = size
        while wanted > 0 and self._failure is None:
            try:
                part = self._next()
            except (EOFError, BadGzipFile) as error:
                self._failure = error
                break
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
        if self._failure is not None and not parts:
            raise self._failure
        return b"".join(parts)

    def _next(self) -> bytes:
        while True:
            if self._decompressor.eof and not self._next_member():
                return b""
            data = self._input() if self._decompressor.needs_input else b""
            if not data and self._decompressor.needs_input:
                raise EOFError("the gzip data ends early")
            try:
                part = self._decompressor.decompress(data, _OUTPUT_BYTES)
            except _ISAL_ERROR as error:
                raise BadGzipFile(str(error)) from error
            if part:
                return part

    def _next_member(self) -> bool:
        """Start the next member, if any; zeros between members are padding."""
        rest = self._decompressor.unused_data.lstrip(b"\0")
        while len(rest) < len(MAGIC) and (more := self._input()):
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(MAGIC):
            raise BadGzipFile("something else follows the compressed data")
        self._held = rest + self._held
        self._decompressor = _decompressor()
        return True

    def _input(self) -> bytes:
        """Hold back the file's last bytes, so that a bad checksum fails only after all content was returned."""
        while len(self._held) <= _TRAILER_BYTES and not self._ended:
            more = self._packed.read(_INPUT_BYTES)
            self._held += more
            self._ended = not more
        given = len(self._held) if self._ended else len(self._held) - _TRAILER_BYTES
        data, self._held = self._held[:given], self._held[given:]
        return data


def _decompressor() -> igzip_lib.IgzipDecompressor:
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)


BLOCK_BYTES: Final = 2 * 2**20
_BLOCKS_AHEAD: Final = 4
_DAMAGE_STEP_BYTES: Final = 2**16

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


class ByteSource:
    """A file, or standard input ("-"), as decompressed blocks; opening it begins a new `current` budget.

    Attributes:
        name: for messages.
        damage: a sentence on how the compressed data is broken; None if it is intact.
        total_bytes: compressed size of the file; None if unknown.
        plain_path: the path of a regular, uncompressed file, which can be opened again; else None.
        progress: called after every block.

    Args:
        state: of a file elsewhere that was looked at just now.
    """

    def __init__(self, path: str | Path, progress: Progress | None = None, state: remote.State | None = None) -> None:
        self.progress: Progress = progress or (lambda done, total: None)
        self.name = "standard input" if str(path) == "-" else name_of(path)
        Budget.of(self.name)
        self.damage: str | None = None
        url = remote.url_of(path)
        self._url, self._state = url, state if url is None or state is not None else remote.state_of(url)
        self._raw = _open(path) if url is None or self._state is None else remote.open_file(url, self._state)
        regular = Path(path) if is_regular_file(path) else None
        self.total_bytes = file_bytes(path) if self._state is None else self._state[0]
        self._peeked = self._first_bytes()
        self._counted = _CountingReader(self._peeked, self._raw)
        self._stream: Readable = self._unpacker()
        self.plain_path = regular if self._stream is self._counted else None
        self._head: bytes | None = None

    def _first_bytes(self) -> bytes:
        """Read enough to detect the compression; raise NotATraceError if the file is empty, or UnreadableTraceError."""
        try:
            first = self._raw.read(4)
        except OSError as error:
            self.close()
            raise UnreadableTraceError(f"cannot read {self.name}: {error.strerror}") from error
        if not first:
            self.close()
            raise NotATraceError(f"{self.name} is empty")
        return first

    def check_unchanged(self) -> None:
        """Raise UnreadableTraceError if a file elsewhere is no longer the one that was opened."""
        if self._url is not None and remote.state_of(self._url, anew=True) != self._state:
            raise UnreadableTraceError(remote.changed(self._url))

    @property
    def read_bytes(self) -> int:
        """Compressed bytes read so far."""
        return self._counted.count

    def blocks(self, *, ahead: bool = False) -> Iterator[bytes]:
        """Yield the content; stop early and set `damage` if the compressed data breaks off. Raises TooLargeError.

        Args:
            ahead: let a thread read and unpack the next blocks meanwhile; the caller must take all of them then.
        """
        budget = current()
        is_large = (self.total_bytes or 0) > BLOCK_BYTES  # not a pipe, which may never end
        use_thread = ahead and is_large and spare_threads() > 0
        for block in self._blocks_ahead() if use_thread else iter(self._next_block, b""):
            budget.unpack(len(block), self.read_bytes)
            yield block
            self.progress(self.read_bytes, self.total_bytes)

    def _blocks_ahead(self) -> Iterator[bytes]:
        with ThreadPoolExecutor(1) as pool:
            following = deque(pool.submit(self._next_block) for _ in range(_BLOCKS_AHEAD))
            while block := following.popleft().result():
                following.append(pool.submit(self._next_block))
                yield block

    def text_blocks(self) -> Iterator[bytes]:
        """Yield the content without a byte-order mark and white space at its beginning."""
        started = False
        for block in self.blocks():
            text = block if started else text_of(block)
            started = started or bool(text)
            yield text

    def peek(self) -> bytes:
        """Return the first decompressed block without consuming it; empty if nothing could be decompressed."""
        if self._head is None:
            self._head = self._read()
        return self._head

    def _next_block(self) -> bytes:
        block, self._head = (self._head, b"") if self._head else (self._read(), b"")
        return block

    def close(self) -> None:
        if self._raw is not getattr(sys.stdin, "buffer", None):
            self._raw.close()

    def _unpacker(self) -> Readable:
        if self._peeked.startswith(MAGIC):
            return Gunzip(self._counted)
        if self._peeked.startswith(ZSTD_MAGIC):
            return zstandard.ZstdDecompressor().stream_reader(self._counted, read_across_frames=True)  # type: ignore[arg-type]
        return self._counted

    def _read(self) -> bytes:
        """Read up to a block, in small steps to keep what precedes damage."""
        parts: list[bytes] = []
        size = 0
        step = _DAMAGE_STEP_BYTES if isinstance(self._stream, zstandard.ZstdDecompressionReader) else BLOCK_BYTES
        while size < BLOCK_BYTES and self.damage is None:
            try:
                part = self._stream.read(step)
            except EOFError:
                self.damage = "the compressed data ends early"
                break
            except (zstandard.ZstdError, OSError) as error:
                self.damage = f"the compressed data is damaged ({error})"
                break
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts)


class _CountingReader(io.RawIOBase):
    def __init__(self, first: bytes, rest: BinaryIO) -> None:
        self._first = first
        self._rest = rest
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        taken = self._first if size < 0 else self._first[:size]
        self._first = self._first[len(taken) :]
        if size < 0 or len(taken) < size:
            taken += self._rest.read(size if size < 0 else size - len(taken))
        self.count += len(taken)
        return taken

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def name_of(path: str | Path) -> str:
    """A trace's path for people."""
    url = remote.url_of(path)
    return str(path) if url is None else remote.shown(url)


def file_bytes(path: str | Path) -> int | None:
    """A file's size, here or elsewhere; None if it is unknown."""
    url = remote.url_of(path)
    try:
        return remote.state_of(url)[0] if url is not None else os.stat(path).st_size if is_regular_file(path) else None
    except (OSError, StepscopeError):
        return None


def is_regular_file(path: str | Path) -> bool:
    """Whether the path is a file that can be read twice, unlike standard input or a pipe."""
    return str(path) != "-" and os.path.isfile(path)


def _open(path: str | Path) -> BinaryIO:
    if str(path) == "-":
        return sys.stdin.buffer
    try:
        if os.path.isdir(path):
            raise NotATraceError(f"{path} is a folder without a trace file, not a trace")
        return open(path, "rb")
    except FileNotFoundError:
        raise UnreadableTraceError(f"there is no file {path}") from None
    except OSError as error:
        raise UnreadableTraceError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # the name contains a null character
        raise UnreadableTraceError(f"cannot read {str(path)!r}: {error}") from error


_DOCUMENT: Final = re.compile(rb"[{\[][\t\n\r -\x7e\x80-\xff]*")
_LOOKED_AT_BYTES: Final = 256


def is_json(head: bytes) -> bool:
    """Whether a file starts like a JSON object or list, without the control characters of binary data."""
    return _DOCUMENT.fullmatch(text_of(head[:4096])[:_LOOKED_AT_BYTES]) is not None


class Reader(NamedTuple):
    """The reader of one format.

    Attributes:
        name: the value of `Metadata.format`.
        recognises: whether a file that starts with these decompressed bytes has this format.
        read: writes the tables of a file, limited to a window or steps if given.
    """

    name: str
    recognises: Callable[[bytes], bool]
    read: Callable[[ByteSource, StoreWriter, Window | None, StepRange | None], ReadResult]
