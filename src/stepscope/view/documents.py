"""The page as HTML, and its documents: each made when it is first asked for, once, by threads all requests share."""

from __future__ import annotations

import base64
import hashlib
import html
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.resources import files
from queue import SimpleQueue
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote_plus

from stepscope.errors import StepscopeError
from stepscope.report.document import compact_json

Options: TypeAlias = Mapping[str, str]
"""What the address of a document adds to its name, such as {"rank": "3"}."""
Make: TypeAlias = Callable[[str, Options], Any]
"""Makes a document of a name; raises `NoDocument` where there is none."""
Known: TypeAlias = Callable[[str], Collection[str]]
"""Gives the options that a document of this name heeds."""

MOST_BYTES: Final = 256 << 20
"""Of all kept answers together, with their keys."""
LONGEST_QUERY: Final = 8192
CHANGED: Final = "stepscope-changed"
"""Header of an answer about a file that has changed since."""
ACTIONS: Final = ("capture",)
"""Documents that do something, and answer that it has begun."""
CHANGING: Final = ("timeline", "whatif", "runs", "watch", "progress", "perfetto", "ranks", *ACTIONS)
"""Documents that are not kept: those of many windows or choices, those that change, and a copy of the trace."""
KINDS: Final = (
    ("session", "timeline", "slice", "stretch", "places", "runs", "watch"),  # follow the reader's hand
    ("progress", *ACTIONS),  # ask running programs
    ("whatif",),
    ("predict", "plan", "energy", "perfetto"),  # take seconds when they are first made
    ("ranks", "compare"),  # read other traces
)
"""Documents of each kind wait only for those of their kind, and all others for each other."""


class NoDocument(StepscopeError):
    """There is no document of this name."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int  # of HTTP
    body: bytes  # JSON

    @classmethod
    def error(cls, status: int, sentence: str) -> Answer:
        return cls(status, compact_json({"error": sentence}))


@dataclass
class _Job:
    """A document to make, and who waits for it."""

    key: str
    name: str
    options: Options
    waiting: list[Future[Answer]] = field(default_factory=list)
    has_begun: bool = False

    def begin(self) -> bool:
        """Whether anybody still waits."""
        self.waiting = [each for each in self.waiting if each.set_running_or_notify_cancel()]
        self.has_begun = bool(self.waiting)
        return self.has_begun


class Documents:
    """Answers requests for documents; two for the same document share one answer.

    Args:
        make: makes a document; called by one thread for each of KINDS, and by one for all others.
        report: keeps a report of a bug and returns the sentence about it.
        known: other options than these make no other document.
    """

    def __init__(self, make: Make, report: Callable[[BaseException], str], known: Known) -> None:
        self._make, self._report, self._known = make, report, known
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._kept_bytes = 0
        self._coming: dict[str, _Job] = {}
        self._lock = threading.Lock()
        self._asked: dict[str, SimpleQueue[_Job | None]] = {}
        for kind in KINDS:
            self._asked.update(dict.fromkeys(kind, self._queue()))
        self._others = self._queue()

    def ask(self, name: str, options: Options) -> Future[Answer]:
        """The document, at once if it is kept. Cancelled by all who wait before it is begun, it is not made."""
        heeded = {key: options[key] for key in sorted(self._known(name)) if key in options}
        key = f"{name}?{list(heeded.items())}"
        future: Future[Answer] = Future()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                future.set_result(self._kept[key])
                return future
            job = self._coming.get(key)
            if job is None:
                job = self._coming[key] = _Job(key, name, heeded)
                self._asked.get(name, self._others).put(job)
            if job.has_begun:
                future.set_running_or_notify_cancel()
            job.waiting.append(future)
            return future

    def _queue(self) -> SimpleQueue[_Job | None]:
        """What waits for a new thread; a daemon, so that the server ends at once whatever is being computed."""
        asked: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=_work, args=(weakref.ref(self), asked), name="documents", daemon=True).start()
        weakref.finalize(self, asked.put, None)
        return asked

    def do(self, job: _Job) -> None:
        """Make a document, and give it to all who wait for it."""
        with self._lock:
            if not job.begin():
                self._end(job)
                return
        answer = self._answer(job.name, job.options)
        with self._lock:
            if self._end(job) and answer.status == 200 and job.name not in CHANGING:
                self._keep(job.key, answer)
        for each in job.waiting:
            each.set_result(answer)

    def _end(self, job: _Job) -> bool:
        """Whether the job is about what is shown now."""
        is_current = self._coming.get(job.key) is job
        if is_current:
            del self._coming[job.key]
        return is_current

    def forget(self) -> None:
        """Make everything anew, as what it is about has changed; who waits already still gets what was there before."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0
            self._coming.clear()

    def _answer(self, name: str, options: Options) -> Answer:
        try:
            return Answer(200, compact_json(self._make(name, options)))
        except NoDocument as error:
            return Answer.error(404, str(error))
        except StepscopeError as error:
            return Answer.error(422, str(error))
        except MemoryError:
            return Answer.error(507, "not enough memory for this; --window or --steps reads less of a trace")
        except BaseException as error:  # compiled libraries also raise errors that are no Exception
            return Answer.error(500, self._report(error))

    def _keep(self, key: str, answer: Answer) -> None:
        self._kept[key] = answer
        self._kept_bytes += len(key) + len(answer.body)
        while len(self._kept) > 1 and self._kept_bytes > MOST_BYTES:
            oldest, gone = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest) + len(gone.body)


def _work(of: weakref.ref[Documents], asked: SimpleQueue[_Job | None]) -> None:
    """What a thread does for documents, which it keeps only while it makes one: a notebook opens many."""
    while (job := asked.get()) is not None:
        documents = of()
        if documents is not None:
            documents.do(job)
        del documents, job


_HEAD: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""
PAGE: Final = f"""\
{_HEAD}<title>stepscope</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
<div id="page"></div>
<script src="page.js"></script>
</html>
"""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of every answer."""
_ESCAPED: Final = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def bundled(name: str) -> bytes:
    """A file of the built page: page.js or page.css."""
    return files("stepscope.view").joinpath("bundle").joinpath(name).read_bytes()


def address(name: str, options: Options) -> str:
    """Name and options of a document as the page asks for it, in the encoding of URLSearchParams."""
    query = "&".join(f"{_encoded(key)}={_encoded(value)}" for key, value in sorted(options.items()))
    return f"{name}?{query}" if query else name


def with_options(known: str, options: Options) -> str:
    """The address with further options."""
    name, _, query = known.partition("?")
    return address(name, {**dict(parse_qsl(query, keep_blank_values=True)), **options})


def _encoded(text: str) -> str:
    return quote_plus(text, safe="*", errors="replace").replace("~", "%7E")


def page_file(title: str, documents: Mapping[str, bytes]) -> bytes:
    """One HTML file that needs nothing else.

    The documents are data: nothing in them can end their element, since <, > and & are escaped.

    Args:
        documents: JSON by `address`.
    """
    data = ",\n".join(f"{compact_json(key).decode()}:{value.decode().strip()}" for key, value in documents.items())
    embedded = f'<script type="application/json" id="stepscope-documents">{{\n{data.translate(_ESCAPED)}\n}}</script>\n'
    return _whole(title, embedded).encode("utf-8", "backslashreplace")


def framed_page() -> str:
    """The page for a frame of a notebook or an editor: it asks the document around it for its documents."""
    return _whole("stepscope", "")


def _whole(title: str, embedded: str) -> str:
    """The page with its script and style inside; its policy allows only these, by their hashes, and no request."""
    script, style = (bundled(name).decode().replace("</script", "<\\/script") for name in ("page.js", "page.css"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return "".join(
        (
            _HEAD,
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            f"<title>{html.escape(title)}</title>\n",
            '<link rel="icon" href="data:,">\n',
            f"<style>{style}</style>\n",
            '<div id="page"></div>\n',
            embedded,
            f"<script>{script}</script>\n</html>\n",
        )
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
