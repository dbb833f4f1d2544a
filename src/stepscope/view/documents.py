"""Documents of the page, each made when it is first asked for, once, by a thread that all requests share."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

from stepscope.errors import StepscopeError
from stepscope.report.document import compact_json

Options: TypeAlias = Mapping[str, str]
"""What the address of a document adds to its name, such as {"rank": "3"}."""
Asked: TypeAlias = "SimpleQueue[tuple[str, str, dict[str, str]]]"
Make: TypeAlias = Callable[[str, Options], Any]
"""Makes a document of a name; raises `NoDocument` where there is none."""

MOST_BYTES: Final = 256 << 20
"""Of all kept answers together."""
CHANGING: Final = ("timeline", "whatif", "runs", "progress", "perfetto")
"""Documents that are not kept: those of many windows or choices, those that change, and a copy of the trace."""
LONG: Final = ("ranks", "compare")
"""Documents that read other traces, by a thread of their own so that the others do not wait."""


class NoDocument(StepscopeError):
    """There is no document of this name."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int  # of HTTP
    body: bytes  # JSON

    @classmethod
    def error(cls, status: int, sentence: str) -> Answer:
        return cls(status, compact_json({"error": sentence}))


class Documents:
    """Answers requests for documents in order; two for the same document share one answer.

    Args:
        make: makes a document; called by one thread for those of LONG, and by one for all others.
        report: keeps a report of a bug and returns the sentence about it.
    """

    def __init__(self, make: Make, report: Callable[[BaseException], str]) -> None:
        self._make, self._report = make, report
        self._kept: OrderedDict[str, Answer] = OrderedDict()
        self._coming: dict[str, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._asked: tuple[Asked, Asked] = (SimpleQueue(), SimpleQueue())
        for asked in self._asked:  # daemons, so that the server ends at once whatever is being computed
            threading.Thread(target=self._work, args=(asked,), name="documents", daemon=True).start()

    def ask(self, name: str, options: Options) -> Future[Answer]:
        """The document, at once if it is kept."""
        key = f"{name}?{sorted(options.items())}"
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                known: Future[Answer] = Future()
                known.set_result(self._kept[key])
                return known
            if key not in self._coming:
                self._coming[key] = Future()
                self._asked[name in LONG].put((key, name, dict(options)))
            return self._coming[key]

    def _work(self, asked: Asked) -> None:
        while True:
            key, name, options = asked.get()
            answer = self._answer(name, options)
            with self._lock:
                if answer.status == 200 and name not in CHANGING:
                    self._keep(key, answer)
                coming = self._coming.pop(key)
            coming.set_result(answer)

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
        while len(self._kept) > 1 and sum(len(each.body) for each in self._kept.values()) > MOST_BYTES:
            self._kept.popitem(last=False)
