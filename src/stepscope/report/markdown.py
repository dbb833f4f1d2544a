"""Render documents as GitHub Markdown, for an issue, a pull request or a chat; names from traces are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from stepscope.analysis.host import CAUSES
from stepscope.report import document as doc
from stepscope.report.format import cell, duration, printable, share
from stepscope.report.tables import heading, showing
from stepscope.report.words.diagnosis import after_sentence, joined_causes

_SPECIAL: Final = re.compile(r"([\\`*_\[\]#|~!$])")
_LONGEST_CELL: Final = 100
_EMPTY: Final = "\0"
"""An empty line to be kept, such as one in code."""


def markdown_of(document: doc.Document, *, top: int = 0) -> str:
    """Render the document as Markdown; `top` rows of each table, 0 for all."""
    lines = groupby(_blocks(document.blocks, document.level, top), key=bool)
    parts = ["\n".join(part) for is_full, part in lines if is_full]  # collapse several empty lines into one
    return "\n\n".join(parts).replace(_EMPTY, "") + "\n"


def escape(text: str) -> str:
    """Escape everything that Markdown, HTML or a mention would interpret."""
    text = _SPECIAL.sub(r"\\\1", printable(text))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "&#64;")
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
