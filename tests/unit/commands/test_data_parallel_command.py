"""`stepscope data-parallel`: settings from traces written by hand, whose best sizes of buckets are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from stepscope.commands import main
from stepscope.diagnosis.view import View
from stepscope.errors import UsageError
from stepscope.predict.buckets import gradients_of
from stepscope.predict.data_parallel_settings import (
    COPY,
    SEARCH,
    SettingsFromTrace,
    bucket_sizes,
    data_parallel_settings,
    on_device,
)
from stepscope.predict.limits import Link, Protocol
from stepscope.remedies import DataParallelSettings
from stepscope.trace import Metadata, Trace
from stepscope.trace.program_facts import DataParallelFacts, ModelFacts, ProgramFacts
from stepscope.whatif import Experiment
from tests.published_schema import wrong_in
from tests.unit.predict.test_scaling import MIB, device_steps, gradient, host_steps
from tests.unit.whatif.test_graph import US, Machine

LINK = Link("two", MIB / 100e-6, (Protocol(0.0, 25_000.0),))
"""Among two ranks a message takes 50 us, and 100 us for each MiB."""
DDP = DataParallelFacts(kind="DistributedDataParallel", bucket_bytes=25 * MIB, find_unused_parameters=False)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("COLUMNS", raising=False)


def two_ranks(
    facts: DataParallelFacts | None = DDP,
    *,
    gradients: int = 8,
    sizes: tuple[int, ...] = (1, 2),
    price: int = 50,
    marks: str = "",
) -> Trace:
    """Steps of 3 ms: a kernel of 100 us for each gradient of 1 MiB, then messages of these MiB over LINK."""
    model = ModelFacts(gradient_bytes=gradients * MIB)
    program = None if facts is None else ProgramFacts(data_parallel=(facts,), model=model)
    machine = Machine(Metadata(world_size=2, rank=0, program=program))
    for step in range(3):
        base, number = 3000 * step, 100 * step
        machine.step(base * US, 2900 * US, step)
        for each in range(gradients):
            number += 1
            machine.kernel(base + 10 + 10 * each, base + 20 + 100 * each, 100, number)
            gradient(machine, base + 18 + 10 * each)
        begin = base + 20 + 100 * gradients
        for size in sizes:
            number += 1
            machine.launch((base + 110) * US, US, number)
            machine.work(
                begin * US, (price + 100 * size) * US, "ncclDevKernel_AllReduce_Sum_f32", number,
                kind="communication", message_elements=size * MIB // 4, message_type="float",
            )  # fmt: skip
            begin += price + 100 * size
        if marks:
            machine.operator((base + 120) * US, 30 * US, marks)
        number += 1
        machine.call(base + 160, begin - base - 160, number, "cudaDeviceSynchronize", "synchronise")
    return machine.trace()


def settings_of(trace: Trace) -> SettingsFromTrace:
    return data_parallel_settings(View(trace))


def reasons_of(found: SettingsFromTrace) -> dict[str, str]:
    return {each.setting: each.why for each in found.reasons}


def test_exposed_messages_are_those_of_the_formula() -> None:
    experiment = Experiment(host_steps())  # gradients of 1 MiB at 200, 300 and 400 us
    found = bucket_sizes(experiment, gradients_of(experiment), LINK, 2, sizes=(1, 2, 4))

    assert [(each.megabytes, each.messages, each.communication_ns / US, each.exposed_ns / US) for each in found] == [
        (None, 2, pytest.approx(400), pytest.approx(250)),  # until 350, then 2 MiB from 400 until 650
        (1, 3, pytest.approx(450), pytest.approx(250)),  # until 350, 500 and 650
        (2, 2, pytest.approx(400), pytest.approx(300)),  # from 300 until 550, and 700
        (4, 1, pytest.approx(350), pytest.approx(350)),  # from 400
    ]


def test_a_gradient_is_there_when_the_device_has_computed_it() -> None:
    experiment = Experiment(device_steps())
    there = on_device(experiment, gradients_of(experiment))
    assert [time // US for time in there.time.tolist()] == [217, 318, 419, 1217, 1318, 1419]


def test_the_size_with_the_least_exposed_messages_is_recommended() -> None:
    found = settings_of(two_ranks())

    assert found.settings == DataParallelSettings(bucket_cap_mb=2.0, find_unused_parameters=False)
    assert found.ranks == 2
    assert found.latency_ns == pytest.approx(50_000)
    assert found.bandwidth_bytes_s == pytest.approx(MIB / 100e-6)
    by_size = {each.megabytes: each.exposed_ns / US for each in found.sizes}
    assert by_size[None] == pytest.approx(750)  # 7 MiB from the last gradient on
    assert by_size[1] == pytest.approx(8 * 150 - 7 * 100)  # one after the other, from the first gradient on
    assert by_size[2] == pytest.approx(4 * 250 - 6 * 100)
    assert reasons_of(found)["bucket_cap_mb"] == (
        "buckets of 2 MiB leave 0.40 ms of 1.00 ms of messages exposed in 4 messages; torch's own leave 0.75 ms in 2"
    )


def test_torchs_own_sizes_stay_where_no_other_hides_more() -> None:
    found = settings_of(two_ranks(gradients=2))
    assert found.settings.bucket_cap_mb is None
    assert reasons_of(found)["bucket_cap_mb"].startswith("torch's own buckets leave 0.20 ms of 0.30 ms")
    small = settings_of(two_ranks(structs.replace(DDP, bucket_bytes=MIB // 2), gradients=2))
    assert reasons_of(small)["bucket_cap_mb"].endswith(" 0.5 MiB")


def test_messages_of_one_size_do_not_tell_what_a_message_costs() -> None:
    found = settings_of(two_ranks(sizes=(2, 2)))
    assert found.settings.bucket_cap_mb is None
    assert "messages of several sizes" in reasons_of(found)["bucket_cap_mb"]
    assert [each.known for each in found.reasons if each.setting == "bucket_cap_mb"] == [False]


def test_where_no_message_has_a_price_none_smaller_than_the_recorded_are_tried() -> None:
    found = settings_of(two_ranks(sizes=(2, 4), price=0))
    assert found.latency_ns == 0
    assert [each.megabytes for each in found.sizes[:3]] == [None, 2, 4]
    assert found.settings.bucket_cap_mb == 2
    assert settings_of(two_ranks(sizes=(2, 2), price=0)).sizes == ()


@pytest.mark.parametrize(
    ("looks", "without", "static", "find"),
    [
        (False, 0, None, False),
        (True, 0, None, False),
        (True, 2, True, False),
        (True, None, None, None),
    ],
)
def test_unused_parameters(looks: bool, without: int | None, static: bool | None, find: bool | None) -> None:
    facts = structs.replace(DDP, find_unused_parameters=looks, unused_parameters=without)
    found = settings_of(two_ranks(facts)).settings
    assert (found.static_graph, found.find_unused_parameters) == (static, find)


def test_other_gradients_in_other_steps_are_no_static_graph() -> None:
    trace = two_ranks(structs.replace(DDP, find_unused_parameters=True, unused_parameters=1))
    rows = trace.table("operators")
    tables = {name: trace.table(name) for name in ("lanes", "launches", "device_work", "annotations")}
    fewer = Trace.from_tables({**tables, "operators": rows.head(rows.height - 1)}, trace.metadata)
    found = settings_of(fewer)
    assert (found.settings.static_graph, found.settings.find_unused_parameters) == (False, True)
    assert "the recorded steps had different gradients" in reasons_of(found)["static_graph"]


def test_without_facts_the_reducers_marks_tell() -> None:
    copied = settings_of(two_ranks(None, marks=COPY))
    assert copied.settings.gradient_as_bucket_view is True
    assert copied.settings.find_unused_parameters is False
    assert reasons_of(copied)["gradient_as_bucket_view"].startswith("1 gradients a step are copied out")
    searched = settings_of(two_ranks(None, marks=SEARCH))
    assert (searched.settings.gradient_as_bucket_view, searched.settings.find_unused_parameters) == (None, None)
    assert settings_of(two_ranks(None)).settings.find_unused_parameters is None
    kept = settings_of(two_ranks(structs.replace(DDP, gradient_as_bucket_view=True, static_graph=True)))
    assert (kept.settings.gradient_as_bucket_view, kept.settings.static_graph) == (True, True)


def test_equal_blocks_of_layers_are_no_accumulated_passes() -> None:
    def blocks(told: int) -> Trace:
        program = ProgramFacts(model=ModelFacts(gradient_bytes=told))
        machine = Machine(Metadata(program=program))
        machine.step(0, 1000 * US, 0)
        for each in range(4):
            gradient(machine, 100 + 100 * each, elements=MIB // (4 if each % 2 else 8))
        return machine.trace()

    assert gradients_of(Experiment(blocks(3 * MIB))).accumulated == 1
    assert gradients_of(Experiment(blocks(3 * MIB // 2))).accumulated == 2


def test_a_trace_without_communication_says_how_to_record_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no communication between ranks"):
        settings_of(device_steps())
    device_steps().save(tmp_path / "trace")
    assert main(["data-parallel", str(tmp_path / "trace")]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    assert "stepscope run torchrun --nproc-per-node 2 train.py" in written.err


def test_other_communication_is_not_data_parallel_training() -> None:
    with pytest.raises(UsageError, match="none by DistributedDataParallel"):
        settings_of(two_ranks(None, gradients=0))


def test_other_traces_must_be_other_ranks() -> None:
    with pytest.raises(UsageError, match="is not another rank of the run"):
        data_parallel_settings(View(two_ranks()), [Experiment(two_ranks())])
    with pytest.raises(UsageError, match="name ranks of one run"):
        data_parallel_settings(View(two_ranks()), [Experiment(device_steps())])


def test_the_command_prints_reasons_and_code_and_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks().save(tmp_path / "trace")
    assert main(["data-parallel", str(tmp_path / "trace"), "--json", str(tmp_path / "settings.json")]) == 0

    written = capsys.readouterr()
    assert written.err == f"stepscope: wrote {tmp_path / 'settings.json'}\n"
    lines = written.out.splitlines()
    assert lines[0].startswith("Recorded steps among 2 ranks take 3.0 ms. A message takes 50.0 us")
    assert "bucket_cap_mb = 2" in lines
    assert "gradient_as_bucket_view = (torch's own)" in lines
    assert "      model = DistributedDataParallel(model, bucket_cap_mb=2.0, find_unused_parameters=False)" in lines
    assert DataParallelSettings.load(tmp_path / "settings.json") == settings_of(two_ranks()).settings

    assert main(["data-parallel", str(tmp_path / "trace"), "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert wrong_in(answer) == []
    assert answer["settings"]["bucket_cap_mb"] == 2
    assert answer["reasons"]["bucket_cap_mb"]["known"] is True
    assert [each["bucket_cap_mb"] for each in answer["sizes"]][:3] == [None, 1, 2]


@pytest.mark.traces
def test_recorded_ranks(traces_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = traces_folder / "kineto"
    assert main(["data-parallel", str(folder / "cpu_ddp_gloo")]) == 0
    gloo = capsys.readouterr().out
    assert "Recorded steps among 2 ranks take 167.5 ms." in gloo
    assert "gradient_as_bucket_view = True\n  29 gradients a step are copied out of their buckets" in gloo
    assert "Only one rank's trace was given" not in gloo

    assert main(["data-parallel", str(folder / "v100_ddp_rank1of2.json.gz"), "--json", "-"]) == 0
    ddp = json.loads(capsys.readouterr().out)
    assert ddp["bandwidth_bytes_s"] == pytest.approx(17.2e9, rel=0.01)
    exposed = {each["bucket_cap_mb"]: each["exposed_ns"] for each in ddp["sizes"]}
    assert exposed[1] < exposed[None] < exposed[200]
    assert ddp["settings"]["bucket_cap_mb"] is None  # 0.9 % of the step is not worth another size
