"""The input pipeline's functions, and how long a step takes with more workers or cheaper batches."""

from __future__ import annotations

import pytest

from stepscope.analysis.input_pipeline import Batches, Load, batches, input_table
from stepscope.trace import Metadata, Trace, Window
from stepscope.trace.program_facts import ProgramFacts
from tests.unit.diagnosis.rules.loaders import ALONE, MS, facts
from tests.unit.recording import Recording

FETCH = "torch/utils/data/_utils/fetch.py(25): fetch"
COLUMNS = ["stage", "function", "file", "line", "calls", "total_ns", "self_ns", "mean_ns", "runs_in"]


def by_frames() -> Trace:
    """A loader's batch of two items: each 100 ns, 60 of them in a transform; then 50 ns to join them, and 10 to pin."""
    recording = Recording()
    recording.annotation(0, 400, ALONE)
    recording.frame(10, 300, FETCH)
    recording.frame(20, 220, "torch/utils/data/_utils/fetch.py(52): <listcomp>")
    for begin in (30, 135):
        recording.frame(begin, 100, "torch/utils/data/dataset.py(400): __getitem__")
        recording.frame(begin + 5, 90, "data.py(10): __getitem__")
        recording.frame(begin + 10, 60, "data.py(20): blur")
    recording.frame(245, 50, "torch/utils/data/_utils/collate.py(300): default_collate")
    recording.frame(320, 10, "torch/utils/data/_utils/pin_memory.py(60): pin_memory")
    recording.frame(500, 50, "data.py(20): blur")  # outside the loader
    return recording.trace()


def test_without_anything_there_is_nothing() -> None:
    table = input_table(Trace.from_tables({}))

    assert table.is_empty()
    assert set(table.columns) == {*COLUMNS, "share", "processor_ns"}


def test_frames_inside_the_loader_by_stage() -> None:
    table = input_table(by_frames())

    assert table.select("stage", "function", "line", "calls", "total_ns", "self_ns").rows() == [
        ("transform", "blur", 20, 2, 120, 120),
        ("item", "__getitem__", 10, 2, 180, 60),
        ("collate", "default_collate", 300, 1, 50, 50),
        ("loader", "fetch", 25, 1, 300, 30),
        ("loader", "<listcomp>", 52, 1, 220, 20),
        ("item", "__getitem__", 400, 2, 200, 20),
        ("pin", "pin_memory", 60, 1, 10, 10),
    ]
    assert table["runs_in"].unique().to_list() == ["main process"]
    assert table["share"].sum() == pytest.approx(1)
    assert table["processor_ns"].null_count() == table.height


def test_only_what_begins_in_the_window_counts() -> None:
    table = input_table(by_frames(), window=Window(240, 300))

    assert table.select("function", "self_ns").rows() == [("default_collate", 50)]


def test_measured_stages_come_first_and_items_contain_their_transforms() -> None:
    program = facts(workers=2, item_ms=30, transform_ms=20, collate_ms=5, item_processor_ms=24, batches=2)
    recording = Recording(metadata=Metadata(program=program))

    table = input_table(recording.trace())

    assert table.select(*COLUMNS, "processor_ns").rows() == [
        ("transform", "Blur.__call__", "data.py", 20, 16, 40 * MS, 40 * MS, 2_500_000, "workers", 40 * MS),
        ("item", "Images.__getitem__", "data.py", 10, 16, 60 * MS, 20 * MS, 3_750_000, "workers", 48 * MS),
        ("collate", "join", "data.py", 30, 2, 10 * MS, 10 * MS, 5 * MS, "workers", 10 * MS),
    ]


def test_a_batch_is_its_items_and_their_collate() -> None:
    measured = batches(facts(workers=2, item_ms=30, item_processor_ms=24, collate_ms=5), "")

    assert measured == Batches(2, 35 * MS, 29 * MS)


def test_without_a_collate_function_items_tell_the_batches() -> None:
    assert batches(facts(workers=2, item_ms=30, batches=3), "") == Batches(2, 30 * MS, 30 * MS)


def test_without_facts_only_the_loaders_kind_is_known() -> None:
    assert batches(ProgramFacts(), ALONE) == Batches(0, None, None)
    assert batches(ProgramFacts(), "enumerate(DataLoader)#_MultiProcessingDataLoaderIter") == Batches(None, None, None)
    assert batches(ProgramFacts(), "") == Batches(None, None, None)


@pytest.mark.parametrize(
    ("workers", "cheaper", "step"),
    [
        (0, 0, 160),  # one after the other
        (1, 0, 100),  # the one worker's rate
        (2, 0, 80),  # 60 + 100 of work on two processors
        (8, 0, 80),
        (8, 50, 60),  # the computation
        (0, 90, 70),
        (1, 200, 60),
    ],
)
def test_a_step_is_bound_by_computation_workers_or_processors(workers: int, cheaper: int, step: int) -> None:
    load = Load(compute_ns=60, busy_ns=60, batch_ns=100, batch_processor_ns=100, processors=2)

    assert load.step_ns(workers, cheaper_ns=cheaper) == step


@pytest.mark.parametrize(
    ("batch", "processor", "processors", "workers"),
    [
        (100, 100, 2, 2),
        (100, 100, None, 2),
        (50, 50, 2, 1),
        (300, 300, 16, 5),
        (300, 300, 2, 2),  # never more than processors
        (300, 3, 2, 2),
        (0, 0, None, 1),
    ],
)
def test_as_few_workers_as_keep_up(batch: int, processor: int, processors: int | None, workers: int) -> None:
    load = Load(compute_ns=60, busy_ns=60, batch_ns=batch, batch_processor_ns=processor, processors=processors)

    assert load.workers_needed() == workers
