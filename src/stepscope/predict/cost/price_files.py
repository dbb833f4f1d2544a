"""Price lists of others, told apart by what is in them: SkyPilot's vms.csv, gpuhunt's CSV, DeepView's providers.json.

A file with the columns of data/prices.csv is read as well. What cannot be used is counted, with the first line that it
stands in; the rest is kept. A file may be anyone's: names that could be taken for a formula or a terminal's command are
refused, as is what is no price.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import msgspec

from stepscope.errors import UsageError
from stepscope.files import read_small
from stepscope.predict.cost.prices import COLUMNS, Price, named_gpu

PROVIDER: Final = re.compile(r"[a-z0-9][a-z0-9 ._-]{0,39}")
_LARGEST_USD_H: Final = 100_000.0
_LONGEST_NAME: Final = 100
_MOST_GPUS: Final = 10_000
_ZONE: Final = re.compile(r"(.+-[a-z]+\d)-[a-z]")


class BadRowError(Exception):
    """Why a row cannot be used."""


def text_in(row: Mapping[str, Any], key: str, what: str, *, longest: int = _LONGEST_NAME) -> str:
    """A name, empty where there is none; refused where it could be taken for a formula or a terminal's command."""
    text = str(row.get(key) or "").strip()
    if len(text) > longest:
        raise BadRowError(f"a name of the {what} that is longer than {longest} characters")
    if not text.isprintable():
        raise BadRowError(f"a name of the {what} with characters that cannot be seen")
    if text[:1] in ("=", "+", "-", "@"):
        raise BadRowError(f"a name of the {what} that begins like a formula")
    return text


def provider_in(value: Any) -> str:
    """A provider's name in lower case."""
    lower = str(value or "").strip().lower()
    if not PROVIDER.fullmatch(lower):
        raise BadRowError("no usable name of a provider")
    return lower


def region_of(zone: str) -> str:
    """The region of a zone such as us-central1-a; a region stays."""
    match = _ZONE.fullmatch(zone)
    return match[1] if match else zone


def amount_in(value: str | None, what: str) -> float | None:
    """A number that is not negative; None where there is none."""
    text = (value or "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}(?:\.\d{0,20})?", text):
        raise BadRowError(f"{what} that is no amount")
    return float(text) or None


def usd_in(value: str | None) -> float | None:
    """A price of an hour; None where there is none."""
    text = (value or "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}(?:\.\d{0,20})?(?:[eE]-?\d{1,2})?", text):
        raise BadRowError("a price that is no amount")
    usd = float(text)
    if not 0 < usd <= _LARGEST_USD_H:
        raise BadRowError("a price of nothing" if not usd else f"a price above {_LARGEST_USD_H:,.0f} USD an hour")
    return usd


def count_in(value: str | None) -> int:
    """How many accelerators; lists write 8 as 8.0."""
    text = (value or "").strip()
    if not re.fullmatch(r"\d{1,6}(?:\.0*)?", text) or not 0 < float(text) <= _MOST_GPUS:
        raise BadRowError("a count of accelerators that is no whole number from 1 on")
    return int(float(text))


def day_in(value: str | None) -> date | None:
    """A day such as 2026-11-01; None where there is none."""
    try:
        return date.fromisoformat((value or "").strip()) if value else None
    except ValueError as error:
        raise BadRowError("a date that is none") from error


def memory_in(info: str | None) -> float | None:
    """Of one GPU, in GiB, from SkyPilot's GpuInfo; never evaluated, although it looks like Python."""
    match = re.search(r"'SizeInMiB': ?(\d{1,9})", (info or "")[:10_000])
    return int(match[1]) / 1024 if match else None


LARGEST_FILE_MIB: Final = 64
MOST_ROWS: Final = 1_000_000
MOST_PRICES: Final = 200_000
_SKYPILOT: Final = frozenset({"InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"})
_GPUHUNT: Final = frozenset({"instance_name", "location", "price", "gpu_count", "gpu_name", "spot"})
_OWN: Final = frozenset(COLUMNS) - {"gpu_memory_gb", "page"}
_KNOWN: Final = (
    "SkyPilot's vms.csv, gpuhunt's CSV, DeepView's providers.json or a CSV with the columns of stepscope prices"
)


@dataclass(frozen=True, slots=True)
class BadRows:
    """Rows that could not be used, all for one reason; `first_line` of the file, or the number of a JSON entry."""

    reason: str
    count: int
    first_line: int


@dataclass(frozen=True, slots=True)
class ImportedPrices:
    """What a file holds.

    Attributes:
        format: "SkyPilot", "gpuhunt", "DeepView" or "stepscope".
        prices: one for each machine and region; of several zones the lowest price.
        rows: in the file.
        without_gpu: rows of machines without an accelerator.
        bad: rows that cannot be used, the most frequent reason first.
    """

    format: str
    prices: tuple[Price, ...]
    rows: int
    without_gpu: int
    bad: tuple[BadRows, ...]

    @property
    def not_predictable(self) -> dict[str, int]:
        """GPUs that the device table does not know or cannot tell apart, and how many prices each has."""
        counts: dict[str, int] = {}
        for price in self.prices:
            if price.device is None:
                counts[price.gpu] = counts.get(price.gpu, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


class _NoGpuError(Exception):
    """A row is about a machine without an accelerator."""


@dataclass
class _Gathered:
    """Prices by machine and region, as the rows come."""

    prices: dict[tuple[str, str, str, str | None], Price] = field(default_factory=dict)
    rows: int = 0
    without_gpu: int = 0
    bad: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, price: Price) -> None:
        key = (price.provider, price.instance, price.gpu, price.region)
        known = self.prices.get(key)
        if known is None and len(self.prices) >= MOST_PRICES:
            raise BadRowError(f"beyond the {MOST_PRICES:,} prices that are kept")
        self.prices[key] = price if known is None else _lower(known, price)

    def refuse(self, reason: str, line: int) -> None:
        count, first = self.bad.get(reason, (0, line))
        self.bad[reason] = (count + 1, first)


def read_price_file(path: Path, *, provider: str | None, as_of: date) -> ImportedPrices:
    """The prices in a file.

    Args:
        provider: of the machines, where the file does not say.
        as_of: the day that the prices are of.

    Raises:
        UsageError: the file cannot be read, is none of the known ones, or holds no price.
    """
    data = _content(path)
    provider = None if provider is None else checked_provider(provider)
    name, rows, reader = _format_of(data, path, provider)
    gathered = _Gathered()
    source = path.name.encode("utf-8", "backslashreplace").decode()
    try:
        for line, row in rows:
            gathered.rows += 1
            if gathered.rows > MOST_ROWS:
                raise UsageError(f"{path} has more than {MOST_ROWS:,} rows, which no price list has")
            try:
                for price in reader(row, provider, as_of, source):
                    gathered.add(price)
            except _NoGpuError:
                gathered.without_gpu += 1
            except BadRowError as error:
                gathered.refuse(str(error), line)
    except csv.Error as error:
        raise UsageError(f"{path} is no readable CSV: {error}") from error
    bad = [BadRows(reason, count, first) for reason, (count, first) in gathered.bad.items()]
    found = ImportedPrices(
        name,
        tuple(gathered.prices.values()),
        gathered.rows,
        gathered.without_gpu,
        tuple(sorted(bad, key=lambda each: (-each.count, each.first_line))),
    )
    if not found.prices:
        raise UsageError(f"{path} holds no price of a machine with an accelerator: {_nothing_because(found)}")
    return found


def checked_provider(name: str) -> str:
    """A provider's name as prices carry it.

    Raises:
        UsageError: it is none.
    """
    lower = name.strip().lower()
    if not PROVIDER.fullmatch(lower):
        raise UsageError(f"{name[:60]!r} is no name for a provider: at most 40 letters, digits and . _ -, such as aws")
    return lower


_Row = Any
_Reader = Callable[[_Row, "str | None", date, str], Iterable[Price]]


def _content(path: Path) -> str:
    data = read_small(path, LARGEST_FILE_MIB, ", which no price list is")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text; expected is {_KNOWN}") from error
    if "\0" in text or not text.strip():
        raise UsageError(f"{path} is {'no text' if text.strip() else 'empty'}; expected is {_KNOWN}")
    return text


def _format_of(text: str, path: Path, provider: str | None) -> tuple[str, Iterator[tuple[int, _Row]], _Reader]:
    if text.lstrip()[0] in "[{":
        return "DeepView", _json_entries(text, path), _deepview
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        header = set(reader.fieldnames or ())
    except csv.Error as error:
        raise UsageError(f"{path} is no readable CSV: {error}") from error
    rows = ((reader.line_num, row) for row in reader)
    if header >= _OWN:
        return "stepscope", rows, _own
    if header >= _GPUHUNT:
        if provider is None and "provider" not in header:
            raise UsageError(f"{path} does not say whose prices these are: name the provider with --provider aws")
        return "gpuhunt", rows, _gpuhunt
    if header >= _SKYPILOT:
        if provider is None:
            raise UsageError(f"{path} does not say whose prices these are: name the provider with --provider aws")
        return "SkyPilot", rows, _skypilot
    raise UsageError(f"{path} is no price list that is known; expected is {_KNOWN}")


def _json_entries(text: str, path: Path) -> Iterator[tuple[int, _Row]]:
    """Each instance with its provider's name, numbered from 1."""
    try:
        content = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no readable JSON: {error}") from error
    providers = content if isinstance(content, list) else [content]
    if not all(isinstance(each, dict) and isinstance(each.get("instances"), list) for each in providers):
        raise UsageError(f"{path} is JSON, but no list of providers with instances; expected is {_KNOWN}")
    entries = ((each.get("name"), instance) for each in providers for instance in each["instances"])
    return ((number, entry) for number, entry in enumerate(entries, 1))


def _skypilot(row: _Row, provider: str | None, as_of: date, source: str) -> Iterator[Price]:
    gpu = text_in(row, "AcceleratorName", "GPU")
    if not gpu:
        raise _NoGpuError
    instance = text_in(row, "InstanceType", "instance")
    if not instance:
        raise BadRowError("an accelerator priced without its machine")
    yield _price(
        provider=provider or "",
        instance=instance,
        gpu=gpu,
        gpu_memory_gb=memory_in(row.get("GpuInfo") or row.get("GPUInfo")),
        count=count_in(row.get("AcceleratorCount")),
        vcpus=amount_in(row.get("vCPUs"), "vCPUs"),
        memory_gib=amount_in(row.get("MemoryGiB"), "memory"),
        region=text_in(row, "Region", "region"),
        on_demand_usd_h=usd_in(row.get("Price")),
        spot_usd_h=usd_in(row.get("SpotPrice")),
        as_of=as_of,
        source=source,
    )


def _gpuhunt(row: _Row, provider: str | None, as_of: date, source: str) -> Iterator[Price]:
    gpu = text_in(row, "gpu_name", "GPU")
    if not gpu:
        raise _NoGpuError
    usd, spot = usd_in(row.get("price")), (row.get("spot") or "").strip().lower()
    if spot not in ("true", "false"):
        raise BadRowError("spot that is neither True nor False")
    yield _price(
        provider=provider or provider_in(row.get("provider")),
        instance=text_in(row, "instance_name", "instance"),
        gpu=gpu,
        gpu_memory_gb=amount_in(row.get("gpu_memory"), "GPU memory"),
        count=count_in(row.get("gpu_count")),
        vcpus=amount_in(row.get("cpu"), "vCPUs"),
        memory_gib=amount_in(row.get("memory"), "memory"),
        region=region_of(text_in(row, "location", "region")),
        on_demand_usd_h=usd if spot == "false" else None,
        spot_usd_h=usd if spot == "true" else None,
        as_of=as_of,
        source=source,
    )


def _deepview(row: _Row, provider: str | None, as_of: date, source: str) -> Iterator[Price]:
    name, instance = row
    if not isinstance(instance, dict):
        raise BadRowError("an instance that is no object")
    cells = {key: None if value is None else str(value) for key, value in instance.items() if not _is_nested(value)}
    gpu = text_in(cells, "gpu", "GPU")
    if not gpu:
        raise _NoGpuError
    price = _price(
        provider=provider or provider_in(name),
        instance=text_in(cells, "name", "instance"),
        gpu=gpu,
        gpu_memory_gb=None,
        count=count_in(cells.get("ngpus")),
        vcpus=amount_in(cells.get("vcpus"), "vCPUs"),
        memory_gib=amount_in(cells.get("ram"), "memory"),
        region=None,
        on_demand_usd_h=usd_in(cells.get("cost")),
        spot_usd_h=None,
        as_of=as_of,
        source=source,
    )
    regions = instance.get("regions")
    names = regions if isinstance(regions, list) and regions else [None]
    for region in names:
        yield replace(price, region=None if region is None else text_in({"region": str(region)}, "region", "region"))


def _own(row: _Row, provider: str | None, as_of: date, source: str) -> Iterator[Price]:
    gpu = text_in(row, "gpu", "GPU")
    if not gpu:
        raise _NoGpuError
    link = text_in(row, "link", "link") or None
    if link not in (None, "NVLink", "PCIe"):
        raise BadRowError("a link that is neither NVLink nor PCIe")
    yield _price(
        provider=provider or provider_in(row.get("provider")),
        instance=text_in(row, "instance", "instance"),
        gpu=gpu,
        gpu_memory_gb=amount_in(row.get("gpu_memory_gb"), "GPU memory"),
        count=count_in(row.get("count")),
        vcpus=amount_in(row.get("vcpus"), "vCPUs"),
        memory_gib=amount_in(row.get("memory_gib"), "memory"),
        link=link,
        region=text_in(row, "region", "region"),
        on_demand_usd_h=usd_in(row.get("on_demand_usd_h")),
        spot_usd_h=usd_in(row.get("spot_usd_h")),
        as_of=day_in(row.get("as_of")) or as_of,
        source=text_in(row, "source", "source", longest=300) or source,
    )


def _price(**values: Any) -> Price:
    if not values["instance"]:
        raise BadRowError("no name of the instance")
    if values["on_demand_usd_h"] is None and values["spot_usd_h"] is None:
        raise BadRowError("no price")
    named = named_gpu(values["gpu"], memory_gb=values["gpu_memory_gb"], instance=values["instance"])
    values["count"] *= named.count
    values["region"] = values["region"] or None
    return Price(**{"link": None, **values}, device=named.device)


def _lower(one: Price, other: Price) -> Price:
    """The lower of each of the two prices: what the zones of a region cost may differ."""
    return replace(
        one,
        on_demand_usd_h=_least(one.on_demand_usd_h, other.on_demand_usd_h),
        spot_usd_h=_least(one.spot_usd_h, other.spot_usd_h),
    )


def _least(one: float | None, other: float | None) -> float | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _is_nested(value: Any) -> bool:
    return isinstance(value, (list, dict))


def _nothing_because(found: ImportedPrices) -> str:
    reasons = [f"{each.count:,} with {each.reason}" for each in found.bad]
    if found.without_gpu:
        reasons.append(f"{found.without_gpu:,} without an accelerator")
    return f"of {found.rows:,} rows {', '.join(reasons)}" if reasons else "it has no rows"
