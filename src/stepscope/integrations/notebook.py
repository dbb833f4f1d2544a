"""What a notebook asks of an open trace: the answers of the commands as objects, and the page as a widget."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from stepscope.commands.plan import predict
from stepscope.commands.read import whatif
from stepscope.commands.read.documents import OpenTrace, session_of
from stepscope.commands.view.command import COMMAND as VIEW
from stepscope.commands.view.command import report_bug
from stepscope.commands.view.pages import Job, options_of
from stepscope.errors import UsageError
from stepscope.report.format import file_name
from stepscope.threads import cached_property
from stepscope.view.documents import LONGEST_QUERY, Answer, Documents, Options

if TYPE_CHECKING:
    from stepscope.analysis.memory import MemorySummary
    from stepscope.predict.prediction import PredictedSteps
    from stepscope.trace import Trace
    from stepscope.whatif.answer import Answer as WhatIf

_OWN: Final = ("rank", "json", "html", "redact", "devices", "link", "window", "steps", "capture-trace")
"""Options of the commands that make no difference to the object, or are about several traces, devices or reading."""


def what_if(trace: Trace, options: Mapping[str, Any]) -> WhatIf:
    """See `Trace.what_if`."""
    opened = page_of(trace).opened
    return whatif.answer_to(whatif.COMMAND.parsed(_words(options)), opened.view, opened.tried)


def predicted(trace: Trace, options: Mapping[str, Any]) -> PredictedSteps:
    """See `Trace.predict`."""
    opened = page_of(trace).opened
    arguments = predict.PREDICT.parsed(_words(options))
    return predict.prediction_of(arguments, predict.Basis(arguments, opened.view.experiment))[0]


def memory_use(trace: Trace, device: str | None) -> MemorySummary:
    """See `Trace.memory_use`."""
    from stepscope.analysis.memory import memory_summary

    memories = page_of(trace).opened.view.memories
    found = [each for each in memories if device is None or each.device == str(device)]
    if not found:
        known = ", ".join(each.device for each in memories)
        raise UsageError(f"it has allocations of {known} only" if known else "the trace has no allocations")
    return memory_summary(trace, max(found, key=lambda each: each.peak_bytes))


def _words(options: Mapping[str, Any]) -> list[str]:
    """The options as typed behind a command."""
    words = ["-"]
    for name, value in options.items():
        option = name.replace("_", "-")
        if option in _OWN:
            raise UsageError(f"{name} is an option of the command only")
        if value is not None and value is not False:
            values = value if isinstance(value, (list, tuple)) else [value]
            words += [f"--{option}" if each is True else f"--{option}={each}" for each in values]
    return words


class TracePage:
    """The page of a trace that is open already, and what it answers."""

    def __init__(self, trace: Trace) -> None:
        self._job = Job.of(VIEW.parsed(["-"]), trace)
        self._title = file_name(trace.metadata.path) or "a trace"
        self._cells: Mapping[str, str] = trace.kept("cells", dict)

    @cached_property
    def _documents(self) -> Documents:
        return Documents(self._document, report_bug, options_of)

    @property
    def opened(self) -> OpenTrace:
        return self._job.opened({})

    def ask(self, address: str) -> Future[Answer]:
        """Ask for a document by the address that the page's server has for it."""
        name, _, query = address[:LONGEST_QUERY].partition("?")
        return self._documents.ask(name, dict(parse_qsl(query, keep_blank_values=True)))

    def _document(self, name: str, options: Options) -> Any:
        if name == "session":
            return session_of(self._title, "trace", self._job.documents)
        if name == "source" and options.get("file") in self._cells:
            return {"file": options["file"], "text": self._cells[options["file"]], "note": ""}
        return self._job.document(name, options)


def page_of(trace: Trace) -> TracePage:
    return trace.kept("page", lambda: TracePage(trace))


def page_widget(trace: Trace, height: int) -> Any:
    """See `Trace.view`."""
    return _widget_class()(page_of(trace), height)


@cache
def _widget_class() -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise UsageError("the page in a notebook needs anywidget: pip install 'stepscope[notebook]'") from error
    from importlib.resources import files

    from IPython.display import display

    from stepscope.view.documents import framed_page

    class PageWidget(anywidget.AnyWidget):  # type: ignore[misc]
        """The page; what it shows comes in messages, so that a saved notebook holds none of it."""

        _esm = files("stepscope.view").joinpath("widget.js").read_text("utf-8")
        height = traitlets.Int().tag(sync=True)

        def __init__(self, page: TracePage, height: int) -> None:
            super().__init__(height=height)
            self._page = page
            self._static = f"stepscope-{secrets.token_hex(8)}"
            self.on_msg(self._answer)

        def _ipython_display_(self) -> None:
            """Show what stays in a saved notebook, and the widget, which hides it as long as it lives."""
            diagnosis = self._page.opened.report.diagnosis
            static = f'<div class="{self._static}">{diagnosis._repr_html_()}</div>'
            display({"text/plain": repr(diagnosis), "text/html": static}, raw=True)
            data, metadata = self._repr_mimebundle_()
            saved = {"text/plain": "Run this cell again for the interactive page."}
            display({**data, **saved}, metadata=metadata, raw=True)

        def _answer(self, _: object, message: Any, buffers: object) -> None:
            match message:
                case {"view": str(view), "ask": int(number), "address": str(address)}:
                    asked, found = {"view": view, "ask": number}, self._page.ask(address)
                case {"view": str(view)}:
                    self.send({"view": view, "page": framed_page(), "static": self._static})
                    return
                case _:
                    return
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self._reply(asked, found)
            else:  # its thread sends the answer, once no cell runs
                asyncio.wrap_future(found, loop=loop).add_done_callback(partial(self._reply, asked))

        def _reply(self, asked: Mapping[str, Any], answer: Any) -> None:
            found = answer.result()
            self.send({**asked, "status": found.status, "body": found.body.decode()})

    return PageWidget
