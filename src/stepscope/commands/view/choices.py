"""Documents that answer a choice of the reader: what a change would save, other devices, prices, another recording.

The options of an address are those of the command of the same name; several values of one stand on lines of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stepscope.commands.plan import predict
from stepscope.commands.read import compare, costs, whatif
from stepscope.errors import UsageError
from stepscope.view.documents import NoDocument, Options

if TYPE_CHECKING:
    from stepscope.commands.shared.options import Command
    from stepscope.commands.view.pages import Job

Choice: TypeAlias = "Callable[[Job, Options], Any]"

_HOW: Final = ("precision", "batch", "recorded-batch", "from", "host-factor")
_CHANGES: Final = (
    *("remove", "scale", "launch-overhead", "bucket-size", "loader-workers", "sync-every", "overlap"),
    *("curve", "top"),
)
_MOST_VALUES: Final = 1000


def _arguments(
    job: Job, command: Command, options: Options, known: tuple[str, ...], flags: tuple[str, ...] = (), *more: str
) -> argparse.Namespace:
    """The command's arguments with the options of the address that are `known`, and the page's own of reading.

    Raises:
        UsageError: a value is wrong.
    """
    words = [f"--{name}" for name in flags if options.get(name, "") not in ("", "0", "false")]
    for name in known:
        values = [value for value in options.get(name, "").split("\n") if value]
        if len(values) > _MOST_VALUES:
            raise UsageError(f"{len(values)} values of {name} are too many")
        words += [f"--{name}={value}" for value in values]
    found = command.parsed([job.path, *more, *words])
    for name in vars(found):  # how traces are read is the page's
        if name not in known and name not in flags and hasattr(job.arguments, name) and name not in ("paths", "device"):
            setattr(found, name, getattr(job.arguments, name))
    return found


def _whatif(job: Job, options: Options) -> Any:
    from stepscope.report.whatif import whatif_json

    arguments = _arguments(job, whatif.COMMAND, options, _CHANGES, ("graphs", "critical-path"))
    arguments.trace = "-"  # the other ranks are not replayed
    opened = job.opened(options)
    return whatif_json(whatif.answer_to(arguments, opened.view, opened.tried))


def _predict(job: Job, options: Options) -> Any:
    arguments = _arguments(job, predict.PREDICT, options, ("to", "devices", "link", *_HOW))
    return predict.prediction_json(*predict.prediction_of(arguments, job.opened(options).view.experiment))


def _plan(job: Job, options: Options) -> Any:
    from stepscope.report.plan import plan_json

    known = ("iterations", "deadline", "budget", "providers", "gpus", "link", *_HOW)
    arguments = _arguments(job, predict.PLAN, {"iterations": "1e5", **options}, known, ("spot",))
    return plan_json(predict.plan_of(arguments, job.opened(options).view.experiment))


def _energy(job: Job, options: Options) -> Any:
    from stepscope.report.energy import energy_json

    known = ("iterations", "region", "pue", "device-watts", "idle-watts", "cpu-watts")
    return energy_json(costs.energy_of(_arguments(job, costs.ENERGY, options, known), [job.opened(options).view]))


def _compare(job: Job, options: Options) -> Any:
    from stepscope.report.comparison import comparison_json

    if not job.others:
        raise NoDocument("there is nothing to compare with: stepscope view BEFORE AFTER opens both")
    number = options.get("with", "0")
    if number not in map(str, range(len(job.others))):
        raise NoDocument("that was not named on the command line")
    arguments = _arguments(job, compare.COMPARE, options, (), (), job.others[int(number)])
    return comparison_json(compare.compared(arguments), top=0)


CHOICES: Final[dict[str, Choice]] = {
    "whatif": _whatif,
    "predict": _predict,
    "plan": _plan,
    "energy": _energy,
    "compare": _compare,
}
