"""`stepscope tune`: find by trial what makes a program faster, and prove it by fresh measurements."""

from __future__ import annotations

import argparse
import functools
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stepscope.commands.shared import output
from stepscope.commands.shared.command import Command, CommandParser
from stepscope.commands.shared.options import TRIAL_STEPS, add_report_options, add_trial_options
from stepscope.commands.shared.output import say
from stepscope.commands.shared.programs import INTERRUPTED
from stepscope.commands.shared.values import relative_share, whole
from stepscope.errors import UsageError
from stepscope.files import private_folder
from stepscope.machine.signals import ENDING, handled, interrupt
from stepscope.report.format import duration

if TYPE_CHECKING:
    from stepscope.compare.bench import Bench, BenchRun, BenchSettings
    from stepscope.tune.search import TuneResult, TuneStudy
    from stepscope.tune.trials import Knob, Space

RESULT: Final = "result"

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


def _prepare_parser(parser: CommandParser) -> None:
    parser.usage = "stepscope tune [options] PROGRAM [ARGUMENT ...]"
    parser.program = "program"
    parser.of_program = "--knob"
    add_trial_options(
        parser.add_argument_group("how much is measured"),
        precision="end the proof when the change is known to this share of a step, more or less (1%%)",
        budget="begin no further trial after it: 20m, 1h (20m)",
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
    what.add_argument("--only", metavar="NAMES", help="of findings and standard knobs only these, such as workers,bf16")
    what.add_argument("--skip", metavar="NAMES", help="not these")
    what.add_argument(
        "--no-profile", action="store_true", help="record no baseline, so that no findings say what to try"
    )
    what.add_argument(
        "--loss-tolerance",
        metavar="SHARE",
        type=relative_share,
        help="largest relative difference of a loss (0.01%%; compiled 0.1%%, TF32 0.5%%, bf16 and fp16 2%%)",
    )
    what.add_argument(
        "--seed",
        metavar="N",
        type=whole(0),
        default=0,
        help="for random generators that the program does not seed (0)",
    )
    after = parser.add_argument_group("the study and its result")
    after.add_argument("--study", metavar="NAME", help="begin, go on with or join the study of this name")
    after.add_argument("--folder", metavar="DIR", help="keep studies in DIR instead of the user's data folder")
    after.add_argument(
        "--storage", metavar="URL", help="keep the trials in this database, such as postgresql://host/db"
    )
    add_report_options(
        after,
        json="write everything for programs; - prints it",
        markdown="write the result for a pull request; - prints it",
    )


def _run(arguments: argparse.Namespace) -> int:
    """Search, prove and print; return 130 after Ctrl-C."""
    from stepscope.record.launch import command_of
    from stepscope.tune.search import TuneStudy
    from stepscope.tune.space import chosen_space
    from stepscope.tune.study import import_optuna, open_study
    from stepscope.tune.trials import Space, named_once, user_knob

    knobs = named_once(user_knob(text) for text in arguments.knob)
    if not arguments.program:
        raise UsageError("say what to tune: stepscope tune train.py")
    only, skip = _names(arguments.only), _names(arguments.skip) or ()
    chosen_space(Space(tuple(knobs)), only, skip)  # refuse unknown names before the program runs
    words = command_of(arguments.program)
    import_optuna()
    folder = _folder(arguments, words)
    study = TuneStudy(open_study(arguments.storage or folder / "study.db", folder.name))
    study.check_program(_program(arguments, words))
    with handled(interrupt, *ENDING):
        try:
            space = _space(arguments, words, folder, study, knobs)
        except KeyboardInterrupt:
            return _interrupted(arguments, folder)
        result = _search(arguments, words, folder, study, space)
        _write(arguments, folder, result)
    if result.stop == "budget":
        say(f"the budget ended first; to go on: {_command_to_go_on(arguments, folder)}")
    return _interrupted(arguments, folder) if result.stop == "interrupted" else 0


def _folder(arguments: argparse.Namespace, words: list[str]) -> Path:
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
    from stepscope.commands.shared.sources import UserSources
    from stepscope.readers import open_trace
    from stepscope.trace.cache import TraceCache
    from stepscope.tune.space import Baseline, baseline_of, chosen_space, search_space, surroundings_of
    from stepscope.tune.study import held

    with held(_lock(), lambda: say("another stepscope tune measures on this machine; waiting")):
        known = study.space()
        if known is not None:
            say(f"the study {folder.name} goes on; {folder}")
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
        around = surroundings_of(baseline.trace, baseline.facts or {}, baseline.ranks)
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


def _search(
    arguments: argparse.Namespace, words: list[str], folder: Path, study: TuneStudy, space: Space
) -> TuneResult:
    from stepscope.report.tune import gain_words
    from stepscope.tune.measure import BenchMeasure
    from stepscope.tune.plan import Plan
    from stepscope.tune.search import Search
    from stepscope.tune.trials import Proposal, Trial

    def begins(proposal: Proposal, step: Plan) -> None:
        against = f" against {space.shown(proposal.reference)}" if proposal.reference.settings else ""
        left = f" ({len(step.proposals)} to go)" if step.phase == "screen" else ""
        say(f"{proposal.purpose}{left}: {space.shown(proposal.configuration)}{against}")

    def tell(trial: Trial) -> None:
        say(f"  {gain_words(trial)}")

    def ran(bench: Bench, one: BenchRun) -> None:
        if one.round > 1 or one.label == "B":
            return
        steady = one.steady_ns
        say(f"  {duration(sum(steady) / len(steady))} a step before")

    say(f"{len(space.knobs)} knobs: {', '.join(knob.name for knob in space.knobs) or 'none'}")
    measure = BenchMeasure(
        tuple(arguments.program), tuple(words), space, folder, _settings(arguments), arguments.loss_tolerance, ran
    )
    waiting = functools.cache(lambda: say("another stepscope tune measures on this machine; waiting"))
    return Search(study, space, measure, _lock(), arguments.budget, begins, tell, waiting).run()


def _write(arguments: argparse.Namespace, folder: Path, result: TuneResult) -> None:
    from stepscope.report.json import json_bytes
    from stepscope.report.markdown import markdown_of
    from stepscope.report.text import text_of
    from stepscope.report.tune import tune_document, tune_json

    data = json_bytes(tune_json(result, arguments.program))
    document = tune_document(result, arguments.program)
    kept = {"json": data, "md": markdown_of(document).encode(), "txt": text_of(document, width=120).encode()}
    for ending, content in kept.items():
        output.write_atomically(folder / f"{RESULT}.{ending}", content, private=True)
    output.write_reports(arguments, lambda: document, json=lambda: data)
    say(f"the result stands in {folder / RESULT}.json, .md and .txt")


def _interrupted(arguments: argparse.Namespace, folder: Path) -> int:
    say(f"interrupted; to go on: {_command_to_go_on(arguments, folder)}")
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


COMMAND: Final = Command(
    "tune",
    "Try remedies on a program, combine those that make it faster, and prove by how much, with equal losses.",
    _prepare_parser,
    _run,
    """\
Everything from PROGRAM on is the program's; it is started again and again, and ended after its steps. A search that
was stopped goes on with the --study that it names, and the same program; several processes may share a study.

examples:
  stepscope tune train.py --lr 3e-4                          findings' remedies and standard knobs
  stepscope tune --steps 100 --budget 1h train.py            more steps a run, and more time
  stepscope tune --knob --workers=0,2,4 --knob --fused train.py    the program's own options too
  stepscope tune --only workers,compile train.py             nothing else
  stepscope tune --study mine train.py                       begin, go on with or join the study "mine"
  stepscope tune --study mine --storage postgresql://host/db train.py    from several machines

Exit codes: 0 done, also where nothing helps; 2 the program fails as it is; 130 interrupted.""",
)
