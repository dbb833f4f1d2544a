"""The plugin in a real TensorBoard: what it answers, what it refuses, and its page in a real browser."""

from __future__ import annotations

import gzip
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")

from tests.browser import CHROMIUM, Browser
from tests.e2e.conftest import PER_TOKEN
from tests.tensorboard import BoardPage, tensorboard
from tests.unit.run_folders import made_run

FIXTURES = Path(__file__).parents[1] / "fixtures"
PLUGIN = "data/plugin/stepscope"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, Path]]:
    """A TensorBoard of the three kinds of runs: its address, its log folder, and the file with what it says."""
    logs = tmp_path_factory.mktemp("logs")
    (logs / "gpt2").mkdir()
    shutil.copy(PER_TOKEN, logs / "gpt2" / "host_7.1700000000000000000.pt.trace.json.gz")
    session = logs / "jax" / "plugins" / "profile" / "2026_11_28_10_00_00"
    session.mkdir(parents=True)
    (session / "host.xplane.pb").write_bytes(gzip.decompress((FIXTURES / "jax_training_cpu.xplane.pb.gz").read_bytes()))
    run = made_run("mine", root=logs / "runs")
    shutil.copy(FIXTURES / "gpt2_batched_loss_cpu.json.gz", run.new_trace_path(0))
    with tensorboard(logs, tmp_path_factory.mktemp("board") / "empty") as (address, said):
        yield address, logs, said


def answer(address: str, path: str) -> Any:
    with urllib.request.urlopen(address + path, timeout=60) as found:
        return json.loads(found.read())


def refused(address: str, path: str, **request: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(address + path, **request), timeout=60)
    return error.value.code


def test_every_kind_of_run_is_diagnosed(board: tuple[str, Path, Path]) -> None:
    address, _, _ = board
    assert answer(address, "data/plugins_listing")["stepscope"]["enabled"]
    runs = {row["name"]: row["state"] for row in answer(address, f"{PLUGIN}/api/runs")}
    assert runs == {"gpt2": "PyTorch", "jax/plugins/profile/2026_11_28_10_00_00": "XLA", "runs/mine": "stepscope"}
    for name in runs:
        assert "diagnosis" in answer(address, f"{PLUGIN}/api/session?run={name}")["documents"]
    assert answer(address, f"{PLUGIN}/api/diagnosis?run=gpt2")["findings"]


def test_nothing_but_the_log_folder_is_shown(board: tuple[str, Path, Path]) -> None:
    address, _, _ = board
    for name in ("../..", "/etc", "gpt2/..", "latest/.."):
        assert refused(address, f"{PLUGIN}/api/diagnosis?run={name}") == 404
    assert refused(address, f"{PLUGIN}/api/watch") == 404
    assert refused(address, f"{PLUGIN}/api/capture?run=runs/mine", method="POST", data=b"") == 405
    source = answer(address, f"{PLUGIN}/api/lines?run=gpt2")["lines"][0]["file"]
    assert answer(address, f"{PLUGIN}/api/source?run=gpt2&file={source}")["text"] is None
    assert refused(address, f"{PLUGIN}/api/source?run=gpt2&file=/etc/passwd") == 404


def test_a_broken_and_a_growing_file(board: tuple[str, Path, Path]) -> None:
    address, logs, said = board
    whole = PER_TOKEN.read_bytes()
    file = logs / "growing" / "host_8.1700000000000000001.pt.trace.json.gz"
    file.parent.mkdir()
    file.write_bytes(b"not a trace")
    try:
        assert urllib.request.urlopen(f"{address}{PLUGIN}/page.html", timeout=60).status == 200
        assert refused(address, f"{PLUGIN}/api/diagnosis?run=growing") == 422
        session = answer(address, f"{PLUGIN}/api/session?run=growing")
        assert (session["documents"], len(session["left_out"])) == (["runs"], 1)
        file.write_bytes(whole)
        assert urllib.request.urlopen(f"{address}{PLUGIN}/page.html", timeout=60).status == 200
        assert answer(address, f"{PLUGIN}/api/diagnosis?run=growing")["findings"]
    finally:
        shutil.rmtree(file.parent)
    assert "Traceback" not in said.read_text()
    assert "will become an error" not in said.read_text()  # what TensorBoard says of unsafe answers


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_the_page_in_tensorboard(board: tuple[str, Path, Path], tmp_path: Path) -> None:
    address, _, _ = board
    headline = answer(address, f"{PLUGIN}/api/diagnosis?run=gpt2")["findings"][0]["title"]
    browser = Browser(tmp_path / "profile")
    try:
        page = BoardPage(browser, address)
        page.click("nav.views a", "Runs")
        assert page.text("tbody").count("PyTorch") == 1
        page.click("tbody .accent", "gpt2")
        assert headline in page.text("main")
        assert page.views[0] == page.text("nav.views a[aria-current]")
        mine = [each for each in browser.complaints if PLUGIN in json.dumps(each)]
        assert [each for each in mine if not each["params"].get("canceled")] == []
    finally:
        browser.close()
