"""What slow workers, stages and micro-batches cost: logs of a simulated pipeline with planted causes, and a study's."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from stepscope.analysis.stragglers import stragglers
from stepscope.commands import main
from stepscope.errors import UnreadableTraceError
from stepscope.readers.operation_log import operation_log
from stepscope.report.stragglers import gpus_of_row, saved_ns

STAGES, RANKS, BATCHES, STEPS = 4, 4, 8, 3
Length = Callable[[int, int, int, int], float]
"""Seconds of a forward pass, by step, data-parallel rank, stage and micro-batch."""


def pipeline(length: Length, *, ranks: int = RANKS) -> pl.DataFrame:
    """The log of steps that send forward and backward one by one (1F1B), each operation as soon as it can be."""
    rows = []
    for step in range(STEPS):
        for rank in range(ranks):
            rows += _of_pipeline(step, rank, length)
    for step in range(STEPS):
        own: dict[tuple[int, int], float] = {}
        for row in rows:
            if row["step"] == step:
                place = row["dp_rank"], row["stage"]
                own[place] = max(own.get(place, 0.0), row["start_ts"] + row["duration"])
        reduced = [max(own[rank, stage] for rank in range(ranks)) + 0.011 for stage in range(STAGES)]
        for (rank, stage), end in own.items():  # a stage's ranks meet in the reduction, and all in the clipping
            for name, start, until in (
                ("layernorm-grads-all-reduce", end, end + 0.001),
                ("grads-reduce-scatter", end + 0.001, reduced[stage]),
                ("optimizer-clip-main-grad", reduced[stage], max(reduced) + 0.001),
                ("optimizer", max(reduced) + 0.001, max(reduced) + 0.003),
            ):
                rows.append({"step": step, "dp_rank": rank, "stage": stage, "seq_id": 0, "mc": -1, "gmc": -1,
                             "optype": name, "start_ts": start, "duration": until - start})  # fmt: skip
    table = pl.DataFrame(rows)
    return table.with_columns(rank=pl.col("stage") * ranks + pl.col("dp_rank"))


def _of_pipeline(step: int, rank: int, length: Length) -> list[dict[str, Any]]:
    done: dict[tuple[str, int, int], float] = {}
    free = [0.0] * STAGES
    order = [_schedule(stage) for stage in range(STAGES)]
    rows: list[dict[str, Any]] = []
    waiting = [list(each) for each in order]
    while any(waiting):
        for stage in range(STAGES):
            if not waiting[stage]:
                continue
            way, batch = waiting[stage][0]
            before = ("f", stage - 1, batch) if way == "f" else ("b", stage + 1, batch)
            needs = 0 <= before[1] < STAGES
            if needs and before not in done:
                continue
            waiting[stage].pop(0)
            start = max(free[stage], done.get(before, 0.0))
            own = length(step, rank, stage, batch) * (1 if way == "f" else 2)
            name = "forward" if way == "f" else "backward"
            place = {"step": step, "dp_rank": rank, "stage": stage, "seq_id": batch}
            none = {"mc": -1, "gmc": -1}
            if needs:
                rows.append({**place, **none, "optype": f"{name}-recv", "start_ts": start, "duration": 0.0})
            rows.append(
                {**place, "mc": 0, "gmc": stage, "optype": f"{name}-compute", "start_ts": start, "duration": own}
            )
            if 0 <= stage + (1 if way == "f" else -1) < STAGES:
                rows.append({**place, **none, "optype": f"{name}-send", "start_ts": start + own, "duration": 0.0})
            done[way, stage, batch] = free[stage] = start + own
    return rows


def _schedule(stage: int) -> list[tuple[str, int]]:
    ahead = min(STAGES - stage, BATCHES)
    order = [("f", batch) for batch in range(ahead)]
    for batch in range(BATCHES):
        order.append(("b", batch))
        if batch + ahead < BATCHES:
            order.append(("f", batch + ahead))
    return order


def log_of(tmp_path: Path, length: Length, **options: int) -> pl.DataFrame:
    path = tmp_path / "log.parquet"
    pipeline(length, **options).write_parquet(path)
    found = operation_log(path)
    assert found is not None
    return found


def test_a_job_whose_operations_are_alike_loses_nothing(tmp_path: Path) -> None:
    found = stragglers(log_of(tmp_path, lambda *_: 0.1))
    assert found.slowdown == pytest.approx(1.0, abs=1e-3)
    assert found.delay_s == pytest.approx(0.0, abs=0.05)


def test_one_slow_worker(tmp_path: Path) -> None:
    found = stragglers(log_of(tmp_path, lambda step, rank, stage, batch: 0.2 if (rank, stage) == (2, 1) else 0.1))
    [slowest] = found.slowest
    assert (slowest.dp_rank, slowest.stage, slowest.rank) == (2, 1, 6)
    assert slowest.compute_ratio == pytest.approx(2.0)
    assert next(iter(found.shares)) == "workers"
    assert found.shares["workers"] > 0.95


def test_a_last_stage_with_more_work(tmp_path: Path) -> None:
    found = stragglers(log_of(tmp_path, lambda step, rank, stage, batch: 0.17 if stage == STAGES - 1 else 0.1))
    assert next(iter(found.shares)) == "last_stage"
    assert found.shares["last_stage"] > 0.9
    assert found.stage_ratio == pytest.approx(1.7)


def test_micro_batches_of_unequal_sequences(tmp_path: Path) -> None:
    lengths = [0.05, 0.2, 0.08, 0.15, 0.06, 0.18, 0.1, 0.12]
    found = stragglers(log_of(tmp_path, lambda step, rank, stage, batch: lengths[(batch + 3 * rank + step) % BATCHES]))
    assert next(iter(found.shares)) == "sequences"
    assert found.correlation == pytest.approx(1.0)
    assert found.shares["workers"] < 0.5


def test_one_data_parallel_rank(tmp_path: Path) -> None:
    found = stragglers(log_of(tmp_path, lambda step, rank, stage, batch: 0.1 + 0.05 * (stage == 3), ranks=1))
    assert next(iter(found.shares)) in ("last_stage", "workers")  # the stage is one worker


def test_steps_that_differ_cannot_be_compared(tmp_path: Path) -> None:
    log = log_of(tmp_path, lambda *_: 0.1)
    with pytest.raises(UnreadableTraceError, match="was logged 11 times in 3 steps of 4 data-parallel ranks"):
        stragglers(log[1:] if log["optype"][0] == "forward-compute" else log.filter(pl.int_range(pl.len()) > 0))


def test_damaged_logs_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.parquet"
    table = pipeline(lambda *_: 0.1)
    table.write_parquet(path)
    whole = path.read_bytes()
    for data in (whole[:-20], whole[:300], b"PAR1"):
        path.write_bytes(data)
        assert main(["diagnose", str(path)]) == 2
        assert "Traceback" not in capsys.readouterr().err
    for bad in (pl.lit(None, pl.Float64), pl.lit(float("nan")), pl.lit(-1.0), pl.lit(float("inf"))):
        table.with_columns(duration=bad).write_parquet(path)
        assert main(["diagnose", str(path)]) == 2
        assert "impossible" in capsys.readouterr().err
    pl.DataFrame({"x": [1]}).write_parquet(path)
    assert main(["diagnose", str(path)]) == 2


Change = Callable[[pl.DataFrame], pl.DataFrame]


@pytest.mark.parametrize(
    "change",
    [
        lambda log: log.filter(pl.col("optype") != "backward-compute"),
        lambda log: log.with_columns(pl.col("stage") * 1000),
        lambda log: log.with_columns(duration=pl.lit(0.0)),
        lambda log: log.with_columns(duration=pl.lit(1e300)),
        lambda log: log.with_columns(pl.col("start_ts") * 1e300),
        lambda log: log.with_columns(step=pl.concat_list("step", "seq_id")),
        lambda log: log.with_columns(duration=pl.struct("step", "seq_id")),
        lambda log: log.with_columns(optype=pl.lit(b"\xff")),
        lambda log: log.with_columns(step=pl.when(pl.int_range(pl.len()) == 0).then(1).otherwise(pl.col("step"))),
        lambda log: log.with_columns(optype=pl.lit("\x1b[31m" + "long" * 10_000)),
    ],
)
def test_logs_of_what_cannot_be_are_refused_in_a_sentence(
    change: Change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.parquet"
    change(pipeline(lambda *_: 0.1)).write_parquet(path)
    assert main(["diagnose", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 500
    assert "\x1b" not in said


def test_a_log_of_more_operations_than_there_is_memory_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.parquet"
    pipeline(lambda *_: 0.1).write_parquet(path)
    monkeypatch.setattr("stepscope.readers.operation_log.memory_limit", lambda: 10_000.0)
    with pytest.raises(UnreadableTraceError, match="memory"):
        operation_log(path)


EVENT = {"name": "forward-compute", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 5, "args": {"step": 0, "seq_id": 0}}
WORKER = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "PP rank 0"}}


@pytest.mark.parametrize(
    "event",
    [
        {"pid": [1]}, {"name": [1]}, {"ts": "now"}, {"ts": 10**30}, {"args": {"step": [0], "seq_id": 0}},
        {"args": {"step": 0, "seq_id": 10**40}}, {"args": 3},
    ],
)  # fmt: skip
def test_timelines_of_other_types_are_refused_in_a_sentence(event: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([WORKER, EVENT, {**EVENT, **event}]))
    assert main(["diagnose", str(tmp_path / "a.json")]) == 2


def test_damaged_timelines_are_refused_in_a_sentence(tmp_path: Path) -> None:
    text = json.dumps([WORKER, EVENT]).encode()
    packed = bytearray(gzip.compress(text))
    packed[20] ^= 0xFF
    deep = text[:-1] + b', {"args": {"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}]"
    for data in (bytes(packed), deep, text[:-1], text.replace(b"PP", b"\xff")):
        (tmp_path / "a.json").write_bytes(data)
        assert main(["diagnose", str(tmp_path / "a.json")]) == 2


def test_a_worker_without_peers_is_compared_with_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.parquet"
    pipeline(lambda step, rank, stage, batch: 0.2 if stage == 1 else 0.1, ranks=1).write_parquet(path)
    assert main(["diagnose", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the only worker of its stage" in text
    assert "other workers" not in text


def test_steps_in_which_operations_overlap_are_replayed_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.parquet"
    log = pipeline(lambda *_: 0.1)
    collection = log.filter(optype="optimizer").with_columns(
        optype=pl.lit("gc"), start_ts=pl.lit(0.0), duration=pl.lit(0.5)
    )
    pl.concat([log, collection]).write_parquet(path)
    assert main(["diagnose", str(path)]) == 0
    assert "longer than the logged one" in " ".join(capsys.readouterr().out.split())


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.parquet"
    pipeline(lambda step, rank, stage, batch: 0.2 if (rank, stage) == (2, 1) else 0.1).write_parquet(path)
    assert main(["diagnose", str(path), "--json", str(tmp_path / "job.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    job = json.loads((tmp_path / "job.json").read_text())["job"]
    assert job["headline"] in text
    assert job["causes"] == ["workers"]
    assert job["slowest"] == [[2, 1]]
    assert "rank 6 (data-parallel rank 2, stage 1), whose computations take 2.00 times" in text


def test_a_timeline_says_the_same(tmp_path: Path) -> None:
    table = pipeline(lambda step, rank, stage, batch: 0.17 if stage == STAGES - 1 else 0.1)
    events: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"DP rank [{rank}]"}} for rank in range(RANKS)
    ] + [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": rank,
            "tid": stage,
            "args": {"name": f"PP rank {stage}, TP rank 0, all"},
        }
        for rank in range(RANKS)
        for stage in range(STAGES)
    ]
    for row in table.iter_rows(named=True):
        arguments = {"step": row["step"], "model_chunk": row["mc"], "mb_id": 0, "seq_id": row["seq_id"]}
        events.append({
            "name": row["optype"], "ph": "X", "pid": row["dp_rank"], "tid": row["stage"], "args": arguments,
            "ts": (row["start_ts"] + 100 * row["step"]) * 1e6, "dur": row["duration"] * 1e6,
        })  # fmt: skip
    path = tmp_path / "timeline.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    log = operation_log(path)
    assert log is not None
    same = stragglers(log_of(tmp_path, lambda step, rank, stage, batch: 0.17 if stage == STAGES - 1 else 0.1))
    found = stragglers(log)
    assert found.step_s == pytest.approx(same.step_s)
    assert found.shares == pytest.approx(same.shares)


def test_other_files_are_no_logs(tmp_path: Path) -> None:
    for name, data in (("a.json", b"[]"), ("b.json", b'{"traceEvents": []}'), ("c.gz", b"\x1f\x8b\x08"), ("d", b"")):
        (tmp_path / name).write_bytes(data)
        assert operation_log(tmp_path / name) is None


STUDY = Path(os.environ.get("STEPSCOPE_TRACES", "")) / "stragglers"


@pytest.mark.skipif(not STUDY.is_dir(), reason="STEPSCOPE_TRACES is not set")
@pytest.mark.parametrize("form", ["trace-{}.parquet", "timeline-{}.json.gz"])
@pytest.mark.parametrize(("name", "cause"), [("AR", "workers"), ("ST", "last_stage")])
def test_the_study_is_reproduced(name: str, cause: str, form: str) -> None:
    """https://github.com/ByteDance-Seed/StragglerAnalysis, whose results are beside its logs."""
    log = operation_log(STUDY / form.format(name))
    assert log is not None
    found = stragglers(log)
    result, workers, stage = (
        json.loads((STUDY / f"{each}-{name}.json").read_text()) for each in ("result", "mw", "ms")
    )
    assert found.slowdown == pytest.approx(result["blocking_slowdown"], rel=1e-5)
    assert found.shares["workers"] == pytest.approx(workers["Mw"], abs=1e-4)
    assert found.shares["last_stage"] == pytest.approx(stage["Ms"], abs=1e-4)
    assert found.step_s == pytest.approx(workers["tori"], rel=1e-5)
    assert next(iter(found.shares)) == cause
    lost = round((found.step_s - found.usual_s) * 1e9)
    assert all(0 <= ns <= lost for ns in saved_ns(found).values())
    assert gpus_of_row(found) == (4 if form.endswith("parquet") and name == "AR" else None)  # else ranks are unknown
    by_type = result["blocking_decompose_by_optype"]
    alike = [kind for kind in found.types if kind in by_type]  # the study counts sends and receives together
    assert {"forward-compute", "backward-compute", "grads-reduce-scatter"} <= set(alike)
    assert {kind: found.types[kind] for kind in alike} == pytest.approx(
        {kind: by_type[kind] for kind in alike}, rel=1e-4
    )
