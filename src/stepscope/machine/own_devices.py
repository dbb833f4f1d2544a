"""What one accelerator can do, and the user's own devices: TOML files, one table `[[device]]` for each."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from stepscope.errors import UsageError
from stepscope.files import read_small

NUMBER_TYPES: Final = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
USUAL_BEST_SHARE: Final = 0.85
"""Share of the peak that the best matrix products reach where nobody measured it for the device."""


class Described(Protocol):
    """What a trace says about a device: as `stepscope.trace.model.Device`."""

    @property
    def name(self) -> str | None: ...
    @property
    def memory_bytes(self) -> int | None: ...
    @property
    def compute_capability(self) -> str | None: ...
    @property
    def multiprocessors(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """One accelerator; null where its maker does not say.

    Attributes:
        matches: pattern of the names that drivers give it.
        capability: compute capability, for AMD as PyTorch reports it.
        multiprocessors: or compute units.
        bandwidth_bytes_s: of its memory, bytes per second.
        cache_bytes: last-level cache of the whole device.
        flops_s: operations per second by number type, one of NUMBER_TYPES.
        power_w: what it may draw, watts.
        best_bf16_flops_s: the most that anyone measured for a bf16 matrix product.
        source: addresses of where the maker's figures stand, a space between them.
        vendor: its maker.
        architecture: the generation it belongs to, such as "Ampere"; devices of one are alike in how they work.
        sustained_flops_s: operations per second that large matrix products reached where someone measured, by number
            type.
        sustained_bandwidth_bytes_s: bytes per second that large copies in its memory reached where someone measured.
        launch_ns: the least time from one small kernel's start to the next one's, where someone measured.
        idle_power_w: what it draws without work, where someone measured.
        host_link_bytes_s: between host and device, one direction, bytes per second.
        peer_link_bytes_s: from one device of a machine to the others together, one direction, bytes per second; that of
            `host_link_bytes_s` where there is no other link.
        aliases: other names that users may type.
        measured_source: addresses of where measured figures stand.
    """

    name: str
    matches: str
    capability: str | None
    multiprocessors: int | None
    clock_mhz: int | None
    memory_bytes: int | None
    bandwidth_bytes_s: int
    cache_bytes: int | None
    flops_s: dict[str, float] = field(hash=False)
    power_w: int | None = None
    best_bf16_flops_s: float | None = None
    source: str = ""
    vendor: str = ""
    architecture: str = ""
    sustained_flops_s: dict[str, float] = field(default_factory=dict, hash=False)
    sustained_bandwidth_bytes_s: float | None = None
    launch_ns: float | None = None
    idle_power_w: float | None = None
    host_link_bytes_s: float | None = None
    peer_link_bytes_s: float | None = None
    aliases: tuple[str, ...] = ()
    measured_source: str = ""

    @property
    def best_share(self) -> float:
        """Share of the peak that the best matrix products really reach, 0 to 1."""
        peak = self.flops_s.get("bf16")
        if peak is None or self.best_bf16_flops_s is None:
            return USUAL_BEST_SHARE
        return self.best_bf16_flops_s / peak


def plain(name: str) -> str:
    """A name without case and punctuation, for comparing."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


LONGEST_TEXT: Final = 1000
_LARGEST_MIB: Final = 1
_LARGEST_NUMBER: Final = 1e9
_MOST_TEXTS: Final = 100


def read_toml(path: Path) -> dict[str, Any]:
    """What stands in a TOML file of at most 1 MiB.

    Raises:
        UsageError: it cannot be read, is larger, or is no TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    data = read_small(path, _LARGEST_MIB, ", more than a file of devices has")
    try:
        content: dict[str, Any] = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no TOML file: it is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML file: {' '.join(str(error).split())}") from error
    return content


class Values:
    """The values of one TOML table; each method raises `UsageError` where a value is not what it should be."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = table
        self._where = where

    def text(self, key: str) -> str:
        """A string, empty where there is none."""
        value = self._table.get(key, "")
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise self._wrong(key, f"a text of at most {LONGEST_TEXT:,} characters", value)
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty where there is none."""
        value = self._table.get(key, [])
        if (
            not isinstance(value, list)
            or len(value) > _MOST_TEXTS
            or any(not isinstance(one, str) or not 0 < len(one) <= LONGEST_TEXT for one in value)
        ):
            raise self._wrong(key, f'a list of at most {_MOST_TEXTS} texts, such as ["one", "two"]', value)
        return tuple(value)

    def number(self, key: str, unit: float) -> float | None:
        """A positive number times a unit; None where there is none."""
        value = self._table.get(key)
        return None if value is None else self._positive(key, value) * unit

    def whole(self, key: str) -> int | None:
        """A positive whole number; None where there is none."""
        value = self._table.get(key)
        if value is None:
            return None
        if not float(self._positive(key, value)).is_integer():
            raise self._wrong(key, "a whole number", value)
        return int(value)

    def rates(self, key: str, kinds: Sequence[str]) -> dict[str, float]:
        """Operations per second by number type, from a table of tera-operations per second."""
        table = self._table.get(key, {})
        if not isinstance(table, dict):
            raise self._wrong(key, "a table of numbers, such as { bf16 = 312 }", table)
        for kind in table:
            if kind not in kinds:
                raise UsageError(f"{self._where}: {kind!r} is no number type of {key!r}; they are {', '.join(kinds)}")
        return {kind: self._positive(f"{key}.{kind}", table[kind]) * 1e12 for kind in kinds if kind in table}

    def _positive(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LARGEST_NUMBER:
            raise self._wrong(key, "a positive number", value)
        return value

    def _wrong(self, key: str, expected: str, value: object) -> UsageError:
        found = repr(value)
        shown = found if len(found) <= 40 else f"{found[:40]}..."
        return UsageError(f"{self._where}: {key!r} should be {expected}, not {shown}")


FILE_VARIABLE: Final = "STEPSCOPE_DEVICES"
"""Names a further file of devices, such as a project's."""
FOLDER_VARIABLE: Final = "STEPSCOPE_CONFIG_DIR"
_MOST_DEVICES: Final = 1000

KEYS: Final = (
    "name", "aliases", "driver_names", "vendor", "architecture", "capability", "multiprocessors", "clock_mhz",
    "memory_gb", "bandwidth_gb_s", "cache_mib", "power_w", "host_link_gb_s", "peer_link_gb_s", "peak_tflop_s",
    "best_bf16_tflop_s", "measured_bandwidth_gb_s", "measured_tflop_s", "launch_us", "idle_w", "source",
    "measured_source",
)  # fmt: skip
"""Of a table [[device]]; docs/devices.md says what each means."""


def kept_file() -> Path:
    """Where `stepscope devices --add` keeps the user's devices; it need not be there."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        import platformdirs

        folder = platformdirs.user_config_dir("stepscope", appauthor=False)
    return Path(folder) / "devices.toml"


def users_files() -> tuple[Path, ...]:
    """The files of the user's devices, what is named for this run before what is kept."""
    named, kept = os.environ.get(FILE_VARIABLE), kept_file()
    return (*([Path(named)] if named else []), *([kept] if kept.exists() else []))


def read_devices(path: Path) -> tuple[DevicePeaks, ...]:
    """The devices of a TOML file.

    Raises:
        UsageError: the file cannot be read or holds something else; the message names the key and what it should be.
    """
    return tuple(device for _, device in _read(path))


def read_tables(path: Path) -> list[dict[str, Any]]:
    """The same devices as the tables that stand in the file, none where it is not there.

    Raises:
        UsageError: as `read_devices`.
    """
    return [table for table, _ in _read(path)] if path.exists() else []


def devices_toml(tables: Iterable[Mapping[str, Any]], *, comments: Iterable[str] = ()) -> bytes:
    """A TOML file with these devices, which `read_tables` reads back as they are.

    Args:
        tables: with keys out of KEYS.
        comments: lines to stand at the beginning.
    """
    lines = [f"# {printed}".rstrip() for comment in comments for printed in [" ".join(comment.split())]]
    for table in tables:
        lines += ["", "[[device]]", *(f"{key} = {_written(table[key])}" for key in KEYS if key in table)]
    return ("\n".join(lines).lstrip("\n") + "\n").encode()


def figures_of(row: DevicePeaks) -> dict[str, Any]:
    """What a row says of a device as a table of a TOML file, without the names that drivers give it."""
    table: dict[str, Any] = {
        "name": row.name, "vendor": row.vendor, "architecture": row.architecture, "capability": row.capability,
        "source": row.source, "measured_source": row.measured_source, "aliases": list(row.aliases),
        "multiprocessors": row.multiprocessors, "clock_mhz": row.clock_mhz, "power_w": row.power_w,
        "memory_gb": _over(row.memory_bytes, 1e9), "bandwidth_gb_s": _over(row.bandwidth_bytes_s, 1e9),
        "cache_mib": _over(row.cache_bytes, 2**20), "host_link_gb_s": _over(row.host_link_bytes_s, 1e9),
        "peer_link_gb_s": _over(row.peer_link_bytes_s, 1e9), "best_bf16_tflop_s": _over(row.best_bf16_flops_s, 1e12),
        "measured_bandwidth_gb_s": _over(row.sustained_bandwidth_bytes_s, 1e9), "launch_us": _over(row.launch_ns, 1e3),
        "idle_w": row.idle_power_w, "peak_tflop_s": {kind: _over(rate, 1e12) for kind, rate in row.flops_s.items()},
        "measured_tflop_s": {kind: _over(rate, 1e12) for kind, rate in row.sustained_flops_s.items()},
    }  # fmt: skip
    return {key: value for key, value in table.items() if value not in (None, "", [], {})}


def _over(value: float | None, unit: float) -> float | None:
    """In a file's unit, to nine digits, which hides the rounding of binary numbers."""
    if value is None:
        return None
    number = float(f"{value / unit:.9g}")
    return int(number) if number.is_integer() else number


def _read(path: Path) -> list[tuple[dict[str, Any], DevicePeaks]]:
    read, seen = [], set()
    for number, table in enumerate(_tables(path), 1):
        device = _device(table, f"{path}: {_called(table, number)}", str(path))
        if plain(device.name) in seen:
            raise UsageError(f"{path}: the device {device.name!r} stands there twice")
        seen.add(plain(device.name))
        read.append((table, device))
    return read


def _tables(path: Path) -> list[Any]:
    content = read_toml(path)
    for key in content:
        if key != "device":
            raise UsageError(f"{path}: {key!r} means nothing there; each device is a table [[device]]")
    tables = content.get("device")
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} names no device; each is a table [[device]]")
    if len(tables) > _MOST_DEVICES:
        raise UsageError(f"{path} has {len(tables):,} devices, more than {_MOST_DEVICES:,}")
    return tables


def _called(table: Any, number: int) -> str:
    name = table.get("name") if isinstance(table, dict) else None
    return repr(name) if isinstance(name, str) and len(name) <= LONGEST_TEXT else f"device {number}"


def _device(table: Any, where: str, path: str) -> DevicePeaks:
    if not isinstance(table, dict):
        raise UsageError(f"{where} is no table [[device]]")
    for key in table:
        if key not in KEYS:
            raise UsageError(f"{where}: {key!r} is no key of a device; they are {', '.join(KEYS)}")
    values = Values(table, where)
    name = values.text("name")
    if not plain(name):
        raise UsageError(f"{where}: 'name' is missing, or has no letter or digit")
    bandwidth, measured_bandwidth = values.number("bandwidth_gb_s", 1e9), values.number("measured_bandwidth_gb_s", 1e9)
    if bandwidth is None and measured_bandwidth is None:
        raise UsageError(f"{where}: 'bandwidth_gb_s' or 'measured_bandwidth_gb_s' is missing, a number of GB/s")
    peaks, measured = values.rates("peak_tflop_s", NUMBER_TYPES), values.rates("measured_tflop_s", NUMBER_TYPES)
    if not peaks and not measured:
        raise UsageError(f"{where}: 'peak_tflop_s' or 'measured_tflop_s' is missing, such as {{ bf16 = 312 }}")
    return DevicePeaks(
        name=name,
        matches="|".join(f"^{re.escape(known)}$" for known in values.texts("driver_names")),
        capability=values.text("capability") or None,
        multiprocessors=values.whole("multiprocessors"),
        clock_mhz=values.whole("clock_mhz"),
        memory_bytes=_whole(values.number("memory_gb", 1e9)),
        # What was measured stands in for what no maker tells.
        bandwidth_bytes_s=round(bandwidth or measured_bandwidth or 0),
        cache_bytes=_whole(values.number("cache_mib", 2**20)),
        flops_s=measured | peaks,
        power_w=values.whole("power_w"),
        best_bf16_flops_s=values.number("best_bf16_tflop_s", 1e12),
        source=values.text("source") or path,
        vendor=values.text("vendor"),
        architecture=values.text("architecture"),
        sustained_flops_s=measured,
        sustained_bandwidth_bytes_s=measured_bandwidth,
        launch_ns=values.number("launch_us", 1e3),
        idle_power_w=values.number("idle_w", 1),
        host_link_bytes_s=values.number("host_link_gb_s", 1e9),
        peer_link_bytes_s=values.number("peer_link_gb_s", 1e9),
        aliases=values.texts("aliases"),
        measured_source=values.text("measured_source"),
    )


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _written(value: object) -> str:
    """A value as TOML: strings, numbers, lists of strings, tables of numbers."""
    match value:
        case str():
            return json.dumps(value)  # TOML's basic strings take JSON's escapes
        case dict():
            return "{ " + ", ".join(f"{key} = {_written(one)}" for key, one in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(_written(one) for one in value) + "]"
    return str(value)
