"""The document model of reports, which the text, Markdown and HTML renderers each print in their own way, and JSON.

JSON has schema 1: keys may be added but are never removed. msgspec writes the records of the analyses: times in
integer nanoseconds, shares from 0 to 1, null for NaN and infinities.

Names from traces are untrusted. Builders put them into blocks unchanged; each renderer escapes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

import msgspec
import numpy as np
import polars as pl

from stepscope import __version__
from stepscope.report.format import printable_json
from stepscope.trace.model import encodable_values

Where: TypeAlias = Literal["everywhere", "page", "text", "markdown", "off page", "off text"]
"""Which renderers print a block: all, HTML, the terminal, Markdown, all but HTML, all but the terminal."""


class Verbatim(str):
    """Text that is code, a command or a place in code."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `style` is its CSS class. "strong" and "headline" are bold in every renderer."""

    text: str
    style: str = ""
    only: Where = "everywhere"

    @property
    def is_bold(self) -> bool:
        return bool({"strong", "headline"} & set(self.style.split()))


@dataclass(frozen=True, slots=True)
class Items:
    """A list of related sentences."""

    texts: tuple[str, ...]
    style: str = ""
    only: Where = "everywhere"


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with their values."""

    rows: tuple[tuple[str, str], ...]
    only: Where = "everywhere"


@dataclass(frozen=True, slots=True)
class Figures:
    """Key figures: label, value and what the value means."""

    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose column names carry the units, as `format.cell` reads them.

    Attributes:
        things: what the rows are called; a renderer that limits rows never cuts a table without it.
        total: number of rows, if the frame does not hold them all.
        brief: the columns shown outside of a page, if not all.
        wide_only: columns that a narrow terminal leaves out.
    """

    frame: pl.DataFrame
    things: str = ""
    total: int | None = None
    brief: tuple[str, ...] = ()
    wide_only: tuple[str, ...] = ()
    only: Where = "everywhere"

    @property
    def height(self) -> int:
        """Number of rows before any cut."""
        return self.frame.height if self.total is None else self.total

    def cut(self, top: int) -> pl.DataFrame:
        """The first `top` rows (0 for all) of the columns shown outside of a page."""
        rows = self.frame.head(top) if top and self.things else self.frame
        return rows.select(self.brief) if self.brief else rows


@dataclass(frozen=True, slots=True)
class Cause:
    """The time of one cause; `after` lists (preceding wait, ns), the longest first."""

    cause: str
    ns: int
    share: float
    after: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Causes:
    """A time window split by cause, the largest first; the remaining `busy_ns` have no cause."""

    causes: tuple[Cause, ...]
    window_ns: int
    busy_ns: int = 0
    name: str = ""
    of: str = "Of the window"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be copied verbatim."""

    text: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's code, with the library's function that most of its time goes to ("" for none)."""

    place: str
    share: float = 1.0
    exact_line: bool = True
    path: tuple[str, ...] = ()
    inside: str = ""


@dataclass(frozen=True, slots=True)
class FindingBlock:
    number: int
    rule: str
    title: str
    severity: str
    saving: str
    share: float
    basis: str
    places: tuple[Place, ...]
    change: str
    code: str
    diff: str
    trial: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Times plotted in sequence, in a terminal; a change lies before each position in `marks`."""

    times_ns: tuple[float, ...]
    marks: tuple[int, ...] = ()
    only: Where = "text"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing for pages only: the template's name and its variables."""

    template: str
    view: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A title and the blocks below it.

    Attributes:
        link: its name in the page's navigation; "" for none.
        folded: Markdown folds it away.
        is_quiet: only the page shows the title.
    """

    title: str
    blocks: tuple[Block, ...]
    id: str = ""
    link: str = ""
    style: str = ""
    folded: bool = False
    is_quiet: bool = False
    only: Where = "everywhere"


@dataclass(frozen=True, slots=True)
class Group:
    """One of several subjects of equal rank, such as the ranks of a job or the runs beside a baseline.

    Attributes:
        is_quiet: a terminal does not show the title.
    """

    title: str
    blocks: tuple[Block, ...]
    id: str
    style: str = ""
    is_quiet: bool = False


Block: TypeAlias = (
    Text | Items | Facts | Figures | Table | Causes | Code | FindingBlock | Plot | Drawing | Section | Group
)


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report.

    Attributes:
        whole: the option that shows all columns of its tables.
        level: heading level of its sections in Markdown.
    """

    title: str
    blocks: tuple[Block, ...]
    whole: str = "--format csv"
    level: int = 2


def texts(*sentences: str, style: str = "", only: Where = "everywhere") -> tuple[Text, ...]:
    """A paragraph for each non-empty sentence."""
    return tuple(Text(sentence, style, only) for sentence in sentences if sentence)


def section_if(title: str, *blocks: Block, **options: Any) -> tuple[Section, ...]:
    """A section as a 1-tuple, or () if it has no blocks."""
    return (Section(title, blocks, **options),) if blocks else ()


def is_printed(block: Block, *where: Where) -> bool:
    """Whether a renderer of one of these kinds prints the block."""
    return getattr(block, "only", "everywhere") in ("everywhere", *where)


class Prose(TypedDict):
    """Sentences of one section of a report; labels stand before values."""

    title: str
    about_table: bool  # whether the section has a table
    texts: list[str]


def sentences(document: Document) -> list[Prose]:
    """The prose that a terminal prints, by the section it stands in."""
    found: list[Prose] = []

    def add(blocks: Sequence[Block], title: str, about_table: bool) -> None:
        for block in blocks:
            if not is_printed(block, "text", "off page"):
                continue
            match block:
                case Section() | Group():
                    has_table = any(isinstance(each, Table) for each in block.blocks)
                    add(block.blocks, block.title or title, has_table)
                    continue
                case Text():
                    texts = [block.text]
                case Items():
                    texts = list(block.texts)
                case Facts():
                    texts = [f"{label}: {value}" for label, value in block.rows]
                case _:
                    continue
            if not found or (found[-1]["title"], found[-1]["about_table"]) != (title, about_table):
                found.append({"title": title, "about_table": about_table, "texts": []})
            found[-1]["texts"] += [text for text in texts if text]

    add(document.blocks, "", False)
    return found


SCHEMA: Final = 1


def json_bytes(report: dict[str, Any]) -> bytes:
    """The report as indented UTF-8 text with one line break at the end; invisible characters are escaped."""
    return printable_json(msgspec.json.format(_encoded(report), indent=2)) + b"\n"


def compact_json(value: object) -> bytes:
    """Any value of a report as one line of JSON in UTF-8; invisible characters are escaped."""
    return printable_json(_encoded(value))


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # a file's name may be any bytes
        return msgspec.json.encode(encodable_values(msgspec.to_builtins(value, enc_hook=_plain)))


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    return value.rows(named=True) if isinstance(value, pl.DataFrame) else str(value)


def stamped(**content: Any) -> dict[str, Any]:
    """A report's keys, preceded by the number of the schema and the version."""
    return {"schema": SCHEMA, "stepscope": __version__, **content}


def fields(record: Any, *names: str) -> dict[str, Any]:
    """Attributes of a record by name; by default all its fields."""
    names = names or tuple(field.name for field in dataclasses.fields(record))
    return {name: getattr(record, name) for name in names}
