"""A real training, watched by a process: recordings, alerts at a webhook, metrics, and the end once it is killed."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TIMEOUT_S, environment
from tests.published_schema import wrong_in

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TRAINING = """\
import time, torch, stepscope
torch.set_num_threads(1)
agent = stepscope.start_server(token="a-token-for-the-test")
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until = time.monotonic() + 120
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    if step == 2:
        print(agent.address, flush=True)
    if time.monotonic() > until:
        break
    time.sleep(0.01)
"""


@contextmanager
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and what it got."""
    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", got
        server.shutdown()


def test_a_training_is_watched_until_it_is_killed(tmp_path: Path) -> None:
    lines, variables = tmp_path / "lines.json", environment(STEPSCOPE_DATA_DIR=str(tmp_path / "data"))
    python = [sys.executable, "-c", TRAINING]
    training = subprocess.Popen(python, stdout=subprocess.PIPE, text=True, env=variables)
    assert training.stdout is not None
    address = training.stdout.readline().strip()
    words = ("--name", "job", "--every", "1s", "--most-cost", "100%", "--patience", "2s", "--metrics", "127.0.0.1:0")
    with webhook() as (url, got):
        alerts = ("--alert", "step_ms > 1", "--alert", "failures >= 1 for 1", "--webhook", url, "--json", str(lines))
        watch = subprocess.Popen(
            [sys.executable, "-m", "stepscope", "watch", address, *words, *alerts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
        )
        try:
            assert watch.stdout is not None
            assert watch.stderr is not None
            port = re.search(r"metrics are at http://127.0.0.1:(\d+)/metrics", watch.stderr.readline())
            assert port
            said = [watch.stdout.readline() for _ in range(3)]
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/metrics", timeout=TIMEOUT_S) as answer:
                metrics = answer.read().decode()
            training.kill()
            out, err = watch.communicate(timeout=TIMEOUT_S)
        finally:
            for process in (training, watch):
                process.kill()
                process.wait(TIMEOUT_S)
                if process.stdout is not None:
                    process.stdout.close()
    assert watch.returncode == 0
    assert err.splitlines()[-1] == "stepscope: job could not be recorded for 2 s: the watch ends"
    assert [bool(re.search(r"  step \d+\.\d ms  .*watching costs", line)) for line in said] == [True, True, False]
    assert "firing: job: a step takes " in said[2]
    assert out.count("firing: ") == 1, out
    assert "nothing listens at" in out or "hung up" in out or "did not finish" in out
    assert [(each["alert"], each["state"]) for each in got] == [
        ("step_ms > 1", "firing"),
        ("failures >= 1 for 1", "firing"),
    ]
    recordings = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [wrong for each in (*recordings, *got) for wrong in wrong_in(each)] == []
    first, second = (each["recording"] for each in recordings[:2])
    assert (first["problem"], second["problem"], first["steps"], first["basis"]) == (None, None, 5, "host")
    assert second["step_ns"] > 5e6  # of 10 ms at least; on a busy machine answers tell late how far it was
    assert second["memory_bytes"] > 2**24
    assert recordings[-1]["recording"]["problem"] is not None
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    samples = {
        sample.name: sample for family in parser.text_string_to_metric_families(metrics) for sample in family.samples
    }
    assert samples["stepscope_watch_up"].value == 1
    assert samples["stepscope_watch_up"].labels == {"job": "job"}
