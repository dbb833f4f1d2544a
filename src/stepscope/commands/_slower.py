"""`--fail-if-slower`, which means the same wherever programs are compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from stepscope.commands.diagnose import parsed_share
from stepscope.report.format import printable, share

if TYPE_CHECKING:
    from stepscope.compare import SampleComparison


def add_slower_option(group: argparse._ArgumentGroup) -> None:
    """Add --fail-if-slower to a command's arguments."""
    group.add_argument(
        "--fail-if-slower",
        metavar="SHARE",
        type=parsed_share,
        help="exit 1 where steps are shown to be slower than the first, by at least this much, such as 3%%",
    )


def judged(limit: float | None, comparisons: Iterable[tuple[str, SampleComparison]]) -> int:
    """The exit code under --fail-if-slower, with what broke the limit on standard error.

    Args:
        limit: a share of the first one's step; None where the option was not given.
        comparisons: what is compared with the first, by name.
    """
    if limit is None:
        return 0
    slower = [(name, found) for name, found in comparisons if found.is_slower_by(limit)]
    for name, found in slower:
        longer = share(found.change or 0.0)
        print(f"stepscope: {printable(name)} is slower by {longer}, --fail-if-slower {share(limit)}", file=sys.stderr)
    return 1 if slower else 0
