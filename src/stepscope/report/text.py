"""Render documents for a terminal, and as GitHub Markdown for an issue, a pull request or a chat.

Output does not depend on the terminal or the environment. Names from traces are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from rich.cells import cell_len

from stepscope.analysis.host import CAUSES
from stepscope.report import document as doc
from stepscope.report.format import cell, count, duration, filled, plot_range, printable, share
from stepscope.report.palette import terminal_bar
from stepscope.report.tables import heading, showing, table_lines
from stepscope.report.words import after_sentence, joined_causes, place_words

_BAR_WIDTH: Final = 20
_WIDE: Final = 60
"""Least width, in columns, at which the meaning of figures is shown."""
_ROOMY: Final = 100
_STYLES: Final = {"bold": "1", "dim": "2", "high": "1;31", "medium": "1;33", "low": "1;36", "note": "1"}
"""SGR sequences by style."""
_PLOT_ROWS: Final = 8
_WIDEST: Final = 4
"""Columns per time in a plot of few times."""
_EMPTY: Final = "\0"
"""An empty line to be kept, such as one in code."""


def text_of(document: doc.Document, *, width: int, colour: bool = False, top: int = 0) -> str:
    """Render the document as lines of at most `width` columns; code is never wrapped.

    Args:
        top: rows of each table, 0 for all.
    """
    lines = _Printer(width, colour, top, document.whole).blocks(document.blocks)
    # one empty line between parts, none at the ends
    parts = ["\n".join(part) for is_full, part in groupby(map(str.rstrip, lines), key=bool) if is_full]
    return "\n\n".join(parts).replace(_EMPTY, "") + "\n"


@dataclass(frozen=True, slots=True)
class _Printer:
    width: int
    colour: bool
    top: int
    whole: str

    def blocks(self, blocks: Sequence[doc.Block], indent: int = 0) -> Iterator[str]:
        for block in blocks:
            if doc.is_printed(block, "text", "off page"):
                yield from self.block(block, indent)

    def block(self, block: doc.Block, indent: int) -> Iterator[str]:
        match block:
            case doc.Section():
                yield from self.section(block, indent)
            case doc.Group():
                yield from () if block.is_quiet else ("", self.styled(f"== {printable(block.title)}", "bold"), "")
                yield from self.blocks(block.blocks, indent)
            case doc.Text():
                lines = self.filled(block.text, indent)
                yield from (self.styled(line, "bold") if block.is_bold else line for line in lines)
            case doc.Items():
                for text in block.texts:
                    yield from self.filled(text, indent, "- ")
            case doc.Facts():
                yield from self.facts(block.rows, indent)
            case doc.Figures():
                yield from self.figures(block.rows, indent)
            case doc.Table():
                yield from self.table(block, indent)
            case doc.Causes():
                yield from self.causes(block.causes, indent)
            case doc.Code():
                yield from self.code(block.text, indent + 4)
            case doc.FindingBlock():
                yield from self.finding(block)
            case doc.Plot():
                yield from ("", *plot_lines(block, self.width - indent), "")
            case doc.Drawing():
                return

    def section(self, section: doc.Section, indent: int) -> Iterator[str]:
        yield ""
        if section.is_quiet:
            yield from self.blocks(section.blocks, indent)
        else:
            yield from (self.styled(line, "bold") for line in self.filled(section.title))
            yield from self.blocks(section.blocks, 2)
        yield ""

    def table(self, table: doc.Table, indent: int) -> Iterator[str]:
        rows = table.cut(self.top)
        if self.width < _ROOMY:
            rows = rows.drop(table.wide_only, strict=False)
        lines = table_lines(rows, width=self.width - indent, whole=self.whole)
        yield from (" " * indent + line for line in lines)
        if table.things and (cut := showing(rows.height, table.height, table.things)):
            yield self.styled(" " * indent + cut, "dim")

    def facts(self, rows: Sequence[tuple[str, str]], indent: int, gap: int = 2) -> Iterator[str]:
        room = max((len(label) for label, _ in rows), default=0) + gap
        for label, value in rows:
            yield from self.filled(value, indent, f"{printable(label):<{room}}")

    def figures(self, rows: Sequence[tuple[str, str, str]], indent: int) -> Iterator[str]:
        labels, values = (max(cell_len(row[place]) for row in rows) for place in (0, 1))
        for label, value, meaning in rows:
            head = f"{printable(label):<{labels}} {printable(value):>{values}} "
            yield from self.filled(meaning if self.width >= _WIDE else "", indent, head)

    def causes(self, causes: Sequence[doc.Cause], indent: int) -> Iterator[str]:
        """One line per cause: name, bar, share, time and meaning; bar and meaning are dropped if there is no room."""
        shown = joined_causes(causes)
        names = max((cell_len(printable(each.cause)) for each in shown), default=0)
        bar_width = _BAR_WIDTH if self.width >= 80 else _BAR_WIDTH // 4
        for each in shown:
            sign, hue = terminal_bar(each.cause) if self.colour else ("█", "")
            bar = f"{sign * round(min(each.share, 1) * bar_width):<{bar_width}}"
            why = "; ".join(filter(None, (CAUSES.get(each.cause, ""), after_sentence(each))))
            head = f"{printable(each.cause):<{names}} {bar} {share(each.share):>7} {duration(each.ns):>9} "
            lines = self.filled(why if self.width >= _WIDE else "", indent, head)
            yield from (line.replace(bar, self.painted(bar, hue), 1) for line in lines)

    def code(self, text: str, indent: int) -> Iterator[str]:
        yield ""
        for line in text.expandtabs(4).rstrip().splitlines():
            yield " " * indent + (printable(line) or _EMPTY)
        yield ""

    def finding(self, finding: doc.FindingBlock) -> Iterator[str]:
        yield ""
        title = self.filled(f"{finding.number}. {finding.title}")
        yield from (self.styled(line, finding.severity) for line in title)
        saving = f"{finding.saving}; {finding.basis}" if finding.saving else finding.basis
        facts = [("saves" if finding.saving else "note", saving)]
        facts += [("" if number else "where", place_words(place)) for number, place in enumerate(finding.places)]
        facts += [("rule", f"{finding.rule} (stepscope explain {finding.rule})"), ("change", finding.change)]
        facts += [("try", finding.trial)] if finding.trial else []
        yield from self.facts(facts, 3, gap=1)
        if finding.code:
            yield from self.code(finding.code, 10)
        if finding.diff:
            yield from ("", self.styled("   your lines (stepscope diagnose --diff FILE writes a patch)", "dim"))
            yield from (f"          {printable(line)}" for line in finding.diff.splitlines())
        yield ""

    def filled(self, text: str, indent: int = 0, head: str = "") -> Iterator[str]:
        """Wrap a paragraph after its head, such as a label, with a hanging indent."""
        first = " " * indent + head
        if not text:
            yield first
            return
        following = " " * (indent + cell_len(head))
        # Addresses stay whole, to be copied.
        yield from filled(printable(text), self.width, first, following, break_words="://" not in text)

    def styled(self, text: str, style: str) -> str:
        return self.painted(text, _STYLES.get(style, ""))

    def painted(self, text: str, sequence: str) -> str:
        return f"\x1b[{sequence}m{text}\x1b[0m" if self.colour and sequence and text else text


def plot_lines(plot: doc.Plot, width: int) -> Iterator[str]:
    """Plot the times from left to right, with a vertical line at each change."""
    times = np.array(plot.times_ns)
    low, high = plot_range(plot.times_ns)
    labels = [duration(high), duration((low + high) / 2), duration(low)]
    gutter = max(map(len, labels))
    room = max(width - gutter - 3, 10)
    columns = min(room, len(times) * _WIDEST)
    place = np.arange(len(times)) * (columns / len(times))
    grid = [[" "] * columns for _ in range(_PLOT_ROWS)]
    for mark in plot.marks:
        at = min(max(int((place[mark - 1] + place[mark]) / 2 + 0.5), 0), columns - 1)
        for row in grid:
            row[at] = "┆"
    for at, ns in zip(place.astype(int), times, strict=True):
        grid[min(int((high - ns) / (high - low) * _PLOT_ROWS), _PLOT_ROWS - 1)][at] = "●"
    named = {0: labels[0], _PLOT_ROWS // 2: labels[1], _PLOT_ROWS - 1: labels[2]}
    for number, row in enumerate(grid):
        yield f"{named.get(number, ''):>{gutter}} │{''.join(row)}".rstrip()
    if len(times) > columns:
        yield f"{'':>{gutter}}  each column is {count(-(-len(times) // columns))} runs or fewer"


_SPECIAL: Final = re.compile(r"([\\`*_\[\]#|~!$])")
_MENTION: Final = re.compile(r"@(?=\w)|#(?=\d)")
_LONGEST_CELL: Final = 100
"""An empty line to be kept, such as one in code."""


def markdown_of(document: doc.Document, *, top: int = 0) -> str:
    """Render the document as Markdown; `top` rows of each table, 0 for all."""
    lines = groupby(_blocks(document.blocks, document.level, top), key=bool)
    parts = ["\n".join(part) for is_full, part in lines if is_full]  # collapse several empty lines into one
    return "\n\n".join(parts).replace(_EMPTY, "") + "\n"


def escape(text: str) -> str:
    """Escape everything that Markdown, HTML or a mention would interpret."""
    text = _SPECIAL.sub(r"\\\1", printable(text))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MENTION.sub(r"\g<0>&#8203;", text)  # GitHub finds mentions after it has resolved escapes
    return text.replace("://", "&#58;//")


def code(text: str) -> str:
    """A code span that backticks in the text cannot end."""
    text = printable(text)
    fence = _fence(text, 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def _fence(text: str, least: int) -> str:
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _inline(text: str) -> str:
    return code(text) if isinstance(text, doc.Verbatim) else escape(text)


def _blocks(blocks: Sequence[doc.Block], level: int, top: int) -> Iterator[str]:
    for block in blocks:
        if doc.is_printed(block, "markdown", "off page", "off text") and not isinstance(block, doc.Drawing):
            yield from _block(block, level, top)
            yield ""


def _block(block: doc.Block, level: int, top: int) -> Iterator[str]:
    match block:
        case doc.Section() | doc.Group():
            yield from _titled(block, level, top)
        case doc.Text():
            yield f"**{_inline(block.text)}**" if block.is_bold else _inline(block.text)
        case doc.Items():
            yield from (f"- {_inline(text)}" for text in block.texts)
        case doc.Facts():
            yield from (f"- **{escape(label.capitalize())}** {_inline(value)}" for label, value in block.rows)
        case doc.Figures():
            yield from (_row(("figure", "value", "what it means")), _row(("---", "---:", "---")))
            yield from (_row(map(escape, row)) for row in block.rows)
        case doc.Causes():
            yield from (_row(("cause", "time", "share", "what it means")), _row(("---", "---:", "---:", "---")))
            for each in joined_causes(block.causes):
                why = "; ".join(filter(None, (CAUSES.get(each.cause, ""), after_sentence(each))))
                yield _row(map(escape, (each.cause, duration(each.ns), share(each.share), why)))
        case doc.Table():
            yield from _table(block, top)
        case doc.Code():
            yield from _fenced(block.text, block.language)
        case doc.FindingBlock():
            yield from _finding(block, level)


def _titled(block: doc.Section | doc.Group, level: int, top: int) -> Iterator[str]:
    if isinstance(block, doc.Group):
        yield from (f"{'#' * (level - 1)} {escape(block.title)}", "", *_blocks(block.blocks, level, top))
    elif block.folded:
        # GitHub needs the empty line before a table.
        yield from (f"<details><summary>{escape(block.title)}</summary>", "")
        yield from (*_blocks(block.blocks, level + 1, top), "</details>")
    else:
        yield from () if block.is_quiet else (f"{'#' * level} {escape(block.title)}", "")
        yield from _blocks(block.blocks, level if block.is_quiet else level + 1, top)


def _finding(finding: doc.FindingBlock, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {finding.number}. {escape(finding.title)}", "")
    basis = escape(finding.basis)
    yield f"- **Saves** {escape(finding.saving)}; {basis}" if finding.saving else f"- **Note** {basis}"
    for place in finding.places:
        part = f" ({share(place.share)} of it)" if place.share < 1 else ""
        yield f"- **Where** {code(place.place)}{part}" + (
            f", most of it in {code(place.inside)}" if place.inside else ""
        )
    yield f"- **Change** {escape(finding.change)}"
    if finding.trial:
        yield f"- **Try** {code(finding.trial)}"
    yield f"- **Rule** {code(finding.rule)}"
    for text, language in ((finding.code, "python"), (finding.diff, "diff")):
        if text:
            yield from ("", *_fenced(text, language))


def _fenced(text: str, language: str) -> list[str]:
    fence = _fence(text, 3)
    lines = (printable(line) or _EMPTY for line in text.expandtabs(4).rstrip().splitlines())
    return [f"{fence}{language}", *lines, fence]


def _table(table: doc.Table, top: int) -> Iterator[str]:
    rows = table.cut(top)
    yield _row(escape(heading(name, rows.columns)) for name in rows.columns)
    yield _row("---:" if dtype.is_numeric() else "---" for dtype in rows.dtypes)
    for row in rows.iter_rows(named=True):
        yield _row(escape(_cut(cell(name, value))) for name, value in row.items())
    if table.things and (left_out := showing(rows.height, table.height, table.things)):
        yield from ("", left_out)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
