import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from stepscope.errors import CacheError, UnreadableTraceError
from stepscope.trace import Metadata, Trace, TraceWarning, cache
from stepscope.trace.cache import TraceCache, content_key, default_root, temporary_store
from stepscope.trace.model import StoreWriter
from stepscope.trace.tables import conform

posix_only = pytest.mark.skipif(cache.fcntl is None, reason="needs file locks")


def key(number: int) -> str:
    return f"{number:064x}"


def build_of(name: str, rows: int = 1) -> Callable[[StoreWriter], tuple[Metadata, tuple[TraceWarning, ...]]]:
    def build(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        frame = pl.DataFrame({"start_ns": range(rows), "name": [f"{name}{row * 7919 % rows}" for row in range(rows)]})
        writer.write_part("counters", conform("counters", frame))
        return Metadata(path=name, format="kineto"), (TraceWarning("truncated", 1, "cut off"),)

    return build


def fail(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
    raise AssertionError("nothing was to be built")


def names(trace: Trace) -> list[str]:
    return trace.counters["name"].to_list()


def age(tmp_path: Path, number: int, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(tmp_path / key(number), (moment, moment))


def test_an_empty_cache_has_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    empty = TraceCache(tmp_path / "none")
    assert empty.lookup(key(1)) is None
    assert empty.entries() == []
    assert empty.clear() == []
    assert empty.limit() == 10 * 2**30
    assert not (tmp_path / "none").exists()


def test_a_trace_is_built_once_and_found_again(tmp_path: Path) -> None:
    built = TraceCache(tmp_path).add(key(1), build_of("a"))
    again = TraceCache(tmp_path).add(key(1), fail)
    found = TraceCache(tmp_path).lookup(key(1))
    assert found is not None
    for trace in (built, again, found):
        assert (trace.metadata, trace.warnings, names(trace)) == (
            Metadata(path="a", format="kineto"),
            (TraceWarning("truncated", 1, "cut off"),),
            ["a0"],
        )
    (entry,) = TraceCache(tmp_path).entries()
    assert (entry.key, entry.path, entry.format) == (key(1), "a", "kineto")
    assert sorted(path.name for path in tmp_path.iterdir()) == [key(1)]


def test_the_key_is_of_the_content_the_versions_and_the_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, same, other = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    first.write_bytes(b"{}" * 2_000_000)
    same.write_bytes(b"{}" * 2_000_000)
    other.write_bytes(b"{}")
    assert content_key(first) == content_key(same) != content_key(other)
    assert content_key(first, "2s:4s") != content_key(first)
    before = content_key(first)
    monkeypatch.setattr(cache, "READER_VERSION", 99)
    assert content_key(first) != before
    with pytest.raises(UnreadableTraceError, match=r"none\.json cannot be read: No such file"):
        content_key(tmp_path / "none.json")


def test_a_key_is_never_a_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a cache key"):
        TraceCache(tmp_path).lookup("../elsewhere")


def test_the_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path))
    assert default_root() == TraceCache().root == tmp_path / "traces"
    monkeypatch.delenv("STEPSCOPE_CACHE_DIR")
    assert default_root().parts[-2:] == ("stepscope", "traces")


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        build_of("a")(writer)
        raise UnreadableTraceError("the file ends early")

    with pytest.raises(UnreadableTraceError, match="ends early"):
        TraceCache(tmp_path).add(key(1), build)
    assert list(tmp_path.iterdir()) == []


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    big = TraceCache(tmp_path)
    for number in (1, 2, 3):
        big.add(key(number), build_of("a", 10_000))
        age(tmp_path, number, 100 - number)
    gc.collect()
    assert big.lookup(key(1)) is not None  # which makes 2 the oldest
    size = big.entries()[0].bytes
    TraceCache(tmp_path, limit_bytes=3 * size).add(key(4), build_of("a", 10_000))
    assert {entry.key for entry in big.entries()} == {key(1), key(3), key(4)}


@posix_only
def test_an_open_trace_is_not_evicted(tmp_path: Path) -> None:
    held = TraceCache(tmp_path).add(key(1), build_of("a", 10_000))
    age(tmp_path, 1, 100)
    size = TraceCache(tmp_path).entries()[0].bytes
    TraceCache(tmp_path, limit_bytes=size).add(key(2), build_of("b", 10_000))
    assert len(names(held)) == 10_000
    assert key(1) in {entry.key for entry in TraceCache(tmp_path).entries()}
    assert TraceCache(tmp_path).lookup(key(2)) is not None
    del held
    gc.collect()
    TraceCache(tmp_path).set_limit(size)
    assert {entry.key for entry in TraceCache(tmp_path).entries()} == {key(2)}


def test_a_trace_above_the_limit_is_used_and_not_kept(tmp_path: Path) -> None:
    trace = TraceCache(tmp_path, limit_bytes=10).add(key(1), build_of("a"))
    assert names(trace) == ["a0"]
    assert TraceCache(tmp_path).entries() == []
    del trace
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_kept_in_the_folder(tmp_path: Path) -> None:
    TraceCache(tmp_path / "new").set_limit(12345)
    assert TraceCache(tmp_path / "new").limit() == 12345
    (tmp_path / "new" / "limit.json").write_text("nonsense")
    assert TraceCache(tmp_path / "new").limit() == 10 * 2**30


@pytest.mark.parametrize("damage", ["cut a table", "remove a table", "spoil the manifest", "remove the manifest"])
def test_a_damaged_entry_is_thrown_away_and_rebuilt(tmp_path: Path, damage: str) -> None:
    TraceCache(tmp_path).add(key(1), build_of("a", 1000))
    gc.collect()
    table, manifest = tmp_path / key(1) / "counters-00000.parquet", tmp_path / key(1) / "store.json"
    match damage:
        case "cut a table":
            table.write_bytes(table.read_bytes()[:-10])
        case "remove a table":
            table.unlink()
        case "spoil the manifest":
            manifest.write_bytes(b"{" * manifest.stat().st_size)
        case _:
            manifest.unlink()
    assert TraceCache(tmp_path).lookup(key(1)) is None
    assert names(TraceCache(tmp_path).add(key(1), build_of("new"))) == ["new0"]
    assert names(TraceCache(tmp_path).add(key(1), fail)) == ["new0"]


def test_clear_removes_everything_but_what_is_open(tmp_path: Path) -> None:
    held = TraceCache(tmp_path).add(key(1), build_of("a"))
    TraceCache(tmp_path).add(key(2), build_of("b"))
    (tmp_path / ".partial-left").mkdir()
    gc.collect()
    if cache.fcntl is not None:
        assert [entry.key for entry in TraceCache(tmp_path).clear()] == [key(2)]
        assert sorted(path.name for path in tmp_path.iterdir()) == [key(1)]
    assert names(held) == ["a0"]


def test_only_leftovers_older_than_a_day_are_swept(tmp_path: Path) -> None:
    for name, hours in (("old", 25), ("new", 23)):
        (tmp_path / f".partial-{name}").mkdir()
        (tmp_path / f".partial-{name}" / "counters-00000.parquet").write_bytes(b"x")
        moment = time.time() - hours * 3600
        os.utime(tmp_path / f".partial-{name}", (moment, moment))
    TraceCache(tmp_path).add(key(1), build_of("a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-new", key(1)]


def test_a_cache_that_cannot_be_written_breaks_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    useless = TraceCache(tmp_path / "file" / "traces")
    assert names(useless.add(key(1), build_of("a"))) == ["a0"]
    assert useless.entries() == []
    with pytest.raises(CacheError, match="cannot be written"):
        useless.set_limit(1)


def test_a_full_disk_falls_back_to_a_temporary_store(tmp_path: Path) -> None:
    def build(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        if tmp_path in writer.directory.parents:
            raise OSError(28, "No space left on device")
        return build_of("a")(writer)

    (tmp_path / "cache").mkdir()
    assert names(TraceCache(tmp_path / "cache").add(key(1), build)) == ["a0"]
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_temporary_store_goes_with_its_trace() -> None:
    places: list[Path] = []

    def build(writer: StoreWriter) -> tuple[Metadata, tuple[TraceWarning, ...]]:
        places.append(writer.directory)
        return build_of("a")(writer)

    trace = temporary_store(build)
    assert names(trace) == ["a0"]
    assert places[0].is_dir()
    del trace
    gc.collect()
    assert not places[0].exists()


def test_without_locks_everything_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "fcntl", None)
    TraceCache(tmp_path).add(key(1), build_of("a"))
    assert names(TraceCache(tmp_path).add(key(1), fail)) == ["a0"]
    TraceCache(tmp_path).set_limit(0)
    assert [entry.key for entry in TraceCache(tmp_path).entries()] == [key(1)]  # may be open
    age(tmp_path, 1, 4000)
    TraceCache(tmp_path).set_limit(0)
    assert TraceCache(tmp_path).entries() == []


_PROCESS = """
import sys, time
from pathlib import Path
import polars as pl
from stepscope.trace import Metadata
from stepscope.trace.cache import TraceCache
from stepscope.trace.tables import conform

root, name, key = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def build(writer):
    (root.parent / f"building-{name}").touch()
    while len(list(root.parent.glob("building-*"))) < 2:  # so that both have found nothing and write at once
        time.sleep(0.005)
    frame = pl.DataFrame({"start_ns": range(50_000), "name": [name] * 50_000})
    writer.write_part("counters", conform("counters", frame))
    return Metadata(path=name), ()

trace = TraceCache(root).add(key, build)
time.sleep(0.1)
print(trace.metadata.path, trace.counters["name"].unique().to_list(), trace.counters.height)
"""


def test_two_processes_that_open_the_same_trace_at_once_share_one_store(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    running = [
        subprocess.Popen([sys.executable, "-c", _PROCESS, str(root), name, key(1)], stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    answers = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    (entry,) = TraceCache(root).entries()
    assert answers == [f"{entry.path} ['{entry.path}'] 50000"] * 2
    assert [path.name for path in root.iterdir()] == [key(1)]


@pytest.mark.slow
@posix_only
def test_another_process_s_open_trace_is_protected(tmp_path: Path) -> None:
    program = (
        "import sys; from stepscope.trace.cache import TraceCache\n"
        "trace = TraceCache(sys.argv[1]).lookup(sys.argv[2]); print('open', flush=True); sys.stdin.read()\n"
        "print(trace.counters.height)"
    )
    TraceCache(tmp_path).add(key(1), build_of("a", 1000))
    gc.collect()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), key(1)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        assert TraceCache(tmp_path).clear() == []
        assert other.communicate("", timeout=60)[0] == "1000\n"
    assert [entry.key for entry in TraceCache(tmp_path).clear()] == [key(1)]


def test_the_key_of_a_large_file_is_kept_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = tmp_path / "trace.json", TraceCache(tmp_path / "cache")
    path.write_bytes(b"one")
    hashed: list[str] = []
    whole = cache.content_key

    def noted(path: Path, variant: str = "") -> str:
        hashed.append(variant)
        return whole(path, variant)

    monkeypatch.setattr(cache, "content_key", noted)
    assert [store.key_of(path) for _ in range(2)] == [whole(path)] * 2
    assert len(hashed) == 2  # a small file is always hashed

    monkeypatch.setattr(cache, "_LARGE_BYTES", 1)
    assert store.key_of(path) == whole(path)
    assert not list(store.root.glob("key-of-*"))  # it changed a moment ago, and may again within the clock's tick
    monkeypatch.setattr(cache, "_SETTLED_NS", -1)
    assert [store.key_of(path) for _ in range(3)] == [whole(path)] * 3
    assert len(hashed) == 4
    assert store.key_of(path, "other") == whole(path, "other")
    state = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert store.key_of(path) == whole(path)

    (kept,) = store.root.glob("key-of-*")
    for damage in (b"", b"{}", b"null", kept.read_bytes()[:-3], kept.read_bytes().replace(b'"key":"', b'"key":"0')):
        kept.write_bytes(damage)
        assert store.key_of(path) == whole(path)
    store.clear()
    assert not list(store.root.glob("key-of-*"))
