"""What a report says, apart from how it is printed: blocks that text, Markdown and HTML each print in their own way.

Names from traces may be anyone's. Builders put them into blocks as they are; each renderer makes them harmless.
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
    """A paragraph; `style` is its CSS class, of which "strong" and "headline" are bold everywhere."""

    text: str
    style: str = ""
    only: Where = "everywhere"

    @property
    def is_bold(self) -> bool:
        """Whether it is bold everywhere."""
        return bool({"strong", "headline"} & set(self.style.split()))


@dataclass(frozen=True, slots=True)
class Items:
    """Sentences that belong together, as a list."""

    texts: tuple[str, ...]
    style: str = ""
    only: Where = "everywhere"


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels and what stands for each."""

    rows: tuple[tuple[str, str], ...]
    only: Where = "everywhere"


@dataclass(frozen=True, slots=True)
class Figures:
    """Label, value and what the value means."""

    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A frame whose columns' names carry the units, as `format.cell` reads them.

    Attributes:
        things: what its rows are called; a renderer that shows few rows never cuts a table without it.
        total: the rows there are, where the frame has not all of them.
        brief: the columns that there is room for outside of a page, where not all.
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
        """Rows of the uncut table."""
        return self.frame.height if self.total is None else self.total

    def cut(self, top: int) -> pl.DataFrame:
        """The first rows, 0 for all, with the columns that there is room for outside of a page."""
        rows = self.frame.head(top) if top and self.things else self.frame
        return rows.select(self.brief) if self.brief else rows


@dataclass(frozen=True, slots=True)
class Cause:
    """The time of one cause; `after` says how much of it followed which waits, the longest first."""

    cause: str
    ns: int
    share: float
    after: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Causes:
    """A window by cause, the largest first; `busy_ns` of it has none."""

    causes: tuple[Cause, ...]
    window_ns: int
    busy_ns: int = 0
    name: str = ""
    of: str = "Of the window"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be copied as they are."""

    text: str
    language: str = "python"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the user's code."""

    place: str
    share: float = 1.0
    exact_line: bool = True
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the trace that shows a finding; `drawn` where the picture of the step has it."""

    start_ns: int
    duration_ns: int
    what: str
    drawn: bool


@dataclass(frozen=True, slots=True)
class FindingBlock:
    """A finding; figures are name, value and the threshold that it crossed, "" where there is none."""

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
    """Of which rank's picture the stretches are."""


@dataclass(frozen=True, slots=True)
class Plot:
    """Times in a row for a terminal; `marks` are positions before which something changed."""

    times_ns: tuple[float, ...]
    marks: tuple[int, ...] = ()
    only: Where = "text"


@dataclass(frozen=True, slots=True)
class Drawing:
    """What only a page can draw: a template's name and what fills it in."""

    template: str
    view: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A title and what stands below it.

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
        whole: the option by which all columns of its tables can be had.
        level: of its sections' headings in Markdown.
    """

    title: str
    blocks: tuple[Block, ...]
    whole: str = "--format csv"
    level: int = 2


def texts(*sentences: str, style: str = "", only: Where = "everywhere") -> tuple[Text, ...]:
    """A paragraph for each sentence that is not empty."""
    return tuple(Text(sentence, style, only) for sentence in sentences if sentence)


def section_if(title: str, *blocks: Block, **options: Any) -> tuple[Section, ...]:
    """A section, or nothing where it would be empty."""
    return (Section(title, blocks, **options),) if blocks else ()


def is_printed(block: Block, *where: Where) -> bool:
    """Whether a renderer of that kind prints the block."""
    return getattr(block, "only", "everywhere") in ("everywhere", *where)
