"""Report the outcome of a tuning search, in sentences and as a table."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

import polars as pl

from stepscope.record.manifest import without_secrets
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
)
from stepscope.report.format import count, duration, share_of
from stepscope.tune.next_trial import UNCHECKED
from stepscope.tune.search import TuneResult
from stepscope.tune.trials import LEAST_GAIN, Configuration, Knob, LossCheck, Measured, Trial, code_of

_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "tried": pl.String,
    "on_top_of": pl.String,
    "step_ns": pl.Float64,
    "times_faster": pl.String,
    "outcome": pl.String,
    "interval": pl.String,
    "loss_difference": pl.String,
}
_BUSY_CORES: Final = 0.5
_NOISY: Final = 0.05
"""Half width of the comparisons' median interval, as a share of the step, above which the machine is noisy."""
_FAILED: Final = {"not applied": "not applied", "out of memory": "out of memory", UNCHECKED: "not checked"}


def outcome_sentence(result: TuneResult) -> str:
    """The result in one sentence: what helps and by how much, or that nothing does."""
    if result.proof is not None and result.proof.measured is not None and result.is_proven:
        return proof_sentence(result.proof.measured)
    if result.proof is not None:
        why = result.proof.reason or _not_shown(result.proof.measured)
        return f"it looked faster in the search, but fresh runs do not show it: {why}"
    if result.best.settings:
        return "it was faster in the search, but fresh runs to prove it are missing"
    if not any(trial.state == "measured" for trial in result.trials):
        return "nothing was measured"
    return "nothing that was tried provably makes the step shorter"


def proof_sentence(measured: Measured) -> str:
    """Format "step 48.2 ms -> 20.1 ms: 2.40 times faster (95 % interval 2.31 to 2.49), losses equal within 1e-4"."""
    if measured.before_ns is None or measured.after_ns is None:
        return "no steps were measured"
    times = f"step {duration(measured.before_ns)} -> {duration(measured.after_ns)}: {faster(measured)}"
    interval = interval_words(measured)
    shown = f" ({share_of(measured.confidence)} interval {interval})" if interval else ""
    return f"{times}{shown}, {loss_words(measured.losses)}"


def faster(measured: Measured) -> str:
    """Format a speedup as "2.40 times faster" or "1.05 times slower"."""
    if not measured.before_ns or not measured.after_ns:
        return ""
    ratio = measured.before_ns / measured.after_ns
    return f"{ratio:.2f} times faster" if ratio >= 1 else f"{1 / ratio:.2f} times slower"


def times_interval(measured: Measured) -> str:
    """The interval of the speedup, such as "2.31 to 2.49"; "" if there is none."""
    low, high = measured.change_low, measured.change_high
    if low is None or high is None or low <= -1:
        return ""
    return f"{1 / (1 + high):.2f} to {1 / (1 + low):.2f}"


def interval_words(measured: Measured) -> str:
    """The interval of the factor that `faster` names, inverted if it says slower."""
    low, high = measured.change_low, measured.change_high
    if low is None or high is None or low <= -1:
        return ""
    is_slower = bool(measured.before_ns and measured.after_ns and measured.after_ns > measured.before_ns)
    return f"{1 + low:.2f} to {1 + high:.2f}" if is_slower else times_interval(measured)


def loss_words(losses: LossCheck) -> str:
    """How the losses compare, such as "losses equal within 1e-4 (largest difference 3.1e-07 of 50)"."""
    if losses.equal is None:
        return "losses not compared: no backward pass was seen"
    if losses.largest is None:
        return losses.sentence
    difference = f"largest difference {power(losses.largest, 1)} in {count(losses.compared)} losses"
    if not losses.equal:
        return f"losses differ by more than {power(losses.allowed)} ({difference})"
    if losses.basis == "runs":
        return f"losses as close as those of two runs of the unchanged program ({difference})"
    if losses.basis == "seed":
        return f"losses closer than another seed's ({difference}, another seed's {power(losses.allowed, 1)})"
    return f"losses equal within {power(losses.allowed)} ({difference})"


def power(share: float, digits: int = 0) -> str:
    """A small share as "1e-4", or with one decimal as "3.1e-7"; "0" for zero."""
    if not share:
        return "0"
    number, _, exponent = f"{share:.{digits}e}".partition("e")
    return f"{number}e{int(exponent)}"


def _not_shown(measured: Measured | None) -> str:
    if measured is None:
        return "nothing was measured"
    if measured.losses.equal is False:
        return loss_words(measured.losses)
    interval = interval_words(measured)
    return f"{faster(measured)}{f', interval {interval}' if interval else ''}"


def trial_table(result: TuneResult) -> pl.DataFrame:
    """One row per trial: what was tried on top of what, and its outcome."""
    rows = [trial_row(result, trial) for trial in result.trials if trial.state != "running"]
    return pl.DataFrame(rows, schema=dict(_SCHEMA), orient="row")


def trial_row(result: TuneResult, trial: Trial) -> tuple[object, ...]:
    reference, configuration = trial.proposal.reference, trial.proposal.configuration
    added = Configuration(tuple(pair for pair in configuration.settings if pair not in reference.settings))
    left = [name for name, _ in reference.settings if configuration.value(name) is None]
    given = {name for name, _ in added.settings}
    replaced = Configuration(tuple(pair for pair in reference.settings if pair[0] in given))
    kept = Configuration(tuple(pair for pair in reference.settings if pair[0] not in given))
    parts = [result.space.shown(added)] if added.settings or not left else []
    parts += [f"instead of {result.space.shown(replaced)}"] if replaced.settings else []
    tried = ", ".join([*([" ".join(parts)] if parts else []), *(f"without {name}" for name in left)])
    on_top = result.space.shown(kept) if kept.settings else ""
    if trial.proposal.purpose == "proof":
        tried, on_top = "the best, in fresh runs" if configuration == result.best else f"fresh runs: {tried}", ""
    measured = trial.measured
    if measured is None:
        return (tried, on_top, None, "", outcome_words(result, trial), "", "")
    ratio = f"{measured.before_ns / measured.after_ns:.2f}" if measured.before_ns and measured.after_ns else ""
    largest = measured.losses.largest
    losses = "" if largest is None else power(largest)
    return (tried, on_top, measured.after_ns, ratio, outcome_words(result, trial), times_interval(measured), losses)


def outcome_words(result: TuneResult, trial: Trial) -> str:
    """A trial's outcome in a few words; `reasons` explains failures."""
    if trial.measured is None:
        return _FAILED.get(trial.reason.partition(":")[0], "failed")
    if not trial.keeps_losses:
        return "losses differ"
    if trial.proposal.purpose == "proof":
        return "proven" if trial.is_shown else "not shown"
    if trial.proposal.purpose == "simplify":
        return "no less without" if trial.gain is not None and trial.gain > -LEAST_GAIN else "needed"
    is_kept = set(trial.proposal.configuration.settings) <= set(result.best.settings)
    if trial.is_shown:
        return "kept" if is_kept else "helps, but not in the best"
    if trial.is_promising:
        return "may help, not shown"
    return "slower" if trial.measured.verdict == "slower" else "no help"


def reasons(result: TuneResult) -> Iterator[str]:
    """Why failed trials failed, one sentence each."""
    for trial in result.trials:
        if trial.state == "failed" or (trial.measured is not None and not trial.keeps_losses):
            why = loss_words(trial.measured.losses) if trial.measured is not None else trial.reason
            yield f"{result.space.shown(trial.proposal.configuration)}: {why}"


def command_line(result: TuneResult, command: Sequence[str]) -> str:
    """The command that runs the best configuration, without secrets; needs a best configuration."""
    apply = result.space.apply_words(result.best)
    variables = [f"{name}={shlex.quote(value)}" for name, value in result.space.variables(result.best).items()]
    words = [*without_secrets(command), *result.space.arguments(result.best)]
    shown = " ".join(word if "***" in word else shlex.quote(word) for word in words)
    if apply:
        shown = f"stepscope run --apply {','.join(apply)} {shown}"
    elif bool(command) and (command[0].endswith(".py") or command[0] == "-m"):
        shown = f"python {shown}"
    return " ".join([*variables, shown])


def remedies(result: TuneResult) -> Iterator[tuple[Knob, str, str, str]]:
    """Yield the best configuration's settings: knob, description, code, and a diff of the user's lines."""
    for name, value in result.best.settings:
        knob = result.space.knob(name)
        code = "" if knob.kind != "apply" else knob.code or code_of(name, value)
        yield knob, knob.shown(value), code, knob.diff


def applied_sentences(result: TuneResult, knob: Knob) -> list[str]:
    """What the proof runs reported about a remedy."""
    measured = None if result.proof is None else result.proof.measured
    if measured is None or knob.kind != "apply":
        return []
    return [text.removeprefix(f"{knob.name}: ") for text in measured.applied if text.startswith(f"{knob.name}: ")]


def noise_sentence(trials: Sequence[Trial]) -> str:
    """How large a change must be to show on this machine, and what to do about it; "" if small ones show."""
    known = [trial.measured for trial in trials if trial.measured is not None]
    widths = [
        (each.change_high - each.change_low) / 2
        for each in known
        if each.change_low is not None and each.change_high is not None
    ]
    if not widths or median(widths) <= _NOISY:
        return ""
    others = max((each.other_cores for each in known if each.other_cores is not None), default=0.0)
    busy = f": other programs kept up to {others:.1f} cores busy" if others > _BUSY_CORES else ""
    stop = "stop them, or give" if busy else "give"
    shows = f"a change below about {median(widths):.0%} does not show" if median(widths) < 1 else "no change shows"
    return (
        f"the machine is noisy{busy}, so that {shows}; {stop} the "
        "search more --steps or a larger --budget, or use --quiet-machine"
    )


def how(result: TuneResult) -> Iterator[str]:
    """How it was searched and measured, one sentence each."""
    ended = [trial for trial in result.trials if trial.state != "running"]
    machines = {trial.machine for trial in ended if trial.machine}
    where = f" on {len(machines)} machines" if len(machines) > 1 else ""
    took = duration(result.seconds * 1e9)
    yield f"{len(ended)} comparisons were measured{where}, each with both sides in turn; this process took {took}."
    if result.proof is not None and result.proof.measured is not None:
        proof = result.proof.measured
        yield (
            f"The proof rests on {proof.rounds} fresh runs of each side, {count(proof.steps)} steps of the best that "
            "count; measurements from the search are not part of it."
        )
        yield from (_in_names(caveat) for caveat in proof.caveats)
        if proof.other_cores is not None and proof.other_cores > _BUSY_CORES:
            yield (
                f"Other processes kept up to {proof.other_cores:.1f} cores busy meanwhile; without them the interval "
                "would be narrower."
            )
    noise = noise_sentence(result.trials)
    if noise and not result.is_proven:
        yield f"{noise[0].upper()}{noise[1:]}."
    if result.stop == "budget":
        yield "The budget ended before everything was tried: the same command with --study continues."
    if result.stop == "interrupted":
        yield "The search was interrupted: the same command with --study continues from there."
    yield from (f"{sentence}." for sentence in result.space.said)


def _in_names(caveat: str) -> str:
    """Replace "before" and "after" in a caveat by the program and the best configuration."""
    names = {"before": "as it is", "after": "with the best"}
    return re.sub(r"\b(before|after)\b", lambda word: names[word[1]], caveat)


def gain_words(trial: Trial) -> str:
    """A trial's gain for a progress line: "54.0 ms -> 18.2 ms, 2.97 times faster (2.80 to 3.11)"."""
    measured = trial.measured
    if measured is None or measured.before_ns is None or measured.after_ns is None:
        return trial.reason
    interval = interval_words(measured)
    shown = f" ({interval})" if interval else ""
    reason = f"; {loss_words(measured.losses)}" if measured.losses.equal is False else ""
    saved = f"{duration(measured.before_ns)} -> {duration(measured.after_ns)}, {faster(measured)}{shown}"
    return f"{saved}{reason}"


def tune_document(result: TuneResult, command: Sequence[str]) -> Document:
    """Report the result, how to use it, the remedies as code, what was tried, and how it was measured."""
    sentence = outcome_sentence(result)
    best = tuple(_best(result, command)) if result.best.settings else ()
    why = tuple(reasons(result))
    blocks = (
        Text(f"{sentence[0].upper()}{sentence[1:]}.", "strong"),
        *best,
        Section("What was tried", (Table(trial_table(result)),)),
        *section_if("Why some trials failed", *([Items(why)] if why else [])),
        Section("How it was measured", (Items(tuple(how(result))),)),
    )
    return Document("tune", blocks, "--json FILE", level=3)


def _best(result: TuneResult, command: Sequence[str]) -> Iterator[Block]:
    label = "Best" if result.is_proven else "Best so far, not proven"
    yield Section("", (Facts(((label, Verbatim(result.space.shown(result.best))),)),), is_quiet=True)
    use = Code(command_line(result, command), "sh")
    yield Section("To use it" if result.is_proven else "To try it", (use,))
    for knob, shown, as_code, diff in remedies(result):
        said = Items(tuple(applied_sentences(result, knob)))
        code = Code(diff or as_code, "diff" if diff else "python")
        yield Section(f"{shown}: {knob.why}", (*([said] if said.texts else []), *([code] if code.text else [])))


def tune_json(result: TuneResult, command: Sequence[str]) -> dict[str, Any]:
    """The best configuration, its proof and every trial, as JSON values."""
    return stamped(
        command=without_secrets(command),
        outcome=outcome_sentence(result),
        is_proven=result.is_proven,
        best=_best_json(result, command) if result.best.settings else None,
        proof=None if result.proof is None else _trial(result, result.proof),
        stop=result.stop,
        seconds=result.seconds,
        space=result.space,
        trials=[_trial(result, trial) for trial in result.trials],
        how=list(how(result)),
    )


def _best_json(result: TuneResult, command: Sequence[str]) -> dict[str, Any]:
    best, space = result.best, result.space
    return {
        "settings": dict(best.settings),
        "apply": space.apply_words(best),
        "arguments": space.arguments(best),
        "variables": space.variables(best),
        "command_line": command_line(result, command),
        "remedies": [
            {"setting": shown, "source": knob.source, "why": knob.why, "code": code, "diff": diff}
            for knob, shown, code, diff in remedies(result)
        ],
    }


def _trial(result: TuneResult, trial: Trial) -> dict[str, Any]:
    measured = trial.measured
    return {
        **fields(trial, "number", "state", "reason", "machine", "folder"),
        "purpose": trial.proposal.purpose,
        "configuration": dict(trial.proposal.configuration.settings),
        "reference": dict(trial.proposal.reference.settings),
        "outcome": "" if trial.state == "running" else outcome_words(result, trial),
        "measured": measured,
    }
