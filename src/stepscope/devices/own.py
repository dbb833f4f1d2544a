"""The user's own devices: TOML files, one table `[[device]]` for each.

Units are those of data/devices.csv. Files may come from anyone: their size, their names and their numbers are bounded,
and what a driver calls a device is compared as text, never as a pattern.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from stepscope.devices.peaks import NUMBER_TYPES, DevicePeaks, plain
from stepscope.devices.toml_values import LONGEST_TEXT, Values, read_toml
from stepscope.errors import UsageError

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
