"""A comparison for the terminal: the verdict, where the difference comes from, the tables, the settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

import polars as pl

from stepscope.compare.comparison import Comparison
from stepscope.report.comparison_sentences import advice, side_sentence, where_sentences
from stepscope.report.comparison_tables import cause_table, settings_table, shown_tables
from stepscope.report.comparison_text import change_words, detectable_sentences, verdict_sentence
from stepscope.report.energy_format import energy
from stepscope.report.format import printable
from stepscope.report.tables import showing, table_lines


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
