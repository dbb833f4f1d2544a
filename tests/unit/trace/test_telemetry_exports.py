"""Telemetry for other tools, read back with the real packages."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.trace.telemetry import (
    MISSING_SCHEMA,
    SAMPLE_SCHEMA,
    Telemetry,
    export_csv,
    export_tensorboard,
    export_wandb,
)

SECOND = 1_000_000_000


def telemetry(rows: list[tuple[Any, ...]]) -> Telemetry:
    """rank, source, name, device, seconds, step, value."""
    columns = ["rank", "source", "name", "device", "unix_ns", "step", "value"]
    schema = {name: SAMPLE_SCHEMA[name] for name in columns}
    frame = pl.DataFrame([(*row[:4], row[4] * SECOND, *row[5:]) for row in rows], schema=schema, orient="row")
    missing = pl.lit(None)
    samples = frame.with_columns(
        missing.cast(dtype).alias(name) for name, dtype in SAMPLE_SCHEMA.items() if name not in columns
    )
    return Telemetry(samples.select(list(SAMPLE_SCHEMA)), pl.DataFrame(schema=MISSING_SCHEMA))


ROWS: list[tuple[Any, ...]] = [
    (0, "log", "train/loss.mean", None, 100, 0, 2.0),
    (0, "log", "accuracy", None, 100, 0, 0.5),
    (0, "device", "power_w", "0", 101, None, 300.0),
    (0, "device", "power_w", "1", 101, None, None),
    (0, "device", "power_w", "0", 102, None, 310.0),
    (0, "log", "train/loss.mean", None, 103, 1, math.nan),
    (0, "log", "train/loss.mean", None, 104, 2, math.inf),
    (1, "log", "accuracy", None, 100, 0, 0.25),
]


def test_nothing_exports_to_nothing(tmp_path: Path) -> None:
    export_csv(telemetry([]), tmp_path)

    assert (tmp_path / "samples.csv").read_text() == ",".join(SAMPLE_SCHEMA) + "\n"
    assert export_tensorboard(telemetry([]), tmp_path) == []
    assert export_wandb(telemetry([]), tmp_path) == []


def test_csv_keeps_every_value_and_tells_null_from_nan(tmp_path: Path) -> None:
    paths = export_csv(telemetry(ROWS), tmp_path / "new" / "folder")

    assert [path.name for path in paths] == ["samples.csv", "missing.csv"]
    assert pl.read_csv(paths[0], schema=SAMPLE_SCHEMA).equals(telemetry(ROWS).samples, null_equal=True)


def test_tensorboard_reads_its_event_files(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = export_tensorboard(telemetry(ROWS), tmp_path)

    events = EventAccumulator(str(folders[0])).Reload()
    assert sorted(events.Tags()["scalars"]) == ["accuracy", "device0/power_w", "train/loss.mean"]
    assert [(each.wall_time, each.step, each.value) for each in events.Scalars("device0/power_w")] == [
        (101.0, 0, 300.0),
        (102.0, 1, 310.0),
    ]
    loss = [(each.step, str(each.value)) for each in events.Scalars("train/loss.mean")]
    assert loss == [(0, "2.0"), (1, "nan"), (2, "inf")]
    assert EventAccumulator(str(folders[1])).Reload().Scalars("accuracy")[0].value == 0.25


def records(path: Path) -> Iterator[Any]:
    """What a .wandb file holds: a LevelDB log of protocol buffers behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(message)
            message = b""


def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    # When
    folders = export_wandb(telemetry(ROWS), tmp_path / "mine", project="speed")

    # Then: the real package has written one run a rank, and nothing was sent
    assert [folder.name.startswith("offline-run-") for folder in folders] == [True, True]
    (path,) = folders[0].glob("*.wandb")
    found = list(records(path))
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    kept = [{name: value for name, value in row.items() if not name.startswith("_")} for row in history]
    assert kept[:3] == [
        {"train/loss.mean": 2.0, "accuracy": 0.5, "seconds": 0.0, "step": 0},
        {"device0/power_w": 300.0, "seconds": 1.0},
        {"device0/power_w": 310.0, "seconds": 2.0},
    ]
    assert [str(row["train/loss.mean"]).lower() for row in kept[3:]] == ["nan", "inf"]
    assert [row["_timestamp"] for row in history] == [100, 101, 102, 103, 104]
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, run.run_group) == ("speed", "rank0", "mine")
    metrics = {record.metric.name: record.metric.step_metric for record in found if record.metric.name}
    assert metrics["device0/power_w"] == "seconds"
    assert metrics["accuracy"] == metrics["train/loss\\.mean"] == "step"


@pytest.mark.parametrize(("exporter", "package"), [(export_tensorboard, "tensorboard"), (export_wandb, "wandb")])
def test_a_missing_package_is_one_sentence(
    exporter: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.errors import UsageError

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("stepscope.trace.telemetry.import_module", absent)
    with pytest.raises(UsageError, match=f"pip install {package}$"):
        exporter(telemetry(ROWS), tmp_path)
