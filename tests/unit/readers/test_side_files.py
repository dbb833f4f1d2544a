"""Files that a run leaves beside its trace: PyTorch/XLA's reports and logs, Intel Gaudi's metrics and fallback log."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import NotATraceError, UnreadableTraceError, UsageError
from stepscope.readers.side_files import (
    duration_ns,
    rank_in_name,
    read_fallback_log,
    read_gaudi_metrics,
    read_xla_debug_log,
    read_xla_metrics,
)
from stepscope.trace.metadata import CodePlace, Fallback, RunCounts, Tally, Trigger, joined

TRACES = os.environ.get("STEPSCOPE_TRACES")

REPORT = """\
Metric: CompileTime
  TotalSamples: 21
  Accumulator: 14s152ms226.398us
  ValueRate: 01s122ms235.590us / second
  Rate: 0.63438 / second
  Percentiles: 1%=866ms487.094us; 50%=02s035ms157.661us; 99%=06m09s401ms746.001us
Metric: TransferFromDeviceTime
  TotalSamples: 11
  Accumulator: 015ms308.766us
  Percentiles: 1%=061.236us; 99%=005ms841.918us
Metric: InboundData
  TotalSamples: 14
  Accumulator: 56.00B
  Percentiles: 1%=4.00B; 99%=4.00B
Counter: MarkStep
  Value: 11
Counter: UncachedCompile
  Value: 21
Counter: aten::_local_scalar_dense
  Value: 7
Counter: aten::_ctc_loss
  Value: 5
Counter: xla::add
  Value: 98
"""


def written(folder: Path, text: str, name: str = "file.txt") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_metrics_report_among_other_output(tmp_path: Path) -> None:
    path = written(tmp_path, f"epoch 1, loss 3.2\n{REPORT}\nCounter: done\nepoch 2\n  Value: 7\n")

    assert read_xla_metrics(path) == RunCounts(
        sources=(str(path),),
        steps=11,
        compilations=Tally(21, 14_152_226_398, 369_400_746_001),
        transfers_out=Tally(11, 15_308_766, 4_841_918),
        scalar_reads=7,
        missed=21,
        fallbacks=(Fallback("aten::_ctc_loss", 5),),
    )


def test_of_several_reports_the_last_counts_and_cleared_counters_are_added_up(tmp_path: Path) -> None:
    counts = [3, 8, 2, 4]  # met.clear_all() between the second and the third
    text = "".join(
        f"Metric: CompileTime\n  TotalSamples: {count}\n  Accumulator: {count}00.000us\n" for count in counts
    )

    assert read_xla_metrics(written(tmp_path, text)).compilations == Tally(12, 1_200_000)


def test_reports_of_old_versions(tmp_path: Path) -> None:
    text = "Metric: TransferFromServerTime\n  TotalSamples: 2\n  Counter: 06m09s401ms746.001us\n"

    assert read_xla_metrics(written(tmp_path, text)).transfers_out == Tally(2, 369_400_746_001)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("061.236us", 61_236),
        ("002ms768.928us", 1_768_928),  # printed with its milliseconds rounded up
        ("002ms228.638us", 2_228_638),
        ("186ms646.498us", 185_646_498),
        ("14s152ms226.398us", 14_152_226_398),
        ("02s900ms000.000us", 1_900_000_000),
        ("01d02h03m04s005ms006.007us", 93_784_005_006_007),
        ("56.00B", None),
        ("1146.00", None),
        ("", None),
        ("9" * 40 + "us", None),
    ],
)
def test_times_as_the_report_spells_them(text: str, ns: int | None) -> None:
    assert duration_ns(text) == ns


def spelt(ns: int) -> str:
    """As torch_xla's MetricFnTime spells it: each part rounded, and only its whole units taken off."""
    rest, text, begun = ns, "", False
    for name, unit, digits in (("d", 86_400, 2), ("h", 3600, 2), ("m", 60, 2), ("s", 1, 2), ("ms", 0.001, 3)):
        unit_ns = round(unit * 10**9)
        if rest >= unit_ns or begun:
            rounded = (2 * rest + unit_ns) // (2 * unit_ns)
            text, rest, begun = text + f"{rounded:0{digits}}{name}", rest % unit_ns, True
    return text + f"{rest // 1000:03}.{rest % 1000:03}us"


@settings(deadline=None)
@given(st.integers(0, 10**15))
def test_every_time_is_read_back_exactly(ns: int) -> None:
    assert duration_ns(spelt(ns)) == ns


@pytest.mark.traces
@pytest.mark.skipif(not TRACES, reason="STEPSCOPE_TRACES is not set")
def test_a_real_report_whose_mean_times_its_count_is_its_sum() -> None:
    evidence = read_xla_metrics(Path(str(TRACES)) / "xplane" / "torch_xla_metrics_report.txt")

    # 14.834410 ms/s over 1.11869/s is 13.2605 ms, 14 times that 185.65 ms: the file spells 186ms646.498us.
    assert evidence == RunCounts(
        sources=evidence.sources,
        steps=14,
        compilations=Tally(8, 14_152_226_398, 2_373_375_231),
        executions=Tally(14, 185_646_498, 99_276_359),
        transfers_out=Tally(14, 15_308_766, 4_841_918),
        scalar_reads=14,
        cached=6,
        missed=8,
    )


FRAMES = """\
{0} Analysis: Python Frame Triggered Execution: 
{0} Analysis:   sync (/opt/site-packages/torch_xla/torch_xla.py:87)
{0} Analysis:   train (/home/user/train.py:48)
{0} Analysis:   <module> (/home/user/train.py:73)
{0} Analysis:   ..........
{0} Analysis: --------------------------------------------------------------------------------
{0} Analysis: ================================================================================
"""  # noqa: W291 - as it is printed
BLOCK = """
{0} Analysis: ================================================================================
{0} Analysis: {0} Cause
{0} Analysis:   {1}
{0} Analysis: Graph Info: 
{0} Analysis:   Graph Hash: c74c3b91b855b2b123f833b0d5f86943
{0} Analysis:   Number of Graph Inputs: 35
"""  # noqa: W291
POST = """
Post Compilation Analysis: ================================================================================
Post Compilation Analysis: Graph input size: 1.548000 GB
Post Compilation Analysis: --------------------------------------------------------------------------------
"""
STACK = (
    CodePlace("sync", "/opt/site-packages/torch_xla/torch_xla.py", 87),
    CodePlace("train", "/home/user/train.py", 48),
    CodePlace("<module>", "/home/user/train.py", 73),
)


def test_debugging_output(tmp_path: Path) -> None:
    def block(kind: str, cause: str) -> str:
        return BLOCK.format(kind, cause) + FRAMES.format(kind)

    access = "most likely user code trying to access tensor value before mark_step"
    text = "".join(
        [
            block("Compilation", "user mark_step"),
            POST,
            "loss 3.1\n",
            block("Execution", "user mark_step"),
            block("Execution", access),
            block("Compilation", "user mark_step"),
            block("Execution", access),
            "[rank0] pt-xla-profiler: CompileTime too frequent: 21 counts during 11 steps\n",
            "pt-xla-profiler: CompileTime too slow: longest instance took 06m09s401ms746.001us. Please open an issue\n",
            "pt-xla-profiler: TransferFromDeviceTime too frequent: 11 counts during 11 steps\n",
            "pt-xla-profiler: Op(s) not lowered: aten::_ctc_loss, aten::_ctc_loss_backward,  Please open an issue\n",
            "pt-xla-profiler: CompileTime too frequent: 23 counts during 12 steps\n",
            BLOCK.format("Compilation", "cut off before its end"),
        ]
    )
    path = written(tmp_path, text)

    assert read_xla_debug_log(path) == RunCounts(
        sources=(str(path),),
        steps=12,
        compilations=Tally(23, None, 369_400_746_001),
        executions=Tally(3),
        transfers_out=Tally(11),
        fallbacks=(Fallback("aten::_ctc_loss"), Fallback("aten::_ctc_loss_backward")),
        compile_triggers=(Trigger("user mark_step", STACK, 2),),
        execute_triggers=(Trigger(access, STACK, 2), Trigger("user mark_step", STACK, 1)),
    )


def entry(name: str, trigger: str = "metric_change", **statistics: object) -> str:
    return json.dumps(
        {
            "metric_name": name,
            "triggered_by": trigger,
            "generated_on": "2024-05-01T10:00:00.000001",
            "statistics": statistics,
        }
    )


METRICS = ",\n".join(
    [
        entry("graph_compilation", TotalNumber=1, TotalTime=2_500_000, AvgTime=2_500_000.0),
        entry("graph_compilation", TotalNumber=2, TotalTime=4_000_000, AvgTime=2_000_000.0),
        entry("cpu_fallback", TotalNumber=3, FallbackOps={"aten::digamma": 2, "nonzero": 1}),
        entry("recipe_cache", TotalHit=18, TotalMiss=2, RecipeHit={}, RecipeMiss={}),
        entry("memory_defragmentation", TotalNumber=0, TotalSuccessful=0, AvgTime=0, MaxTime=0),
    ]
)


@pytest.mark.parametrize(
    "end", ["]\n", "", ",\n", ',\n{"metric_name": "graph_comp'], ids=["whole", "open", "comma", "cut"]
)
def test_a_gaudi_metrics_file_that_was_closed_or_not(tmp_path: Path, end: str) -> None:
    path = written(tmp_path, f"[{METRICS}{end}", "metrics-rank3.json")

    assert read_gaudi_metrics(path) == RunCounts(
        sources=(str(path),),
        compilations=Tally(2, 4_000_000_000),  # TotalTime counts microseconds
        cached=18,
        missed=2,
        fallbacks=(Fallback("aten::digamma", 2), Fallback("aten::nonzero", 1)),
    )


def test_compilations_after_the_tenth_step_are_told_where_each_step_wrote_its_counts(tmp_path: Path) -> None:
    steps = [entry("graph_compilation", "mark_step", TotalNumber=2 + step, TotalTime=1000) for step in range(14)]

    evidence = read_gaudi_metrics(written(tmp_path, f"[{','.join(steps)}]"))

    assert (evidence.steps, evidence.late_compilations, evidence.compiles_too_often) == (14, 4, True)


def test_counts_that_the_program_reset_are_added_up(tmp_path: Path) -> None:
    path = written(
        tmp_path, f"[{entry('graph_compilation', TotalNumber=5)},{entry('graph_compilation', TotalNumber=2)}]"
    )

    assert read_gaudi_metrics(path).compilations == Tally(7)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("m-rank0.json", 0), ("a/m.txt-rank12.json", 12), ("m-rank7", 7), ("m.json", None), ("rank3", None)],
)
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_a_fallback_log_with_its_table(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "loss 1\n"
        "[10:00:01.1][PT_FALLBACK][info ][tid:7] CPU fallback digamma : self=HPUBFloat16Type\n"
        "CPU fallback digamma : self=HPUFloatType\n"
        "CPU fallback aten::nonzero : self=HPUBoolType\n"
        "Frequency of op and op name that were executed on CPU:\n"
        "(Set env var PT_HPU_LOG_TYPE_MASK=0 to disable this print)\n"
        "12\taten::digamma\n"
        "1       aten::median\n"
        "done\n"
        "3 aten::after_the_table\n",
    )

    assert read_fallback_log(path) == RunCounts(
        sources=(str(path),),
        fallbacks=(
            Fallback("aten::digamma", 12, "self=HPUBFloat16Type"),
            Fallback("aten::median", 1),
            Fallback("aten::nonzero", 1, "self=HPUBoolType"),
        ),
    )


READERS = [read_xla_metrics, read_xla_debug_log, read_gaudi_metrics, read_fallback_log]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "text",
    [
        "nothing of the kind\n",
        "[1, 2, 3]",
        '[{"metric_name": 7, "statistics": {"TotalNumber": 1}}, {"metric_name": "a"}]',
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "Metric: \n  TotalSamples: 3\n",
        "Compilation Analysis: Compilation Cause\n",
        "x" * 300_000,
    ],
    ids=range(8),
)
def test_what_is_something_else_is_refused_in_a_sentence(reader: object, text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)

    with pytest.raises(UsageError, match=r"file.txt (contains no|is not a) "):
        reader(path)  # type: ignore[operator]


@pytest.mark.parametrize("reader", READERS)
def test_files_that_cannot_be_read(reader: object, tmp_path: Path) -> None:
    with pytest.raises(UnreadableTraceError, match="there is no file"):
        reader(tmp_path / "nowhere")  # type: ignore[operator]
    with pytest.raises(NotATraceError, match="is empty"):
        reader(written(tmp_path, ""))  # type: ignore[operator]


def test_packed_files_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "report.txt.gz"
    path.write_bytes(gzip.compress(b"\xff\xfe\x00\n" + REPORT.encode()))

    assert read_xla_metrics(path).steps == 11


def test_a_count_beside_an_invisible_separator_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_text("Metric: CompileTime\n  TotalSamples: \x1c21\n  Accumulator: 1s\n")

    assert read_xla_metrics(path).compilations == Tally(21)


@pytest.mark.parametrize("reader", READERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damage_ends_in_a_sentence_or_an_answer(reader: object, data: st.DataObject, tmp_path_factory: object) -> None:
    whole = (REPORT + BLOCK.format("Compilation", "x") + FRAMES.format("Compilation") + f"[{METRICS}]").encode()
    place = data.draw(st.integers(0, len(whole) - 1))
    junk = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.mktemp("damage") / "file"  # type: ignore[attr-defined]
    path.write_bytes(whole[:place] + junk + whole[place + data.draw(st.integers(0, 20)) :])

    with contextlib.suppress(UsageError, UnreadableTraceError):
        assert isinstance(reader(path), RunCounts)  # type: ignore[operator]


@pytest.mark.parametrize("reader", READERS)
def test_what_only_begins_like_a_packed_file_cannot_be_read(reader: object, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"(\xb5/\xfd" + REPORT.encode())

    with pytest.raises(UnreadableTraceError, match="unpacked"):
        reader(path)  # type: ignore[operator]


def test_hostile_counts_are_bounded(tmp_path: Path) -> None:
    names = "".join(f"Counter: aten::op{number}\n  Value: {10**19 - 1}\n" for number in range(12_000))
    evidence = read_xla_metrics(written(tmp_path, names))
    huge = read_gaudi_metrics(
        written(
            tmp_path,
            f"[{entry('graph_compilation', TotalNumber=1e300, TotalTime=-5)}, {entry('cpu_fallback', TotalNumber=2)}]",
        )
    )

    assert len(evidence.fallbacks) == 10_000
    assert {each.count for each in evidence.fallbacks} == {2**62}
    assert huge.compilations is None


def test_a_log_that_is_one_endless_line_is_searched_once(tmp_path: Path) -> None:
    evidence = read_fallback_log(
        written(tmp_path, "CPU fallback " * 2**20 + "\nCPU fallback aten::nonzero : a" + "b" * 2_000)
    )

    assert evidence.fallbacks[-1] == Fallback("aten::nonzero", 1, "a" + "b" * 199)


def test_joined_evidence_counts_nothing_twice() -> None:
    first = RunCounts(
        sources=("a",),
        steps=4,
        compilations=Tally(3, 5000),
        fallbacks=(Fallback("aten::x", 1), Fallback("aten::y", 9)),
        compile_triggers=(Trigger("c", STACK, 1),),
    )
    second = RunCounts(
        sources=("b",),
        compilations=Tally(2, None, 70),
        fallbacks=(Fallback("aten::x", 4, "types"),),
        compile_triggers=(Trigger("d", (), 1), Trigger("c", STACK, 2)),
    )

    assert joined([first, second]) == RunCounts(
        sources=("a", "b"),
        steps=4,
        compilations=Tally(3, 5000, 70),
        fallbacks=(Fallback("aten::y", 9), Fallback("aten::x", 4, "types")),
        compile_triggers=(Trigger("c", STACK, 3), Trigger("d", (), 1)),
    )
    assert joined([]) == RunCounts()


@pytest.mark.parametrize(
    ("evidence", "often"),
    [
        (RunCounts(), False),
        (RunCounts(steps=10, compilations=Tally(10)), False),
        (RunCounts(steps=11, compilations=Tally(5)), False),
        (RunCounts(steps=11, compilations=Tally(6)), True),
        (RunCounts(steps=20, compilations=Tally(30), late_compilations=5), False),
        (RunCounts(steps=20, compilations=Tally(30), late_compilations=6), True),
    ],
)
def test_how_often_is_too_often(evidence: RunCounts, often: bool) -> None:
    assert evidence.compiles_too_often is often


def test_how_many_reads_are_too_many() -> None:
    assert not RunCounts(steps=14, transfers_out=Tally(7)).reads_too_often
    assert RunCounts(steps=14, transfers_out=Tally(8)).reads_too_often
    assert not RunCounts(transfers_out=Tally(8)).reads_too_often
