"""Where compilers keep what they made, as their own environment variables and defaults say."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

CacheKind: TypeAlias = Literal["inductor", "triton", "xla", "hpu"]
KINDS: Final[tuple[CacheKind, ...]] = get_args(CacheKind)
LIMIT: Final = "STEPSCOPE_COMPILE_CACHE_LIMIT"
"""Environment variable with the most bytes that each cache is to hold, where the compiler has no setting of its own."""
_UNITS: Final = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS_OF_1024: Final = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class CompileCache:
    """One compiler's cache.

    Attributes:
        kind: whose it is.
        folder: where it lies; it need not exist.
        said_by: the environment variable that names it, or "default".
        limit_bytes: the most that it is to hold, by the compiler's own setting or STEPSCOPE_COMPILE_CACHE_LIMIT; None
            where nothing limits it.
    """

    kind: CacheKind
    folder: Path
    said_by: str
    limit_bytes: int | None = None


def find_caches(environment: Mapping[str, str] | None = None) -> list[CompileCache]:
    """Every cache that this environment names, or that lies where its compiler puts it by itself.

    Sources: PyTorch's torch/_inductor/runtime/cache_dir_utils.py (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR), Triton's
    knobs (TRITON_HOME), JAX's persistent compilation cache (JAX_COMPILATION_CACHE_DIR,
    JAX_COMPILATION_CACHE_MAX_SIZE), PyTorch/XLA (XLA_PERSISTENT_CACHE_PATH) and Intel Gaudi's
    PT_HPU_RECIPE_CACHE_CONFIG=FOLDER,DELETE_AT_START,MEGABYTES.

    Args:
        environment: variables; those of this process where it is None.
    """
    variables = os.environ if environment is None else environment
    general = bytes_of(variables.get(LIMIT, "")) or None
    found: dict[Path, CompileCache] = {}
    for cache in _named(variables):
        limited = cache if cache.limit_bytes is not None else _with_limit(cache, general)
        found.setdefault(cache.folder.absolute(), limited)
    return [cache for cache in found.values() if cache.said_by != "default" or cache.folder.is_dir()]


def bytes_of(text: str) -> int | None:
    """Bytes from "10GiB", "500 MB", "4096" or "0"; None where the text is no size."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    unit = (_UNITS | _UNITS_OF_1024).get(match[2]) if match else None
    return int(float(match[1]) * unit) if match and unit else None


def size_in_bytes(text: str) -> int:
    """Bytes from "10GiB", "500 MB" or "4096".

    Raises:
        ValueError: the text is no size, or none above 0.
    """
    found = bytes_of(text)
    if not found:
        raise ValueError(f"{text!r} is no size above 0: write a number with MB, GB, MiB or GiB, such as 10GiB")
    return found


def _named(variables: Mapping[str, str]) -> Iterator[CompileCache]:
    inductor = variables.get("TORCHINDUCTOR_CACHE_DIR")
    default = Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    yield _cache("inductor", inductor, "TORCHINDUCTOR_CACHE_DIR", default)
    home = Path(variables.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    yield _cache("triton", variables.get("TRITON_CACHE_DIR"), "TRITON_CACHE_DIR", home)
    jax = variables.get("JAX_COMPILATION_CACHE_DIR")
    if jax and "://" not in jax:
        most = bytes_of(variables.get("JAX_COMPILATION_CACHE_MAX_SIZE", "")) or None
        yield CompileCache("xla", Path(jax), "JAX_COMPILATION_CACHE_DIR", most)
    torch_xla = variables.get("XLA_PERSISTENT_CACHE_PATH")
    if torch_xla:
        yield CompileCache("xla", Path(torch_xla), "XLA_PERSISTENT_CACHE_PATH")
    folder, _, rest = variables.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")
    if folder:
        megabytes = rest.rpartition(",")[2].strip()
        most = int(megabytes) * 2**20 if re.fullmatch(r"[1-9][0-9]{0,9}", megabytes) else None
        yield CompileCache("hpu", Path(folder), "PT_HPU_RECIPE_CACHE_CONFIG", most)


def _cache(kind: CacheKind, named: str | None, variable: str, default: Path) -> CompileCache:
    return CompileCache(kind, Path(named), variable) if named else CompileCache(kind, default, "default")


def _with_limit(cache: CompileCache, limit_bytes: int | None) -> CompileCache:
    return CompileCache(cache.kind, cache.folder, cache.said_by, limit_bytes)


def _user() -> str:
    """As PyTorch names its folder."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)
