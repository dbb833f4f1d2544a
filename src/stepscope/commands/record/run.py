"""`stepscope run`: record a few steps of an unmodified program, and diagnose them."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.improve.bench import batch_sizes, measurements_of_run, write_model
from stepscope.commands.read import diagnose
from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    Command,
    CommandParser,
    add_batch_model_options,
    add_record_flags,
    add_report_options,
    add_switch,
    allocator_variables,
    applications,
    record_options,
    whole,
)
from stepscope.commands.shared.output import say
from stepscope.errors import RunFolderError, StepscopeError, UsageError
from stepscope.report.format import printable

if TYPE_CHECKING:
    from stepscope.record.energy import Limit
    from stepscope.record.run_folder import RunFolder
    from stepscope.record.run_process import RunOptions

_LOOK_S: Final = 0.5
_PRIORITY: Final = 10
_WIDEST_FLAG: Final = 24
_NARROWEST_HELP: Final = 40
_SIGNS: Final = {
    "optimizer": ", seen by the optimizer",
    "loader": ", seen by the DataLoader because no optimizer stepped",
    "call": ", seen by a repeated call around the model's because there was neither optimizer nor DataLoader",
    "forward": ", seen by forward calls because there was neither optimizer nor DataLoader",
    "annotation": ", marked by the program",
    "jitted": ", seen by calls of a jitted function",
}
"""How the steps of a recording were recognised."""
_NO_STEP: Final = {
    "torch": "neither an optimizer's step nor an iteration of a DataLoader nor a repeated forward call",
    "jax": "neither a StepTraceAnnotation nor a repeated call of a jitted function",
}


def power_limits(text: str) -> list[Limit]:
    """Parse power limits in watts, or in percent of the devices' maximum."""
    from stepscope.record.energy import Limit

    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5}(?:\.[0-9]{1,3})?)\s*(%?)\s*", word, re.ASCII)
        if match is None or not float(match[1]) or (match[2] and float(match[1]) > 100):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of power limits: write 60%,80%,100% or 250,300")
        found.append(Limit(float(match[1]) / (100 if match[2] else 1), bool(match[2])))
    if len(set(found)) < 2:
        raise argparse.ArgumentTypeError("at least two different power limits are needed: 60%,80%,100%")
    return list(dict.fromkeys(found))


def _prepare_parser(parser: CommandParser) -> None:
    parser.usage = "stepscope run [options] PROGRAM [ARGUMENT ...]"
    parser.program = "program"
    _add_when(parser.add_argument_group("when to record"))
    _add_what(parser.add_argument_group("what to record, besides times"))
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
        help="the program's option for it: batch-size adds --batch-size 8, data.batch= adds data.batch=8",
    )
    add_batch_model_options(batch)
    after = parser.add_argument_group("the run and its diagnosis")
    after.add_argument("--name", metavar="NAME", help="name of the run (default: the program's name and the time)")
    after.add_argument(
        "--folder", metavar="DIR", help="create the run's folder in DIR instead of the user's data folder"
    )
    after.add_argument("--no-diagnose", action="store_true", help="only record")
    add_report_options(after, html="also write the diagnosis as a page")
    after.add_argument(
        "--redact", action="store_true", help="keep machine and folder names out of the run and the report"
    )


def _add_when(when: argparse._ActionsContainer) -> None:
    when.add_argument("--steps", metavar="N", type=whole(1), default=5, help="steps to record (default: 5)")
    when.add_argument(
        "--warmup",
        metavar="N",
        type=whole(0),
        help="steps to skip first (default: 5, and up to 10 in the first 3 seconds)",
    )
    when.add_argument("--exit-after", action="store_true", help="end the program when the steps are recorded")
    when.add_argument("--serve", action="store_true", help="let stepscope attach record more at any time")
    when.add_argument(
        "--quiet-machine",
        action="store_true",
        help="keep each rank to its own cores, and collect no garbage while steps are recorded",
    )
    when.add_argument("--seed", metavar="N", type=whole(0), help="with --quiet-machine: fix the random generators")
    when.add_argument(
        "--allocator",
        choices=("jemalloc", "tcmalloc"),
        help="allocate the program's host memory with this library, which keeps freed memory",
    )


def _add_what(what: argparse._ActionsContainer) -> None:
    help = "what the program logs, and how busy the machine is, for the whole run (default: yes)"
    add_switch(what, "--telemetry", help, default=True)
    what.add_argument(
        "--energy", action="store_true", help="the energy of the steps after the recording, if there are counters"
    )
    what.add_argument(
        "--power-limits",
        metavar="LIMITS",
        type=power_limits,
        help="run once at each of these limits of the devices, such as 60%%,80%%,100%% or 250,300: time and energy",
    )
    add_record_flags(what)


def _run(arguments: argparse.Namespace) -> int:
    """Run the program, keep what it recorded, diagnose it, and return the program's exit code."""
    from stepscope.record.launch import command_of

    if arguments.apply == ["list"]:
        return _show_flags()
    if arguments.seed is not None and not arguments.quiet_machine:
        raise UsageError("--seed needs --quiet-machine")
    if arguments.html == "-":
        raise UsageError("standard output belongs to the program: write the page to a file")
    command = command_of(arguments.program)
    environ = {**os.environ, **allocator_variables(arguments.allocator, command)}
    several_sizes = arguments.batch_sizes or arguments.batch_flag
    if several_sizes and arguments.power_limits:
        raise UsageError("a program runs either at several batch sizes or at several power limits")
    if several_sizes:
        return _run_sizes(arguments, command, environ)
    if arguments.power_limits:
        return _run_limits(arguments, command, environ)
    return _run_once(arguments, command, environ)


def _run_once(arguments: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    from stepscope.record.launch import run_program

    options = _options(arguments)
    try:
        run = _Run(arguments, command, options)
    except RunFolderError as error:
        remedies = ", and no remedy is applied" if options.apply else ""
        say(f"the program runs unchanged: nothing is recorded{remedies}, because {error}")
        return run_program(command, environ)
    early = _EarlyAnswer(arguments, run.folder)
    with early.while_the_program_runs():
        code = run_program(command, run.environment(environ))
    with _on_standard_error():
        run.end(code)
        if early.recordings == run.recordings:
            say(f"run {run.folder.name}: its diagnosis is above; stepscope diagnose {run.folder.name} shows it again")
            if arguments.energy:
                _quietly(lambda: _say_energy(run.recordings))
            return code
        _quietly(lambda: _say_recorded(arguments, run.folder, run.recordings))
        if run.folder.traces() and not arguments.no_diagnose:
            _quietly(lambda: diagnose.COMMAND.run_with(_words_of_diagnosis(arguments, run.folder)))
    return code


def _words_of_diagnosis(arguments: argparse.Namespace, folder: RunFolder) -> list[str]:
    page = ["--html", arguments.html] if arguments.html else []
    return [str(folder.path), *page, *(["--redact"] * arguments.redact)]


class _EarlyAnswer:
    """Says what was recorded, and diagnoses it, once every rank has recorded and timed, while the program goes on.

    The diagnosis is a process of lower priority, so that it takes little from the program's remaining steps.

    Attributes:
        recordings: the reports that the diagnosis was about; None if the program ended first.
    """

    def __init__(self, arguments: argparse.Namespace, folder: RunFolder) -> None:
        self.recordings: Sequence[dict[str, Any]] | None = None
        self._arguments = arguments
        self._folder = folder
        self._ended = threading.Event()

    @contextlib.contextmanager
    def while_the_program_runs(self) -> Iterator[None]:
        if self._arguments.no_diagnose or self._arguments.exit_after:
            yield
            return
        watching = threading.Thread(target=lambda: _quietly(self._watch), name="stepscope-early", daemon=True)
        watching.start()
        try:
            yield
        finally:
            self._ended.set()
            watching.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            recordings = [one for one in self._folder.recordings() if one.get("complete")]
            ranks = {one["rank"] for one in recordings}
            if ranks and len(ranks) >= max(int(one.get("world_size") or 1) for one in recordings):
                if self._folder.traces():
                    self._answer(recordings)
                return

    def _answer(self, recordings: Sequence[dict[str, Any]]) -> None:
        lines = "".join(f"stepscope: {printable(each)}\n" for each in _what_was_recorded(self._folder, recordings))
        print(lines, end="", file=sys.stderr, flush=True)
        words = [sys.executable, "-m", "stepscope", "diagnose", *_words_of_diagnosis(self._arguments, self._folder)]
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        with contextlib.suppress(OSError, AttributeError):  # it may have ended; Windows has no priorities like this
            os.setpriority(os.PRIO_PROCESS, child.pid, _PRIORITY)
        if child.wait() == 0:
            self.recordings = recordings


class _Run:
    """The folder of a run in progress, completed when the run ends."""

    def __init__(self, arguments: argparse.Namespace, command: Sequence[str], options: RunOptions) -> None:
        from stepscope.record.manifest import RunManifest
        from stepscope.record.run_folder import RunFolder

        self.options = options
        self.recordings: Sequence[dict[str, Any]] = ()
        self._manifest = RunManifest.begin(
            list(command), time.time(), options=options.to_json(), redact=arguments.redact
        )
        parent = Path(arguments.folder) if arguments.folder else None
        self.folder = RunFolder.create(parent, arguments.name, self._manifest)
        _quietly(self._list)

    def _list(self) -> None:
        from stepscope.record.runs import RunIndex

        RunIndex().add(self.folder)

    def environment(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Environment variables that make the program record itself."""
        from stepscope.record.launch import environment_of

        return environment_of(self.folder, self.options, environ)

    def end(self, code: int) -> None:
        """Report the outcome of the remedies, and store how the run ended."""
        self.recordings = self.folder.recordings()
        applied: list[dict[str, Any]] = []
        _quietly(lambda: applied.extend(self._outcomes()))
        _quietly(lambda: self.folder.write_manifest(self._manifest.ended(time.time(), code, self.recordings, applied)))
        _quietly(self._list)
        _quietly(_keep_limit)

    def _outcomes(self) -> list[dict[str, Any]]:
        from stepscope.record.apply import applied_outcomes

        found = applied_outcomes(self.options.apply, self.folder)
        for outcome in found:
            print(f"stepscope: {printable(outcome.text)}")
        return [outcome.to_json() for outcome in found]


def _keep_limit() -> None:
    from stepscope.commands.record.runs import removed_beyond_limit
    from stepscope.record.runs import RunIndex

    removed = removed_beyond_limit(RunIndex())
    if removed:
        say(removed)


def _run_sizes(arguments: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program once for each batch size, then report how a step grows with the batch."""
    from stepscope.record.launch import INTERRUPTED, record_sizes, run_program

    if not arguments.batch_sizes or len(set(arguments.batch_sizes)) < 2:
        raise UsageError("at least two different batch sizes are needed: --batch-sizes 8,16,32 --batch-flag batch-size")
    if not arguments.batch_flag:
        raise UsageError("--batch-flag names the program's own option for the batch size, such as batch-size")
    run = _Run(arguments, command, _options(arguments))
    sizes, environment = arguments.batch_sizes, run.environment(environ)
    runs = record_sizes(command, arguments.batch_flag, sizes, run.folder, environment, run_program, say)
    with _on_standard_error():
        run.end(next((each.exit_code for each in runs if each.exit_code), 0))
        recorded = len([each for each in runs if each.traces])
        say(f"run {run.folder.name}: {recorded} of {len(runs)} sizes; {run.folder.path}")
        if runs[-1].exit_code == INTERRUPTED:
            return INTERRUPTED
        arguments.window = arguments.no_cache = None
        arguments.steps = None  # --steps named the steps to record, not the steps of the trace to read
        write_model(measurements_of_run(arguments, run.folder.path), arguments)
    return 0


def _run_limits(arguments: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program once at each power limit; return 0 if at least two were measured."""
    from stepscope.record.energy import device_limits, measure_limits
    from stepscope.record.launch import run_program
    from stepscope.report.energy import limits_document

    devices = device_limits()
    limits = [devices.watts(limit) for limit in arguments.power_limits]
    run = _Run(arguments, command, replace(_options(arguments), energy=True, exit_after=True))
    environment = run.environment(environ)
    runs = measure_limits(limits, devices, run.folder, lambda: run_program(command, environment), say)
    failed = next((each.exit_code for each in runs if each.exit_code), 0)
    with _on_standard_error():
        run.end(failed)
        say(f"run {run.folder.name}: {run.folder.path}")
        output.print_document(limits_document(runs))
        _say_energy(run.recordings)
    return 0 if len([each for each in runs if each.joules is not None]) > 1 else failed or 2


def _show_flags() -> int:
    from stepscope.record.apply import all_flags

    indent = 2 + max(len(flag.shown) for flag in all_flags() if len(flag.shown) < _WIDEST_FLAG)
    width = max(output.width() - indent, _NARROWEST_HELP)
    text = ""
    for flag in all_flags():
        first, *rest = textwrap.wrap(flag.help, width)
        name = flag.shown.ljust(indent) if len(flag.shown) < indent else f"{flag.shown}\n{' ' * indent}"
        text += f"{name}{first}\n" + "".join(f"{' ' * indent}{line}\n" for line in rest)
    output.print_text(text)
    return 0


def _say_recorded(arguments: argparse.Namespace, folder: RunFolder, recordings: Sequence[dict[str, Any]]) -> None:
    for sentence in _what_was_recorded(folder, recordings):
        print(f"stepscope: {printable(sentence)}")
    if arguments.energy:
        _say_energy(recordings)


def _say_energy(recordings: Sequence[dict[str, Any]]) -> None:
    from stepscope.report.energy import measured_sentences
    from stepscope.trace.energy_records import records_of

    for sentence in measured_sentences([record for _, record in records_of(recordings)]):
        print(f"stepscope: {printable(sentence)}")


def _what_was_recorded(folder: RunFolder, recordings: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say in sentences what the run is, how many steps were recorded by which sign, and what went wrong."""
    with_traces = [one for one in recordings if one.get("trace")]
    if with_traces:
        yield f"run {folder.name}: {_recorded(with_traces)}; {folder.path}"
    else:
        yield f"run {folder.name}: nothing was recorded{_why_nothing(folder, recordings)}"
    several = len({one["rank"] for one in recordings}) > 1
    for problem in dict.fromkeys(one["problem"] for one in recordings if one.get("problem")):
        ranks = sorted(str(one["rank"]) for one in recordings if one.get("problem") == problem)
        if with_traces or several:
            yield f"rank {', '.join(ranks)}: {problem}" if several else problem
    yield from dict.fromkeys(sentence for one in recordings for sentence in one.get("said") or ())
    own = next((one for one in recordings if one.get("own_profiler")), None)
    if own is not None:
        name = own.get("own_profiler_name", "torch.profiler")
        yield f"the program uses {name} itself; only one can record at a time, and stepscope reads its traces"


def _recorded(recordings: Sequence[dict[str, Any]]) -> str:
    """Format "recorded 5 steps (10 to 14), seen by the optimizer's steps, on 2 ranks"."""
    first = recordings[0]
    fewest = min(one["steps"] for one in recordings)
    asked = first.get("asked_steps", fewest)
    number = f"{fewest} of {asked} steps" if fewest < asked else output.counted(fewest, "step")
    begin = first.get("first_step")
    if first.get("source") in ("annotation", "explicit") and str(first.get("trace")).endswith(".xplane.pb"):
        begin = None  # the steps of the profile carry the program's own numbers
    span = f" ({begin} to {begin + fewest - 1})" if begin is not None and fewest > 1 else ""
    ranks = len({one["rank"] for one in recordings})
    where = f", on {ranks} ranks" if ranks > 1 else ""
    return f"recorded {number}{span}{_SIGNS.get(str(first.get('source')), '')}{where}"


def _why_nothing(folder: RunFolder, recordings: Sequence[dict[str, Any]]) -> str:
    from stepscope.record.run_folder import LEFT

    problem = next((one["problem"] for one in recordings if one.get("problem")), None)
    if problem is not None:
        return f": {problem}"
    if folder.was_seen(LEFT):
        return ", because stepscope stopped early, as reported at the time"
    for framework, missing in _NO_STEP.items():
        if folder.was_seen(framework):
            return f": {framework} was imported, but no step was seen, {missing}; mark the steps with stepscope.step()"
    if folder.was_seen("python"):
        return ", because neither torch nor jax was imported; recording needs one in the Python that runs the program"
    return ", because the program started no Python that reads PYTHONPATH"


def _options(arguments: argparse.Namespace) -> RunOptions:
    from stepscope.record.run_process import RunOptions

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


@contextlib.contextmanager
def _on_standard_error() -> Iterator[None]:
    """Redirect prints to standard error, since standard output belongs to the program."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _quietly(action: Callable[[], object]) -> None:
    """Run the action but only report its errors, since the program's exit code is what counts."""
    from stepscope import guard

    with guard.attempt() as doing:
        action()
    if isinstance(doing.error, StepscopeError):
        say(str(doing.error))
    elif doing.error is not None:
        say(f"a bug in stepscope: {type(doing.error).__name__}: {guard.sentence(doing.error)}")


COMMAND: Final = Command(
    "run",
    "Run a program, record a few of its steps without changing it, and say why they are slow.",
    _prepare_parser,
    _run,
    """\
Everything from PROGRAM on belongs to the program, whose output, signals and exit code stay the same; stepscope reports
on standard error after it has ended.

examples:
  stepscope run train.py --lr 3e-4                           a script
  stepscope run -m package.train                             a module
  stepscope run torchrun --nproc-per-node 2 train.py         every rank, into one run
  stepscope run --steps 10 --stacks --exit-after train.py    record more, then end the program
  stepscope run --serve --name long train.py                 then, at any time: stepscope attach long
  stepscope run --batch-sizes 8,16,32 --batch-flag batch-size train.py    how large a batch should be
  stepscope run --apply fuse-optimizer,workers=4 train.py    with remedies applied, without changing files
  stepscope diagnose NAME --html report.html                 the same run, later
""",
)
