"""`stepscope sweep`: search a command's hyperparameters for the best value of a metric."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import add_redact_option, add_report_options, add_top_option
from stepscope.commands.shared.output import counted, say
from stepscope.commands.shared.programs import INTERRUPTED
from stepscope.commands.shared.reading import local_names
from stepscope.commands.shared.values import whole
from stepscope.errors import UsageError
from stepscope.files import private_folder

if TYPE_CHECKING:
    from stepscope.tune.sweep.file import Sweep
    from stepscope.tune.sweep.results import SweepResults
    from stepscope.tune.sweep.run import Stop, TrialEnd

FOLDER: Final = "stepscope-sweeps"
_DATABASE: Final = "study.sqlite"
_TOP: Final = 10


def _prepare_parser(parser: CommandParser) -> None:
    parser.usage = "stepscope sweep [options] FILE\n       stepscope sweep show [options] FOLDER"
    parser.late = "study"
    parser.add_argument("file", metavar="FILE", help="the sweep file, or show")
    parser.add_argument("study", metavar="FOLDER", nargs="?", help="with show: a sweep's folder, or its name")
    search = parser.add_argument_group("the search; each goes before what the file says")
    search.add_argument("--trials", metavar="N", type=whole(1), help="at most so many trials, those before among them")
    search.add_argument("--method", choices=("grid", "random", "tpe", "bayes", "hyperband"), help="how to search")
    search.add_argument("--metric", metavar="NAME", help="what is minimised, or maximised with --goal")
    search.add_argument("--goal", choices=("minimize", "maximize"), help="of the metric (minimize)")
    search.add_argument("--budget", metavar="TIME", help="begin no further trial after it: 90s, 20m, 2h")
    search.add_argument("--seed", metavar="N", type=whole(0), help="for the same search again")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--jobs", metavar="N", type=whole(1), help="trials at the same time (1)")
    how.add_argument("--name", metavar="NAME", help="of the study (default: the file's name key, or its own name)")
    how.add_argument("--folder", metavar="DIR", help=f"the sweep's folder (default: {FOLDER}/NAME)")
    how.add_argument(
        "--storage",
        metavar="URL",
        help="the database of the study, which other machines reach too, such as postgresql://host/db (default: an "
        "SQLite file in the folder)",
    )
    reports = parser.add_argument_group("reports (- writes to standard output)")
    add_report_options(reports, json="for programs", html="one page with a plot of all trials")
    add_top_option(reports, f"trials, 0 for all ({_TOP})", _TOP)
    add_redact_option(reports)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.file == "show" and not Path("show").is_file():
        return _show(arguments)
    if arguments.study is not None:
        raise UsageError(f"{arguments.study!r} is one argument too many (see stepscope sweep --help)")
    return _search(arguments)


def _search(arguments: argparse.Namespace) -> int:
    from stepscope.tune.sweep.file import read_sweep
    from stepscope.tune.sweep.results import results_of
    from stepscope.tune.sweep.run import SweepRun
    from stepscope.tune.sweep.study import SweepStudy

    sweep = read_sweep(Path(arguments.file), _changes(arguments))
    for sentence in sweep.warnings:
        say(f"{arguments.file}: {sentence}")
    folder = _folder(arguments, sweep)
    study = SweepStudy(sweep, arguments.storage or folder / _DATABASE, folder)
    if study.earlier_command:
        say(f"the command was another before, {study.earlier_command}: earlier trials are of that one")
    say(_beginning(sweep, folder, len(results_of(sweep, study.study).trials)))
    runner = SweepRun(study, folder, partial(_say_ended, sweep), say)
    stop = runner.run()
    results = results_of(sweep, study.study)
    say(_how_it_ended(stop, sweep, results, len(runner.ended)))
    _write(arguments, results, folder)
    if stop == "interrupted":
        return INTERRUPTED
    return 0 if results.of_state("complete") else 2


def _show(arguments: argparse.Namespace) -> int:
    from stepscope.tune.sweep.results import read_results

    given = [
        name
        for name in ("trials", "method", "metric", "goal", "budget", "seed", "jobs")
        if getattr(arguments, name) is not None
    ]
    if given:
        raise UsageError(f"stepscope sweep show only reports: it takes no --{given[0]}")
    folder = _shown_folder(arguments)
    place = arguments.storage or (folder if folder.is_file() else folder / _DATABASE)
    if not arguments.storage and not Path(place).is_file():
        raise UsageError(
            f"{arguments.study or place} is no folder of a sweep: it has no {_DATABASE}; where the study is in "
            "another database, name that with --storage"
        )
    results = read_results(place, arguments.name)
    _write(arguments, results, folder.parent if folder.is_file() else folder)
    return 0


def _shown_folder(arguments: argparse.Namespace) -> Path:
    if arguments.study is None:
        if arguments.folder or arguments.storage:
            return Path(arguments.folder or ".")
        raise UsageError(f"say which sweep to show: stepscope sweep show {FOLDER}/NAME")
    folder = Path(arguments.study)
    return folder if folder.exists() else Path(FOLDER, arguments.study)


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("trials", "method", "goal", "budget", "seed", "jobs", "name", "metric")
    return {name: getattr(arguments, name) for name in names}


def _folder(arguments: argparse.Namespace, sweep: Sweep) -> Path:
    folder = Path(arguments.folder) if arguments.folder else Path(FOLDER, sweep.name)
    try:
        private_folder(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    return folder.absolute()


def _write(arguments: argparse.Namespace, results: SweepResults, folder: Path) -> None:
    from stepscope.report.sweep import sweep_document, sweep_json

    shown = _redacted(results, folder) if arguments.redact else results
    output.write_reports(arguments, lambda: sweep_document(shown), top=arguments.top, json=lambda: sweep_json(shown))


def _redacted(results: SweepResults, folder: Path) -> SweepResults:
    """The results without paths, host and user names; parameter names stay, since values are looked up by them."""
    from stepscope.report.redaction import Redactor

    own = [each.name for each in results.sweep.parameters]
    names = [name for name in local_names() if not any(name in each for each in own)]
    return Redactor(names, [str(folder)]).redact(results)


def _beginning(sweep: Sweep, folder: Path, before: int) -> str:
    goal = "maximising" if sweep.metric.is_maximized else "minimising"
    many = "" if sweep.trials is None else f", {counted(sweep.trials, 'trial')}"
    jobs = f", {sweep.jobs} at a time" if sweep.jobs > 1 else ""
    done = f", {before} of them there already" if before else ""
    return f"{goal} {sweep.metric.name} by {sweep.method}{many}{done}{jobs}; logs in {folder}"


def _say_ended(sweep: Sweep, end: TrialEnd) -> None:
    from stepscope.report.format import clock
    from stepscope.report.words.sweep import number_words, values_words

    name = sweep.metric.name
    what = {
        "complete": f"{name} {number_words(end.value)}",
        "pruned": f"pruned at iteration {end.iterations}, {name} {number_words(end.value)}",
        "failed": f"failed: {end.reason}",
        "interrupted": "interrupted; it is repeated next time",
    }[end.state]
    values = values_words({each.name: end.values[each.name] for each in sweep.searched})
    say(f"trial {end.number}: {what}, in {clock(end.seconds)}; {values}")


def _how_it_ended(stop: Stop, sweep: Sweep, results: SweepResults, here: int) -> str:
    again = "the same command again goes on"
    match stop:
        case "budget":
            return f"the budget is used up after {counted(here, 'trial')}; {again}"
        case "target":
            return f"the target {sweep.metric.target:g} of {sweep.metric.name} is reached"
        case "interrupted":
            return f"interrupted; {again}"
        case "failing":
            return f"the first {here} trials all failed, so no more were begun; {again}"
    if not here and results.trials:
        return f"all {len(results.trials)} trials are there already; --trials asks for more"
    return f"{counted(here, 'trial')} here, {len(results.trials)} in the study"


COMMAND: Final = Command(
    "sweep",
    "Search a command's hyperparameters for the best value of a metric that it logs or prints.",
    _prepare_parser,
    _run,
    """\
A sweep file names the command, the metric and the parameters; W&B's sweep files are read as they are. What belongs to
the sweep goes into ./stepscope-sweeps/NAME. The same command again goes on where it was stopped, and several processes
may run it at the same time.

    command: python train.py --lr {lr} --width {width}
    metric: val_loss                          # or {name: accuracy, goal: maximize}
    parameters:
      lr: {min: 1e-5, max: 1e-1, log: true}
      width: [64, 128, 256]

examples:
  stepscope sweep sweep.yaml                               30 trials, one after the other, by TPE
  stepscope sweep sweep.yaml --trials 100 --jobs 4         four at a time, each with its share of the GPUs
  stepscope sweep sweep.yaml --method random --budget 2h   as many as begin within two hours
  stepscope sweep sweep.yaml --metric step_ms              the fastest step, as stepscope measures it
  stepscope sweep show stepscope-sweeps/sweep --html sweep.html     what it found so far

Exit codes: 0 done, 2 a mistake, or no trial gave a value, 130 interrupted; interrupted trials are repeated.""",
)
