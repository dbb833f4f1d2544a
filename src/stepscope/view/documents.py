"""Documents of the page, each made when it is first asked for, once, by threads that all requests share."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

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
