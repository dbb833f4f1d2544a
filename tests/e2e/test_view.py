"""`stepscope view` as a process: its address, who is refused, how it ends, and figures that are those of the JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import run_here
from tests.unit.small_traces import complete

SAMPLE = Path(__file__).parents[2] / "examples" / "gpt2_per_token_loss_cpu.json.gz"


def started(*words: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "stepscope", "view", *words, "--no-browser"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    return program, program.stdout.readline().strip()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    program, address = started(str(SAMPLE))
    yield program, address
    program.kill()
    program.communicate()


def opener(address: str) -> urllib.request.OpenerDirector:
    """A browser that has opened the address."""
    found = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    assert b"page.js" in found.open(address, timeout=60).read()
    return found


def answer(opened: urllib.request.OpenerDirector, address: str, name: str) -> Any:
    return json.loads(opened.open(f"{address.partition('?')[0]}api/{name}", timeout=120).read())


def printed(*words: str) -> Any:
    return json.loads(run_here(*words).out)


def test_the_token_is_needed(served: tuple[subprocess.Popen[str], str]) -> None:
    address = served[1]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{address.partition('?')[0]}api/diagnosis", timeout=60)
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "evil.example"}), timeout=60)


def test_its_figures_are_those_of_the_commands(served: tuple[subprocess.Popen[str], str]) -> None:
    address, trace = served[1], str(SAMPLE)
    opened = opener(address)
    diagnosis = printed("diagnose", trace, "--json", "-", "--all")
    unreadable = diagnosis.pop("unreadable")
    shown = answer(opened, address, "diagnosis")
    for each in (*diagnosis["findings"], *shown["findings"]):  # depends on the folder
        each["remedy"].pop("diff")
    assert (shown, unreadable) == (diagnosis, [])
    for name in ("steps", "operators", "input"):
        assert answer(opened, address, name) == printed(name, trace, "--format", "json"), name
    for name in ("lines", "modules", "energy"):
        assert answer(opened, address, name) == printed(name, trace, "--json", "-"), name
    assert answer(opened, address, "memory") == printed("memory", trace, "--format", "json")
    assert answer(opened, address, "whatif?remove=python") == printed(
        "whatif", trace, "--remove", "python", "--json", "-"
    )
    assert set(answer(opened, address, "session")["documents"]) >= {"diagnosis", "timeline", "whatif", "plan"}


def test_a_trace_opens_no_file_but_source(tmp_path: Path) -> None:
    """A recording may name any file: what is no Python is not shown, and what lies elsewhere is in no report."""
    elsewhere = tmp_path / "elsewhere"
    here = tmp_path / "here"
    for folder in (elsewhere, here):
        folder.mkdir()
        (folder / "train.py").write_text(f"secret = '{folder.name}'\n")
    (elsewhere / "keys").write_text("secret = 'keys'\n")
    files = [str(here / "train.py"), str(elsewhere / "train.py"), str(elsewhere / "keys")]
    events = [complete(f"ProfilerStep#{at}", "user_annotation", 1000 * at, 900) for at in range(3)]
    for at, file in enumerate(files):
        frame = complete(f"{file}(1): main", "python_function", 1000 * at + 10, 800)
        events += [frame | {"args": {"Python id": at}}, complete("aten::mm", "cpu_op", 1000 * at + 20, 700)]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))

    program, address = started(str(trace))
    opened = opener(address)
    assert "elsewhere" in answer(opened, address, f"source?file={files[1]}")["text"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        answer(opened, address, f"source?file={files[2]}")
    program.kill()
    program.communicate()

    report = tmp_path / "report.html"
    assert run_here("diagnose", trace, "--html", report, folder=here).code == 0
    text = report.read_text()
    assert "secret = 'here'" in text.replace("\\u0027", "'")
    assert "secret = 'elsewhere'" not in text.replace("\\u0027", "'")
    assert "secret = 'keys'" not in text.replace("\\u0027", "'")


def test_a_trace_that_is_written_again_is_told_and_read_with_the_page(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"

    def write(name: str) -> None:
        events = [complete(f"ProfilerStep#{at}", "user_annotation", 1000 * at, 900) for at in range(3)]
        events += [complete(name, "cpu_op", 1000 * at + 10, 800) for at in range(3)]
        (tmp_path / "new.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        os.replace(tmp_path / "new.json", trace)

    write("aten::mm")
    program, address = started(str(trace))
    opened = opener(address)

    def asked() -> tuple[str, bool]:
        found = opened.open(f"{address.partition('?')[0]}api/operators", timeout=120)
        return json.loads(found.read())[0]["name"], "stepscope-changed" in found.headers

    assert asked() == ("aten::mm", False)
    write("aten::add")
    assert asked() == ("aten::mm", True)
    opened.open(address.partition("?")[0], timeout=60).read()
    assert asked() == ("aten::add", False)
    program.kill()
    program.communicate()


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C of another process")
def test_control_c_ends_it_quietly() -> None:
    program, address = started(str(SAMPLE))
    opener(address)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0
    assert (out, "Traceback" in err) == ("", False)


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C of another process")
def test_control_c_ends_it_quietly_while_it_computes() -> None:
    program, address = started(str(SAMPLE))
    opened = opener(address)

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it breaks off
            answer(opened, address, "plan")

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.5)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    asking.join(60)
    assert program.returncode == 0
    assert (out, "Traceback" in err, "Error" in err) == ("", False, False)


def test_it_ends_after_a_time_without_requests() -> None:
    program, _ = started(str(SAMPLE), "--idle-after", "1s")
    program.communicate(timeout=120)
    assert program.returncode == 0


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": [{"ph"')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in (
            (str(broken),),
            (str(tmp_path / "nothing.json"),),
            (str(tmp_path),),
            (str(SAMPLE), "--host", "0.0.0.0"),
            (str(SAMPLE), "--host", "no.such.host.invalid", "--allow-remote"),
            (str(SAMPLE), "--port", port),
        ):
            assert run_here("view", *words, "--no-browser").mistake(), words
