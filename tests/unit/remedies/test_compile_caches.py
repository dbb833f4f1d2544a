import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.remedies import compile_caches
from stepscope.remedies.compile_caches import (
    LOCK,
    TRASH,
    CacheKind,
    CompileCache,
    EvictionBusy,
    entries_of,
    evict,
    evict_in_background,
    find_caches,
    size_in_bytes,
)

SOURCES = Path(compile_caches.__file__).resolve().parents[3]
OLD = 1_000_000_000.0


def write(path: Path, size: int, made: float = OLD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (made, made))
    return path


def triton(folder: Path, ages: dict[str, int], size: int = 100) -> CompileCache:
    """A cache with one kernel a name, used that many seconds after OLD."""
    for name, age in ages.items():
        write(folder / name / "kernel.cubin", size, OLD + age)
    return CompileCache("triton", folder, "--folder")


def keys(entries: object) -> list[str]:
    return [entry.key for entry in entries]  # type: ignore[attr-defined]


def test_every_compilers_folder_is_found_by_its_own_variable(tmp_path: Path) -> None:
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": "/a",
        "TRITON_CACHE_DIR": "/b",
        "JAX_COMPILATION_CACHE_DIR": "/c",
        "JAX_COMPILATION_CACHE_MAX_SIZE": "5000",
        "XLA_PERSISTENT_CACHE_PATH": "/d",
        "PT_HPU_RECIPE_CACHE_CONFIG": "/e,true,1024",
        "STEPSCOPE_COMPILE_CACHE_LIMIT": "2GiB",
    }
    assert [(one.kind, str(one.folder), one.limit_bytes) for one in find_caches(environment)] == [
        ("inductor", "/a", 2 * 2**30),
        ("triton", "/b", 2 * 2**30),
        ("xla", "/c", 5000),
        ("xla", "/d", 2 * 2**30),
        ("hpu", "/e", 1024 * 2**20),
    ]


def test_a_default_that_is_not_there_and_a_bucket_are_no_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    variables = {"TRITON_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": "gs://bucket/cache"}
    assert find_caches(variables) == []
    (tmp_path / ".triton/cache").mkdir(parents=True)
    assert [(one.kind, one.said_by) for one in find_caches(variables)] == [("triton", "default")]


@pytest.mark.parametrize(
    ("text", "expected"), [("4096", 4096), ("10GiB", 10 * 2**30), ("1.5 kb", 1500), ("2T", None), ("0", None)]
)
def test_sizes(text: str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is not a size above 0"):
            size_in_bytes(text)
    else:
        assert size_in_bytes(text) == expected


def test_what_belongs_together_is_one_entry(tmp_path: Path) -> None:
    inductor = tmp_path / "inductor"
    write(inductor / "3g/c3gabc.cpp", 10)
    write(inductor / "3g/c3gabc.main.so", 20, OLD + 5)
    write(inductor / "fxgraph/ky/fkyabc/one", 30, OLD + 1)
    write(inductor / "aotautograd/a7gabc/two", 40, OLD + 2)
    write(inductor / "triton/0/HASH/kernel.cubin", 50, OLD + 3)
    write(inductor / "precompiled_headers/c3kabc.h", 1, OLD + 6)
    write(inductor / "precompiled_headers/c3kabc.h.gch", 60, OLD + 6)
    write(inductor / "precompiled_headers/locks/c3kabc.lock", 0)
    write(inductor / "locks/c3gabc.lock", 0)
    found = entries_of(CompileCache("inductor", inductor, ""))
    assert [(entry.kind, entry.key, entry.bytes, len(entry.paths)) for entry in found] == [
        ("inductor", "fxgraph/ky/fkyabc", 30, 1),
        ("inductor", "aotautograd/a7gabc", 40, 1),
        ("triton", "triton/0/HASH", 50, 1),
        ("inductor", "3g/c3gabc", 30, 2),
        ("inductor", "precompiled_headers/c3kabc", 61, 2),
    ]
    write(tmp_path / "xla/jit_f-123-cache", 7)
    write(tmp_path / "xla/jit_f-123-atime", 8, OLD + 9)
    write(tmp_path / "xla/.lockfile", 0)
    assert [(one.key, one.bytes) for one in entries_of(CompileCache("xla", tmp_path / "xla", ""))] == [
        ("jit_f-123", 15)
    ]
    write(tmp_path / "hpu/123.recipe", 5)
    write(tmp_path / "hpu/123.metadata", 6)
    write(tmp_path / "hpu" / LOCK, 0)
    assert [(one.key, one.bytes) for one in entries_of(CompileCache("hpu", tmp_path / "hpu", ""))] == [("123", 11)]
    assert entries_of(CompileCache("hpu", tmp_path / "nowhere", "")) == []


def test_links_are_neither_followed_nor_counted(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside/kernel", 10_000)
    cache = triton(tmp_path / "cache", {"a": 0})
    (tmp_path / "cache/a/link").symlink_to(outside)
    (tmp_path / "cache/linked").symlink_to(outside.parent)
    assert keys(entries_of(cache)) == ["a"]
    evict(cache, 1)
    assert outside.exists()


def test_the_oldest_go_until_the_rest_is_below_the_limit(tmp_path: Path) -> None:
    cache = triton(tmp_path, {"c": 3, "a": 1, "d": 4, "b": 2})
    done = evict(cache, 300)
    assert keys(done.removed) == ["a", "b"]  # 300 would be the limit, but not below 0.99 of it
    assert (done.before_bytes, done.after_bytes, done.is_below) == (400, 200, True)
    assert keys(entries_of(cache)) == ["c", "d"]
    assert sorted(os.listdir(tmp_path)) == ["c", "d", LOCK]
    assert evict(cache, 300).removed == ()


def test_what_was_read_lately_outlives_what_was_made_lately(tmp_path: Path) -> None:
    cache = triton(tmp_path, {"made_first": 0, "made_later": 10})
    os.utime(tmp_path / "made_first/kernel.cubin", (OLD + 20, OLD))
    assert keys(evict(cache, 150).removed) == ["made_later"]


def test_what_was_used_a_moment_ago_stays(tmp_path: Path) -> None:
    cache = triton(tmp_path, {"old": 0})
    write(tmp_path / "recent" / "kernel.cubin", 100, time.time())
    done = evict(cache, 1)
    assert (keys(done.removed), keys(done.in_use)) == (["old"], ["recent"])
    assert keys(evict(cache, 1, recently_s=0).removed) == ["recent"]


def test_an_open_a_loaded_and_a_locked_entry_stay(tmp_path: Path) -> None:
    import fcntl
    import mmap

    inductor = CompileCache("inductor", tmp_path, "--folder")
    for number, name in enumerate(("open", "mapped", "locked", "free")):
        write(tmp_path / f"aa/{name}.so", 100, OLD + number)
    lock = write(tmp_path / "locks/locked.lock", 0)
    with (tmp_path / "aa/open.so").open("rb"), lock.open("rb") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        with (tmp_path / "aa/mapped.so").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        done = evict(inductor, 1, recently_s=0)
    assert keys(done.removed) == ["aa/free"]
    assert sorted(keys(done.in_use)) == ["aa/locked", "aa/mapped", "aa/open"]
    assert not done.is_below
    mapped.close()
    assert sorted(keys(evict(inductor, 1, recently_s=0).removed)) == ["aa/locked", "aa/mapped", "aa/open"]


def test_only_one_evicts_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    import fcntl

    cache = triton(tmp_path, {"a": 0})
    write(tmp_path / f"{TRASH}left" / "0-0" / "kernel", 100)
    with (tmp_path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EvictionBusy, match="another process is evicting"):
            evict(cache, 1)
    assert keys(entries_of(cache)) == ["a"]
    evict(cache, 10_000)
    assert sorted(os.listdir(tmp_path)) == ["a", LOCK]


def test_a_limit_is_needed(tmp_path: Path) -> None:
    cache = triton(tmp_path, {"a": 0})
    for limit in (None, 0, -5):
        with pytest.raises(ValueError, match="has no limit"):
            evict(cache, limit)
    with pytest.raises(ValueError, match="above 0 bytes"):
        evict_in_background(-1, [cache])
    with pytest.raises(ValueError, match="no cache has a limit"):
        evict_in_background(caches=[cache])


@pytest.mark.parametrize("written", ["train.py", ".git/HEAD", "thesis.txt"])
@pytest.mark.parametrize("kind", ["hpu", "xla", "triton", "inductor"])
def test_a_folder_of_somebodys_work_is_left_alone(tmp_path: Path, kind: CacheKind, written: str) -> None:
    write(tmp_path / written, 100)
    write(tmp_path / "sub" / "code", 100)
    cache = CompileCache(kind, tmp_path, "--folder")
    for act in (lambda: evict(cache, 1, recently_s=0), lambda: evict_in_background(1, [cache])):
        with pytest.raises(ValueError, match="not a compile cache, and nothing is removed"):
            act()
    assert sorted(os.listdir(tmp_path)) == sorted([written.partition("/")[0], "sub"])


def test_the_folder_that_one_works_in_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "work" / "sub" / "notes", 100)
    monkeypatch.chdir(file.parent)
    for folder in (file.parent, tmp_path / "work", Path("/"), Path.home()):
        with pytest.raises(ValueError, match="a working folder"):
            evict(CompileCache("hpu", folder, "--folder"), 1, recently_s=0)
    assert file.exists()


def test_a_thread_evicts_after_a_write(tmp_path: Path) -> None:
    cache = triton(tmp_path, {"a": 1, "b": 2})
    with evict_in_background(250, [cache], look_s=0.01) as eviction:
        triton(tmp_path, {"c": 3})
        while not eviction.evictions:
            time.sleep(0.01)
    assert keys(eviction.evictions[0][1].removed) == ["a"]
    assert keys(entries_of(cache)) == ["b", "c"]


WRITER = """
import os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
for number in range(60):
    made = folder.with_name(f"{folder.name}-{name}-{number}")
    made.mkdir()
    (made / "kernel").write_bytes(b"k" * 1000)
    (made / "check").write_bytes(b"c" * 1000)
    for file in made.iterdir():
        os.utime(file, (1e9 + number, 1e9 + number))
    made.rename(folder / f"{name}-{number}")
held = folder / f"{name}-held"
held.mkdir()
with (held / "kernel").open("wb") as file:
    file.write(b"h" * 1000)
    file.flush()
    os.utime(held / "kernel", (1e9, 1e9))
    print("writing done", flush=True)
    sys.stdin.readline()
    assert (held / "kernel").read_bytes() == b"h" * 1000
"""
READER = """
import sys
from pathlib import Path
folder, seen = Path(sys.argv[1]), 0
for _ in range(150):
    for entry in folder.glob("*-*"):
        try:
            handle = open(entry / "kernel", "rb")
        except (FileNotFoundError, NotADirectoryError):
            continue                       # evicted: a miss, and compiled anew
        with handle:
            assert handle.read() in (b"k" * 1000, b"h" * 1000, b""), entry
            seen += 1
print(seen)
"""
EVICTOR = """
import sys
from pathlib import Path
from stepscope.remedies.compile_caches import CompileCache, EvictionBusy, evict
cache, removed = CompileCache("triton", Path(sys.argv[1]), ""), []
for _ in range(150):
    try:
        removed += [entry.key for entry in evict(cache, 60_000, recently_s=0).removed]
    except EvictionBusy:
        pass
print(*removed)
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )


def test_many_processes_lose_nothing(tmp_path: Path) -> None:
    racing = tmp_path / "cache"
    racing.mkdir()
    writers = [started(WRITER, str(racing), name) for name in ("one", "two", "three")]
    readers = [started(READER, str(racing)) for _ in range(2)]
    evictors = [started(EVICTOR, str(racing)) for _ in range(3)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing done\n"
    removed: list[str] = []
    for evictor in evictors:
        output, _ = evictor.communicate()
        assert evictor.returncode == 0
        removed += output.split()
    for reader in readers:
        reader.communicate()
        assert reader.returncode == 0
    cache = CompileCache("triton", racing, "")
    done = evict(cache, 60_000, recently_s=0)
    removed += keys(done.removed)
    for writer in writers:
        writer.communicate("go on\n")
        assert writer.returncode == 0
    left = keys(entries_of(cache))
    written = [f"{name}-{n}" for name in ("one", "two", "three") for n in [*range(60), "held"]]
    assert sorted(removed + left) == sorted(written)  # each is there or was removed, by one evictor
    assert {"one-held", "two-held", "three-held"} <= set(left)
    assert done.is_below
    assert [name for name in os.listdir(racing) if not re.match(r"(one|two|three)-", name)] == [LOCK]
