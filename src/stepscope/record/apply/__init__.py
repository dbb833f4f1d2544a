"""Apply remedies to a program as it starts, without a change to its files: `stepscope run --apply LIST`.

The flags of a family are installed together: a family patches a process that has imported torch, and some families set
environment variables before the program starts. A family that fails is never fatal: the program runs unchanged, and
the run reports why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stepscope import guard
from stepscope.record.apply import code_swaps, host, loaders, model, training
from stepscope.record.apply.flags import Flag, Outcome, Value, applied_records, outcomes, values_of, words_of
from stepscope.record.apply.patching import Applying
from stepscope.record.run_folder import RunFolder
from stepscope.remedies.attempts import guard_with

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


@dataclass(frozen=True, slots=True)
class Family:
    """Flags that are installed together.

    Attributes:
        install: patches the process for the chosen flags and their values.
        environment: takes all chosen flags and the program's environment; returns the environment to start it with.
    """

    flags: tuple[Flag, ...]
    install: Callable[[Applying, Mapping[str, str]], None]
    environment: Callable[[Mapping[str, str], dict[str, str]], dict[str, str]] = lambda chosen, variables: variables


APPLICATIONS: Final = (
    Family(training.OPTIMIZER_FLAGS, training.install_optimizers),
    Family(loaders.LOADER_FLAGS, loaders.install_loaders),
    Family(loaders.COPY_FLAGS, loaders.install_copies),
    Family(model.COMPILE_FLAGS, model.install_compilation),
    Family(model.PRECISION_FLAGS, model.install_precision),
    Family(training.LOSS_FLAGS, training.install_losses),
    Family(host.HOST_FLAGS, host.install_host, host.host_environment),
    Family(host.GARBAGE_FLAGS, host.install_garbage),
    Family(host.PROGRESS_FLAGS, host.install_progress),
    Family(host.DEBUG_FLAGS, host.install_debugging, host.debug_environment),
    Family(training.DATA_PARALLEL_FLAGS, training.install_data_parallel),
    Family(code_swaps.BATCHING_FLAGS, code_swaps.install_batching),
    Family(training.LOGGING_FLAGS, training.install_logging),
)
"""In the order in which they are installed."""


def all_flags() -> tuple[Flag, ...]:
    return tuple(flag for family in APPLICATIONS for flag in family.flags)


def parse_applications(text: str) -> tuple[str, ...]:
    """Split a list such as "fuse-optimizer,workers=4" into unique words; a value that is the default is dropped.

    Raises UsageError if a name or value is invalid, or two flags contradict each other.
    """
    return words_of(text, all_flags())


def environment_of(applications: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a program to which these words of `parse_applications` are applied.

    Raises UsageError if a prerequisite is missing, such as an allocator.
    """
    chosen = values_of(applications, all_flags())
    variables = dict(environment)
    for family in APPLICATIONS:
        variables = family.environment(chosen, variables)
    return variables


def install(applications: Sequence[str], folder: RunFolder | None, *, is_recorded: bool = False) -> Applying:
    """Patch this process, which has imported torch; whatever cannot be patched is reported and never raised.

    Args:
        applications: words that `parse_applications` returned.
        folder: the run folder, into which the process writes the outcomes.
        is_recorded: whether a profiler will record the process; otherwise its steps are only timed.
    """
    chosen = values_of(applications, all_flags())
    guard_with(guard.entry)
    applying = Applying(chosen, {flag.name: flag.unseen for flag in all_flags()}, folder, is_recorded=is_recorded)
    for family in APPLICATIONS:
        of_family = {flag.name: chosen[flag.name] for flag in family.flags if flag.name in chosen}
        if of_family:
            with applying.guarded(*of_family):
                family.install(applying, of_family)
    return applying


def applied_outcomes(applications: Sequence[str], folder: RunFolder) -> list[Outcome]:
    """Return the outcome of each application over all processes of a finished run."""
    unseen = {flag.name: flag.unseen for flag in all_flags()}
    return outcomes(applications, applied_records(folder), unseen)
