"""Documents that answer a choice of the reader: what a change would save, other devices, prices, another recording.

The options of an address are those of the command of the same name; several values of one stand on lines of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.plan import predict
from stepscope.commands.read import compare, costs, whatif
from stepscope.commands.shared.options import Command
from stepscope.errors import UsageError
from stepscope.view.documents import NoDocument, Options

if TYPE_CHECKING:
    from stepscope.commands.view.pages import Job

_HOW: Final = ("precision", "batch", "recorded-batch", "from", "host-factor")
_CHANGES: Final = (
    *("remove", "scale", "launch-overhead", "bucket-size", "loader-workers", "sync-every", "overlap"),
    *("curve", "top"),
)
_MOST_VALUES: Final = 1000


def _whatif(job: Job, options: Options, arguments: argparse.Namespace) -> Any:
    from stepscope.report.whatif import whatif_json

    arguments.trace = "-"  # the other ranks are not replayed
    opened = job.opened(options)
    return whatif_json(whatif.answer_to(arguments, opened.view, opened.tried))


def _basis(job: Job, options: Options, arguments: argparse.Namespace) -> predict.Basis:
    opened = job.opened(options)
    if "basis" not in opened.kept:
        opened.kept["basis"] = predict.Basis(arguments, opened.view.experiment)
    basis: predict.Basis = opened.kept["basis"]
    return basis


def _predict(job: Job, options: Options, arguments: argparse.Namespace) -> Any:
    return predict.prediction_json(*predict.prediction_of(arguments, _basis(job, options, arguments)))


def _plan(job: Job, options: Options, arguments: argparse.Namespace) -> Any:
    from stepscope.report.plan import plan_json

    return plan_json(predict.plan_of(arguments, _basis(job, options, arguments)))


def _energy(job: Job, options: Options, arguments: argparse.Namespace) -> Any:
    from stepscope.report.energy import energy_json

    return energy_json(costs.energy_of(arguments, [job.opened(options).view]))


def _compare(job: Job, options: Options, arguments: argparse.Namespace) -> Any:
    from stepscope.report.comparison import comparison_json

    return comparison_json(compare.compared(arguments), top=0)


def _compared_with(job: Job, options: Options) -> list[str]:
    if not job.others:
        raise NoDocument("there is nothing to compare with: stepscope view BEFORE AFTER opens both")
    number = options.get("with", "0")
    if number not in map(str, range(len(job.others))):
        raise NoDocument("that was not named on the command line")
    return [job.others[int(number)]]


@dataclass(frozen=True)
class Choice:
    """A document that a command makes of the options of an address.

    Attributes:
        words: further words of the command line.
        typed: options of the command that the address may have.
        flags: those without a value.
        further: other options of the address.
    """

    command: Command
    answer: Callable[[Job, Options, argparse.Namespace], Any]
    typed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    words: Callable[[Job, Options], list[str]] = lambda *_: []

    @property
    def options(self) -> tuple[str, ...]:
        return (*self.typed, *self.flags, *self.further)

    def __call__(self, job: Job, options: Options) -> Any:
        return self.answer(job, options, self._arguments(job, options))

    def _arguments(self, job: Job, options: Options) -> argparse.Namespace:
        """The command's arguments with the options of the address, and the page's own of reading.

        Raises:
            UsageError: a value is wrong.
        """
        words = [job.path, *self.words(job, options)]
        words += [f"--{name}" for name in self.flags if options.get(name, "") not in ("", "0", "false")]
        for name in self.typed:
            values = [value for value in options.get(name, "").split("\n") if value]
            if len(values) > _MOST_VALUES:
                raise UsageError(f"{len(values)} values of {name} are too many")
            words += [f"--{name}={value}" for value in values]
        found = self.command.parsed(words)
        for name in vars(found):  # how traces are read is the page's
            if name not in self.options and hasattr(job.arguments, name) and name not in ("paths", "device"):
                setattr(found, name, getattr(job.arguments, name))
        return found


CHOICES: Final[dict[str, Choice]] = {
    "whatif": Choice(whatif.COMMAND, _whatif, _CHANGES, ("graphs", "critical-path")),
    "predict": Choice(predict.PREDICT, _predict, ("to", "devices", "link", *_HOW)),
    "plan": Choice(
        predict.PLAN,
        _plan,
        ("iterations", "deadline", "budget", "providers", "gpus", "link", *_HOW),
        ("spot",),
        words=lambda _, options: [] if options.get("iterations") else ["--iterations=1e5"],
    ),
    "energy": Choice(costs.ENERGY, _energy, ("iterations", "region", "pue", "device-watts", "idle-watts", "cpu-watts")),
    "compare": Choice(compare.COMPARE, _compare, further=("with",), words=_compared_with),
}
