"""`stepscope prices`: what machines with accelerators cost by the hour, and how old each price is."""

from __future__ import annotations

import argparse
import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.output import counted
from stepscope.commands.shared.tables import add_table_options, write_table
from stepscope.errors import UsageError
from stepscope.report.format import count, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.predict.cost.price_files import ImportedPrices
    from stepscope.predict.cost.prices import Price, PriceStore

_ACTIONS: Final = ("list", "import", "remove", "reset")
_MOST_NAMED: Final = 8


def _prepare_parser(parser: CommandParser) -> None:
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="default: list")
    parser.add_argument(
        "names", metavar="WHAT", nargs="*", help="with import: files; with remove: providers, as the list names them"
    )
    group = parser.add_argument_group("importing")
    group.add_argument("--provider", metavar="NAME", help="whose prices the file holds, where it does not say")
    group.add_argument(
        "--as-of", metavar="DAY", type=_day, help="the day the prices are of (default: when the file was last changed)"
    )
    parser.add_argument("--providers", metavar="A,B", type=provider_names, help="list only these providers' prices")
    add_table_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    for option, value in (("--provider", arguments.provider), ("--as-of", arguments.as_of)):
        if value is not None and arguments.action != "import":
            raise UsageError(f"{option} belongs to stepscope prices import")
    if arguments.names and arguments.action in ("list", "reset"):
        raise UsageError(f"stepscope prices {arguments.action} takes no {arguments.names[0]!r}")
    match arguments.action:
        case "import":
            _import(arguments)
        case "remove":
            _remove(arguments.names)
        case "reset":
            done = "Removed all imported prices." if price_store().reset() else "There are no imported prices."
            output.print_text(f"{done}\n")
        case _:
            _list(arguments)
    return 0


def price_store() -> PriceStore:
    """The prices that this user has imported."""
    from stepscope.predict.cost.prices import PriceStore
    from stepscope.record.run_folder import data_folder

    return PriceStore(data_folder())


def provider_names(text: str) -> tuple[str, ...]:
    """Parse provider names separated by commas, in lower case and without duplicates."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no provider between two commas, or none at all")
    return names


def of_providers(prices: Sequence[Price], wanted: tuple[str, ...] | None) -> list[Price]:
    """The prices of these providers.

    Raises:
        UsageError: a provider has no known price.
    """
    known = sorted({price.provider for price in prices})
    for name in wanted or ():
        if name not in known:
            raise UsageError(f"no price of {name!r} is known; the providers are {', '.join(known)}")
    return [price for price in prices if wanted is None or price.provider in wanted]


def _day(text: str) -> date:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day: write it as 2026-11-01") from None
    if day > date.today():
        raise argparse.ArgumentTypeError(f"{text} lies in the future")
    return day


def _list(arguments: argparse.Namespace) -> None:
    from stepscope.report.devices import price_table

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
        lines.append(f"  Passed over: {counted(found.without_gpu, 'row')} of machines without an accelerator.")
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
            f"  Kept, but nothing can be predicted for them: {', '.join(named)}{more}. The device table lacks them, "
            "or the list does not say which form it means."
        )
    return lines


def _remove(names: Sequence[str]) -> None:
    if not names:
        raise UsageError("name the providers whose imported prices to remove: stepscope prices remove aws")
    removed = price_store().remove({name.strip().lower() for name in names})
    if not removed:
        raise UsageError(f"no prices of {', '.join(names)} were imported; those that come along stay")
    output.print_text(f"Removed {counted(removed, 'imported price')}.\n")


COMMAND: Final = Command(
    "prices",
    "List what machines with accelerators cost, with each price's age; import price lists of others.",
    _prepare_parser,
    _run,
    """\
Imported are SkyPilot's vms.csv, gpuhunt's CSV, DeepView's providers.json, and a CSV with the columns of
stepscope prices --format csv; files are recognised by content. An import takes the place of what was imported of the
same provider before. docs/plan.md names the sources of the shipped prices.

examples:
  stepscope prices                                           every price, its age and its source
  stepscope prices --providers lambda,runpod --sort on_demand_usd_h
  stepscope prices import aws/vms.csv --provider aws         SkyPilot's list of one cloud
  stepscope prices import v1.csv --as-of 2026-11-01          the day it was made, where the file's own is another
  stepscope prices remove aws                                what was imported of AWS
  stepscope prices reset                                     everything that was imported""",
)
