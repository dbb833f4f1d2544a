"""Telemetry as users meet it: a training process, its run folder, the commands, the report in a browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import polars as pl
import pytest

import stepscope
from stepscope.analysis.telemetry import telemetry_picture
from stepscope.commands import main
from stepscope.commands.read.documents import telemetry_file
from stepscope.record.telemetry.store import Missing, Sample, Series, TelemetryStore
from stepscope.trace.telemetry import read_telemetry, telemetry_files
from tests.browser import Browser
from tests.e2e.test_report_files import HOSTILE, browser, opened
from tests.e2e.test_report_files import pytestmark as in_a_browser
from tests.unit.rendered import documents_in

__all__ = ["browser"]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(stepscope.__file__).parents[1])}
SECOND = 1_000_000_000
TRAINING = """
    import sys, torch, stepscope
    from pathlib import Path
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    run = stepscope.telemetry(folder, interval_s=0.1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.watch(model, activations=True, every=2, modules=["0", "2"])
    run.watch_optimizer(optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for step in range(steps):
            loss = model(torch.randn(256, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss}, step=step)
            run.throughput(samples=256)
            profiler.step()
            print(step, flush=True)
    profiler.export_chrome_trace(str(folder / "rank0" / "trace-1.json"))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went to its end."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(folder), "8"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stepscope" not in done.stderr
    return folder


def test_a_training_leaves_its_values_norms_and_the_machines_state(trained: Path) -> None:
    read = read_telemetry(telemetry_files(trained))

    steps = {
        name: group["step"].to_list()
        for (name,), group in read.samples.filter(pl.col("step").is_not_null()).group_by("name", maintain_order=True)
    }
    assert steps == {
        "activation_norm/0": [0, 2, 4, 6],
        "activation_norm/2": [0, 2, 4, 6],
        "gradient_norm/0": [0, 2, 4, 6],
        "gradient_norm/2": [0, 2, 4, 6],
        "learning_rate": list(range(8)),
        "loss": list(range(8)),
    }
    assert {"cpu_share", "memory_used_bytes", "cpu_cores"} <= set(read.samples["name"])
    assert read.samples.filter(pl.col("name") == "loss")["value"].is_finite().all()


def test_samples_lie_in_the_steps_of_the_trace(trained: Path) -> None:
    # Given
    from stepscope.analysis.steps import step_table

    trace = stepscope.open_trace(trained / "rank0" / "trace-1.json")
    assert trace.metadata.origin_unix_ns is not None

    # When
    samples = read_telemetry(telemetry_files(trained)).samples
    losses = samples.filter(pl.col("name") == "loss").select(
        "step", at=pl.col("unix_ns") - trace.metadata.origin_unix_ns
    )
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    within = losses.join_where(step_table(trace), pl.col("at") >= pl.col("start_ns"), pl.col("at") < end_ns)

    # Then: what was logged with step n was logged in the profiler's step n
    assert within.height >= 6
    assert within["step"].to_list() == within["index"].to_list()


def test_the_table_says_what_there_is_and_why_the_rest_is_not(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["telemetry", str(trained), "--format", "json"]) == 0
    rows = {(row["source"], row["name"]): row for row in json.loads(capfd.readouterr().out)}

    assert rows["log", "loss"]["samples"] == 8
    assert rows["process", "network"]["missing"] == "the system counts network traffic for the machine only"
    assert rows["process", "network"]["mean"] is None


def test_every_sample_as_csv_and_parquet(trained: Path, tmp_path: Path) -> None:
    for ending in ("csv", "parquet"):
        assert main(["telemetry", str(trained), "--samples", "--output", str(tmp_path / f"samples.{ending}")]) == 0

    table = pl.read_parquet(tmp_path / "samples.parquet")
    assert table.equals(read_telemetry(telemetry_files(trained)).samples)
    assert pl.read_csv(tmp_path / "samples.csv").height == table.height


@pytest.mark.parametrize("tool", ["csv", "tensorboard"])
def test_exports_from_the_command_line(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], tool: str
) -> None:
    assert main(["telemetry", str(trained), "--export", tool, "--output", str(tmp_path / "out")]) == 0

    made = capfd.readouterr().out.splitlines()
    assert made
    assert all(Path(line).exists() for line in made)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "nowhere is not a file, folder or run"),
        (["."], ". has no telemetry"),
        ([".", "--export", "excel"], "invalid choice: 'excel'"),
        (["RUN", "--export", "csv"], "an export is written into a folder; name it with --output"),
        (["RUN", "--export", "csv", "--output", "x", "--redact"], "--redact does not work with --export"),
        (["RUN", "--export", "csv", "--output", "/dev/null/x"], "/dev/null/x cannot be written"),
    ],
)
def test_mistakes_are_one_sentence(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["telemetry", *(str(trained) if word == "RUN" else word for word in arguments)]) == 2

    said = capfd.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


def test_the_report_of_a_trace_in_a_run_has_plots(trained: Path, tmp_path: Path) -> None:
    trace = str(trained / "rank0" / "trace-1.json")
    for name, options in (("plain", []), ("redacted", ["--redact"])):
        assert main(["diagnose", trace, "--html", str(tmp_path / f"{name}.html"), *options]) == 0

        page = (tmp_path / f"{name}.html").read_text()
        [rank] = documents_in(page)["telemetry"]["ranks"]
        assert rank["recorded_s"] is not None
        assert "loss" in {plot["title"] for plot in rank["plots"]}


def test_damaged_telemetry_does_not_keep_a_trace_from_its_diagnosis(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0" / "telemetry").mkdir(parents=True)
    (tmp_path / "rank0" / "telemetry" / "1.sqlite").write_bytes(b"damaged" * 999)
    trace = tmp_path / "rank0" / "trace-1.json"
    trace.write_bytes((trained / "rank0" / "trace-1.json").read_bytes())

    assert main(["diagnose", str(trace), "--html", str(tmp_path / "report.html")]) == 0
    assert "1.sqlite could not be read" in capfd.readouterr().err


def test_a_killed_training_loses_the_last_seconds_only(tmp_path: Path) -> None:
    # Given
    command = [sys.executable, "-c", textwrap.dedent(TRAINING), str(tmp_path), "100000000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not telemetry_files(tmp_path):
        process.stdout.readline()
    begun = time.monotonic()
    while time.monotonic() - begun < 2:
        last = int(process.stdout.readline())

    # When
    process.send_signal(signal.SIGKILL)
    process.wait()

    # Then: nothing before the end has a hole, and most was there
    steps = read_telemetry(telemetry_files(tmp_path)).samples.filter(pl.col("name") == "loss")["step"].to_list()
    assert steps == list(range(len(steps)))
    assert len(steps) > last / 10


def page_of(folder: Path, samples: list[Sample], missing: list[Missing] | None = None) -> bytes:
    path = folder / "rank0" / "telemetry" / "1.sqlite"
    store = TelemetryStore(path, {"rank": "0"})
    store.append(samples, missing or [])
    store.close()
    picture = telemetry_picture(read_telemetry([path]))
    assert picture is not None
    return telemetry_file("a run", [(0, picture)])


class TestInABrowser:
    pytestmark = in_a_browser

    def test_hostile_names_are_text(self, browser: Browser, tmp_path: Path) -> None:
        # Given
        series = Series("log", HOSTILE, HOSTILE, HOSTILE)
        samples = [Sample(series, SECOND * number, number, float(number)) for number in range(3)]

        # When
        path = opened(browser, tmp_path, page_of(tmp_path, samples, [Missing(series, HOSTILE, 0)]))

        # Then
        assert browser.complaints == []
        assert [url for url in browser.requests if url != "data:,"] == [path.as_uri()]
        assert HOSTILE[:40] in browser.script("document.querySelector('main').innerText")
        assert browser.script("document.querySelectorAll('img, main script').length") == 0

    @pytest.mark.parametrize("width", [1280, 375])
    def test_many_series_fit(self, browser: Browser, tmp_path: Path, width: int) -> None:
        # Given: more modules and metrics than are drawn
        samples = [
            Sample(Series(source, f"{name}{number}"), SECOND * step, step, float(number))
            for source, name in (("gradient", "gradient_norm/layers."), ("log", "metric " + "x" * 80))
            for number in range(120)
            for step in range(3)
        ]
        mobile = width < 500
        browser.page("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=mobile)

        # When
        opened(browser, tmp_path, page_of(tmp_path, samples))

        # Then
        assert browser.script("document.documentElement.scrollWidth") <= width
        text: str = browser.script("document.body.innerText")
        assert "80 more are not drawn" in text
        assert "80 more plots are not drawn" in text
        assert browser.complaints == []
