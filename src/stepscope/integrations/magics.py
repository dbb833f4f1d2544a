"""Magics of IPython: `%%stepscope` records a cell's loop, `%stepscope_lines` shows the lines of a function.

IPython runs a recorded cell as any other: to it the magic's line is a comment, and its events begin and end the
recording. So the cell's output, its errors and its line numbers are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import linecache
import os
import re
import shutil
import sys
from asyncio import CancelledError
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from stepscope import guard
from stepscope.commands.shared.options import CommandParser, whole
from stepscope.errors import StepscopeError, UsageError
from stepscope.record.captures import CaptureRequest, CaptureResult
from stepscope.record.controller import controller
from stepscope.record.hooks import begin_watch
from stepscope.record.launch import SILENT
from stepscope.report.redaction import Redactor
from stepscope.trace.tables import SCHEMAS

if TYPE_CHECKING:
    from stepscope.report.document import Document
    from stepscope.trace import Trace

_CELL: Final = re.compile(r"\s*%%stepscope(?:[ \t]+(.*))?$", re.MULTILINE)
_LONGEST_STEP_S: Final = 600.0
_STEPS: Final = 5
_WARM_UP: Final = 2
_magics: WeakKeyDictionary[Any, Magics] = WeakKeyDictionary()


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; called by `%load_ext stepscope`."""
    if "torch" not in sys.modules:
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
    magics = _magics[shell] = Magics(shell)
    shell.input_transformers_cleanup.insert(-1, _without_magic)  # before cell magics
    shell.events.register("pre_run_cell", magics.begin)
    shell.events.register("post_run_cell", magics.end)
    shell.register_magic_function(_described, "cell", "stepscope")
    shell.register_magic_function(magics.lines, "line", "stepscope_lines")


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics off; called by `%unload_ext stepscope` and `%reload_ext stepscope`."""
    magics = _magics.pop(shell)
    magics.cancel()
    shell.input_transformers_cleanup.remove(_without_magic)
    shell.events.unregister("pre_run_cell", magics.begin)
    shell.events.unregister("post_run_cell", magics.end)


def _without_magic(lines: list[str]) -> list[str]:
    """The cell as IPython is to run it, each line where it was."""
    return [f"# {lines[0]}", *lines[1:]] if lines and _CELL.match(lines[0]) else lines


def _described(line: str, cell: str) -> None:
    """Record the steps of a cell's loop, and show why they are slow.

        %%stepscope [NAME] [--steps N] [--warmup N] [--out FILE]

    NAME gets the trace, so that NAME.view() shows the page. Its first line has to be the cell's.
    """
    raise UsageError("%%stepscope has to be the first line of its cell")


def _options(line: str) -> argparse.Namespace:
    try:
        return _parser().parse_args(line.split())
    except UsageError as error:
        raise UsageError(str(error).replace(" --help", "?")) from error


@cache
def _parser() -> CommandParser:
    parser = CommandParser(prog="%%stepscope", add_help=False)
    parser.add_argument("name", nargs="?", help="the variable that gets the trace")
    parser.add_argument("--steps", type=whole(1), default=_STEPS, help="steps to record")
    parser.add_argument("--warmup", type=whole(1), default=_WARM_UP, help="steps before them")
    parser.add_argument("--out", help="keep the trace in this file")
    return parser


class Magics:
    """The magics of one shell, and the last recording.

    Attributes:
        last: the trace of the cell that was recorded last, its places in cells named as the notebook counts them.
    """

    def __init__(self, shell: Any) -> None:
        self.last: Trace | None = None
        self._shell = shell
        self._recorded: tuple[Any, _CellRecording] | None = None

    def begin(self, info: Any) -> None:
        """Begin to record if the cell is to be recorded; a problem is said, and the cell runs without it."""
        found = _CELL.match(info.raw_cell)
        if found is not None:
            if self._recorded is not None:  # a cell that runs this one, or that IPython never ended
                guard.tell("another cell's recording was given up: one cell is recorded at a time")
                self.cancel()
            with _said("the cell is not recorded"):
                self._recorded = info, _CellRecording(_options(found[1] or ""))

    def cancel(self) -> None:
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            guard.attempted(recorded[1].cancel)

    def end(self, result: Any) -> None:
        """Show what was recorded, unless the cell failed; one that was interrupted did not."""
        from IPython.display import display

        import stepscope

        if self._recorded is None or (result is not None and result.info is not self._recorded[0]):
            return  # a cell that the recorded one runs
        if result is None:
            self.cancel()
            return
        (_, recording), self._recorded = self._recorded, None
        failed = result.error_before_exec or result.error_in_exec
        if failed is not None and not isinstance(failed, (KeyboardInterrupt, CancelledError)):
            guard.attempted(recording.cancel)
            return
        with _said("no recording is shown"):
            self.last = trace = recording.end(cell_names(self._shell), result.execution_count)
            if recording.name:
                self._shell.user_ns[recording.name] = trace
            display(stepscope.diagnose(trace))

    def lines(self, line: str) -> None:
        """Show what each line of a function took in the last recording.

        %stepscope_lines FUNCTION
        """
        with _said("its lines cannot be shown"):
            if self.last is None:
                raise UsageError("nothing was recorded yet: begin the cell with its loop with %%stepscope")
            if not line.strip():
                raise UsageError("name a function, as in %stepscope_lines train")
            function = inspect.unwrap(self._shell.ev(line))
            document = lines_of(self.last, getattr(function, "__func__", function), cell_names(self._shell))
            _display(document)


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    """Say in a sentence what failed, and go on behind the block."""
    with guard.attempt() as doing:
        yield
    if doing.error is not None:
        kind = "" if isinstance(doing.error, StepscopeError) else f"{type(doing.error).__name__}: "
        guard.tell(f"{what}: {kind}{guard.sentence(doing.error)}")


class _CellRecording:
    """The recording of a cell, from when it is made to its end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.name: str | None = options.name
        if self.name is not None and (not self.name.isidentifier() or iskeyword(self.name)):
            raise UsageError(f"{self.name[:50]!r} is not a name that a variable can have")
        self._out = None if options.out is None else Path(options.out).absolute()
        if self._out is not None and not self._out.parent.is_dir():
            raise UsageError(f"there is no folder {self._out.parent}")
        if "jax" not in sys.modules and find_spec("torch") is None:
            raise UsageError("recording needs PyTorch, or JAX imported in an earlier cell")
        if "jax" not in sys.modules:
            import_module("torch")  # the cell may be the one that imports it, and the hooks come before
        if controller() is not None:
            raise UsageError("stepscope watches this process already: stepscope attach records its steps")
        self._asked: int = options.steps
        self._warm_up: int = options.warmup
        self._controller, self._take_off = begin_watch()
        self._begun = self._controller.current_step()
        try:
            self._handle = self._controller.request(
                CaptureRequest(
                    steps=self._asked,
                    first_step=self._begun + self._warm_up,
                    out=self._out,
                    timeout_s=_LONGEST_STEP_S,
                )
            )
        except BaseException:  # also an interrupt: later cells are recorded again
            self._take_off()
            raise

    def cancel(self) -> None:
        """End the recording, and keep nothing of it but a file that was asked for."""
        self._handle.cancel()
        with self._ended():
            pass

    @contextlib.contextmanager
    def _ended(self) -> Iterator[CaptureResult]:
        """The result, its file until the end of the block unless it was asked for."""
        try:
            self._controller.finish("the cell ended first")
        finally:
            self._take_off()
        result = self._handle.result or CaptureResult()
        try:
            yield result
        finally:
            if result.path is not None and self._out is None:
                shutil.rmtree(result.path.parent, ignore_errors=True)

    def end(self, files: dict[str, str], number: int | None) -> Trace:
        """End the recording, and read it.

        Args:
            files: of the notebook's cells, with their names.
            number: of this cell.

        Raises:
            UsageError: no step was recorded.
        """
        import stepscope

        with self._ended() as result:
            if result.path is None or not result.steps:
                raise UsageError(self._why_nothing(result.problem))
            if result.steps < self._asked:
                guard.tell(f"{result.steps} of {self._asked} steps were recorded: the cell ended first")
            texts = {name: "".join(linecache.getlines(file)) for file, name in files.items()}
            if self._out is None:
                files = {**files, str(result.path): f"cell {number or 0}"}
            trace = _CellNames(files).redact(stepscope.open_trace(result.path))
            for name in SCHEMAS:
                trace.table(name)  # before its file is gone
        trace.kept("cells", lambda: texts)
        return trace

    def _why_nothing(self, problem: str | None) -> str:
        steps = self._controller.current_step() - self._begun
        if steps == 0:
            return "no step was seen: an optimizer, a DataLoader or `with stepscope.step()` marks them"
        seen = "1 step" if steps == 1 else f"{steps} steps"
        sooner = ", and --warmup 1 begins sooner" if steps <= self._warm_up + 1 else ""
        return f"{problem or 'nothing was kept'}: {seen} ended in it{sooner}"


def cell_names(shell: Any) -> dict[str, str]:
    """The files that Python knows the notebook's cells by, each with the cell's name, such as "cell 3"."""
    found = {}
    for file in list(linecache.cache):
        known = shell.compile.format_code_name(file)
        number = None if known is None else re.search(r"\d+", known[1])
        if number is not None:
            found[file] = f"cell {number[0]}"
    return found


class _CellNames(Redactor):
    """Gives cells their names, wherever a trace has the names of their files."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__([])
        self._cells = names

    def _string(self, name: str, value: str) -> str:
        for file, cell in self._cells.items():
            if file in value:
                value = value.replace(file, cell)
        return value

    def _key(self, key: Any) -> Any:
        return self._string("", key) if isinstance(key, str) else key


def lines_of(trace: Trace, function: Any, names: Mapping[str, str]) -> Document:
    """What each line of a function took in a trace: the threads' time at it, without calls of the user's own functions.

    Args:
        names: of files that the trace knows by other names.

    Raises:
        UsageError: it is no function with source, or the trace has none of its lines.
    """
    import polars as pl

    from stepscope.integrations.notebook import page_of
    from stepscope.report.document import Document, Table, Text, texts
    from stepscope.report.format import count, duration, share

    try:
        source, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or ""
    except (OSError, TypeError) as error:
        raise UsageError("write the name of a function or a method that was written in Python") from error
    view = page_of(trace).opened.view
    span, steps = view.span, max(view.step_count, 1)
    end = (pl.col("start_ns") + pl.col("duration_ns")).clip(upper_bound=span.end_ns)
    ns = (end - pl.col("start_ns").clip(lower_bound=span.start_ns)).clip(lower_bound=0)
    is_own = (pl.col("file") == names.get(file, file)) & pl.col("line").is_between(first, first + len(source) - 1)
    taken = trace.lines.filter(is_own).group_by("line").agg(total_ns=ns.sum() / steps)
    total_ns, step_ns = float(taken["total_ns"].sum()), span.duration_ns / steps
    name = getattr(function, "__qualname__", "it")
    if not total_ns:
        raise UsageError(f"nothing of the recorded steps was spent in {name}")
    text = [each.rstrip().expandtabs(4) for each in source]
    numbers = pl.Series("line", range(first, first + len(source)), pl.Int32)
    rows = pl.DataFrame({"line": numbers, "source": text}).join(taken, on="line", how="left", maintain_order="left")
    rows = rows.select("line", "total_ns", (pl.col("total_ns") / step_ns).alias("share"), "source")
    took = f"{duration(total_ns)} of {duration(step_ns)} per step ({share(total_ns / step_ns)})"
    said = f"{name}: {took}, mean of {count(steps)}, without calls of your other functions."
    code = getattr(function, "__code__", None)
    is_busy = code is not None and code.co_firstlineno in taken["line"]
    busy = f"At line {first}: the time of lines that follow each other too quickly to be told apart." if is_busy else ""
    return Document("lines", (Text(said), Table(rows), *texts(busy)))


def _display(document: Document) -> None:
    from IPython.display import display

    from stepscope.report.notebook import document_screen
    from stepscope.report.text import text_of

    display({"text/plain": text_of(document, width=120), "text/html": document_screen(document)}, raw=True)
