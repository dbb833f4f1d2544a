"""How near promised savings come to what is gained when the fault is removed.

    python benchmarks/whatif_accuracy.py [--only NAME ...] [--traces FOLDER] [--times FILE ...] [--repeat 5]
                                         [--markdown] [--json FILE]

Each pair is a program with a fault and the same without it. "Promised" is what stepscope says of the recording with the
fault that the step loses without it, as a share of the recorded step: the saving of the findings of the expected rule;
where there are several, what one replay without all their causes gives, never their sum. "Measured" is what the step
really lost, as a share of the step with the fault. The error is their difference relative to the measured gain, as in
diagnosis_accuracy.py; "points" is the difference as a share of the step. Beside each replayed promise stands what the
same findings promise without a replay, where durations are added up. A pair without a gain has no error.

  real       recordings in the folder that STEPSCOPE_TRACES names. Measured is the difference of the medians of the
             recorded steps. Of the CPU pair, whose machine was busier in one recording than in the other, the time of
             operators that the fix does not touch (all lines but the loss) is held apart: by how much its median
             differs is no gain of the fix, and is taken off.
  zoo        every program of tests/zoo that saves time: recorded by `stepscope run`; steps timed without a profiler, in
             turns, the least mean of some steps in a row counts.
  naive      examples/naive_gpt2.py: each of its flags alone and all together, from the naive program and from the one
             with the batched loss, whose other faults weigh more. Timed as the zoo.
  simulated  machines of tests/zoo/simulated.py, whose steps need no timing.

"Noise" is by how much the least timings of a pair differ from the next ones, as a share of the step: gains are known no
better. With --times, recordings that are already under --traces are used as they are with the times in FILE: a --json
FILE of this benchmark or of diagnosis_accuracy.py, which keeps recordings with --traces too.

Needs the extra `dev` (torch and what the programs import).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]

from promise_pairs import Pair, Times, by_confidence, summary, table, told  # noqa: E402

import stepscope  # noqa: E402
from stepscope.analysis.places import line_table, place_costs  # noqa: E402
from stepscope.analysis.steps import step_table  # noqa: E402
from stepscope.readers import READERS  # noqa: E402
from stepscope.trace import Trace, Window  # noqa: E402
from tests.zoo import measure, registry, simulated  # noqa: E402
from tests.zoo.promise import promise  # noqa: E402

NAIVE = "examples/naive_gpt2.py"
LOSS = ("--batched-loss",)
FLAGS = {
    "loader": (("--loader-workers", "2"), ("input-bound", "slow-input-function")),
    "optimizer": (("--fused-optimizer",), ("single-tensor-optimizer",)),
    "logging": (("--deferred-logging",), ("host-synchronisation",)),
}
LOSS_RULES = ("loop-in-step",)


def gained(times: Times) -> float | None:
    """The share of the step that was gained, by the least timings; None without timings."""
    if not times.get("fault") or not times.get("clean"):
        return None
    return 1 - min(times["clean"]) / min(times["fault"])


class Recordings:
    """Recordings and timings, made once.

    Args:
        folder: for the recordings.
        known: timings that need not be made again, by the pair's name.
        repeat: how often to time.
    """

    def __init__(self, folder: Path, known: Mapping[str, Times], repeat: int) -> None:
        self._folder = folder
        self._known = known
        self._repeat = repeat

    def traces(self, name: str, rule: str, record: Callable[[], Path]) -> list[Path]:
        """The traces of all ranks of a recording, which is made where there is none yet or it may not be reused."""
        found = sorted((self._folder / name).glob("rank*/*.json.gz")) if self._known else []
        if not found:
            found = sorted(measure.undisturbed(record, rule)[0].glob("rank*/*.json.gz"))
        return found

    def times(self, name: str, timings: Mapping[str, Callable[[], float]]) -> Times:
        """The timings of a pair."""
        return self._known.get(name) or measure.in_turns(timings, self._repeat)

    def zoo(self, program: registry.Program) -> Pair:
        """A program of the zoo."""
        record = functools.partial(measure.record, program, "fault", self._folder)
        traces = self.traces(f"{program.name}-fault", program.rule, record)
        twins = ("fault", "clean")
        times = self.times(program.name, {twin: functools.partial(measure.step_ns, program, twin) for twin in twins})
        rules = (program.rule,)
        return Pair(program.name, "zoo", rules, promise(traces, rules), gained(times), times)

    def naive(self, name: str) -> Pair:
        """The example with and without some of its flags."""
        begun, fixed, rules = NAIVE_PAIRS[name]
        recorded = "naive-batched" if begun else "naive"
        words = [NAIVE, *begun]
        record = functools.partial(measure.record_words, words, recorded, self._folder)
        traces = self.traces(recorded, rules[0], record)
        commands = {"fault": words, "clean": [NAIVE, *begun, *fixed]}
        python = [sys.executable, "-m", "tests.zoo.timing"]
        times = self.times(
            name, {twin: functools.partial(measure.least_step_ns, [*python, *own]) for twin, own in commands.items()}
        )
        return Pair(name, "naive", rules, promise(traces, rules), gained(times), times)


def _naive_pairs() -> dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Name -> flags before, flags added, rules that should find what they mend."""
    pairs: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {}
    every_flag = tuple(word for words, _ in FLAGS.values() for word in words)
    every_rule = tuple(rule for _, rules in FLAGS.values() for rule in rules)
    pairs["naive: loss"] = ((), LOSS, LOSS_RULES)
    for what, (words, rules) in FLAGS.items():
        pairs[f"naive: {what}"] = ((), words, rules)
    pairs["naive: all four"] = ((), LOSS + every_flag, LOSS_RULES + every_rule)
    for what, (words, rules) in FLAGS.items():
        pairs[f"batched loss: {what}"] = (LOSS, words, rules)
    pairs["batched loss: all three"] = (LOSS, every_flag, every_rule)
    return pairs


NAIVE_PAIRS = _naive_pairs()


def machine(one: simulated.Simulated, folder: Path) -> Pair:
    """A simulated device's program."""
    trace = one.write("fault", folder)
    measured = 1 - one.step_ns("clean") / one.step_ns("fault")
    return Pair(one.name, "simulated", (one.rule,), promise([trace], (one.rule,)), measured)


def resnet(folder: Path) -> Pair:
    """The same training with its loader in the process and with four workers."""
    paths = [folder / "kineto" / f"v100_resnet50_workers{number}.json.gz" for number in (0, 4)]
    before, after = (statistics.median(_steps(stepscope.open_trace(path))) for path in paths)
    note = f"median step {before / 1e6:.1f} -> {after / 1e6:.1f} ms"
    rules = ("input-bound",)
    return Pair("v100_resnet50_workers0", "real", rules, promise(paths[:1], rules), 1 - after / before, note=note)


def gpt2(folder: Path) -> Pair:
    """The same training with its loss token by token and at once."""
    losses = {"cpu_gpt2_per_token_loss": "naive_loss", "cpu_gpt2_batched_loss": "fixed_loss"}
    paths = [folder / "kineto" / f"{name}.json.gz" for name in losses]
    traces = [stepscope.open_trace(path) for path in paths]
    before, after = (statistics.median(_steps(trace)) for trace in traces)
    rest = [_elsewhere_ns(trace, function) for trace, function in zip(traces, losses.values(), strict=True)]
    measured = (before - after - (rest[0] - rest[1])) / before
    note = (
        f"median step {before / 1e6:.1f} -> {after / 1e6:.1f} ms, of which {(rest[0] - rest[1]) / 1e6:.1f} ms are not "
        f"the fix's; with them {1 - after / before:.1%}"
    )
    rules = ("loop-in-step",)
    return Pair("cpu_gpt2_per_token_loss", "real", rules, promise(paths[:1], rules), measured, note=note)


REAL = {"v100_resnet50_workers0": resnet, "cpu_gpt2_per_token_loss": gpt2}


def _steps(trace: Trace) -> list[int]:
    steps = step_table(trace)
    return steps.filter(steps["complete"])["duration_ns"].to_list()


def _elsewhere_ns(trace: Trace, function: str) -> float:
    """The median over the steps of what operators take, forward and backward, that no line of the function caused."""
    found = []
    for start, duration in step_table(trace).select("start_ns", "duration_ns").iter_rows():
        lines = line_table(trace, costs=place_costs(trace, window=Window(start, start + duration)))
        found.append(int(lines.filter(lines["function"] != function)["total_ns"].sum()))
    return statistics.median(found)


def all_names() -> list[str]:
    """Of all pairs, in their order."""
    zoo = [program.name for program in registry.programs() if program.saves_time]
    return [*REAL, *zoo, *NAIVE_PAIRS, *(one.name for one in simulated.SIMULATED)]


def measured(chosen: Sequence[str], recordings: Recordings, folder: Path, failed: list[str]) -> Iterator[Pair]:
    """The chosen pairs, one after the other; names of those that could not be run are added to `failed`."""
    machines = {one.name: one for one in simulated.SIMULATED}
    real = Path(os.environ.get("STEPSCOPE_TRACES", ""))
    for name in chosen:
        try:
            if name in REAL:
                if (real / "kineto").is_dir():
                    yield REAL[name](real)
            elif name in machines:
                yield machine(machines[name], folder)
            elif name in NAIVE_PAIRS:
                yield recordings.naive(name)
            else:
                yield recordings.zoo(registry.program(name))
        except measure.ProgramFailed as problem:
            failed.append(name)
            print(f"{name}: {problem}", file=sys.stderr, flush=True)


def left_out() -> str:
    """What there is no pair of here, in lines of a list."""
    sentences = []
    if not (Path(os.environ.get("STEPSCOPE_TRACES", "")) / "kineto").is_dir():
        sentences.append("- Real recordings are left out: STEPSCOPE_TRACES names no folder of them.")
    if "nsight_systems" not in [reader.name for reader in READERS]:
        sentences.append("- Recordings of Nsight Systems are left out: stepscope cannot read them yet.")
    return "\n".join(sentences)


def known_times(files: Iterable[Path]) -> dict[str, Times]:
    """Timings of earlier runs of this benchmark or of diagnosis_accuracy.py, by name; the last file's count."""
    rows = [row for file in files for row in json.loads(file.read_text())]
    return {row["name"]: row["times_ns"] for row in rows if row.get("times_ns")}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="NAME", action="append", help="only this pair; may be repeated")
    parser.add_argument("--repeat", metavar="N", type=int, default=5, help="timings of each twin (default: 5)")
    parser.add_argument("--markdown", action="store_true", help="print the table for docs, and no pair by itself")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every pair's figures")
    parser.add_argument("--traces", metavar="FOLDER", type=Path, help="keep the recordings there")
    parser.add_argument(
        "--times", metavar="FILE", type=Path, action="append", default=[], help="take recordings and times from earlier"
    )
    options = parser.parse_args()
    names = all_names()
    for name in options.only or []:
        if name not in names:
            parser.error(f"there is no pair {name!r}; there are {', '.join(names)}")
    pairs: list[Pair] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.traces or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        recordings = Recordings(folder, known_times(options.times), options.repeat)
        for pair in measured([name for name in names if name in (options.only or names)], recordings, folder, failed):
            pairs.append(pair)
            if not options.markdown:
                print(told(pair), flush=True)
    if options.markdown:
        print(f"{table(pairs)}\n")
    print(f"{by_confidence(pairs)}\n")
    print("\n".join(filter(None, (summary(pairs), left_out()))))
    if options.json:
        rows = [asdict(pair) | {"error": pair.error, "attributed_error": pair.attributed_error} for pair in pairs]
        options.json.write_text(json.dumps(rows, indent=1))
    if failed:
        raise SystemExit(f"Not counted, because they failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
