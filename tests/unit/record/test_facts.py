"""The facts of the program that a recording keeps: what is collected, and that nothing of it stays."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest

import stepscope
from stepscope.record.annotations import CheckpointCalls
from stepscope.record.facts import FactsRecording, LiveObjects, add_to_trace
from stepscope.record.recorder import Recorder
from stepscope.record.schedule import RecordOptions
from stepscope.trace.cache import TraceCache
from stepscope.trace.program_facts import KEY, LoaderFacts, ProgramFacts, from_header, to_json

torch = pytest.importorskip("torch")

PLAIN = RecordOptions(shapes=False, memory=False, lines=False)


class Numbers(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(index)


def recorded(path: Path, *, collect: bool = False) -> Path:
    """Two epochs of two steps, recorded from the first one's first batch on."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4)
    recorder = Recorder(PLAIN)
    recorder.start()
    for _ in range(2):
        for batch in loader:
            model(batch.float()).sum().backward()
            optimizer.step()
            if collect:
                gc.collect()
            recorder.step()
    return recorder.save(path)


def test_a_recording_keeps_them(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.json.gz")

    program = stepscope.open_trace(path).metadata.program

    assert program is not None
    [loader] = program.loaders
    assert loader == LoaderFacts(
        dataset="Numbers", workers=0, batch_size=4, batches=2, pin_memory=False, persistent_workers=False, iterators=2
    )
    assert {(stage.stage, stage.name, stage.calls, stage.in_workers) for stage in program.input_stages} == {
        ("item", "Numbers.__getitem__", 16, False),
        ("collate", "default_collate", 4, False),
        ("sampler", "SequentialSampler.__iter__", 4, False),
    }
    mine = [one for one in program.optimizers if (one.name, one.tensors) == ("AdamW", 2)]
    assert [(one.foreach, one.fused, one.implementation, one.device) for one in mine] == [
        (True, None, "foreach", "cpu")
    ]
    assert program.model is not None
    assert program.model.parameter_bytes is not None
    assert program.model.parameter_bytes >= 20 * 4
    assert [step.index for step in program.steps] == [0, 1, 2, 3, 4]
    assert all(step.duration_ns > 0 and step.thread_processor_ns is not None for step in program.steps)
    assert program.torch["threads"] == torch.get_num_threads()
    assert program.process["usable_processors"]
    assert program.start["recording_ns"] > 0
    assert program.process["warm_up_ns"] > 0


def test_the_cache_keeps_them(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.json")
    cache = TraceCache(tmp_path / "cache")

    first = stepscope.open_trace(path).metadata.program
    through = [stepscope.readers.open_trace(path, cache=cache).metadata.program for _ in range(2)]  # type: ignore[attr-defined]

    assert through == [first, first]


@pytest.mark.slow
def test_the_collector_stands_in_the_trace(tmp_path: Path) -> None:
    trace = stepscope.open_trace(recorded(tmp_path / "trace.json", collect=True))

    found = trace.annotations.filter(trace.annotations["name"] == "Garbage collection (gc.collect)")

    trace.check()
    assert found.height == 4
    assert (found["duration_ns"] > 0).all()
    assert trace.metadata.program is not None
    assert {pause.function for pause in trace.metadata.program.pauses if pause.called} == {"recorded"}


@pytest.mark.slow
def test_nothing_of_the_programs_is_held(tmp_path: Path) -> None:
    gone = []

    class Mine(Numbers):
        pass

    def run() -> None:
        dataset = Mine()
        gone.append(weakref.ref(dataset))
        recording = FactsRecording()
        recording.start()
        list(torch.utils.data.DataLoader(dataset, batch_size=4))
        recording.finish()

    run()
    gc.collect()

    assert gone[0]() is None


def test_torch_is_as_it_was(tmp_path: Path) -> None:
    from torch.utils.data import _utils, dataloader

    before = [
        torch.save, torch.load, dataloader.DataLoader.__iter__, dataloader.DataLoader._get_iterator,
        dataloader._DatasetKind.create_fetcher, _utils.pin_memory.pin_memory, list(gc.callbacks),
    ]  # fmt: skip
    recording = FactsRecording()
    recording.start()
    assert torch.save is not before[0]
    recording.finish()

    assert before == [
        torch.save, torch.load, dataloader.DataLoader.__iter__, dataloader.DataLoader._get_iterator,
        dataloader._DatasetKind.create_fetcher, _utils.pin_memory.pin_memory, list(gc.callbacks),
    ]  # fmt: skip
    assert recording.finish() is None


def test_a_recording_that_is_thrown_away_leaves_nothing_on() -> None:
    before = list(gc.callbacks)
    recorder = Recorder(PLAIN)
    recorder.start()
    recorder.discard()

    assert gc.callbacks == before


@pytest.mark.parametrize(
    ("settings", "implementation"),
    [({}, "single"), ({"foreach": True}, "foreach"), ({"fused": True}, "fused"), ({"foreach": False}, "single")],
)
def test_what_an_optimizer_runs(settings: dict[str, bool], implementation: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3)) for _ in range(7)], lr=0.1, **settings)

    found = [one for one in LiveObjects().optimizers() if one.tensors == 7]

    assert [one.implementation for one in found] == [implementation]
    del optimizer


def test_checkpoints_are_named(tmp_path: Path) -> None:
    calls = CheckpointCalls()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        calls.start()
        torch.save({"weight": torch.ones(1000)}, tmp_path / "state.pt")
        torch.load(tmp_path / "state.pt")
        calls.stop()

    names = [event.name for event in profiler.events()]
    assert names.count("stepscope.checkpoint#torch.save") == 1
    assert names.count("stepscope.checkpoint#torch.load") == 1
    assert calls.saved_bytes == (tmp_path / "state.pt").stat().st_size


@pytest.mark.parametrize("text", ['{"traceEvents": []}', '{"traceEvents": [],\n "traceName": "a"\n}\n'])
def test_they_are_written_behind_the_events(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    facts = ProgramFacts(loaders=(LoaderFacts(dataset="Images", workers=4),))

    add_to_trace(path, facts)

    content = json.loads(path.read_text())
    assert from_header(content[KEY]) == facts
    assert {name: content[name] for name in content if name != KEY} == json.loads(text)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"traceEvents": [', '{"traceEvents": [],}'])
def test_another_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)

    add_to_trace(path, ProgramFacts())
    add_to_trace(path, None)

    assert path.read_text() == text


@pytest.mark.parametrize(
    "value",
    [None, [], "x", 3, {"loaders": 3}, {"steps": [{"index": "a"}]}, {"start": {"a": 1.5}}]
    + [{"input_stages": [{"calls": number}]} for number in (2**64, -(2**62), 10**25)]
    + [{"padding": [{"padding_share": share}]} for share in (float("nan"), float("inf"), 1e300)]
    + [{"process": {"memory_bytes": 2**63}}],
)
def test_damaged_ones_are_none(value: object) -> None:
    assert from_header(value) is None


def test_what_a_later_version_adds_is_passed_over() -> None:
    assert from_header({"news": 1, "loaders": [{"dataset": "A", "more": 2}]}) == ProgramFacts(
        loaders=(LoaderFacts(dataset="A"),)
    )
    assert from_header(json.loads(to_json(ProgramFacts()))) == ProgramFacts()
