"""Remedies applied to a program as it starts, without a change in its files: `stepscope run --apply LIST`.

Each family of flags is one module with `FLAGS`, `install(applying, chosen)`, which patches a process that has imported
torch, and where it has to, `environment(chosen, variables)` for what must be set before the program starts. A family
that fails is never fatal: the program goes on as it was, and the run says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stepscope.record.apply import (
    compilation,
    copies,
    data_parallel,
    debugging,
    garbage,
    host,
    loaders,
    logged_numbers,
    losses,
    optimizers,
    own_lines,
    precision,
    progress,
)
from stepscope.record.apply.flags import Flag, Outcome, Value, applied_records, outcomes, values_of, words_of
from stepscope.record.apply.patching import Applying
from stepscope.record.run_folder import RunFolder

__all__ = [
    "APPLICATIONS",
    "Applying",
    "Flag",
    "Outcome",
    "Value",
    "all_flags",
    "applied_outcomes",
    "applied_records",
    "environment_of",
    "install",
    "parse_applications",
]

APPLICATIONS: Final[tuple[Any, ...]] = (
    optimizers,
    loaders,
    copies,
    compilation,
    precision,
    losses,
    host,
    garbage,
    progress,
    debugging,
    data_parallel,
    own_lines,
    logged_numbers,
)
"""The families of flags; patches are put in place in this order."""


def all_flags() -> tuple[Flag, ...]:
    """Every flag there is."""
    return tuple(flag for family in APPLICATIONS for flag in family.FLAGS)


def parse_applications(text: str) -> tuple[str, ...]:
    """The words of a list such as "fuse-optimizer,workers=4", each once; a value that is the default is left out.

    Raises:
        UsageError: a name or value is wrong, or two of them contradict each other.
    """
    return words_of(text, all_flags())


def environment_of(applications: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program to which these are applied.

    Args:
        applications: words that `parse_applications` returned.
        environment: what it would have without them.

    Raises:
        UsageError: something that must be there before the program starts is not.
    """
    chosen = values_of(applications, all_flags())
    variables = dict(environment)
    for family in APPLICATIONS:
        if hasattr(family, "environment"):
            variables = family.environment(chosen, variables)
    return variables


def install(applications: Sequence[str], folder: RunFolder | None, *, is_recorded: bool = False) -> Applying:
    """Patch this process, which has imported torch; raises nothing for what cannot be patched.

    Args:
        applications: words that `parse_applications` returned.
        folder: the run's, into which the process writes what came of them.
        is_recorded: whether a profiler is to see the process, rather than a clock alone.
    """
    chosen = values_of(applications, all_flags())
    applying = Applying(chosen, {flag.name: flag.unseen for flag in all_flags()}, folder, is_recorded=is_recorded)
    for family in APPLICATIONS:
        own = {flag.name: chosen[flag.name] for flag in family.FLAGS if flag.name in chosen}
        if own:
            with applying.guarded(*own):
                family.install(applying, own)
    return applying


def applied_outcomes(applications: Sequence[str], folder: RunFolder) -> list[Outcome]:
    """What became of them in all processes of a run that has ended."""
    unseen = {flag.name: flag.unseen for flag in all_flags()}
    return outcomes(applications, applied_records(folder), unseen)
