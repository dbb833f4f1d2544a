"""The document model of reports: blocks that the text, Markdown and HTML renderers each print in their own way.

Names from traces are untrusted. Builders put them into blocks unchanged; each renderer escapes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import polars as pl

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
class Stretch:
    """A stretch of the trace that shows a finding; `drawn` if it overlaps the picture of the step."""

    start_ns: int
    duration_ns: int
    what: str
    drawn: bool


@dataclass(frozen=True, slots=True)
class FindingBlock:
    """A finding; figures are (name, value, threshold crossed), the threshold "" if there is none."""

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
    figures: tuple[tuple[str, str, str], ...]
    stretches: tuple[Stretch, ...]
    picture: str
    """Key of the rank whose picture shows the stretches."""


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
