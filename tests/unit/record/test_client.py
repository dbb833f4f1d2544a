"""The client: whom a target means, the same steps of several processes, and sentences for what goes wrong."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from stepscope.errors import AgentError, UsageError
from stepscope.record.agent import client as client_group
from stepscope.record.agent.client import AgentClient, CaptureState, HttpTransport, RefusedError, start_together
from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.protocol import CaptureOrder, agent_of_process, write_agent_file
from stepscope.record.agent.targets import clients_for
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.schedule import RecordOptions
from tests.unit.agents import Process

STEP_S = 0.005


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run", RunManifest(command=()))


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process(Endpoint())
    yield made
    made.agent.close()


@contextmanager
def ranks(run: RunFolder, count: int, step_s: float = STEP_S) -> Iterator[list[Process]]:
    """Processes that take their steps all the time, a little apart."""
    ended = threading.Event()

    def steps(process: Process) -> None:
        while not ended.wait(step_s):
            process.take_steps(1)

    with ExitStack() as stack:
        processes = [Process(Endpoint(), run, rank, count) for rank in range(count)]
        for rank, process in enumerate(processes):
            stack.callback(process.agent.close)
            process.take_steps(rank)
        threads = [threading.Thread(target=steps, args=(process,)) for process in processes]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(ended.set)
        yield processes


def found(target: str, run: RunFolder | None = None, **settings: Any) -> list[AgentClient]:
    settings = {"token": None, "through_files": False, **settings}
    return clients_for(target, find_run=lambda name: run if run and name == "run" else None, **settings)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Something that listens, and is no agent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_all, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


class TestTargets:
    def test_a_process(self, process: Process) -> None:
        (client,) = found(str(os.getpid()))
        assert client.status()["pid"] == os.getpid()
        assert client.name == f"process {os.getpid()}"

    @pytest.mark.parametrize("form", ["127.0.0.1:{}", "localhost:{}", "http://127.0.0.1:{}/"])
    def test_an_address_of_this_machine_needs_no_token(self, process: Process, form: str) -> None:
        port = process.agent.address.rpartition(":")[2]
        assert found(form.format(port))[0].status()["pid"] == os.getpid()

    def test_a_unix_socket(self, tmp_path: Path) -> None:
        process = Process(Endpoint(socket=tmp_path / "agent.sock"))
        for target in (f"unix:{tmp_path}/agent.sock", f"{tmp_path}/agent.sock"):
            assert found(target)[0].status()["step"] == 0
        process.agent.close()

    def test_a_unix_socket_with_a_token(self, tmp_path: Path) -> None:
        process = Process(Endpoint(socket=tmp_path / "agent.sock", token="a-token-of-the-users"))
        assert found(f"unix:{tmp_path}/agent.sock")[0].status()["step"] == 0
        process.agent.close()

    @pytest.mark.parametrize("address", ["0.0.0.0", "::1"])
    def test_other_addresses(self, address: str) -> None:
        try:
            process = Process(Endpoint(address=address))
        except AgentError:
            pytest.skip(f"this machine has no {address}")
        assert found(str(os.getpid()))[0].status()["step"] == 0
        assert found(process.agent.address)[0].status()["step"] == 0
        process.agent.close()

    @pytest.mark.parametrize("through_files", [False, True])
    def test_a_run(self, run: RunFolder, through_files: bool) -> None:
        with ranks(run, 2):
            clients = found("run", run, through_files=through_files)
            assert [client.name for client in clients] == ["rank 0", "rank 1"]
            assert [client.status()["rank"] for client in clients] == [0, 1]

    def test_an_agent_of_another_machine(self, run: RunFolder, process: Process) -> None:
        own = agent_of_process(os.getpid())
        assert own is not None
        place = run.agents / "rank0.json"
        write_agent_file(place, replace(own, host="node7"))
        with pytest.raises(AgentError, match=r"can only be reached on node7: use --through-files .*\(ssh -L \d+:local"):
            found("run", run)
        write_agent_file(place, replace(own, host="node7", address="0.0.0.0:80"))
        assert vars(found("run", run)[0]._transport)["_address"] == "node7:80"

    @pytest.mark.parametrize(
        ("target", "error", "sentence"),
        [
            ("nothing", UsageError, "'nothing' is not an address .* a process number or a run that can be found"),
            ("localhost:99999", UsageError, "there is no port 99999"),
            ("1", AgentError, r"process 1 has no agent of yours: start one with stepscope\.start_server\(\)"),
            ("run", AgentError, "the run run has no agent: it has ended, has not done its first step yet, or was"),
        ],
    )
    def test_what_is_none(self, run: RunFolder, target: str, error: type[Exception], sentence: str) -> None:
        with pytest.raises(error, match=sentence):
            found(target, run)

    def test_files_need_a_run(self, run: RunFolder) -> None:
        with pytest.raises(UsageError, match="--through-files needs a run, and there is no run '1234'"):
            found("1234", run, through_files=True)
        with pytest.raises(AgentError, match="the run run has no agent"):
            found("run", run, through_files=True)


class TestCaptures:
    def test_fetching(self, process: Process, tmp_path: Path) -> None:
        (client,) = found(str(os.getpid()))
        state = client.start(CaptureOrder(steps=2, options=RecordOptions(stacks=True)))
        with pytest.raises(AgentError, match="the capture is waiting and has no trace"):
            client.fetch(state, tmp_path / "a.json.gz")
        process.take_steps(5)
        done = client.wait(state.id, 30)
        client.fetch(done, tmp_path / "a.json.gz")
        assert json.loads((tmp_path / "a.json.gz").read_text()) == {"steps": [2, 3], "stacks": True}
        assert (tmp_path / "a.json.gz.lines.parquet").read_bytes() == b"lines"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json.gz", "a.json.gz.lines.parquet", "data"]
        with pytest.raises(AgentError, match=r"none/a\.json\S* cannot be written: No such file or directory"):
            client.fetch(done, tmp_path / "none" / "a.json")

    @pytest.mark.parametrize("through_files", [False, True])
    def test_a_trace_in_the_run_folder_is_read_there(self, run: RunFolder, through_files: bool, tmp_path: Path) -> None:
        with ranks(run, 1):
            (client,) = found("run", run, through_files=through_files)
            done = client.wait(client.start(CaptureOrder(steps=2)).id, 30)
            assert client.trace_in_run(done) == run.path / "rank0" / "trace-1.json.gz"
            client.fetch(done, tmp_path / "copy.json.gz")
            assert (tmp_path / "copy.json.gz").read_bytes() == (run.path / "rank0" / "trace-1.json.gz").read_bytes()
            outside = replace(done, in_run="../secret/trace-1.json.gz")
            assert client.trace_in_run(outside) is None

    def test_waiting_ends(self, process: Process) -> None:
        (client,) = found(str(os.getpid()))
        state = client.start(CaptureOrder(steps=2))
        assert client.wait(state.id, 0.05).state == "waiting"
        assert client.cancel(state.id).ended

    def test_a_trace_that_breaks_off(self, tmp_path: Path) -> None:
        with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf") as address:
            client = AgentClient(HttpTransport(address, None), "it")
            done = CaptureState("c1", "done", 1, 1, None, (("a.json.gz", 100),), None)
            with pytest.raises(AgentError, match="did not finish its answer: the process has ended"):
                client.fetch(done, tmp_path / "a.json.gz")
        assert not list(tmp_path.glob("*a.json*"))


class TestSentences:
    @pytest.mark.parametrize(
        ("answer", "sentence"),
        [
            (b"", "hung up without an answer: the process has ended, or is busy"),
            (b"SSH-2.0-OpenSSH_9.2\r\n", r"is not an agent of stepscope \(BadStatusLine\)"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<ht>", "stepscope: its answer is not JSON"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "it is not an agent of this version of stepscope"),
            (
                b'HTTP/1.1 200 OK\r\n\r\n{"agent": 1, "step": 1, "rank": "x"}',
                "it is not an agent of this version of stepscope",
            ),
            (b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n{}", "it: it answered 404"),
        ],
    )
    def test_who_is_no_agent(self, answer: bytes, sentence: str) -> None:
        with answering(answer) as address, pytest.raises(AgentError, match=sentence):
            AgentClient(HttpTransport(address, None), "it").status()

    def test_nobody(self) -> None:
        with pytest.raises(AgentError, match=r"nothing listens at 127\.0\.0\.1:1: the process or its agent has ended"):
            AgentClient(HttpTransport("127.0.0.1:1", None), "it").status()

    def test_a_process_that_hangs(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = AgentClient(HttpTransport(f"127.0.0.1:{server.getsockname()[1]}", None), "it", patience_s=0.1)
            with pytest.raises(AgentError, match="has not answered within 0 s"):
                client.status()

    def test_a_wrong_token(self, process: Process) -> None:
        with pytest.raises(RefusedError, match="; give it with --token or STEPSCOPE_TOKEN"):
            found(process.agent.address, token="wrong")[0].status()


class TestTogether:
    @pytest.mark.parametrize("through_files", [False, True])
    @pytest.mark.parametrize("length", [{"steps": 3}, {"seconds": 0.3}], ids=["steps", "seconds"])
    def test_the_same_steps(self, run: RunFolder, length: dict[str, Any], through_files: bool) -> None:
        with ranks(run, 3):
            started = start_together(found("run", run, through_files=through_files), CaptureOrder(**length))
            done = [client.wait(state.id, 60) for client, state in started]
        recorded = [json.loads((run.path / state.in_run).read_text())["steps"] for state in done if state.in_run]
        assert len(recorded) == 3
        assert recorded[0] == recorded[1] == recorded[2]
        assert len(recorded[0]) == 3 if "steps" in length else len(recorded[0]) > 3

    def test_when_the_first_step_is_missed_it_is_tried_again(
        self, run: RunFolder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_group, "_pace", lambda clients, seconds: (0, 0.0, 0.0))
        with ranks(run, 2) as processes:
            for process in processes:
                process.take_steps(100)
            started = start_together(found("run", run), CaptureOrder(steps=2))
            done = [client.wait(state.id, 60) for client, state in started]
        assert done[0].first_step == done[1].first_step > 100

    def test_processes_that_are_too_fast(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client_group, "_pace", lambda clients, seconds: (0, 0.0, 0.0))
        monkeypatch.setattr(AgentClient, "status", lambda self: {"step": 0})
        processes = [Process(Endpoint(), run, rank, 2) for rank in range(2)]
        for process in processes:
            process.controller._step = 10**6
        with pytest.raises(AgentError, match="faster than they can be asked"):
            start_together(found("run", run), CaptureOrder(steps=2))
        for process in processes:
            assert process.ask("GET", "/captures")[1] == {"captures": []}
            process.agent.close()

    def test_one_that_refuses(self, run: RunFolder) -> None:
        with ranks(run, 2) as processes:
            processes[1].ask("POST", "/captures", {})
            with pytest.raises(RefusedError, match="rank 1: the capture c1 is under way; stop or cancel it first"):
                start_together(found("run", run), CaptureOrder(steps=2))
            assert processes[0].ask("GET", "/captures")[1]["captures"][0]["state"] == "cancelled"

    def test_steps_that_take_long(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(client_group, "_PATIENT_SAMPLE_S", 0.1)
        processes = [Process(Endpoint(), run, rank, 2) for rank in range(2)]
        started = start_together(found("run", run), CaptureOrder(seconds=0.1))
        assert [state.first_step for _, state in started] == [2, 2]
        for process in processes:
            process.take_steps(4)
        assert [client.wait(state.id, 30).steps for client, state in started] == [1, 1]
        for process in processes:
            process.agent.close()
