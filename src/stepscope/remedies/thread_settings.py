"""As many threads as there are processors for this rank, and no more.

counts = set_thread_counts(workers=4)          # at the top of the script, before torch computes anything
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from stepscope.remedies.processors import allowed_processors, usable_cores, usable_processors

_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Threads of a rank, and what they follow from.

    Attributes:
        processors: hardware threads that this process may use, by its affinity and its control group's quota.
        cores: the same in cores.
        ranks: processes that share them.
        workers: DataLoader processes of this rank, each of which needs a processor.
        intra_op: threads that one operator may use.
        inter_op: operators that torch may run side by side.
        not_set: what could not be changed any more, and why, in sentences.
    """

    processors: int
    cores: int
    ranks: int
    workers: int
    intra_op: int
    inter_op: int
    not_set: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables for a process that is started with these counts."""
        return dict.fromkeys(_VARIABLES, str(self.intra_op))


def thread_counts(
    *,
    workers: int = 0,
    ranks: int | None = None,
    intra_op: int | None = None,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> ThreadCounts:
    """How many threads this rank should use; changes nothing.

    One operator gets the cores of this rank, less the processors that its DataLoader's workers need beyond the second
    hardware threads of these cores; at least one. Operators are not run side by side: they would contend for the same
    cores. A rank that was given its own processors by its launcher keeps them all; others divide what they share.

    Args:
        workers: num_workers of this rank's DataLoader.
        ranks: processes that share this machine's processors; by default LOCAL_WORLD_SIZE, or 1.
        intra_op: this many threads, in place of what follows from the rest.
        environ: where variables are read; by default this process's.
        root: where /proc and /sys are.

    Raises:
        ValueError: a number is below 1 (below 0 for workers).
    """
    for name, number, least in (("workers", workers, 0), ("ranks", ranks, 1), ("intra_op", intra_op, 1)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < least):
            raise ValueError(f"{name} is {number!r}; it takes a whole number from {least} on")
    if ranks is None:
        ranks = 1 if _has_its_own_processors() else _local_world_size(os.environ if environ is None else environ)
    processors, cores = usable_processors(root), usable_cores(root)
    own_processors, own_cores = max(processors // ranks, 1), max(cores // ranks, 1)
    free = own_processors - own_cores
    threads = max(own_cores - max(workers - free, 0), 1) if intra_op is None else intra_op
    return ThreadCounts(processors, cores, ranks, workers, threads, 1)


def set_thread_counts(
    *, workers: int = 0, ranks: int | None = None, intra_op: int | None = None, inter_op: int = 1
) -> ThreadCounts:
    """Set torch's threads to what `thread_counts` finds, and the variables of OpenMP and MKL for processes to come.

    Call it early: torch sets the number of operators side by side only before the first ones run. It overrides what
    launchers set: torchrun gives every rank OMP_NUM_THREADS=1.

    Args:
        workers, ranks, intra_op: as of `thread_counts`.
        inter_op: operators that torch may run side by side.

    Raises:
        ValueError: a number is below 1 (below 0 for workers).
    """
    if not isinstance(inter_op, int) or isinstance(inter_op, bool) or inter_op < 1:
        raise ValueError(f"inter_op is {inter_op!r}; it takes a whole number from 1 on")
    counts = thread_counts(workers=workers, ranks=ranks, intra_op=intra_op)
    torch.set_num_threads(counts.intra_op)
    not_set = []
    if torch.get_num_interop_threads() != inter_op:
        try:
            torch.set_num_interop_threads(inter_op)
        except RuntimeError:
            now = torch.get_num_interop_threads()
            not_set.append(
                f"torch runs {now} operators side by side, and changes that only before the first ones run: call "
                "set_thread_counts earlier"
            )
    os.environ.update(counts.environment)
    return ThreadCounts(
        processors=counts.processors,
        cores=counts.cores,
        ranks=counts.ranks,
        workers=counts.workers,
        intra_op=counts.intra_op,
        inter_op=torch.get_num_interop_threads(),
        not_set=tuple(not_set),
    )


def _local_world_size(environ: Mapping[str, str]) -> int:
    text = environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else 1


def _has_its_own_processors() -> bool:
    """Whether this process may use only a part of what its parent may: its launcher gave it that part."""
    if not hasattr(os, "sched_getaffinity"):
        return False
    try:
        parent = set(os.sched_getaffinity(os.getppid()))
    except OSError:
        return False
    return allowed_processors() < parent
