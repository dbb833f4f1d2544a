"""A comparison for a pull request: the verdict in bold, the causes as a table, everything else folded away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import polars as pl

from stepscope.compare.comparison import Comparison
from stepscope.report.comparison_report import overview
from stepscope.report.comparison_sentences import advice, side_sentence, where_sentences
from stepscope.report.comparison_tables import cause_table, settings_table, shown_tables
from stepscope.report.comparison_text import detectable_sentences, sample_table, verdict_sentence
from stepscope.report.format import cell
from stepscope.report.markdown import escape
from stepscope.report.tables import heading, showing

_LONGEST_CELL = 100


def comparison_markdown(comparisons: Sequence[Comparison], *, top: int, only_why: bool = False) -> str:
    """Every comparison with the same baseline, one below the other.

    Args:
        top: rows of each table, 0 for all.
        only_why: leave out the verdict, which stands elsewhere: only what makes the difference.
    """
    parts = []
    if len(comparisons) > 1 and not only_why:
        parts.append("\n".join([*_table(overview(comparisons)), ""]))
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
        yield from _table(sample_table(samples, (comparison.before.name, comparison.after.name), comparison.energies))
        yield ""
    yield from _folded("What the difference of a step is made of", _table(cause_table(comparison)))
    for shown in shown_tables(comparison, top):
        cut = showing(shown.frame.height, shown.total, shown.things)
        yield from _folded(shown.title, [*_table(shown.frame), *(["", cut] if cut else [])])
    if comparison.settings.height:
        yield from _folded("Settings that differ", _table(settings_table(comparison)))
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


def _table(frame: pl.DataFrame) -> Iterator[str]:
    yield _row([heading(name, frame.columns) for name in frame.columns])
    yield _row(["---:" if dtype.is_numeric() else "---" for dtype in frame.dtypes])
    for row in frame.iter_rows(named=True):
        yield _row([escape(_cut(cell(name, value))) for name, value in row.items()])


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
