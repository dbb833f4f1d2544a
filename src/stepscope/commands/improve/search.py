"""Searches by trial: `stepscope tune` for what makes a program faster, `stepscope sweep` for hyperparameters."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.options import (
    INTERRUPTED,
    TRIAL_STEPS,
    Command,
    CommandParser,
    add_redact_option,
    add_report_options,
    add_top_option,
    add_trial_options,
    relative_share,
    whole,
)
from stepscope.commands.shared.output import Progress, counted, say
from stepscope.commands.shared.reading import local_names
from stepscope.errors import UsageError
from stepscope.files import private_folder
from stepscope.report.format import clock, duration, span
from stepscope.threads import ENDING, handled, interrupt

if TYPE_CHECKING:
    from stepscope.compare.bench import Bench, BenchRun, BenchSettings
    from stepscope.tune.search import TuneResult, TuneStudy
    from stepscope.tune.sweep.file import Sweep
    from stepscope.tune.sweep.run import Stop, SweepResults, TrialEnd
    from stepscope.tune.trials import Knob, Space

RESULT: Final = "result"
_FEWEST_TO_JUDGE: Final = 2
"""Comparisons from which the machine is called noisy."""

_OPTIONS: Final[dict[str, object]] = {
    "folder": None,
    "storage": None,
    "steps": TRIAL_STEPS,
    "seed": 0,
    "only": None,
    "skip": None,
    "loss_tolerance": None,
}
"""Options with a value that must be repeated to continue a search, and their defaults."""


def _prepare_tune_parser(parser: CommandParser) -> None:
    parser.usage = "stepscope tune [options] PROGRAM [ARGUMENT ...]"
    parser.program = "program"
    parser.of_program = "--knob"
    add_trial_options(
        parser.add_argument_group("how much is measured"),
        precision="end the proof when the change is known to within this share of a step (1%%)",
        budget="start no trial after this time: 20m, 1h (20m)",
        budget_s=1200.0,
    )
    what = parser.add_argument_group("what is tried")
    what.add_argument(
        "--knob",
        metavar="NAME[=VALUES]",
        action="append",
        default=[],
        help="an option of the program: --workers=0,2,4, a switch --fused, data.workers=0,2, env:NAME=1,2; repeatable",
    )
    what.add_argument(
        "--only", metavar="NAMES", help="use only these knobs of findings and standard ones, such as workers,bf16"
    )
    what.add_argument("--skip", metavar="NAMES", help="not these")
    what.add_argument(
        "--no-profile", action="store_true", help="record no baseline: try standard knobs, not remedies of findings"
    )
    what.add_argument(
        "--loss-tolerance",
        metavar="SHARE",
        type=relative_share,
        help="largest relative difference of a loss (0.01%%; compiled 0.1%%, TF32 0.5%%, bf16 and fp16 2%%)",
    )
    what.add_argument(
        "--seed", metavar="N", type=whole(0), default=0, help="for random generators that the program does not seed (0)"
    )
    after = parser.add_argument_group("the study and its result")
    after.add_argument("--study", metavar="NAME", help="start, continue or join the study of this name")
    after.add_argument("--folder", metavar="DIR", help="keep studies in DIR instead of the user's data folder")
    after.add_argument(
        "--storage", metavar="URL", help="keep the trials in this database, such as postgresql://host/db"
    )
    add_report_options(
        after,
        json="write everything for programs; - prints it",
        markdown="write the result for a pull request; - prints it",
    )


def _run_tune(arguments: argparse.Namespace) -> int:
    """Search, prove and print; return 130 after Ctrl-C."""
    from stepscope.record.launch import command_of
    from stepscope.tune.search import TuneStudy
    from stepscope.tune.space import chosen_space
    from stepscope.tune.study import open_study
    from stepscope.tune.trials import Space, named_once, user_knob

    knobs = named_once(user_knob(text) for text in arguments.knob)
    if not arguments.program:
        raise UsageError("say what to tune: stepscope tune train.py")
    only, skip = _names(arguments.only), _names(arguments.skip) or ()
    chosen_space(Space(tuple(knobs)), only, skip)  # refuse unknown names before the program runs
    words = command_of(arguments.program)
    folder = _tune_folder(arguments, words)
    study = TuneStudy(open_study(arguments.storage or folder / "study.db", folder.name))
    study.check_program(_program(arguments, words))
    with handled(interrupt, *ENDING):
        try:
            space = _space(arguments, words, folder, study, knobs)
        except KeyboardInterrupt:
            return _interrupted(arguments, folder)
        result = _search_remedies(arguments, words, folder, study, space)
        _write_tune(arguments, folder, result)
    if result.stop == "budget":
        say(f"the budget ended first; to continue: {_command_to_go_on(arguments, folder)}")
    return _interrupted(arguments, folder) if result.stop == "interrupted" else 0


def _tune_folder(arguments: argparse.Namespace, words: list[str]) -> Path:
    from stepscope.record.manifest import RunManifest
    from stepscope.record.run_folder import check_name, data_folder, new_folder

    root = Path(arguments.folder).absolute() if arguments.folder else data_folder() / "tunes"
    try:
        private_folder(root, tighten=not arguments.folder)
        if arguments.study is None:
            return new_folder(root, RunManifest(tuple(words), started_unix_s=time.time()).suggested_name())
        check_name(arguments.study)
        private_folder(root / arguments.study)
    except OSError as error:
        raise UsageError(f"no folder can be made in {root}: {error.strerror}") from error
    return root / str(arguments.study)


def _program(arguments: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Settings that trials must share to be comparable."""
    from stepscope.tune.space import program_hash

    return {
        "words": list(arguments.program),
        "script": program_hash(words),
        "--steps": arguments.steps,
        "--seed": arguments.seed,
        "--quiet-machine": arguments.quiet_machine,
        "--knob": sorted(arguments.knob),
        "--only": arguments.only,
        "--skip": arguments.skip,
        "--loss-tolerance": arguments.loss_tolerance,
    }


def _settings(arguments: argparse.Namespace) -> BenchSettings:
    from stepscope.compare.bench import BenchSettings

    return BenchSettings(
        steps=arguments.steps,
        precision=arguments.precision,
        budget_s=arguments.budget,
        quiet=arguments.quiet_machine,
        seed=arguments.seed,
    )


def _space(arguments: argparse.Namespace, words: list[str], folder: Path, study: TuneStudy, knobs: list[Knob]) -> Space:
    """The search space, stored in the study by the first process."""
    from stepscope.commands.shared.reading import UserSources
    from stepscope.readers import open_trace
    from stepscope.trace.cache import TraceCache
    from stepscope.tune.space import Baseline, baseline_of, chosen_space, search_space, surroundings_of
    from stepscope.tune.study import held

    with held(_lock(), lambda: say("another stepscope tune is measuring on this machine; waiting")):
        known = study.space()
        if known is not None:
            say(f"continuing study {folder.name}; {folder}")
            return known
        say(f"study {folder.name}; {folder}")
        baseline = Baseline()
        if not arguments.no_profile:
            root = folder / "baseline" / str(time.time_ns())
            baseline = baseline_of(
                arguments.program,
                words,
                root,
                _settings(arguments),
                lambda path: open_trace(path, cache=TraceCache()),
                UserSources(Path.cwd()).read,
                say,
            )
        around = surroundings_of(baseline.trace, baseline.facts or {}, baseline.ranks, shares=baseline.shares)
        space = chosen_space(
            search_space(baseline.findings, knobs, around), _names(arguments.only), _names(arguments.skip) or ()
        )
        return study.keep_space(space)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(","))


def _lock() -> Path:
    import platform

    from stepscope.record.run_folder import data_folder

    return data_folder() / "tunes" / f".measuring-{platform.node()}.lock"


def _search_remedies(
    arguments: argparse.Namespace, words: list[str], folder: Path, study: TuneStudy, space: Space
) -> TuneResult:
    from stepscope.report.tune import gain_words, noise_sentence
    from stepscope.tune.next_trial import BenchMeasure, Plan
    from stepscope.tune.search import Search, share_of_unchanged
    from stepscope.tune.trials import Proposal, Trial

    begun_s = time.monotonic()
    trials: list[Trial] = []
    said_of_noise: list[str] = []
    bar = Progress("", in_bytes=False, arguments=arguments)

    def drawn(work: str | None = None) -> None:
        if sys.stderr.isatty():
            bar(min(int(time.monotonic() - begun_s), int(arguments.budget)), int(arguments.budget), work)

    def begins(proposal: Proposal, step: Plan) -> None:
        against = f" against {space.shown(proposal.reference)}" if proposal.reference.settings else ""
        left = f" ({len(step.proposals)} to go)" if step.phase == "screen" else ""
        what = f"{proposal.purpose}{left}: {space.shown(proposal.configuration)}{against}"
        best = ""
        if step.best.settings:
            gain = 1 - share_of_unchanged(step.best, study.trials())
            best = f"; best so far {space.shown(step.best)}, {gain:.0%} less"
        left_s = max(arguments.budget - (time.monotonic() - begun_s), 0.0)
        say(f"{what}{best}; {span(left_s)} left")
        drawn(f"trying {space.shown(proposal.configuration)}{best}")

    def tell(trial: Trial) -> None:
        say(f"  {gain_words(trial)}")
        trials.append(trial)
        noise = noise_sentence(trials) if len(trials) >= _FEWEST_TO_JUDGE else ""
        if noise and not trial.is_shown and not said_of_noise:
            said_of_noise.append(noise)
            say(noise)

    def ran(bench: Bench, one: BenchRun) -> None:
        drawn()
        if one.round > 1 or one.label == "B":
            return
        steady = one.steady_ns
        say(f"  {duration(sum(steady) / len(steady))} a step before")

    say(f"{len(space.knobs)} knobs: {', '.join(knob.name for knob in space.knobs) or 'none'}")
    measure = BenchMeasure(
        tuple(arguments.program), tuple(words), space, folder, _settings(arguments), arguments.loss_tolerance, ran
    )
    waiting = functools.cache(lambda: say("another stepscope tune is measuring on this machine; waiting"))
    with bar:
        return Search(study, space, measure, _lock(), arguments.budget, begins, tell, waiting).run()


def _write_tune(arguments: argparse.Namespace, folder: Path, result: TuneResult) -> None:
    from stepscope.report.document import json_bytes
    from stepscope.report.text import markdown_of, text_of
    from stepscope.report.tune import tune_document, tune_json

    data = json_bytes(tune_json(result, arguments.program))
    document = tune_document(result, arguments.program)
    kept = {"json": data, "md": markdown_of(document).encode(), "txt": text_of(document, width=120).encode()}
    for ending, content in kept.items():
        output.write_atomically(folder / f"{RESULT}.{ending}", content, private=True)
    output.write_reports(arguments, lambda: document, json=lambda: data)
    say(f"the result is in {folder / RESULT}.json, .md and .txt")


def _interrupted(arguments: argparse.Namespace, folder: Path) -> int:
    say(f"interrupted; to continue: {_command_to_go_on(arguments, folder)}")
    return INTERRUPTED


def _command_to_go_on(arguments: argparse.Namespace, folder: Path) -> str:
    """The command that continues this search, with the study's name and without secrets."""
    from stepscope.record.manifest import without_secrets

    words = ["stepscope", "tune", "--study", folder.name]
    for name, default in _OPTIONS.items():
        value = getattr(arguments, name)
        if value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    words += ["--quiet-machine"] if arguments.quiet_machine else []
    words += [word for knob in arguments.knob for word in ("--knob", knob)]
    return " ".join(
        word if "***" in word else shlex.quote(word) for word in without_secrets([*words, *arguments.program])
    )


TUNE: Final = Command(
    "tune",
    "Try remedies on a program, combine those that make it faster, and prove by how much, with equal losses.",
    _prepare_tune_parser,
    _run_tune,
    """\
Everything from PROGRAM on belongs to the program, which is started repeatedly, and ended after its steps. A stopped
search continues with the --study that it named and the same program; several processes may share a study.

examples:
  stepscope tune train.py --lr 3e-4                          remedies of findings, and standard knobs
  stepscope tune --steps 100 --budget 1h train.py            more steps per run, and more time
  stepscope tune --knob --workers=0,2,4 --knob --fused train.py    the program's own options too
  stepscope tune --only workers,compile train.py             nothing else
  stepscope tune --study mine train.py                       start, continue or join the study "mine"
  stepscope tune --study mine --storage postgresql://host/db train.py    from several machines

Exit codes: 0 done, even if nothing helps; 2 the unchanged program fails; 130 interrupted.""",
)


FOLDER: Final = "stepscope-sweeps"
_DATABASE: Final = "study.sqlite"
_TOP: Final = 10


def _prepare_sweep_parser(parser: CommandParser) -> None:
    parser.usage = "stepscope sweep [options] FILE\n       stepscope sweep show [options] FOLDER"
    parser.late = "study"
    parser.add_argument("file", metavar="FILE", help="the sweep file, or show")
    parser.add_argument("study", metavar="FOLDER", nargs="?", help="with show: a sweep's folder, or its name")
    search = parser.add_argument_group("the search; each overrides the file")
    search.add_argument("--trials", metavar="N", type=whole(1), help="most trials, including earlier ones")
    search.add_argument("--method", choices=("grid", "random", "tpe", "bayes", "hyperband"), help="how to search")
    search.add_argument("--metric", metavar="NAME", help="what to minimise, or maximise with --goal")
    search.add_argument("--goal", choices=("minimize", "maximize"), help="of the metric (minimize)")
    search.add_argument("--budget", metavar="TIME", help="start no trial after this time: 90s, 20m, 2h")
    search.add_argument("--seed", metavar="N", type=whole(0), help="for the same search again")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--jobs", metavar="N", type=whole(1), help="trials at the same time (1)")
    how.add_argument("--name", metavar="NAME", help="name of the study (default: the file's name key, or its own name)")
    how.add_argument("--folder", metavar="DIR", help=f"the sweep's folder (default: {FOLDER}/NAME)")
    how.add_argument(
        "--storage",
        metavar="URL",
        help="the study's database, which other machines can reach too, such as postgresql://host/db (default: an "
        "SQLite file in the folder)",
    )
    reports = parser.add_argument_group("reports (- writes to standard output)")
    add_report_options(reports, json="for programs", html="one page with a plot of all trials")
    add_top_option(reports, f"trials, 0 for all ({_TOP})", _TOP)
    add_redact_option(reports)


def _run_sweep(arguments: argparse.Namespace) -> int:
    if arguments.file == "show" and not Path("show").is_file():
        return _show(arguments)
    if arguments.study is not None:
        raise UsageError(f"{arguments.study!r} is one argument too many (see stepscope sweep --help)")
    return _search_parameters(arguments)


def _search_parameters(arguments: argparse.Namespace) -> int:
    from stepscope.tune.sweep.file import read_sweep
    from stepscope.tune.sweep.run import SweepRun, results_of
    from stepscope.tune.sweep.study import SweepStudy

    sweep = read_sweep(Path(arguments.file), _changes(arguments))
    for sentence in sweep.warnings:
        say(f"{arguments.file}: {sentence}")
    folder = _sweep_folder(arguments, sweep)
    study = SweepStudy(sweep, arguments.storage or folder / _DATABASE, folder)
    if study.earlier_command:
        say(f"the command was different before, {study.earlier_command}: earlier trials ran that one")
    say(_beginning(sweep, folder, len(results_of(sweep, study.study).trials)))
    runner = SweepRun(study, folder, partial(_say_ended, sweep), say)
    stop = runner.run()
    results = results_of(sweep, study.study)
    say(_how_it_ended(stop, sweep, results, len(runner.ended)))
    _write_sweep(arguments, results, folder)
    if stop == "interrupted":
        return INTERRUPTED
    return 0 if results.of_state("complete") else 2


def _show(arguments: argparse.Namespace) -> int:
    from stepscope.tune.sweep.run import read_results

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
            f"{arguments.study or place} is not a sweep's folder: it has no {_DATABASE}; if the study is in "
            "another database, name that with --storage"
        )
    results = read_results(place, arguments.name)
    _write_sweep(arguments, results, folder.parent if folder.is_file() else folder)
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


def _sweep_folder(arguments: argparse.Namespace, sweep: Sweep) -> Path:
    folder = Path(arguments.folder) if arguments.folder else Path(FOLDER, sweep.name)
    try:
        private_folder(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}") from error
    return folder.absolute()


def _write_sweep(arguments: argparse.Namespace, results: SweepResults, folder: Path) -> None:
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
    done = f", {before} of them done already" if before else ""
    return f"{goal} {sweep.metric.name} by {sweep.method}{many}{done}{jobs}; logs in {folder}"


def _say_ended(sweep: Sweep, end: TrialEnd) -> None:
    from stepscope.report.sweep import number_words, values_words

    name = sweep.metric.name
    what = {
        "complete": f"{name} {number_words(end.value)}",
        "pruned": f"pruned at iteration {end.iterations}, {name} {number_words(end.value)}",
        "failed": f"failed: {end.reason}",
        "interrupted": "interrupted; it will be repeated",
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
        return f"all {len(results.trials)} trials are done already; --trials runs more"
    return f"{counted(here, 'trial')} here, {len(results.trials)} in the study"


SWEEP: Final = Command(
    "sweep",
    "Search a command's hyperparameters for the best value of a metric that it logs or prints.",
    _prepare_sweep_parser,
    _run_sweep,
    """\
A sweep file names the command, the metric and the parameters; W&B's sweep files work unchanged. What belongs to
the sweep goes into ./stepscope-sweeps/NAME. The same command again continues where it stopped, and several processes
may run it at the same time.

    command: python train.py --lr {lr} --width {width}
    metric: val_loss                          # or {name: accuracy, goal: maximize}
    parameters:
      lr: {min: 1e-5, max: 1e-1, log: true}
      width: [64, 128, 256]

examples:
  stepscope sweep sweep.yaml                               30 trials, one after another, by TPE
  stepscope sweep sweep.yaml --trials 100 --jobs 4         four at a time, each with its share of the GPUs
  stepscope sweep sweep.yaml --method random --budget 2h   as many as start within two hours
  stepscope sweep sweep.yaml --metric step_ms              the fastest step, as stepscope measures it
  stepscope sweep show stepscope-sweeps/sweep --html sweep.html     what it found so far

Exit codes: 0 done, 2 a mistake, or no trial gave a value, 130 interrupted; interrupted trials are repeated.""",
)
