"""The sentences of comparisons: the verdict, what makes the difference, and what would show more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import polars as pl

from stepscope.analysis.host import CAUSES
from stepscope.compare.comparison import Comparison, by_name
from stepscope.compare.matching import ONLY_AFTER, ONLY_BEFORE, SAME
from stepscope.compare.statistics import POWER, SampleComparison
from stepscope.compare.trace_record import SideSummary
from stepscope.report.energy import ALL_WORDS, energy
from stepscope.report.format import change_words, count, duration, interval_words, share, share_of
from stepscope.report.words import STEP_SOURCES


def verdict_sentence(samples: SampleComparison) -> str:
    """Format "Slower: a step takes 11.0 ms instead of 10.0 ms, 10.0 % more (95 % interval: 9.0 % to 11.1 % more)."."""
    word = samples.verdict.capitalize()
    if samples.before_ns is None or samples.after_ns is None:
        missing = [name for name, ns in (("before", samples.before_ns), ("after", samples.after_ns)) if ns is None]
        return f"{word}: there are no steps {' and '.join(missing)}."
    before, after = duration(samples.before_ns), duration(samples.after_ns)
    times = f"a step takes {after} in both" if before == after else f"a step takes {after} instead of {before}"
    if samples.change is None:
        return f"{word}: {times}."
    if samples.verdict == "contradictory":
        change = change_words(samples.change)
        return f"{word}: timed without the profiler, {times}, {change}; recorded, the opposite holds."
    if samples.change_low is None or samples.change_high is None:
        return f"{word}: {times}; how much of the difference is chance is unknown."
    if samples.verdict == "too few steps":
        return f"{word}: {times}, but the steps vary so much that even one twice as long might not have been shown."
    interval = interval_words(samples.change_low, samples.change_high)
    return f"{word}: {times}, {change_words(samples.change)} ({share_of(samples.confidence)} interval: {interval})."


def detectable_sentences(samples: SampleComparison) -> list[str]:
    """Say which difference such data could have shown; empty if unknown or if a larger one was shown."""
    least = samples.smallest_detectable
    if least is None:
        return []
    if least >= 1:
        return []
    often = f"{round(POWER * 5)} times out of 5"
    return [f"The smallest difference such data show {often} is {share(least)} of a step."]


_TELLING: Final = 0.25
"""Share of the whole difference that a further cause must explain to be mentioned."""
_TELLING_PLACE: Final = 0.1
_NOTHING: Final = 0.01
"""Share of a step below which no difference is worth a sentence."""
_WORK: Final = {
    "computing": "time in which the device computed",
    "communication": "time in which the device only communicated",
    "copies": "time in which the device only copied",
    "other work": "time of other work of the device",
}

Row = dict[str, Any]


def where_sentences(comparison: Comparison) -> list[str]:
    """Which causes, lines of the user's code and operators make the difference, and how energy differs."""
    return [*_where(comparison), *energy_sentences(comparison)]


def energy_sentences(comparison: Comparison) -> list[str]:
    """How the measured energy differs, such as "Devices use 1.60 J a step instead of 2.00 J, 20.0 % less (...)."."""
    sentences = []
    for each in comparison.energies:
        text = f"{ALL_WORDS[each.kind].capitalize()} use {energy((each.after_j, each.after_j))} a step instead of "
        text += f"{energy((each.before_j, each.before_j))}, {change_words(each.change)}"
        if each.change_low is None or each.change_high is None:
            sentences.append(f"{text}; how much of that is chance is unknown.")
        else:
            interval = interval_words(each.change_low, each.change_high)
            sentences.append(f"{text} ({share_of(each.confidence)} interval: {interval}).")
    return sentences


def _where(comparison: Comparison) -> list[str]:
    whole = comparison.difference_ns
    causes = comparison.causes.rows(named=True)
    if comparison.samples.verdict == "contradictory":
        before, after = duration(comparison.before.step_ns), duration(comparison.after.step_ns)
        text = f"A recorded step takes {after} instead of {before}."
        return [f"{text} The machine was probably busier in one of the runs."]
    largest = max((abs(row["share"]) for row in causes), default=0.0)
    if largest < _NOTHING and abs(whole) < _NOTHING * max(comparison.before.step_ns, 1.0):
        return ["No cause of busy or idle time differs by 1 % of a step or more."]
    warning = ["The recorded steps differ the other way, which may also be chance."] if _opposite(comparison) else []
    shown = (*_lines(comparison, whole), *_operators(comparison, whole), *_kernel_changes(comparison))
    return [*warning, _causes(comparison, whole, causes), *shown]


_MOST_CHANGES: Final = 3


def _kernel_changes(comparison: Comparison) -> Iterator[str]:
    """Which kernels took the place of others, where that changes the step noticeably."""
    least = _NOTHING * max(comparison.before.step_ns, 1.0)
    table = comparison.kernel_changes.filter(pl.col("difference_ns").abs() >= least)
    for row in table.sort(pl.col("difference_ns").abs(), descending=True).head(_MOST_CHANGES).iter_rows(named=True):
        times = f"{duration(row['after_ns'])} instead of {duration(row['before_ns'])} a step"
        calls = f"{count(row['before_calls'])} kernels -> {count(row['after_calls'])}"
        how = f": {row['how'].replace(' -> ', ' became ')}" if row["how"] else ""
        if row["change"] in ("fused", "unfused"):
            what = "were fused" if row["change"] == "fused" else "are no longer fused"
            yield f"{row['operator']} {what} ({calls}, {times})."
        else:
            yield f"{row['operator']} runs on {row['change'].replace('other', 'another')}{how} ({calls}, {times})."


def advice(comparison: Comparison) -> list[str]:
    """What to do if the steps leave open whether a relevant difference exists; one sentence or none."""
    samples = comparison.samples
    if samples.before_ns is None or samples.after_ns is None:
        return ["To be judged, steps must be marked with stepscope.step() or torch.profiler's step()."]
    least = 1.0 if samples.smallest_detectable is None else samples.smallest_detectable
    is_open = not samples.is_shown and samples.change and least > _NOTHING
    if not is_open and samples.verdict != "contradictory":
        return []
    return ["To be surer, let stepscope bench run both programs in turn, or record more steps."]


def _opposite(comparison: Comparison) -> bool:
    recorded = comparison.difference_ns / max(comparison.before.step_ns, 1.0)
    other_way = (comparison.samples.change or 0.0) * recorded < 0
    return comparison.is_unprofiled and other_way and abs(recorded) >= _NOTHING


def side_sentence(side: SideSummary) -> str:
    """Describe a side, such as "runs/a: 4 of 6 steps (annotated), Tesla V100"."""
    of_all = f" of {count(side.step_count + len(side.left_out))}" if side.left_out else ""
    steps = "no steps found" if side.step_source == "none" else f"{count(side.step_count)}{of_all} {_plural(side)}"
    source = "" if side.step_source == "none" else f" ({STEP_SOURCES[side.step_source]})"
    of = f" of {count(side.runs)} runs" if side.runs > 1 else ""
    of += f" of {count(side.ranks)} ranks together" if side.ranks > 1 else ""
    devices = ", ".join(side.devices) or ("no device recorded" if side.basis == "host" else "")
    name = "" if side.name in ("before", "after") else f"{side.name}: "
    return f"{name}{steps}{of}{source}" + (f", {devices}" if devices else "")


def cause_phrase(kind: str, name: str) -> str:
    """Describe a cause's time, such as "idle time in which the host was loading data (input)"."""
    if kind == "busy":
        return _WORK.get(name, f"busy time ({name})")
    idle = "idle time" if kind == "idle" else "time"
    if name == "compute":
        return f"{idle} in which the host computed"
    if name == "unknown":
        return f"{idle} that the trace does not explain"
    return f"{idle} in which {CAUSES[name]} ({name})" if name in CAUSES else f"{idle} with the cause {name}"


def place_of_line(row: Row) -> str:
    """The place of a row of the table of lines, as "train.py:88 main", with the new line if it moved."""
    moved = f" (line {row['after_line']} after)" if row["after_line"] is not None else ""
    return (f"{row['file']}:{row['line']} {row['function'] or ''}".rstrip()) + moved


def _plural(side: SideSummary) -> str:
    return "step" if side.step_count == 1 and not side.left_out else "steps"


def _word(ns: float) -> str:
    return "more" if ns > 0 else "less"


def _causes(comparison: Comparison, whole: float, causes: list[Row]) -> str:
    along = [row for row in causes if row["difference_ns"] * whole > 0]
    against = [row for row in causes if row["difference_ns"] * whole < 0 or not whole]
    along = along[:1] + [row for row in along[1:2] if abs(row["difference_ns"]) >= _TELLING * abs(whole)]
    against = [row for row in against[:1] if abs(row["difference_ns"]) >= _TELLING * abs(whole)]
    chance = not comparison.samples.is_shown
    step = "a recorded step" if comparison.is_unprofiled else "a step"
    if along and not against and sum(abs(row["difference_ns"]) for row in along) <= abs(whole):
        parts = [f"{duration(abs(row['difference_ns']))} are {_phrase(row)}" for row in along]
        text = f"Of {duration(abs(whole))} {_word(whole)} {step}, {' and '.join(parts)}"
        return f"{text}; all of it may be chance." if chance else f"{text}."
    how = f"{duration(abs(whole))} {_word(whole)}" if whole else "as long"
    text = f"{step.capitalize()} takes {how}" + (", which may be chance: " if chance and whole else ": ")
    parts = [f"{duration(abs(row['difference_ns']))} {_word(row['difference_ns'])} {_phrase(row)}" for row in along]
    text += " and ".join(parts)
    if against:
        row = against[0]
        more = f"{duration(abs(row['difference_ns']))} {_word(row['difference_ns'])} {_phrase(row)}"
        text += f", but {more}" if parts else more
    return f"{text}."


def _phrase(row: Row) -> str:
    return cause_phrase(row["kind"], row["name"])


def _lines(comparison: Comparison, whole: float) -> Iterator[str]:
    least = max(_TELLING_PLACE * abs(whole), _NOTHING * comparison.before.step_ns)
    told = comparison.lines.filter(pl.col("file").is_not_null() & (pl.col("difference_ns").abs() >= least))
    rows = [row for row in told.rows(named=True) if row["difference_ns"] * whole > 0 or not whole]
    if not rows:
        return
    row = rows[0]
    place, before, after = place_of_line(row), duration(row["before_ns"]), duration(row["after_ns"])
    if row["match"] not in (ONLY_BEFORE, ONLY_AFTER):
        yield f"The line behind most of it is {place}: {after} a step instead of {before}."
        return
    side, other = ("before", ONLY_AFTER) if row["match"] == ONLY_BEFORE else ("after", ONLY_BEFORE)
    text = f"{place}, {before if side == 'before' else after} a step, is there only {side}"
    replaced = comparison.lines.filter((pl.col("match") == other) & pl.col("file").is_not_null()).head(1)
    for new in replaced.rows(named=True):
        ns = duration(new["after_ns"] if side == "before" else new["before_ns"])
        text += f"; {place_of_line(new)}, {ns}, only {other.removeprefix('only ')}"
    yield f"{text}."


def _operators(comparison: Comparison, whole: float) -> Iterator[str]:
    """The operator whose computing time differs most."""
    work = comparison.causes.filter((pl.col("kind") == "busy") | (pl.col("name") == "compute"))
    computed = float(work["difference_ns"].sum())
    if computed * whole <= 0 or abs(computed) < _TELLING * abs(whole):
        return
    for row in by_name(comparison.operators).head(1).rows(named=True):
        if row["difference_ns"] * whole <= 0 or abs(row["difference_ns"]) < _TELLING_PLACE * abs(computed):
            return
        name = row["name"]
        if row["match"] in (ONLY_BEFORE, ONLY_AFTER):
            ns = duration(row["before_ns"] or row["after_ns"])
            yield f"Of the operators {name} changed most: it is there {row['match']}, {ns} a step."
            return
        calls = ""
        if row["before_calls"] != row["after_calls"]:
            noun = "call" if row["after_calls"] == 1 else "calls"
            calls = f", in {count(row['after_calls'])} {noun} instead of {count(row['before_calls'])}"
        how = "" if row["match"] == SAME else f" ({row['match']})"
        yield (
            f"Of the operators {name} changed most: {duration(row['after_ns'])} a step instead of "
            f"{duration(row['before_ns'])}{calls}{how}."
        )
