"""Requests as files: claimed by one, answered once, and cheap where there are none."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.errors import AgentError
from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.protocol import CaptureOrder, FileTransport, Refusal, Reply, RequestFolder, decoded
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from tests.unit.agents import Process


class Answers:
    """Keeps what it was asked, and answers always the same."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self._reply = reply or Reply(200, {"fine": True})

    def __call__(self, method: str, target: str, body: bytes) -> Reply:
        self.asked.append((method, target, body))
        return self._reply


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "requests"
    made.mkdir()
    return made


def reply(folder: Path, name: str) -> object:
    return json.loads((folder / f"{name}.reply").read_text())


def test_an_empty_folder_and_none(folder: Path) -> None:
    answers = Answers()
    assert RequestFolder(folder, 0, answers).poll() is False
    assert RequestFolder(folder / "none", 0, answers).poll() is False
    assert answers.asked == []


def test_a_request(folder: Path) -> None:
    (folder / "rank1-a.json").write_text('{"method": "DELETE", "target": "/captures/c1", "body": {"a": 1}}')
    (folder / "rank0-b.json").write_text("{}")
    (folder / ".rank1-c.json.x.tmp").write_text("{}")
    answers = Answers()
    requests = RequestFolder(folder, 1, answers)
    assert requests.poll() is True
    assert requests.poll() is False
    assert answers.asked == [("DELETE", "/captures/c1", b'{"a": 1}')]
    assert reply(folder, "rank1-a") == {"status": 200, "body": {"fine": True}}
    assert sorted(path.name for path in folder.iterdir()) == [".rank1-c.json.x.tmp", "rank0-b.json", "rank1-a.reply"]


def test_requests_that_follow_at_once_are_seen(folder: Path) -> None:
    answers = Answers()
    requests = RequestFolder(folder, 0, answers)
    for number in range(50):
        (folder / f"rank0-{number}.json").write_text('{"method": "GET", "target": "/status"}')
        assert requests.poll() is True
    assert len(answers.asked) == 50


def test_a_settled_folder_is_not_listed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = RequestFolder(folder, 0, Answers())
    old = time.time() - 60
    os.utime(folder, (old, old))
    requests.poll()
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("listed"))
    assert requests.poll() is False


def test_one_of_many_has_a_request(folder: Path) -> None:
    answers = Answers()
    racing = [RequestFolder(folder, 0, answers) for _ in range(8)]
    for number in range(20):
        (folder / f"rank0-{number}.json").write_text(f'{{"method": "GET", "target": "/{number}"}}')
    threads = [threading.Thread(target=each.poll) for each in racing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(target for _, target, _ in answers.asked) == sorted(f"/{number}" for number in range(20))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("nonsense", "the request is not JSON"),
        ("[]", "a request is a JSON object"),
        ('{"method": "GET"}', "a request has a method and a target, such as GET and /status"),
    ],
)
def test_what_is_no_request(folder: Path, content: str, sentence: str) -> None:
    (folder / "rank0-a.json").write_text(content)
    RequestFolder(folder, 0, Answers()).poll()
    assert reply(folder, "rank0-a") == {"status": 400, "body": {"error": sentence}}


@pytest.mark.parametrize("body", ['{"steps": "\\ud800"}', '{"options": {"stacks": "\\ud800"}}', '{"\\ud800": 1}'])
def test_half_a_surrogate_pair_is_refused(body: str) -> None:
    with pytest.raises(Refusal) as refused:
        CaptureOrder.from_json(decoded(body.encode()))
    assert refused.value.status == 400


class TestAProcess:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
        monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
        return RunFolder.create(tmp_path, "run", RunManifest(command=()))

    @pytest.fixture
    def process(self, run: RunFolder) -> Iterator[Process]:
        made = Process(Endpoint(), run)
        yield made
        made.agent.close()

    def test_a_capture_is_answered_when_it_has_ended(self, run: RunFolder, process: Process) -> None:
        (run.requests / "rank0-mine.json").write_text('{"steps": 2}')
        deadline = time.monotonic() + 30
        while not (run.requests / "rank0-mine.claimed").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not (run.requests / "rank0-mine.reply").exists()
        while not (run.requests / "rank0-mine.reply").exists():
            process.take_steps(1)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answer = json.loads((run.requests / "rank0-mine.reply").read_text())
        assert (answer["status"], answer["body"]["state"], answer["body"]["steps"]) == (200, "done", 2)
        assert (run.path / answer["body"]["in_run"]).is_file()

    def test_a_client(self, run: RunFolder, process: Process) -> None:
        process.take_steps(7)
        answer = FileTransport(run.requests, 0).call("GET", "/status", None, 30)
        assert (answer.status, answer.body["step"]) == (200, 7)
        assert list(run.requests.iterdir()) == []

    def test_nobody_answers(self, run: RunFolder, process: Process) -> None:
        with pytest.raises(AgentError, match=r"rank 5 has not answered the request in .* within 0 s: either it has"):
            FileTransport(run.requests, 5).call("GET", "/status", None, 0.05)
        assert list(run.requests.iterdir()) == []

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(AgentError, match=r"none cannot be written: No such file or directory"):
            FileTransport(tmp_path / "none", 0).call("GET", "/status", None, 1)
