"""Write results to the terminal, a pipe, or a file, which is written completely or not at all; and tell on standard
error how far a long piece of work is.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeAlias

from stepscope.errors import UsageError
from stepscope.files import whole_file
from stepscope.report.format import count, printable, share, size, span

if TYPE_CHECKING:
    import polars as pl
    import rich.progress

    from stepscope.report.document import Document

_PLAIN: Final = re.compile(r"([\n\t])")
_COLOURED: Final = re.compile(r"([\n\t]|\x1b\[[0-9;]*m)")
"""Sequences that a terminal gets unescaped; `split` puts them at odd positions."""
_PIPE_WIDTH: Final = 120
_LONGEST_NAME: Final = 50
_PLAIN_CHARACTERS: Final = str.maketrans({"█": "#", "…": "~", "●": "o", "│": "|", "┆": ":"})


Report: TypeAlias = Callable[[], "dict[str, Any] | bytes"]
"""Lazily makes a report: an object for JSON, or the bytes of a file."""


_cleaned: Callable[[str], str] = str


@contextlib.contextmanager
def cleaned_by(clean: Callable[[str], str]) -> Iterator[None]:
    """Pass all that `say` prints in the block, in any thread, through `clean`."""
    global _cleaned
    before, _cleaned = _cleaned, clean
    try:
        yield
    finally:
        _cleaned = before


def say(sentence: str) -> None:
    """Print progress, a warning or an error on standard error; standard output is for results."""
    print(f"stepscope: {printable(_cleaned(sentence))}", file=sys.stderr, flush=True)


def refuse_mixed_reports(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` if several reports would be mixed on standard output."""
    forms = ("json", "markdown", "html", "csv", "diff")
    if [getattr(arguments, form, None) for form in forms].count("-") > 1:
        raise UsageError("only one report can go to standard output")


def write_reports(
    arguments: argparse.Namespace,
    document: Callable[[], Document],
    *,
    top: int = 0,
    page: Callable[[], bytes] | None = None,
    is_printed: bool = True,
    **reports: Report,
) -> None:
    """Write each report whose option was given, and print the document unless a report goes to standard output.

    Args:
        top: rows of each table in text and Markdown, 0 for all.
        page: HTML, if it differs from the rendered document.
        is_printed: whether the terminal gets the document.
    """
    from stepscope.report.text import markdown_of

    made = functools.cache(document)
    forms: dict[str, Report] = {
        "markdown": lambda: markdown_of(made(), top=top).encode(),
        "html": page or (lambda: _page_of(made())),
        **reports,
    }
    targets = {form: target for form in forms if (target := getattr(arguments, form, None))}
    for form, target in targets.items():
        write_output(target, _encoded(forms[form]()))
    if is_printed and "-" not in targets.values():
        print_document(made(), top=top)


def write_document(
    arguments: argparse.Namespace, document: Callable[[], Document], json: Report, *, top: int = 0
) -> None:
    """Write the one result of a command with --format and --output, as text or as JSON."""
    from stepscope.report.text import text_of

    ends_as_json = arguments.format is None and arguments.output.endswith(".json")
    if arguments.format == "json" or ends_as_json:
        write_output(arguments.output, _encoded(json()))
    elif arguments.output == "-":
        print_document(document(), top=top)
    else:
        write_output(arguments.output, text_of(document(), width=width(), top=top).encode())


def _page_of(document: Document) -> bytes:
    from stepscope.report.html import html_of  # slow to import

    return html_of(document)


def local_minute(unix_s: float) -> str:
    """A moment in the user's time zone, such as "2026-01-02 12:00"."""
    from datetime import datetime

    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")


def print_document(document: Document, *, top: int = 0) -> None:
    """Print a report; `top` rows of each table, 0 for all."""
    from stepscope.report.text import text_of

    print_text(text_of(document, width=width(), colour=colour(), top=top))


def _encoded(report: dict[str, Any] | bytes) -> bytes:
    if isinstance(report, bytes):
        return report
    from stepscope.report.document import json_bytes

    return json_bytes(report)


def write_output(target: str, data: bytes | Iterable[bytes]) -> None:
    """Write to standard output if the target is "-", else to a file, and say so.

    A file is written completely or not at all.
    """
    if target != "-":
        write_atomically(Path(target), data)
        say(f"wrote {target}")
        return
    with _to_standard_output():
        sys.stdout.flush()
        buffer = getattr(sys.stdout, "buffer", None)
        for piece in _pieces(data):
            shown = _for_terminal(piece.decode(errors="backslashreplace")) if sys.stdout.isatty() else None
            if buffer is None:
                sys.stdout.write(piece.decode() if shown is None else shown)
            else:
                buffer.write(piece if shown is None else shown.encode())
        if buffer is not None:
            buffer.flush()


written: Final[list[Callable[[str, object], None]]] = []
"""Called with the target and the content of each file that is written, None for a folder."""


def write_atomically(path: Path, data: bytes | Iterable[bytes], *, private: bool = False) -> None:
    """Replace a file atomically; links are followed, and permissions kept unless it is private.

    Raises:
        UsageError: the file cannot be written.
    """
    for note in written:
        note(str(path), data)
    place = Path(os.path.realpath(path))
    try:
        if place.exists() and not place.is_file():  # /dev/null or a named pipe
            with place.open("wb") as file:
                file.writelines(_pieces(data))
            return
        with whole_file(place, private=private) as file:
            file.writelines(_pieces(data))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def write_folder(target: str, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, move it to the target when complete, and say so.

    Raises:
        UsageError: the target exists and is not an empty folder, or cannot be written.
    """
    for note in written:
        note(target, None)
    place = Path(os.path.realpath(target))
    if target == "-":
        raise UsageError("a folder cannot go to standard output: name one to write")
    temporary = place.with_name(f".{place.name[:_LONGEST_NAME]}-{os.urandom(4).hex()}.partial")
    try:
        if place.exists() and not (place.is_dir() and not any(place.iterdir())):
            raise UsageError(f"{target} already exists: name a new or an empty folder")
        temporary.mkdir()
        write(temporary)
        if place.exists():
            place.rmdir()
        os.replace(temporary, place)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"wrote {target}")


def _pieces(data: bytes | Iterable[bytes]) -> Iterable[bytes]:
    return (data,) if isinstance(data, bytes) else data


def print_text(text: str) -> None:
    """Print text; characters that the terminal lacks are replaced by plain ones."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN_CHARACTERS).encode(encoding, "backslashreplace").decode(encoding)
    with _to_standard_output():
        sys.stdout.write(_for_terminal(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def print_again(data: bytes, stream: TextIO) -> None:
    """Write what was printed before, as it went to the stream."""
    with _to_standard_output():
        stream.flush()
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(data.decode(stream.encoding or "utf-8"))
        else:
            buffer.write(data)
        stream.flush()


def _for_terminal(text: str) -> str:
    """Escape everything that a terminal interprets, except line ends, tabs and, with colour, colour sequences.

    Names in reports are already escaped; this covers raw output such as CSV.
    """
    kept = _COLOURED if colour() else _PLAIN
    return "".join(part if place % 2 else printable(part) for place, part in enumerate(kept.split(text)))


@contextlib.contextmanager
def _to_standard_output() -> Iterator[None]:
    """Turn a failure to write, such as on a full disk, into a `UsageError`; a closed pipe stays a `BrokenPipeError`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_standard_output()
        raise UsageError(f"standard output cannot be written: {error.strerror}") from error


def discard_standard_output() -> None:
    """Redirect standard output to the null device, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_table(frame: pl.DataFrame) -> None:
    from stepscope.report.tables import table_lines

    print_text("\n".join(table_lines(frame, width=width())) + "\n")


def counted(number: int, one: str, several: str = "") -> str:
    """Format a count such as "1 trace" or "1,200 traces"."""
    return f"1 {one}" if number == 1 else f"{count(number)} {several or one + 's'}"


def width() -> int:
    """Columns of the terminal; COLUMNS overrides them, and a pipe has 120."""
    return max(20, shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns if sys.stdout.isatty() else _columns())


def colour() -> bool:
    """Whether to colour: only on a terminal, and not if NO_COLOR (https://no-color.org) is set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _columns() -> int:
    try:
        return int(os.environ.get("COLUMNS", "")) or _PIPE_WIDTH
    except ValueError:
        return _PIPE_WIDTH


_SHOWN_AFTER_S: Final = 2.0
_REDRAWN_AFTER_S: Final = 0.1
_LINE_AFTER_S: Final = 10.0


class Progress:
    """A context manager that is called with what is done and, if known, the total.

    What it writes contains a carriage return, by which kept answers leave it out.

    Args:
        work: what is done, such as "reading trace.json".
        in_bytes: whether amounts are bytes; else they are counts.
        things: what is counted, whose rate is shown.
        arguments: the command's, which show nothing if they have --quiet, or --redact, since work may name a file.
    """

    def __init__(
        self, work: str, *, in_bytes: bool = True, arguments: argparse.Namespace, things: str | None = None
    ) -> None:
        self._work = printable(work)
        self._things = things
        self._in_bytes = in_bytes
        self._is_quiet = any(getattr(arguments, name, False) for name in ("quiet", "redact"))
        self._begun = time.monotonic()
        self._drawn = self._begun
        self._bar: rich.progress.Progress | None = None

    def __call__(self, done: int, total: int | None, work: str | None = None) -> None:
        """Show the amount, and from now on the work if that is given."""
        self._work = self._work if work is None else printable(work)
        now = time.monotonic()
        if self._is_quiet or now - self._begun < _SHOWN_AFTER_S:
            return
        is_terminal = sys.stderr.isatty()
        if now - self._drawn < (_REDRAWN_AFTER_S if is_terminal else _LINE_AFTER_S):
            return
        self._drawn = now
        if is_terminal:
            self._draw(done, total)
        else:
            sys.stderr.write(f"\r{self._line(done, total, now - self._begun)}\n")
            sys.stderr.flush()

    def _line(self, done: int, total: int | None, took_s: float) -> str:
        amount = size(done) if self._in_bytes else str(done)
        if not total:
            return f"stepscope: {self._work}: {amount}"
        left = f", {span(took_s * (total / done - 1))} left" if 0 < done < total else ""
        of = size(total) if self._in_bytes else total
        return f"stepscope: {self._work}: {share(done / total)} of {of}{self._rate(done)}{left}"

    def _rate(self, done: int) -> str:
        took_s = time.monotonic() - self._begun
        return f", {done / took_s:,.1f} {self._things} per second" if self._things and took_s else ""

    def _draw(self, done: int, total: int | None) -> None:
        if self._bar is None:
            self._bar = _bar(in_bytes=self._in_bytes)
            # What was done before the bar began is a part of its rate, too.
            self._bar.add_task(self._work, total=total)
            self._bar.tasks[0].start_time = self._bar.get_time() - (time.monotonic() - self._begun)
            self._bar.start()
        work = self._work + self._rate(done)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=work, refresh=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(*, in_bytes: bool) -> rich.progress.Progress:
    from rich import progress
    from rich.console import Console

    rate = [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()] if in_bytes else []
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        *rate,
        progress.TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        auto_refresh=False,
    )
