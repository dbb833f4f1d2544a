"""`stepscope devices`: the figures of accelerators, and measuring one; `stepscope prices`: what machines cost."""

from __future__ import annotations

import argparse
import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.read.tables import add_table_options, write_table
from stepscope.commands.shared import output
from stepscope.commands.shared.options import Command, CommandParser
from stepscope.commands.shared.output import counted
from stepscope.errors import UsageError
from stepscope.report.format import count, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from stepscope.machine.devices import DevicePeaks
    from stepscope.predict.cost.price_files import ImportedPrices
    from stepscope.predict.cost.prices import Price, PriceStore

_MEASURE: Final = "measure"


def _prepare_devices_parser(parser: CommandParser) -> None:
    parser.late = "name"
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="only this device; or measure: measure one on this machine"
    )
    group = parser.add_argument_group("your own devices")
    group.add_argument("--add", metavar="FILE", help="keep the devices of this TOML file")
    group.add_argument("--remove", metavar="NAME", help="remove this device of yours")
    group.add_argument(
        "--device", metavar="DEVICE", help="with measure: such as cuda:0 or cpu (default: the accelerator, else cpu)"
    )
    group.add_argument("--quick", action="store_true", help="with measure: a quick, rough measurement")
    group.add_argument("--called", metavar="NAME", help="with measure: the name of its row, if not the device's own")
    add_table_options(parser)


def _run_devices(arguments: argparse.Namespace) -> int:
    from stepscope.machine.devices import device_table

    measures = arguments.name == _MEASURE
    if [arguments.name, arguments.add, arguments.remove].count(None) < 2:
        raise UsageError("name a device, --add a file or --remove a device: one at a time")
    given = {"--device": arguments.device, "--called": arguments.called, "--quick": arguments.quick or None}
    for option, value in given.items():
        if value is not None and not measures:
            raise UsageError(f"{option} needs stepscope devices measure")
    if measures:
        _measure(arguments)
    elif arguments.add is not None:
        _add(arguments.add)
    elif arguments.remove is not None:
        _remove_devices(arguments.remove)
    elif arguments.name is not None:
        _show(arguments)
    else:
        write_table(devices_frame(device_table()), arguments, "devices", rows=0)
    return 0


def devices_frame(rows: tuple[DevicePeaks, ...]) -> pl.DataFrame:
    """One row per device, in the units of data sheets: GB, GB/s, tera-operations per second, W, us."""
    import polars as pl

    from stepscope.machine.devices import NUMBER_TYPES

    kinds = (*NUMBER_TYPES[1:], NUMBER_TYPES[0])  # deep learning types first
    columns: dict[str, list[str | float | None]] = {
        "device": [row.name for row in rows],
        "memory_gb": [_over(row.memory_bytes, 1e9) for row in rows],
        "gb_per_s": [_over(row.bandwidth_bytes_s, 1e9) for row in rows],
        **{f"{kind}_tflops": [_over(row.flops_s.get(kind), 1e12) for row in rows] for kind in kinds},
        "power_w": [row.power_w for row in rows],
        "measured_gb_per_s": [_over(row.sustained_bandwidth_bytes_s, 1e9) for row in rows],
        **{f"measured_{kind}_tflops": [_over(row.sustained_flops_s.get(kind), 1e12) for row in rows] for kind in kinds},
        "best_bf16_tflops": [_over(row.best_bf16_flops_s, 1e12) for row in rows],
        "launch_us": [_over(row.launch_ns, 1e3) for row in rows],
        "idle_w": [row.idle_power_w for row in rows],
        "idle_high_w": [row.idle_high_power_w for row in rows],
        "memory_w": [row.memory_power_w for row in rows],
        "host_link_gb_per_s": [_over(row.host_link_bytes_s, 1e9) for row in rows],
        "peer_link_gb_per_s": [_over(row.peer_link_bytes_s, 1e9) for row in rows],
        "units": [row.multiprocessors for row in rows],
        "clock_mhz": [row.clock_mhz for row in rows],
        "cache_mib": [_over(row.cache_bytes, 2**20) for row in rows],
        "capability": [row.capability for row in rows],
        "vendor": [row.vendor or None for row in rows],
        "architecture": [row.architecture or None for row in rows],
        "aliases": [", ".join(row.aliases) or None for row in rows],
        "source": [row.source for row in rows],
        "measured_source": [row.measured_source or None for row in rows],
        "power_source": [row.power_source or None for row in rows],
    }
    texts = ("device", "vendor", "architecture", "capability", "aliases", "source", "measured_source", "power_source")
    whole = ("power_w", "units", "clock_mhz")
    types = {name: pl.String if name in texts else pl.Int64 if name in whole else pl.Float64 for name in columns}
    return pl.DataFrame(columns, schema=types, strict=False)


def _over(value: float | None, unit: float) -> float | None:
    return None if value is None else float(f"{value / unit:.9g}")


def _show(arguments: argparse.Namespace) -> None:
    from stepscope.machine.devices import named_device
    from stepscope.report.predict import device_document

    row = named_device(arguments.name)
    if arguments.format not in (None, "table") or arguments.output != "-":
        write_table(devices_frame((row,)), arguments, "devices")
    else:
        output.print_document(device_document(row))


def _add(file: str) -> None:
    from stepscope.machine.devices import kept_file, plain, read_tables

    if not file or not Path(file).exists():
        raise UsageError(f"there is no file {file!r}")
    new, kept = read_tables(Path(file)), kept_file()
    old = {plain(table["name"]): table for table in read_tables(kept)}
    replaced = [table["name"] for table in new if plain(table["name"]) in old]
    _keep(list((old | {plain(table["name"]): table for table in new}).values()))
    names = ", ".join(table["name"] for table in new)
    again = f"; {', '.join(replaced)} replaced an earlier one" if replaced else ""
    output.print_text(printable(f"Kept {names} in {kept}{again}.") + "\n")


def _remove_devices(name: str) -> None:
    from stepscope.machine.devices import kept_file, plain, read_tables

    tables = read_tables(kept_file())
    left = [table for table in tables if plain(table["name"]) != plain(name)]
    if len(left) == len(tables):
        names = ", ".join(table["name"] for table in tables)
        raise UsageError(f"you have no device {name!r}; " + (f"you keep {names}" if names else "you keep none"))
    _keep(left)
    output.print_text(printable(f"No longer kept: {name}.") + "\n")


def _keep(tables: list[dict[str, object]]) -> None:
    from stepscope.machine.devices import devices_toml, forget_devices, kept_file

    kept = kept_file()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{kept.parent} cannot be made: {error.strerror}") from error
    if tables:
        output.write_atomically(kept, devices_toml(tables, comments=["Written by stepscope devices --add."]))
    else:
        kept.unlink(missing_ok=True)
    forget_devices()


def _measure(arguments: argparse.Namespace) -> None:
    from stepscope.machine.devices import devices_toml
    from stepscope.machine.measure_device import QUICK, measure_device, measured_lines, measured_row

    for option in ("sort", "ascending", "top", "format", "redact"):
        if getattr(arguments, option) not in (None, False):
            raise UsageError(f"--{option} does not work with stepscope devices measure, which writes TOML")
    measured = measure_device(
        arguments.device,
        effort=QUICK if arguments.quick else None,
        progress=lambda what: output.say(f"measuring {what}"),
    )
    lines = list(measured_lines(measured))
    data = devices_toml([measured_row(measured, arguments.called)], comments=lines)
    if arguments.output != "-":
        output.print_text("\n".join(map(printable, lines)) + "\n")
    output.write_output(arguments.output, data)


DEVICES: Final = Command(
    "devices",
    "What accelerators can do: makers' figures, measured ones and their sources; add or measure your own.",
    _prepare_devices_parser,
    _run_devices,
    """\
Rates are dense, without sparsity. Measured ones are what large matrix products and copies really reached.
Your own devices are kept in the user's configuration folder, or in STEPSCOPE_CONFIG_DIR; STEPSCOPE_DEVICES names a
further file for one run. A device of yours replaces the one of the same name.

examples:
  stepscope devices                                          every known device
  stepscope devices H100-SXM                                 one, with the sources of its figures
  stepscope devices --format csv --output devices.csv        all figures
  stepscope devices measure --output mine.toml               measure the device of this machine, with your PyTorch
  stepscope devices --add mine.toml                          keep it for every prediction
""",
)


_ACTIONS: Final = ("list", "import", "remove", "reset")
_MOST_NAMED: Final = 8


def _prepare_prices_parser(parser: CommandParser) -> None:
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="default: list")
    parser.add_argument(
        "names", metavar="WHAT", nargs="*", help="with import: files; with remove: providers, as the list names them"
    )
    group = parser.add_argument_group("importing")
    group.add_argument("--provider", metavar="NAME", help="whose prices the file contains, if it does not say")
    group.add_argument(
        "--as-of", metavar="DAY", type=_day, help="date of the prices (default: when the file was last changed)"
    )
    parser.add_argument("--providers", metavar="A,B", type=provider_names, help="list only these providers' prices")
    add_table_options(parser)


def _run_prices(arguments: argparse.Namespace) -> int:
    for option, value in (("--provider", arguments.provider), ("--as-of", arguments.as_of)):
        if value is not None and arguments.action != "import":
            raise UsageError(f"{option} needs stepscope prices import")
    if arguments.names and arguments.action in ("list", "reset"):
        raise UsageError(f"stepscope prices {arguments.action} takes no {arguments.names[0]!r}")
    match arguments.action:
        case "import":
            _import(arguments)
        case "remove":
            _remove_prices(arguments.names)
        case "reset":
            done = "Removed all imported prices." if price_store().reset() else "There are no imported prices."
            output.print_text(f"{done}\n")
        case _:
            _list(arguments)
    return 0


def price_store() -> PriceStore:
    from stepscope.predict.cost.prices import PriceStore
    from stepscope.record.run_folder import data_folder

    return PriceStore(data_folder())


def provider_names(text: str) -> tuple[str, ...]:
    """Parse provider names separated by commas, in lower case and without duplicates."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name between commas, or none at all")
    return names


def of_providers(prices: Sequence[Price], wanted: tuple[str, ...] | None) -> list[Price]:
    """The prices of these providers.

    Raises:
        UsageError: a provider has no known price.
    """
    known = sorted({price.provider for price in prices})
    for name in wanted or ():
        if name not in known:
            raise UsageError(f"no price from {name!r} is known; the providers are {', '.join(known)}")
    return [price for price in prices if wanted is None or price.provider in wanted]


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date: write it as 2026-11-01") from None
    if day > date.today():
        raise argparse.ArgumentTypeError(f"{text} lies in the future")
    return day


def _list(arguments: argparse.Namespace) -> None:
    from stepscope.report.predict import price_table

    prices = of_providers(price_store().known(), arguments.providers)
    write_table(price_table(prices, date.today()), arguments, "prices")


def _import(arguments: argparse.Namespace) -> None:
    from stepscope.predict.cost.price_files import read_price_file

    if not arguments.names:
        raise UsageError("name a price list to import: stepscope prices import vms.csv --provider aws")
    files = [Path(name) for name in arguments.names]
    found = [
        read_price_file(path, provider=arguments.provider, as_of=arguments.as_of or _changed(path)) for path in files
    ]
    price_store().add([price for each in found for price in each.prices])
    for path, each in zip(files, found, strict=True):
        output.print_text("\n".join(_imported(path, each)) + "\n")


def _changed(path: Path) -> date:
    try:
        return min(date.fromtimestamp(os.stat(path).st_mtime), date.today())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _imported(path: Path, found: ImportedPrices) -> list[str]:
    """Say what was imported, what cannot be predicted for, and what was left out, with the first line per reason."""
    days = sorted({price.as_of for price in found.prices})
    dated = f"of {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    whose = ", ".join(sorted({price.provider for price in found.prices})[:_MOST_NAMED])
    lines = [
        f"{printable(str(path))}: {found.format}, "
        f"{counted(len(found.prices), 'price')} of {whose} {dated}, from {counted(found.rows, 'row')}."
    ]
    if found.without_gpu:
        lines.append(f"  Skipped: {counted(found.without_gpu, 'row')} for machines without an accelerator.")
    where = "entry" if found.format == "DeepView" else "line"
    lines += [
        f"  Left out: {counted(each.count, 'row')} with {printable(each.reason)}, "
        f"the first in {where} {each.first_line}."
        for each in found.bad
    ]
    unknown = found.not_predictable
    if unknown:
        named = [f"{printable(gpu)} ({count(many)})" for gpu, many in list(unknown.items())[:_MOST_NAMED]]
        more = f" and {count(len(unknown) - _MOST_NAMED)} others" if len(unknown) > _MOST_NAMED else ""
        lines.append(
            f"  Kept, but without predictions: {', '.join(named)}{more}. The device table lacks them, "
            "or the list does not say which form it means."
        )
    return lines


def _remove_prices(names: Sequence[str]) -> None:
    if not names:
        raise UsageError("name the providers whose imported prices to remove: stepscope prices remove aws")
    removed = price_store().remove({name.strip().lower() for name in names})
    if not removed:
        raise UsageError(f"no prices from {', '.join(names)} were imported; the shipped ones stay")
    output.print_text(f"Removed {counted(removed, 'imported price')}.\n")


PRICES: Final = Command(
    "prices",
    "List what machines with accelerators cost, with each price's age; import price lists.",
    _prepare_prices_parser,
    _run_prices,
    """\
Imports SkyPilot's vms.csv, gpuhunt's CSV, DeepView's providers.json, and a CSV with the columns of stepscope prices
--format csv; files are recognised by content. An import replaces earlier imports of the same provider. docs/plan.md
names the sources of the shipped prices.

examples:
  stepscope prices                                           every price, its age and its source
  stepscope prices --providers lambda,runpod --sort on_demand_usd_h
  stepscope prices import aws/vms.csv --provider aws         SkyPilot's list of one cloud
  stepscope prices import v1.csv --as-of 2026-11-01          the day it was made, if the file's date differs
  stepscope prices remove aws                                what was imported for AWS
  stepscope prices reset                                     everything that was imported""",
)
