"""What every program of the zoo begins with: its options, a seed, one thread."""

from __future__ import annotations

import argparse
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from tests.zoo.registry import TURN

AFTER_A_ROUND: Final[list[Callable[[], None]]] = []
"""Called at the end of each round of requests; `tests.zoo.timing` notes the time."""

_LOCKED: Final[list[Any]] = []

LARGE_BLOCK = 31 << 20
"""Bytes, just below the most up to which glibc raises its thresholds when a block is freed (see mallopt(3))."""


@dataclass(frozen=True)
class Options:
    """How a program of the zoo was called.

    Attributes:
        fault: whether the fault is planted.
        steps: training steps to run, or rounds of requests.
        device: where tensors are made that name no device.
    """

    fault: bool
    steps: int
    device: str = "cpu"


def options(docstring: str | None, *, steps: int = 24, threads: int = 1, keep_memory: bool = True) -> Options:
    """Read the command line, and make what follows repeatable.

    Args:
        docstring: of the program, for --help.
        steps: how many the program runs unless it is told otherwise.
        threads: of torch; one, so that worker processes and other ranks have a processor of their own.
        keep_memory: whether the C library keeps the memory that tensors give back, as it does in a program that has
            once freed a large block; otherwise it may ask the operating system anew in every step.
    """
    parser = argparse.ArgumentParser(description=(docstring or "").split("\n")[0])
    twin = parser.add_mutually_exclusive_group(required=True)
    twin.add_argument("--fault", action="store_true", help="with the planted fault")
    twin.add_argument("--clean", action="store_true", help="without it")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cpu", help="where the tensors are made; scripts/gpu_campaign uses it")
    arguments = parser.parse_args()
    take_turn()
    if arguments.device != "cpu":
        torch.set_default_device(arguments.device)
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    if keep_memory:
        torch.empty(LARGE_BLOCK, dtype=torch.uint8)
    return Options(arguments.fault, arguments.steps, arguments.device)


def take_turn() -> None:
    """Wait for this process's turn, which lasts until it ends; returns at once where no turns are taken."""
    if os.environ.get(TURN) and not _LOCKED:
        _LOCKED.append(open(os.environ[TURN], "a"))  # noqa: SIM115
        fcntl.flock(_LOCKED[0], fcntl.LOCK_EX)


def rounds(options: Options) -> Iterator[int]:
    """The numbers of the rounds of requests that an inference program answers."""
    for number in range(options.steps):
        yield number
        for call in AFTER_A_ROUND:
            call()
