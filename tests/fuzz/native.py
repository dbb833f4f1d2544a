"""`scripts/fuzz --native`: damaged inputs for the compiled scanner alone, built with sanitizers, which end the process.

What the scanner accepts of a text, msgspec must accept too, with as many events; what it accepts of an XLA profile, the
Python reader must decode to the same. Pages of SQLite are only decoded: `tests/property/test_sqlite_pages.py` compares.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from random import Random

from stepscope.readers.kineto import scanned
from stepscope.readers.kineto.events import decode_events
from tests.fuzz import seeds
from tests.fuzz.containers import raw_bytes
from tests.fuzz.values import changed_json
from tests.property.event_runs import changed_run, check_run, runs
from tests.property.spellings import respelled

PAGE_BYTES = 4096
LEAF = 0x0D


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz --native", description=__doc__)
    parser.add_argument("module", help="the scanner to load")
    parser.add_argument("--seconds", metavar="N", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="another row of inputs (default: 0)")
    arguments = parser.parse_args()
    load(arguments.module)
    texts = [next(iter(case.files.values())) for case in (*seeds.kineto(), *seeds.chrome())]
    event_runs = list(runs([next(iter(case.files.values())) for case in seeds.xplane()]))
    databases = [next(iter(case.files.values())) for case in seeds.nsight_systems()]
    pages = [data[at : at + PAGE_BYTES] for data in databases for at in range(PAGE_BYTES, len(data), PAGE_BYTES)]
    leaves = [page for page in pages if page[0] == LEAF]
    end = time.monotonic() + arguments.seconds
    tried = accepted = 0
    while time.monotonic() < end:
        random = Random(f"native {arguments.seed} {tried}")
        accepted += try_one(random, texts)
        accepted += check_run(random, changed_run(random, random.choice(event_runs)))
        accepted += try_pages(random, random.choice(leaves))
        tried += 3
    print(f"{tried:,} inputs in {arguments.seconds:,.0f} seconds, seed {arguments.seed}; {accepted:,} were accepted")
    return 0


def load(path: str) -> None:
    """Put the scanner of this file in place of the installed one."""
    spec = importlib.util.spec_from_file_location("_scanner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scanned._scanner = module  # type: ignore[attr-defined]
    assert scanned.is_built()


def try_one(random: Random, texts: list[bytes]) -> bool:
    """Scan a damaged text; whether the scanner accepted it."""
    document = random.choice(texts)
    change = random.choice((respelled, respelled, raw_bytes, changed_json))
    with contextlib.suppress(ValueError):  # a tree that holds itself cannot be written
        document = change(random, document)
    begin = document.find(b"[") + 1 if document[:1] == b"[" else document.find(b'"traceEvents"')
    text = document[document.find(b"[", begin) + 1 if document[:1] != b"[" else begin :]
    if random.random() < 0.3:
        text = text[: random.randrange(len(text) + 1)]
    exact = random.random() < 0.3
    found = scanned.scan(text, exact=exact)
    if found is not None:
        whole = text if found.end is None else text[: found.end]
        assert len(decode_events(whole, exact=found.exact)) == len(found), whole
    return found is not None


def try_pages(random: Random, page: bytes) -> bool:
    """Decode damaged leaf pages; whether the scanner accepted them."""
    pages = raw_bytes(random, page * random.choice((1, 1, 2, 3)))
    places = sorted(random.sample(range(20), random.choice((0, 1, 2, 5))))
    wanted = tuple((place, random.random() < 0.2) for place in places)
    usable = PAGE_BYTES - random.choice((0, 0, 3))
    skip, most = random.choice((0, 0, 1, 99)), random.choice((0, 5, 50_000))
    return scanned.sqlite_rows(pages, PAGE_BYTES, usable, wanted, skip, most) is not None


if __name__ == "__main__":
    sys.exit(main())
