"""Every real file of every profiler is read, or refused with a sentence; devices' figures are another reader's.

The figures of XLA's files come from `jax.profiler.ProfileData`, which gives times as doubles; those of Nsight Systems
from SQL on the exported tables. Both are the union of the kernels, copies and sets (XLA: ops, asynchronous ops and
streams).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope.analysis.device_time import device_time
from stepscope.errors import TraceError
from stepscope.readers import open_trace

pytestmark = pytest.mark.traces

DEVICES = {
    "nsys/two_gpu_before.sqlite": {"0": (299_848_812, 273_817_787), "1": (298_661_551, 267_275_916)},
    "nsys/two_gpu_after.sqlite": {"0": (299_251_215, 240_108_749), "1": (299_269_422, 254_000_754)},
    "xplane/mi300x_jax_gemm.xplane.pb": {"0": (9_456_212, 3_475_484)},
    "xplane/mi300x_x8_jax_conv.xplane.pb": {
        "0": (138_470_832, 3_995_965),
        "1": (112_106_106, 3_345_845),
        "2": (106_992_671, 3_524_285),
        "3": (95_261_145, 3_403_364),
        "4": (91_596_080, 3_493_365),
        "5": (92_938_503, 3_464_884),
        "6": (104_221_477, 3_403_004),
        "7": (90_563_059, 3_502_165),
    },
    "xplane/tpu_x4_inference.xplane.pb": {
        "0": (92_477_083_033, 78_784_928_318),
        "1": (90_429_589_579, 78_789_508_759),
        "2": (90_422_145_897, 78_781_986_310),
        "3": (90_406_370_266, 78_766_281_132),
    },
    "xplane/jax_cpu_train.xplane.pb": {},
    "xplane/torch_xla_cpu_no_complete_step.xplane.pb": {},
    "xplane/torch_xla_cpu_train_hlo_debug.xplane.pb": {},
}
"""File -> device -> (window, busy), nanoseconds."""
ROUNDED_NS = 1_000
"""What whole nanoseconds and doubles may differ by over thousands of events."""
REFUSED = {
    "xplane/corrupt_utf8_mangled.xplane.pb": "converted as if it were text",
    "xplane/torch_xla_metrics_report.txt": "--xla-metrics",
    "not_a_trace/execution_trace.json.gz": "a PyTorch execution trace",
    "not_a_trace/memory_timeline.raw.gz": "a memory timeline",
}


def test_every_file_is_known(traces_folder: Path) -> None:
    folders = {Path(name).parts[0] for name in (*DEVICES, *REFUSED)}
    files = (path for folder in folders for path in (traces_folder / folder).rglob("*") if path.is_file())
    assert {str(path.relative_to(traces_folder)) for path in files} == {*DEVICES, *REFUSED}


@pytest.mark.parametrize("name", DEVICES)
def test_devices_were_busy_as_another_reader_says(traces_folder: Path, name: str) -> None:
    trace = open_trace(traces_folder / name)

    trace.check()
    rows = device_time(trace).select("device", "window_ns", "busy_ns").iter_rows()
    ours = {device: (window, busy) for device, window, busy in rows}
    assert ours.keys() == DEVICES[name].keys()
    for device, figures in DEVICES[name].items():
        assert ours[device] == pytest.approx(figures, abs=ROUNDED_NS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_trace_is_refused_with_what_it_is(traces_folder: Path, name: str) -> None:
    with pytest.raises(TraceError, match=REFUSED[name]) as refused:
        open_trace(traces_folder / name)
    assert os.linesep not in str(refused.value)
