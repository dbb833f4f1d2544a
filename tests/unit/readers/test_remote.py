"""Traces behind URLs: a real server on this machine, which can be slow, cut what it sends, fail, or change the file."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stepscope.commands import main
from stepscope.errors import StepscopeError, TooLargeError, UnreadableTraceError, UsageError
from stepscope.readers import open_trace, remote, trace_files
from stepscope.trace.cache import TraceCache
from tests.e2e.test_terminal import WORDS
from tests.simulator.ranks import write_ranks

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


@dataclass
class Served:
    """What the server has, and what goes wrong.

    Attributes:
        fails: how many of the next requests are answered with 503.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    address: str = ""
    requests: list[str] = field(default_factory=list)
    fails: int = 0
    wrong: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    has_tags: bool = True

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


class _Handler(BaseHTTPRequestHandler):
    served: Served

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def _answer(self, *, with_content: bool) -> None:
        served = self.served
        served.requests.append(f"{self.command} {self.path}")
        name = self.path.strip("/").partition("?")[0]
        if served.fails > 0:
            served.fails -= 1
            self.send_error(503)
        elif served.wrong == "loop":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif served.wrong.isdigit():
            self.send_error(int(served.wrong))
        elif name in served.files:
            self._send(served.files[name], with_content=with_content)
        elif found := [each for each in served.files if each.startswith(f"{name}/")]:
            links = "".join(f'<a href="{each.removeprefix(name + "/")}">x</a>' for each in found)
            self._send(f"<html><a href='../'>up</a>{links}".encode(), with_content=with_content, kind="text/html")
        else:
            self.send_error(404)

    def _send(self, data: bytes, *, with_content: bool, kind: str = "application/octet-stream") -> None:
        served = self.served
        self.send_response(200)
        self.send_header("Content-Type", kind)
        more = 1000 if served.wrong == "length" and not with_content else 0
        self.send_header("Content-Length", str(len(data) + more))
        if served.has_tags:
            self.send_header("ETag", f'"{hash(data)}"')
        for name, value in served.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if not with_content:
            return
        half = len(data) // 2
        self.wfile.write(data[:half])
        if served.wrong == "changes":
            served.files = {name: each + b" " for name, each in served.files.items()}
        if served.wrong == "silent":
            threading.Event().wait(1.0)
        if served.wrong != "cut":
            self.wfile.write(data[half:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    write_ranks(tmp_path / "here", 3, lambda step: 1, layers=2, steps=6)
    files = {f"ranks/{file.name}": file.read_bytes() for file in (tmp_path / "here").iterdir()}
    found = Served({**files, "plain.json": gzip.decompress(files["ranks/rank0.json.gz"])})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": found}))
    server.daemon_threads = True
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path / "cache"))
    yield found
    server.shutdown()
    server.server_close()


def sentence(url: str) -> str:
    with pytest.raises(UnreadableTraceError) as raised:
        open_trace(url)
    assert "Traceback" not in str(raised.value)
    return str(raised.value)


def test_a_trace_behind_a_url_is_that_of_the_file(served: Served, tmp_path: Path) -> None:
    here = open_trace(tmp_path / "here" / "rank0.json.gz")
    there = open_trace(served.url("ranks/rank0.json.gz"))
    assert there.device_work.equals(here.device_work)
    assert there.operators.equals(here.operators)
    assert there.metadata.path == served.url("ranks/rank0.json.gz")
    assert open_trace(Path(served.url("plain.json"))).device_work.height == here.device_work.height


def test_what_is_kept_is_used_until_the_content_changes(served: Served, tmp_path: Path) -> None:
    cache, url = TraceCache(tmp_path / "traces"), served.url("plain.json")
    first = open_trace(url, cache=cache)
    served.requests.clear()
    assert open_trace(url, cache=cache).identity == first.identity
    assert not [each for each in served.requests if each.startswith("GET")]
    served.files["plain.json"] = gzip.decompress(served.files["ranks/rank1.json.gz"])
    changed = open_trace(url, cache=cache)
    assert (first.metadata.rank, changed.metadata.rank) == (0, 1)
    served.has_tags = False  # nothing tells whether it changed: it is read each time
    served.requests.clear()
    assert open_trace(url, cache=cache).metadata.rank == 1
    assert "GET /plain.json" in served.requests


def test_a_folder_of_ranks_is_diagnosed(served: Served, tmp_path: Path) -> None:
    assert [file.name for file in trace_files(served.url("ranks"))] == [f"rank{rank}.json.gz" for rank in range(3)]
    target = tmp_path / "report.json"
    assert main(["diagnose", served.url("ranks/"), "--json", str(target)]) == 0
    found = json.loads(target.read_bytes())
    assert [each["trace"]["rank"] for each in found["ranks"]] == [0, 1, 2]
    assert found["ranks"][1]["trace"]["path"] == served.url("ranks/rank1.json.gz")


@pytest.mark.slow
def test_every_command_that_reads_a_trace_reads_it_there(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, path = served.url("plain.json"), tmp_path / "plain.json"
    path.write_bytes(served.files["plain.json"])

    def answer(trace: str, words: tuple[str, ...]) -> tuple[int, str, str]:
        code, said = main([trace if word == "T" else word for word in words]), capsys.readouterr()
        out, error = ("".join(each.split()).replace(trace, "TRACE") for each in said)  # lines break elsewhere
        return code, out, error

    for command, (words, *_) in WORDS.items():
        assert answer(url, (command, *words)) == answer(str(path), (command, *words)), command


def test_one_rank_that_is_cut_does_not_stop_the_others(served: Served, tmp_path: Path) -> None:
    served.files["ranks/rank1.json.gz"] = b""
    target = tmp_path / "report.json"
    assert main(["diagnose", served.url("ranks"), "--json", str(target)]) == 0
    found = json.loads(target.read_bytes())
    assert [each["trace"]["rank"] for each in found["ranks"]] == [0, 2]
    assert "empty" in found["unreadable"][0]["reason"]


def test_an_overloaded_server_is_asked_again_a_few_times(served: Served) -> None:
    pytest.importorskip("aiohttp_retry")
    served.fails = remote.TRIES - 1
    assert open_trace(served.url("plain.json")).metadata.rank == 0
    served.fails = 1000
    assert "503" in sentence(served.url("plain.json"))
    assert 1000 - served.fails <= 2 * remote.TRIES


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("cut", "was cut"), ("length", "was cut"), ("loop", "redirected"), ("changes", "changed while"),
     ("403", "denied"), ("401", "credentials"), ("404", "no file"), ("500", "500")],
)  # fmt: skip
def test_what_fails_is_one_sentence(served: Served, wrong: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    served.wrong = wrong
    assert says in sentence(served.url("plain.json"))
    assert main(["steps", served.url("plain.json"), "--no-cache"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_silent_server_is_not_awaited_for_ever(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.1)
    monkeypatch.setattr(remote, "_LISTED_FOR_S", 0.1)  # another file system than that of other tests
    served.wrong = "silent"
    assert "sent nothing" in sentence(served.url("plain.json"))


def test_what_a_server_packs_is_unpacked_within_limits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.files["plain.json"] = gzip.compress(served.files["plain.json"])
    served.headers = {"Content-Encoding": "gzip"}
    assert open_trace(served.url("plain.json")).metadata.rank == 0
    monkeypatch.setenv("STEPSCOPE_LIMITS", "bytes=1000")
    with pytest.raises(TooLargeError):
        open_trace(served.url("plain.json"))


def test_an_extra_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(remote._LIBRARIES, "s3", "a_library_that_is_missing")
    with pytest.raises(UsageError, match=r"stepscope\[cloud\]"):
        open_trace("s3://bucket/trace.json")


@pytest.mark.parametrize(
    ("argument", "url"),
    [("s3://bucket/a/b.json", "s3://bucket/a/b.json"), (Path("s3://bucket/a"), "s3://bucket/a"),
     (Path("https://h:1/a"), "https://h:1/a"), ("GS://bucket/a", "gs://bucket/a"), ("traces/a.json", None),
     ("-", None), ("c:/traces", None), ("s3:", None), ("file:///etc/passwd", None)],
)  # fmt: skip
def test_urls_are_told_from_paths(argument: str | Path, url: str | None) -> None:
    assert remote.url_of(argument) == url


def test_secrets_in_urls_are_not_shown(served: Served) -> None:
    assert remote.shown("https://user:word@host:8/a.json?token=secret") == "https://host:8/a.json"
    assert remote.shown("ssh://user:word@host/a.json") == "ssh://user@host/a.json"
    assert (
        remote.shown("abfs://container@account.dfs.core.windows.net/a")
        == "abfs://container@account.dfs.core.windows.net/a"
    )
    trace = open_trace(served.url("plain.json?token=secret"))
    assert trace.metadata.path == served.url("plain.json")
    with pytest.raises(StepscopeError) as raised:
        open_trace(served.url("missing.json?token=secret"))
    assert "secret" not in str(raised.value)
    served.wrong = "403"
    assert "secret" not in sentence(served.url("plain.json?token=%2Fsecret"))
