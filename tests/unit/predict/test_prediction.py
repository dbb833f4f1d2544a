"""The recorded steps on another device: their time and band, what limits them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stepscope.errors import UsageError
from stepscope.machine.devices import DevicePeaks, device_table, named_device
from stepscope.predict.prediction import StepPredictor
from stepscope.predict.ranges import COMMON, joint_band, with_host
from stepscope.predict.step_replays import StepReplays
from stepscope.predict.work_times import work_times
from stepscope.readers import open_trace
from stepscope.trace import Metadata, Trace, TraceWarning
from stepscope.trace.metadata import Device
from stepscope.trace.program_facts import ProgramFacts, StepFacts
from stepscope.whatif.experiment import Experiment
from tests.unit.diagnosis.rules.host_steps import counted
from tests.unit.predicting import predict_step
from tests.unit.recording import Recording
from tests.unit.waiting_twice import US, waiting_twice

A100 = Device("0", "NVIDIA A100-SXM4-80GB")
MOVE = {"kind": "copy_on_device"}


def device(bandwidth_gb_s: int) -> DevicePeaks:
    """A device that differs from an A100 in its memory alone."""
    a100 = named_device("A100-SXM4-80GB")
    changes = {"name": f"A100 with {bandwidth_gb_s} GB/s", "bandwidth_bytes_s": bandwidth_gb_s * 10**9}
    return DevicePeaks(**{name: changes.get(name, getattr(a100, name)) for name in a100.__dataclass_fields__})


def copying(works_ns: tuple[int, ...] = (402 * US,), steps: int = 3, *, waits: bool = True) -> Trace:
    """Steps of 1000 us on an A100: 100 of Python, then copies in its memory, for which the host waits at the end."""
    recording = Recording(Metadata(devices=(A100,), path="trace.json", format="kineto"))
    number = 0
    for step in range(steps):
        begin = step * 1000 * US
        recording.step(begin, 1000 * US, step)
        recording.frame(begin, 1000 * US, "train.py(3): step")
        now = begin + 100 * US
        for length in works_ns:
            number += 1
            recording.launch(begin + 90 * US, 5 * US, number)
            recording.work(now, length, "Memcpy DtoD", number, kind="copy_on_device")
            now += length
        if waits:
            number += 1
            recording.launch(
                begin + 96 * US, now - begin - 90 * US, number, name="cudaDeviceSynchronize", kind="synchronise"
            )
    return recording.trace()


def test_the_traces_own_device_takes_what_was_measured() -> None:
    """Every factor is 1: to the nanosecond."""
    found = predict_step(copying(), named_device("A100-SXM4-80GB"))

    assert (found.step_ns, found.low_ns, found.high_ns) == (1000 * US,) * 3
    assert (found.device_ns, found.speed_up) == (402 * US, 1.0)
    assert found.bases == (("same device", 1.0),)
    assert found.notes == ()


def test_half_the_bandwidth_lengthens_the_copies_alone() -> None:
    """2 us of a work are its start; the other 400 become 800. The host waits for them and needs 598 us beside."""
    found = predict_step(copying(), device(2039 // 2 + 1))

    assert found.step_ns == pytest.approx(1400 * US, rel=1e-3)
    assert found.device_ns == pytest.approx(802 * US, rel=1e-3)
    assert found.host_ns == pytest.approx(598 * US, rel=1e-3)
    assert found.limit == "memory bandwidth"
    assert found.bases == (("bandwidth", 1.0),)


def test_a_faster_device_does_not_make_python_faster() -> None:
    found = predict_step(copying(), device(2039_000))

    assert found.step_ns == pytest.approx(600 * US, rel=1e-2)
    assert (found.limit, found.limit_cause) == ("host", "python")
    assert found.busy_share is not None
    assert found.busy_share < 0.01


def test_the_host_on_another_processor() -> None:
    """582 us of Python take half; the copies, 10 us to their start and 6 to the end of the wait take what they took."""
    found = predict_step(copying(), named_device("A100-SXM4-80GB"), host_factor=0.5)

    assert found.step_ns == 709 * US
    assert found.host_ns == 307 * US


def test_waits_for_batches_stay() -> None:
    """In each step of 1000 us the host loads for 300 us, works for 300, and waits for a kernel of 400, 20 us late."""
    replays = StepReplays(Experiment(waiting_twice()))
    half = np.full(4, 0.5)

    found = replays.with_work(half, np.full(4, 0.25), np.full(4, 1.5))

    assert found.expected.step_ns == 800 * US
    assert 600 * US < found.low_ns < 700 * US  # 700 and 1200 by the kernels, and the host may take another time
    assert 1200 * US < found.high_ns < 1300 * US
    assert found.expected.device_ns == 200 * US
    assert replays.host_ns == 620 * US
    assert replays.measured_device_ns == 400 * US


def unexplained() -> Trace:
    """A step of 1000 us: the device works for 400 us of it, and waits 500 us for nothing that is in the trace."""
    recording = Recording(Metadata(devices=(A100,)))
    recording.step(0, 1000 * US, 1)
    recording.frame(0, 1000 * US, "train.py(3): step")
    recording.launch(0, 5 * US, 1)
    recording.work(10 * US, 200 * US, "Memcpy DtoD", 1, **MOVE)
    recording.launch(20 * US, 5 * US, 2)
    recording.work(710 * US, 200 * US, "Memcpy DtoD", 2, **MOVE)
    return recording.trace()


def test_where_replays_promise_nothing_a_bracket_is_given() -> None:
    """The idle 600 us stay, or the host needs the whole step; the host may take another time."""
    experiment = Experiment(unexplained())
    assert experiment.why_not is not None
    replays = StepReplays(experiment)

    faster = replays.with_work(np.full(2, 0.5), np.full(2, 0.5), np.full(2, 0.5))
    slower = replays.with_work(np.full(2, 4.0), np.full(2, 4.0), np.full(2, 4.0))

    assert (faster.expected.step_ns, slower.expected.step_ns) == (800 * US, 2200 * US)
    assert (faster.low_ns, faster.high_ns) == with_host(800 * US, 200 * US, 800 * US, 1000 * US)
    assert (slower.low_ns, slower.high_ns) == with_host(2200 * US, 1600 * US, 1600 * US, 2200 * US)
    assert replays.host_ns is None
    own = predict_step(unexplained(), named_device("A100-SXM4-80GB"))
    assert (own.low_ns, own.step_ns, own.high_ns) == (1000 * US,) * 3


def test_works_of_one_call_err_together() -> None:
    expected, low, high = np.array([100.0, 50.0]), np.array([70.0, 40.0]), np.array([170.0, 50.0])

    narrow = joint_band(expected, low, high, np.array(["matrix"] * 2), np.array([7, 7]), np.arange(2))

    assert narrow[0] == pytest.approx(low)
    assert narrow[1] == pytest.approx(high)


def test_errors_of_calls_share_a_part_and_those_of_kinds_none() -> None:
    """Two products err by 30 and 10, a copy by 30: sqrt((40^2 + 30^2 + 10^2) / 2 + 30^2) = 46.9 of 70."""
    expected, low = np.array([100.0, 50.0, 60.0]), np.array([70.0, 40.0, 30.0])
    kinds = np.array(["matrix", "matrix", "copy"])

    narrow, same = joint_band(expected, low, expected, kinds, np.array([0, 1, 2]), np.arange(3))

    assert COMMON == 0.5
    part = (0.5 * 40**2 + 0.5 * (30**2 + 10**2) + 30**2) ** 0.5 / 70
    assert narrow == pytest.approx(expected - part * np.array([30, 10, 30]))
    assert same == pytest.approx(expected)


def test_no_works_have_no_band() -> None:
    nothing, rows = np.zeros(0), np.zeros(0, np.int64)

    found = joint_band(nothing, nothing, nothing, np.zeros(0, np.str_), rows, rows)

    assert [len(each) for each in found] == [0, 0]


def test_what_nothing_tells_is_refused() -> None:
    """A device that the table does not know, and kernels without shapes."""
    recording = Recording(Metadata(devices=(Device("0", "Some accelerator"),)))
    recording.step(0, 1000 * US, 1)
    recording.launched(10 * US, 20 * US, 500 * US, "kernel", 1)

    found = predict_step(recording.trace(), named_device("L4"))

    assert (found.step_ns, found.low_ns, found.high_ns, found.limit) == (None,) * 4
    assert found.bases == (("unknown", 1.0),)
    assert found.notes[-1].startswith("for 100% of the device's time there is no model for the L4")
    assert "--from" in found.notes[-1]


def test_an_unknown_number_type() -> None:
    with pytest.raises(UsageError, match="bf17"):
        predict_step(copying(), named_device("L4"), precision="bf17")


def test_the_band_holds_the_step_on_every_device() -> None:
    predictor = StepPredictor(Experiment(copying((100 * US, 200 * US))))
    for target in device_table():
        found = predictor.on(target)

        assert found.step_ns is not None, target.name
        assert found.low_ns is not None
        assert found.high_ns is not None
        assert 650 * US <= found.low_ns <= found.step_ns <= found.high_ns


def test_a_trace_that_does_not_name_its_device() -> None:
    recording = Recording(Metadata())
    recording.step(0, 1000 * US, 1)
    recording.launched(10 * US, 20 * US, 502 * US, "triton_poi_fused_add_0", 1)
    trace = recording.trace()

    found = predict_step(trace, named_device("L4"), source=named_device("A100-SXM4-80GB"))

    assert found.bases == (("wave scaling", 1.0),)
    assert found.step_ns is not None
    assert found.step_ns > 2000 * US
    own = predict_step(trace, named_device("L4"), source=named_device("L4"))
    assert (own.low_ns, own.step_ns, own.high_ns) == (1000 * US,) * 3


def on_a_busy_machine(share: float) -> Trace:
    """Steps of 1000 us of which the host's 598 us of work hold so much of the step in which it got no processor."""
    waited = round(1000 * US * share)
    facts = {"duration_ns": 1000 * US, "thread_waiting_ns": waited, "thread_processor_ns": 598 * US - waited}
    steps = tuple(StepFacts(index=number, **facts) for number in range(3))
    trace = copying()
    return replace(trace, metadata=replace(trace.metadata, program=ProgramFacts(steps=steps)))


def test_what_other_programs_took_of_the_steps_is_left_out_and_said() -> None:
    a100 = named_device("A100-SXM4-80GB")
    calm, busy = predict_step(copying(), a100), predict_step(on_a_busy_machine(0.3), a100)

    assert calm.step_ns is not None
    assert busy.step_ns is not None
    assert busy.step_ns < calm.step_ns
    assert "30%" in busy.notes[0]


def test_a_recording_of_which_little_is_left_predicts_nothing() -> None:
    found = predict_step(on_a_busy_machine(0.8), named_device("L4"))

    assert found.step_ns is None
    assert "80%" in found.notes[-1]


def without_device(shapes: str | None) -> Trace:
    """Steps of 1000 us on a processor: 200 of loading, 600 in a matrix product, 3 in one of small matrices."""
    recording = Recording(Metadata(format="kineto"))
    for step in range(2):
        begin = step * 1000 * US
        recording.step(begin, 1000 * US, step)
        recording.frame(begin, 1000 * US, "train.py(3): step")
        recording.annotation(begin, 200 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
        types = '["float", "float"]'
        recording.operator(begin + 200 * US, 600 * US, "aten::mm", input_shapes=shapes, input_types=types)
        small = shapes and "[[2, 2], [2, 2]]"
        recording.operator(begin + 810 * US, 3 * US, "aten::mm", input_shapes=small, input_types=types)
    return recording.trace()


def test_from_shapes_alone_the_arithmetic_leaves_the_host() -> None:
    """Of 603 us two calls of 3 us, as of next to nothing, and two launches of 6.5 us stay, at the least of 3.3."""
    found = predict_step(without_device("[[4, 4], [4, 4]]"), named_device("H100-SXM"))

    assert found.step_ns is not None
    assert found.device_ns is not None
    assert found.host_ns == pytest.approx((1000 - 603 + 2 * 3 + 2 * 6.5) * US, rel=1e-6)
    least = (1000 - 603 + 2 * 3 + 2 * 3.3) * US
    assert found.low_ns == pytest.approx(with_host(found.step_ns, found.device_ns, least, 0.0)[0], rel=1e-6)
    assert found.step_ns == found.host_ns
    assert (found.limit, found.measured_ns) == ("host", 1000 * US)  # 197 us of Python, 19 of dispatch, 200 of loading
    assert found.limit_cause == "python"
    assert found.bases == (("shapes", 1.0),)
    assert found.notes[0].startswith("predicted from shapes alone")


def test_from_shapes_alone_the_device_limits_large_products() -> None:
    """2 * 16384^3 operations: 8.8e12, 131 ms at the 67 TFLOP/s of an H100."""
    found = predict_step(without_device("[[16384, 16384], [16384, 16384]]"), named_device("H100-SXM"), precision="fp32")

    assert found.limit == "compute"
    assert found.device_ns is not None
    assert found.device_ns > 131_000 * US
    assert found.step_ns == found.device_ns


def test_without_shapes_nothing_is_predicted() -> None:
    found = predict_step(without_device(None), named_device("H100-SXM"))

    assert found.step_ns is None
    assert "only 0% of the time of operators" in found.notes[-1]
    assert found.notes[-1].endswith("record with record_shapes=True")


def copied_over_unknown_links(copy_ns: int, total_ns: int = 100_000) -> Trace:
    """A TPU, of which the table knows no link to the host, copies from there and then within its memory."""
    recording = Recording(Metadata(devices=(Device("0", "TPU v6e"),)))
    recording.step(0, 200_000, 0)
    recording.launched(10, 1_000, copy_ns, "infeed", 1, kind="copy_in", bytes=32_000)
    recording.launched(20, 1_000 + copy_ns, total_ns - copy_ns, "copy", 2, **MOVE)
    return recording.trace()


def test_what_is_taken_as_measured_for_want_of_a_link_is_not_knowledge() -> None:
    found = predict_step(copied_over_unknown_links(26_000), named_device("L4"))

    assert found.step_ns is None
    assert found.notes[-1] == (
        "for 26% of the device's time there is no model for the L4 (copies and communication over links of unknown "
        "bandwidth): no step time is given"
    )


def test_what_is_taken_as_measured_may_take_what_the_link_needs() -> None:
    """32,000 bytes over 31.5 GB/s are 1,016 ns; the step is as long as the host's 200 us, the band is the works'."""
    trace = copied_over_unknown_links(24_000)
    times = work_times(trace, named_device("L4"))

    assert times.basis[0] == "unchanged"
    assert (times.low_ns[0], times.ns[0], times.high_ns[0]) == (pytest.approx(1_015.9, abs=0.1), 24_000, 24_000)
    assert predict_step(trace, named_device("L4")).step_ns is not None


@pytest.mark.parametrize("lane_known", [True, False])
def test_work_without_launches_is_not_replayed(lane_known: bool) -> None:
    """With a device that needs no time the host's 1000 us stay; where it is not known, the device's idle 80 us."""
    recording = Recording(Metadata(devices=(A100,)))
    for step in range(2):
        begin = step * 1000 * US
        recording.step(begin, 1000 * US, step)
        recording.operator(begin, 999 * US, "train")  # ends before its work, for which it does not wait
        if lane_known:
            recording.launched(begin + 10, begin + 80 * US, 920 * US, "copy", step + 1, **MOVE)
        else:
            recording.work(begin + 80 * US, 920 * US, "copy", **MOVE)
    predictor = StepPredictor(Experiment(recording.trace()))
    found = predictor.on(device(2039_000))

    if lane_known:
        assert predictor.replays.why_not is None
        assert found.step_ns == pytest.approx(1000 * US, rel=1e-3)
    else:
        assert (predictor.replays.why_not or "").startswith("no launches of the device's work were recorded")
        assert found.step_ns == pytest.approx(83 * US, rel=0.01)


def test_of_bare_launches_the_range_begins_where_the_host_waited() -> None:
    """The host launches two works 500 us apart, of which the device is idle for 98: 500 stay, or 98."""
    recording = Recording(Metadata(devices=(A100,)))
    for number in range(2):
        begin = number * 500 * US
        recording.launched(begin, begin + 10 * US, 402 * US, "copy", number + 1, **MOVE)
    found = predict_step(recording.trace(), device(2039_000))

    assert found.step_ns == pytest.approx(512 * US, rel=0.01)
    assert found.device_ns is not None
    assert found.low_ns == pytest.approx(with_host(found.step_ns, found.device_ns, 112 * US, 0.0)[0], rel=0.06)
    assert [note.split(":")[0] for note in found.notes] == ["only the host's launches were recorded"]


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xplane/tpu_x4_inference.xplane.pb", "for 97% of the device's time there is no model for the B200-SXM"),
        (
            "kineto/mtia_training_rank0.json.gz",
            "for 100% of the device's time there is no model for the B200-SXM",
        ),
    ],
)
def test_recordings_of_which_nothing_tells_most_are_refused(name: str, reason: str, traces_folder: Path) -> None:
    found = predict_step(open_trace(traces_folder / name), named_device("B200-SXM"))

    assert found.step_ns is None
    assert found.notes[-1].startswith(reason)


def server(*phases: tuple[str, int], graph: bool = False) -> Trace:
    """Iterations of an engine on an A100, one after another: copies of these microseconds, each waited for."""
    recording = Recording(Metadata(devices=(A100,), path="trace.json", format="kineto"))
    now = 0
    for number, (name, length) in enumerate(phases, start=1):
        recording.annotation(now, (length + 10) * US, name)
        recording.frame(now, (length + 10) * US, "vllm/v1/worker/gpu_model_runner.py(2907): execute_model")
        kind = "graph_launch" if graph else "launch"
        recording.launch(
            now + 2 * US, 3 * US, number, name="cudaGraphLaunch" if graph else "cudaLaunchKernel", kind=kind
        )
        recording.work(now + 6 * US, length * US, "Memcpy DtoD", number, kind="copy_on_device")
        recording.launch(
            now + 5 * US, (length + 2) * US, 1000 + number, name="cudaDeviceSynchronize", kind="synchronise"
        )
        now += (length + 10) * US
    return recording.trace()


def test_a_servers_prefill_and_decoding_are_told_apart() -> None:
    prompt, token = "execute_context_1(900)_generation_0(0)", "execute_context_0(0)_generation_4(4)"
    trace = server((prompt, 400), *[(token, 100)] * 4)
    found = predict_step(trace, device(2039 // 2))

    assert [(each.phase, each.count, each.requests, each.tokens) for each in found.phases] == [
        ("prefill", 1, 1, 900),
        ("decode", 4, 4, 4),
    ]
    prefill, decode = found.phases
    assert (prefill.measured_ns, decode.measured_ns) == (410 * US, 110 * US)
    assert (prefill.measured_device_ns, decode.measured_device_ns) == (400 * US, 100 * US)
    assert prefill.ns == pytest.approx(810 * US, rel=0.02)
    assert decode.ns == pytest.approx(210 * US, rel=0.02)
    assert decode.device_ns == pytest.approx(200 * US, rel=0.02)
    assert decode.low_ns <= decode.ns <= decode.high_ns
    same = predict_step(trace, named_device("A100-SXM4-80GB"))
    assert [(each.ns, each.low_ns, each.high_ns) for each in same.phases] == [(410 * US,) * 3, (110 * US,) * 3]


def test_iterations_in_graphs_say_so_and_trainings_have_none() -> None:
    decode = [("execute_context_0(0)_generation_4(4)", 100)] * 4
    assert [each.graph_share for each in predict_step(server(*decode, graph=True), device(1000)).phases] == [1.0]
    assert [each.graph_share for each in predict_step(server(*decode), device(1000)).phases] == [0.0]
    assert predict_step(copying(), device(1000)).phases == ()


def test_a_speed_up_is_over_the_step_without_waits_for_a_processor() -> None:
    """The thread waits for 300 of 1000 us: on the same device the step takes the other 700, which is no gain."""
    a100 = named_device("A100-SXM4-80GB")
    trace = counted(thread_waiting_ns=300 * US, device=True, unit_ns=US)

    found = StepPredictor(Experiment(trace), source=a100).on(a100)

    assert found.step_ns == pytest.approx(700 * US)
    assert found.speed_up == pytest.approx(1.0)


def warm_up(steps: int) -> Trace:
    """Code is loaded for 50 ms, then the device copies for 10 ms while the host waits."""
    recording = Recording(Metadata(devices=(A100,), path="trace.json", format="kineto"))
    for step in range(steps):
        begin = step * 100_000 * US
        recording.step(begin, 62_000 * US, step)
        if not step:
            recording.launch(begin, 50_000 * US, 9, name="cuModuleLoadData", kind="other")
        recording.launch(begin + 51_000 * US, 5 * US, step + 1)
        recording.work(begin + 51_010 * US, 10_000 * US, "Memcpy DtoD", step + 1, kind="copy_on_device")
        recording.launch(begin + 51_010 * US, 10_010 * US, 20 + step, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


def test_one_off_work_is_no_part_of_the_step() -> None:
    a100 = named_device("A100-SXM4-80GB")
    predictor = StepPredictor(Experiment(warm_up(1)))

    own, other = predictor.on(a100), predictor.on(device(1000))

    assert own.step_ns == pytest.approx(12_000 * US, rel=0.01)
    assert own.speed_up == 1.0
    assert other.step_ns == pytest.approx(22_000 * US, rel=0.05)
    assert other.host_ns == pytest.approx(2_000 * US, rel=0.01)
    assert "81%" in own.notes[0]


def test_operators_of_a_lost_device_are_no_processors_own() -> None:
    """A file that is cut off before its device's work, or launches without any, would pass for a processor's step."""
    trace = without_device("[[4, 4], [4, 4]]")
    cut = (TraceWarning("truncated", 1, "the file is truncated"),)
    lost = replace(trace, metadata=replace(trace.metadata, devices=(A100,)), warnings=cut)

    found = predict_step(lost, named_device("L4"))

    assert predict_step(replace(trace, warnings=cut), named_device("L4")).step_ns
    assert found.step_ns is None
    assert "cut off" in found.notes[-1]


def test_launches_without_work_predict_nothing() -> None:
    recording = Recording(Metadata(format="kineto"))
    recording.step(0, 1000 * US, 0)
    recording.operator(0, 600 * US, "aten::mm", input_shapes="[[4, 4], [4, 4]]", input_types='["float", "float"]')
    recording.launch(100 * US, 5 * US, 1)

    assert predict_step(recording.trace(), named_device("L4")).step_ns is None
