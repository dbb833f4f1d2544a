"""Logs of collectives: who does not come, what does not match, and who comes late, against planted faults."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.desync import Desync, desync
from stepscope.commands import main
from stepscope.errors import UnreadableTraceError
from stepscope.readers import trace_files
from stepscope.readers.collective_logs import collective_logs, is_collective_log, kind_of_log, log_files
from stepscope.report.desync import desync_document, desync_json, headline
from stepscope.report.text import text_of
from tests.simulator import kineto_bytes
from tests.simulator.collective_logs import (
    ELEMENTS,
    TRANSFER_NS,
    UNDONE,
    US,
    dump,
    entry,
    inspected,
    write_dumps,
    write_inspected,
)
from tests.simulator.ranks import rank_machine

RECORDED = Path(__file__).parents[2] / "fixtures/flight_recorder"


def found_in(folder: Path) -> Desync:
    return desync(collective_logs(log_files(folder)))


def test_a_rank_of_gloo_that_does_not_come_is_named() -> None:
    found = found_in(RECORDED / "hang")
    [one] = found.unfinished
    assert (one.name, one.number, one.waiting, one.missing, one.unlogged) == ("all_reduce", 4, (0,), (1,), ())
    assert (found.causes, found.mismatches) == ((1,), ())
    name, place = one.calls[0]
    assert (name, place.startswith("/home/user/train.py:")) == ("all_reduce", True)
    last = found.last_calls[1]
    assert (last.name, last.number, last.is_done) == ("all_reduce", 3, True)
    assert one.since_ns is not None


def test_different_calls_of_gloos_ranks_are_told_apart() -> None:
    found = found_in(RECORDED / "order")
    [one] = found.mismatches
    assert (one.what, one.number, one.ranks) == ("call", 4, {"all_reduce": (0,), "broadcast": (1,)})
    [waits] = found.unfinished
    assert {process: name for process, (name, _) in waits.calls.items()} == {0: "all_reduce", 1: "broadcast"}
    assert dict(waits.calls.values()) == one.places
    assert not waits.is_cause


def test_the_rank_that_waits_in_another_group_is_not_the_cause() -> None:
    """Rank 3 comes to nothing; rank 2 waits for it in their own group, and the others for both."""
    found = found_in(RECORDED / "groups")
    assert found.causes == (3,)
    assert {(each.number, each.waiting, each.missing, each.is_cause) for each in found.unfinished} == {
        (4, (0, 1), (2, 3), True),
        (1, (2,), (), False),
    }
    assert (found.last_calls[2].group, found.last_calls[2].number) == ("2", 1)


@pytest.mark.parametrize("as_json", [False, True])
def test_both_forms_of_a_dump_say_the_same(tmp_path: Path, as_json: bool) -> None:
    late = 150 * US
    last = [entry(number) for number in range(1, 6)]
    first = [entry(number, duration_ms=(TRANSFER_NS + late) / 1e6) for number in range(1, 6)]
    write_dumps(tmp_path, 4, lambda rank: last if rank == 2 else first, as_json=as_json)
    found = found_in(tmp_path)
    assert (found.by, found.unfinished, found.mismatches) == ("time on the device", (), ())
    assert found.arrivals.row(0) == (2, 5, 5, 5 * late, 0)
    [rate] = found.rates.rows(named=True)
    assert (rate["kind"], rate["bytes"], rate["ranks"], rate["transfer_ns"]) == (
        "all_reduce",
        4 * ELEMENTS,
        4,
        TRANSFER_NS,
    )
    assert rate["algorithm_gb_per_s"] == pytest.approx(4 * ELEMENTS / TRANSFER_NS)
    assert rate["bus_gb_per_s"] == pytest.approx(1.5 * 4 * ELEMENTS / TRANSFER_NS)
    assert "rank 2" in headline(collective_logs(log_files(tmp_path)), found)


@pytest.mark.parametrize(
    ("changed", "what", "values"),
    [
        ({"input_sizes": [[7]]}, "size", [f"{ELEMENTS} numbers", "7 numbers"]),
        ({"input_dtypes": ["Half"]}, "number type", ["Float", "Half"]),
        ({"profiling_name": "nccl:_all_gather_base"}, "call", ["all_reduce", "_all_gather_base"]),
    ],
)
def test_what_differs_is_told(tmp_path: Path, changed: dict[str, Any], what: str, values: list[str]) -> None:
    write_dumps(tmp_path, 3, lambda rank: [entry(1), entry(2, **(changed if rank == 2 else {})), entry(3)])
    [one] = found_in(tmp_path).mismatches
    assert (one.number, one.what, one.ranks) == (2, what, {values[0]: (0, 1), values[1]: (2,)})


def test_sizes_that_may_differ_do_not_count(tmp_path: Path) -> None:
    uneven: dict[str, Any] = {"profiling_name": "nccl:all_to_all"}
    write_dumps(tmp_path, 2, lambda rank: [entry(1, **uneven, input_sizes=[[rank + 1]])])
    assert found_in(tmp_path).mismatches == ()


def test_a_device_that_has_not_begun_is_told_from_those_that_have(tmp_path: Path) -> None:
    queued: dict[str, Any] = {**UNDONE, "state": "scheduled", "time_discovered_started_ns": None}
    write_dumps(tmp_path, 3, lambda rank: [entry(1), entry(2, **(queued if rank == 1 else UNDONE))])
    [one] = found_in(tmp_path).unfinished
    assert (one.waiting, one.missing, one.not_started) == ((0, 1, 2), (), (1,))


def test_a_rank_without_a_log_is_named(tmp_path: Path) -> None:
    write_dumps(tmp_path, 3, lambda _: [entry(1), entry(2, **UNDONE)])
    (tmp_path / "nccl_trace_rank_1").unlink()
    [one] = found_in(tmp_path).unfinished
    assert one.unlogged == (1,)


def test_calls_that_a_full_buffer_dropped_are_not_missing(tmp_path: Path) -> None:
    """Rank 1 made its only call of the pair long ago."""
    pair: dict[str, Any] = {"pg_id": 1, "process_group": ("1", "mesh_1")}
    for rank in range(2):
        later = [entry(number, record_id=number + 100) for number in range(1, 3)]
        calls = [entry(1, record_id=50, **pair), *later] if rank == 0 else later
        content = dump(calls, {"0": [0, 1], "1": [0, 1]})
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    assert found_in(tmp_path).unfinished == ()


def test_ranks_that_wait_for_each_other_in_different_groups(tmp_path: Path) -> None:
    other: dict[str, Any] = {"pg_id": 1, "process_group": ("1", "mesh_1")}
    calls = [[entry(1, **UNDONE)], [entry(1, **other, **UNDONE)]]
    for rank, mine in enumerate(calls):
        content = dump(mine, {"0": [0, 1], "1": [0, 1]})
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content, protocol=2))
    found = found_in(tmp_path)
    assert found.causes == ()
    assert not any(each.is_cause for each in found.unfinished)


def test_the_inspectors_late_rank_and_rates(tmp_path: Path) -> None:
    late = 200 * US
    for rank in range(4):
        took = TRANSFER_NS if rank == 3 else TRANSFER_NS + late
        how = {"coll_algo": "RING", "coll_proto": "LL128"} if rank else {}
        write_inspected(
            tmp_path / f"node0-{rank}.log", [inspected(rank, number, took, **how) for number in range(1, 4)]
        )
    logs = collective_logs(log_files(tmp_path))
    found = desync(logs)
    assert logs.kinds == ("NCCL Inspector",)
    assert logs.processes[found.arrivals["process"][0]].name == "rank 3"
    assert found.arrivals.row(0)[1:] == (3, 3, 3 * late, 0)
    assert found.rates["algorithm"].to_list() == ["RING LL128"]
    assert found.rates["bus_gb_per_s"].to_list() == pytest.approx([1.5 * 4 * ELEMENTS / TRANSFER_NS])


def test_the_group_with_a_slow_link_is_told_from_like_ones(tmp_path: Path) -> None:
    for group in range(4):
        took = TRANSFER_NS * (2 if group == 2 else 1)
        records = [
            inspected(rank, number, took, group=f"0x{group}", ranks=2, pid=10 * group + rank)
            for rank in range(2)
            for number in range(1, 4)
        ]
        write_inspected(tmp_path / f"group{group}.json", records)
    found = found_in(tmp_path)
    [(kind, size, group_name, rate, median)] = found.slow
    assert (kind, size, group_name) == ("all_reduce", 4 * ELEMENTS, "0x2")
    assert (rate, median) == pytest.approx((4 * ELEMENTS / TRANSFER_NS / 2, 4 * ELEMENTS / TRANSFER_NS))


def test_times_that_the_host_measured_tell_nothing(tmp_path: Path) -> None:
    write_inspected(tmp_path / "a.log", [inspected(rank, 1, coll_timing_source="collective_cpu") for rank in range(4)])
    found = found_in(tmp_path)
    assert (found.by, found.rates.height) == ("", 0)


def test_a_healthy_job_is_not_blamed(tmp_path: Path) -> None:
    write_dumps(tmp_path, 4, lambda _: [entry(number) for number in range(1, 5)])
    logs = collective_logs(log_files(tmp_path))
    found = desync(logs)
    assert (found.unfinished, found.mismatches, found.slow, found.causes) == ((), (), (), ())
    assert "match and are done" in headline(logs, found)


def test_logs_without_a_call_say_nothing_is_there(tmp_path: Path) -> None:
    write_dumps(tmp_path, 2, lambda _: [])
    logs = collective_logs(log_files(tmp_path))
    assert headline(logs, desync(logs)).startswith("No call is logged")


def test_a_pickle_with_objects_is_refused_and_the_rest_is_read(tmp_path: Path) -> None:
    write_dumps(tmp_path, 2, lambda _: [entry(1)])
    hostile = b"\x80\x02}X\x09\x00\x00\x00pg_configcos\nsystem\n(X\x04\x00\x00\x00trueR."
    (tmp_path / "nccl_trace_rank_2").write_bytes(hostile)
    (tmp_path / "nccl_trace_rank_0").unlink()
    logs = collective_logs(log_files(tmp_path))
    assert len(logs.processes) == 1
    assert "of rank 0 there is no log" in headline(logs, desync(logs))
    [(path, reason)] = logs.unreadable
    assert path.endswith("rank_2")
    assert "which could run code" in reason
    with pytest.raises(UnreadableTraceError, match="which could run code"):
        collective_logs(log_files(tmp_path / "nccl_trace_rank_2"))


def test_a_second_dump_of_a_rank_is_left_out(tmp_path: Path) -> None:
    write_dumps(tmp_path, 2, lambda _: [entry(1)])
    write_dumps(tmp_path, 2, lambda _: [entry(1)], as_json=True)
    logs = collective_logs(log_files(tmp_path))
    assert (len(logs.processes), len(logs.unreadable)) == (2, 2)


def test_values_of_other_types_are_left_out(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"input_sizes": [["a"]], "input_dtypes": 7, "duration_ms": "x", "frames": [7], "state": None}
    calls: list[Any] = [entry(1, **odd), entry(2, collective_seq_id=-1), 7, entry(3, profiling_name="nccl:\ud800")]
    write_dumps(tmp_path, 1, lambda _: calls, as_json=True)
    impossible = inspected(0, 4)
    impossible["header"]["n_ranks"] = -(10**30)
    write_inspected(tmp_path / "node0.log", [impossible, inspected(0, 5)])
    logs = collective_logs(log_files(tmp_path))
    assert sorted(logs.calls["number"]) == [1, 3, 5]
    desync(logs)


def test_lists_that_a_pickle_shares_are_not_read_again_and_again(tmp_path: Path) -> None:
    nested: list[Any] = [1]
    for _ in range(60):
        nested = [nested, nested]
    content = dump([entry(1, input_sizes=[[1] * 10_000] * 10_000)], {"0": [0]})
    content["pg_config"]["1"] = {"ranks": nested}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(content))
    logs = collective_logs(log_files(tmp_path))
    assert logs.members == {"0 (default_pg)": (0,)}
    assert logs.calls["elements_in"].to_list() == [None]


def test_the_command_answers_a_folder_of_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(RECORDED / "hang"), "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)["collectives"]
    assert (answer["causes"], answer["unfinished"][0]["waiting"]) == (["rank 1"], ["rank 0"])
    assert (
        main(
            [
                "diagnose",
                str(RECORDED / "hang" / "nccl_trace_rank_0"),
                str(RECORDED / "hang" / "nccl_trace_rank_1"),
                "--redact",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "Rank 1 has not come" in text
    assert "/home/user" not in text


def test_an_assistant_gets_dumps_as_data_and_no_more_than_it_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(RECORDED / "groups"), "--for-assistant", "--tokens", "300"]) == 0
    text = capsys.readouterr().out
    begin = text.index("<<< ")
    assert "train.py" not in text[:begin]
    assert text.rstrip().endswith(f">>> {text[begin + 4 : begin + 20]}")
    assert len(text) < 300 * 3 + 400


def test_a_damaged_log_does_not_keep_traces_from_being_diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.json").write_bytes(kineto_bytes(rank_machine((False,) * 3, layers=2)))
    (tmp_path / "nccl_trace_rank_0").write_bytes((RECORDED / "hang" / "nccl_trace_rank_0").read_bytes()[:900])
    assert main(["diagnose", str(tmp_path), "--no-cache", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert "collectives" not in json.loads(told.out)
    assert "nccl_trace_rank_0" in told.err


def test_logs_are_no_traces(tmp_path: Path) -> None:
    write_inspected(tmp_path / "node0.json", [inspected(0, 1)])
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    assert [file.name for file in trace_files(tmp_path)] == ["trace.json"]
    assert not is_collective_log(tmp_path / "trace.json")
    header = b'{"schemaVersion": 1, "distributedInfo": {"rank": 0, "pg_config": [{"pg_name": "0"}]}, '
    assert kind_of_log(header) is None
    assert kind_of_log(header.replace(b'"schemaVersion": 1, ', b"")) is None


def test_documents_hold_what_was_found(tmp_path: Path) -> None:
    logs = collective_logs(log_files(RECORDED / "groups"))
    found = desync(logs)
    assert "ranks 0 and 1 wait; rank 3" in " ".join(text_of(desync_document("groups", logs, found), width=200).split())
    assert desync_json("groups", logs, found)["collectives"]["causes"] == ["rank 3"]
