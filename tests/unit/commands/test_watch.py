"""A watched job: recordings of agents in this process, failures, restarts, kept traces, and where alerts go."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import shlex
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from stepscope.commands.watch import delivery as watch_delivery
from stepscope.commands.watch import job as watch_job
from stepscope.commands.watch.command import COMMAND, follow
from stepscope.commands.watch.job import Watch, summary_of
from stepscope.compare.watching import parsed_alert
from stepscope.errors import AgentError, UsageError
from stepscope.record.agent.http import Endpoint
from stepscope.record.agent.protocol import AgentFile, own_namespace
from stepscope.record.manifest import RunManifest
from stepscope.record.run_folder import RunFolder
from stepscope.record.watch_log import Watched, WatchLog
from stepscope.report.watch import line_of, metrics
from tests.simulator.ranks import LATE_NS, STEPS, write_ranks
from tests.unit.agents import Process

REPOSITORY = Path(__file__).resolve().parents[3]
TOKEN = "a-token-for-the-test"
SUMMARY = {"steps": 5, "recorded_step_ns": 6e6, "causes": {"input": 2e6}, "basis": "device"}


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(watch_job, "_LEARN_S", 0.1)
    monkeypatch.setattr(watch_job, "summary_of", lambda *_: dict(SUMMARY))


@contextmanager
def training(ranks: int = 1) -> Iterator[list[Process]]:
    """Processes with agents, which take steps of 5 ms in a thread each."""
    processes = [Process(Endpoint(token=TOKEN), None, rank, ranks) for rank in range(ranks)]
    over = threading.Event()

    def train(process: Process) -> None:
        while not over.wait(0.005):
            process.take_steps(1)

    threads = [threading.Thread(target=train, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    try:
        yield processes
    finally:
        over.set()
        for thread, process in zip(threads, processes, strict=True):
            thread.join()
            process.agent.close()


def watch(*words: str, alerts: tuple[str, ...] = ()) -> tuple[Watch, list[str]]:
    told: list[str] = []
    arguments = COMMAND.parsed([*words, "--every", "1s", "--most-cost", "100%"])
    return Watch(arguments, [parsed_alert(alert) for alert in alerts], WatchLog(), told.append), told


def recorded(job: Watch) -> Watched:
    found = job.record()
    assert found is not None
    return found


def test_two_ranks_are_recorded_at_the_same_steps_and_kept() -> None:
    with training(ranks=2) as processes:
        addresses = [process.agent.address for process in processes]
        job, told = watch(*addresses, "--name", "job", "--token", TOKEN)
        first, second = recorded(job), recorded(job)
    assert (told, first.problem, second.problem) == ([], None, None)
    assert (first.ranks, first.steps, second.causes) == (2, 5, {"input": 2e6})
    assert first.step_ns is not None
    assert 1e6 < first.step_ns < 1e8  # of 10 ms, counted for a tenth of a second
    assert first.memory_bytes is not None
    assert first.cost_s is not None
    assert second.first_step is not None
    assert second.first_step > (first.first_step or 0)
    steps = [json.loads(Path(trace).read_text())["steps"] for trace in second.traces]
    assert steps[0] == steps[1]
    assert WatchLog().of("job", last=9) == job.history


def test_only_the_latest_traces_and_those_with_an_alert_stay() -> None:
    with training() as [process]:
        job, _ = watch(process.agent.address, "--keep", "1", alerts=("step_ms > 0 for 2",))
        recordings = [recorded(job) for _ in range(4)]
    assert [len(each.events) for each in recordings] == [0, 1, 0, 0]
    assert [len(each.traces) for each in job.history] == [0, 1, 0, 1]
    there = [Path(trace).exists() for each in recordings for trace in each.traces]
    assert there == [False, True, False, True]
    assert [each.traces for each in WatchLog().of(job.job, last=9)] == [each.traces for each in job.history]


def test_a_job_that_is_gone_and_comes_back_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    with training() as [process]:
        address = process.agent.address
        port = int(address.rpartition(":")[2])
        job, told = watch(address, "--token", "wrong", "--name", "job", alerts=("failures >= 1 for 1",))
        refused = recorded(job)
    gone = recorded(job)
    job._agents = [AgentFile("localhost:1", "", 2**22 + 1, socket.gethostname(), namespace=own_namespace())]
    assert "is gone" in job._gone()
    job._agents = []
    assert "token" in (refused.problem or "")
    assert f"nothing listens at {address}" in (gone.problem or "")
    assert [event.state for event in refused.events] == ["firing"]
    assert job.pause_s == 1.0
    job.arguments.token = TOKEN
    process = Process(Endpoint(port=port, token=TOKEN))
    over = threading.Event()
    steps = threading.Thread(target=lambda: [process.take_steps(1) for _ in iter(lambda: over.wait(0.005), True)])
    steps.start()
    try:
        whole = recorded(job)
        monkeypatch.setitem(process.agent._service._identity, "pid", -1)  # as of another process
        again = recorded(job)
    finally:
        over.set()
        steps.join()
        process.agent.close()
    assert (whole.problem, [event.state for event in whole.events]) == (None, ["recovered"])
    assert again.problem is None
    assert [sentence.partition(":")[0] for sentence in told] == ["job was restarted"]


def test_what_a_job_cannot_mean_does_not_end_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"process_bytes": 10**400, "device_bytes": -1}
    monkeypatch.setattr("stepscope.record.agent.server.memory_now", lambda: said)
    with training() as [process]:
        job, _ = watch(process.agent.address, "--name", "job", alerts=("memory_gib > 1",))
        found = recorded(job)
        assert (found.problem, found.memory_bytes, found.device_bytes) == (None, None, None)
        monkeypatch.setattr(watch_job, "_SAVING_S", -60.0)
        job.arguments.timeout, job.arguments.steps = 1e-3, 50_000
        endless = recorded(job)
    monkeypatch.setattr(watch_job, "agents_of", lambda *_: (_ for _ in ()).throw(AgentError("\ud800" * 9000)))
    refused = recorded(job)
    assert re.search("has not ended|no step ended", endless.problem or "")
    assert (refused.problem or "").startswith("\\ud800")
    assert [each.problem for each in WatchLog().of("job", last=9)] == [None, endless.problem, refused.problem]


def test_an_earlier_watchs_recordings_and_alerts_go_on() -> None:
    rows = [Watched(job="job", unix_s=float(number), step_ns=5e6) for number in range(2)]
    WatchLog().put(*rows)
    job, _ = watch("localhost:1", "--name", "job", alerts=("step_ms > 1",))
    assert (job.history, job.alerts[0].is_firing) == (rows, True)


def test_a_watch_ends_with_its_run_after_its_patience_or_so_many_recordings(tmp_path: Path) -> None:
    manifest = RunManifest.begin(["python", "train.py"], 1.0, options={}, redact=False)
    run = RunFolder.create(tmp_path, "ended", manifest)
    run.write_manifest(manifest.ended(2.0, 0, []))
    job, told = watch(str(run.path))
    shown: list[Watched] = []
    follow(job, shown.append)
    assert (shown, told) == ([], ["ended has ended, and so does the watch"])

    run.write_manifest(manifest.ended(2.0, 1, []))
    job._has_begun = True
    assert recorded(job).problem == "ended has ended with exit code 1"
    assert job.record() is None

    job, told = watch("localhost:1", "--patience", "0")
    with pytest.raises(AgentError, match="nothing was recorded"):
        follow(job, shown.append)
    assert len(shown) == 1
    assert told == ["localhost:1 could not be recorded for 0 s: the watch ends"]

    with training() as [process]:
        job, told = watch(process.agent.address, "--repeat", "1", "--token", TOKEN)
        follow(job, shown.append)
    assert (len(shown), shown[-1].problem, told) == (2, None, [])


def test_what_cannot_be_read_and_a_bug_are_problems_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[str, Any]:
        raise ZeroDivisionError

    with training() as [process]:
        job, _ = watch(process.agent.address)
        monkeypatch.setattr(watch_job, "summary_of", summary_of)  # the agents' traces of this test are none
        unreadable = recorded(job)
        monkeypatch.setattr(watch_job, "summary_of", fails)
        bug = recorded(job)
        assert process.ask("GET", "/status")[1]["capture"] is None
    assert (unreadable.problem or "").count("trace-") == 1
    assert (bug.problem or "").startswith("a bug in stepscope (ZeroDivisionError)")
    assert [len(each.traces) for each in (unreadable, bug)] == [1, 1]  # they count as others do, and are removed later


def test_a_recording_that_costs_much_makes_them_rarer() -> None:
    job, told = watch("localhost:1", "--name", "job")
    job.arguments.most_cost = 0.005
    job._keep(Watched(job="job", unix_s=1.0))
    assert job.every_s == 1.0
    job.history = [Watched(job="job", unix_s=2.0, cost_s=2.0), Watched(job="job", unix_s=3.0, cost_s=4.0)]
    job._keep(job.history[-1])
    assert (job.every_s, len(told)) == (600.0, 1)


def test_the_summary_of_ranks_names_the_late_one(tmp_path: Path) -> None:
    write_ranks(tmp_path, 4, lambda step: 2)
    found = summary_of(sorted(tmp_path.iterdir()), COMMAND.parsed(["localhost:1"]))
    whole = msgspec.convert({"job": "job", "unix_s": 0.0, "ranks": 4, **found}, Watched)
    assert (whole.steps, whole.basis, whole.late_rank) == (STEPS, "device", "rank 2")
    assert whole.wait_ns == pytest.approx(LATE_NS * 3 / 4, rel=0.05)
    assert (whole.communication_ns or 0) > LATE_NS / 2
    assert "rank 2" in (whole.finding or "")
    assert "most for rank 2" in line_of([whole])


@contextmanager
def receiver(answers: list[int]) -> Iterator[tuple[str, list[Any]]]:
    """A webhook that answers so, and what it got."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0))
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook?key=secret", got
    finally:
        server.shutdown()
        server.server_close()


def test_a_webhook_is_tried_again_and_then_told_without_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_delivery, "_PAUSES_S", (0.0, 0.0))
    told: list[str] = []
    with receiver([500, 200, 302, 404, 500]) as (address, got):
        deliveries = watch_delivery.Deliveries([watch_delivery.webhook(address)], told.append)
        deliveries.add({"job": "a"})
        deliveries.add({"job": "b"})
        deliveries.finish(10)
    assert got == [{"job": "a"}] * 2 + [{"job": "b"}] * 3
    assert told == ["an alert was not delivered to 127.0.0.1: it answered 500"]
    assert "cannot" not in told[0]


def test_deliveries_never_hold_the_watch_up() -> None:
    told: list[str] = []
    goes_on = threading.Event()

    def waits(_: bytes, __: Mapping[str, str]) -> str | None:
        goes_on.wait(30)
        return None

    deliveries = watch_delivery.Deliveries([waits], told.append)
    begun = time.monotonic()
    for number in range(110):
        deliveries.add({"number": number})
    deliveries.finish(0.1)
    assert time.monotonic() - begun < 10
    assert 8 <= len(told) <= 10
    goes_on.set()


def test_a_command_gets_the_alert_without_a_shell(tmp_path: Path) -> None:
    place = tmp_path / "got it; touch x"
    body = b'{"job":"a"}'
    assert watch_delivery.command(f"tee '{place}'")(body, {"STEPSCOPE_JOB": "a"}) is None
    assert place.read_bytes() == body
    ends = watch_delivery.command("sh -c 'exit $STEPSCOPE_CODE'")
    assert ends(b"", {"STEPSCOPE_CODE": "3"}) == "sh ended with 3 for an alert"
    assert watch_delivery.command("no-such-program-here")(b"", {}) == (
        "no-such-program-here cannot be started: No such file or directory"
    )


@pytest.mark.parametrize(
    "address", ["", "ftp://host/", "host:80", "http://", "http://[::1", "http://host:99999/", "http://a b/"]
)
def test_what_is_no_webhook_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="is not a webhook"):
        watch_delivery.webhook(address)


@pytest.mark.parametrize("address", ["", "host", "host:99999", "a b:1", "999.1.1.1:0"])
def test_metrics_at_what_is_no_address(address: str) -> None:
    with pytest.raises(UsageError):
        watch_delivery.Metrics(address)


def test_metrics_answer_a_few_clients_at_once() -> None:
    served = watch_delivery.Metrics("127.0.0.1:0")
    address = f"http://127.0.0.1:{served.port}/metrics"
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(8)]
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(address, timeout=10)
    for each in silent:
        each.close()
    for _ in range(100):  # until the server has noticed
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(address, timeout=10) as answer,
        ):
            assert answer.status == 200
            break
        time.sleep(0.05)
    else:
        pytest.fail("no answer after the silent clients have left")
    served.close()


def test_metrics_are_served_as_openmetrics() -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    history = [
        Watched(job="a", unix_s=5.0, step_ns=2e6, recorded_step_ns=3e6, causes={"input": 1e6}, communication_ns=1e6,
                wait_ns=5e5, late_rank="rank 1", memory_bytes=7, cost_s=1.0, interval_s=100.0),
        Watched(job="a", unix_s=6.0, problem="no answer"),
    ]  # fmt: skip
    served = watch_delivery.Metrics("127.0.0.1:0")
    served.text = metrics('a "job"\n', history, {"step_ms > 1": True})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{served.port}/", timeout=10)
    finally:
        served.close()
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels.pop("job") for sample in samples} == {'a "job"\\n'}
    assert {(sample.name, *sample.labels.values()): sample.value for sample in samples} == {
        ("stepscope_watch_up",): 0,
        ("stepscope_watch_failures",): 1,
        ("stepscope_watch_last_recording_timestamp_seconds",): 5,
        ("stepscope_watch_step_seconds", "unrecorded"): 0.002,
        ("stepscope_watch_step_seconds", "recorded"): 0.003,
        ("stepscope_watch_cause_seconds", "input", "device"): 0.001,
        ("stepscope_watch_communication_seconds",): 0.001,
        ("stepscope_watch_wait_seconds", "rank 1"): 0.0005,
        ("stepscope_watch_memory_bytes", "process"): 7,
        ("stepscope_watch_cost_ratio",): 0.01,
        ("stepscope_watch_alert_firing", "step_ms > 1"): 1,
    }


def test_no_recording_has_no_samples_but_of_alerts() -> None:
    assert metrics("a", [], {}) == b"# EOF\n"


WATCH_EXAMPLES = REPOSITORY / "examples" / "watch"


def test_the_sidecar_of_the_kubernetes_example_has_a_command_and_its_port() -> None:
    job = yaml.safe_load((WATCH_EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]
    [sidecar] = pod["spec"]["initContainers"]
    assert sidecar["command"][:2] == ["stepscope", "watch"]
    arguments = COMMAND.parsed(sidecar["command"][2:])
    port = pod["metadata"]["annotations"]["prometheus.io/port"]
    assert arguments.metrics == f"0.0.0.0:{port}"
    assert sidecar["ports"] == [{"name": "metrics", "containerPort": int(port)}]
    assert [parsed_alert(alert).metric for alert in arguments.alert] == ["step_ms", "failures"]


def test_the_slurm_example_trains_watches_and_ends_as_the_training(tmp_path: Path) -> None:
    """Its steps, with programs that stand in for Slurm and stepscope."""
    stand_ins = {
        "srun": 'shift; "$@"',
        "python": "exit 3",
        "stepscope": 'echo "$@" >>"$LOG"\n[ $1 = run ] || exec sleep 30\nmkdir -p "$5/$7"; touch "$5/$7/run.json"\n'
        'sleep 0.7; shift 7; "$@"',
    }
    for name, body in stand_ins.items():
        place = tmp_path / name
        place.write_text(f"#!/bin/bash\n{body}\n")
        place.chmod(0o755)
    log, runs = tmp_path / "log", tmp_path / "runs"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "LOG": str(log)}
    variables["STEPSCOPE_RUNS"] = str(runs)
    ended = subprocess.run(["bash", WATCH_EXAMPLES / "slurm.sh", "train.py"], env=variables, timeout=60, check=False)
    assert ended.returncode == 3
    ran, watched = (shlex.split(line) for line in log.read_text().splitlines())
    assert ran[-4:] == ["srun", "--kill-on-bad-exit=1", "python", "train.py"]
    arguments = COMMAND.parsed(watched[1:3])
    assert (watched[0], arguments.targets, arguments.through_files) == ("watch", [str(runs / "job-7")], True)
