"""A comparison for the terminal: the verdict, where the difference comes from, the tables, the settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import Any, Final

import msgspec
import polars as pl

from stepscope import __version__
from stepscope.compare.comparison import Comparison, SideSummary
from stepscope.report.comparison import (
    advice,
    cause_table,
    change_words,
    detectable_sentences,
    sample_table,
    settings_table,
    shown_tables,
    side_sentence,
    verdict_sentence,
    where_sentences,
)
from stepscope.report.energy import energy
from stepscope.report.format import cell, printable, printable_json
from stepscope.report.json import Redactor
from stepscope.report.markdown import escape
from stepscope.report.tables import heading, showing, table_lines


def comparison_text(comparisons: Sequence[Comparison], *, width: int, top: int, only_why: bool = False) -> str:
    """Every comparison with the same baseline, one after the other; of several a table first.

    Args:
        top: rows of each table, 0 for all.
        only_why: leave out the verdict, which stands elsewhere: only what makes the difference.
    """
    parts = []
    if len(comparisons) > 1 and not only_why:
        parts.append("\n".join(table_lines(overview(comparisons), width=width)) + "\n")
    parts += ["\n".join(_lines(comparison, width, top, only_why)).rstrip("\n") + "\n" for comparison in comparisons]
    return "\n".join(parts)


def overview(comparisons: Sequence[Comparison]) -> pl.DataFrame:
    """One row a program, the baseline first: run, step_ns, change, verdict; what energy counters measured of all."""
    first = comparisons[0]
    rows = [(printable(first.before.name), first.samples.before_ns, "", "the baseline")]
    for each in comparisons:
        change = "" if each.samples.change is None else change_words(each.samples.change)
        rows.append((printable(each.after.name), each.samples.after_ns, change, each.samples.verdict))
    schema = {"run": pl.String, "step_ns": pl.Float64, "change": pl.String, "verdict": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(_energies(comparisons))


def _energies(comparisons: Sequence[Comparison]) -> Iterator[pl.Series]:
    """A column for each kind of counter that every program has, such as gpu_energy: of a step."""
    for kind in ("gpu", "cpu", "dram"):
        found = [[each for each in comparison.energies if each.kind == kind] for comparison in comparisons]
        if all(found):
            joules = [found[0][0].before_j, *(each.after_j for (each,) in found)]
            yield pl.Series(f"{kind}_energy", [energy((each, each)) for each in joules])


def _lines(comparison: Comparison, width: int, top: int, only_why: bool) -> Iterator[str]:
    samples = comparison.samples
    yield from _wrapped([f"Before  {side_sentence(comparison.before)}"], width, "        ")
    yield from _wrapped([f"After   {side_sentence(comparison.after)}"], width, "        ")
    yield ""
    if not only_why:
        yield from _wrapped([verdict_sentence(samples)], width)
    yield from _wrapped([" ".join([*where_sentences(comparison), *([] if only_why else advice(comparison))])], width)
    yield ""
    keep_in_mind = [*([] if only_why else [*detectable_sentences(samples), *samples.caveats]), *comparison.notes]
    yield from _wrapped([f"- {printable(each)}" for each in keep_in_mind], width, "  ")
    if keep_in_mind:
        yield ""
    yield from _table("What the difference of a step is made of", cause_table(comparison), width)
    for shown in shown_tables(comparison, top):
        yield from _table(shown.title, shown.frame, width, showing(shown.frame.height, shown.total, shown.things))
    if comparison.lines["exact_line"].eq(False).any():
        yield from _wrapped(["* a function: the trace tells which, not which of its lines."], width)
        yield ""
    if comparison.settings.height:
        yield from _table("Settings that differ", settings_table(comparison), width)


def _table(title: str, frame: pl.DataFrame, width: int, cut: str = "") -> Iterator[str]:
    yield title
    rows = table_lines(frame, width=width - 2)
    yield from (f"  {line.replace('--format csv', '--json -') if line[:1] == '(' else line}" for line in rows)
    if cut:
        yield f"  {cut}"
    yield ""


def _wrapped(texts: Iterable[str], width: int, indent: str = "") -> Iterator[str]:
    for text in texts:
        yield from wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


_LONGEST_CELL = 100


def comparison_markdown(comparisons: Sequence[Comparison], *, top: int, only_why: bool = False) -> str:
    """Every comparison with the same baseline, one below the other.

    Args:
        top: rows of each table, 0 for all.
        only_why: leave out the verdict, which stands elsewhere: only what makes the difference.
    """
    parts = []
    if len(comparisons) > 1 and not only_why:
        parts.append("\n".join([*_markdown_table(overview(comparisons)), ""]))
    for comparison in comparisons:
        parts.append("\n".join(_comparison(comparison, top, only_why)))
    return "\n".join(parts).rstrip("\n") + "\n"


def _comparison(comparison: Comparison, top: int, only_why: bool) -> Iterator[str]:
    samples = comparison.samples
    title = "Where the difference comes from" if only_why else "Step time"
    yield f"### {title}: {escape(comparison.after.name)} against {escape(comparison.before.name)}"
    yield ""
    if not only_why:
        yield f"**{escape(verdict_sentence(samples))}**"
        yield ""
    yield escape(" ".join([*where_sentences(comparison), *([] if only_why else advice(comparison))]))
    yield ""
    if not only_why:
        yield from _markdown_table(
            sample_table(samples, (comparison.before.name, comparison.after.name), comparison.energies)
        )
        yield ""
    yield from _folded("What the difference of a step is made of", _markdown_table(cause_table(comparison)))
    for shown in shown_tables(comparison, top):
        cut = showing(shown.frame.height, shown.total, shown.things)
        yield from _folded(shown.title, [*_markdown_table(shown.frame), *(["", cut] if cut else [])])
    if comparison.settings.height:
        yield from _folded("Settings that differ", _markdown_table(settings_table(comparison)))
    of_notes = "What was compared" if only_why else "How sure this is, and what was compared"
    yield from _folded(of_notes, _notes(comparison, only_why))


def _notes(comparison: Comparison, only_why: bool) -> Iterator[str]:
    samples = comparison.samples
    for text in (
        f"Before: {side_sentence(comparison.before)}.",
        f"After: {side_sentence(comparison.after)}.",
        *([] if only_why else [*detectable_sentences(samples), *samples.caveats]),
        *comparison.notes,
    ):
        yield f"- {escape(text)}"


def _folded(title: str, lines: Sequence[str] | Iterator[str]) -> Iterator[str]:
    """A section that opens at a click; GitHub needs the empty line before the table."""
    yield f"<details><summary>{escape(title)}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"
    yield ""


def _markdown_table(frame: pl.DataFrame) -> Iterator[str]:
    yield _row([heading(name, frame.columns) for name in frame.columns])
    yield _row(["---:" if dtype.is_numeric() else "---" for dtype in frame.dtypes])
    for row in frame.iter_rows(named=True):
        yield _row([escape(_cut(cell(name, value))) for name, value in row.items()])


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


SCHEMA: Final = 1
TABLES: Final = ("causes", "lines", "operators", "kernels", "modules", "communication", "memory", "settings")
"""The tables of a comparison, by the names that they have as attributes and as keys."""


def comparison_report(comparisons: Sequence[Comparison], *, top: int = 0) -> dict[str, Any]:
    """Everything in the comparisons as plain values: times in nanoseconds, shares from 0 to 1, no NaN.

    Args:
        top: rows of each table, 0 for all. Causes and settings are never cut.
    """
    return {
        "schema": SCHEMA,
        "stepscope": __version__,
        "comparisons": [_json_comparison(comparison, top) for comparison in comparisons],
    }


def comparison_bytes(report: dict[str, Any]) -> bytes:
    """The report as indented UTF-8 text, one line break at the end; what cannot be seen is escaped."""
    return printable_json(msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2)) + b"\n"


def _json_comparison(comparison: Comparison, top: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "before": _side(comparison.before),
        "after": _side(comparison.after),
        "verdict": comparison.samples.verdict,
        "sentences": [verdict_sentence(comparison.samples), *where_sentences(comparison), *advice(comparison)],
        "samples": {**_fields(comparison.samples), "is_unprofiled": comparison.is_unprofiled},
        "basis": comparison.basis,
        "difference_ns": comparison.difference_ns,
        "notes": list(comparison.notes),
        "energies": [_fields(each) for each in comparison.energies],
    }
    for name in TABLES:
        table: pl.DataFrame = getattr(comparison, name)
        cut = table if not top or name in ("causes", "settings") else table.head(top)
        report[name] = cut.rows(named=True)
        report[f"{name}_count"] = table.height
    return report


def _side(side: SideSummary) -> dict[str, Any]:
    names = ("name", "paths", "ranks", "runs", "basis", "devices", "step_source", "step_count", "total_ns", "step_ns")
    return {
        **{name: getattr(side, name) for name in names},
        "left_out": [_fields(step) for step in side.left_out],
        "warnings": [_fields(warning) for warning in side.warnings],
    }


def _fields(thing: Any) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in type(thing).__dataclass_fields__}


def redacted_comparison(
    comparison: Comparison, redactor_of: Callable[[Sequence[str], Sequence[str]], Redactor] = Redactor
) -> Comparison:
    """The comparison without paths, host, user and process names.

    Args:
        redactor_of: makes a `Redactor` that knows these names and paths too.

    The traces of its sides are left as they are: draw from them what the same `Redactor` is applied to.
    """
    hosts = [side.trace.metadata.host for side in (comparison.before, comparison.after)]
    redactor = redactor_of([*filter(None, hosts)], list(_paths(comparison)))
    tables: dict[str, Any] = {name: redactor.table(getattr(comparison, name)) for name in TABLES}
    tables["settings"] = tables["settings"].filter(pl.col("name") != "machine")
    sides = [_redact_side(side, redactor) for side in (comparison.before, comparison.after)]
    notes = tuple(map(redactor.text, comparison.notes))
    return replace(comparison, before=sides[0], after=sides[1], notes=notes, **tables)


def _redact_side(side: SideSummary, redactor: Redactor) -> SideSummary:
    return replace(side, name=redactor.text(side.name), paths=tuple(map(redactor.path, side.paths)))


def _paths(comparison: Comparison) -> Iterator[str]:
    for side in (comparison.before, comparison.after):
        yield from (side.name, *side.paths)
    for column in ("file", "after_file"):
        yield from comparison.lines.select(pl.col(column).drop_nulls().unique()).to_series()
