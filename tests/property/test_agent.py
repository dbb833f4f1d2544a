"""Whatever an agent is sent, over a socket or in files, it answers or hangs up, and leaves the program alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.protocol import CaptureOrder, Refusal, RequestFolder
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from tests.unit.agents import Process

LINES = st.sampled_from(
    [
        *("GET /status HTTP/1.1", "POST /captures HTTP/1.1", "DELETE /captures/c1 HTTP/1.1", "GET /captures HTTP/1.0"),
        *("GET /captures/../../etc/passwd HTTP/1.1", "POST /captures/c1/stop HTTP/1.1", "GET /", "BREW / HTTP/9.9"),
        *("Host: localhost", "Host: evil.example", "Authorization: Bearer TOKEN", "Authorization: Bearer wrong"),
        *("Content-Length: 9", "Content-Length: 9999999999999999999", "Content-Length: -3", "Content-Length: x"),
        *(
            "Transfer-Encoding: chunked",
            "Expect: 100-continue",
            "Connection: keep-alive",
            "Origin: null",
            ": ",
            " x: y",
        ),
        *("", "", "{}", '{"steps": 1}', '{"seconds": 1e999}', '{"options": {}}', "[" * 2000, "5\r\nabcde\r\n0\r\n"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
ORDERS = st.dictionaries(
    st.sampled_from(["steps", "seconds", "first_step", "timeout_s", "options", "more"]), JSON, max_size=4
)
WITHOUT_DEADLINE = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        patch.setattr("stepscope.record.agent.http._REQUEST_S", 0.5)
        patch.setattr("threading.excepthook", _fail)
        made = Process(Endpoint())
        yield made
        made.agent.close()


def _fail(arguments: threading.ExceptHookArgs) -> None:
    _thread_errors.append(repr(arguments.exc_value))


_thread_errors: list[str] = []


def goes_on(process: Process) -> None:
    """Steps can be taken and the agent answers; what a request has begun is ended."""
    process.take_steps(2)
    status, body = process.ask("GET", "/status")
    assert status == 200
    if body["capture"]:
        assert process.ask("DELETE", f"/captures/{body['capture']}")[0] == 200
    assert _thread_errors == []


def is_answer(data: bytes) -> bool:
    return data == b"" or data.startswith((b"HTTP/1.1 ", b"{"))  # the last for HTTP/0.9


@WITHOUT_DEADLINE
@given(data=st.binary(max_size=3000))
def test_any_bytes(process: Process, data: bytes) -> None:
    assert is_answer(process.send(data))
    goes_on(process)


@WITHOUT_DEADLINE
@given(lines=st.lists(LINES, max_size=9), close=st.sampled_from([True, True, True, True, True, True, True, False]))
def test_pieces_of_requests(process: Process, lines: list[str], close: bool) -> None:
    data = "\r\n".join([*lines, ""]).replace("TOKEN", process.agent.token)
    assert is_answer(process.send(data.encode(), close=close))
    goes_on(process)


@WITHOUT_DEADLINE
@given(
    method=st.sampled_from(["GET", "POST", "DELETE"]),
    target=st.text(st.characters(codec="ascii", exclude_characters=" \r\n\t\x0b\x0c\x1c\x1d\x1e\x1f"), max_size=60),
)
def test_any_target(process: Process, method: str, target: str) -> None:
    status, body = process.ask(method, f"/captures/{target}")
    assert status in (200, 400, 404, 405, 409)
    assert status == 200 or body["error"]
    goes_on(process)


@WITHOUT_DEADLINE
@given(body=JSON | ORDERS)
def test_any_order(process: Process, body: object) -> None:
    status, answer = process.ask("POST", "/captures", body)
    assert status in (201, 400, 412)
    assert status == 201 or answer["error"]
    goes_on(process)


@settings(deadline=None)
@given(body=JSON | ORDERS)
def test_an_order_that_is_taken_comes_back(body: object) -> None:
    order = taken(body)
    assert order is None or taken(json.loads(json.dumps(order.to_json()))) == order


def taken(body: object) -> CaptureOrder | None:
    """The order, or None where it is refused, which is all that may happen besides."""
    try:
        return CaptureOrder.from_json(body)
    except Refusal:
        return None


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_request_file(process: Process, tmp_path: Path, content: bytes) -> None:
    requests = tmp_path / "requests"
    requests.mkdir(exist_ok=True)
    (requests / "rank0-x.json").write_bytes(content)
    folder = RequestFolder(requests, 0, process.agent._service.handle)
    assert folder.poll() is True
    process.take_steps(3)
    process.ask("POST", "/captures/c1/stop")
    goes_on(process)
    folder.poll()
    reply = json.loads((requests / "rank0-x.reply").read_bytes())
    assert reply["status"] in (200, 201, 400, 404, 405, 409, 412)
    assert not (requests / "rank0-x.claimed").exists()
    (requests / "rank0-x.reply").unlink()


def test_hostile_things_in_the_place_of_requests(process: Process, tmp_path: Path) -> None:
    import os

    run = RunFolder.create(tmp_path, "run", RunManifest(command=()))
    run.requests.mkdir()
    secret = tmp_path / "secret"
    secret.write_text('{"steps": 1}')
    (run.requests / "rank0-link.json").symlink_to(secret)
    os.mkfifo(run.requests / "rank0-pipe.json")
    (run.requests / "rank0-folder.json").mkdir()
    (run.requests / "rank0-..json").write_text("{}")
    (run.requests / "rank0-long.json").write_text(" " * 70_000)
    folder = RequestFolder(run.requests, 0, process.agent._service.handle)
    folder.poll()
    goes_on(process)
    replies = {path.name: json.loads(path.read_bytes())["status"] for path in run.requests.glob("*.reply")}
    assert replies == {
        "rank0-link.reply": 400,
        "rank0-pipe.reply": 400,
        "rank0-folder.reply": 400,
        "rank0-long.reply": 413,
    }
