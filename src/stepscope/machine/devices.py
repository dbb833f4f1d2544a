"""The performance figures of accelerators: the shipped table and the user's own devices, and lookup by name.

The user's devices are in TOML files, one table `[[device]]` each.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, get_args

import msgspec

from stepscope.errors import UsageError
from stepscope.files import read_small

NumberType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8"]
NUMBER_TYPES: Final[tuple[str, ...]] = get_args(NumberType)
USUAL_BEST_SHARE: Final = 0.85
"""Share of the peak that the best matrix products reach, for devices without a measurement."""


class Described(Protocol):
    """The description of a device in a trace: see `stepscope.trace.metadata.Device`."""

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
    """One accelerator; null if the maker publishes no figure.

    Attributes:
        matches: pattern of its names in drivers, each a whole name.
        capability: compute capability, for AMD as PyTorch reports it.
        multiprocessors: or compute units.
        bandwidth_bytes_s: memory bandwidth, bytes per second.
        cache_bytes: last-level cache of the whole device.
        flops_s: peak operations per second by number type, one of NUMBER_TYPES.
        power_w: power limit, watts.
        best_bf16_flops_s: the highest published measurement of a bf16 matrix product.
        source: addresses of the maker's figures, separated by spaces.
        architecture: such as "Ampere"; devices of one architecture work alike.
        sustained_flops_s: measured operations per second of large matrix products, by number type.
        sustained_bandwidth_bytes_s: measured bytes per second of large copies in its memory.
        launch_ns: measured minimum time from one small kernel's start to the next one's.
        idle_power_w, idle_high_power_w: least and most that was measured without work; of the most, a program may hold
            the device.
        memory_power_w: most that was measured in work that memory limits, such as decoding.
        host_link_bytes_s: between host and device, one direction, bytes per second.
        peer_link_bytes_s: from one device of a machine to the others together, one direction, bytes per second; equal
            to `host_link_bytes_s` if there is no other link.
        aliases: other names that users may type.
        measured_source: addresses of the measured figures.
        power_source: addresses of the measured powers.
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
    idle_high_power_w: float | None = None
    memory_power_w: float | None = None
    host_link_bytes_s: float | None = None
    peer_link_bytes_s: float | None = None
    aliases: tuple[str, ...] = ()
    measured_source: str = ""
    power_source: str = ""

    @property
    def best_share(self) -> float:
        """The share of the peak that the best matrix products reach, 0 to 1."""
        peak = self.flops_s.get("bf16")
        if peak is None or self.best_bf16_flops_s is None:
            return USUAL_BEST_SHARE
        return self.best_bf16_flops_s / peak

    def sustained(self, kind: str) -> float:
        """Rate of large matrix products in a number type that has a peak, measured or the usual share of it."""
        return self.sustained_flops_s.get(kind) or self.flops_s[kind] * self.best_share


def plain(name: str) -> str:
    """Lower a name's case and strip its punctuation, for comparisons; letters and digits of any script stay."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", name).casefold())


_LONGEST_TEXT: Final = 1000
_LARGEST_MIB: Final = 1
_MOST_DEVICES: Final = 1000
_Text = Annotated[str, msgspec.Meta(max_length=_LONGEST_TEXT)]
_Texts = Annotated[
    list[Annotated[str, msgspec.Meta(min_length=1, max_length=_LONGEST_TEXT)]], msgspec.Meta(max_length=100)
]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class DeviceTable(msgspec.Struct, forbid_unknown_fields=True):
    """One table [[device]]; docs/devices.md documents the keys."""

    name: _Text = ""
    aliases: _Texts = []
    driver_names: _Texts = []
    vendor: _Text = ""
    architecture: _Text = ""
    capability: _Text = ""
    multiprocessors: _Positive | None = None
    clock_mhz: _Positive | None = None
    memory_gb: _Positive | None = None
    bandwidth_gb_s: _Positive | None = None
    cache_mib: _Positive | None = None
    power_w: _Positive | None = None
    host_link_gb_s: _Positive | None = None
    peer_link_gb_s: _Positive | None = None
    peak_tflop_s: dict[NumberType, _Positive] = {}
    best_bf16_tflop_s: _Positive | None = None
    measured_bandwidth_gb_s: _Positive | None = None
    measured_tflop_s: dict[NumberType, _Positive] = {}
    launch_us: _Positive | None = None
    idle_w: _Positive | None = None
    idle_high_w: _Positive | None = None
    memory_w: _Positive | None = None
    source: _Text = ""
    measured_source: _Text = ""
    power_source: _Text = ""


KEYS: Final = DeviceTable.__struct_fields__
_UNITS: Final = {
    "memory_gb": ("memory_bytes", 1e9),
    "bandwidth_gb_s": ("bandwidth_bytes_s", 1e9),
    "cache_mib": ("cache_bytes", 2**20),
    "host_link_gb_s": ("host_link_bytes_s", 1e9),
    "peer_link_gb_s": ("peer_link_bytes_s", 1e9),
    "best_bf16_tflop_s": ("best_bf16_flops_s", 1e12),
    "measured_bandwidth_gb_s": ("sustained_bandwidth_bytes_s", 1e9),
    "launch_us": ("launch_ns", 1e3),
    "idle_w": ("idle_power_w", 1),
    "idle_high_w": ("idle_high_power_w", 1),
    "memory_w": ("memory_power_w", 1),
    "peak_tflop_s": ("flops_s", 1e12),
    "measured_tflop_s": ("sustained_flops_s", 1e12),
}
"""For each key with a unit: the attribute of `DevicePeaks` and the factor to base units."""
_TERMS: Final = {
    " | null": "",
    "`float": "`number",
    "`number`": "a number",
    "`str`": "text",
    "`array`": "a list",
    "`object`": "a table",
    "> 0.0": "above 0",
}
"""Replacements for the terms in msgspec's messages."""
_WHOLE_KEYS: Final = ("multiprocessors", "clock_mhz", "power_w")


def _peaks(table: DeviceTable, *, matches: str, source: str) -> DevicePeaks:
    """Convert the table to base units; a measured value replaces a missing maker's figure."""
    values: dict[str, Any] = {}
    for key, (attribute, unit) in _UNITS.items():
        value = getattr(table, key)
        if isinstance(value, dict):
            values[attribute] = {kind: value[kind] * unit for kind in NUMBER_TYPES if kind in value}
        else:
            values[attribute] = None if value is None else value * unit
    for attribute in ("memory_bytes", "cache_bytes"):
        values[attribute] = None if values[attribute] is None else round(values[attribute])
    values["bandwidth_bytes_s"] = round(values["bandwidth_bytes_s"] or values["sustained_bandwidth_bytes_s"] or 0)
    for key in _WHOLE_KEYS:
        value = getattr(table, key)
        values[key] = None if value is None else int(value)
    return DevicePeaks(
        name=table.name,
        matches=matches,
        capability=table.capability or None,
        source=source,
        vendor=table.vendor,
        architecture=table.architecture,
        aliases=tuple(table.aliases),
        measured_source=table.measured_source,
        power_source=table.power_source,
        **values,
    )


def device_table() -> tuple[DevicePeaks, ...]:
    """Return every known accelerator, the user's own first; these replace shipped ones of the same name.

    Raises UsageError if a file of the user's devices is invalid.
    """
    return _with(users_files())


def forget_devices() -> None:
    """Clear the cached table after the user's files have changed."""
    _with.cache_clear()


def is_nvidia(device: DevicePeaks) -> bool:
    """Whether a device is NVIDIA's, from its maker in the table or, in older rows, its name."""
    if device.vendor:
        return device.vendor.upper() == "NVIDIA"
    return device.capability is not None and not re.search(r"\bMI\d|Instinct|Gaudi|TPU", device.name)


@lru_cache(maxsize=4)
def _with(paths: tuple[Path, ...]) -> tuple[DevicePeaks, ...]:
    users: dict[str, DevicePeaks] = {}
    drivers = {plain(row.name): row.matches for row in _shipped()}
    for path in paths:  # a file named for this run has priority over the kept one
        for row in read_devices(path):
            # A row that replaces a shipped one keeps its driver names.
            matches = "|".join(filter(None, (row.matches, drivers.get(plain(row.name)))))
            users.setdefault(plain(row.name), replace(row, matches=matches))
    return (*users.values(), *(row for row in _shipped() if plain(row.name) not in users))


@lru_cache(maxsize=1)
def _shipped() -> tuple[DevicePeaks, ...]:
    text = files("stepscope").joinpath("data/devices.csv").read_text(encoding="utf-8")
    return tuple(_shipped_row(values) for values in csv.DictReader(text.splitlines()))


def _shipped_row(values: dict[str, str]) -> DevicePeaks:
    table: dict[str, Any] = {key: values[key] for key in KEYS if values.get(key)}
    table["aliases"] = [name for name in values["aliases"].split("|") if name]
    for key, prefix in (("peak_tflop_s", ""), ("measured_tflop_s", "measured_")):
        table[key] = {kind: values[prefix + kind] for kind in NUMBER_TYPES if values[prefix + kind]}
    table["best_bf16_tflop_s"] = values["best_bf16"] or None
    return _peaks(msgspec.convert(table, DeviceTable, strict=False), matches=values["matches"], source=values["source"])


FILE_VARIABLE: Final = "STEPSCOPE_DEVICES"
"""The path of an additional file of devices, such as a project's."""
FOLDER_VARIABLE: Final = "STEPSCOPE_CONFIG_DIR"


def kept_file() -> Path:
    """Return the path where `stepscope devices --add` keeps the user's devices; the file need not exist."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        import platformdirs

        folder = platformdirs.user_config_dir("stepscope", appauthor=False)
    return Path(folder) / "devices.toml"


def users_files() -> tuple[Path, ...]:
    """Return the files of the user's devices: the one named for this run, then the kept one."""
    named, kept = os.environ.get(FILE_VARIABLE), kept_file()
    return (*([Path(named)] if named else []), *([kept] if kept.exists() else []))


def read_devices(path: Path) -> tuple[DevicePeaks, ...]:
    """Read the devices of a TOML file.

    Raises UsageError if the file cannot be read or is invalid; the message names the key and the expected value.
    """
    return tuple(device for _, device in _read(path))


def read_tables(path: Path) -> list[dict[str, Any]]:
    """Read the devices of a TOML file as plain tables; empty if the file does not exist.

    Raises UsageError as in `read_devices`.
    """
    return [table for table, _ in _read(path)] if path.exists() else []


def _read(path: Path) -> list[tuple[dict[str, Any], DevicePeaks]]:
    read: dict[str, tuple[dict[str, Any], DevicePeaks]] = {}
    for number, table in enumerate(_tables(path), 1):
        device = _device(table, number, path)
        if plain(device.name) in read:
            raise UsageError(f"{path}: the device {device.name!r} appears twice")
        read[plain(device.name)] = table, device
    return list(read.values())


def _tables(path: Path) -> list[Any]:
    content = _read_toml(path)
    for key in content:
        if key != "device":
            raise UsageError(f"{path}: {key!r} is not a known key; each device is a table [[device]]")
    tables = content.get("device")
    if not isinstance(tables, list) or not tables:
        raise UsageError(f"{path} contains no device; each is a table [[device]]")
    if len(tables) > _MOST_DEVICES:
        raise UsageError(f"{path} has {len(tables):,} devices, more than {_MOST_DEVICES:,}")
    return tables


def _read_toml(path: Path) -> dict[str, Any]:
    data = read_small(path, _LARGEST_MIB, ", too large for a file of devices")
    try:
        content: dict[str, Any] = msgspec.toml.decode(data)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a TOML file: it is not UTF-8 text") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a TOML file: {' '.join(str(error).split())}") from error
    return content


def _device(content: Any, number: int, path: Path) -> DevicePeaks:
    name = content.get("name") if isinstance(content, dict) else None
    is_named = isinstance(name, str) and len(name) <= _LONGEST_TEXT
    where = f"{path}: {name!r}" if is_named else f"{path}: device {number}"
    if not isinstance(content, dict):
        raise UsageError(f"{where} is not a table [[device]]")
    try:
        table = msgspec.convert(content, DeviceTable)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {_what_is_wrong(str(error))}") from error
    for key in _WHOLE_KEYS:
        if not float(getattr(table, key) or 0).is_integer():
            raise UsageError(f"{where}: {key!r} should be a whole number, not {getattr(table, key)}")
    if not plain(table.name):
        raise UsageError(f"{where}: 'name' is missing, or has no letter or digit")
    if table.bandwidth_gb_s is None and table.measured_bandwidth_gb_s is None:
        raise UsageError(f"{where}: 'bandwidth_gb_s' or 'measured_bandwidth_gb_s' is missing, a number of GB/s")
    if not table.peak_tflop_s and not table.measured_tflop_s:
        raise UsageError(f"{where}: 'peak_tflop_s' or 'measured_tflop_s' is missing, such as {{ bf16 = 312 }}")
    matches = "|".join(f"^{re.escape(known)}$" for known in table.driver_names)
    peaks = _peaks(table, matches=matches, source=table.source or str(path))
    return replace(peaks, flops_s=peaks.sustained_flops_s | peaks.flops_s)


def _what_is_wrong(message: str) -> str:
    """Rewrite msgspec's message in words: "'idle_w' is wrong: expected a number, got text"."""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message, re.DOTALL)
    if unknown:
        return f"{unknown[1]!r} is not a key of a device; the keys are {', '.join(KEYS)}"
    problem, _, place = message.rpartition(" - at `")
    key = re.sub(r"^key in |\$\.?|\[.*?\]", "", place.replace("`", ""))
    for term, words in _TERMS.items():
        problem = problem.replace(term, words)
    types = f"; number types are {', '.join(NUMBER_TYPES)}" if "enum value" in problem else ""
    return f"{key!r} is wrong: {problem[:1].lower()}{problem[1:]}{types}"


def devices_toml(tables: Iterable[Mapping[str, Any]], *, comments: Iterable[str] = ()) -> bytes:
    """Format devices as a TOML file that `read_tables` reads back unchanged.

    Args:
        tables: with keys from KEYS.
        comments: lines at the beginning.
    """
    lines = [f"# {' '.join(comment.split())}".rstrip() for comment in comments]
    for table in tables:
        lines += ["", "[[device]]", *(f"{key} = {_written(table[key])}" for key in KEYS if key in table)]
    return ("\n".join(lines).lstrip("\n") + "\n").encode()


def _written(value: object) -> str:
    """Format a value as TOML: strings, numbers, lists of strings, tables of numbers."""
    match value:
        case str():
            return json.dumps(value)  # TOML's basic strings use JSON's escapes
        case dict():
            return "{ " + ", ".join(f"{key} = {_written(one)}" for key, one in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(_written(one) for one in value) + "]"
    return str(value)


def figures_of(row: DevicePeaks) -> dict[str, Any]:
    """Convert a row to a table of a TOML file, without its driver names."""
    table: dict[str, Any] = {}
    for key in KEYS:
        attribute, unit = _UNITS.get(key, (key, None))
        value = getattr(row, attribute, None)
        if isinstance(value, dict):
            value = {kind: _in_unit(rate, unit or 1) for kind, rate in value.items()}
        elif unit is not None and value is not None:
            value = _in_unit(value, unit)
        elif isinstance(value, tuple):
            value = list(value)
        if value not in (None, "", [], {}):
            table[key] = value
    return table


def _in_unit(value: float, unit: float) -> float:
    """Convert to a file's unit, rounded to nine digits, which hides binary rounding."""
    number = float(f"{value / unit:.9g}")
    return int(number) if number.is_integer() else number


_MEMORY_TOLERANCE: Final = 0.05
"""Devices report up to 5 % less or more memory than specified, partly because of error correction."""
_GIB: Final = 2**30 / 1e9
"""Many devices have GiB where their makers write GB."""
_NAMED_AT_MOST: Final = 6
_LONGEST_NAME: Final = 200
_ALIKE: Final = 0.5


def with_measured_shares(device: DevicePeaks) -> DevicePeaks:
    """The device with the shares of the peaks that others of the same chip reach, where nobody measured its own.

    Of several, the one of the nearest power limit counts. The start of a kernel is its maker's usual one: few were
    measured, and devices without such a figure would be slower.
    """
    is_known = device.vendor and device.architecture and device.multiprocessors
    alike = [row for row in device_table() if is_known and row.name != device.name and _chip(row) == _chip(device)]
    for row in sorted(alike, key=lambda row: _apart(row.power_w, device.power_w)):
        moved, best = row.sustained_bandwidth_bytes_s, row.best_bf16_flops_s
        rates = {
            kind: device.flops_s[kind] * row.sustained_flops_s[kind] / row.flops_s[kind]
            for kind in row.sustained_flops_s.keys() & row.flops_s.keys() & device.flops_s.keys()
        }
        device = replace(
            device,
            sustained_flops_s=rates | device.sustained_flops_s,
            sustained_bandwidth_bytes_s=device.sustained_bandwidth_bytes_s
            or (moved and moved / row.bandwidth_bytes_s * device.bandwidth_bytes_s),
            best_bf16_flops_s=device.best_bf16_flops_s or (best and row.best_share * device.flops_s.get("bf16", 0.0)),
        )
    return replace(device, launch_ns=None)


def _chip(row: DevicePeaks) -> tuple[object, ...]:
    return row.vendor, row.architecture, row.capability, row.multiprocessors


def _apart(watts: int | None, other: int | None) -> float:
    return abs(math.log(watts / other)) if watts and other else math.inf


def find_device(device: Described) -> DevicePeaks | None:
    """Find the row for a device in a trace: by name (a driver's or the table's), else by capability, units and memory.

    Returns None if nothing matches, if several rows with different figures match, or if the name tells another model.
    """
    if device.name:
        for row in device_table():
            if _is_called(row, device.name) and _holds(row, device) is not False:
                return row
        if re.search(r"\d", device.name):  # unlike "AMD Radeon Graphics", it tells the model
            return None
    alike = [row for row in device_table() if _is_alike(row, device)]
    return alike[0] if alike and all(_can(row) == _can(alike[0]) for row in alike) else None


def named_device(name: str) -> DevicePeaks:
    """Find the row of this whole name, ignoring case and punctuation: "H100-SXM", an alias, or the driver's name.

    A part of a name is no name, even if only one device has it: "H20" must never mean an H200.

    Raises:
        UsageError: no row has that name; the message asks which of the similar ones is meant.
    """
    rows = device_table()
    if not plain(name):
        raise UsageError("the device's name is empty (stepscope devices lists the names)")
    for row in rows:
        # A driver's name that is part of two devices' names tells neither to a reader.
        if _is_called(row, name) and (plain(name) in map(plain, _names(row)) or len(_having(name, rows)) < 2):
            return row
    near = _similar_names(name[:_LONGEST_NAME], rows)
    guess = f"; did you mean {', '.join([*near[:-2], ' or '.join(near[-2:])])}?" if near else ""
    shown = repr(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}...")
    raise UsageError(f"{shown} is not in the table of devices{guess} (stepscope devices lists them)")


def _is_called(row: DevicePeaks, name: str) -> bool:
    """Whether this is one of the row's names or its driver's, as a whole."""
    if len(name) > _LONGEST_TEXT:
        return False
    is_drivers = row.matches and re.fullmatch(row.matches, name.strip(), re.IGNORECASE) is not None
    return is_drivers or plain(name) in map(plain, _names(row))


def _names(row: DevicePeaks) -> tuple[str, ...]:
    """Return a row's names with and without its maker's, including "MI250" for "MI250 (one of two dies)"."""
    names = (row.name, re.sub(r" \(.*\)$", "", row.name), *row.aliases)
    return (*names, *(f"{row.vendor} {name}" for name in names))


def _similar_names(wanted: str, rows: Sequence[DevicePeaks]) -> list[str]:
    """Return the rows with all the words of the name, those that begin with it first; else those spelled alike."""
    having = _having(wanted, rows)
    if having:
        return sorted(having, key=lambda name: not plain(name).startswith(plain(wanted)))[:_NAMED_AT_MOST]
    called = {plain(name): row.name for row in reversed(rows) for name in _names(row)}
    found = difflib.get_close_matches(plain(wanted), list(called), n=_NAMED_AT_MOST, cutoff=_ALIKE)
    return list(dict.fromkeys(called[name] for name in found))[:3]


def _having(wanted: str, rows: Sequence[DevicePeaks]) -> list[str]:
    """Return the rows whose names have all the words of this one."""
    words = list(map(plain, re.findall(r"\w+", wanted)))
    return [row.name for row in rows if all(word in plain(row.name) for word in words)]


def _is_alike(row: DevicePeaks, device: Described) -> bool:
    mine, theirs = (row.capability, row.multiprocessors), (device.compute_capability, device.multiprocessors)
    return None not in mine and mine == theirs and _holds(row, device) is True


def _holds(row: DevicePeaks, device: Described) -> bool | None:
    """Whether both have the same amount of memory; None where one is unknown. Some drivers have one name for two."""
    if not row.memory_bytes or not device.memory_bytes:
        return None
    ratio = device.memory_bytes / row.memory_bytes
    return min(abs(ratio - 1), abs(ratio / _GIB - 1)) <= _MEMORY_TOLERANCE


def _can(row: DevicePeaks) -> tuple[object, ...]:
    return row.bandwidth_bytes_s, row.cache_bytes, tuple(sorted(row.flops_s.items()))
