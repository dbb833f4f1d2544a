"""Compare one or more programs with a baseline, as a document with drawings and as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import polars as pl

from stepscope.compare.comparison import Comparison, by_name
from stepscope.compare.job import JobComparison
from stepscope.compare.matching import SAME
from stepscope.compare.statistics import SampleComparison
from stepscope.compare.trace_record import EnergyComparison, SideSummary
from stepscope.report.comparison_words import (
    advice,
    detectable_sentences,
    place_of_line,
    side_sentence,
    verdict_sentence,
    where_sentences,
)
from stepscope.report.document import (
    Block,
    Document,
    Facts,
    Group,
    Items,
    Section,
    Table,
    Text,
    fields,
    section_if,
    stamped,
    texts,
)
from stepscope.report.energy import energy
from stepscope.report.format import change_words, count, duration, file_name
from stepscope.report.ranks import missing_sentence
from stepscope.report.redaction import Redactor

TABLES: Final = ("causes", "lines", "operators", "kernels", "kernel_changes", "modules", "communication", "memory",
                 "settings")  # fmt: skip
"""Tables of a comparison, named as its attributes and JSON keys."""
_STARRED: Final = "* a function: the trace does not show which of its lines."
_SAMPLE_SCHEMA: Final[dict[str, type[pl.DataType]]] = {
    "run": pl.String,
    "step_ns": pl.Float64,
    "low_ns": pl.Float64,
    "high_ns": pl.Float64,
    "steps": pl.Int64,
    "runs": pl.Int64,
}


def comparison_document(comparisons: Sequence[Comparison], *, only_why: bool = False) -> Document:
    """Report every comparison with the same baseline; several comparisons start with an overview table.

    Args:
        only_why: leave out the verdict, which the caller prints elsewhere.

    Raises:
        ValueError: there is no comparison.
    """
    if not comparisons:
        raise ValueError("a document needs at least one comparison")
    groups = [_group(f"c{number}", comparison, only_why) for number, comparison in enumerate(comparisons)]
    names = [file_name(side.name) for side in (comparisons[0].before, comparisons[0].after)]
    if len(comparisons) == 1 or only_why:
        return Document(f"{names[0]} and {names[1]}", tuple(groups), "--json -", 4)
    title = f"{len(comparisons)} runs beside {names[0]}"
    head = Section(title, (Table(overview(comparisons)),), style="summary", is_quiet=True)
    return Document(f"{names[0]} and {len(comparisons)} others", (head, *groups), "--json -", 4)


def _group(key: str, comparison: Comparison, only_why: bool) -> Group:
    before, after = comparison.before, comparison.after
    why = "Where the difference comes from: " if only_why else ""
    blocks = (
        Section(
            f"{file_name(before.name)} → {file_name(after.name)}",
            tuple(_summary(comparison, only_why)),
            is_quiet=True,
        ),
        *_job(comparison.job),
        Section("What the difference of a step is made of", (Table(cause_table(comparison)),), folded=True),
        *_difference_sections(comparison),
    )
    return Group(f"{why}{after.name} against {before.name}", blocks, key, "both", is_quiet=True)


def _summary(comparison: Comparison, only_why: bool) -> Iterator[Block]:
    samples, sides = comparison.samples, (comparison.before, comparison.after)
    yield Facts(tuple(zip(("Before", "After"), map(side_sentence, sides), strict=True)))
    yield from () if only_why else (Text(verdict_sentence(samples), f"headline {samples.verdict.split(' ')[0]}"),)
    yield from texts(*comparison.disturbed, style="strong")
    yield from texts(" ".join(_of_job(comparison)), style="strong")
    yield from texts(" ".join([*where_sentences(comparison), *([] if only_why else advice(comparison))]), style="where")
    if not only_why:
        yield Table(sample_table(samples, (sides[0].name, sides[1].name), comparison.energies), only="markdown")
    kept = comparison.notes[len(comparison.disturbed) :]
    notes = (*([] if only_why else [*detectable_sentences(samples), *samples.caveats]), *kept)
    yield from section_if("To keep in mind", *([Items(notes, "keep muted")] if notes else []), folded=True)


def _job(job: JobComparison | None) -> Iterator[Section]:
    if job is None:
        return
    path = job.path.filter(pl.max_horizontal("before_ns", "after_ns") >= _SMALLEST_NS)
    title = "What a step of the job waits for: the critical path across the ranks, which ends with the last one's step"
    yield Section(title, (Table(path, "causes"),))
    waits = pl.DataFrame(
        {
            "in collectives": ["wait of a rank for later ones", "transfer after that"],
            **{
                f"{side}_ns": [float(steps.wait_ns), float(steps.transfer_ns)]
                for side, steps in (("before", job.before), ("after", job.after))
            },
        }
    ).with_columns(difference_ns=pl.col("after_ns") - pl.col("before_ns"))
    ranks = Table(job.ranks.with_columns(pl.col("verdict").fill_null("")), "ranks")
    yield Section("What a step takes on each rank besides waiting, and in collectives", (ranks, Table(waits)))


_SMALLEST_NS: Final = 1_000
"""Parts of the critical path that are at least this long are shown."""


def _of_job(comparison: Comparison) -> Iterator[str]:
    return job_sentences(comparison.job) if comparison.job is not None else iter(())


def job_sentences(job: JobComparison) -> Iterator[str]:
    """What the critical path across the ranks has more or less of, and which ranks got slower or faster."""
    cause, now, then, difference = job.path.row(0)
    if abs(difference) >= _SMALLEST_NS:
        side = job.after if difference > 0 else job.before
        [rank, *_] = side.parts.filter(pl.col("cause") == cause)["rank"]
        word = "after" if difference > 0 else "before"
        yield (
            f"Across the ranks {cause} changed most: {duration(then)} of the critical path instead of {duration(now)}, "
            f"{word} most of it on {rank}."
        )
    for verdict in ("slower", "faster"):
        found = job.ranks.filter(pl.col("verdict") == verdict)
        named = [
            f"{name} ({'+' if ns > 0 else '-'}{duration(abs(ns))})"
            for name, ns in found.head(_NAMED).select("rank", "difference_ns").iter_rows()
        ]
        more = f" and {count(found.height - _NAMED)} more" if found.height > _NAMED else ""
        if named:
            yield f"Besides waiting, {verdict} beyond chance: {', '.join(named)}{more}."
    for word, steps in (("before", job.before), ("after", job.after)):
        if steps.missing:
            yield missing_sentence(steps.missing, f" {word}")


_NAMED: Final = 4


def _difference_sections(comparison: Comparison) -> Iterator[Section]:
    for title, table in difference_tables(comparison):
        is_starred = table.things == "lines" and comparison.lines["exact_line"].eq(False).any()
        blocks: tuple[Block, ...] = (table, *texts(_STARRED if is_starred else "", style="muted"))
        yield Section(title, blocks, folded=True)
    if comparison.settings.height:
        table = Table(settings_table(comparison))
        yield Section("Settings that differ", (table,), folded=True)


def overview(comparisons: Sequence[Comparison]) -> pl.DataFrame:
    """One row per program, the baseline first: run, step_ns, change, verdict, and energy measured for all of them."""
    first = comparisons[0]
    rows = [(first.before.name, first.samples.before_ns, "", "the baseline")]
    for each in comparisons:
        change = "" if each.samples.change is None else change_words(each.samples.change)
        rows.append((each.after.name, each.samples.after_ns, change, each.samples.verdict))
    schema = {"run": pl.String, "step_ns": pl.Float64, "change": pl.String, "verdict": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(_energies(comparisons))


def _energies(comparisons: Sequence[Comparison]) -> Iterator[pl.Series]:
    """Energy per step, one column for each kind of counter that every program has, such as gpu_energy."""
    for kind in ("gpu", "cpu", "dram"):
        found = [[each for each in comparison.energies if each.kind == kind] for comparison in comparisons]
        if all(found):
            joules = [found[0][0].before_j, *(each.after_j for (each,) in found)]
            yield pl.Series(f"{kind}_energy", [energy((each, each)) for each in joules])


def sample_table(
    samples: SampleComparison, names: tuple[str, str] = ("before", "after"), energies: Sequence[EnergyComparison] = ()
) -> pl.DataFrame:
    """One row per side: run, step_ns (mean), low_ns and high_ns (its interval), steps, runs, and measured energy."""
    before = (samples.before_ns, samples.before_low_ns, samples.before_high_ns, samples.before_steps)
    after = (samples.after_ns, samples.after_low_ns, samples.after_high_ns, samples.after_steps)
    rows = [(names[0], *before, samples.before_runs), (names[1], *after, samples.after_runs)]
    table = pl.DataFrame(rows, schema=dict(_SAMPLE_SCHEMA), orient="row")
    return table.with_columns(
        pl.Series(f"{each.kind}_energy", [energy((each.before_j,) * 2), energy((each.after_j,) * 2)])
        for each in energies
    )


_TIMES: Final = ("before_ns", "after_ns", "difference_ns")
_LONGEST_TEXT: Final = 120


def cause_table(comparison: Comparison) -> pl.DataFrame:
    """Every cause and, last, the whole step: columns cause, before_ns, after_ns, difference_ns, share."""
    rows = comparison.causes.select(pl.format("{}: {}", "kind", "name").alias("cause"), *_TIMES, "share")
    before, after = comparison.before.step_ns, comparison.after.step_ns
    whole = ("the step", before, after, comparison.difference_ns, comparison.difference_ns / max(before, 1.0))
    return pl.concat([rows, pl.DataFrame([whole], schema=rows.schema, orient="row")])


def difference_tables(comparison: Comparison) -> Iterator[tuple[str, Table]]:
    """Yield title and table of what differs, the largest difference first; empty tables are left out."""
    tables = (
        ("Lines of your code", _line_table(comparison), "lines"),
        ("Operators", _named(comparison.operators), "operators"),
        ("Kernels", _named(comparison.kernels), "kernels"),
        ("Kernels in the place of others", _changes(comparison), "changes of kernels"),
        ("Modules", _modules(comparison), "modules"),
        ("Communication", _communication(comparison), "kinds of communication"),
    )
    for title, frame, things in tables:
        differing = frame.filter(pl.col("difference_ns") != 0)
        if differing.height:
            yield title, Table(differing, things)
    memory = _memory(comparison)
    if memory.filter(pl.col("difference_bytes") != 0).height:
        yield "Memory at the peak", Table(memory)


def settings_table(comparison: Comparison) -> pl.DataFrame:
    """The settings that differ: columns setting, before, after; "-" if a side does not have it."""
    return comparison.settings.select(
        pl.col("name").alias("setting"), pl.col("before").fill_null("-"), pl.col("after").fill_null("-")
    )


def _named(table: pl.DataFrame) -> pl.DataFrame:
    shown = by_name(table)
    where = pl.concat_str(
        pl.col("module").fill_null(""), pl.col("input_shapes").fill_null("").str.slice(0, _LONGEST_TEXT), separator=" "
    ).str.strip_chars()
    columns = [pl.col("name"), *map(pl.col, _TIMES), _calls(shown), _match(), where.alias("most of it in")]
    return _without_empty(shown.select(columns))


def _changes(comparison: Comparison) -> pl.DataFrame:
    table = comparison.kernel_changes
    kernels = pl.concat_str(
        pl.col("before_kernel").str.slice(0, _LONGEST_TEXT // 2), pl.lit(" -> "),
        pl.col("after_kernel").str.slice(0, _LONGEST_TEXT // 2),
    ).alias("costliest kernels")  # fmt: skip
    shown = table.select(
        pl.format("{}: {}", "change", "operator").alias("what"), *_TIMES, _calls(table), "how", kernels
    )
    return _without_empty(shown)


def _line_table(comparison: Comparison) -> pl.DataFrame:
    table = comparison.lines
    names = [
        "(no line of yours)" if row["file"] is None else place_of_line(row) + ("" if row["exact_line"] else "*")
        for row in table.rows(named=True)
    ]
    return _without_empty(table.select(pl.Series("line", names, pl.String), *_TIMES, _match()))


def _modules(comparison: Comparison) -> pl.DataFrame:
    table = comparison.modules
    if table["module"].is_not_null().sum() == 0:
        table = table.clear()
    name = pl.col("module").fill_null("(outside of modules)")
    return _without_empty(table.select(name, *_TIMES, _match()))


def _communication(comparison: Comparison) -> pl.DataFrame:
    table = comparison.communication
    return _without_empty(table.select("kind", *_TIMES, _calls(table), "ranks", "bytes", "after_bytes", _match()))


def _memory(comparison: Comparison) -> pl.DataFrame:
    table = comparison.memory
    columns = ["category", "before_bytes", "after_bytes", "difference_bytes"]
    if table.is_empty():
        return table.select(columns)
    sums = [pl.col(name).sum() for name in columns[1:]]
    table = table.with_columns(pl.col("category").replace({"before": "from before the recording"}))
    return pl.concat([table.select(columns), table.select(pl.lit("all").alias("category"), *sums)])


def _calls(table: pl.DataFrame) -> pl.Series:
    """Calls per step, written "64 -> 1" if they differ."""
    rows = table.select("before_calls", "after_calls").iter_rows()
    texts = [count(before) if before == after else f"{count(before)} -> {count(after)}" for before, after in rows]
    return pl.Series("calls", texts, pl.String)


def _match() -> pl.Expr:
    return pl.when(pl.col("match") != SAME).then(pl.col("match")).otherwise(pl.lit("")).alias("matched as")


def _without_empty(table: pl.DataFrame) -> pl.DataFrame:
    empty = [
        name
        for name in table.columns[4:]
        if table[name].null_count() == table.height or (table[name].dtype == pl.String and (table[name] == "").all())
    ]
    return table.drop(empty)


def comparison_json(comparisons: Sequence[Comparison], *, top: int = 0) -> dict[str, Any]:
    """The comparisons as JSON values, with `top` rows of each table, 0 for all. Causes and settings are never cut."""
    return stamped(comparisons=[_comparison_json(comparison, top) for comparison in comparisons])


def _comparison_json(comparison: Comparison, top: int) -> dict[str, Any]:
    report = {
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "verdict": comparison.samples.verdict,
        "sentences": [
            verdict_sentence(comparison.samples),
            *_of_job(comparison),
            *where_sentences(comparison),
            *advice(comparison),
        ],
        "samples": {**fields(comparison.samples), "is_unprofiled": comparison.is_unprofiled},
        **fields(comparison, "basis", "difference_ns", "notes", "energies", "job"),
    }
    for name in TABLES:
        table: pl.DataFrame = getattr(comparison, name)
        report[name] = table if not top or name in ("causes", "settings") else table.head(top)
        report[f"{name}_count"] = table.height
    return report


def _side(side: SideSummary) -> dict[str, Any]:
    names = ("name", "paths", "ranks", "runs", "basis", "devices", "step_source", "step_count", "total_ns", "step_ns")
    return fields(side, *names, "left_out", "warnings")


def redacted_comparison(
    comparison: Comparison, redactor_of: Callable[[Sequence[str], Sequence[str]], Redactor] = Redactor
) -> Comparison:
    """Remove paths, host, user and process names from the comparison.

    Args:
        redactor_of: makes a `Redactor` that also knows these names and paths.

    The traces of both sides are left as they are: apply the same `Redactor` to whatever is drawn from them.
    """
    hosts = [side.trace.metadata.host for side in (comparison.before, comparison.after)]
    redactor = redactor_of([*filter(None, hosts)], list(_paths(comparison)))
    tables: dict[str, Any] = {name: redactor.table(getattr(comparison, name)) for name in TABLES}
    tables["settings"] = tables["settings"].filter(pl.col("name") != "machine")
    sides = [_redact_side(side, redactor) for side in (comparison.before, comparison.after)]
    notes = tuple(map(redactor.text, comparison.notes))
    job = redactor.redact(comparison.job)
    return replace(comparison, before=sides[0], after=sides[1], notes=notes, job=job, **tables)


def _redact_side(side: SideSummary, redactor: Redactor) -> SideSummary:
    return replace(side, name=redactor.text(side.name), paths=tuple(map(redactor.path, side.paths)))


def _paths(comparison: Comparison) -> Iterator[str]:
    for side in (comparison.before, comparison.after):
        yield from (side.name, *side.paths)
    for column in ("file", "after_file"):
        yield from comparison.lines.select(pl.col(column).drop_nulls().unique()).to_series()
