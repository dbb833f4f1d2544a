"""Traces where they are: files and folders behind a URL, read by fsspec in ranges or as a stream, never copied.

    url_of(path)                          the URL of an argument, also where a Path joined its slashes; None if local
    state_of(url)                         what differs once the content does
    open_file(url, state), children(url)  its bytes; what is in a folder

What fails there is one sentence of an `UnreadableTraceError`. Requests are repeated, a few times, by the libraries
themselves: aiohttp-retry, botocore, and those of the other clouds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, TypeAlias, cast
from urllib.parse import urlsplit, urlunsplit

from stepscope.errors import UnreadableTraceError, UsageError

_LIBRARIES: Final[Mapping[str, str]] = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "ssh": "sshfs",
    "sftp": "sshfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""The library behind fsspec that reads each kind of URL, by its first word."""
_URL: Final = re.compile(rf"({'|'.join(_LIBRARIES)}):/{{1,2}}(?=[^/])", re.IGNORECASE)
_CONTENT: Final = ("ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id", "oid")
_TIMES: Final = ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified")
"""What file systems call the identity of a content, and else the time of its last change."""
_BLOCK_BYTES: Final = 8 << 20
SILENT_S: Final = 60.0
TRIES: Final = 4
_FIRST_PAUSE_S: Final = 0.2
_LISTED_FOR_S: Final = 60.0
"""How long what a folder's list says of its files is used."""

State: TypeAlias = tuple[int | None, tuple[str, ...]]
"""Size in bytes, and what identifies the content; each is None or empty where it is not told."""


def url_of(path: str | Path) -> str | None:
    """The URL that an argument means; None for a path on this machine."""
    text = path.as_posix() if isinstance(path, Path) else path
    found = _URL.match(text)
    if found is None or os.path.exists(path):
        return None
    return f"{found[1].lower()}://{text[found.end() :]}"


class RemotePath(type(Path())):  # type: ignore[misc]
    """The path of a URL, which is printed as one."""

    def __str__(self) -> str:
        text = super().__str__()
        return url_of(text) or text


def shown(url: str) -> str:
    """The URL without what may be secret: user and password, and what follows a question mark."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    is_login = parts.scheme in ("ssh", "sftp", "abfs", "abfss", "az")  # their names are no secrets
    named = f"{user.partition(':')[0]}{at}{host}" if is_login else host
    return urlunsplit((parts.scheme, named, parts.path, "", ""))


def state_of(url: str, *, anew: bool = False) -> State:
    """Look at a file.

    Args:
        anew: ask for it again, though it was listed with its folder.

    Raises UnreadableTraceError.
    """
    system, place = _system(url)
    with _told(url):
        if anew:
            system.invalidate_cache(system._parent(place))
        return _state(system.info(place))


def key_of(url: str, version: str, state: State) -> str | None:
    """A key of the content for caches; None if nothing tells whether the content has changed."""
    if not state[1]:
        return None
    return hashlib.sha256(repr((version, url, state)).encode("utf-8", "surrogateescape")).hexdigest()


def open_file(url: str, state: State) -> BinaryIO:
    """The bytes of a file, which has been looked at; raises UnreadableTraceError, also where it ends early."""
    system, place = _system(url)
    is_stream = url.startswith("http")  # many servers have no ranges
    with _told(url):
        ways = {"block_size": 0, "size": state[0]} if is_stream else _IN_RANGES
        found = system.open(place, "rb", **ways)
    # a server may pack what it sends, so that its length differs
    size = None if is_stream and getattr(found, "r", None) and "Content-Encoding" in found.r.headers else state[0]
    return cast(BinaryIO, io.BufferedReader(_Remote(url, found, size), 1 << 20))


_IN_RANGES: Final = {"block_size": _BLOCK_BYTES, "cache_type": "readahead"}


class _Remote(io.RawIOBase):
    """What fsspec reads, whose end is where the file's size says; its errors are no OSError, which means damage."""

    def __init__(self, url: str, file: Any, size: int | None) -> None:
        self._url, self._file, self._size = url, file, size
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _told(self._url):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._count += len(data)
        if not data and self._size is not None and self._count != self._size:
            raise UnreadableTraceError(
                f"{shown(self._url)} was cut: {self._count:,} of {self._size:,} bytes were read; try again"
            )
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(Exception):
                self._file.close()
        super().close()


def children(url: str) -> list[tuple[Path, bool]]:
    """What is in a folder, and whether each is a folder itself; nothing if it is a file, or does not exist.

    Raises UnreadableTraceError if the folder cannot be listed.
    """
    system, place = _system(url)
    with _told(url):
        try:
            found = system.ls(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
    own, names = PurePosixPath(place), [str(each["name"]).partition("?")[0] for each in found]
    return sorted(
        (RemotePath(f"{url.rstrip('/')}/{PurePosixPath(name).name}"), each["type"] == "directory")
        for name, each in zip(names, found, strict=True)
        if PurePosixPath(name).parent == own
    )


def _state(about: Mapping[str, Any]) -> State:
    for names in (_CONTENT, _TIMES):
        known = tuple(f"{name}={about[name]}" for name in names if about.get(name))
        if known:
            break
    size = about.get("size")
    return size if isinstance(size, int) else None, known


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL, one for each in a process, and the place in it.

    Raises:
        UsageError: what reads such URLs is not installed.
        UnreadableTraceError: it cannot be reached.
    """
    scheme = url.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
        importlib.import_module(_LIBRARIES[scheme])
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// is read by {_LIBRARIES[scheme]}, which is not installed: pip install 'stepscope[cloud]'"
        ) from error
    logging.getLogger(_LIBRARIES[scheme]).setLevel(logging.CRITICAL)  # what fails is said once, by the error
    options: dict[str, Any] = {"listings_expiry_time": _LISTED_FOR_S}
    if scheme in ("ssh", "sftp"):
        fsspec.register_implementation(scheme, "sshfs.spec.SSHFileSystem", clobber=True)
        options = {"known_hosts": (), "timeout": SILENT_S}  # those of the user, as for ssh
    elif scheme in ("http", "https"):
        options = _http_options()
    with _told(url):
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url, **options))


def _http_options() -> dict[str, Any]:
    import aiohttp

    patience = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    return {
        # nothing is unpacked but by `ByteSource`, which knows when it is too much
        "client_kwargs": {"timeout": patience, "auto_decompress": False, "headers": {"Accept-Encoding": "identity"}},
        "get_client": _patient_client,
    }


async def _patient_client(**options: Any) -> Any:
    """aiohttp's client, which asks again where a server is overloaded, if aiohttp-retry is installed."""
    try:
        from aiohttp_retry import ExponentialRetry, RetryClient
    except ImportError:
        import aiohttp

        return aiohttp.ClientSession(**options)
    retries = ExponentialRetry(TRIES, start_timeout=_FIRST_PAUSE_S, statuses={429}, retry_all_server_errors=True)
    return RetryClient(retry_options=retries, **options)


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn whatever a library raises into the sentence for the user."""
    try:
        yield
    except UnreadableTraceError:
        raise
    except Exception as error:  # each library has its own
        raise UnreadableTraceError(_sentence(url, error)) from error


def _sentence(url: str, error: BaseException) -> str:
    """What went wrong, by the names of errors, since the libraries share no classes."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:  # fsspec's, where asking failed
        error = error.__cause__
    name, text = shown(url), str(getattr(error, "message", None) or error)  # aiohttp's text has the whole URL, too
    reason = " ".join(text.replace(url, name).split()) or type(error).__name__
    kinds = {each.__name__ for each in type(error).__mro__}
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    if "TooManyRedirects" in kinds:
        return f"{name} cannot be read: it is redirected without end"
    if kinds & {"FileExpired", "ResourceModifiedError"}:
        return changed(url)
    if kinds & _NO_CREDENTIALS or status == 401:
        return f"{name} cannot be read: no valid credentials for it were found ({reason})"
    if isinstance(error, PermissionError) or status == 403:
        return f"{name} cannot be read: access is denied ({reason})"
    if isinstance(error, FileNotFoundError) or "SFTPNoSuchFile" in kinds or status == 404:
        return f"there is no file {name}"
    if isinstance(error, TimeoutError) or kinds & {"FSTimeoutError", "ReadTimeoutError", "ConnectTimeoutError"}:
        return f"{name} cannot be read: the server sent nothing for {SILENT_S:.0f} s"
    if kinds & {"ClientPayloadError", "ServerDisconnectedError", "IncompleteReadError", "ConnectionLost"}:
        return f"{name} was cut: the connection ended early; try again"
    return f"{name} cannot be read: {reason if status is None else f'the server answers with status {status}'}"


def changed(url: str) -> str:
    return f"{shown(url)} changed while it was read: read it again"


_NO_CREDENTIALS: Final = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError",
    "GatedRepoError", "PermissionDenied",
})  # fmt: skip
