"""Counters that Nsight Compute measured: read from both of its pages, and joined to the kernels of a trace."""

from __future__ import annotations

import gzip
from pathlib import Path

import polars as pl
import pytest

from stepscope.analysis.operators import join_counters, kernel_key, kernel_table, with_counters
from stepscope.commands import main
from stepscope.errors import NotATraceError, UnreadableTraceError
from stepscope.readers.side_files import COUNTERS, read_ncu
from tests.unit.recording import Recording

DETAILS = """\
==PROF== Connected to process 1234 (/usr/bin/python3)
loss 3.5, "ID" of nothing
==PROF== Profiling "gemm": 0%....100% - 8 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"0","9","python3","bob","gemm<(int)128, (bool)1>(float *, int)","1","7","(128, 1, 1)","(8, 2, 1)","0","9.0",\
"GPU Speed Of Light Throughput","Memory Throughput","%","40.5","","",""
"0","9","python3","bob","gemm<(int)128, (bool)1>(float *, int)","1","7","(128, 1, 1)","(8, 2, 1)","0","9.0",\
"GPU Speed Of Light Throughput","Compute (SM) Throughput","%","80.25",
"0","9","python3","bob","gemm<(int)128, (bool)1>(float *, int)","1","7","(128, 1, 1)","(8, 2, 1)","0","9.0",\
"Memory Workload Analysis","Memory Throughput","byte/second","12,943,820,2","","",""
"0","9","python3","bob","gemm<(int)128, (bool)1>(float *, int)","1","7","(128, 1, 1)","(8, 2, 1)","0","9.0",\
"SpeedOfLight","","","","SOLBottleneck","OPT","Compute is more heavily utilized, ""so"" look"
"1","9","python3","bob","add(float *)","1","7","(256, 1, 1)","(4, 1, 1)","0","9.0","Occupancy","Achieved Occupancy",\
"%","n/a","","",""
"1","9","python3","bob","add(float *)","1","7","(256, 1, 1)","(4, 1, 1)","0","9.0","Occupancy","DRAM Throughput",\
"%","91","","",""
==PROF== Disconnected from process 1234
"""
RAW = """\
"ID","Process ID","Kernel Name","Block Size","Grid Size","Device","CC",\
"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active","sm__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","%","%","%","%"
"0","9","void gemm<128, true>(float*, int)","(128, 1, 1)","(8, 2, 1)","0","9.0","10.00","61","80.25","49.5"
"1","9","add(float*)","256,1,1","4,1,1","0","9.0","91","0","n/a","1,000"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "ncu.csv"
    path.write_text(text)
    return path


def test_the_details_page_has_a_line_for_each_metric(tmp_path: Path) -> None:
    assert read_ncu(written(tmp_path, DETAILS)).rows() == [
        ("gemm<(int)128, (bool)1>(float *, int)", "8,2,1", "128,1,1", 0.8025, 0.405, None, None, None),
        ("add(float *)", "4,1,1", "256,1,1", None, None, 0.91, None, None),
    ]


@pytest.mark.parametrize("line", ["\n", "\r\n"])
def test_the_raw_page_has_a_line_for_each_launch(tmp_path: Path, line: str) -> None:
    path = tmp_path / "ncu.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + RAW.replace("\n", line).encode()))

    assert read_ncu(path).rows() == [
        ("void gemm<128, true>(float*, int)", "8,2,1", "128,1,1", 0.8025, None, 0.1, 0.495, 0.61),
        ("add(float*)", "4,1,1", "256,1,1", None, None, 0.91, 10.0, 0.0),
    ]


@pytest.mark.parametrize(
    "text", ["ID,name\n1,2\n", "==ERROR== no permission\n", RAW.splitlines()[0] + "\n", "\x00\x01"]
)
def test_other_files_are_refused_with_the_command_that_writes_one(tmp_path: Path, text: str) -> None:
    with pytest.raises(NotATraceError, match="ncu --csv --page raw"):
        read_ncu(written(tmp_path, text))
    with pytest.raises(UnreadableTraceError, match="there is no file"):
        read_ncu(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("void gemm<128, true>(float*, int)", "gemm<(int)128, (bool)1>(float *, int)"),
        (
            "void (anonymous namespace)::k<float, at::A<char*, 2> >(int, T)",
            "void <unnamed>::k<float, at::A<char *, (unsigned int)2>>(int, T2)",
        ),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("k<2ul>(int)", "k<2>(int)"),
    ],
)
def test_a_kernel_has_one_name_whoever_writes_it(one: str, other: str) -> None:
    assert kernel_key(one) == kernel_key(other)
    assert kernel_key("gemm<128, true>(int)") != kernel_key("gemm<64, true>(int)")


def launches(*rows: tuple[str, str | None, float | None]) -> pl.DataFrame:
    schema = {"name": pl.String, "grid": pl.String, "block": pl.String, **dict.fromkeys(COUNTERS, pl.Float64)}
    return pl.DataFrame(
        [(name, grid, grid and "1,1,1", share, *[None] * 4) for name, grid, share in rows], schema, orient="row"
    )


def recorded(*names: str, grid: str = "[4, 1, 1]") -> Recording:
    recording = Recording()
    for number, name in enumerate(names):
        recording.launched(100 * number, 100 * number + 10, 10 + number, name, number, grid=grid, block="[1, 1, 1]")
    return recording


def test_launches_belong_together_in_order_also_where_a_step_was_measured_once() -> None:
    trace = recorded("gemm", "add", "gemm", "gemm", "add", "gemm").trace()

    joined = join_counters(trace, launches(("gemm", "4,1,1", 0.5), ("add", "4,1,1", 0.1), ("gemm", "4,1,1", 0.7)))

    assert joined.counters["sm_throughput"].to_list() == [0.5, 0.1, 0.7, 0.5, 0.1, 0.7]
    assert (joined.measured, joined.matched, joined.ambiguous, joined.lost) == (3, 6, 0, 0)


def test_what_nothing_tells_stays_null_and_is_counted() -> None:
    trace = recorded("gemm", "add", "gemm", "gemm", "copy").trace()
    measured = launches(
        ("gemm", "4,1,1", 0.5),
        ("gemm", "4,1,1", 0.7),
        ("add", "8,1,1", 0.1),
        ("other", "4,1,1", 0.2),
        ("copy", "4,1,1", None),
    )

    joined = join_counters(trace, measured)

    assert joined.counters["sm_throughput"].to_list() == [None] * 5
    assert (joined.measured, joined.matched, joined.ambiguous, joined.lost) == (5, 1, 3, 2)


def test_without_sizes_names_and_order_tell() -> None:
    joined = join_counters(recorded("gemm", "gemm", grid="[9, 9, 9]").trace(), launches(("gemm", None, 0.5)))

    assert joined.counters["sm_throughput"].to_list() == [0.5, 0.5]


def test_an_empty_trace_has_no_counters() -> None:
    joined = join_counters(Recording().trace(), launches(("gemm", "4,1,1", 0.5)))

    assert (joined.counters.height, joined.matched, joined.lost) == (0, 0, 1)


def test_the_table_has_means_weighted_by_time() -> None:
    trace = recorded("gemm", "gemm", "add").trace()  # 10, 11 and 12 ns
    joined = join_counters(trace, launches(("gemm", "4,1,1", 0.5), ("gemm", "4,1,1", None)))

    table = with_counters(kernel_table(trace), trace, joined, group_by=("name",))

    assert table.select("name", "sm_throughput").rows() == [("gemm", 0.5), ("add", None)]
    both = join_counters(trace, launches(("gemm", "4,1,1", 0.2), ("gemm", "4,1,1", 0.8)))
    mean = with_counters(kernel_table(trace), trace, both, group_by=("name",))["sm_throughput"][0]
    assert mean == pytest.approx((10 * 0.2 + 11 * 0.8) / 21)


def test_the_command_shows_them_and_says_how_many_found_their_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded("gemm<128, true>(float*, int)", "other", grid="[8, 2, 1]").trace().save(tmp_path / "trace")
    path = written(tmp_path, RAW.replace("(128, 1, 1)", "(1, 1, 1)"))

    code = main(["kernels", str(tmp_path / "trace"), "--ncu", str(path), "--format", "csv"])

    out, err = capsys.readouterr()
    assert code == 0
    header, first, _ = out.splitlines()
    assert header.endswith("sm_throughput,memory_throughput,dram_throughput,achieved_occupancy,tensor_pipe")
    assert "0.8025,,0.1,0.495,0.61" in out
    assert "1 of 2 works have counters of" in err
    assert "1 of 2 measurements are of kernels this trace lacks" in err
    assert main(["kernels", str(tmp_path / "trace"), "--ncu", str(path), "--launches"]) == 2
    assert main(["kernels", str(tmp_path / "trace"), "--ncu", str(tmp_path / "none")]) == 2
    assert first
