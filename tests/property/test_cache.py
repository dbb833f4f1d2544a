"""Whatever is done to a cache in whatever order, a trace that was asked for is the right one, and the limit is kept."""

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.trace import Metadata, Trace, TraceWarning, cache
from stepscope.trace.cache import TraceCache
from stepscope.trace.model import StoreWriter
from stepscope.trace.tables import conform

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4)),
        st.tuples(st.just("release"), st.integers(0, 4)),
        st.tuples(st.just("damage"), st.integers(0, 4)),
        st.tuples(st.just("limit"), st.integers(0, 40_000)),
        st.tuples(st.just("clear"), st.just(0)),
    ),
    max_size=15,
)


def build_of(number: int) -> Callable[[StoreWriter], tuple[Metadata, tuple[TraceWarning, ...]]]:
    def build(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        frame = pl.DataFrame({"start_ns": range(100 * number), "value": [number / 3] * (100 * number)})
        writer.write_part("counters", conform("counters", frame))
        return Metadata(path=str(number)), ()

    return build


def act(root: Path, action: str, number: int, held: dict[int, Trace]) -> None:
    match action:
        case "add":
            held[number] = TraceCache(root).add(f"{number:064x}", build_of(number))
        case "release":
            held.pop(number, None)
            gc.collect()
        case "damage":
            manifest = root / f"{number:064x}" / "contents.json"
            if manifest.exists():
                manifest.write_bytes(b"{}")
        case "limit":
            TraceCache(root).set_limit(number)
        case _:
            TraceCache(root).clear()


def check(held: dict[int, Trace]) -> None:
    for number, trace in held.items():
        assert trace.metadata.path == str(number)
        assert trace.scan("counters").select(pl.len()).collect().item() == 100 * number


@pytest.mark.skipif(cache.fcntl is None, reason="needs file locks")
@settings(max_examples=20, deadline=None)
@given(ACTIONS)
def test_traces_are_right_and_the_limit_is_kept(actions: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        held: dict[int, Trace] = {}
        for action, number in actions:
            act(Path(folder), action, number, held)
            check(held)
        held.clear()
        gc.collect()
        settled = TraceCache(folder)
        settled.set_limit(settled.limit())
        assert sum(entry.bytes for entry in settled.entries()) <= settled.limit()
        assert list(Path(folder).glob(".partial-*")) == []
