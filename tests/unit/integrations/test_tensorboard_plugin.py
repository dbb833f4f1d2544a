"""Which runs the plugin of TensorBoard finds below a log folder, and what it refuses."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("tensorboard")

from stepscope.commands.shared.reading import SOURCES_VARIABLE
from stepscope.errors import UnreadableTraceError
from stepscope.integrations.tensorboard import LogFolder, StepscopePlugin
from stepscope.view.documents import NoDocument
from tests.unit.run_folders import made_run


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plugin says to its process about sources ends with the test."""
    monkeypatch.setenv(SOURCES_VARIABLE, "")
    monkeypatch.delenv(SOURCES_VARIABLE)


def written(folder: Path, worker: str, time: int, rank: int | None = None, world_size: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{worker}.{time}.pt.trace.json.gz"
    told: dict[str, Any] = {"schemaVersion": 1}
    if rank is not None:
        told["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": world_size}
    file.write_bytes(gzip.compress(json.dumps({**told, "traceEvents": []}).encode()))
    return file


def found(root: Path) -> dict[str, list[str]]:
    runs = LogFolder(str(root)).runs()
    return {name: [str(file.relative_to(root)) for file in run.files] for name, run in sorted(runs.items())}


def test_nothing(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    for root in (tmp_path, tmp_path / "missing"):
        logs = LogFolder(str(root))
        assert (logs.runs(), logs.table()) == ({}, [])
        with pytest.raises(NoDocument):
            logs.meant("latest")


def test_what_each_profiler_leaves(tmp_path: Path) -> None:
    written(tmp_path, "host_1", 5)
    session = tmp_path / "jax" / "plugins" / "profile" / "2026_11_28_10_00_00"
    session.mkdir(parents=True)
    for host in ("a", "b"):
        (session / f"{host}.xplane.pb").write_bytes(b"\n")
    folder = made_run("mine", command="python train.py", root=tmp_path / "runs")
    folder.new_trace_path(0).write_bytes(b"{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "own").mkdir()
    for number in (9, 10):
        (tmp_path / "own" / f"trace-{number}.json.gz").write_bytes(b"{}")

    assert found(tmp_path) == {
        ".": ["host_1.5.pt.trace.json.gz"],
        "jax/plugins/profile/2026_11_28_10_00_00": [
            f"jax/plugins/profile/2026_11_28_10_00_00/{host}.xplane.pb" for host in ("a", "b")
        ],
        "own": ["own/trace-10.json.gz"],
        "own/trace-9.json.gz": ["own/trace-9.json.gz"],
        "runs/mine": ["runs/mine/rank0/trace-1.json.gz"],
    }
    rows = {row["name"]: row for row in LogFolder(str(tmp_path)).table()}
    assert [rows[name]["state"] for name in sorted(rows)] == ["PyTorch", "XLA", "PyTorch", "PyTorch", "stepscope"]
    assert rows["runs/mine"]["command"] == "python train.py"


def test_cycles_ranks_and_restarts_of_one_folder(tmp_path: Path) -> None:
    for time in (10, 20):
        written(tmp_path / "ddp", "host_1", time, rank=0)
        written(tmp_path / "ddp", "host_2", time + 1, rank=1)
    written(tmp_path / "alone", "host_1", 9)
    written(tmp_path / "alone", "host_2", 10)

    assert found(tmp_path) == {
        "alone": ["alone/host_2.10.pt.trace.json.gz"],
        "alone/host_1.9.pt.trace.json.gz": ["alone/host_1.9.pt.trace.json.gz"],
        "ddp": ["ddp/host_1.20.pt.trace.json.gz", "ddp/host_2.21.pt.trace.json.gz"],
        "ddp/host_1.10.pt.trace.json.gz": ["ddp/host_1.10.pt.trace.json.gz", "ddp/host_2.11.pt.trace.json.gz"],
    }


def test_nothing_outside_is_read(tmp_path: Path) -> None:
    outside = written(tmp_path / "outside", "host_1", 1)
    root = tmp_path / "logs"
    inside = written(root / "run", "host_2", 2)
    (root / "folder").symlink_to(outside.parent, target_is_directory=True)
    (root / "run" / "host_3.3.pt.trace.json.gz").symlink_to(outside)
    logs = LogFolder(str(root))
    assert list(logs.runs()) == ["run"]
    assert logs.traces(logs.meant("run")) == [inside]
    for name in ("../outside", str(outside.parent), "folder", "run/host_3.3.pt.trace.json.gz", "run/.."):
        with pytest.raises(NoDocument):
            logs.meant(name)
    (root / "run" / "telemetry").symlink_to(tmp_path / "outside", target_is_directory=True)
    with pytest.raises(UnreadableTraceError, match="leads out of the log folder"):
        logs.traces(logs.meant("run"))


def test_a_rank_of_thousands_of_digits_hides_no_other_run(tmp_path: Path) -> None:
    for time in (1, 2):
        head = b'{"distributedInfo": {"rank": %s, "world_size": 2}}' % (b"9" * 5000)
        written(tmp_path / "odd", "host_1", time).write_bytes(gzip.compress(head))
    written(tmp_path, "host_1", 1)
    assert set(found(tmp_path)) == {".", "odd", "odd/host_1.1.pt.trace.json.gz"}


def test_a_log_folder_of_too_many_folders_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.integrations.tensorboard._MOST_FOLDERS", 3)
    for name in "abc":
        (tmp_path / name).mkdir()
    written(tmp_path / "d", "host_1", 1)
    with pytest.raises(NoDocument, match="in the first 3 folders"):
        LogFolder(str(tmp_path)).meant("latest")


class Asked:
    """The plugin as TensorBoard calls it."""

    def __init__(self, root: Path) -> None:
        context = type("Context", (), {"logdir": str(root)})()
        self._apps = StepscopePlugin(context).get_plugin_apps()

    def __call__(self, name: str, run: str = "latest", **headers: str) -> tuple[int, Any]:
        told: list[str] = []
        environ = {"PATH_INFO": f"/data/plugin/stepscope/api/{name}", "QUERY_STRING": f"run={quote(run)}"}
        [body] = self._apps["/page.html" if name == "page.html" else "/api/*"](
            {**environ, "REQUEST_METHOD": "GET", **headers}, lambda status, _: told.append(status)
        )
        return int(told[0][:3]), json.loads(body)


def test_a_name_may_be_any_bytes(tmp_path: Path) -> None:
    odd = written(tmp_path / "logs" / os.fsdecode(b"\xff"), "host_1", 1)
    odd.write_bytes(b"broken")
    ask = Asked(tmp_path / "logs")
    status, rows = ask("runs")
    assert (status, [row["name"] for row in rows]) == (200, ["\\udcff"])
    status, answer = ask("diagnosis", rows[0]["name"])
    assert (status, "\\udcff" in answer["error"]) == (422, True)


def test_another_sites_page_makes_nothing_work(tmp_path: Path) -> None:
    ask = Asked(tmp_path)
    sites = {site: ask("runs", HTTP_SEC_FETCH_SITE=site)[0] for site in ("same-origin", "cross-site", "same-site")}
    assert sites == {"same-origin": 200, "cross-site": 403, "same-site": 403}
    assert ask("page.html", HTTP_SEC_FETCH_SITE="cross-site")[0] == 403


def test_tensorboard_starts_without_what_the_page_needs() -> None:
    code = "import sys, stepscope.integrations.tensorboard; print({'polars', 'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
