"""`stepscope run`: a program, recorded for a few steps without a change in it, and diagnosed."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.improve.batch_size import add_model_options, batch_sizes
from stepscope.commands.shared import output
from stepscope.commands.shared.agents import add_record_flags, record_options
from stepscope.commands.shared.applying import LIST, allocator_variables, applications, say_applied, show_list
from stepscope.commands.shared.output import CommandParser
from stepscope.errors import RunFolderError, StepscopeError, UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.record.bootstrap_plan import RunOptions
    from stepscope.record.energy import Limit
    from stepscope.record.run_folder import RunFolder

NAME: Final = "run"
HELP: Final = "Run a program, record a few of its steps without changing it, and say why they are slow."
_EXAMPLES: Final = """\
Everything from PROGRAM on is the program's. Its output, signals and exit code are its own; what stepscope has to say
comes on standard error when it has ended.

examples:
  stepscope run train.py --lr 3e-4                           a script
  stepscope run -m package.train                             a module
  stepscope run torchrun --nproc-per-node 2 train.py         every rank, into one run
  stepscope run --steps 10 --stacks --exit-after train.py    more of it, and end the program then
  stepscope run --serve --name long train.py                 then, at any time: stepscope attach long
  stepscope run --batch-sizes 8,16,32 --batch-flag batch-size train.py    how large a batch should be
  stepscope run --apply fuse-optimizer,workers=4 train.py    with remedies applied, the files left as they are
  stepscope diagnose NAME --html report.html                 the run again, later
"""


def prepare_parser(parser: CommandParser) -> None:
    """Add this command's arguments."""
    parser.epilog = _EXAMPLES
    parser.usage = "stepscope run [options] PROGRAM [ARGUMENT ...]"
    parser.program = "program"
    when = parser.add_argument_group("when to record")
    when.add_argument("--steps", metavar="N", type=at_least(1), default=5, help="steps to record (default: 5)")
    when.add_argument(
        "--warmup",
        metavar="N",
        type=at_least(0),
        help="steps to let pass before (default: 5, and up to 10 in the first 3 seconds)",
    )
    when.add_argument("--exit-after", action="store_true", help="end the program when the steps are recorded")
    when.add_argument("--serve", action="store_true", help="let stepscope attach record more at any time")
    when.add_argument(
        "--quiet-machine",
        action="store_true",
        help="keep each rank to its own cores, and collect no garbage while steps are recorded",
    )
    when.add_argument("--seed", metavar="N", type=at_least(0), help="with --quiet-machine: fix the random generators")
    when.add_argument(
        "--allocator",
        choices=("jemalloc", "tcmalloc"),
        help="get the program's host memory from this library, which keeps what is freed",
    )
    what = parser.add_argument_group("what to record, besides times")
    what.add_argument(
        "--telemetry",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="what the program logs, and how busy the machine is, for the whole run (default: yes)",
    )
    what.add_argument(
        "--energy", action="store_true", help="the energy of the steps after the recording, where counters tell it"
    )
    what.add_argument(
        "--power-limits",
        metavar="LIMITS",
        type=power_limits,
        help="run once at each of these limits of the devices, such as 60%%,80%%,100%% or 250,300: time and energy",
    )
    add_record_flags(what)
    change = parser.add_argument_group("what to change, without touching the program")
    change.add_argument(
        "--apply",
        metavar="LIST",
        action="append",
        help="apply remedies as the program starts, such as fuse-optimizer,workers=4; --apply list shows all",
    )
    batch = parser.add_argument_group("how large a batch should be")
    batch.add_argument(
        "--batch-sizes", metavar="SIZES", type=batch_sizes, help="run once for each size, such as 8,16,32"
    )
    batch.add_argument(
        "--batch-flag",
        metavar="NAME",
        help="the program's own option for it: batch-size adds --batch-size 8, data.batch= adds data.batch=8",
    )
    add_model_options(batch)
    after = parser.add_argument_group("the run and its diagnosis")
    after.add_argument("--name", metavar="NAME", help="of the run (default: the program's name and the time)")
    after.add_argument("--folder", metavar="DIR", help="make the run's folder in DIR instead of the user's data folder")
    after.add_argument("--no-diagnose", action="store_true", help="only record")
    after.add_argument("--html", metavar="FILE", type=output.target, help="also write the diagnosis as a page")
    after.add_argument("--redact", action="store_true", help="keep names of machine and folders out of run and report")


def run(arguments: argparse.Namespace) -> int:
    """Run the program, keep what it recorded, diagnose it; returns the program's exit code."""
    from stepscope.record.launch import command_of, environment_of, run_program
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex

    if arguments.apply == LIST:
        return show_list()
    if arguments.seed is not None and not arguments.quiet_machine:
        raise UsageError("--seed goes with --quiet-machine")
    if arguments.html == "-":
        raise UsageError("standard output is the program's: write the page to a file")
    command = command_of(arguments.program)
    environ = {**os.environ, **allocator_variables(arguments.allocator, command)}
    if arguments.batch_sizes or arguments.batch_flag:
        if arguments.power_limits:
            raise UsageError("a program runs either at several batch sizes or at several power limits")
        return _run_sizes(arguments, command, environ)
    if arguments.power_limits:
        return _run_limits(arguments, command, environ)
    options = _options(arguments)
    manifest = RunManifest.begin(command, time.time(), options=options.to_json(), redact=arguments.redact)
    try:
        folder = RunFolder.create(Path(arguments.folder) if arguments.folder else None, arguments.name, manifest)
    except RunFolderError as error:
        remedies = ", and no remedy is applied" if options.apply else ""
        _say(f"the program runs as it is: nothing is recorded{remedies}, because {error}")
        return run_program(command, environ)
    _quietly(lambda: RunIndex().add(folder))
    code = run_program(command, environment_of(folder, options, environ))
    with _on_standard_error():
        recordings = folder.recordings()
        applied: list[dict[str, Any]] = []
        _quietly(lambda: applied.extend(say_applied(options.apply, folder)))
        _quietly(lambda: folder.write_manifest(manifest.ended(time.time(), code, recordings, applied)))
        _quietly(lambda: RunIndex().add(folder))
        _quietly(lambda: _say_recorded(arguments, folder, recordings))
        if folder.traces() and not arguments.no_diagnose:
            _quietly(lambda: _diagnose(arguments, folder))
    return code


def _say_recorded(arguments: argparse.Namespace, folder: RunFolder, recordings: Sequence[dict[str, Any]]) -> None:
    for sentence in what_was_recorded(folder, recordings):
        print(f"stepscope: {printable(sentence)}")
    if arguments.energy:
        _say_energy(recordings)


def _run_sizes(arguments: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program once for each batch size; 0 where that tells how a step grows with the batch."""
    from stepscope.commands.improve.batch_size import measurements_of_run, write_model
    from stepscope.record.launch import INTERRUPTED, environment_of, record_sizes, run_program
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex

    if not arguments.batch_sizes or len(set(arguments.batch_sizes)) < 2:
        raise UsageError("it takes two different batch sizes or more: --batch-sizes 8,16,32 --batch-flag batch-size")
    if not arguments.batch_flag:
        raise UsageError("--batch-flag names the program's own option for the batch size, such as batch-size")
    options = _options(arguments)
    manifest = RunManifest.begin(list(command), time.time(), options=options.to_json(), redact=arguments.redact)
    folder = RunFolder.create(Path(arguments.folder) if arguments.folder else None, arguments.name, manifest)
    _quietly(lambda: RunIndex().add(folder))
    environment = environment_of(folder, options, environ)
    runs = record_sizes(command, arguments.batch_flag, arguments.batch_sizes, folder, environment, run_program, _say)
    failed = next((each.exit_code for each in runs if each.exit_code), 0)
    with _on_standard_error():
        applied = say_applied(options.apply, folder)
        folder.write_manifest(manifest.ended(time.time(), failed, folder.recordings(), applied))
        _quietly(lambda: RunIndex().add(folder))
        _say(f"run {folder.name}: {len([each for each in runs if each.traces])} of {len(runs)} sizes; {folder.path}")
        if runs[-1].exit_code == INTERRUPTED:
            return INTERRUPTED
        arguments.window = arguments.no_cache = None
        arguments.steps = None  # of the trace: those that are to be recorded are known
        write_model(measurements_of_run(arguments, folder.path), arguments)
    return 0


def _run_limits(arguments: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program once at each power limit; 0 where at least two were measured."""
    from dataclasses import replace

    from stepscope.record.energy import device_limits, measure_limits
    from stepscope.record.launch import environment_of, run_program
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.runs import RunIndex
    from stepscope.report.energy import limits_document
    from stepscope.report.text import text_of

    devices = device_limits()
    limits = [devices.watts(limit) for limit in arguments.power_limits]
    options = replace(_options(arguments), energy=True, exit_after=True)
    manifest = RunManifest.begin(list(command), time.time(), options=options.to_json(), redact=arguments.redact)
    folder = RunFolder.create(Path(arguments.folder) if arguments.folder else None, arguments.name, manifest)
    _quietly(lambda: RunIndex().add(folder))
    environment = environment_of(folder, options, environ)
    runs = measure_limits(limits, devices, folder, lambda: run_program(command, environment), _say)
    failed = next((each.exit_code for each in runs if each.exit_code), 0)
    with _on_standard_error():
        applied = say_applied(options.apply, folder)
        folder.write_manifest(manifest.ended(time.time(), failed, folder.recordings(), applied))
        _quietly(lambda: RunIndex().add(folder))
        _say(f"run {folder.name}: {folder.path}")
        print(text_of(limits_document(runs), width=output.width()), end="")
        _say_energy(folder.recordings())
    return 0 if len([run for run in runs if run.joules is not None]) > 1 else failed or 2


def _say(sentence: str) -> None:
    print(f"stepscope: {printable(sentence)}", file=sys.stderr, flush=True)


def _say_energy(recordings: Sequence[dict[str, Any]]) -> None:
    from stepscope.report.energy import measured_sentences
    from stepscope.trace.energy_records import records_of

    for sentence in measured_sentences([record for _, record in records_of(recordings)]):
        print(f"stepscope: {printable(sentence)}")


def what_was_recorded(folder: RunFolder, recordings: Sequence[dict[str, Any]]) -> Iterator[str]:
    """In sentences: the run, how many steps by which sign, and what went wrong."""
    with_traces = [one for one in recordings if one.get("trace")]
    if with_traces:
        yield f"run {folder.name}: {_recorded(with_traces)}; {folder.path}"
    else:
        yield f"run {folder.name}: nothing was recorded{_why_nothing(folder, recordings)}"
    for problem in dict.fromkeys(one["problem"] for one in recordings if one.get("problem")):
        ranks = sorted(str(one["rank"]) for one in recordings if one.get("problem") == problem)
        several = len({one["rank"] for one in recordings}) > 1
        if with_traces or several:
            yield f"rank {', '.join(ranks)}: {problem}" if several else problem
    yield from dict.fromkeys(sentence for one in recordings for sentence in one.get("said") or ())
    own = next((one for one in recordings if one.get("own_profiler")), None)
    if own is not None:
        name = own.get("own_profiler_name", "torch.profiler")
        yield f"the program uses {name} itself; only one can record at a time, and stepscope reads its traces"


def _recorded(recordings: Sequence[dict[str, Any]]) -> str:
    """Such as "recorded 5 steps (10 to 14), seen by the optimizer's steps, on 2 ranks"."""
    first = recordings[0]
    fewest = min(one["steps"] for one in recordings)
    asked = first.get("asked_steps", fewest)
    number = f"{fewest} of {asked} steps" if fewest < asked else f"{fewest} step{'s' if fewest != 1 else ''}"
    begin = first.get("first_step")
    if first.get("source") in ("annotation", "explicit") and str(first.get("trace")).endswith(".xplane.pb"):
        begin = None  # the steps of the profile carry the program's own numbers
    span = f" ({begin} to {begin + fewest - 1})" if begin is not None and fewest > 1 else ""
    sign = {
        "optimizer": ", seen by the optimizer",
        "loader": ", seen by the DataLoader because no optimizer stepped",
        "forward": ", seen by forward calls because there was neither optimizer nor DataLoader",
        "annotation": ", marked by the program",
        "jitted": ", seen by calls of a jitted function",
    }.get(str(first.get("source")), "")
    ranks = len({one["rank"] for one in recordings})
    return f"recorded {number}{span}{sign}{f', on {ranks} ranks' if ranks > 1 else ''}"


def _why_nothing(folder: RunFolder, recordings: Sequence[dict[str, Any]]) -> str:
    from stepscope.record.run_folder import LEFT

    problem = next((one["problem"] for one in recordings if one.get("problem")), None)
    if problem is not None:
        return f": {problem}"
    if folder.was_seen(LEFT):
        return ", because stepscope left the program early, as it said then"
    if folder.was_seen("torch"):
        return (
            ": torch was imported, but no step was seen, neither an optimizer's nor an iteration of a DataLoader nor "
            "a repeated forward call; mark the steps with stepscope.step()"
        )
    if folder.was_seen("jax"):
        return (
            ": jax was imported, but no step was seen, neither a StepTraceAnnotation nor a repeated call of a jitted "
            "function; mark the steps with stepscope.step()"
        )
    if folder.was_seen("python"):
        return ", because neither torch nor jax was imported; recording needs one in the Python that runs the program"
    return ", because the program started no Python that reads PYTHONPATH"


def _options(arguments: argparse.Namespace) -> RunOptions:
    from stepscope.record.bootstrap_plan import RunOptions

    return RunOptions(
        steps=arguments.steps,
        warmup=arguments.warmup,
        exit_after=arguments.exit_after,
        redact=arguments.redact,
        serve=arguments.serve,
        telemetry=arguments.telemetry,
        quiet=arguments.quiet_machine,
        seed=arguments.seed,
        energy=arguments.energy,
        record=record_options(arguments),
        apply=applications(arguments.apply),
    )


def _diagnose(arguments: argparse.Namespace, folder: RunFolder) -> None:
    from stepscope.commands.read import diagnose

    parser = CommandParser()
    diagnose.prepare_parser(parser)
    words = [str(folder.path), *(["--html", arguments.html] if arguments.html else [])]
    diagnose.run(parser.parse_args([*words, *(["--redact"] if arguments.redact else [])]))


@contextlib.contextmanager
def _on_standard_error() -> Iterator[None]:
    """Standard output was the program's; what is printed here goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _quietly(action: Any) -> None:
    """The program's exit code is what counts: what fails beside it is told, and no more."""
    from stepscope import guard

    with guard.attempt() as doing:
        action()
    if isinstance(doing.error, StepscopeError):
        _say(str(doing.error))
    elif doing.error is not None:
        _say(f"an error of stepscope's own: {type(doing.error).__name__}: {guard.sentence(doing.error)}")


def power_limits(text: str) -> list[Limit]:
    """Limits from the command line: watts, or percent of the most that the devices allow."""
    from stepscope.record.energy import Limit

    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5}(?:\.[0-9]{1,3})?)\s*(%?)\s*", word, re.ASCII)
        if match is None or not float(match[1]) or (match[2] and float(match[1]) > 100):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of power limits: write 60%,80%,100% or 250,300")
        found.append(Limit(float(match[1]) / (100 if match[2] else 1), bool(match[2])))
    if len(set(found)) < 2:
        raise argparse.ArgumentTypeError("it takes two different power limits or more: 60%,80%,100%")
    return list(dict.fromkeys(found))


def at_least(lowest: int) -> Any:
    """What argparse calls to read a whole number that is not below the lowest."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= lowest):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {lowest} on")
        return int(text)

    return number
