"""Traces of programs that load data, for the tests of the rules about input."""

from __future__ import annotations

from stepscope.trace import Metadata
from stepscope.trace.program_facts import InputStageFacts, LoaderFacts, ProgramFacts, StepFacts
from tests.unit.recording import Recording

ALONE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
MS = 1_000_000


def facts(
    *,
    workers: int = 0,
    processors: int = 8,
    item_ms: int = 0,
    item_processor_ms: int | None = None,
    collate_ms: int = 0,
    transform_ms: int = 0,
    batches: int = 4,
    waiting_ms: int | None = None,
    busy_ms: int | None = None,
    batches_of_an_epoch: int | None = None,
    **loader: bool | int,
) -> ProgramFacts:
    """A loader of batches of 8, whose stages took so long for each batch."""

    def stage(name: str, function: str, line: int, calls: int, ms: int, processor_ms: int) -> InputStageFacts:
        return InputStageFacts(
            stage=name,
            name=function,
            file="data.py",
            line=line,
            calls=calls * batches,
            total_ns=ms * batches * MS,
            processor_ns=processor_ms * batches * MS,
            in_workers=workers > 0,
        )

    stages = [
        stage(
            "item", "Images.__getitem__", 10, 8, item_ms, item_ms if item_processor_ms is None else item_processor_ms
        ),
        stage("collate", "join", 30, 1, collate_ms, collate_ms),
        stage("transform", "Blur.__call__", 20, 8, transform_ms, transform_ms),
    ]
    steps = [
        StepFacts(
            index=number,
            process_processor_ns=None if busy_ms is None else busy_ms * MS,
            thread_waiting_ns=None if waiting_ms is None else waiting_ms * MS,
        )
        for number in range(batches)
    ]
    return ProgramFacts(
        loaders=(LoaderFacts(dataset="Images", workers=workers, batch_size=8, batches=batches_of_an_epoch, **loader),),
        input_stages=tuple(each for each in stages if each.total_ns),
        process={"usable_processors": processors},
        steps=tuple(steps) if busy_ms is not None or waiting_ms is not None else (),
    )


def loading(
    wait_ms: int | list[int], program: ProgramFacts | None = None, *, compute_ms: int = 60, workers: bool = False
) -> Recording:
    """Four steps on a CPU: a wait for the loader, then a computation."""
    waits = [wait_ms] * 4 if isinstance(wait_ms, int) else wait_ms
    recording = Recording(metadata=Metadata(program=program))
    begin = 0
    for number, wait in enumerate(waits):
        recording.step(begin, (wait + compute_ms) * MS, number)
        recording.annotation(begin, wait * MS, WORKERS if workers else ALONE)
        recording.operator(begin + wait * MS, compute_ms * MS, "aten::mm")
        recording.line(begin, (wait + compute_ms) * MS, "train.py(7): main")
        begin += (wait + compute_ms) * MS
    return recording


def by_lines(
    program: ProgramFacts, *lines: tuple[str, int], compute_ms: int, main: str = "train.py(7): main"
) -> Recording:
    """Four steps on a CPU: a batch, so many milliseconds at each line, then a computation at a line of main."""
    recording = Recording(metadata=Metadata(program=program))
    at, wait = 0, sum(ms for _, ms in lines) * MS
    for number in range(4):
        recording.step(at, wait + compute_ms * MS, number)
        recording.annotation(at, wait, ALONE)
        for name, ms in lines:
            recording.line(at, ms * MS, name)
            at += ms * MS
        recording.line(at, compute_ms * MS, main)
        recording.operator(at, compute_ms * MS, "aten::mm")
        at += compute_ms * MS
    return recording
