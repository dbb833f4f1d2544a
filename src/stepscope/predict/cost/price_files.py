"""Readers of third-party price lists, detected by content: SkyPilot's vms.csv, gpuhunt's CSV, DeepView's
providers.json.

A file with the columns of data/prices.csv is read as well. Each format is converted to those columns. Unusable rows are
counted, with the first line where they occur; the rest are kept. Files are untrusted: names that a spreadsheet or
terminal could execute are refused, as are invalid prices.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from types import NoneType
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from stepscope.errors import UsageError
from stepscope.files import read_small
from stepscope.predict.cost.prices import COLUMNS, Price, named_gpu

LARGEST_FILE_MIB: Final = 64
MOST_ROWS: Final = 1_000_000
MOST_PRICES: Final = 200_000
_LARGEST_USD_H: Final = 100_000.0
_LONGEST_NAME: Final = 100
_LONGEST_SOURCE: Final = 300
_MOST_GPUS: Final = 10_000
_PROVIDER: Final = re.compile(r"[a-z0-9][a-z0-9 ._-]{0,39}")
_AMOUNT: Final = re.compile(r"\d{1,12}(?:\.\d{0,20})?")
_USD: Final = re.compile(r"\d{1,12}(?:\.\d{0,20})?(?:[eE]-?\d{1,2})?")
_COUNT: Final = re.compile(r"\d{1,6}(?:\.0*)?")  # lists write 8 as 8.0
_ZONE: Final = re.compile(r"(.+-[a-z]+\d)-[a-z]")  # a zone such as us-central1-a, and its region
_KNOWN: Final = (
    "SkyPilot's vms.csv, gpuhunt's CSV, DeepView's providers.json or a CSV with the columns of stepscope prices"
)
_Cells: TypeAlias = Mapping[str, "str | None"]


class _BadRowError(Exception):
    """The reason a row cannot be used."""


class _NoGpuError(Exception):
    """A row about a machine without an accelerator."""


@dataclass(frozen=True, slots=True)
class BadRows:
    """Unusable rows with one common reason; `first_line` is a line of the file, or the number of a JSON entry."""

    reason: str
    count: int
    first_line: int


@dataclass(frozen=True, slots=True)
class ImportedPrices:
    format: str  # "SkyPilot", "gpuhunt", "DeepView" or "stepscope"
    prices: tuple[Price, ...]  # one for each machine and region; the lowest price over its zones
    rows: int  # rows in the file
    without_gpu: int  # rows of machines without an accelerator
    bad: tuple[BadRows, ...]  # unusable rows, the most frequent reason first

    @property
    def not_predictable(self) -> dict[str, int]:
        """Number of prices for each GPU that the device table lacks or cannot distinguish."""
        counts = Counter(price.gpu for price in self.prices if price.device is None)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass
class _Gathered:
    """Prices collected by machine and region."""

    prices: dict[tuple[str, str, str, str | None], Price] = field(default_factory=dict)
    rows: int = 0
    without_gpu: int = 0
    bad: dict[str, list[int]] = field(default_factory=dict)  # line numbers by reason

    def add(self, price: Price) -> None:
        key = (price.provider, price.instance, price.gpu, price.region)
        known = self.prices.setdefault(key, price)
        if len(self.prices) > MOST_PRICES:
            del self.prices[key]
            raise _BadRowError(f"beyond the {MOST_PRICES:,} prices that are kept")
        if known is not price:  # zones of a region may differ: keep the lower of each price
            usd, spot_usd = (
                min(filter(None, each), default=None)
                for each in ((known.on_demand_usd_h, price.on_demand_usd_h), (known.spot_usd_h, price.spot_usd_h))
            )
            self.prices[key] = replace(known, on_demand_usd_h=usd, spot_usd_h=spot_usd)

    def imported(self, name: str, path: Path) -> ImportedPrices:
        bad = [BadRows(reason, len(lines), lines[0]) for reason, lines in self.bad.items()]
        bad.sort(key=lambda each: (-each.count, each.first_line))
        if not self.prices:
            why = [f"{each.count:,} with {each.reason}" for each in bad]
            why += [f"{self.without_gpu:,} without an accelerator"] if self.without_gpu else []
            reason = f"of {self.rows:,} rows {', '.join(why)}" if why else "it has no rows"
            raise UsageError(f"{path} has no price of a machine with an accelerator: {reason}")
        return ImportedPrices(name, tuple(self.prices.values()), self.rows, self.without_gpu, tuple(bad))


def read_price_file(path: Path, *, provider: str | None, as_of: date) -> ImportedPrices:
    """Read the prices in a file.

    Args:
        provider: provider of the machines, where the file does not say.
        as_of: date of the prices.

    Raises:
        UsageError: the file cannot be read, has an unknown format, or holds no price.
    """
    text = _content(path)
    provider = None if provider is None else checked_provider(provider)
    name, rows, cells_of = _format_of(text, path, provider)
    gathered = _Gathered()
    source = path.name.encode("utf-8", "backslashreplace").decode()
    try:
        for line, row in rows:
            gathered.rows += 1
            if gathered.rows > MOST_ROWS:
                raise UsageError(f"{path} has more than {MOST_ROWS:,} rows, too many for a price list")
            try:
                for cells in cells_of(row):
                    gathered.add(_price(cells, provider, as_of, source))
            except _NoGpuError:
                gathered.without_gpu += 1
            except _BadRowError as error:
                gathered.bad.setdefault(str(error), []).append(line)
    except csv.Error as error:
        raise UsageError(f"{path} is not readable CSV: {error}") from error
    return gathered.imported(name, path)


def checked_provider(name: str) -> str:
    """Check a provider's name and return it in lower case, as prices have it.

    Raises:
        UsageError: it is not a valid name.
    """
    lower = name.strip().lower()
    if not _PROVIDER.fullmatch(lower):
        raise UsageError(f"{name[:60]!r} is not a provider's name: at most 40 letters, digits and . _ -, such as aws")
    return lower


def _content(path: Path) -> str:
    data = read_small(path, LARGEST_FILE_MIB, ", which no price list is")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text; expected {_KNOWN}") from error
    if "\0" in text or not text.strip():
        raise UsageError(f"{path} is {'not text' if text.strip() else 'empty'}; expected {_KNOWN}")
    return text


def _price(cells: _Cells, provider: str | None, as_of: date, source: str) -> Price:
    gpu = _name(cells, "gpu", "GPU")
    if not gpu:
        raise _NoGpuError
    instance = _name(cells, "instance")
    if not instance:
        raise _BadRowError("an accelerator priced without its machine")
    usd, spot_usd = (_usd(cells.get(name)) for name in ("on_demand_usd_h", "spot_usd_h"))
    if usd is None and spot_usd is None:
        raise _BadRowError("no price")
    memory_gb = _amount(cells, "gpu_memory_gb", "GPU memory")
    link = _name(cells, "link") or None
    if link not in (None, "NVLink", "PCIe"):
        raise _BadRowError("a link that is neither NVLink nor PCIe")
    named = named_gpu(gpu, memory_gb=memory_gb, instance=instance)
    return Price(
        provider=provider or _provider(cells.get("provider")),
        instance=instance,
        gpu=gpu,
        gpu_memory_gb=memory_gb,
        device=named.device,
        count=_count(cells.get("count")) * named.count,
        vcpus=_amount(cells, "vcpus", "vCPUs"),
        memory_gib=_amount(cells, "memory_gib", "memory"),
        link=link,
        region=_name(cells, "region") or None,
        on_demand_usd_h=usd,
        spot_usd_h=spot_usd,
        as_of=_day(cells.get("as_of")) or as_of,
        source=_name(cells, "source", longest=_LONGEST_SOURCE) or source,
    )


def _name(cells: _Cells, key: str, what: str = "", *, longest: int = _LONGEST_NAME) -> str:
    """Read a name, "" if absent; refuse it if a spreadsheet or terminal could run it."""
    text, name = (cells.get(key) or "").strip(), f"a name of the {what or key}"
    if len(text) > longest:
        raise _BadRowError(f"{name} that is longer than {longest} characters")
    if not text.isprintable():
        raise _BadRowError(f"{name} with invisible characters")
    if text[:1] in ("=", "+", "-", "@"):
        raise _BadRowError(f"{name} that begins like a formula")
    return text


def _provider(value: str | None) -> str:
    lower = (value or "").strip().lower()
    if not _PROVIDER.fullmatch(lower):
        raise _BadRowError("no usable name of a provider")
    return lower


def _amount(cells: _Cells, key: str, what: str) -> float | None:
    text = (cells.get(key) or "").strip()
    if text and not _AMOUNT.fullmatch(text):
        raise _BadRowError(f"{what} that is not an amount")
    return float(text or 0) or None


def _usd(value: str | None) -> float | None:
    text = (value or "").strip()
    if not text:
        return None
    if not _USD.fullmatch(text):
        raise _BadRowError("a price that is not an amount")
    usd = float(text)
    if not 0 < usd <= _LARGEST_USD_H:
        raise _BadRowError("a price of nothing" if not usd else f"a price above {_LARGEST_USD_H:,.0f} USD an hour")
    return usd


def _count(value: str | None) -> int:
    text = (value or "").strip()
    if not _COUNT.fullmatch(text) or not 0 < float(text) <= _MOST_GPUS:
        raise _BadRowError("a count of accelerators that is not a positive whole number")
    return int(float(text))


def _day(value: str | None) -> date | None:
    try:
        return date.fromisoformat((value or "").strip()) if value else None
    except ValueError as error:
        raise _BadRowError("a date that does not exist") from error


def _skypilot(row: _Cells) -> Iterator[_Cells]:
    cells = {name: row.get(column) for name, column in _SKYPILOT.items()}
    # The text looks like Python and is never evaluated.
    memory = re.search(r"'SizeInMiB': ?(\d{1,9})", (row.get("GpuInfo") or row.get("GPUInfo") or "")[:10_000])
    yield cells | {"gpu_memory_gb": str(int(memory[1]) / 1024) if memory else None}


def _gpuhunt(row: _Cells) -> Iterator[_Cells]:
    cells = {name: row.get(column) for name, column in _GPUHUNT.items()}
    spot = (row.get("spot") or "").strip().lower()
    if cells["gpu"] and spot not in ("true", "false"):
        raise _BadRowError("spot that is neither True nor False")
    zone = _ZONE.fullmatch((row.get("location") or "").strip())
    price = "spot_usd_h" if spot == "true" else "on_demand_usd_h"
    yield cells | {"region": zone[1] if zone else row.get("location"), price: row.get("price")}


def _deepview(row: tuple[Any, Any]) -> Iterator[_Cells]:
    name, instance = row
    if not isinstance(instance, dict):
        raise _BadRowError("an instance that is not an object")
    texts = {key: str(value) for key, value in instance.items() if not isinstance(value, (list, dict, NoneType))}
    cells: _Cells = {name: texts.get(key) for name, key in _DEEPVIEW.items()}
    regions = instance.get("regions")
    for region in regions if isinstance(regions, list) and regions else [None]:
        yield {**cells, "provider": str(name or ""), "region": None if region is None else str(region)}


def _own(row: _Cells) -> Iterator[_Cells]:
    yield row


_SKYPILOT: Final = {
    "instance": "InstanceType", "gpu": "AcceleratorName", "count": "AcceleratorCount", "on_demand_usd_h": "Price",
    "region": "Region", "vcpus": "vCPUs", "memory_gib": "MemoryGiB", "spot_usd_h": "SpotPrice",
}  # fmt: skip
_GPUHUNT: Final = {
    "instance": "instance_name", "gpu": "gpu_name", "count": "gpu_count", "gpu_memory_gb": "gpu_memory", "vcpus": "cpu",
    "memory_gib": "memory", "provider": "provider",
}  # fmt: skip
_DEEPVIEW: Final = {
    "instance": "name", "gpu": "gpu", "count": "ngpus", "vcpus": "vcpus", "memory_gib": "ram",
    "on_demand_usd_h": "cost",
}  # fmt: skip


class _Format(NamedTuple):
    """A CSV format and the columns that identify it."""

    name: str
    columns: frozenset[str]
    cells_of: Callable[[Any], Iterable[_Cells]]


_FORMATS: Final = (
    _Format("stepscope", frozenset(COLUMNS) - {"gpu_memory_gb", "page"}, _own),
    _Format("gpuhunt", frozenset({"instance_name", "location", "price", "gpu_count", "gpu_name", "spot"}), _gpuhunt),
    _Format("SkyPilot", frozenset(list(_SKYPILOT.values())[:5]), _skypilot),
)


def _format_of(
    text: str, path: Path, provider: str | None
) -> tuple[str, Iterator[tuple[int, Any]], Callable[[Any], Iterable[_Cells]]]:
    """Find the format's name, its numbered rows, and the function that converts a row to cells."""
    if text.lstrip()[0] in "[{":
        return "DeepView", _json_entries(text, path), _deepview
    table = text.lstrip()
    blank = text[: len(text) - len(table)].count("\n")
    reader = csv.DictReader(io.StringIO(table, newline=""))
    try:
        header = set(reader.fieldnames or ())
    except csv.Error as error:
        raise UsageError(f"{path} is not readable CSV: {error}") from error
    for name, columns, cells_of in _FORMATS:
        if header >= columns:
            if provider is None and "provider" not in header:
                raise UsageError(f"{path} does not say whose prices these are: name the provider with --provider aws")
            return name, ((blank + reader.line_num, row) for row in reader), cells_of
    raise UsageError(f"{path} has an unknown format; expected {_KNOWN}")


def _json_entries(text: str, path: Path) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield each instance with its provider's name, numbered from 1."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not readable JSON: {error}") from error
    providers = content if isinstance(content, list) else [content]
    if not all(isinstance(each, dict) and isinstance(each.get("instances"), list) for each in providers):
        raise UsageError(f"{path} is JSON, but not a list of providers with instances; expected {_KNOWN}")
    return enumerate(((each.get("name"), instance) for each in providers for instance in each["instances"]), 1)
