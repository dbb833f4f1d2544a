"""Files that are written whole or not at all, and what is for its owner alone: what all of stepscope that writes uses.

What is recorded holds command lines, environments and code: its files have the mode 0600 and its folders 0700, whatever
the user's mask is, which is never changed because it is the whole process's. Where root writes for another user, as in
a container, what it writes goes to the owner of the folder.

Imports only the standard library: the processes of the user's program use it too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

_LONGEST_BYTES: Final = 200
"""Of the name that is kept in that of the file which is being written: a name may have 255."""


@contextlib.contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` when the block ends well and leaves nothing where it does not.

    A file that is replaced hands its permissions on; the new one is never readable for more users than the old.

    Args:
        private: for its owner alone, whatever there was before.

    Raises:
        OSError: it cannot be written.
    """
    permissions = 0o600 if private else _permissions(path)
    short = os.fsdecode(os.fsencode(path.name)[:_LONGEST_BYTES])
    temporary = path.with_name(f".{short}-{os.urandom(4).hex()}.partial")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if permissions is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        if permissions is not None:
            os.chmod(temporary, permissions)
        if private:
            _hand_over(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def private_folder(path: Path, *, new: bool = False, tighten: bool = True) -> Path:
    """Make a folder, and those above it that are missing, for the owner alone.

    Args:
        new: whether it must not be there yet.
        tighten: take from others what they may do in one that is there and is this user's; False for a folder that the
            user named, which may hold other things.

    Returns:
        The path.

    Raises:
        FileExistsError: it is there, and `new`.
        OSError: it cannot be made.
    """
    missing = [path, *path.parents]
    missing = missing[: next((place for place, each in enumerate(missing) if each.exists()), len(missing))]
    if not missing and (new or not path.is_dir()):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    for each in reversed(missing):
        try:
            each.mkdir(0o700)
        except FileExistsError:  # another process was first
            if new and each == path:
                raise
        else:
            _hand_over(each)
    if tighten and not missing:
        make_private(path)
    return path


def private_file(path: Path) -> Path:
    """Make an empty file for its owner alone, or keep what is there: for what others write, such as SQLite, by name.

    SQLite gives the files that it makes beside a database that one's mode.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))
    except FileExistsError:
        make_private(path)
    else:
        _hand_over(path)
    return path


def make_private(path: Path) -> None:
    """Take from others what they may do with a file or folder of this user's; somebody else's stays as it is."""
    with contextlib.suppress(OSError):
        state = path.stat()
        if stat.S_IMODE(state.st_mode) & 0o077 and state.st_uid == getattr(os, "getuid", lambda: -1)():
            path.chmod(stat.S_IMODE(state.st_mode) & 0o700)


def _hand_over(path: Path) -> None:
    """Give what root has just made to the owner of the folder."""
    if getattr(os, "geteuid", lambda: -1)() == 0:
        with contextlib.suppress(OSError):
            owner = path.parent.stat()
            if owner.st_uid != 0:
                os.chown(path, owner.st_uid, owner.st_gid)


def _permissions(path: Path) -> int | None:
    """Those of the file that is replaced; None where there is none, and the user's mask decides."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return None
