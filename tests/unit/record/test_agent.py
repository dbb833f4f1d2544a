"""An agent: what it answers, whom it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.errors import AgentError, UsageError
from stepscope.record.agent import http as agent_http
from stepscope.record.agent import server as agent_module
from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.protocol import AgentFile, agent_of_process, agents_in, read_agent_file, user_agents
from stepscope.record.agent.server import Agent, begin_capture, memory_now, serve_for_run, start_server
from stepscope.record.controller import StepController
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from tests.unit.agents import Process, Recording, everything

TOKEN = "a-token-of-the-users"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("STEPSCOPE_RUN", raising=False)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process(Endpoint())
    yield made
    made.agent.close()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "my-run", RunManifest(command=("train.py",)))


class TestCaptures:
    def test_memory_of_process_and_devices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = SimpleNamespace(
            is_initialized=lambda: True, device_count=lambda: 3, memory_allocated=lambda each: 2**each
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        found = memory_now()
        assert found["device_bytes"] == 7
        assert sys.platform != "linux" or (found["process_bytes"] or 0) > 2**20
        cuda.device_count = lambda: 1 / 0  # it never keeps the agent from answering
        assert memory_now()["device_bytes"] is None

    def test_status(self, process: Process) -> None:
        process.take_steps(3)
        status, body = process.ask("GET", "/status")
        assert status == 200
        assert {name: body[name] for name in ("agent", "pid", "rank", "world_size", "step", "recording")} == {
            "agent": 1,
            "pid": os.getpid(),
            "rank": 0,
            "world_size": 1,
            "step": 3,
            "recording": False,
        }

    def test_some_steps(self, process: Process) -> None:
        status, begun = process.ask("POST", "/captures", {"steps": 2, "options": {"stacks": True}})
        assert (status, begun["state"], begun["files"]) == (201, "waiting", [])
        assert process.ask("GET", "/captures/c1/trace")[0] == 409
        process.take_steps(2)
        assert process.ask("GET", "/captures/c1")[1]["state"] == "recording"
        assert process.ask("GET", "/status")[1]["recording"] is True
        process.take_steps(2)
        status, done = process.ask("GET", "/captures/c1?wait=5")
        assert (status, done["state"], done["first_step"], done["steps"]) == (200, "done", 2, 2)
        assert [file["name"] for file in done["files"]] == ["trace-1.json.gz", "trace-1.json.gz.lines.parquet"]
        recorded = {"steps": [2, 3], "stacks": True}
        assert json.loads(process.ask("GET", "/captures/c1/trace")[1]) == recorded
        assert json.loads(process.ask("GET", "/captures/c1/files/trace-1.json.gz")[1]) == recorded
        assert process.ask("GET", "/captures/c1/files/trace-1.json.gz.lines.parquet") == (200, b"lines")

    def test_until_it_is_stopped(self, process: Process) -> None:
        process.ask("POST", "/captures", {})
        process.take_steps(5)
        assert process.ask("POST", "/captures/c1/stop")[1]["state"] == "recording"
        process.take_steps(1)
        done = process.ask("GET", "/captures/c1")[1]
        assert (done["state"], done["first_step"], done["steps"]) == ("done", 2, 4)

    def test_cancelling(self, process: Process) -> None:
        process.ask("POST", "/captures", {"steps": 100})
        process.take_steps(5)
        assert process.ask("DELETE", "/captures/c1")[1]["state"] == "cancelled"
        assert process.ask("DELETE", "/captures/c1")[1]["state"] == "cancelled"
        assert process.ask("POST", "/captures/c1/stop")[0] == 409
        assert process.ask("GET", "/captures/c1/trace")[0] == 409
        assert process.ask("POST", "/captures", {"steps": 1})[0] == 201

    def test_the_profiler_is_ended_by_the_thread_that_takes_the_steps(
        self, process: Process, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Recording, "ended_by", [])
        process.ask("POST", "/captures", {"steps": 100, "timeout_s": 60})
        process.take_steps(5)
        assert process.ask("DELETE", "/captures/c1")[1]["state"] == "cancelled"
        assert process.ask("POST", "/captures", {"steps": 2})[0] == 201
        assert Recording.ended_by == []
        process.take_steps(1)
        assert Recording.ended_by == [threading.get_ident()]
        process.take_steps(4)
        assert process.ask("GET", "/captures/c2")[1]["steps"] == 2

    def test_what_was_saved_outlives_a_cancel(self, process: Process) -> None:
        process.ask("POST", "/captures", {"steps": 1})
        process.take_steps(3)
        assert process.ask("DELETE", "/captures/c1")[1]["state"] == "done"

    def test_from_a_step_on(self, process: Process) -> None:
        process.take_steps(4)
        for passed in (3, 4):
            status, body = process.ask("POST", "/captures", {"steps": 1, "first_step": passed})
            assert (status, body["error"]) == (412, f"step {passed} is no longer ahead: step 4 has begun")
        process.ask("POST", "/captures", {"steps": 2, "first_step": 9})
        process.take_steps(20)
        done = process.ask("GET", "/captures/c1")[1]
        assert (done["first_step"], done["steps"]) == (9, 2)

    def test_a_step_that_passes_while_it_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        controller = StepController(make_recording=Recording)
        request = controller.request

        def overtaken(*arguments: Any) -> Any:
            handle = request(*arguments)
            controller.step_boundary()
            return handle

        monkeypatch.setattr(controller, "request", overtaken)
        from stepscope.record.agent.protocol import CaptureOrder, Refusal

        with pytest.raises(Refusal, match="step 1 is no longer ahead: step 1 has begun"):
            begin_capture(controller, CaptureOrder(steps=1, first_step=1), Path("unused"))
        monkeypatch.undo()
        assert not begin_capture(controller, CaptureOrder(steps=1), Path("unused")).is_recording

    def test_one_at_a_time(self, process: Process) -> None:
        process.ask("POST", "/captures", {"steps": 1})
        status, body = process.ask("POST", "/captures", {"steps": 1})
        assert (status, body["error"]) == (409, "the capture c1 is under way; stop or cancel it first")

    def test_without_a_step_it_ends_with_a_sentence(self, process: Process) -> None:
        process.ask("POST", "/captures", {"steps": 1, "timeout_s": 0.05})
        ended = process.ask("GET", "/captures/c1?wait=20")[1]
        assert ended["state"] == "failed"
        assert ended["problem"].startswith("no step ended within 0.05 s: ")

    def test_an_answer_comes_when_the_capture_ends(self, process: Process) -> None:
        process.ask("POST", "/captures", {"steps": 1})
        threading.Timer(0.2, process.take_steps, [4]).start()
        assert process.ask("GET", "/captures/c1?wait=20")[1]["state"] == "done"

    def test_the_last_sixteen_are_remembered_and_the_files_of_older_ones_removed(self, process: Process) -> None:
        folder = None
        for number in range(18):
            process.ask("POST", "/captures", {"steps": 1})
            process.take_steps(3)
            folder = folder or process.agent._service._folder
            assert process.ask("GET", f"/captures/c{number + 1}")[1]["state"] == "done"
        captures = process.ask("GET", "/captures")[1]["captures"]
        assert [capture["id"] for capture in captures] == [f"c{number}" for number in range(3, 19)]
        assert folder is not None
        assert len(list(folder.iterdir())) == 2 * 16
        assert folder.stat().st_mode & 0o777 == 0o700
        process.agent.close()
        assert not folder.exists()

    def test_a_failing_program(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: Any) -> Any:
            raise MemoryError("too much")

        monkeypatch.setattr(process.controller, "request", fail)
        status, body = process.ask("POST", "/captures", {})
        assert (status, body["error"]) == (500, "the agent failed: MemoryError: too much")
        assert process.ask("GET", "/status")[0] == 200

    @pytest.mark.parametrize(
        ("body", "named"),
        [
            ([], "JSON object"),
            ({"step": 5}, "`step`"),
            ({"steps": 0}, "steps"),
            ({"steps": True}, "steps"),
            ({"steps": "5"}, "steps"),
            ({"steps": 10**400}, "steps"),
            ({"seconds": 10**400}, "seconds"),
            ({"seconds": float("nan")}, "seconds"),
            ({"seconds": -1}, "seconds"),
            ({"timeout_s": "x" * 99}, "timeout_s"),
            ({"steps": 1, "seconds": 1}, "steps or seconds, not both"),
            ({"first_step": -1}, "first_step"),
            ({"options": {"stack": True}}, "'stack'"),
            ({"options": {"stacks": 1}}, "options.stacks"),
            ({"x" * 500: 1}, "xxx"),
            ({"options": {"x" * 500: True}}, "xxx"),
        ],
    )
    def test_orders_that_make_no_sense(self, process: Process, body: Any, named: str) -> None:
        status, answer = process.ask("POST", "/captures", body)
        assert status == 400
        assert named in answer["error"]
        assert len(answer["error"]) < 200
        assert process.ask("GET", "/captures")[1] == {"captures": []}

    @pytest.mark.parametrize(
        ("method", "target", "status"),
        [
            ("GET", "/", 404),
            ("GET", "/captures/c9", 404),
            ("GET", "/captures/../../etc/passwd", 404),
            ("GET", "/captures/c1/files/../../../etc/passwd", 404),
            ("GET", "/captures/c1/files/..", 404),
            ("GET", "/captures/c1/files/%2e%2e%2fetc%2fpasswd", 404),
            ("POST", "/status", 405),
            ("DELETE", "/captures", 405),
            ("GET", "/shutdown", 405),
            ("GET", "/captures/c1/stop", 405),
            ("POST", "/captures/c1/trace", 405),
            ("POST", "/captures/c1", 405),
            ("GET", "/captures/c1?wait=soon", 400),
            ("PUT", "/captures", 501),
            ("OPTIONS", "/captures", 501),
        ],
    )
    def test_what_there_is_not(self, process: Process, method: str, target: str, status: int) -> None:
        process.ask("POST", "/captures", {"steps": 1})
        process.take_steps(3)
        assert process.ask(method, target)[0] == status


class TestStrangers:
    @pytest.mark.parametrize("shown", [None, "Bearer wrong", "Bearer", TOKEN, f"Basic {TOKEN}", "Bearer t\xf6ken"])
    def test_a_token_is_needed(self, shown: str | None) -> None:
        process = Process(Endpoint(token=TOKEN))
        try:
            status, body = process.ask("GET", "/status", Authorization=shown)
            assert (status, body["error"]) == (401, "the token is missing or wrong; it is in the agent's file")
            assert process.ask("GET", "/status")[0] == 200
        finally:
            process.agent.close()

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("localhost", 200),
            ("localhost:8790", 200),
            ("127.0.0.1:1", 200),
            ("[::1]:8790", 200),
            (socket.gethostname(), 200),
            ("evil.example", 403),
            ("localhost.evil.example:80", 403),
            ("127.0.0.1.evil.example", 403),
            (None, 403),
        ],
    )
    def test_names_that_others_have_a_say_in(self, process: Process, host: str | None, status: int) -> None:
        assert process.ask("GET", "/status", Host=host)[0] == status

    def test_web_pages(self, process: Process) -> None:
        status, body = process.ask("GET", "/status", Origin="http://localhost")
        assert (status, body["error"]) == (403, "an agent does not talk to web pages")
        head = process.send(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n").partition(b"\r\n\r\n")[0]
        assert b"Access-Control" not in head

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"Content-Length": "99999999"}, 413),
            ({"Content-Length": "-1"}, 400),
            ({"Content-Length": "9" * 5000}, 400),
            ({"Content-Length": "12"}, 400),
            ({"Content-Length": None, "Transfer-Encoding": "chunked"}, 400),
        ],
    )
    def test_lengths(self, process: Process, headers: dict[str, Any], status: int) -> None:
        assert process.ask("POST", "/captures", **headers)[0] == status

    def test_long_heads_and_bodies(self, process: Process) -> None:
        for data in (b"GET /" + b"x" * 10**6, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10**5, b"\0" * 10**6):
            answer = process.send(data)
            assert answer == b"" or b"HTTP/1.1 4" in answer
        body = {"options": ["x" * 70_000]}
        assert process.ask("POST", "/captures", body)[0] == 413
        assert process.ask("GET", "/status")[0] == 200

    def test_nested_json(self, process: Process) -> None:
        data = b"[" * 60_000
        head = f"POST /captures HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {process.agent.token}\r\n"
        answer = process.send(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert b"the request is not JSON" in answer

    def test_slow_clients_are_left(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agent_http, "_REQUEST_S", 0.2)
        with process.connected() as connection:
            connection.sendall(b"GET /status HT")
            assert b" 408 " in everything(connection)

    def test_a_slow_body_is_left(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agent_http, "_REQUEST_S", 0.2)
        head = f"POST /captures HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {process.agent.token}\r\n"
        with process.connected() as connection:
            connection.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
            assert b" 408 " in everything(connection)
        assert process.ask("GET", "/captures")[1] == {"captures": []}

    def test_an_honest_client_is_answered_while_200_drip(self, process: Process) -> None:
        stop = threading.Event()
        connected = threading.Semaphore(0)

        def drip() -> None:
            told = False
            while not stop.is_set():
                with contextlib.suppress(OSError), process.connected() as connection:
                    for byte in b"GET /status HTTP/1.1\r\n" + b"X: y\r\n" * 1000:
                        connection.sendall(bytes([byte]))
                        if not told:
                            told = True
                            connected.release()
                        if stop.wait(0.5):
                            break

        crowd = [threading.Thread(target=drip, daemon=True) for _ in range(200)]
        for thread in crowd:
            thread.start()
        try:
            for _ in crowd:
                assert connected.acquire(timeout=60)
            assert [process.ask("GET", "/status")[0] for _ in range(20)] == [200] * 20
            serving = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
            assert len(serving) <= agent_http._MAX_CONNECTIONS
        finally:
            stop.set()
            for thread in crowd:
                thread.join(60)
        assert process.ask("GET", "/status")[0] == 200

    def test_only_so_many_are_served_at_once(self, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
        process.ask("POST", "/captures", {"steps": 1})
        wait = (
            f"GET /captures/c1?wait=60 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {process.agent.token}\r\n"
        )
        with contextlib.ExitStack() as stack:
            for _ in range(agent_http._MAX_CONNECTIONS):
                stack.enter_context(process.connected()).sendall(f"{wait}\r\n".encode())
            answer = b""
            while b" 503 " not in answer:  # until all of them are being answered
                answer = process.send(b"GET /status HTTP/1.1\r\n\r\n")
                assert b"HTTP/1.1 " in answer
            process.take_steps(4)
            while process.send(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503"):
                pass
        assert process.ask("GET", "/status")[0] == 200

    def test_nothing_is_written_to_standard_error(
        self, process: Process, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: Any) -> Any:
            raise ZeroDivisionError

        monkeypatch.setattr(process.agent._server, "handle", fail)
        assert process.send(b"nonsense\r\n\r\n") != b""
        with pytest.raises(IndexError):
            process.ask("GET", "/status")
        assert capfd.readouterr().err == ""


class TestPlaces:
    def test_a_unix_socket(self, tmp_path: Path) -> None:
        path = tmp_path / "agent.sock"
        process = Process(Endpoint(socket=path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert process.ask("GET", "/status", Authorization=None)[0] == 200
        with pytest.raises(AgentError, match=r"the agent cannot listen on .*agent\.sock: Address already in use"):
            Process(Endpoint(socket=path))
        process.agent.close()
        assert not path.exists()

    def test_a_unix_socket_with_a_token(self, tmp_path: Path) -> None:
        process = Process(Endpoint(socket=tmp_path / "agent.sock", token=TOKEN))
        assert process.ask("GET", "/status", Authorization=None)[0] == 401
        assert process.ask("GET", "/status")[0] == 200
        process.agent.close()

    def test_a_socket_that_a_killed_process_left(self, tmp_path: Path) -> None:
        path = tmp_path / "agent.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        process = Process(Endpoint(socket=path))
        assert process.ask("GET", "/status")[0] == 200
        process.agent.close()

    def test_a_file_in_its_place_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "precious"
        path.write_text("data")
        with pytest.raises(AgentError, match="cannot listen on"):
            Process(Endpoint(socket=path))
        assert path.read_text() == "data"

    @pytest.mark.parametrize(
        ("endpoint", "sentence"),
        [
            (Endpoint(port=-1), "a port is a number from 0 to 65535, not -1"),
            (Endpoint(port="80"), "a port is a number from 0 to 65535, not '80'"),  # type: ignore[arg-type]
            (Endpoint(address=""), "an agent needs an address to listen on"),
            (Endpoint(token="short"), "at least 16 letters"),
            (Endpoint(token="with space in the middle"), "at least 16 letters"),
            (Endpoint(socket=Path("x"), port=1), "on a port or on a Unix socket, not both"),
        ],
    )
    def test_mistakes(self, endpoint: Endpoint, sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            endpoint.check()

    def test_a_port_that_is_taken(self, process: Process) -> None:
        port = int(process.agent.address.rsplit(":", 1)[1])
        with pytest.raises(AgentError, match=f"the agent cannot listen on 127.0.0.1 port {port}: Address already"):
            Process(Endpoint(port=port))

    def test_a_name_that_is_no_address_of_this_machine(self) -> None:
        with pytest.raises(AgentError, match=r"the agent cannot listen on 192\.0\.2\.1 port 0: "):
            Process(Endpoint(address="192.0.2.1"))


class TestFiles:
    def test_an_agent_is_found_by_its_process(self, process: Process) -> None:
        found = agent_of_process(os.getpid())
        assert found is not None
        assert (found.address, found.token) == (process.agent.address, process.agent.token)
        assert process.agent.token not in repr(process.agent)
        assert len(process.agent.token) >= 40
        folder = user_agents()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
        process.agent.close()
        assert list(folder.iterdir()) == []

    def test_an_agent_of_a_run(self, run: RunFolder) -> None:
        process = Process(Endpoint(), run, rank=3, world_size=8)
        place = run.agents / "rank3.json"
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        assert read_agent_file(place) == agent_of_process(os.getpid())
        process.ask("POST", "/captures", {"steps": 1})
        process.take_steps(3)
        done = process.ask("GET", "/captures/c1")[1]
        assert done["in_run"] == "rank3/trace-1.json.gz"
        assert (run.path / done["in_run"]).is_file()
        process.agent.close()
        assert not place.exists()
        assert (run.path / done["in_run"]).is_file()

    def test_a_folder_that_others_can_read_is_closed(self, tmp_path: Path) -> None:
        user_agents().mkdir(parents=True, mode=0o755)
        Process(Endpoint()).agent.close()
        assert stat.S_IMODE(user_agents().stat().st_mode) == 0o700

    def test_a_helper_does_not_take_its_ranks_place(self, run: RunFolder) -> None:
        main = AgentFile("127.0.0.1:1", TOKEN, os.getppid(), socket.gethostname(), namespace=_namespace())
        from stepscope.record.agent.protocol import write_agent_file

        write_agent_file(run.agents / "rank0.json", main)
        process = Process(Endpoint(), run)
        assert read_agent_file(run.agents / "rank0.json") == main
        process.agent.close()
        assert read_agent_file(run.agents / "rank0.json") == main

    def test_the_files_of_ended_processes_are_taken_away(self, tmp_path: Path) -> None:
        from stepscope.record.agent.protocol import write_agent_file

        ended = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", ""])
        os.waitpid(ended, 0)
        here = {"host": socket.gethostname(), "namespace": _namespace()}
        for name, content in {
            "gone": AgentFile("a:1", "t", ended, **here),
            "other-machine": AgentFile("a:1", "t", ended, "other"),
            "other-container": AgentFile("a:1", "t", ended, socket.gethostname(), namespace="pid:[1]"),
        }.items():
            write_agent_file(tmp_path / f"{name}.json", content)
        assert sorted(agent.host for agent in agents_in(tmp_path)) == sorted(["other", socket.gethostname()])
        assert sorted(path.stem for path in tmp_path.glob("*.json")) == ["other-container", "other-machine"]

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"address": 1}', b"[" * 60_000])
    def test_what_is_no_agents_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x.json").write_bytes(content)
        assert read_agent_file(tmp_path / "x.json") is None
        assert agents_in(tmp_path) == agents_in(tmp_path / "missing") == []


class TestStartServer:
    @pytest.fixture(autouse=True)
    def _without_torch(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        controller = StepController(make_recording=Recording)
        monkeypatch.setattr(agent_module, "installed_controller", lambda: controller)
        yield
        if agent_module._agent is not None:
            agent_module._agent.close()

    def test_one_agent_a_process(self, capsys: pytest.CaptureFixture[str]) -> None:
        first = start_server()
        assert start_server() is first
        assert capsys.readouterr().err == ""
        assert start_server(port=1) is first
        assert f"this process already has an agent at {first.address}" in capsys.readouterr().err
        first.close()
        first.close()
        second = start_server()
        assert second is not first

    def test_a_socket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert start_server(socket="agent.sock").address == f"unix:{tmp_path / 'agent.sock'}"

    def test_in_a_run(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STEPSCOPE_RUN", str(run.path))
        monkeypatch.setenv("RANK", "2")
        assert agents_in(run.agents) == []
        agent = start_server()
        assert [(found.rank, found.address) for found in agents_in(run.agents)] == [(2, agent.address)]

    def test_for_a_run(self, run: RunFolder) -> None:
        agent = serve_for_run(run, 1)
        assert isinstance(agent, Agent)
        assert serve_for_run(run, 1) is agent
        assert [found.rank for found in agents_in(run.agents)] == [1]

    def test_a_run_goes_on_without(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*arguments: Any, **named: Any) -> Any:
            raise AgentError("no port is free")

        monkeypatch.setattr(Endpoint, "listen", fail)
        assert serve_for_run(run, 0) is None
        assert capsys.readouterr().err == "stepscope: the program runs without an agent: no port is free\n"

    def test_shutdown(self) -> None:
        agent = start_server()
        process = Process.__new__(Process)
        process.agent = agent
        assert process.ask("POST", "/shutdown") == (200, {"shutdown": True})
        deadline = time.monotonic() + 20
        while agent_module._agent is not None or list(user_agents().iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_child_neither_keeps_the_port_nor_takes_the_files(self) -> None:
        agent = start_server()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                agent._at_exit()
                code = 0 if agent_module._agent is None and agent._server.socket.fileno() == -1 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert agent_of_process(os.getpid()) is not None


def _namespace() -> str:
    from stepscope.record.agent.protocol import own_namespace

    return own_namespace()
