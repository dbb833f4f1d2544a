"""Render documents as one HTML file that works offline; names from traces are always text, never markup.

Three measures make a hostile name harmless: autoescaping, JSON without HTML's special characters, and a content
security policy that lets the page run only its own script (by hash) and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import polars as pl
from markupsafe import Markup

from stepscope.report import document as doc
from stepscope.report.format import cell, duration, printable, share
from stepscope.report.tables import heading, showing

if TYPE_CHECKING:
    from jinja2 import Environment

TemplateVariables: TypeAlias = dict[str, Any]
"""Variables of a template."""

_SCRIPTS: Final = ("sweep.js", "report.js")
_STYLES: Final = {
    "plan": ("plan.css",),
    "history": ("history.css",),
    "sweep": ("sweep.css",),
    "effects": ("sweep.css",),
}
"""Drawing -> the style sheets that it needs."""


def html_of(document: doc.Document) -> bytes:
    """Render the document as one page, with all rows of each table."""
    script = "".join(_template_text(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    drawn = {each.template for each in _every(document.blocks) if isinstance(each, doc.Drawing)}
    styles = dict.fromkeys(style for name, needed in _STYLES.items() if name in drawn for style in needed)
    pieces = (
        _environment()
        .get_template("page.html.j2")
        .generate(
            title=document.title,
            links=list(_links(document.blocks)),
            blocks=_rendered(document.blocks, 2),
            styles=["report.css", *styles],
            script=Markup(script),
            script_hash=f"sha256-{digest}",
        )
    )
    page = io.BytesIO()
    page.writelines(piece.encode("utf-8", "backslashreplace") for piece in pieces)
    return page.getvalue()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # slow to import, and only pages need it

    environment = Environment(
        loader=FunctionLoader(_template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.tests["verbatim"] = lambda value: isinstance(value, doc.Verbatim)
    environment.filters["share"] = share
    environment.filters["duration"] = duration
    environment.filters["moment"] = partial(cell, "start_ns")
    environment.filters["expanded"] = partial(str.expandtabs, tabsize=4)
    return environment


def _harmless(value: Any) -> Any:
    """Escape control and invisible characters in strings; line ends stay."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(map(printable, value.split("\n")))


def _template_text(name: str) -> str:
    return files("stepscope.report").joinpath("templates").joinpath(name).read_text("utf-8")


def _every(blocks: Sequence[doc.Block]) -> Iterator[doc.Block]:
    for block in blocks:
        yield block
        if isinstance(block, (doc.Section, doc.Group)):
            yield from _every(block.blocks)


def _links(blocks: Sequence[doc.Block]) -> Iterator[tuple[str, str]]:
    """The page's navigation: its groups, or its sections if it has none."""
    groups = [block for block in blocks if isinstance(block, doc.Group)]
    if len(groups) > 1:
        yield from ((group.id, group.title) for group in groups)
    else:
        blocks = groups[0].blocks if groups else blocks
        yield from ((each.id, each.link) for each in blocks if isinstance(each, doc.Section) and each.link)


def _rendered(blocks: Sequence[doc.Block], level: int) -> Iterator[Markup]:
    has_links = sum(isinstance(block, doc.Group) for block in blocks) > 1
    for block in blocks:
        if doc.is_printed(block, "page", "off text"):
            yield _block(block, level, has_links)


def _joined(blocks: Sequence[doc.Block], level: int) -> Markup:
    return Markup("").join(_rendered(blocks, level))


def _block(block: doc.Block, level: int, has_links: bool) -> Markup:
    macros: Any = _environment().get_template("blocks.html.j2").module
    match block:
        case doc.Section():
            own = 1 if "summary" in block.style else level
            found = macros.section(block, _joined(block.blocks, level + 1), own, is_card=level == 2)
        case doc.Group():
            found = macros.group(block, _joined(block.blocks, level), list(_links(block.blocks)) if has_links else [])
        case doc.Table():
            left_out = showing(block.frame.height, block.height, block.things) if block.things else ""
            found = macros.table(table_view(block.frame), left_out)
        case doc.Drawing():
            drawing: Any = _environment().get_template(f"{block.template}.html.j2").module
            found = drawing.draw(block.view)
        case _:
            found = getattr(macros, type(block).__name__.lower())(block)
    return Markup(found)


def table_view(frame: pl.DataFrame) -> TemplateVariables:
    """Columns and rows for the macro `table`."""
    numeric = [dtype.is_numeric() and name != "line" for name, dtype in frame.schema.items()]
    columns = [
        {"heading": heading(name), "numeric": is_number} for name, is_number in zip(frame.columns, numeric, strict=True)
    ]
    rows = [
        [
            {"text": cell(name, value), "value": value if is_number else None, "numeric": is_number}
            for (name, value), is_number in zip(row.items(), numeric, strict=True)
        ]
        for row in frame.iter_rows(named=True)
    ]
    return {"columns": columns, "rows": rows}
