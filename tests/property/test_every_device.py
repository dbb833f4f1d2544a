"""Every device of the table as a target: times are numbers, ranges hold them, and higher figures never cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from stepscope.machine.devices import DevicePeaks, device_table, named_device, with_measured_shares
from stepscope.predict.cost.energy_parts import step_energy
from stepscope.predict.operation_times import operation_times
from stepscope.predict.prediction import StepPredictor, predicted_steps
from stepscope.predict.trace_operations import CalledOperations
from stepscope.predict.work_times import KNOWLEDGE, work_times
from stepscope.report.predict import predict_document, predict_json
from stepscope.report.text import text_of
from stepscope.trace import Metadata, Trace
from stepscope.trace.metadata import Device
from stepscope.whatif.experiment import Experiment
from tests.unit.recording import Recording

US = 1_000
TABLE = device_table()
CALLS = (
    ("aten::mm", "[[4096, 1024], [1024, 4096]]", '["c10::BFloat16", "c10::BFloat16"]'),
    ("aten::mm", "[[512, 512], [512, 512]]", '["double", "double"]'),
    ("aten::bmm", "[[64, 512, 64], [64, 64, 512]]", '["float", "float"]'),
    ("aten::add", "[[4096, 4096], [4096, 4096], []]", '["float", "float", "Scalar"]'),
    ("aten::_softmax", "[[4096, 1024], [], []]", '["float", "Scalar", "Scalar"]'),
    ("aten::unheard_of", "[[7]]", '["float"]'),
)


KINDS = ("copy_in", "copy_out", "copy_on_device", "set", "communication", "compute")
LENGTHS = tuple(US * length for length in (150, 30, 150, 120, 30, 40, *(30,) * len(KINDS)))


def recorded(name: str | None, lengths_ns: Sequence[int] = LENGTHS) -> Trace:
    """A step on one device: calls with shapes, copies, communication, and a kernel that only its launch tells of."""
    devices = () if name is None else (Device("0", name),)
    recording = Recording(Metadata(devices=devices, path="trace.json", format="kineto"))
    recording.step(0, 2_000 * US, 0)
    now, number = 100 * US, 0
    for (call, shapes, types), length in zip(CALLS, lengths_ns[: len(CALLS)], strict=True):
        number += 1
        recording.operator(10 * US + number, 1, call, input_shapes=shapes, input_types=types)
        recording.launch(10 * US + number, 1, number)
        recording.work(now, length, f"{call} kernel", number)
        now += length
    for kind, length in zip(KINDS, lengths_ns[len(CALLS) :], strict=True):
        number += 1
        recording.launch(50 * US + number, 1, number)
        recording.work(now, length, f"{kind} one", number, kind=kind, bytes=1 << 20)
        now += length
    recording.launch(60 * US, 1_900 * US, 99, name="cudaDeviceSynchronize", kind="synchronise")
    return recording.trace()


@pytest.mark.parametrize(
    ("part", "name"), [*enumerate(["NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X", "TPU v6 lite", None])]
)
def test_every_target_has_a_time_within_its_range_or_says_why_not(part: int, name: str | None) -> None:
    answer = predicted_steps(StepPredictor(Experiment(recorded(name))), TABLE[part::4])
    written = {each["device"]: each for each in predict_json(answer)["predictions"]}

    for each in answer.predictions:
        if each.step_ns is None:
            assert each.notes, each.device.name
        else:
            assert each.low_ns is not None
            assert each.high_ns is not None
            assert 0 < each.low_ns <= each.step_ns <= each.high_ns < math.inf, each.device.name
            assert sum(share for _, share in each.bases) == pytest.approx(1)
        assert set(each.knowledge) <= set(KNOWLEDGE.values())
        assert written[each.device.name]["knowledge"] == each.knowledge
        assert written[each.device.name]["step_ns"] == each.step_ns
    text = text_of(predict_document(answer), width=200, top=0)
    assert "nan" not in text.lower().split()
    assert {word for word in KNOWLEDGE.values() if word in text} >= {
        word for each in answer.predictions for word in each.knowledge
    }


def test_the_recorded_device_takes_what_was_recorded() -> None:
    trace = recorded(None)
    for row in TABLE[::4]:
        times = work_times(trace, row, source=row)
        assert (times.ns == times.measured_ns).all(), row.name


def dominates(one: DevicePeaks, other: DevicePeaks) -> bool:
    """Whether no figure of a device of the same chip is lower, measured ones included."""
    figures = ("bandwidth_bytes_s", "clock_mhz", "power_w", "cache_bytes", "sustained_bandwidth_bytes_s")
    pairs = [(getattr(one, name) or 0, getattr(other, name) or 0) for name in figures]
    pairs += [(one.flops_s.get(kind, 0), rate) for kind, rate in other.flops_s.items()]
    pairs += [(one.sustained_flops_s.get(kind, 0), rate) for kind, rate in other.sustained_flops_s.items()]
    alike = (one.vendor, one.architecture, one.multiprocessors) == (
        other.vendor,
        other.architecture,
        other.multiprocessors,
    )
    return alike and one.multiprocessors is not None and all(mine >= theirs for mine, theirs in pairs)


def test_a_device_of_the_same_chip_with_higher_figures_is_never_slower() -> None:
    """Within 2 %, by which a cache or a wave may fall the other way."""
    operations = CalledOperations.of(recorded("NVIDIA A100-SXM4-80GB")).operations
    known = [with_measured_shares(row) for row in TABLE]
    pairs = [(one, other) for one in known for other in known if one.name != other.name and dominates(one, other)]
    named = {row.name: row for pair in pairs for row in pair}
    times = {name: operation_times(operations, row).ns for name, row in named.items()}

    assert len(pairs) > 10
    for one, other in pairs:
        slower = times[one.name] / times[other.name]
        assert not (slower > 1.02).any(), (one.name, other.name, slower)


@pytest.mark.parametrize(
    ("first", "other"), [("A100-SXM4-80GB", "H100-SXM"), ("V100-SXM2-32GB", "T4"), ("MI210", "MI300X")]
)
def test_there_and_back_is_where_it_began(first: str, other: str) -> None:
    """The recording lies in the range of the prediction from its own prediction."""
    here, there = named_device(first), named_device(other)
    trace = recorded(None)
    gone = work_times(trace, there, source=here)
    known = np.isfinite(gone.ns)
    lengths = np.where(known, np.round(gone.ns), gone.measured_ns).astype(np.int64).tolist()
    back = work_times(recorded(None, lengths), here, source=there)

    assert known.sum() >= 9
    assert (back.low_ns[known] <= gone.measured_ns[known] * 1.01).all()
    assert (gone.measured_ns[known] <= back.high_ns[known] * 1.01).all()


def test_energies_are_ordered_and_finite() -> None:
    for row in TABLE:
        found = step_energy(row, 1e9, 4e8, least_activity=0.2)
        assert (found is None) == (row.power_w is None), row.name
        if found is not None:
            assert 0 < found.low_j <= found.high_j <= (row.power_w or 0), row.name
