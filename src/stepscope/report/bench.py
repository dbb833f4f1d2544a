"""Report what `stepscope bench` measured, and throughput against batch size, for terminals and pull requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev, variance
from typing import Any, Final

import polars as pl

from stepscope.analysis.batch_size import GAIN, BatchModel, Line, Measurement
from stepscope.compare.bench import Bench, BenchCommand, BenchRun
from stepscope.compare.comparison import Comparison
from stepscope.compare.statistics import NAME as WARM_UP_RULE
from stepscope.compare.statistics import SampleComparison
from stepscope.predict.data_parallel_settings import Reason, SettingsFromTrace
from stepscope.report.comparison import comparison_document, comparison_json
from stepscope.report.comparison_words import detectable_sentences, verdict_sentence
from stepscope.report.document import (
    Block,
    Code,
    Document,
    Facts,
    Items,
    Section,
    Table,
    Text,
    Verbatim,
    fields,
    section_if,
    stamped,
    texts,
)
from stepscope.report.format import change_words, count, duration, interval_words, share, share_of, size

_FEWEST_RUNS: Final = 3
_UNLIKELY: Final = 0.01


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of one command, as standard deviations relative to the mean step.

    Attributes:
        within: deviation of the steps of one run.
        between: deviation of the runs' means; None with only one run.
        runs_differ: whether the runs' means scatter more than the halves of each run predict (an F test).
    """

    within: float
    between: float | None
    runs_differ: bool


def noise_of(runs: Sequence[BenchRun]) -> Noise | None:
    """The noise of a command, from its steady steps; None if no run has two of them."""
    steady = [run.steady_ns for run in runs if len(run.steady_ns) > 1]
    if not steady:
        return None
    means = [fmean(steps) for steps in steady]
    mean = fmean(means)
    if not mean:
        return None
    within = fmean([stdev(steps) for steps in steady]) / mean
    between = stdev(means) / mean if len(means) > 1 else None
    return Noise(within, between, len(means) >= _FEWEST_RUNS and _runs_differ(steady, means))


def _runs_differ(steady: Sequence[Sequence[int]], means: Sequence[float]) -> bool:
    """Compare the scatter of the runs' means with the scatter that the halves of each run predict.

    The difference between a run's halves has four times the variance of its mean, even if neighbouring steps are
    correlated, as long as the correlation is shorter than half a run.
    """
    apart = [fmean(steps[: len(steps) // 2]) - fmean(steps[len(steps) // 2 :]) for steps in steady]
    explained = fmean([each**2 for each in apart]) / 4
    from scipy.stats import f

    scatter = variance(means)
    if not explained:
        return scatter > 0
    return float(f.sf(scatter / explained, len(means) - 1, len(means))) < _UNLIKELY


_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "run": pl.String,
    "step_ns": pl.Float64,
    "low_ns": pl.Float64,
    "high_ns": pl.Float64,
    "change": pl.String,
    "interval": pl.String,
    "verdict": pl.String,
    "steps": pl.Int64,
    "runs": pl.Int64,
}
_SIGNS: Final = {
    "explicit": "a block of stepscope.step()",
    "optimizer": "an optimizer's step",
    "loader": "a batch asked of a DataLoader",
    "forward": "a call of the outermost module",
}
_BUSY_CORES: Final = 0.5


def bench_document(bench: Bench, profiled: Sequence[Comparison] = ()) -> Document:
    """Report the commands, the table, the verdicts, how they were measured, and what the profiles show.

    Args:
        profiled: comparisons of the commands' profiles.
    """
    commands = Facts(tuple((command.label, Verbatim(command.shown)) for command in bench.commands))
    parts = (commands, Table(bench_table(bench)), Items(tuple(verdicts(bench))), Items(tuple(how(bench))))
    why = comparison_document(profiled, only_why=True).blocks if profiled else ()
    quiet = [Section("", (part,), is_quiet=True) for part in parts]
    return Document("bench", (*quiet, *why), "--json -", level=4)


def bench_table(bench: Bench) -> pl.DataFrame:
    """One row per command: its mean step with its interval, and how it compares with the first."""
    comparisons = bench.comparisons()
    first = comparisons[0][1]
    baseline = (first.before_ns, first.before_low_ns, first.before_high_ns)
    rows = [_row(bench.commands[0], baseline, None, first.before_steps, first.before_runs)]
    for command, found in comparisons:
        mean = (found.after_ns, found.after_low_ns, found.after_high_ns)
        rows.append(_row(command, mean, found, found.after_steps, found.after_runs))
    return pl.DataFrame(rows, schema=dict(_SCHEMA), orient="row")


def _row(
    command: BenchCommand,
    mean: tuple[float | None, float | None, float | None],
    found: SampleComparison | None,
    steps: int,
    runs: int,
) -> tuple[object, ...]:
    change = "" if found is None or found.change is None else change_words(found.change)
    interval = ""
    if found is not None and found.change_low is not None and found.change_high is not None:
        interval = interval_words(found.change_low, found.change_high)
    verdict = "" if found is None else found.verdict
    return (command.label, *mean, change, interval, verdict, steps, runs)


def verdicts(bench: Bench) -> Iterator[str]:
    """Say for each command but the first whether it is faster and how certain that is, one sentence each."""
    first = bench.commands[0].label
    for command, found in bench.comparisons():
        sentence = verdict_sentence(found)
        yield f"{command.label} against {first}: {sentence[0].lower()}{sentence[1:]}"
        yield from detectable_sentences(found)
        names = {"before": first, "after": command.label}
        yield from (_in_names(caveat, names) for caveat in found.caveats)
    if len(bench.commands) > 2:
        each = share_of(bench.settings.confidence(len(bench.commands)))
        yield f"Each interval is one of {each}, so that all of them hold together in {share_of(0.95)} of such benches."


def _in_names(caveat: str, names: dict[str, str]) -> str:
    return re.sub(r"\b(before|after)\b", lambda word: f"of {names[word[1]]}", caveat)


def how(bench: Bench) -> Iterator[str]:
    """Describe how it was measured and how noisy the machine was, one sentence each."""
    yield _why_stopped(bench)
    yield from _steps(bench)
    yield _warm_up(bench)
    noises = [(command.label, noise_of(bench.runs_of(command.label))) for command in bench.commands]
    yield from _noise([(label, noise) for label, noise in noises if noise is not None])
    yield from _others(bench)
    firsts = [bench.runs_of(command.label)[:1] for command in bench.commands]
    for command, runs in zip(bench.commands, firsts, strict=True):
        for outcome in runs[0].applied if runs else ():
            yield f"{command.label}, {outcome.text}."
    yield from _alike_once(sentence for runs in firsts for run in runs for sentence in run.said)


def _why_stopped(bench: Bench) -> str:
    begun = f"{bench.rounds} round{'s' if bench.rounds != 1 else ''} in {duration(bench.seconds * 1e9)}"
    wanted = f"±{share(bench.settings.precision)}"
    widths = [half for _, found in bench.comparisons() if (half := half_width(found)) is not None]
    reached = None
    if len(widths) == len(bench.commands) - 1:
        reached = f"±{share(max(widths))}" if max(widths) < 1 else "no better than ±100 %"
    match bench.stop:
        case "precision":
            return f"Stopped after {begun}: the change is known to {reached} of a step of A; {wanted} was requested."
        case "rounds" | "budget":
            why = "as many rounds as requested" if bench.stop == "rounds" else "another round exceeds the budget"
            known = "" if reached is None else f"; the change is known to {reached} of a step of A, not to {wanted}"
            return f"Stopped after {begun}: {why}{known}."
        case "failed":
            return f"Ended after {begun} because a command failed; what was measured before is shown."
        case _:
            return f"Interrupted after {begun}; what was measured until then is shown."


def half_width(found: SampleComparison) -> float | None:
    """Half the width of the interval of the change, as a share of the first command's step."""
    if found.change_low is None or found.change_high is None:
        return None
    return (found.change_high - found.change_low) / 2


def _steps(bench: Bench) -> Iterator[str]:
    kinds = {run.label: (run.source, run.clock, run.ranks) for run in bench.runs}
    for kind in dict.fromkeys(kinds.values()):
        labels = (
            "" if len(set(kinds.values())) == 1 else f" of {' and '.join(k for k, v in kinds.items() if v == kind)}"
        )
        source, clock, ranks = kind
        of_ranks = f" on the last of {ranks} ranks" if ranks > 1 else ""
        by = "by the device's clock" if clock == "device" else "by the host's clock"
        yield f"A step{labels} ends with {_SIGNS.get(source, source)}{of_ranks}, {by}."
    if len({source for source, _, _ in kinds.values()}) > 1:
        yield "The commands' steps were detected by different signs, so they may not be the same work."
    for label in kinds:
        short = [run for run in bench.runs_of(label) if not run.complete]
        if short:
            counts = _span([len(run.step_ns) for run in short])
            yield f"{label} ended by itself after {counts} of {bench.settings.steps} timed steps."
        if any(run.own_profiler for run in bench.runs_of(label)):
            yield f"{label} runs torch.profiler itself, which slows its steps."


def _warm_up(bench: Bench) -> str:
    dropped = []
    unsteady = []
    for command in bench.commands:
        runs = bench.runs_of(command.label)
        if runs:
            dropped.append(f"{command.label} {_span([run.warm_up.dropped for run in runs])}")
        changing = sum(not run.warm_up.steady for run in runs)
        if changing:
            unsteady.append(f"{changing} of {len(runs)} runs of {command.label}")
    timed = _span([len(run.step_ns) for run in bench.runs])
    sentence = (
        f"Warm-up, by {WARM_UP_RULE}: of {timed} timed steps a run, the first were dropped ({', '.join(dropped)}); "
        "the very first step is not timed."
    )
    if unsteady:
        sentence += f" In {' and '.join(unsteady)} the steps still changed after it: a larger --steps would show more."
    return sentence


def _noise(noises: list[tuple[str, Noise]]) -> Iterator[str]:
    within = ", ".join(f"{label} {share(noise.within)}" for label, noise in noises)
    between = [f"{label} {share(noise.between)}" for label, noise in noises if noise.between is not None]
    if within:
        runs = f", from run to run {', '.join(between)}" if between else ""
        yield f"Noise (standard deviation): from step to step {within}{runs}."
    drifting = [label for label, noise in noises if noise.runs_differ]
    if drifting:
        yield (
            f"Runs of {' and '.join(drifting)} differ more than their steps explain: something changes from run to "
            "run, such as the clock, memory placement or other load; the intervals include it. --quiet-machine helps."
        )


def _others(bench: Bench) -> Iterator[str]:
    known = [run.other_cores for run in bench.runs if run.other_cores is not None]
    if not known:
        return
    span = f"{min(known):.1f} to {max(known):.1f}" if round(max(known) - min(known), 1) else f"{max(known):.1f}"
    sentence = f"Other processes kept {span} cores busy meanwhile"
    yield sentence + ("; without them the intervals would be narrower." if max(known) > _BUSY_CORES else ".")


def _alike_once(sentences: Iterable[str]) -> Iterator[str]:
    """Drop sentences that differ from an earlier one only in their numbers."""
    seen = set()
    for sentence in sentences:
        words = re.sub(r"[0-9]", "", sentence)
        if words not in seen:
            seen.add(words)
            yield sentence


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def bench_json(bench: Bench, profiled: Sequence[Comparison] = ()) -> dict[str, Any]:
    """Every run with all its steps, and the comparisons.

    Args:
        profiled: comparisons of the commands' profiles, written under "profile" as `stepscope compare --json` does.
    """
    failure = bench.failure
    return stamped(
        folder=str(bench.folder),
        stop=bench.stop,
        failure=None if failure is None else fields(failure, "label", "round", "sentence"),
        rounds=bench.rounds,
        seconds=bench.seconds,
        settings=bench.settings,
        warm_up=WARM_UP_RULE,
        commands=[
            {
                "label": command.label,
                "command": replace(command, apply=()).shown,
                "apply": command.apply,
                "runs": [_run(run) for run in bench.runs_of(command.label)],
            }
            for command in bench.commands
        ],
        comparisons=[{"label": command.label, **fields(found)} for command, found in bench.comparisons()],
        profile=comparison_json(profiled) if profiled else None,
    )


def _run(run: BenchRun) -> dict[str, Any]:
    return {
        **fields(run, "round", "step_ns", "source", "clock", "ranks", "complete", "seconds", "other_cores"),
        "dropped": run.warm_up.dropped,
        "steady": run.warm_up.steady,
        "applied": [outcome.to_json() for outcome in run.applied],
    }


BATCH_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "batch_size": pl.Int64,
    "steps": pl.Int64,
    "step_ns": pl.Float64,
    "line_ns": pl.Float64,
    "samples_per_second": pl.Float64,
    "memory_bytes": pl.Int64,
    "line_memory_bytes": pl.Float64,
}


def batch_table(model: BatchModel) -> pl.DataFrame:
    """One row per measurement, with what the fitted lines predict for it."""
    rows = [
        (
            each.batch_size,
            each.steps,
            each.step_ns,
            None if model.time is None else model.time.at(each.batch_size),
            each.throughput,
            each.memory_bytes,
            None if model.memory is None else model.memory.at(each.batch_size),
        )
        for each in model.measurements
    ]
    return pl.DataFrame(rows, schema=dict(BATCH_SCHEMA), orient="row")


def batch_document(model: BatchModel) -> Document:
    """Report the measurements, the lines fitted to them, and the recommendation."""
    parts = ((Table(batch_table(model)),), texts(*_lines(model)), texts(*verdict(model)))
    return Document("batch size", tuple(Section("", part, is_quiet=True) for part in parts))


def _lines(model: BatchModel) -> Iterator[str]:
    if model.time is not None:
        yield f"a step takes {_line(model.time, duration)}"
    if model.memory is not None:
        yield f"memory takes {_line(model.memory, size)}"
        if model.measurements[0].device == "cpu":
            yield "(on the host: what torch allocated while recording, not what was there before)"
    for problem in model.problems:
        yield f"not answered: {problem}"


def _line(line: Line, write: Callable[[float], str]) -> str:
    """Format a line as "10.0 ms (± 0.2 ms) + 2.0 ms (± 0.1 ms) for each sample; explains 99.9 %"."""
    constant, slope = write(line.constant), write(line.slope)
    if line.constant_error is not None and line.slope_error is not None:
        constant += f" (± {write(line.constant_error)})"
        slope += f" (± {write(line.slope_error)})"
    explained = f"; the line explains {share(line.r_squared)}" if line.slope_error is not None else ""
    return f"{constant} and {slope} for each sample{explained}"


def verdict(model: BatchModel) -> Iterator[str]:
    """Recommend a batch size, in sentences."""
    best = max(model.measurements, key=lambda each: each.throughput)
    rate = count(round(best.throughput, 1))
    fastest = f"The fastest of the measured sizes is {best.batch_size}: {rate} samples a second"
    limit = model.throughput_limit
    if limit is not None:
        reached = best.throughput / limit
        yield f"{fastest}, {share(reached)} of the {count(round(limit, 1))} that no size can exceed."
        half = model.batch_for(0.9 * limit)
        if half is not None and half > 0:
            yield f"90 % of that takes a batch of {count(round(half))}."
    else:
        yield f"{fastest}."
    if model.largest_batch is not None and model.capacity_bytes is not None:
        yield (
            f"The largest batch that fits into {size(model.capacity_bytes)} with {share(model.kept_free)} of it left "
            f"free is about {count(model.largest_batch)}{_beyond(model)}."
        )
        yield from _advice(model, best, model.largest_batch)


def _beyond(model: BatchModel) -> str:
    largest = model.measurements[-1].batch_size
    if model.largest_batch is None or model.largest_batch <= 2 * largest:
        return ""
    return f", {model.largest_batch / largest:.0f} times the largest that was measured: try it before relying on it"


def _advice(model: BatchModel, best: Measurement, largest: int) -> Iterator[str]:
    expected = model.throughput(largest)
    if expected is None or largest <= best.batch_size:
        return
    gain = expected / best.throughput - 1
    if gain >= GAIN:
        yield f"It would bring {share(gain)} more samples a second than {best.batch_size}."
    else:
        yield f"It would bring no more than {share(max(gain, 0.0))}: the batch size is large enough."


def batch_json(model: BatchModel) -> dict[str, Any]:
    return stamped(
        measurements=batch_table(model),
        **fields(model, "time", "memory", "capacity_bytes", "kept_free", "largest_batch", "problems"),
        samples_per_second_limit=model.throughput_limit,
        verdict=list(verdict(model)),
    )


_SIZES: Final[dict[str, type[pl.DataType]]] = {
    "bucket_cap_mb": pl.String,
    "messages": pl.Float64,
    "communication_ns": pl.Float64,
    "exposed_ns": pl.Float64,
}


def data_parallel_document(found: SettingsFromTrace, *, file: str | None = None) -> Document:
    """Report each setting with its reason, the bucket sizes tried, and the code.

    Args:
        file: the file with the settings, which the code reads.
    """
    settings = [Section(f"{each.setting} = {_value(each)}", (Text(each.why),)) for each in found.reasons]
    sizes = (Table(_sizes(found)),) if found.sizes else ()
    blocks: tuple[Block, ...] = (
        Text(_head(found)),
        *settings,
        *section_if("Bucket sizes and their mean step", *sizes),
        Section("In the program", (_code(found, file),)),
    )
    return Document("data parallel", blocks)


def _head(found: SettingsFromTrace) -> str:
    among = f" among {found.ranks} ranks" if found.ranks is not None else ""
    head = f"Recorded steps{among} take {duration(found.step_ns)}."
    if found.latency_ns is not None and found.bandwidth_bytes_s is not None and found.sizes:
        speed = f"{found.bandwidth_bytes_s / 1e9:.2f} GB/s"
        head += f" A message takes {duration(found.latency_ns)}, and its bytes over {speed} each way."
        if found.recorded_ranks < 2:
            head += " Only one rank's trace was given: its waits for the others count as part of a message."
    return head


def _value(reason: Reason) -> str:
    if reason.value is None:
        return "(torch's own)" if reason.known else "(not known)"
    return f"{reason.value:g}" if not isinstance(reason.value, bool) else str(reason.value)


def _sizes(found: SettingsFromTrace) -> pl.DataFrame:
    """Bucket sizes, with neighbours that produce the same messages in one row (in a small model, all large ones)."""
    rows: list[tuple[str, float, float, float]] = []
    first = ""
    for each in found.sizes:
        size = "1, then 25" if each.megabytes is None else str(each.megabytes)
        costs = (each.messages, each.communication_ns, each.exposed_ns)
        if each.megabytes is not None and first and rows[-1][1:] == costs:
            rows[-1] = (f"{first} to {size}", *costs)
        else:
            rows.append((size, *costs))
            first = "" if each.megabytes is None else size
    return pl.DataFrame(rows, schema=dict(_SIZES), orient="row")


def _code(found: SettingsFromTrace, file: str | None) -> Code | Text:
    given = found.settings.arguments()
    if not given:
        known = any(each.known for each in found.reasons)
        right = "torch's own settings are right, as far as the recording shows"
        unknown = "the recording does not show which settings would be right"
        return Text(f"nothing to change: {right if known else unknown}")
    words = ", ".join(f"{name}={value!r}" for name, value in given.items())
    made = f"DataParallelSettings.load({file!r})" if file is not None else f"DataParallelSettings({words})"
    return Code(
        f"model = DistributedDataParallel(model, {words})\n"
        "# or\n"
        "from stepscope.remedies import DataParallelSettings\n"
        f"settings = {made}\n"
        "model = settings.ddp(model)                       # or: Trainer(strategy=settings.lightning_strategy())"
    )


def data_parallel_json(found: SettingsFromTrace) -> dict[str, Any]:
    """The settings as JSON values, also read by `DataParallelSettings.load`."""
    written: dict[str, Any] = json.loads(found.settings.to_json())
    return {
        **written,
        "reasons": {each.setting: fields(each, "why", "known") for each in found.reasons},
        **fields(found, "step_ns", "ranks", "recorded_ranks", "latency_ns", "bandwidth_bytes_s"),
        "sizes": [
            {"bucket_cap_mb": each.megabytes, **fields(each, "messages", "communication_ns", "exposed_ns")}
            for each in found.sizes
        ],
    }
