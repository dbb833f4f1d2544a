"""Replace the host's memory allocator: find jemalloc or tcmalloc on the system and preload it.

    stepscope run --allocator jemalloc train.py

    import os, subprocess, sys
    from stepscope.remedies import allocator_environment
    subprocess.run([sys.executable, "train.py"], env={**os.environ, **allocator_environment("jemalloc", os.environ)})

The C library returns large blocks to the operating system when they are freed, and page-faults them in again for the
next tensor of that size. These allocators keep them. Nothing here needs torch.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

ALLOCATORS: Final = ("jemalloc", "tcmalloc")
_FILES: Final = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so.1", "libjemalloc.so"),
    # The minimal build lacks the heap profiler and so needs no stack-walking library.
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_minimal.so", "libtcmalloc.so"),
}
_MAC_FILES: Final = {
    "jemalloc": ("libjemalloc.2.dylib", "libjemalloc.dylib"),
    "tcmalloc": ("libtcmalloc_minimal.4.dylib", "libtcmalloc_minimal.dylib", "libtcmalloc.dylib"),
}
_SETTINGS: Final[dict[str, dict[str, str]]] = {
    # By default, jemalloc returns blocks of 8 MiB and more at once (oversize_threshold), and others after 10 seconds:
    # for the tensors of a step that is no better than the C library.
    "jemalloc": {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"},
    "tcmalloc": {},
}
_PACKAGES: Final = {
    "apt-get": ("apt install", "libjemalloc2", "libtcmalloc-minimal4"),
    "dnf": ("dnf install", "jemalloc", "gperftools-libs"),
    "zypper": ("zypper install", "libjemalloc2", "libtcmalloc4"),
    "pacman": ("pacman -S", "jemalloc", "gperftools"),
    "apk": ("apk add", "jemalloc", "gperftools"),
    "brew": ("brew install", "jemalloc", "gperftools"),
    "conda": ("conda install -c conda-forge", "jemalloc", "gperftools"),
}
"""Package manager -> (its command, its package of jemalloc, its package of tcmalloc)."""
_USUAL: Final = ("apt-get", "dnf", "conda", "brew")
_OTHERS: Final = re.compile(r"lib(?:jemalloc|tcmalloc|mimalloc|snmalloc|rpmalloc|hoard|scudo)", re.ASCII)
"""Libraries that replace malloc; two of them in one process contend for it."""
_LONGEST_MAPS: Final = 16 * 2**20
_LDCONFIG_S: Final = 10.0
_PROBE_S: Final = 30.0


def find_allocator(name: str, folders: Iterable[str | os.PathLike[str]] | None = None) -> Path | None:
    """Find an allocator's library in a form that programs of this Python can load; None if there is none.

    Args:
        name: "jemalloc" or "tcmalloc".
        folders: where to look; by default LD_LIBRARY_PATH, the environment of conda or of this Python, what ldconfig
            knows, and the folders where systems and Homebrew keep libraries.

    Raises:
        ValueError: for another name.
    """
    _check(name)
    files = (_MAC_FILES if sys.platform == "darwin" else _FILES)[name]
    places = _folders() if folders is None else map(Path, folders)
    paths = (folder / file for folder in places for file in files)
    asked = _known_to_system(name, files) if folders is None else ()
    return next((path for path in chain(paths, asked) if _loadable(path)), None)


def allocator_environment(name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that make a program use the allocator.

    Another allocator in LD_PRELOAD is removed; other libraries there stay, and so do the user's own settings
    (MALLOC_CONF).

    Args:
        name: "jemalloc" or "tcmalloc".
        environ: the environment that the program would have without the allocator.

    Raises:
        ValueError: for another name.
        RuntimeError: the library is not installed (the message says how to install it), or the system cannot preload
            libraries.
    """
    _check(name)
    if os.name != "posix":
        raise RuntimeError(f"{name} can be loaded into a program on Linux and macOS, not on this system")
    library = find_allocator(name)
    if library is None:
        raise RuntimeError(f"{name} was not found on this system; {how_to_install(name)}")
    variable = "DYLD_INSERT_LIBRARIES" if sys.platform == "darwin" else "LD_PRELOAD"
    # The Linux loader accepts spaces as separators, too; that of macOS only colons.
    before = re.split(r":" if sys.platform == "darwin" else r"[:\s]", environ.get(variable, ""))
    kept = [entry for entry in before if entry and not _OTHERS.match(os.path.basename(entry))]
    settings = {key: value for key, value in _SETTINGS[name].items() if key not in environ}
    return {variable: ":".join([str(library), *kept]), **settings}


def how_to_install(name: str) -> str:
    """Say how to install an allocator's library, with the package managers present or else the usual ones.

    Raises ValueError for any name but "jemalloc" and "tcmalloc".
    """
    _check(name)
    place = 1 + ALLOCATORS.index(name)
    commands = {manager: f"{words[0]} {words[place]}" for manager, words in _PACKAGES.items()}
    here = [command for manager, command in commands.items() if shutil.which(manager)]
    return f"install it, with {' or '.join(here or [commands[manager] for manager in _USUAL])}"


def loaded_allocator(process: int | str = "self") -> str | None:
    """Which allocator a process has actually loaded: "jemalloc", "tcmalloc", or None.

    Args:
        process: its process id; by default this process.

    Raises:
        OSError: its memory map cannot be read: it is another user's, has ended, or the system has no /proc.
    """
    with open(f"/proc/{process}/maps", "rb") as file:
        text = file.read(_LONGEST_MAPS).decode("utf-8", "replace")
    return next((name for name in ALLOCATORS if re.search(rf"/lib{name}[^/]*$", text, re.MULTILINE)), None)


def preload_obstacle(program: str | os.PathLike[str]) -> str | None:
    """Why a program would silently start without a preloaded library: a sentence, or None if no reason was found.

    Args:
        program: the path of the executable. For a script, pass its interpreter: the script's first line is not read.
    """
    path = Path(program)
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            head = file.read(_LONGEST_HEADERS)
    except OSError:
        return None
    if mode & (stat.S_ISUID | stat.S_ISGID):
        return f"{path} runs with another user's rights (setuid), and the system then preloads no library"
    if sys.platform == "darwin" and str(path).startswith(("/usr/bin/", "/bin/", "/usr/sbin/", "/sbin/", "/System/")):
        return f"{path} is protected by macOS, which preloads no library into it; use your own Python"
    if _is_static(head):
        return f"{path} is linked statically, and loads no library at all"
    return None


def loading_problem(name: str, variables: Mapping[str, str]) -> str | None:
    """Why this Python does not load the allocator with these variables; None if it does, or if that is unknown.

    Briefly starts a Python that reads its own memory map.

    Args:
        name: "jemalloc" or "tcmalloc".
        variables: the result of `allocator_environment`.
    """
    if not os.path.exists("/proc/self/maps"):
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", "print(open('/proc/self/maps').read())"],
            env={**os.environ, **variables},
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a Python with {name} does not start: {error}"
    if f"/lib{name}" in done.stdout.decode("utf-8", "replace"):
        return None
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = said[0] if said else preload_obstacle(sys.executable)
    return f"this Python does not load {name}: {reason or 'it gives no reason'}"


_LONGEST_HEADERS: Final = 64 * 1024
_ELF: Final = b"\x7fELF"
_INTERPRETER: Final = 3


def _is_static(head: bytes) -> bool:
    """Whether this is the beginning of an ELF program whose headers name no dynamic loader (elf(5))."""
    if head[:4] != _ELF or len(head) < 64:
        return False

    def number(offset: int, size: int) -> int:
        return int.from_bytes(head[offset : offset + size], "big" if head[5] == 2 else "little")

    wide = head[4] == 2
    table = number(32, 8) if wide else number(28, 4)
    size, count = (number(54, 2), number(56, 2)) if wide else (number(42, 2), number(44, 2))
    if not count or table + size * count > len(head):
        return False
    kinds = {number(table + size * row, 4) for row in range(count)}
    return _INTERPRETER not in kinds


def _check(name: str) -> None:
    if name not in ALLOCATORS:
        raise ValueError(f"{name!r} is not a known allocator; choose {' or '.join(ALLOCATORS)}")


def _folders() -> Iterator[Path]:
    """Library folders, those of this Python first."""
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if entry:
            yield Path(entry)
    for prefix in (os.environ.get("CONDA_PREFIX"), sys.prefix, sys.base_prefix, os.environ.get("HOMEBREW_PREFIX")):
        if prefix:
            yield Path(prefix) / "lib"
    kind = sysconfig.get_config_var("MULTIARCH")
    for folder in ("/usr/local/lib", "/usr/lib", "/lib"):
        if kind:
            yield Path(folder) / str(kind)
        yield Path(f"{folder}64")
        yield Path(folder)
    yield Path("/opt/homebrew/lib")


def _known_to_system(name: str, files: tuple[str, ...]) -> Iterator[Path]:
    if sys.platform == "darwin":
        found = ctypes.util.find_library(name)
        if found:
            yield Path(found)
        return
    program = shutil.which("ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"]))
    if program is None:
        return
    try:
        done = subprocess.run([program, "-p"], capture_output=True, timeout=_LDCONFIG_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    listed = re.findall(r"^\s*(\S+) \(.*\) => (\S+)$", done.stdout.decode("utf-8", "replace"), re.MULTILINE)
    for file in files:
        yield from (Path(path) for wanted, path in listed if wanted == file)


def _loadable(path: Path) -> bool:
    """Whether it is a library for this Python's architecture, at a path that LD_PRELOAD can hold."""
    if re.search(r"[:\s]", str(path)):
        return False
    try:
        library, own = _kind(path), _kind(Path(sys.executable or "/proc/self/exe"))
    except OSError:
        return False
    if sys.platform == "darwin":
        return True
    return library is not None and (own is None or library == own)


def _kind(path: Path) -> tuple[int, int, bytes] | None:
    """Width, byte order and architecture of an ELF file; None for any other file."""
    with path.open("rb") as file:
        head = file.read(20)
    return (head[4], head[5], head[18:20]) if head[:4] == _ELF and len(head) == 20 else None
