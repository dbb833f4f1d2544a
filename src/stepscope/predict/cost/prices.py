"""Hourly prices of machines with accelerators: data/prices.csv, and prices imported by the user.

Each price was published on a date and has the address where it was read; none is derived from another, and an
unpublished price is absent. Prices change, so every use shows the price's age.
"""

from __future__ import annotations

import csv
import io
import math
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from stepscope.errors import UsageError
from stepscope.files import say_changed, whole_file
from stepscope.machine.devices import device_table

_MEMORY_TOLERANCE: Final = 0.1
_MAKERS: Final = re.compile(r"\b(?:nvidia|amd|intel|google|habana|tesla|geforce|quadro|instinct|radeon|cloud)\b")
_FORMS: Final = {
    **dict.fromkeys(("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hgx"), "sxm"),
    "pcie": "pcie", "pci": "pcie", "nvl": "nvl",
}  # fmt: skip
_ALIASES: Final = {"h100mega": "h100"}
_MEMORY: Final = re.compile(r"(\d{1,4})(?:g|gb|gib)")
_TPU: Final = re.compile(r"(?:tpu-?)?(v5litepod|v5lite|v5e|v5p|v4|v6e)(?:-(\d{1,6}))?")
_TPUS: Final = {"v4": "TPU v4", "v5p": "TPU v5p", "v6e": "TPU v6e"}
_CORES_A_CHIP: Final = 2
"""Names such as v4-8 count cores (v4 and v5p have two per chip); those of v5e and v6e count chips."""
_COUNTED_BY_CORE: Final = ("v4", "v5p")

# Machines that come with a single form of a GPU, by their providers' documentation:
#   https://aws.amazon.com/ec2/instance-types/accelerated-computing/
#   https://cloud.google.com/compute/docs/gpus
#   https://learn.microsoft.com/azure/virtual-machines/sizes/overview
_MACHINES: Final = (
    (re.compile(r"p3\.(?:2|8|16)xlarge"), "v100", "V100-SXM2-16GB"),
    (re.compile(r"p3dn\.24xlarge"), "v100", "V100-SXM2-32GB"),
    (re.compile(r"p4d\.24xlarge"), "a100", "A100-SXM4-40GB"),
    (re.compile(r"p4de\.24xlarge"), "a100", "A100-SXM4-80GB"),
    (re.compile(r"p5\.(?:4|48)xlarge"), "h100", "H100-SXM"),
    (re.compile(r"p5en?\.(?:4|48)xlarge"), "h200", "H200-SXM"),
    (re.compile(r"a3-ultragpu-\d+g"), "h200", "H200-SXM"),
    (re.compile(r"(?:standard_)?nd96is?r_h200_v5"), "h200", "H200-SXM"),
    (re.compile(r"n1-\w+-\d+"), "v100", "V100-SXM2-16GB"),
    (re.compile(r"n1-\w+-\d+"), "p100", "P100-PCIe-16GB"),
    (re.compile(r"a2-(?:high|mega)gpu-\d+g"), "a100", "A100-SXM4-40GB"),
    (re.compile(r"a2-ultragpu-\d+g"), "a100", "A100-SXM4-80GB"),
    (re.compile(r"a3-(?:high|mega)gpu-\d+g"), "h100", "H100-SXM"),
    (re.compile(r"(?:standard_)?nc\d+r?s_v2"), "p100", "P100-PCIe-16GB"),
    (re.compile(r"(?:standard_)?nc\d+r?s_v3"), "v100", "V100-PCIe-16GB"),
    (re.compile(r"(?:standard_)?nc\d+ads_a100_v4"), "a100", "A100-PCIe-80GB"),
    (re.compile(r"(?:standard_)?nd96am?sr_(?:a100_)?v4"), "a100", None),
    (re.compile(r"(?:standard_)?nd96is?r_h100_v5"), "h100", "H100-SXM"),
)


@dataclass(frozen=True, slots=True)
class _Name:
    model: str
    form: str | None
    memory_gb: float | None


@dataclass(frozen=True, slots=True)
class NamedGpu:
    """Meaning of a price list's name for a GPU."""

    device: str | None  # the table row's name; None if there is no such row, or several are possible
    count: int = 1  # number of accelerators in the name: 8 for "tpu-v5litepod-8", else 1
    candidates: tuple[str, ...] = ()  # possible rows if there are several


def named_gpu(name: str, *, memory_gb: float | None = None, instance: str = "") -> NamedGpu:
    """Find the device that a price list means.

    Args:
        memory_gb: memory of one GPU, if the list has it; GB or GiB.
        instance: machine type, which may decide between several candidates.
    """
    machine = re.sub(r"\s+", "_", instance.strip().lower())
    return _named(name.strip().lower(), None if memory_gb is None else round(memory_gb, 3), machine)


@lru_cache(maxsize=4096)
def _named(name: str, memory_gb: float | None, instance: str) -> NamedGpu:
    if (tpu := _TPU.fullmatch(name)) is not None:
        return _tpu(tpu[1], tpu[2])
    wanted = _parsed(name)
    found = [row for row, parsed in _rows() if _means(wanted, memory_gb, parsed)]
    if len(found) > 1:
        found = _of_machine(instance, wanted, found) or found
    return NamedGpu(found[0]) if len(found) == 1 else NamedGpu(None, candidates=tuple(found))


def _tpu(generation: str, number: str | None) -> NamedGpu:
    device = _TPUS.get(generation, "TPU v5e")
    count = int(number or 1)
    if generation in _COUNTED_BY_CORE and number:
        count = max(count // _CORES_A_CHIP, 1)
    return NamedGpu(device if count else None, max(count, 1))


@lru_cache(maxsize=1)
def _rows() -> tuple[tuple[str, _Name], ...]:
    # Nobody rents out one of two dies.
    rows = [(row, _parsed(row.name.lower())) for row in device_table() if "(" not in row.name]
    return tuple(
        (row.name, replace(parsed, memory_gb=None if row.memory_bytes is None else row.memory_bytes / 1e9))
        for row, parsed in rows
    )


def _parsed(name: str) -> _Name:
    model, form, memory = "", None, None
    for word in re.findall(r"[a-z0-9]+", _MAKERS.sub(" ", name)):
        if word in _FORMS:
            form = _FORMS[word]
        elif (amount := _MEMORY.fullmatch(word)) is not None:
            memory = float(amount[1])
        else:
            model += word
    return _Name(_ALIASES.get(model, model), form, memory)


def _means(wanted: _Name, memory_gb: float | None, row: _Name) -> bool:
    if not wanted.model or row.model not in (wanted.model, f"rtx{wanted.model}"):
        return False
    if wanted.form is not None and row.form is not None and wanted.form != row.form:
        return False
    if wanted.form == "nvl" and row.form != "nvl":
        return False
    asked = wanted.memory_gb if wanted.memory_gb is not None else memory_gb
    if asked is None or row.memory_gb is None:
        return True
    return abs(asked / row.memory_gb - 1) <= _MEMORY_TOLERANCE


def _of_machine(instance: str, wanted: _Name, found: list[str]) -> list[str]:
    """Keep the candidates that are possible in a machine: by known machine types, else by a form factor in its name."""
    for pattern, model, device in _MACHINES:
        if model == wanted.model and pattern.fullmatch(instance):
            return [row for row in found if row == device or (device is None and "SXM" in row)]
    form = _parsed(instance.replace("_", " ")).form
    return [] if form is None else [row for row in found if _parsed(row.lower()).form == form]


COLUMNS: Final = (
    "provider", "instance", "gpu", "gpu_memory_gb", "count", "vcpus", "memory_gib", "link", "region", "on_demand_usd_h",
    "spot_usd_h", "as_of", "source", "page",
)  # fmt: skip
OLD_DAYS: Final = 90
"""Age above which a price is marked as old: providers change theirs a few times a year, spot prices daily."""


@dataclass(frozen=True, slots=True)
class Price:
    """Hourly price of one machine in US dollars, without taxes, disks and traffic; None where the source has none."""

    provider: str  # lower case, such as "aws"
    instance: str  # the provider's name for the machine
    gpu: str  # the source's name for its accelerator
    gpu_memory_gb: float | None  # per accelerator
    device: str | None  # row of `stepscope.machine.devices`; None if there is no such row, or several are possible
    count: int  # accelerators in the machine
    vcpus: float | None
    memory_gib: float | None  # vcpus, memory_gib: of the machine
    link: str | None  # "NVLink" or "PCIe", between its accelerators
    region: str | None
    on_demand_usd_h: float | None
    spot_usd_h: float | None  # on-demand and interruptible (spot) price
    as_of: date  # date of the price
    source: str  # address where it was read, or the file it was imported from
    page: str | None = None  # the provider's own pricing page

    def age_days(self, today: date) -> int:
        """Whole days since the price was published; negative for a date in the future."""
        return (today - self.as_of).days

    def is_old(self, today: date) -> bool:
        """Whether the price is older than OLD_DAYS."""
        return self.age_days(today) > OLD_DAYS

    def usd_h(self, *, spot: bool) -> float | None:
        return self.spot_usd_h if spot else self.on_demand_usd_h


@lru_cache(maxsize=1)
def shipped_prices() -> tuple[Price, ...]:
    text = files("stepscope").joinpath("data/prices.csv").read_text(encoding="utf-8")
    return tuple(price_of(row) for row in csv.DictReader(text.splitlines()))


def price_of(row: Mapping[str, str | None]) -> Price:
    """Parse a row of a file with the columns COLUMNS; ValueError or KeyError if it is invalid.

    Raises:
        ValueError, KeyError: the row is invalid.
    """
    if not all(isinstance(cell, str) for cell in row.values()):  # csv.DictReader's mark for a row too short or too long
        raise ValueError("a row has more or fewer cells than columns")
    try:
        price = msgspec.convert({**{name: row[name] or None for name in COLUMNS}, "device": None}, Price, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    amounts = (price.gpu_memory_gb, price.vcpus, price.memory_gib, price.on_demand_usd_h, price.spot_usd_h)
    if not all(0 <= amount < math.inf for amount in amounts if amount is not None):
        raise ValueError("a negative or infinite amount")
    return replace(price, device=named_gpu(price.gpu, memory_gb=price.gpu_memory_gb, instance=price.instance).device)


def row_of(price: Price) -> list[str]:
    values = [getattr(price, name) for name in COLUMNS]
    return ["" if value is None else repr(value) if isinstance(value, float) else str(value) for value in values]


def newest(prices: Iterable[Price]) -> list[Price]:
    """Latest price of each machine in each region; on the same date the later one in `prices` wins."""
    best: dict[tuple[object, ...], Price] = {}
    for price in prices:
        key = (price.provider, price.instance, price.device or price.gpu, price.count, price.region)
        if key not in best or price.as_of >= best[key].as_of:
            best[key] = price
    return list(best.values())


def unpriced_devices(prices: Sequence[Price], names: Iterable[str]) -> list[str]:
    priced = {price.device for price in prices}
    return [name for name in names if name not in priced]


_FILE: Final = "prices.csv"
_CHECKSUM: Final = "# checksum "
"""Start of the last line; files of older versions have no checksum."""


class PriceStore:
    """Store of imported prices; an import replaces earlier imports of the same providers.

    Args:
        folder: stepscope's data folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE

    def imported(self) -> list[Price]:
        """Read the imported prices.

        Raises:
            UsageError: the file cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise self._unreadable() from error
        rows, _, checksum = text.rpartition(_CHECKSUM)
        is_whole = not rows or checksum.strip() == _checksum(rows)
        try:
            reader = csv.DictReader(io.StringIO(rows or text, newline=""))
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                raise self._unreadable()
            prices = [price_of(row) for row in reader]
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise self._unreadable() from error
        if not is_whole:
            say_changed(self.path)
        return prices

    def known(self) -> list[Price]:
        """Latest price, shipped or imported, of each machine in each region."""
        return newest([*shipped_prices(), *self.imported()])

    def add(self, prices: Collection[Price]) -> None:
        """Replace the imported prices of these providers.

        Raises:
            UsageError: earlier imports cannot be read, or the file cannot be written.
        """
        providers = {price.provider for price in prices}
        self._write([*(price for price in self.imported() if price.provider not in providers), *prices])

    def remove(self, providers: Collection[str]) -> int:
        """Remove the imported prices of these providers and return their number.

        Raises:
            UsageError: earlier imports cannot be read, or the file cannot be written.
        """
        before = self.imported()
        kept = [price for price in before if price.provider not in providers]
        if len(kept) < len(before):
            self._write(kept)
        return len(before) - len(kept)

    def reset(self) -> bool:
        """Remove all imports, readable or not; returns whether there were any.

        Raises:
            UsageError: the file cannot be removed.
        """
        try:
            self.path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UsageError(f"{self.path} cannot be removed: {error.strerror}") from error
        return True

    def _write(self, prices: Iterable[Price]) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(row_of, prices))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as file:
                file.write(f"{text.getvalue()}{_CHECKSUM}{_checksum(text.getvalue())}\n".encode())
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}") from error

    def _unreadable(self) -> UsageError:
        return UsageError(
            f"the imported prices in {self.path} cannot be read; stepscope prices reset removes them, to import anew"
        )


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
